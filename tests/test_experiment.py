"""Experiments: lossless as YAML; mistakes are reported by key, path and the nearest right one."""

import subprocess
import sys

import pytest

from sparring.errors import InputError
from sparring.experiment import Evaluation, Experiment, Rollout, Stop, override, read, write

FULL = Experiment(
    game="CartPole-v1",
    algorithm={"name": "dqn", "lr": 1e-4, "layers": [{"layer": "dense", "units": 32}], "double": False},
    rollout=Rollout(workers=2, envs=8, limit=5.5),
    stop=Stop(steps=10, return_=-200.0),
    evaluation=Evaluation(every=3, episodes=4),
    seed=7,
    out="somewhere",
)


def test_yaml_is_lossless(tmp_path):
    write(tmp_path / "e.yaml", FULL)
    assert read(tmp_path / "e.yaml") == FULL


def test_overrides_are_yaml_values(tmp_path):
    write(tmp_path / "e.yaml", FULL)
    changed = read(tmp_path / "e.yaml", ["algorithm.lr=1e-3", "rollout.workers=0", "stop.return=475", "out=other"])
    assert changed.algorithm["lr"] == 0.001
    assert changed.rollout == Rollout(workers=0, envs=8, limit=5.5)
    assert changed.stop == Stop(steps=10, return_=475.0)
    assert changed.out == "other"


def test_whole_numbers_may_be_written_short(tmp_path):
    write(tmp_path / "e.yaml", FULL)
    changed = read(tmp_path / "e.yaml", ["stop.steps=2e6", "algorithm.lr=1e0", "stop.seconds=2.0"])
    assert (changed.stop.steps, changed.algorithm["lr"], changed.stop.seconds) == (2_000_000, 1, 2.0)


def test_overriding_leaves_the_original_alone():
    data = {"game": "g", "algorithm": {"name": "dqn"}}
    assert override(data, ["algorithm.lr=1"])["algorithm"] == {"name": "dqn", "lr": 1}
    assert data["algorithm"] == {"name": "dqn"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.worker=2", r"unknown key rollout\.worker: did you mean rollout\.workers\?"),
        ("gme=2", r"unknown key gme: did you mean game\?"),
        ("stop.retrun=3", r"unknown key stop\.retrun: did you mean stop\.return\?"),
        ("rollout.workers=two", r"rollout\.workers: expected `int`, got `str`"),
        ("rollout.workers=-1", r"rollout\.workers: expected `int` >= 0"),
        ("stop.steps=0.5", r"stop\.steps: expected"),
        ("rollout=3", r"rollout is 3, but a group of keys: workers, envs"),
        ("algorithm=dqn", r"algorithm is 'dqn': write \{name: dqn\}, with its hyperparameters"),
        ("algorithm=3", r"algorithm: expected `object`"),
        ("algorithm={lr: 1}", r"algorithm\.name is missing"),
        ("source=stor", r"source is 'stor': choose one of simulate, store"),
        ("source=store", r"store is missing"),
        ("seed.x=1", r"seed is a value"),
        ("=3", r"write key=value"),
        ("rollout.envs", r"write key=value"),
        ("game=[", r"not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path, change, message):
    write(tmp_path / "e.yaml", FULL)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "e.yaml", [change])


@pytest.mark.parametrize(
    "text", ["", "- a\n", "just text", "game: [\n", "\x00", "[" * 9_999, "a: 2020-99-99", "a: !!bool x"]
)
def test_what_is_no_experiment_is_refused(tmp_path, text):
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(InputError, match=r"e\.yaml"):
        read(tmp_path / "e.yaml")


def test_reading_experiments_and_playing_load_no_learning_stack():
    code = "import sys, sparring.experiment, sparring.rollout.actor; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
