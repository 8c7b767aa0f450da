"""Games that misbehave, for workers to play: `odd_games:Odd-v0`. What they do is in the environment's variables."""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np


class Odd(gymnasium.Env):  # type: ignore[type-arg]
    """Rewards the action that equals the observation. ODD_TROUBLE: a file; the first who finds it removes it, and
    dies, hangs or raises (its content)."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def _look(self):  # type: ignore[no-untyped-def]
        self.now = int(self.np_random.integers(2))
        return np.full(1, self.now, np.float32)

    def step(self, action):  # type: ignore[no-untyped-def]
        if self.t == 3 and (trouble := os.environ.get("ODD_TROUBLE")):
            self._trouble(Path(trouble))
        self.t += 1
        reward = float(action == self.now)
        return self._look(), reward, False, self.t == 10, {}

    def _trouble(self, path: Path) -> None:
        try:
            what = path.read_text()
            if "always" not in what:
                path.unlink()
        except FileNotFoundError:
            return  # another one found it
        print("the game is in trouble", flush=True)
        if what == "hang":
            while True:
                time.sleep(0.01)
        if what == "nap":
            return time.sleep(2)
        if what.startswith("raise"):
            raise ValueError("ouch")
        os._exit(7)


class Moody(Odd):
    """Looks different each time, whatever its seed was."""

    def _look(self):  # type: ignore[no-untyped-def]
        self.now = 0
        return np.array([os.urandom(1)[0] / 255], np.float32)


class Endless(Odd):
    """Never over."""

    def step(self, action):  # type: ignore[no-untyped-def]
        return (*super().step(action)[:3], False, {})


class Hopeless(Odd):
    """Gives what is no number, no shape and no answer (ODD_ANSWER)."""

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        obs, info = super().reset(seed=seed)
        wrong = {
            "nan seen": (np.full(1, np.nan, np.float32), info),
            "shape": (np.zeros(3, np.float32), info),
            "old": obs,
        }
        return wrong.get(os.environ["ODD_ANSWER"], (obs, info))

    def step(self, action):  # type: ignore[no-untyped-def]
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if os.environ["ODD_ANSWER"] == "nan won" else reward, *rest


class Telling(Odd):
    """Has an `info`: who won, which actions are allowed, and things that are no numbers."""

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        obs, info = super().reset(seed=seed)
        return obs, {**info, "action_mask": np.array([1, 0], np.int8)}

    def step(self, action):  # type: ignore[no-untyped-def]
        *rest, _ = super().step(action)
        info = {
            "is_success": self.t == 10, "lives": np.int64(3), "score": np.float32(self.t), "whole": np.array(7),
            "return_mean": 1e9, "nan": float("nan"), "huge": 10**400, "words": "no", "board": np.zeros((2, 2)),
            "bad name": 1.0, 5: 1.0, "none": None, "i": 1j,
        }  # fmt: skip
        return *rest, info


class Chatty(Odd):
    """Another name in `info` after each episode."""

    played = 0

    def step(self, action):  # type: ignore[no-untyped-def]
        *rest, _ = super().step(action)
        Chatty.played += rest[3]
        return *rest, {f"episode_{Chatty.played}": 1.0}


for _kind in (Odd, Moody, Endless, Hopeless, Telling, Chatty):
    gymnasium.register(f"{_kind.__name__}-v0", entry_point=_kind)
