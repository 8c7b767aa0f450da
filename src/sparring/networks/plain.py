"""A policy as plain arithmetic: a few kinds of steps that every format can write, whatever layers they come from.
Keras, TFLite and C are written from it; ONNX has operators of its own for each layer (`export/onnx.py`).

Features come in as `policy.features` gives them, but for images, which stay pixels of 0 to 255 until the first step.
What is linear is folded: a duelling head is one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.games.spec import Array
from sparring.networks.layers import Layer, flatten, own
from sparring.networks.plain_steps import Activate, Affine, Convolve, Normalise, Step
from sparring.networks.policy import CLIP, Policy, Value, features
from sparring.networks.spec import Deterministic as Tanh
from sparring.networks.spec import QValues, Squashed, action_size, choices, feature_shape, image_layout, scaling

__all__ = ["Plain", "Value", "decide", "evaluate", "pixels", "walk"]


@dataclass(frozen=True, eq=False)
class Plain:
    """`steps`, then `head`, then `bound`. Before them: pixels or numbers, times `scale` plus `offset`, clipped to
    ±`clip`.

    :param shape: (height, width, channels) of an image, or (n,).
    :param bound: What makes the head's numbers an action: its largest numbers, tanh, or clipping to ±1.
    :param value: From what `steps` give where `shares`, else from the features.
    """

    game: Game
    shape: tuple[int, ...]
    scale: Array
    offset: Array
    clip: float | None
    steps: tuple[Step, ...]
    head: Affine
    bound: Literal["argmax", "tanh", "clip"]
    value: tuple[Step, ...] = ()
    shares: bool = False

    @classmethod
    def of(cls, policy: Policy, value: Value | None = None) -> Plain:
        """:raises Unrenderable: a layer or activation from outside has no plain form."""
        p, game = policy.params, policy.game
        shape = feature_shape(game.observation)
        pixels = 1 / 255 if len(shape) == 3 else 1.0
        scale, offset, clip = np.full(shape, pixels, np.float32), np.zeros(shape, np.float32), None
        if "normaliser.mean" in p:
            scale = (pixels / p["normaliser.std"].astype(np.float64)).astype(np.float32)
            offset = (-p["normaliser.mean"].astype(np.float64) / p["normaliser.std"]).astype(np.float32)
            clip = CLIP
        bound: Literal["argmax", "tanh", "clip"] = "clip" if isinstance(game.action, Box) else "argmax"
        if isinstance(policy.head, Squashed | Tanh):
            bound = "tanh"
        steps = _steps(policy.layers, p, shape)
        tower: tuple[Step, ...] = ()
        if value is not None:
            layers = () if value.layers is None else value.layers
            tower = (*_steps(layers, value.params, shape), Affine(value.params["head.w"], value.params["head.b"]))
        return cls(
            game, shape, scale, offset, clip, steps, _head(policy), bound, tower,
            value is not None and value.layers is None,
        )  # fmt: skip

    @property
    def image(self) -> bool:
        return len(self.shape) == 3

    @property
    def outputs(self) -> int:
        return len(self.head.b)


def _steps(layers: Sequence[Layer], params: Mapping[str, Array], shape: tuple[int, ...]) -> tuple[Step, ...]:
    found: list[Step] = []
    for i, layer in enumerate(layers):
        if layer.takes_vector:
            shape = (math.prod(shape),)
        found += layer.plain(own(params, f"torso.{i}."), shape)
        shape = layer.output(shape)
    return tuple(found)


def _head(policy: Policy) -> Affine:
    """Of the numbers that make the greedy action: deviations are for exploring."""
    p, action = policy.params, policy.game.action
    w, b = p["head.w"], p["head.b"]
    if isinstance(action, Box):
        return Affine(np.ascontiguousarray(w[:, : action_size(action)]), b[: action_size(action)])
    if isinstance(policy.head, QValues) and policy.head.duelling:
        w, b = w.astype(np.float64), b.astype(np.float64)
        for part in np.split(np.arange(len(b)), np.cumsum(choices(action))[:-1]):
            w[:, part] -= w[:, part].mean(1, keepdims=True)
            b[part] -= b[part].mean()
        w, b = (w + p["head.value.w"]).astype(np.float32), (b + p["head.value.b"]).astype(np.float32)
    return Affine(w, b)


def pixels(game: Game, obs: Array) -> Array:
    """A column of observations as files of a policy take it: images as pixels (rows, height, width, channels), all
    else as float32 numbers (rows, n)."""
    space = game.observation
    if isinstance(space, Box) and space.is_image:
        h, w, c = image_layout(space)
        return np.ascontiguousarray(obs.transpose(0, h + 1, w + 1, c + 1))
    return np.ascontiguousarray(features(space, obs), np.float32)


def evaluate(plain: Plain, x: Array) -> tuple[Array, Array | None]:
    """The head's numbers, and values where there are any, of `pixels`."""
    x = x * plain.scale + plain.offset
    if plain.clip is not None:
        x = np.clip(x, -plain.clip, plain.clip)
    hidden = walk(plain.steps, x)
    out = flatten(hidden) @ plain.head.w + plain.head.b
    value = walk(plain.value, hidden if plain.shares else x)[:, 0] if plain.value else None
    return out, value


def walk(steps: Sequence[Step], x: Array) -> Array:
    """The steps, one after the other, of a column."""
    for step in steps:
        x = apply(step, x)
    return x


def apply(step: Step, x: Array) -> Array:
    match step:
        case Affine(w, b):
            return flatten(x) @ w + b
        case Convolve(w, b, stride, pads):
            x = np.pad(x, [(0, 0), *pads, (0, 0)])
            windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[:2], (1, 2))[:, ::stride, ::stride]
            return np.tensordot(windows, w, ((4, 5, 3), (0, 1, 2))) + b
        case Normalise(epsilon):
            return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + np.float32(epsilon))
        case Activate(function):
            return FUNCTIONS[function](x)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
}


def decide(game: Game, out: Array, bound: str) -> Array:
    """A column of greedy actions, of the head's numbers. `bound`: see `Plain`; "done": they are in ±1 already."""
    action = game.action
    if isinstance(action, Box):
        s = scaling(action)
        unit = np.tanh(out) if bound == "tanh" else np.clip(out, s.unit_low, s.unit_high)
        game_numbers = np.clip(s.centre + s.half * unit.astype(action.dtype), s.low, s.high)
        return game_numbers.reshape(len(out), *action.shape)
    if isinstance(action, Discrete):
        return (out.argmax(-1) + action.start).astype("<i4")
    assert isinstance(action, MultiDiscrete)
    parts = np.split(out, np.cumsum(choices(action))[:-1], -1)
    return np.stack([part.argmax(-1) for part in parts], -1).astype("<i4")
