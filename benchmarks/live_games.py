"""Games of `benchmarks/live.py`, and scripted people who play them: `skill` is how often they do what is right."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.games import Game
from sparring.games.catalog import load

__all__ = ["SCENARIOS", "Scenario"]

ROOT = Path(__file__).parents[1]
Person = Callable[[Any, np.random.Generator, float], Any]


class Scenario(NamedTuple):
    game: Game  # as it is declared to the platform
    env: str  # where it is played
    person: Person
    skills: tuple[float, ...]  # of the people who play; some are bad
    bots: int
    rate: float  # steps per second of each player
    minutes: float


class Reach(gymnasium.Env[np.ndarray, np.ndarray]):  # type: ignore[misc]  # Gymnasium is untyped here
    """A point with inertia goes where the target is. Actions are two forces."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.to = self.np_random.uniform(-1, 1, (2, 2))
        self.speed = np.zeros(2)
        return self._see(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.speed = 0.8 * self.speed + 0.08 * np.clip(action, -1, 1)
        self.at = np.clip(self.at + self.speed, -1.5, 1.5)
        distance = float(np.linalg.norm(self.to - self.at))
        return self._see(), (1.0 if distance < 0.15 else 0.0) - 0.5 * distance, False, False, {}

    def _see(self) -> np.ndarray:
        return np.concatenate([self.at, self.speed, self.to - self.at]).astype(np.float32)


def reach_person(obs: np.ndarray, rng: np.random.Generator, skill: float) -> np.ndarray:
    if rng.random() > skill:
        return rng.uniform(-1, 1, 2).astype(np.float32)
    return np.clip(4 * obs[4:] - 6 * obs[2:4] + 0.1 * rng.standard_normal(2), -1, 1).astype(np.float32)


class LateCatch(gymnasium.Env[np.ndarray, int]):  # type: ignore[misc]
    """A ball falls with a drift; whether it was caught is known at the end only."""

    WIDTH, HEIGHT = 7, 10
    observation_space = spaces.Box(-1, 10, (4,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.ball, self.row = int(self.np_random.integers(self.WIDTH)), 0
        self.drift, self.paddle = int(self.np_random.integers(-1, 2)), self.WIDTH // 2
        return self._see(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.WIDTH - 1)
        self.row += 1
        if self.row % 2:
            self.ball += self.drift
            if not 0 <= self.ball < self.WIDTH:
                self.drift, self.ball = -self.drift, min(max(self.ball, 0), self.WIDTH - 1)
        over = self.row == self.HEIGHT
        return self._see(), float(over and self.ball == self.paddle), over, False, {}

    def _see(self) -> np.ndarray:
        return np.array([self.ball, self.row, self.drift, self.paddle], np.float32)


def catch_person(obs: np.ndarray, rng: np.random.Generator, skill: float) -> int:
    return int(rng.integers(3)) if rng.random() > skill else int(np.sign(obs[0] - obs[3])) + 1


def cartpole_person(obs: np.ndarray, rng: np.random.Generator, skill: float) -> int:
    return int(rng.integers(2)) if rng.random() > skill else int(3 * obs[2] + obs[3] + 0.1 * obs[0] + 0.2 * obs[1] > 0)


def _arena() -> Any:
    found = importlib.util.spec_from_file_location("arena", ROOT / "examples" / "arena.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules["arena"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _declared(name: str, env: str) -> Game:
    """As a game developer declares it: the platform cannot simulate it."""
    known = load(env)
    return Game(name, known.observation, known.action)


gymnasium.register("Reach-v0", entry_point=Reach, max_episode_steps=50)
gymnasium.register("LateCatch-v0", entry_point=LateCatch)
arena = _arena()

SCENARIOS = {
    "cartpole": Scenario(load("CartPole-v1"), "CartPole-v1", cartpole_person, (0.5, 0.1), 4, 50.0, 3.0),
    "arena": Scenario(_declared("arena", "Arena-v0"), "Arena-v0", arena.person, (0.6,), 4, 15.0, 10.0),
    "reach": Scenario(_declared("reach", "Reach-v0"), "Reach-v0", reach_person, (0.7, 0.0), 4, 10.0, 5.0),
    "late-catch": Scenario(
        _declared("late-catch", "LateCatch-v0"), "LateCatch-v0", catch_person, (0.8, 0.3, 0.0), 4, 10.0, 10.0
    ),
}
