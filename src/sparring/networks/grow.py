"""A policy for the next form of its game: what it knows stays, and what is new begins without a say."""

import math

import numpy as np

from sparring.experience.change import sources
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.layers import Dense
from sparring.networks.policy import Policy
from sparring.networks.spec import action_size, feature_shape, head_outputs, param_shapes

__all__ = ["grow"]


def grow(policy: Policy, game: Game) -> Policy | str:
    """The policy for `game`. Weights of added inputs are zero, and an added action is like the mean of the others. So
    it plays as before where nothing is new. Or why that cannot be, for people."""
    old = policy.game
    if type(old.action) is not type(game.action):
        return "its actions are of another kind"
    inputs = None if old.observation == game.observation else _inputs(policy, game)
    if isinstance(inputs, str):
        return inputs
    params = {name: np.asarray(array) for name, array in policy.params.items()}
    if inputs is not None:
        first = "torso.0.w" if policy.layers else "head.w"
        params[first] = _rows(params[first], inputs)
        if "normaliser.mean" in params:
            mean, std = _usual(game.observation)
            params["normaliser.mean"] = np.where(inputs < 0, mean, params["normaliser.mean"][inputs])
            params["normaliser.std"] = np.where(inputs < 0, std, params["normaliser.std"][inputs])
    if old.action != game.action:
        params |= _outputs(policy, game, params)
    shapes = param_shapes(game, policy.layers, policy.head)
    wrong = [name for name, shape in shapes.items() if name not in params or params[name].shape != tuple(shape)]
    if wrong:
        return f"its network cannot take them in ({wrong[0]})"
    return Policy(game, policy.layers, policy.head, params, policy.exploration)


def _inputs(policy: Policy, game: Game) -> Array | str:
    flat = len(feature_shape(policy.game.observation)) == len(feature_shape(game.observation)) == 1
    if not policy.layers and "head.value.w" in policy.params:
        return "it has no layers below its two heads"
    if not flat or (policy.layers and type(policy.layers[0]) is not Dense):
        return "its first layer does not take a vector that could grow"
    return sources(policy.game.observation, game.observation)


def _rows(weights: Array, inputs: Array) -> Array:
    return np.where(inputs[:, None] < 0, 0.0, weights[inputs])


def _outputs(policy: Policy, game: Game, params: dict[str, Array]) -> dict[str, Array]:
    """Columns of the head: one for each number of an action, or two (means, then deviations)."""
    old, new, head = policy.game.action, game.action, policy.head
    places, size = sources(old, new), action_size(old)
    copies = head_outputs(head, old) // size
    grown: dict[str, Array] = {}
    for name in ("head.w", "head.b", "head.log_std"):
        if name not in params:
            continue
        blocks = np.split(params[name], params[name].shape[-1] // size, -1)
        assert len(blocks) in (1, copies)
        grown[name] = np.concatenate([_columns(block, places, old, new) for block in blocks], -1)
    return grown


def _columns(block: Array, places: Array, old: Space, new: Space) -> Array:
    """Of choices, new ones are the mean of those of their part; of numbers, they begin at zero."""
    out = np.where(places < 0, 0.0, block[..., places])
    at_old = at_new = 0
    for had, has in _parts(old, new):
        if had:
            mean = block[..., at_old : at_old + had].mean(-1, keepdims=True)
            part = slice(at_new, at_new + has)
            out[..., part] = np.where(places[part] < 0, mean, out[..., part])
        at_old, at_new = at_old + had, at_new + has
    return out


def _parts(old: Space, new: Space) -> list[tuple[int, int]]:
    if isinstance(old, Discrete) and isinstance(new, Discrete):
        return [(old.n, new.n)]
    if isinstance(old, MultiDiscrete) and isinstance(new, MultiDiscrete):
        return [(old.nvec[i] if i < len(old.nvec) else 0, n) for i, n in enumerate(new.nvec)]
    return []


def _usual(space: Space) -> tuple[Array, Array]:
    """Mean and deviation of numbers of which nothing is known but their bounds."""
    if isinstance(space, Dict):
        each = [_usual(space.fields[name]) for name in sorted(space.fields)]
        return np.concatenate([mean for mean, _ in each]), np.concatenate([std for _, std in each])
    size = math.prod(feature_shape(space))
    mean, std = np.zeros(size), np.ones(size)
    if isinstance(space, Box):
        low, high = space.bounds
        if low is not None and high is not None:
            width = (high - low).reshape(-1)
            sound = (width > 0) & (width < 1e6)
            mean = np.where(sound, (low + high).reshape(-1) / 2, mean)
            std = np.where(sound, width / math.sqrt(12), std)
    return mean, std
