"""A policy: network, observation normaliser, action scaling and exploration as one whole. Raw observation in, game
action out. Here it is evaluated with NumPy, which is what rollout workers use; `export.onnx` renders the same thing.

Randomness comes in as an argument (`noise`), so every rendering can be compared with every other, exploring or not.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sparring.errors import InputError
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import Array, Part, column
from sparring.networks.layers import Layer, flatten, own
from sparring.networks.spec import (
    Categorical,
    Gaussian,
    Head,
    QValues,
    Scaling,
    Squashed,
    action_size,
    choices,
    feature_shape,
    image_layout,
    param_shapes,
    scaling,
)

__all__ = ["CLIP", "LOG_STD_RANGE", "OBSERVED_LOG_STD_RANGE", "Policy", "Value", "features", "to_batch"]

CLIP = 10.0  # normalised observations are clipped to ±this
LOG_STD_RANGE = (-5.0, 2.0)
OBSERVED_LOG_STD_RANGE = (-20.0, 20.0)  # RLlib's
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2)
MIN_PROB = 1e-20  # a random action that ε = 0 never takes still has a finite log-probability
GUMBEL_CLIP = (1e-7, 1 - 1e-7)
ALONE = "it is a policy alone. PPO learns a value, and the run keeps it: load_policy(RUN)"
MIN_MASS = 1e-300  # what lies beyond 37 deviations, where no noise comes
FAR = 1e6  # deviations beyond which a tail is as good as empty; its square is still a float32
# For JAX and ONNX: log erfc(a) = log t − a² + Σ cᵢ tⁱ, t = 1/(1 + a/2), a ≥ 0, the Chebyshev fit of Press et al., which
# has erfc within 1.2e-7 of itself everywhere; highest power first.
ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


@dataclass(frozen=True, eq=False)
class Value:
    """What an actor-critic thinks a state is worth: layers of its own, or none and a head on the policy's.

    :param layers: None: it shares the policy's.
    :param params: `torso.0.w` …, `head.w`, `head.b`.
    """

    layers: tuple[Layer, ...] | None
    params: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Policy:
    """What acts: `load_policy` gives one.

    :param game: The game that it plays.
    :param layers: The network's layers.
    :param head: What their output means: Q-values, logits, means …
    :param params: The float32 arrays of `networks.spec.param_shapes` and, with a normaliser, `normaliser.mean` and
        `normaliser.std` (shaped like the features).
    :param exploration: ε for Q-values, the noise's deviation (of actions scaled to ±1) for deterministic ones, unused
        otherwise.
    :param critic: The value network that learned beside it, what reads it when it is asked for, or in words why there
        is none.
    """

    game: Game
    layers: tuple[Layer, ...]
    head: Head
    params: dict[str, Array] = field(repr=False)
    exploration: float = 0.0
    critic: Value | str | Callable[[], Value] = field(default=ALONE, repr=False)

    def __post_init__(self) -> None:
        shapes = param_shapes(self.game, self.layers, self.head)
        if "normaliser.mean" in self.params:
            shapes |= {f"normaliser.{k}": feature_shape(self.game.observation) for k in ("mean", "std")}
        # A learner's arrays (JAX, float64) would drag their own arithmetic into every step.
        params = {name: np.asarray(array, np.float32) for name, array in self.params.items()}
        found = {name: array.shape for name, array in params.items()}
        if found != shapes:
            wrong = sorted(k for k in shapes.keys() | found.keys() if shapes.get(k) != found.get(k))
            misfits = ", ".join(f"{k}: {found.get(k)} not {shapes.get(k)}" for k in wrong)
            raise InputError(f"parameters do not fit the network: {misfits}")
        most = 1.0 if isinstance(self.head, QValues) else 100.0
        if not 0 <= self.exploration <= most:
            raise InputError(f"exploration is {self.exploration}, allowed are 0 to {most:g}")
        object.__setattr__(self, "params", params)  # frozen for everyone else

    def problem(self) -> str | None:
        """Why nobody should play with it, or None: learning that diverged leaves its traces in the parameters."""
        for name, array in self.params.items():
            if not np.isfinite(array).all():
                return f"{name} has NaN or infinite values"
        if "normaliser.std" in self.params and (self.params["normaliser.std"] <= 0).any():
            return "normaliser.std has values that are not above 0"
        return None

    @property
    def noise_kind(self) -> Literal["uniform", "normal"]:
        """The distribution of `noise`."""
        return "uniform" if isinstance(self.head, QValues | Categorical) else "normal"

    @property
    def noise_size(self) -> int:
        """Numbers of `noise` for each observation."""
        # Of Q-values: whether each part of the action is random, and then which it is.
        return 2 * len(self._parts) if isinstance(self.head, QValues) else action_size(self.game.action)

    @cached_property
    def _parts(self) -> list[slice]:
        """Where each part of a discrete action has its numbers among the head's."""
        ends = np.cumsum(choices(self.game.action)).tolist()
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def _by_part(self, out: Array) -> list[Array]:
        return [out[:, part] for part in self._parts]

    def noise(self, rng: np.random.Generator, batch: int) -> Array:
        """Random numbers to explore with, for `act`.

        :param rng: Where they come from.
        :param batch: How many observations.
        """
        shape = (batch, self.noise_size)
        if self.noise_kind == "uniform":
            return rng.random(shape, np.float32)
        return rng.standard_normal(shape, np.float32)

    def explore(self, exploration: float) -> "Policy":
        """The same policy with another `exploration`.

        :param exploration: How much it tries.
        """
        return replace(self, exploration=exploration)

    def act(self, obs: Any, noise: Any = None) -> tuple[Array, Array | None]:
        """One observation → one action, a batch → a column of actions; with noise (exploring) their log-probabilities.

        :param obs: Arrays or lists; of a Dict space mappings, and a batch of these is a mapping of columns or a list
            of mappings.
        :param noise: To explore with, a row for each observation (`Policy.noise`). None: greedily.
        :raises InputError: it says what does not fit.

        For continuous actions this is a log-density: of the action as a learner finds it in a fragment, scaled to ±1
        where it has bounds. Where a Gaussian is clipped to a bound, it is the log-probability of the mass beyond. Heads
        without a density (Deterministic) give none.
        """
        batch, single = to_batch(self.game.observation, obs)
        rows = None if noise is None else self._noise_rows(noise, len(batch))
        out = self.outputs(batch)
        action = self.choose(out, rows)
        log_prob = None if rows is None else self.log_prob(out, rows, action)
        return (action[0], None if log_prob is None else log_prob[0]) if single else (action, log_prob)

    def _noise_rows(self, noise: Any, rows: int) -> Array:
        found, shape = np.asarray(noise), (rows, self.noise_size)
        if found.dtype.kind != "f" or (found.shape != shape and (rows != 1 or found.shape != shape[1:])):
            raise InputError(f"noise: expected numbers of shape {shape}, got {found.dtype} of shape {found.shape}")
        return found.reshape(shape)

    def probabilities(self, obs: Any) -> Array | list[Array]:
        """How likely each action is while exploring: of a softmax policy, or of ε-greedy Q-values (`exploration`).

        :param obs: One observation or a batch, as for `act`.
        :returns: (actions,) of one observation, (batch, actions) of a batch; a list of these, one for each part, where
            the action is MultiDiscrete.
        :raises InputError: actions are continuous: they have a density, which `act` tells of those that it draws.
        """
        if not isinstance(self.head, QValues | Categorical):
            raise InputError(f"{self.game.name} has continuous actions: no single one has a probability")
        batch, single = to_batch(self.game.observation, obs)
        parts = self._by_part(self.outputs(batch))
        if isinstance(self.head, QValues):
            return self._answer([_epsilon_greedy(part, self.exploration) for part in parts], single)
        return self._answer([_softmax(part) for part in parts], single)

    def _answer(self, parts: list[Array], single: bool) -> Array | list[Array]:
        found = [part[0] for part in parts] if single else parts
        return found if isinstance(self.game.action, MultiDiscrete) else found[0]

    def values(self, obs: Any) -> Array | list[Array]:
        """The Q-value of each action: the return that the policy expects after it.

        :param obs: One observation or a batch, as for `act`.
        :returns: (actions,) of one observation, (batch, actions) of a batch. Where the action is MultiDiscrete, a list
            of these, one for each part: the value of an action is the mean of its parts'.
        :raises InputError: the policy has none: actor-critic algorithms learn a value of the state (`state_value`).
        """
        if not isinstance(self.head, QValues):
            raise InputError("this policy has no values of actions: algorithms with Q-values do. See state_value")
        batch, single = to_batch(self.game.observation, obs)
        return self._answer(self._by_part(self.outputs(batch)), single)

    def state_value(self, obs: Any) -> Array:
        """The value of a state: the return that the policy expects from there on. PPO and IQL learn it. PPO's is by its
        rewards: with `scale_reward`, as is usual, a return in units of the rewards' deviation.

        :param obs: One observation or a batch, as for `act`.
        :returns: A number, or one for each observation of a batch.
        :raises InputError: there is none; the message says why.
        """
        batch, single = to_batch(self.game.observation, obs)
        values = self._critic.outputs(batch)[:, 0]
        return values[0] if single else values

    @cached_property
    def _critic(self) -> "Policy":
        """The value network, as the Q-value of a single action: so it is computed as any network."""
        try:
            critic = self.critic() if callable(self.critic) else self.critic
        except InputError as error:
            critic = str(error)
        if isinstance(critic, str):
            raise InputError(f"this policy has no value of a state: {critic}")
        from_us = ("normaliser.", "torso.") if critic.layers is None else ("normaliser.",)
        params = {name: array for name, array in self.params.items() if name.startswith(from_us)}
        layers = self.layers if critic.layers is None else critic.layers
        return Policy(
            Game("value", self.game.observation, Discrete(1)), layers, QValues(), params | dict(critic.params)
        )

    def outputs(self, obs: Array) -> Array:
        """The head's numbers for a column of observations: Q-values, logits, means …

        :param obs: The observations.
        """
        p = self.params
        x = features(self.game.observation, obs)
        if "normaliser.mean" in p:
            x = _clip((x - p["normaliser.mean"]) / p["normaliser.std"], -CLIP, CLIP)
        for apply in self._torso:
            x = apply(x)
        out = x @ p["head.w"] + p["head.b"]
        if isinstance(self.head, QValues) and self.head.duelling:
            centred = [part - part.mean(-1, keepdims=True) for part in self._by_part(out)]
            out = np.concatenate(centred, -1) + x @ p["head.value.w"] + p["head.value.b"]
        return out

    def choose(self, out: Array, noise: Array | None) -> Array:
        """The actions, of the head's numbers.

        :param out: What `outputs` gave.
        :param noise: What `noise` gave. None: greedily.
        """
        if isinstance(self.head, QValues | Categorical):
            return self._choose_discrete(out, noise)
        s = self.scaling
        mean = out[:, : len(s.low)]
        if isinstance(self.head, Gaussian):
            u = mean if noise is None else mean + np.exp(self._log_std(out)) * noise
            return self._to_game(_clip(u, s.unit_low, s.unit_high))
        if isinstance(self.head, Squashed):
            return self._to_game(np.tanh(mean if noise is None else self._unsquashed(out, noise)[0]))
        unit = np.tanh(mean)
        if noise is not None:
            unit = _clip(unit + np.float32(self.exploration) * noise, -1, 1)
        return self._to_game(unit)

    def log_prob(self, out: Array, noise: Array, action: Array) -> Array | None:
        """Of actions that were chosen so: any number of rows at once, whenever they were chosen.

        :param out: What `outputs` gave.
        :param noise: With which they were chosen.
        :param action: The actions.
        """
        if isinstance(self.head, QValues | Categorical):
            return self._log_prob_discrete(out, action)
        if isinstance(self.head, Gaussian):
            return self._log_prob_gaussian(out, noise, action)
        if isinstance(self.head, Squashed):
            u, log_std = self._unsquashed(out, noise)
            # log(1 − tanh²u) in a form that does not overflow (Haarnoja et al. 2018, appendix C).
            correction = 2 * (LOG_2 - u - np.logaddexp(0, -2 * u))
            return (-0.5 * noise**2 - log_std - HALF_LOG_2PI - correction).sum(-1).astype("<f4")
        return None

    def _choose_discrete(self, out: Array, noise: Array | None) -> Array:
        action, count = self.game.action, len(self._parts)
        # Gumbel-max: argmax(logit − log(−log u)) is a sample of softmax(logits).
        if noise is not None and isinstance(self.head, Categorical):
            out, noise = out - np.log(-np.log(_clip(noise, *GUMBEL_CLIP))), None
        picks = [part.argmax(-1) for part in self._by_part(out)]
        if noise is not None:
            for i, n in enumerate(choices(action)):
                random = np.minimum((noise[:, count + i] * n).astype(int), n - 1)
                picks[i] = np.where(noise[:, i] < self.exploration, random, picks[i])
        if isinstance(action, MultiDiscrete):
            return np.stack(picks, -1).astype("<i4")
        return (picks[0] + action.start if isinstance(action, Discrete) and action.start else picks[0]).astype("<i4")

    def _log_prob_discrete(self, out: Array, action: Array) -> Array:
        space = self.game.action
        picks = action.T if isinstance(space, MultiDiscrete) else [action - space.start]  # type: ignore[union-attr]
        parts = zip(self._by_part(out), picks, strict=True)
        if isinstance(self.head, QValues):
            each = [_log_epsilon_greedy(part, pick, self.exploration) for part, pick in parts]
        else:
            each = [_log_softmax(part, pick) for part, pick in parts]
        return each[0] if len(each) == 1 else np.sum(each, 0)

    def _unsquashed(self, out: Array, noise: Array) -> tuple[Array, Array]:
        """What the tanh is taken of, and the logarithm of its deviation."""
        size = len(self.scaling.low)
        log_std = _clip(out[:, size:], *LOG_STD_RANGE)
        return out[:, :size] + np.exp(log_std) * noise, log_std

    def _log_std(self, out: Array) -> Array:
        """A Gaussian head's: of all observations, or of each."""
        if "head.log_std" in self.params:
            return self.params["head.log_std"]
        return _clip(out[:, len(self.scaling.low) :], *OBSERVED_LOG_STD_RANGE)

    def _log_prob_gaussian(self, out: Array, noise: Array, game: Array) -> Array:
        """All that a learner can know of a clipped action is its bound, on which the Gaussian's mass beyond lies.
        Whether it was is asked of the game's action: that is what fragments keep."""
        s, log_std = self.scaling, self._log_std(out)
        # The noise itself: (u − mean) / σ loses digits when the deviation is small.
        log_prob = -0.5 * noise**2 - (log_std + np.float32(HALF_LOG_2PI))
        flat = game.reshape(noise.shape)
        at_high = flat == s.high
        clipped = at_high | (flat == s.low)
        mean = out[:, : len(s.low)]
        beyond = np.where(at_high, mean - s.unit_high, s.unit_low - mean) * np.exp(-log_std)
        log_prob[clipped] = [_log_mass(x) for x in beyond[clipped].tolist()]
        return log_prob.sum(-1).astype("<f4", copy=False)

    @cached_property
    def _torso(self) -> list[Callable[[Array], Array]]:
        """What turns features into the vector that the head sees, step by step: looked up once, not at every act."""
        steps: list[Callable[[Array], Array]] = []
        shape = feature_shape(self.game.observation)
        for i, layer in enumerate(self.layers):
            if layer.takes_vector and len(shape) != 1:
                steps.append(flatten)
                shape = (math.prod(shape),)
            steps.append(layer.bind_numpy(own(self.params, f"torso.{i}.")))
            shape = layer.output(shape)
        return steps if len(shape) == 1 else [*steps, flatten]

    @cached_property
    def scaling(self) -> Scaling:
        assert isinstance(self.game.action, Box)
        return scaling(self.game.action)

    def _to_game(self, unit: Array) -> Array:
        action, s = self.game.action, self.scaling
        assert isinstance(action, Box)
        return _clip(s.centre + s.half * unit.astype(action.dtype), s.low, s.high).reshape(len(unit), *action.shape)


def _log_softmax(logits: Array, pick: Array) -> Array:
    # Without the methods' `keepdims` and such: they cost more than the few numbers of a step.
    z = logits - np.maximum.reduce(logits, -1)[:, None]
    log_prob = z[np.arange(len(z)), pick] - np.log(np.add.reduce(np.exp(z), -1))
    return log_prob.astype("<f4", copy=False)


def _log_epsilon_greedy(values: Array, pick: Array, exploration: float) -> Array:
    prob = exploration / values.shape[-1] + (1 - exploration) * (pick == values.argmax(-1))
    return np.log(np.maximum(prob, MIN_PROB)).astype("<f4")


def _epsilon_greedy(values: Array, exploration: float) -> Array:
    found = np.full(values.shape, exploration / values.shape[-1], np.float32)
    found[np.arange(len(values)), values.argmax(-1)] += np.float32(1 - exploration)
    return found


def _softmax(logits: Array) -> Array:
    z = np.exp(logits - logits.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def _clip(x: Array, low: Any, high: Any) -> Array:
    """`np.clip` takes several times as long for the few numbers of one action."""
    return np.minimum(np.maximum(x, low), high)


def _log_mass(x: float) -> float:
    """log Φ(x). One by one: few numbers are clipped at a time, and NumPy has no erfc."""
    return math.log(max(0.5 * math.erfc(-x * 0.5**0.5), MIN_MASS))


def to_batch(space: Space, obs: Any) -> tuple[Array, bool]:
    """Observations as people have them → a column of the space's elements, and whether it was a single one."""
    element = space.element
    if isinstance(obs, np.ndarray) and obs.dtype == element.base and obs.shape == (*obs.shape[:1], *element.shape):
        batch, single = (obs, False) if obs.ndim else (obs[None], True)
    elif isinstance(space, Dict):
        batch, single = _batch_of_fields(space, obs)
    else:
        batch, single = _batch_of(space, obs, "observation")
    if (why := _outside(space, batch)) is not None:
        raise InputError(f"observation {why}")
    return batch, single


def _batch_of(space: Part, value: Any, what: str, rows: bool = False) -> tuple[Array, bool]:
    """`rows`: it is a batch, whatever it looks like."""
    shape = space.element.shape
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"{what}: expected numbers of shape {shape}, got ragged rows") from error
    if isinstance(space, MultiDiscrete) and array.ndim > 1:  # Gymnasium's may have several dimensions, ours are flat
        array = (
            array.reshape(len(array), *shape) if math.prod(array.shape[1:]) == len(space.nvec) else array.reshape(-1)
        )
    single = array.shape == shape and not rows
    if not single and (array.ndim != len(shape) + 1 or array.shape[1:] != shape):
        batch = f"({', '.join(map(str, ('n', *shape)))}{'' if shape else ','})"
        raise InputError(f"{what}: expected shape {shape}, or {batch} for a batch, got {np.shape(value)}")
    try:
        return column(space, array[None] if single else array), single
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{what}: {error}") from error


def _batch_of_fields(space: Dict, obs: Any) -> tuple[Array, bool]:
    rows = isinstance(obs, list | tuple)
    if rows:
        each = [_fields(space, row) for row in obs]
        fields = {name: [row[name] for row in each] for name in space.fields}
    else:
        fields = _fields(space, obs)
    if rows and not obs:
        return np.empty(0, space.element), False
    parts = {n: _batch_of(part, fields[n], f"observation.{n}", rows) for n, part in space.fields.items()}
    sizes = {name: "one" if single else f"{len(part)}" for name, (part, single) in parts.items()}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise InputError(f"observation: its fields have different numbers of rows: {counts}")
    part, single = next(iter(parts.values()))
    batch = np.empty(len(part), space.element)
    for name, (part, _) in parts.items():
        batch[name] = part
    return batch, single


def _fields(space: Dict, obs: Any) -> Any:
    """Something that has the space's fields, by name."""
    structured = isinstance(obs, np.ndarray | np.void) and obs.dtype.names is not None
    names = obs.dtype.names if structured else tuple(obs) if isinstance(obs, Mapping) else None
    if names is None or set(names) != space.fields.keys():
        found = type(obs).__name__ if names is None else f"one with {', '.join(map(str, names)) or 'none'}"
        raise InputError(f"observation: expected a mapping with {', '.join(sorted(space.fields))}; got {found}")
    return obs


def _outside(space: Space, batch: Array) -> str | None:
    """Why a choice is none of the space's: it would be a row of zeros to the network. Bounds of numbers are advice."""
    if isinstance(space, Dict):
        found = ((name, _outside(part, batch[name])) for name, part in space.fields.items())
        return next((f"{name} {why}" for name, why in found if why is not None), None)
    return None if isinstance(space, Box) else space.problem(batch)


def features(space: Space, obs: Array) -> Array:
    """Raw observations → what the first layer sees (see `networks.spec.feature_shape`), before normalisation."""
    if isinstance(space, Discrete):
        return (obs[:, None] == np.arange(space.start, space.start + space.n)).astype(np.float32)
    if isinstance(space, MultiDiscrete):
        return np.concatenate([obs[:, i, None] == np.arange(n) for i, n in enumerate(space.nvec)], -1).astype(
            np.float32
        )
    if isinstance(space, Dict):
        flat = [flatten(features(space.fields[name], obs[name])) for name in sorted(space.fields)]
        return np.concatenate(flat, -1)
    if space.is_image:
        h, w, c = image_layout(space)
        pixels = np.ascontiguousarray(obs.transpose(0, h + 1, w + 1, c + 1))  # a view is slow to convolve
        return pixels * np.float32(1 / 255)
    return flatten(obs.astype(np.float32, copy=False))
