"""A policy: network, observation normaliser, action scaling and exploration as one whole. Raw observation in, game
action out. Here it is evaluated with NumPy, which is what rollout workers use; `export.onnx` renders the same thing.

Randomness comes in as an argument (`noise`), so every rendering can be compared with every other, exploring or not.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sparring.errors import InputError
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.spec import (
    Categorical,
    Conv,
    Gaussian,
    Head,
    Layer,
    QValues,
    Squashed,
    action_size,
    feature_shape,
    image_layout,
    param_shapes,
)

__all__ = ["CLIP", "LOG_STD_RANGE", "Policy", "features"]

CLIP = 10.0  # normalised observations are clipped to ±this
LOG_STD_RANGE = (-5.0, 2.0)
HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))


@dataclass(frozen=True)
class Policy:
    """`params` has the arrays of `networks.spec.param_shapes` and, with a normaliser, `normaliser.mean` and
    `normaliser.std` (over the flat features). `exploration` is ε for Q-values, the noise's deviation (of actions
    scaled to ±1) for deterministic ones, unused otherwise."""

    game: Game
    layers: tuple[Layer, ...]
    head: Head
    params: dict[str, Array] = field(repr=False)
    exploration: float = 0.0

    def __post_init__(self) -> None:
        shapes = param_shapes(self.game, self.layers, self.head)
        if "normaliser.mean" in self.params:
            shapes |= {f"normaliser.{k}": feature_shape(self.game.observation) for k in ("mean", "std")}
        found = {name: tuple(array.shape) for name, array in self.params.items()}
        if found != shapes:
            wrong = sorted(k for k in shapes.keys() | found.keys() if shapes.get(k) != found.get(k))
            misfits = ", ".join(f"{k}: {found.get(k)} not {shapes.get(k)}" for k in wrong)
            raise InputError(f"parameters do not fit the network: {misfits}")

    @property
    def noise_kind(self) -> Literal["uniform", "normal"]:
        return "uniform" if isinstance(self.head, QValues | Categorical) else "normal"

    @property
    def noise_size(self) -> int:
        return 2 if isinstance(self.head, QValues) else action_size(self.game.action)

    def noise(self, rng: np.random.Generator, batch: int) -> Array:
        shape = (batch, self.noise_size)
        if self.noise_kind == "uniform":
            return rng.random(shape, np.float32)
        return rng.standard_normal(shape, np.float32)

    def explore(self, exploration: float) -> "Policy":
        return replace(self, exploration=exploration)

    def act(self, obs: Array, noise: Array | None = None) -> tuple[Array, Array | None]:
        """Column of observations → column of actions, and with noise (exploring) their log-probabilities."""
        out = self.outputs(obs)
        if isinstance(self.head, QValues | Categorical):
            return self._act_discrete(out, noise)
        return self._act_continuous(out, noise)

    def outputs(self, obs: Array) -> Array:
        """The head's numbers: Q-values, logits, means …"""
        p = self.params
        x = features(self.game.observation, obs)
        if "normaliser.mean" in p:
            x = np.clip((x - p["normaliser.mean"]) / p["normaliser.std"], -CLIP, CLIP)
        for i, layer in enumerate(self.layers):
            w, b = p[f"torso.{i}.w"], p[f"torso.{i}.b"]
            z = _convolve(x, w, layer.stride) + b if isinstance(layer, Conv) else x.reshape(len(x), -1) @ w + b
            x = ACTIVATIONS[layer.activation](z)
        x = x.reshape(len(x), -1)
        out = x @ p["head.w"] + p["head.b"]
        if isinstance(self.head, QValues) and self.head.duelling:
            out = out - out.mean(-1, keepdims=True) + x @ p["head.value.w"] + p["head.value.b"]
        return out

    def _act_discrete(self, out: Array, noise: Array | None) -> tuple[Array, Array | None]:
        action = self.game.action
        start = action.start if isinstance(action, Discrete) else 0
        if isinstance(self.head, QValues):
            best = out.argmax(-1)
            if noise is None:
                return (best + start).astype("<i4"), None
            n = out.shape[-1]
            chosen = np.where(noise[:, 0] < self.exploration, np.minimum((noise[:, 1] * n).astype(int), n - 1), best)
            prob = self.exploration / n + (1 - self.exploration) * (chosen == best)
            return (chosen + start).astype("<i4"), np.log(np.maximum(prob, 1e-20)).astype("<f4")
        parts = action.nvec if isinstance(action, MultiDiscrete) else (action_size(action),)
        ends = np.cumsum(parts)[:-1]
        logits = np.split(out, ends, -1)
        if noise is None:
            picks = [part.argmax(-1) for part in logits]
            log_prob: Array | None = None
        else:
            # Gumbel-max: argmax(logit − log(−log u)) is a sample of softmax(logits).
            gumbel = -np.log(-np.log(np.clip(noise, 1e-7, 1 - 1e-7)))
            picks = [(p + g).argmax(-1) for p, g in zip(logits, np.split(gumbel, ends, -1), strict=True)]
            rows = np.arange(len(out))
            terms = [_log_softmax(p)[rows, pick] for p, pick in zip(logits, picks, strict=True)]
            log_prob = np.sum(terms, 0).astype("<f4")
        chosen = np.stack(picks, -1) if isinstance(action, MultiDiscrete) else picks[0] + start
        return chosen.astype("<i4"), log_prob

    def _act_continuous(self, out: Array, noise: Array | None) -> tuple[Array, Array | None]:
        k = action_size(self.game.action)
        mean, log_prob = out[:, :k], None
        if isinstance(self.head, Gaussian):
            u = mean
            if noise is not None:
                log_std = self.params["head.log_std"]
                u = mean + np.exp(log_std) * noise
                log_prob = (-0.5 * noise**2 - log_std - HALF_LOG_2PI).sum(-1)
            unit = np.clip(u, -1, 1) if self.scaled else u
        elif isinstance(self.head, Squashed):
            u = mean
            if noise is not None:
                log_std = np.clip(out[:, k:], *LOG_STD_RANGE)
                u = mean + np.exp(log_std) * noise
                # log(1 − tanh²u) in a form that does not overflow (Haarnoja et al. 2018, appendix C).
                log_prob = (
                    -0.5 * noise**2 - log_std - HALF_LOG_2PI - 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
                ).sum(-1)
            unit = np.tanh(u)
        else:
            unit = np.tanh(mean)
            if noise is not None:
                unit = np.clip(unit + self.exploration * noise, -1, 1)
        return self._to_game(unit), None if log_prob is None else log_prob.astype("<f4")

    @property
    def scaled(self) -> bool:
        """Whether the action has bounds on all sides, to which ±1 is scaled."""
        assert isinstance(self.game.action, Box)
        low, high = self.game.action.bounds
        return low is not None and high is not None

    def _to_game(self, unit: Array) -> Array:
        action = self.game.action
        assert isinstance(action, Box)
        low, high = action.bounds
        if low is not None and high is not None:
            low, high = low.reshape(-1), high.reshape(-1)
            unit = np.clip(low + (unit + 1) * 0.5 * (high - low), low, high)
        return unit.astype(action.dtype).reshape(len(unit), *action.shape)


def features(space: Space, obs: Array) -> Array:
    """Raw observations → what the first layer sees (see `networks.spec.feature_shape`), before normalisation."""
    if isinstance(space, Discrete):
        return (obs[:, None] - space.start == np.arange(space.n)).astype(np.float32)
    if isinstance(space, MultiDiscrete):
        return np.concatenate([obs[:, i, None] == np.arange(n) for i, n in enumerate(space.nvec)], -1).astype(
            np.float32
        )
    if isinstance(space, Dict):
        flat = [features(space.fields[name], obs[name]).reshape(len(obs), -1) for name in sorted(space.fields)]
        return np.concatenate(flat, -1)
    x = obs.astype(np.float32, copy=False)
    if space.is_image:
        h, w, c = image_layout(space)
        return x.transpose(0, h + 1, w + 1, c + 1) * np.float32(1 / 255)
    return x.reshape(len(x), -1)


def _convolve(x: Array, w: Array, stride: int) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[:2], (1, 2))[:, ::stride, ::stride]
    return np.tensordot(windows, w, ((4, 5, 3), (0, 1, 2)))


def _log_softmax(x: Array) -> Array:
    z = x - x.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


ACTIVATIONS: dict[str, Any] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "linear": lambda x: x,
}
