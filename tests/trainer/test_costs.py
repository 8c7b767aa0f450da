"""What the live trainer takes: in the status of its games, and in their metrics."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_live import Setup, run_dry

from sparring.metering.sampler import Sampler
from sparring.store import open_store
from sparring.trainer import costs, process
from sparring.trainer.costs import Costs
from sparring.trainer.game_trainer import GameTrainer, Settings


class FakeSampler(Sampler):
    """Two looks, then none."""

    def __init__(self) -> None:
        self.rows = [{"usage/cpu": 0.5, "energy/rapl_j": 10.0}, {"usage/cpu": 0.25, "energy/rapl_j": 5.0}]

    def take(self) -> dict[str, float]:
        return self.rows.pop(0) if self.rows else {}


def test_usage_is_of_now_and_joules_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LOOKS_S", 0.0)
    found = Costs(FakeSampler())
    assert found.now() == {"usage/cpu": 0.5, "energy/rapl_j": 10.0}
    assert found.now() == found.now() == {"usage/cpu": 0.25, "energy/rapl_j": 15.0}
    assert Costs().now() == {}  # nobody looks: that is not zero


def test_every_game_says_what_the_trainer_takes(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    taken = Costs(FakeSampler())
    trainer = GameTrainer(setup.store, setup.registry, tmp_path / "trainer", setup.game, setup.settings, costs=taken)
    setup.feed(20)
    run_dry(trainer)
    status = json.loads((tmp_path / "trainer" / "status.json").read_bytes())
    assert status["costs"] == {"usage/cpu": 0.5, "energy/rapl_j": 10.0}
    trainer._note()
    row = json.loads((tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["usage/cpu"], row["energy/rapl_j"]) == (0.5, 10.0)


def test_the_process_looks_at_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, given, closed = FakeSampler(), [], []

    @contextlib.contextmanager
    def open_sampler() -> Iterator[Any]:
        yield sampler
        closed.append(True)

    class Roster:
        def __init__(self, *words: Any) -> None:
            given.append(words[-1])

        def stop(self) -> None:
            assert not closed

    open_store(str(tmp_path / "store.db")).close()
    monkeypatch.setattr(process, "open_sampler", open_sampler)
    monkeypatch.setattr(process, "Roster", Roster)
    monkeypatch.setattr(process, "stopping", lambda: True)
    process.run(tmp_path, Settings())
    assert given[0].now() == {"usage/cpu": 0.5, "energy/rapl_j": 10.0}
    assert closed == [True]


def test_it_is_this_machines_own_sampler() -> None:
    with costs.open_sampler() as sampler:
        assert sampler.every == costs.LOOKS_S
