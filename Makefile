# Two commands: `make demo` and `make test`. Each sets up what it needs first; set-up is redone only when the locks change.
# `make check` is the quick subset for the inner loop.
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
# With bytecode: some machines keep Python from writing it, and Ray's processes wait for each other while they compile.
INSTALL = VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip install --compile-bytecode
unexport PYTHONDONTWRITEBYTECODE
# Commands that the tests use, and the packages of Debian and Ubuntu that have them. Go and Node come as wheels.
SYSTEM = gcc=gcc gcc=libc6-dev chromium=chromium chromium=fonts-dejavu-core ip=iproute2 java=openjdk-17-jre-headless mvn=maven pgrep=procps openssl=openssl
# Company proxies have certificates of their own. A uv that is on the PATH may be older, and know the second name alone.
export UV_SYSTEM_CERTS = true
export UV_NATIVE_TLS = true

.PHONY: demo test nightly suite check lint types docs dist lock bench peers clean

demo: .venv/.platform
	.venv/bin/sparring demo

test:
	@$(MAKE) --no-print-directory -j2 .venv/.dev .venv/.system
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j2 types suite

nightly:  ## with the slow tests
	@$(MAKE) --no-print-directory test TESTS=

TESTS = -m "not slow"
suite: .venv/.dev .venv/.system
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 $(TESTS)

check: .venv/.dev lint types
	.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "not real and not heavy"

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/.dev
	.venv/bin/mypy

docs: .venv/.docs  ## the site, in site/
	ZENSICAL=.venv/bin/zensical scripts/docs-site

dist: .venv/.dev  ## what a release publishes: wheel and sdist in dist/, the list of what the platform is made of in sbom/
	rm -rf dist sbom && mkdir sbom
	.venv/bin/python -m hatchling build
	.venv/bin/cyclonedx-py requirements requirements/platform.txt --pyproject pyproject.toml --output-reproducible --output-file sbom/sparring.cdx.json

bench: .venv/.dev  ## figures of docs/benchmarks.md, an hour of them; the machine should have nothing else to do
	for name in store cassandra_store ingest client convolutions metering; do .venv/bin/python benchmarks/$$name.py || exit 1; done
	taskset -c 0 .venv/bin/python benchmarks/inference.py

peers: .venv/.dev .venv-peers/.installed  ## speed beside SB3, SBX and RLlib (6 GB of their wheels)
	.venv/bin/python benchmarks/peers.py

lock: .venv/.uv  ## refresh the pinned versions after a change of pyproject.toml
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --extra platform pyproject.toml -o requirements/platform.txt
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --extra platform --extra train --extra ray --extra tune --extra rllib --extra cassandra --extra spark --extra aws --extra data --extra mlflow --extra wandb --extra bullet --extra box2d --extra atari --extra edge --extra energy --group dev pyproject.toml -o requirements/dev.txt
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --extra platform --group docs -c requirements/dev.txt pyproject.toml -o requirements/docs.txt
	$(UV) pip compile --quiet --no-emit-index-url --universal --python-version 3.11 --group peers -o requirements/peers.txt

.venv/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Sparring needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || command -v apt-get >/dev/null || { echo "$(PYTHON) cannot make environments: please install its modules venv and ensurepip" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || scripts/system-packages venv=python3-venv
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	command -v uv >/dev/null || .venv/bin/python -m pip install --quiet uv
	@touch $@

.venv/.platform: .venv/.uv requirements/platform.txt pyproject.toml
	$(INSTALL) -r requirements/platform.txt
	$(INSTALL) --no-deps -e .
	@touch $@

.venv/.docs: .venv/.uv requirements/docs.txt pyproject.toml
	$(INSTALL) -r requirements/docs.txt
	$(INSTALL) --no-deps -e .
	@touch $@ .venv/.platform

.venv/.dev: .venv/.uv requirements/dev.txt pyproject.toml
	$(INSTALL) -r requirements/dev.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@ .venv/.platform .venv/.docs

.venv-peers/.installed: .venv/.uv requirements/peers.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	VIRTUAL_ENV=$(CURDIR)/.venv-peers $(UV) pip install --compile-bytecode -r requirements/peers.txt
	@touch $@

.venv/.system: .venv/.uv scripts/test-servers scripts/system-packages scripts/s3-server scripts/kinesalite scripts/cassandra scripts/proxy
	scripts/test-servers $(SYSTEM)
	@touch $@

clean:
	rm -rf .venv .venv-peers .sparring .cache site dist sbom
