"""A game of one's own: a Gymnasium environment, registered when this module is imported. The game's id has the module's
name before a colon, so that every worker finds it.

python examples/own_game.py --steps 20000
cd examples && sparring train own_game:Corridor-v0 --algorithm dqn
"""

import argparse
import os
from typing import Any

import gymnasium
import numpy as np

import sparring

LENGTH = 8


class Corridor(gymnasium.Env[np.ndarray, int]):  # type: ignore[misc]  # Gymnasium is untyped here
    """Walk from the middle of a corridor to its right end. Every step costs a little; the left end costs more."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (LENGTH,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # left, right

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(2, LENGTH - 2))
        return self._see(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1 if action == 1 else -1
        reward = 1.0 if self.at == LENGTH - 1 else -1.0 if self.at == 0 else -0.05
        return self._see(), reward, self.at in (0, LENGTH - 1), False, {"is_success": self.at == LENGTH - 1}

    def _see(self) -> np.ndarray:
        return np.eye(LENGTH, dtype=np.float32)[self.at]


gymnasium.register("Corridor-v0", entry_point=Corridor, max_episode_steps=50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000, help="steps of play to learn from")
    parser.add_argument("--out", type=os.path.abspath, help="the run's directory; default: the next under runs/")
    words = parser.parse_args()
    experiment = sparring.Experiment(
        game="own_game:Corridor-v0",
        algorithm={"name": "dqn", "learning_starts": 200},
        rollout=sparring.Rollout(envs=4),
        stop=sparring.Stop(steps=words.steps),
        evaluation=sparring.Evaluation(every=5, episodes=10),
        out=words.out,
    )
    run = sparring.train(experiment)
    found = sparring.evaluate(run, episodes=20)
    print(
        f"{run.path}: mean return {found['evaluation/return_mean']:.2f}, success {found['evaluation/is_success']:.0%}"
    )


if __name__ == "__main__":
    main()
