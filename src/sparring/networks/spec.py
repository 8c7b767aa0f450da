"""What a network is: a declarative list of layers (`layers.py`) and a head. The JAX function that learns, the NumPy one
that acts in rollout workers and the ONNX graph that is published are all rendered from it."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.layers import Conv, Dense, Layer, check_activation

__all__ = [
    "Categorical",
    "Conv",
    "Dense",
    "Deterministic",
    "Gaussian",
    "Head",
    "Layer",
    "ParameterShape",
    "QValues",
    "Scaling",
    "Squashed",
    "action_size",
    "choices",
    "feature_shape",
    "head_outputs",
    "image_layout",
    "param_shapes",
    "scaling",
    "torso_shapes",
]

MAX_PARAMETERS = 1 << 27  # of a network's layers: 512 MiB, and several times that with an optimiser's arrays
UNBOUNDED = 3e38  # a bound beyond this means none (float32's largest number; the catalogue's 1e308)


class QValues(msgspec.Struct, frozen=True, tag="q", tag_field="head"):
    """A value per action; greedy is the best, exploring is ε-greedy. `duelling`: Wang et al. 2016. A MultiDiscrete has
    values per part, whose mean is the action's; each part is chosen, and explored, by itself."""

    duelling: bool = False


class Categorical(msgspec.Struct, frozen=True, tag="categorical", tag_field="head"):
    """Logits per action (per part of a MultiDiscrete); greedy is the most likely, exploring samples."""


class Gaussian(msgspec.Struct, frozen=True, tag="gaussian", tag_field="head"):
    """Mean per observation, one learned log-deviation per action dimension; clipped to the action's bounds (PPO).
    `observed`: the log-deviation is the network's answer to the observation, too (RLlib's PPO)."""

    observed: bool = False


class Squashed(msgspec.Struct, frozen=True, tag="squashed", tag_field="head"):
    """Mean and log-deviation per observation, squashed by tanh into the action's bounds (SAC)."""


class Deterministic(msgspec.Struct, frozen=True, tag="deterministic", tag_field="head"):
    """tanh into the action's bounds; exploring adds Gaussian noise (DDPG, TD3)."""


Head = QValues | Categorical | Gaussian | Squashed | Deterministic

HEADS_OF_ACTION: dict[type, tuple[type, ...]] = {
    Discrete: (QValues, Categorical),
    MultiDiscrete: (QValues, Categorical),
    Box: (Gaussian, Squashed, Deterministic),
}


def action_size(action: Space) -> int:
    """Numbers that describe one action: logits of a discrete one, dimensions of a continuous one."""
    if isinstance(action, Discrete):
        return action.n
    if isinstance(action, MultiDiscrete):
        return sum(action.nvec)
    assert isinstance(action, Box)
    return math.prod(action.shape)


def choices(action: Space) -> tuple[int, ...]:
    """Of how many each part of an action is one: a Discrete has one part."""
    if isinstance(action, MultiDiscrete):
        return action.nvec
    assert isinstance(action, Discrete)
    return (action.n,)


def feature_shape(space: Space) -> tuple[int, ...]:
    """What the first layer sees: (height, width, channels) of an image, else one flat vector (one-hot for discrete)."""
    if isinstance(space, Box) and space.is_image:
        h, w, c = (space.shape[i] for i in image_layout(space))
        return h, w, c
    if isinstance(space, Dict):
        return (sum(math.prod(feature_shape(space.fields[name])) for name in sorted(space.fields)),)
    return (action_size(space),)


def image_layout(space: Box) -> tuple[int, int, int]:
    """Axes of height, width, channels: channels come first when the first axis is the smallest (frame stacks)."""
    return (1, 2, 0) if space.shape[0] < space.shape[2] else (0, 1, 2)


class Scaling(NamedTuple):
    """How a head's numbers become a Box action, per (flat) dimension and in the action's own precision:
    `clip(centre + half × clip(u, unit_low, unit_high), low, high)`. A dimension with both bounds is scaled from ±1;
    any other keeps the head's numbers and the bound it has."""

    bounded: Array  # which dimensions have both bounds
    low: Array
    high: Array
    centre: Array
    half: Array
    unit_low: Array
    unit_high: Array


def scaling(action: Box) -> Scaling:
    dtype, size = np.dtype(action.dtype), action_size(action)
    low, high = (
        np.full(size, none) if b is None else np.where(np.abs(b) > UNBOUNDED, none, b).reshape(-1)
        for b, none in zip(action.bounds, (-np.inf, np.inf), strict=True)
    )
    bounded = np.isfinite(low) & np.isfinite(high)
    a, b = np.where(bounded, low, -1), np.where(bounded, high, 1)
    low, high = _round_inwards(low, high, dtype)
    centre, half = (a / 2 + b / 2).astype(dtype), (b / 2 - a / 2).astype(dtype)
    # centre ± half, rounded, must reach the bounds, on which clipped actions lie; and 0 could not be divided by.
    short = (half == 0) | bounded & ((centre + half < high) | (centre - half > low))
    half = np.where(short, half + 2 * np.spacing(np.maximum(np.abs(a), np.abs(b)).astype(dtype)), half)
    return Scaling(
        bounded=bounded,
        low=low,
        high=high,
        centre=centre,
        half=half,
        unit_low=np.where(bounded, -1, low).astype(np.float32),
        unit_high=np.where(bounded, 1, high).astype(np.float32),
    )


def _round_inwards(low: Array, high: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Bounds in the action's precision, never outside the declared ones: float32(0.1) > 0.1, and the gateway would
    refuse it."""
    a, b = low.astype(dtype), high.astype(dtype)
    a = np.where(a < low, np.nextafter(a, dtype.type(np.inf)), a)
    b = np.where(b > high, np.nextafter(b, dtype.type(-np.inf)), b)
    return np.minimum(a, b), b


def head_outputs(head: Head, action: Space) -> int:
    return action_size(action) * (2 if isinstance(head, Squashed) or head == Gaussian(observed=True) else 1)


def param_shapes(game: Game, layers: tuple[Layer, ...], head: Head) -> dict[str, tuple[int, ...]]:
    """Name and shape of every learned array of a policy; InputError where the layers do not fit the game.

    Dense weights are (in, out); Conv weights are (kernel, kernel, in, out).
    """
    if type(head) not in HEADS_OF_ACTION[type(game.action)]:
        raise InputError(
            f"a {type(head).__name__} head does not give {type(game.action).__name__} actions ({game.name}): "
            f"use one of {', '.join(h.__name__ for h in HEADS_OF_ACTION[type(game.action)])}"
        )
    tanh = isinstance(head, Squashed | Deterministic)
    if tanh and isinstance(game.action, Box) and not scaling(game.action).bounded.all():
        raise InputError(
            f"a {type(head).__name__} head needs a lower and an upper bound for every action dimension, "
            f"{game.name} lacks some: declare low and high, or learn it with ppo"
        )
    shapes, shape = torso_shapes(game.observation, layers)
    width = math.prod(shape)
    shapes["head.w"] = (width, head_outputs(head, game.action))
    shapes["head.b"] = (head_outputs(head, game.action),)
    if isinstance(head, QValues) and head.duelling:
        shapes |= {"head.value.w": (width, 1), "head.value.b": (1,)}
    if head == Gaussian():
        shapes["head.log_std"] = (action_size(game.action),)
    return shapes


class ParameterShape(tuple[int, ...]):
    """A parameter's shape that also knows how the parameter begins, where its layer says so."""

    init: Callable[[np.random.Generator], Array]

    @classmethod
    def of(cls, layer: Layer, name: str, shape: Iterable[int]) -> "ParameterShape":
        made = cls(shape)
        made.init = partial(layer.init, name, tuple(made))
        return made


def torso_shapes(
    observation: Space, layers: tuple[Layer, ...], extra: int = 0
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Arrays of the layers below a head, and the shape that leaves them. `extra` inputs (a critic's action) join the
    first layer that takes a vector, or the head where there is none: behind an image's convolutions."""
    shape = feature_shape(observation)
    shapes: dict[str, tuple[int, ...]] = {}
    for i, layer in enumerate(layers):
        if layer.takes_vector:
            shape, extra = (math.prod(shape) + extra,), 0
        try:
            check_activation(layer)
            found = layer.shapes(shape)
        except InputError as error:
            raise InputError(f"layer {i}: {error}") from error
        shapes |= {f"torso.{i}.{name}": ParameterShape.of(layer, name, each) for name, each in found.items()}
        shape = layer.output(shape)
    if (size := sum(map(math.prod, shapes.values()))) > MAX_PARAMETERS:
        raise InputError(
            f"the layers would have {size:,} parameters, at most {MAX_PARAMETERS:,} are allowed. Make the game's "
            "spaces smaller, or the layers"
        )
    return shapes, (math.prod(shape) + extra,) if extra else shape
