"""What an earlier version wrote opens and goes on: a data directory, a registry, runs and a sweep, all made by 0.1.

`files-0.1.tar.gz` was made by version 0.1 with `sparring up`, `play`, `train` (PPO, DQN) and `sweep` on CartPole. Never
make it anew: it is only worth something as long as it is old. Keyspaces: tests/store/test_cassandra.py.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.experience import new_id
from sparring.registry.registry import Registry
from sparring.store import Outcome, open_store
from sparring.trainer.process import GameTrainer, Settings

GAME = "CartPole-v1"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    shutil.unpack_archive(Path(__file__).parent / "files-0.1.tar.gz", tmp_path)
    return tmp_path


def sparring(cwd: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sparring.cli", *words], cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_older_store_is_read_and_written(older: Path) -> None:
    store = open_store(str(older / "data"))
    try:
        assert store.stats(GAME).steps == 2821
        fragments = store.tail(GAME, 0, 1000).fragments
        assert len(fragments) == 120
        assert len(store.episodes(GAME)) == 120
        bots = sum(f.steps for f in fragments if f.model is not None)
        assert store.stats(GAME).bot_steps == sum(p.bot_steps for p in store.players(GAME)) == bots
        again = fragments[0]
        assert store.append([again]) == [Outcome.DUPLICATE]
        assert store.append([type(again)(**{**as_fields(again), "id": new_id()})]) == [Outcome.STORED]
        player = store.players(GAME)[0]
        assert store.erase(GAME, player.player) >= 60
    finally:
        store.close()


def as_fields(fragment: object) -> dict[str, object]:
    return {name: getattr(fragment, name) for name in fragment.__struct_fields__}  # type: ignore[attr-defined]


def test_an_older_live_training_goes_on(older: Path) -> None:
    registry = Registry(older / "data" / "registry")
    published = registry.latest(GAME, "bot")
    assert published is not None
    assert published.version == 2
    store = open_store(str(older / "data"), readonly=True)
    try:
        game = next(game for game in store.games() if game.name == GAME)
        trainer = GameTrainer(store, registry, older / "data" / "trainer" / GAME, game, Settings())
        assert trainer.learner.updates == 704
        assert trainer.learner.steps == 2821
        trainer.checkpoint()
    finally:
        store.close()


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_an_older_run_is_resumed(older: Path, name: str) -> None:
    steps = {"ppo": 6000, "dqn": 2000}[name]
    before = len((older / "runs" / name / "metrics.jsonl").read_text().splitlines())
    sparring(older, "train", f"runs/{name}", "--resume", "--set", f"stop.steps={steps}")
    assert len((older / "runs" / name / "metrics.jsonl").read_text().splitlines()) > before
    sparring(older, "eval", f"runs/{name}", "--episodes", "2")


@pytest.mark.real
def test_an_older_sweep_goes_on(older: Path) -> None:
    sparring(older, "sweep", "sweep", "--resume", "--set", "tune.samples=3")
    assert (older / "sweep" / "trials" / "002" / "policy.onnx").exists()
