"""The bridge to RLlib, on a real Ray: its algorithms in our experiments, runs and registry."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from sparring.client.bot import Bot
from sparring.errors import InputError
from sparring.experience.fragment import Columns, new_id, pack
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, catalog
from sparring.registry.registry import Registry
from sparring.store.sqlite import SqliteStore
from sparring.training import commands, loop
from sparring.training.evaluate import play
from sparring.training.experiment import Checkpoints, Evaluation, Experiment, Rollout, Stop
from sparring.training.run import Run

pytestmark = pytest.mark.real
SMALL = {"model_config": {"fcnet_hiddens": [16, 16]}}


def experiment(out: Path, name: str, game: str = "CartPole-v1", **changes) -> Experiment:
    keys = changes.pop("keys", {})
    fields = {
        "game": game,
        "algorithm": {"name": f"rllib/{name}", **SMALL, **keys},
        "rollout": Rollout(envs=4),
        "iteration": 200,
        "stop": Stop(iterations=1),
        "checkpoint": Checkpoints(every=0),
        "out": str(out),
    }
    return Experiment(**(fields | changes))


PPO = {
    "lr": 3e-3,
    "train_batch_size_per_learner": 1024,
    "minibatch_size": 128,
    "num_epochs": 8,
    "vf_clip_param": 1000.0,
    "model_config": {"fcnet_hiddens": [64], "fcnet_activation": "relu"},
}


@pytest.fixture(scope="module")
def ppo(tmp_path_factory) -> Run:
    """Learned well enough that nobody takes it for chance, in two parts."""
    out = tmp_path_factory.mktemp("runs") / "ppo"
    stop, evaluation = Stop(iterations=6), Evaluation(every=6, episodes=10)
    e = experiment(out, "PPO", keys=PPO, rollout=Rollout(envs=8), stop=stop, evaluation=evaluation)
    loop.train(e)
    return loop.resume(out, ["stop.iterations=8", "evaluation.every=8"])


def test_ppo_learns_and_tells_it_in_our_words(ppo):
    rows = ppo.rows()
    assert [row["iteration"] for row in rows] == list(range(1, 9))
    assert rows[0]["episode/return_mean"] < 35
    assert rows[-1]["evaluation/return_mean"] > 150
    for row in rows:
        names = {"updates", "loss/total", "loss/policy", "loss/value", "policy/entropy", "rate/steps_per_s"}
        assert names | {f"time/{phase}_s" for phase in ("sample", "load", "learn", "update")} <= row.keys()
        assert 0 < row["time/sample_s"] + row["time/learn_s"] < row["time/iteration_s"]
        if row["episode/count"]:
            assert row["episode/length_mean"] == row["episode/return_mean"]  # as in CartPole
    assert 8 * 1024 <= rows[-1]["steps"] < 8 * 1100
    assert (ppo.path / "metrics.csv").read_text().startswith("iteration,")
    assert list((ppo.path / "tensorboard").iterdir())


def test_resuming_goes_on_with_what_was_learned(ppo):
    """The learning rate is high enough to see a network that began anew."""
    rows = ppo.rows()
    assert [row["updates"] for row in rows] == list(range(1, 9))
    assert rows[6]["policy/entropy"] == pytest.approx(rows[5]["policy/entropy"], abs=0.08)
    assert rows[6]["policy/entropy"] < rows[0]["policy/entropy"] - 0.05
    assert rows[6]["rllib/vf_explained_var"] > rows[0]["rllib/vf_explained_var"]


def test_nothing_in_a_run_is_pickled(ppo):
    kinds = {path.suffix for path in ppo.path.rglob("*") if path.is_file() and "tensorboard" not in path.parts}
    assert kinds == {".yaml", ".csv", ".jsonl", ".json", ".safetensors", ".onnx"}


def test_published_it_plays_as_any_model(ppo, tmp_path):
    where = str(tmp_path / "registry")
    manifest = commands.publish_run(ppo.path, "bot", where)
    assert (manifest.algorithm, manifest.version) == ("rllib/PPO", 1)
    assert manifest.config["num_epochs"] == 8
    policy = Registry(where).policy("CartPole-v1", "bot", 1)
    assert play(policy, 5, seed=3) == play(ppo.policy(), 5, seed=3)
    assert np.mean([ret for ret, _ in play(policy, 10, seed=3)]) > 150
    bot = Bot.load(ppo.path / "policy.onnx")
    assert bot.act(np.zeros(4, np.float32)) in (0, 1)
