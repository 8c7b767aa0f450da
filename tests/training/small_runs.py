"""Experiments that are over in a second."""

from pathlib import Path

from sparring.experiment import Checkpoints, Experiment, Rollout, Stop

SMALL = [{"layer": "dense", "units": 16}]
DQN = {"name": "dqn", "layers": SMALL, "learning_starts": 64, "batch": 16, "replay": 3000}
WIDE_DQN = DQN | {"layers": [{"layer": "dense", "units": 128}] * 2}  # wide enough for bfloat16
PPO = {"name": "ppo", "layers": SMALL, "steps": 128, "minibatch": 32, "epochs": 2}
SAC = {
    "name": "sac", "layers": SMALL, "critic_layers": SMALL, "learning_starts": 100, "batch": 16, "replay": 2000,
    "updates_per_step": 0.25,
}  # fmt: skip


def experiment(out: Path, **changes) -> Experiment:
    fields = {
        "game": "CartPole-v1",
        "algorithm": DQN,
        "rollout": Rollout(envs=4, steps=8),
        "iteration": 200,
        "stop": Stop(iterations=4),
        "checkpoint": Checkpoints(every=2, keep=3),
        "seed": 1,
        "out": str(out),
    }
    return Experiment(**(fields | changes))
