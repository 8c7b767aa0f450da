"""Random play: what acts until a version is published, in clients, over HTTP, and beside a first candidate in its
simulator. Light: clients import it."""

import math

import numpy as np

from sparring.games import Box, Game
from sparring.games.spec import Array, Discrete
from sparring.networks.spec import choices, scaling

__all__ = ["RandomPlay"]

MIN_MASS = 1e-300
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class RandomPlay:
    """Acts at random over the whole action space. Version 0 of "random".

    A choice, and a number with both bounds, is drawn evenly. Any other number is drawn from a normal distribution of
    deviation 1 around 0 (or around its bound, where 0 is beyond it), and clipped to the bound.

    Log-probabilities are what every policy's are (`Policy.act`): of numbers scaled to ±1 where they have both bounds.
    On a bound to which a number was clipped, it is that of the mass beyond.
    """

    model, version = "random", 0

    def __init__(self, game: Game) -> None:
        self._space = space = game.action
        if not isinstance(space, Box):
            self._counts = np.array(choices(space))
            self._size = len(self._counts)
            self._log_prob = -float(np.log(self._counts).sum())
            return
        self._scaling = s = scaling(space)
        self._size = len(s.low)
        self._even = s.bounded
        self._mean = np.where(s.bounded, 0.0, np.clip(0.0, s.low, s.high))
        self._low_mass = _log_mass(s.low - self._mean)
        self._high_mass = _log_mass(self._mean - s.high)

    def noise(self, rng: np.random.Generator, rows: int) -> Array:
        """Random numbers to act with: even ones of 0 to 1, and normal ones for numbers without both bounds."""
        if not isinstance(self._space, Box) or self._even.all():
            return rng.random((rows, self._size), np.float32)
        normal = rng.standard_normal((rows, self._size), np.float32)
        return np.where(self._even, rng.random((rows, self._size), np.float32), normal)

    def run(self, feed: dict[str, Array], noise: Array | None) -> tuple[Array, Array]:
        """A column of actions, and the log-probability of each.

        :param feed: Is not looked at.
        :param noise: A row for each action.
        """
        assert noise is not None, "random play needs noise"
        if isinstance(self._space, Box):
            return self._numbers(self._space, noise)
        picks = np.minimum((noise * self._counts).astype("<i4"), (self._counts - 1).astype("<i4"))
        log_prob = np.full(len(noise), self._log_prob, "<f4")
        if isinstance(self._space, Discrete):
            return picks[:, 0] + np.int32(self._space.start), log_prob
        return picks, log_prob

    def _numbers(self, space: Box, noise: Array) -> tuple[Array, Array]:
        s, z = self._scaling, noise.astype(np.float64)
        drawn = np.where(self._even, s.centre + s.half * (2 * z - 1), self._mean + z)
        action = np.clip(drawn.astype(space.element.base), s.low, s.high)
        density = np.where(self._even, -math.log(2), -0.5 * z * z - HALF_LOG_2PI)
        density = np.where(~self._even & (action <= s.low), self._low_mass, density)
        density = np.where(~self._even & (action >= s.high), self._high_mass, density)
        return action.reshape(-1, *space.shape), density.sum(-1).astype("<f4")


def _log_mass(at: Array) -> Array:
    """The logarithm of a standard normal distribution's mass below each of these."""
    return np.array([math.log(max(0.5 * math.erfc(-x / math.sqrt(2)), MIN_MASS)) for x in at.tolist()])
