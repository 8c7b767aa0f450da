"""Games of users' own that fail: whose error it is, in one line, wherever they are played; the rest is in a log."""

import os
import subprocess
import sys

import gymnasium
import pytest

from sparring.errors import GameError, InputError
from sparring.experiment import Experiment, Resources, Rollout, Stop
from sparring.games import catalog
from sparring.training import loop

GAME = """
import os, sys
from pathlib import Path
import gymnasium
import numpy as np

TROUBLE = Path(__file__).with_name("trouble")


def trouble(where):
    if TROUBLE.exists() and TROUBLE.read_text() == where:
        raise FileNotFoundError(f"no level.map, says {where}")


class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        trouble("constructor")
        if str(os.getpid()) != os.environ.get("LEARNER"):
            trouble("worker")

    def reset(self, *, seed=None, options=None):
        trouble("reset")
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        trouble("step")
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, self.t == 10, {}


trouble("module")
gymnasium.register("Mine-v0", entry_point=Mine)
"""
SCRIPT = GAME + "from sparring.cli import main\nmain()\n"
CHANGES = ["algorithm.steps=64", "algorithm.minibatch=32", "algorithm.epochs=1", "stop.iterations=1"]
PPO = {"name": "ppo", "steps": 64, "minibatch": 32, "epochs": 1, "layers": [{"layer": "dense", "units": 8}]}
CASES = [("local", 0, "reset"), ("local", 0, "step")]
CASES += [("local", 1, where) for where in ("worker", "reset", "step")]
CASES += [pytest.param("ray", 1, where, marks=pytest.mark.real) for where in ("worker", "reset", "step")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the game's module is, for all processes that begin from now on."""
    home = tmp_path_factory.mktemp("game")
    (home / "my_game.py").write_text(GAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("LEARNER", str(os.getpid()))
        patch.syspath_prepend(home)
        yield home


@pytest.fixture(scope="module")
def ray(home):
    from sparring.launch import ray_cluster as cluster

    cluster.connect(Resources(cpus=2))
    yield
    cluster.disconnect()


@pytest.fixture
def trouble(home):
    yield (home / "trouble").write_text
    (home / "trouble").unlink(missing_ok=True)


def experiment(out, runner, workers, game="my_game:Mine-v0", **changes):
    fields = {"rollout": Rollout(workers=workers), "runner": runner, "resources": Resources(actor_cpus=0.25)}
    fields |= {"stop": Stop(iterations=1), "out": str(out)} | changes
    return Experiment(game=game, algorithm=PPO, **fields)


@pytest.mark.parametrize(("runner", "workers", "where"), CASES)
def test_a_game_that_raises_is_reported_by_its_last_line(tmp_path, request, trouble, runner, workers, where):
    if runner == "ray":
        request.getfixturevalue("ray")
    trouble(where)
    with pytest.raises(GameError) as raised:
        loop.train(experiment(tmp_path / "run", runner, workers))
    message = str(raised.value)
    place = "its constructor" if where == "worker" else where
    says = f"the game my_game:Mine-v0 failed in {place}: FileNotFoundError: no level.map, says {where} ("
    assert says in message
    assert "my_game.py, line " in message
    assert "\n" not in message
    log = tmp_path / "run" / "game.log"
    assert message.endswith(f"Its traceback is in {log}")
    assert "Traceback (most recent call last)" in log.read_text()
    assert 'raise FileNotFoundError(f"no level.map' in log.read_text()


@pytest.mark.parametrize("where", ["constructor", "module"])
def test_a_game_that_cannot_be_made_is_reported_by_its_last_line(tmp_path, home, trouble, where):
    trouble(where)
    done = subprocess.run(
        [sys.executable, "-m", "sparring.cli", "train", "my_game:Mine-v0", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    place = "its module my_game" if where == "module" else "its constructor"
    output = " ".join(done.stderr.split())
    assert f"the game my_game:Mine-v0 failed in {place}: FileNotFoundError: no level.map, says {where}" in output
    assert "Its traceback: python -c \"import gymnasium; gymnasium.make('my_game:Mine-v0')\"" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("workers", "code"), [(0, 0), (1, 2)])
def test_a_game_registered_in_the_script_itself_with_workers_is_reported(tmp_path, workers, code):
    (tmp_path / "script.py").write_text(SCRIPT)
    sets = [word for change in (*CHANGES, f"rollout.workers={workers}") for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "script.py", "train", "Mine-v0", "--algorithm", "ppo", *sets],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if workers:
        output = " ".join(done.stderr.split())
        assert "put it in a module that they can import, and name the game with it: module:Mine-v0" in output
        assert not (tmp_path / "runs").exists()  # said before anything was made


@pytest.mark.real
@pytest.mark.parametrize("envs", [1, 2])
def test_a_game_registered_in_the_script_itself_is_reported_by_actors_too(tmp_path, ray, home, envs):
    gymnasium.register("Here-v0", entry_point=catalog.make("my_game:Mine-v0").unwrapped.__class__)
    try:
        with pytest.raises(InputError, match=r"put it in a module .* name the game with it: module:Here-v0"):
            loop.train(experiment(tmp_path / "run", "ray", 1, "Here-v0", rollout=Rollout(workers=1, envs=envs)))
    finally:
        del gymnasium.registry["Here-v0"]


def test_a_game_that_nobody_registered_is_reported_with_its_modules_name():
    with pytest.raises(InputError, match=r"needs its module's name: module:Nobodys-v0"):
        catalog.load("Nobodys-v0")


@pytest.mark.real
@pytest.mark.parametrize("where", ["worker", "reset"])
def test_rllib_tells_of_a_game_that_raises(tmp_path, ray, trouble, where):
    """It would replace its runners without end."""
    pytest.importorskip("torch")
    trouble(where)
    algorithm = {"name": "rllib/PPO", "train_batch_size_per_learner": 64, "minibatch_size": 32}
    asked = experiment(tmp_path / "run", "ray", 1)
    place = "its constructor" if where == "worker" else where
    with pytest.raises(GameError, match=f"failed in {place}: FileNotFoundError: no level.map"):
        loop.train(Experiment.parse({**asked.to_builtins(), "algorithm": algorithm}))
