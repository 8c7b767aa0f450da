"""Observations of a game that cannot be simulated: no play, but numbers that a policy's files can be compared on."""

import numpy as np

from sparring.games import Box, Dict, Discrete, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.policy import Policy

__all__ = ["observations"]


def observations(policy: Policy, count: int, rng: np.random.Generator) -> Array:
    """Around the normaliser's mean where the policy has one and sees numbers; else within the space's bounds."""
    space, p = policy.game.observation, policy.params
    if isinstance(space, Box) and space.dtype.startswith("float") and "normaliser.mean" in p:
        around = p["normaliser.mean"] + p["normaliser.std"] * rng.standard_normal((count, len(p["normaliser.mean"])))
        return around.reshape(count, *space.shape).astype(space.element.base)
    return _column(space, count, rng)


def _column(space: Space, count: int, rng: np.random.Generator) -> Array:
    column = np.empty(count, space.element)
    match space:
        case Dict(fields):
            for name, part in fields.items():
                column[name] = _column(part, count, rng)
        case Discrete(n, start):
            column[:] = rng.integers(start, start + n, count)
        case MultiDiscrete(nvec):
            return rng.integers(0, nvec, (count, len(nvec))).astype("<i4")
        case Box():
            return _numbers(space, count, rng)
    return column


def _numbers(space: Box, count: int, rng: np.random.Generator) -> Array:
    shape = (count, *space.shape)
    if space.dtype == "bool":
        return rng.random(shape) < 0.5
    if space.dtype.startswith("float"):
        return rng.standard_normal(shape).astype(space.dtype)
    info = np.iinfo(space.dtype)
    return rng.integers(max(info.min, -1000), min(info.max, 1000), shape, endpoint=True).astype(space.dtype)
