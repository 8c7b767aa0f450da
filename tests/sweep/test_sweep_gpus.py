"""GPUs of a sweep's trials: how they are divided, and that trials see theirs and no others. Ray's are virtual here."""

import os
from contextlib import nullcontext

import pytest

from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.sweep import sweeping
from sparring.sweep.plan import Sweep
from sparring.sweep.room import learner_gpus, require_room

FILE = {
    "game": "CartPole-v1",
    "algorithm": {"name": "ppo", "steps": 64, "minibatch": 32, "epochs": 1, "layers": [{"layer": "dense", "units": 8}]},
    "seed": {"grid": [1, 2, 3, 4]},
    "stop": {"iterations": 2},
    "tune": {"scheduler": "none"},
}
GAME = """
import os, time
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

NOTES = Path(__file__).with_name("notes")


class Seeing(CartPoleEnv):
    '''Notes what its process may use; the first step waits until as many processes play as the test expects.'''

    def step(self, action):
        note = NOTES / f"{os.getpid()}"
        if not note.exists():
            words = [os.environ.get(n, "none") for n in ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION")]
            note.write_text(" ".join(words))
            expected, until = int((NOTES.parent / "expected").read_text()), time.monotonic() + 200
            while len(list(NOTES.iterdir())) < expected and time.monotonic() < until:
                time.sleep(0.05)
        return super().step(action)


gymnasium.register("Seeing-v0", entry_point="seeing:Seeing", max_episode_steps=50)
"""


def sweep(**changes):
    resources = changes.pop("resources", {})
    return Sweep.parse({**FILE, **changes, "resources": resources})


@pytest.mark.parametrize(
    ("changes", "nodes", "share"),
    [
        ({}, [(4, 0)], 0),
        ({}, [(4, 1)], 0.25),  # four trials at once
        ({}, [(4, 2)], 0.5),
        ({}, [(3, 1)], 0.3333),
        ({}, [(16, 8)], 1),
        ({}, [(8, 1), (64, 0)], 0.25),
        ({"rollout": {"workers": 3}}, [(8, 1)], 0.5),
        ({"rollout": {"workers": 3}}, [(2, 1), (8, 0)], 0),  # a trial fits only where no GPU is
        ({"rollout": {"workers": 3}, "runner": "ray"}, [(2, 1), (6, 0)], 0.5),  # its actors may be elsewhere
        ({"tune": {"scheduler": "none", "parallel": 1}}, [(4, 1)], 1),
        ({"resources": {"learner_gpus": 0}}, [(4, 1)], 0),
        ({"resources": {"learner_gpus": 0.1}}, [(4, 1)], 0.1),
        ({"resources": {"devices": 2}}, [(4, 4)], 2),
        ({"resources": {"actor_gpus": 0.2}, "rollout": {"workers": 1}, "runner": "ray"}, [(4, 1)], 0),
    ],
)
def test_gpus_are_divided_among_the_trials_that_run_at_once(changes, nodes, share):
    plan, found = sweep(**changes), [{"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]
    assert learner_gpus(plan, found) == share
    require_room(plan, found)


def test_gpus_that_a_cluster_does_not_have_are_reported():
    with pytest.raises(
        InputError, match=r"needs 1 × 1 CPU and 2 GPU, .* has 4 CPUs, 1 GPUs\. Lower resources\.learner_g"
    ):
        require_room(sweep(resources={"learner_gpus": 2}), [{"CPU": 4.0, "GPU": 1.0}])
    with pytest.raises(InputError, match=r"needs 1 × 1 CPU and 0\.5 GPU, .* has 4 CPUs, 0 GPUs"):
        require_room(sweep(resources={"learner_gpus": 0.5}), [{"CPU": 4.0}])
    with pytest.raises(InputError, match=r"learner_gpus is 1\.5: parts of one GPU, or whole ones"):
        Experiment.parse({"game": "g", "algorithm": {"name": "ppo"}, "resources": {"learner_gpus": 1.5}})


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Four CPUs and two GPUs, of which there are none."""
    from sparring.launch import local_ray
    from sparring.launch import ray_cluster as cluster

    home = tmp_path_factory.mktemp("seeing")
    (home / "seeing.py").write_text(GAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.syspath_prepend(home)
        yield local_ray.start(num_cpus=4, num_gpus=2), home
    cluster.disconnect()


@pytest.mark.real
@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (1, ["0 none", "1 none"]),  # two at a time, one after the other
        (None, ["0 0.450", "0 0.450", "1 0.450", "1 0.450"]),
    ],
)
def test_trials_get_gpus_of_their_own_and_as_many_run_as_fit(address, tmp_path, asked, seen):
    where, home = address
    notes = home / "notes"
    notes.mkdir(exist_ok=True)
    for note in notes.iterdir():
        note.unlink()
    (home / "expected").write_text(str(len(seen)))
    plan = sweep(game="seeing:Seeing-v0", resources={"address": where, "learner_gpus": asked})
    sweeping.load_tuning().prepare(plan)
    (out := tmp_path / "out").mkdir()
    trials, complete = sweeping.carry_out(plan, out, lambda: nullcontext(lambda trials: None))
    assert complete
    assert [trial.state for trial in trials] == ["done"] * 4, [trial.cause for trial in trials]
    assert sorted(note.read_text() for note in notes.iterdir()) == seen


@pytest.mark.real
def test_a_cluster_without_so_many_gpus_refuses_the_sweep_at_once(address):
    with pytest.raises(InputError, match=r"a trial does not fit: .* Lower resources\.learner_gpus"):
        sweeping.load_tuning().prepare(sweep(resources={"address": address[0], "learner_gpus": 3}))
