"""A Ray of our own, and worker processes: nobody forks a process with JAX's threads, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.real
PPO = {"name": "ppo", "steps": 64, "minibatch": 32, "epochs": 1, "layers": [{"layer": "dense", "units": 8}]}
WARNING = "os.fork() was called"  # JAX's, for forks that may deadlock
THREADED = """
import gymnasium
import jax.numpy
from gymnasium.envs.classic_control import CartPoleEnv

START = jax.numpy.zeros(4)  # from here on there are threads
gymnasium.register("Threaded-v0", entry_point="threaded:Threaded", max_episode_steps=100)


class Threaded(CartPoleEnv):
    pass
"""


def words(out, runner, game="CartPole-v1", iterations=2):
    fields = {"game": game, "algorithm": PPO, "runner": runner, "rollout": {"workers": 2}, "out": str(out)}
    fields |= {"stop": {"iterations": iterations}, "resources": {"cpus": 2}}
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(fields))
    return [sys.executable, "-W", "always::RuntimeWarning", "-m", "sparring.cli", "train", str(file)]


@pytest.mark.parametrize("runner", ["ray", "local"])
def test_no_process_with_jaxs_threads_is_forked(tmp_path, runner):
    done = subprocess.run(words(tmp_path / "run", runner), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert WARNING not in done.stderr


def test_workers_of_a_game_that_computes_with_jax_are_not_forked_with_its_threads(tmp_path, monkeypatch):
    (tmp_path / "threaded.py").write_text(THREADED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    asked = words(tmp_path / "run", "local", "threaded:Threaded-v0")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "workers").iterdir()}
    assert len(logs) == 3  # two workers, and who forked them
    assert not [name for name, text in logs.items() if WARNING in text]


def test_a_killed_learner_leaves_no_ray_behind(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words(tmp_path / "run", "ray", iterations=10**6), stdout=log, stderr=log)
    try:
        rows, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (rows.is_file() and rows.read_text()):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert {"raylet", "gcs_server"} <= {child.name() for child in children}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_ray_that_does_not_start_is_reported(tmp_path):
    (tmp_path / "file").touch()
    nowhere = os.environ | {"RAY_TMPDIR": str(tmp_path / "file" / "none")}
    done = subprocess.run(words(tmp_path / "run", "ray"), env=nowhere, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Ray does not start on this machine: NotADirectoryError" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
