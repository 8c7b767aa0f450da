"""Learning from a store without playing."""

import numpy as np
import pytest

from sparring.errors import InputError
from sparring.experience.fragment import Columns, new_id, pack
from sparring.games import catalog
from sparring.store.sqlite import SqliteStore
from sparring.training import checkpoint, loop
from sparring.training.experiment import Checkpoints, Evaluation, Experiment, Stop


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """CartPole by someone who pushes towards the side to which the pole falls, and errs one time in five."""
    path = tmp_path_factory.mktemp("data")
    game, env, rng = catalog.load("CartPole-v1"), catalog.make("CartPole-v1"), np.random.default_rng(0)
    fragments, returns = [], []
    for episode in range(40):
        obs = [env.reset(seed=episode)[0]]
        action, over = [], False
        while not over:
            right = obs[-1][2] + 0.5 * obs[-1][3] > 0
            action.append(int(right != (rng.random() < 0.2)))
            seen, _, terminated, truncated, _ = env.step(action[-1])
            obs.append(seen)
            over = terminated or truncated
        columns = Columns(np.array(obs, "<f4"), np.array(action, "<i4"), np.ones(len(action), "<f4"))
        fragments.append(
            pack(game, columns, id=new_id(), player="p", episode=str(episode), start=0, time=0.0, terminated=terminated,
                 truncated=truncated)
        )  # fmt: skip
        returns.append(len(action))
    db = SqliteStore(path / "store.db")
    db.register(game)
    db.append(fragments)
    db.close()
    return path, float(np.mean(returns))


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
        ({"algorithm": {"name": "ppo"}}, "ppo learns from fresh play"),
        ({"algorithm": {"name": "bc", "replay": 100}}, r"more play than algorithm\.replay = 100"),
    ],
)
def test_refusals(store, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        loop.train(experiment(store, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
