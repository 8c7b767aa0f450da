"""A game whose step only waits, like one that is played over a network: `waiting_game:Waiting-v0`. WAIT_MS says how
long; default: 5."""

import os
import time

import gymnasium
import numpy as np

__all__ = ["Waiting"]


class Waiting(gymnasium.Env):  # type: ignore[type-arg]
    """The observation is noise and so is the reward: nothing is to be learned but how much the rest costs."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("WAIT_MS", "5")) / 1000

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        return self.np_random.random(8, np.float32), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        time.sleep(self.seconds)
        return self.np_random.random(8, np.float32), 1.0, False, False, {}


gymnasium.register("Waiting-v0", entry_point=Waiting, max_episode_steps=1000)
