"""A small arena: gather gems, strike the enemy before it reaches you. Observations with fields, actions of two parts.
`person` is a scripted player who makes about 45 points in an episode; chance makes about −5, a good bot 70 and more.

python examples/arena.py                                 what a person and chance make
python examples/arena.py --declare > arena.json          the game's declaration, for a platform that cannot simulate it
cd examples && sparring train arena:Arena-v0
"""

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import sparring

Observation = dict[str, np.ndarray]
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)  # stay, left, right, down, up
STEPS = 150  # of an episode
SPEED, ENEMY_SPEED = 0.12, 0.06  # of an arena that reaches from −1 to 1
REACH, TOUCH = 0.3, 0.15  # how far a strike goes; how near is a touch
GEM, KILL, MISS, HURT = 4.0, 3.0, -0.3, -3.0  # points


class Arena(gymnasium.Env[Observation, np.ndarray]):  # type: ignore[misc]  # Gymnasium is untyped here
    observation_space = spaces.Dict(
        {
            "me": spaces.Box(-1, 1, (2,), np.float32),
            "enemy": spaces.Box(-1, 1, (2,), np.float32),
            "gem": spaces.Box(-1, 1, (2,), np.float32),
            "health": spaces.Box(0, 1, (1,), np.float32),
        }
    )
    action_space = spaces.MultiDiscrete([len(MOVES), 2])  # where to go, and whether to strike

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.me, self.enemy, self.gem = self._anywhere(), self._edge(), self._anywhere()
        self.health = 1.0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        move, strike = (int(part) for part in action)
        self.me = np.clip(self.me + SPEED * MOVES[move], -1, 1)
        points = self._strike() if strike else 0.0
        away = self.me - self.enemy
        distance = float(np.linalg.norm(away))
        self.enemy = self.enemy + ENEMY_SPEED * away / max(distance, ENEMY_SPEED)
        if distance < TOUCH:
            self.health -= 0.2
            self.enemy = self._edge()
            points += HURT
        if np.linalg.norm(self.me - self.gem) < TOUCH:
            self.health = min(self.health + 0.1, 1.0)
            self.gem = self._anywhere()
            points += GEM
        return self._see(), points, self.health <= 0.01, False, {}

    def _strike(self) -> float:
        if np.linalg.norm(self.me - self.enemy) > REACH:
            return MISS
        self.enemy = self._edge()
        return KILL

    def _anywhere(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def _edge(self) -> np.ndarray:
        side = self.np_random.choice([-1.0, 1.0])
        point = np.array([side, self.np_random.uniform(-1, 1)], np.float32)
        return point if self.np_random.random() < 0.5 else point[::-1].copy()

    def _see(self) -> Observation:
        health = np.array([max(self.health, 0.0)], np.float32)
        seen = {"me": self.me, "enemy": self.enemy, "gem": self.gem, "health": health}
        return {name: value.astype(np.float32) for name, value in seen.items()}


gymnasium.register("Arena-v0", entry_point=Arena, max_episode_steps=STEPS)


def person(obs: Observation, rng: np.random.Generator, skill: float = 0.6) -> np.ndarray:
    """Goes for the gem and strikes what comes near; does something else whenever attention fails."""
    if rng.random() > skill:
        return np.array([rng.integers(len(MOVES)), rng.random() < 0.1], np.int32)
    away = obs["gem"] - obs["me"]
    axis = int(np.abs(away).argmax())
    move = 1 + 2 * axis + int(away[axis] > 0)
    return np.array([move, np.linalg.norm(obs["enemy"] - obs["me"]) < REACH - 0.05], np.int32)


def chance(obs: Observation, rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.integers(len(MOVES)), rng.integers(2)], np.int32)


def score(play: Callable[[Observation, np.random.Generator], np.ndarray], episodes: int = 50) -> float:
    """The mean number of points that somebody makes in an episode."""
    env, rng, total = gymnasium.make("Arena-v0"), np.random.default_rng(0), 0.0
    for episode in range(episodes):
        (obs, _), over = env.reset(seed=episode), False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(play(obs, rng))
            total, over = total + float(reward), terminated or truncated
    return total / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--declare", action="store_true", help="print the game's declaration")
    parser.add_argument("--episodes", type=int, default=50)
    words = parser.parse_args()
    if words.declare:
        game = sparring.load_game("arena:Arena-v0")
        print(sparring.Game("arena", game.observation, game.action).to_json().decode())
        return
    print(f"a person makes {score(person, words.episodes):.1f} points, chance {score(chance, words.episodes):.1f}")


if __name__ == "__main__":
    main()
