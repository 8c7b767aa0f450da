# Two commands: `make demo` and `make test`. Each sets up what it needs first; set-up is redone only when the locks change.
# `make check` is the quick subset for the inner loop.
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
INSTALL = VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip install --quiet --compile-bytecode

.PHONY: demo test check lint types lock bench peers clean

demo: .venv/.platform
	.venv/bin/sparring demo

test: .venv/.dev .venv/.system lint types
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/.dev lint types
	.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "not real"

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/.dev
	.venv/bin/mypy

bench: .venv/.dev  ## the figures of docs/benchmarks.md; the machine should have nothing else to do
	for name in store cassandra_store ingest client; do .venv/bin/python benchmarks/$$name.py || exit 1; done

peers: .venv/.dev .venv-peers/.installed  ## speed beside SB3, SBX and RLlib (6 GB of their wheels)
	.venv/bin/python benchmarks/peers.py

lock: .venv/.uv  ## refresh the pinned versions after a change of pyproject.toml
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --extra platform pyproject.toml -o requirements/platform.txt
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --extra platform --extra train --extra ray --extra tune --extra rllib --extra cassandra --extra spark --extra bullet --extra box2d --extra atari --group dev pyproject.toml -o requirements/dev.txt
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --group peers -o requirements/peers.txt

.venv/.uv:
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	command -v uv >/dev/null || .venv/bin/python -m pip install --quiet uv
	@touch $@

.venv/.platform: .venv/.uv requirements/platform.txt pyproject.toml
	$(INSTALL) -r requirements/platform.txt
	$(INSTALL) --no-deps -e .
	@touch $@

.venv/.dev: .venv/.uv requirements/dev.txt pyproject.toml
	$(INSTALL) -r requirements/dev.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@ .venv/.platform

.venv-peers/.installed: .venv/.uv requirements/peers.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	VIRTUAL_ENV=$(CURDIR)/.venv-peers $(UV) pip install --quiet --compile-bytecode -r requirements/peers.txt
	@touch $@

.venv/.system: scripts/system-packages scripts/s3-server
	scripts/system-packages
	scripts/s3-server
	@mkdir -p .venv && touch $@

clean:
	rm -rf .venv .venv-peers .sparring
