"""Tiny vectorised games, and a loop that plays and learns them: what an algorithm must solve in seconds.

Observations are independent of actions unless said, so a column of them is drawn at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparring import algorithms
from sparring.algorithms.replay import Replay, Transitions
from sparring.experience.fragment import Columns
from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.games.spec import Array
from sparring.networks.functions import Normaliser
from sparring.networks.policy import Policy
from sparring.networks.spec import feature_shape

Data = tuple[list[Columns], list[bool]]

DISCRETE = Game("identity", Discrete(4, start=1), Discrete(4, start=-2))  # do as you see, whatever it is called
CHOICES = Game("identities", MultiDiscrete((3, 2)), MultiDiscrete((3, 2)))
BOX = Game("reach", Box((2,), low=-3.0, high=5.0), Box((2,), low=(-3.0, 0.0), high=(5.0, 4.0)))  # go where you see
LAYERS = [{"layer": "dense", "units": 32}]
COMMON: dict[str, Any] = {"layers": LAYERS, "lr": 3e-3, "batch": 64, "learning_starts": 1}
VALUES: dict[str, Any] = {"gamma": 0.75, "tau": 0.05}
CRITIC: dict[str, Any] = VALUES | {"critic_layers": LAYERS, "critic_lr": 3e-3}
NOISE: dict[str, Any] = {"exploration_steps": 500}
OPTIONS: dict[str, dict[str, Any]] = {
    "dqn": VALUES | NOISE,
    "ddpg": CRITIC | NOISE,
    "td3": CRITIC | NOISE,
    "sac": CRITIC | {"temperature": 0.1},
    "iql": CRITIC,
    "cql": CRITIC | {"samples": 2},
    "bc": {},
}


def make(name: str, game: Game, **more: Any) -> Any:
    """Small networks and large steps. Equal ones are one instance, compiled once: tests should want the same."""
    return algorithms.create(name, game, COMMON | OPTIONS[name] | more)


def observe(game: Game, rng: np.random.Generator, count: int) -> Array:
    space = game.observation
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, count).astype("<i4")
    if isinstance(space, MultiDiscrete):
        return rng.integers(0, space.nvec, (count, len(space.nvec))).astype("<i4")
    assert isinstance(space, Box)
    low, high = space.bounds
    assert low is not None
    assert high is not None
    return rng.uniform(low, high, (count, *space.shape)).astype("<f4")


def target(game: Game, obs: Array) -> Array:
    """The best action."""
    if isinstance(game.action, Discrete) and isinstance(game.observation, Discrete):
        return obs - game.observation.start + game.action.start
    return obs if isinstance(game.action, MultiDiscrete) else obs / 2 + [-0.5, 1.5]


def reward(game: Game, obs: Array, action: Array) -> Array:
    if isinstance(game.action, Discrete):
        return (action == target(game, obs)).astype("<f4")
    if isinstance(game.action, MultiDiscrete):
        return (action == target(game, obs)).mean(-1).astype("<f4")
    return -np.square((action - target(game, obs)) / 2).mean(-1).astype("<f4")


def play(game: Game, act: Callable[[Array], Array], rng: np.random.Generator, fragments: int, steps: int) -> Data:
    """Fragments cut, not ended."""
    data = []
    for _ in range(fragments):
        obs = observe(game, rng, steps + 1)
        action = act(obs[:-1]).astype(game.action.element.base)
        data.append(Columns(obs, action, reward(game, obs[:-1], action)))
    return data, [False] * fragments


def explorer(policy: Policy, rng: np.random.Generator) -> Callable[[Array], Array]:
    return lambda obs: policy.act(obs, policy.noise(rng, len(obs)))[0]


def anything(game: Game, rng: np.random.Generator) -> Callable[[Array], Array]:
    """Uniformly random actions."""
    return lambda obs: observe(Game("any", game.action, Discrete(1)), rng, len(obs))


class Learning:
    """An algorithm, what it learned, and what it learns from."""

    name = ""  # by which the algorithm was found

    def __init__(self, algorithm: Any, seed: int = 0, capacity: int = 20_000) -> None:
        self.algorithm, self.game, self.config = algorithm, algorithm.game, algorithm.config
        self.rng = np.random.default_rng(seed)
        self.state = algorithm.init(jax.random.key(seed))
        self.replay = Replay(self.game, capacity)
        self.normaliser = Normaliser(feature_shape(self.game.observation))
        self.metrics: dict[str, float] = {}

    def take(self, data: Data) -> None:
        self.normaliser.observe(self.replay.extend(*data))

    def sample(self, updates: int) -> Transitions:
        c = self.config
        return self.replay.sample(self.rng, updates, c.batch, gamma=c.gamma, n_step=c.n_step)

    def update(self, updates: int, fused: int = 50) -> None:
        for _ in range(updates // fused):
            self.state, metrics = self.algorithm.update(self.state, self.normaliser.params, self.sample(fused))
            self.metrics = {name: float(value) for name, value in metrics.items()}

    def policy(self, exploration: float = 0.0) -> Policy:
        return self.algorithm.policy(self.state, self.normaliser.params, exploration)

    def online(self, rounds: int, steps: int = 64, updates: int = 50) -> None:
        self.take(play(self.game, anything(self.game, self.rng), self.rng, 4, steps))
        for _ in range(rounds):
            policy = self.policy(self.algorithm.exploration(len(self.replay)))
            self.take(play(self.game, explorer(policy, self.rng), self.rng, 1, steps))
            self.update(updates)

    def score(self, explore: bool = False) -> float:
        """Mean reward per step of the greedy policy."""
        rng, policy = np.random.default_rng(1), self.policy()
        obs = observe(self.game, rng, 2000)
        action = policy.act(obs, policy.noise(rng, len(obs)) if explore else None)[0]
        return float(reward(self.game, obs, action).mean())
