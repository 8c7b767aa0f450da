"""Learning from a store without playing."""

import numpy as np
import pytest
from recorded_play import balance, record

from sparring.errors import InputError
from sparring.experiment import Checkpoints, Evaluation, Experiment, Stop
from sparring.games import Box, Discrete, Game
from sparring.runs import checkpoint
from sparring.runs.plot import EVALUATED, curve, plot
from sparring.training import loop


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    return path, record(path, "CartPole-v1", balance(np.random.default_rng(0)), 40)


def experiment(data, out, **changes):
    small = [{"layer": "dense", "units": 32}]
    fields = {
        "game": "CartPole-v1",
        "algorithm": {"name": "bc", "layers": small, "batch": 64},
        "source": "store",
        "store": str(data[0]),
        "iteration": 320,
        "stop": Stop(iterations=3),
        "evaluation": Evaluation(every=3, episodes=8),
        "checkpoint": Checkpoints(every=2, keep=2),
        "out": str(out),
    }
    return Experiment(**(fields | changes))


def test_cloned_behaviour_without_its_errors(store, tmp_path):
    rows = loop.train(experiment(store, tmp_path / "run")).rows()
    assert [row["updates"] for row in rows] == [320, 640, 960]
    assert rows[-1]["evaluation/return_mean"] > store[1]


def test_updates_are_the_axis_where_nobody_plays(store, tmp_path):
    run = loop.train(experiment(store, tmp_path / "run", evaluation=Evaluation(every=1, episodes=2)))
    assert run.experiment.axis == "updates"
    assert curve([run.rows()], run.experiment.axis, EVALUATED).x[[0, -1]].tolist() == [320, 960]
    figures = tmp_path / "figure.svg"
    plot([run], figures)
    (events,) = (run.path / "tensorboard").iterdir()
    assert b"\x10\xc0\x02\x2a" in events.read_bytes()  # step 320, then its values


def test_a_declared_game_is_not_evaluated(store, tmp_path):
    (tmp_path / "mine.json").write_bytes(Game("CartPole-v1", Box((4,)), Discrete(2)).to_json())
    with pytest.raises(InputError, match=r"so not evaluated: set evaluation\.every to 0"):
        loop.train(experiment(store, tmp_path / "run", game=str(tmp_path / "mine.json")))
    says = "is a declared game, which cannot be simulated. Learn it from recorded play: `source: store`, `store:` the"
    with pytest.raises(InputError, match=says):
        loop.train(Experiment(str(tmp_path / "mine.json"), {"name": "dqn"}, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["cql", "iql", "dqn"])
def test_resuming_is_bit_identical(store, tmp_path, name):
    algorithm = {"name": name, "layers": [{"layer": "dense", "units": 8}], "batch": 16}
    if name == "iql":
        algorithm["critic_layers"] = algorithm["layers"]
    changes = {"algorithm": algorithm, "iteration": 64, "evaluation": Evaluation(0)}
    whole = loop.train(experiment(store, tmp_path / "whole", **changes))
    parts = loop.train(experiment(store, tmp_path / "parts", **(changes | {"stop": Stop(iterations=2)})))
    loop.resume(parts.path, ["stop.iterations=3"])
    one, other = (checkpoint.load(run.checkpoints()[-1])[0] for run in (whole, parts))
    assert all(np.array_equal(one[key], other[key]) for key in one.keys() | other.keys())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "simulate"}, "bc learns from recorded play"),
        ({"stop": Stop(steps=5)}, r"use stop\.iterations"),
        ({"store": "nowhere"}, "there is no store at nowhere"),
        ({"game": "Acrobot-v1"}, "has no play of Acrobot-v1"),
        ({"stop": Stop(return_=9.0), "evaluation": Evaluation(0)}, r"set evaluation\.every"),
        ({"algorithm": {"name": "ppo"}}, "ppo learns from fresh play"),
        ({"algorithm": {"name": "bc", "replay": 100}}, r"more play than algorithm\.replay = 100"),
    ],
)
def test_refusals(store, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        loop.train(experiment(store, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
