"""A game as RLlib sees it: observations are our policies' features, actions are what our networks give (indices from 0,
or numbers scaled to ±1 where there are bounds). So what RLlib learns means the same in our policies, whatever spaces
the game has, and recorded play is encoded by the same functions."""

import logging
import warnings
from typing import Any

import gymnasium
import numpy as np
from ray.rllib.callbacks.callbacks import RLlibCallback

from sparring.algorithms.replay import encode_action
from sparring.experience import Fragment
from sparring.games import Box, Discrete, Game
from sparring.games.catalog import make, own_fault
from sparring.games.spec import Array
from sparring.games.vector import put
from sparring.networks.policy import features
from sparring.networks.spec import feature_shape, scaling

__all__ = ["LENGTHS", "RETURNS", "EpisodeNotes", "GameEnv", "game_actions", "rows_of", "spaces_of"]

RETURNS, LENGTHS = "sparring_returns", "sparring_lengths"
for _name in ("ray", "ray.rllib", "ray.tune", "ray.data"):  # they warn of their own deprecations
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"ray\.")
warnings.filterwarnings("ignore", message=".*Overriding environment rllib-")


def spaces_of(game: Game) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    observation = gymnasium.spaces.Box(-np.inf, np.inf, feature_shape(game.observation), np.float32)
    if isinstance(game.action, Box):
        s = scaling(game.action)
        return observation, gymnasium.spaces.Box(s.unit_low, s.unit_high, s.unit_low.shape, np.float32)
    if isinstance(game.action, Discrete):
        return observation, gymnasium.spaces.Discrete(game.action.n)
    return observation, gymnasium.spaces.MultiDiscrete(game.action.nvec)


def game_actions(game: Game, actions: Array) -> Array:
    """RLlib's actions → the game's: `replay.encode_action` the other way round, for any number."""
    space = game.action
    if isinstance(space, Discrete):
        actions = actions + space.start
    elif isinstance(space, Box):
        s = scaling(space)
        unit = np.clip(actions, s.unit_low, s.unit_high).astype(space.dtype)
        actions = np.clip(s.centre + s.half * unit, s.low, s.high)
    return actions.astype(space.element.base).reshape(len(actions), *space.element.shape)


class GameEnv(gymnasium.Env[Any, Any]):  # type: ignore[misc]  # Gymnasium is Any to mypy here
    def __init__(self, config: dict[str, Any]) -> None:
        self.game = Game.from_json(config["game"])
        self.env = make(self.game)
        self.observation_space, self.action_space = spaces_of(self.game)
        self._obs = np.zeros(1, self.game.observation.element)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        with own_fault(str(self.game.env), "reset"):
            return self._features(self.env.reset(seed=seed)[0]), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        with own_fault(str(self.game.env), "step"):
            obs, reward, terminated, truncated, _ = self.env.step(self._native(action))
            return self._features(obs), float(reward), bool(terminated), bool(truncated), {}

    def _features(self, obs: Any) -> Array:
        put(self.game.observation, self._obs, 0, obs)
        return features(self.game.observation, self._obs)[0].copy()

    def _native(self, action: Any) -> Any:
        (found,) = game_actions(self.game, np.asarray(action)[None])
        return int(found) if isinstance(self.game.action, Discrete) else found.reshape(self.env.action_space.shape)

    def close(self) -> None:
        self.env.close()


class EpisodeNotes(RLlibCallback):  # type: ignore[misc]  # Ray ships no types
    """Return and length of every episode: RLlib itself reports only means over a window."""

    def on_episode_end(
        self, *, episode: Any, prev_episode_chunks: Any = (), metrics_logger: Any = None, **_: Any
    ) -> None:
        ret = sum(chunk.get_return() for chunk in (*prev_episode_chunks, episode))
        metrics_logger.log_value(RETURNS, float(ret), reduce="item_series")
        metrics_logger.log_value(LENGTHS, episode.t, reduce="item_series")  # learning appends a step to older chunks


def rows_of(game: Game, fragments: list[Fragment], rng: np.random.Generator) -> dict[str, Array]:
    """Recorded play as RLlib reads it: a row per step, in random order, as neighbours are much alike. A fragment that
    stops before its episode's end is no end: RLlib bootstraps from its last observation."""
    columns = [fragment.columns(game) for fragment in fragments]
    obs = [features(game.observation, c.obs) for c in columns]
    terminated = np.concatenate([_last(f.steps, f.terminated) for f in fragments])
    order = rng.permutation(len(terminated))
    rows = {
        "obs": np.concatenate([o[:-1] for o in obs]),
        "new_obs": np.concatenate([o[1:] for o in obs]),
        "actions": np.concatenate([encode_action(game, c.action) for c in columns]),
        "rewards": np.concatenate([c.reward for c in columns]),
        "terminateds": terminated,
        "truncateds": np.concatenate([_last(f.steps, not f.terminated) for f in fragments]),
    }
    return {name: column[order] for name, column in rows.items()}


def _last(steps: int, value: bool) -> Array:
    flags = np.zeros(steps, bool)
    flags[-1] = value
    return flags
