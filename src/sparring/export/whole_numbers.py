"""A policy in whole numbers of 8 bits: how each tensor of its tape is rounded. TFLite and C write the same numbers.

Inputs and tensors are rounded with a scale and a zero each, weights of dense layers with one scale, weights of
convolutions with one for each filter (Jacob et al. 2018). What accuracy costs is spent where it matters. Every number
of an observation gets the range that it has in play. Where the largest number wins, only differences count.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sparring.errors import InputError
from sparring.export import tape as tapes
from sparring.export.given import Given
from sparring.export.tape import Op, Tape
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.plain import Plain, decide, evaluate, pixels
from sparring.networks.plain_steps import Affine, Step
from sparring.networks.policy import Policy
from sparring.networks.spec import choices, scaling

__all__ = ["LEAST", "Rounded", "Whole", "agreement", "checked", "of", "same_actions", "snap", "weights_of", "whole"]

LEAST = 20  # observations to calibrate with
COPIES = 4  # of each number of an observation: rounded at other places, together they tell it four times as finely …
MOST_COPIED = 256  # … for as many numbers as this in all
MARGIN = 1.1  # how much further than what was seen an input may go
FARTHEST_TANH = 4.0  # tanh is 1 beyond, to eight bits
HIDDEN_SHARES, OUTPUT_SHARES = (1.0, 0.8, 0.6, 0.45), (1.0, 0.5, 0.25, 0.12)  # of ranges, that are tried
PIECE = 4 << 20  # numbers computed at once
SEARCHED, SEARCHED_IMAGES = 2_000, 100  # observations that they are tried on
WANTED = 0.995  # agreement, on the calibration data, below which the weights are tuned


class Rounded(NamedTuple):
    """A tensor's form: number = scale × (whole − zero)."""

    scale: float
    zero: int


class Weights(NamedTuple):
    w: Array  # int8
    b: Array  # int32, of scale (the input's × w's)
    scale: Array  # of w: one, or one for each filter


@dataclass(frozen=True, eq=False)
class Whole:
    """`whole = clip(rint(x · factor + shift), −128, 127)` is the input, x as often as `factor` has room for it; the
    rest is a tape.

    :param forms: Of each tensor.
    :param weights: Of each operation that has some, by its place.
    :param exact: The policy in floats, for comparison.
    :param tuned: Rounding alone cost too much.
    """

    exact: Plain
    plain: Plain
    tape: Tape
    factor: Array
    shift: Array
    forms: list[Rounded]
    weights: dict[int, Weights]
    tuned: bool = False

    def into(self, x: Array) -> Array:
        """`pixels` → the input."""
        return into(x, self.factor, self.shift)

    @property
    def bound(self) -> str:
        return "clip" if self.plain.bound == "tanh" else self.plain.bound

    def outputs(self, x: Array) -> dict[str, Array]:
        """What the whole numbers give, in floats: to compare, and to know what formats have to give."""
        start = (self.into(x).astype(np.float32) - self.forms[0].zero) * np.float32(self.forms[0].scale)
        given: list[tuple[Any, Any]] = [(None, None)] * len(self.tape.ops)
        for i, (w, b, scale) in self.weights.items():
            given[i] = w * scale, b * (self.forms[self.tape.ops[i].inputs[0]].scale * scale).astype(np.float32)
        pieces = []
        for some in _pieces(start):
            found = tapes.run(self.tape, some, weights=given, rounded=lambda i, value: snap(np, value, self.forms[i]))
            pieces.append({name: found[i] for name, i in self.tape.outputs.items()})
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in self.tape.outputs}


def into(x: Array, factor: Array, shift: Array) -> Array:
    if factor.ndim == 1 and factor.size > x.shape[1]:
        x = np.tile(x, (1, factor.size // x.shape[1]))
    return np.clip(np.rint(x * factor + shift), -128, 127).astype(np.int8)


def snap(xp: Any, value: Any, form: Rounded) -> Any:
    """The nearest number that the form has."""
    scale = np.float32(form.scale)
    return (xp.clip(xp.rint(value / scale) + form.zero, -128, 127) - form.zero) * scale


@lru_cache(maxsize=1)
def of(policy: Policy, given: Given) -> Whole:
    """Once for several formats."""
    return whole(Plain.of(policy, given.value), given.calibration, given.on_progress)


def whole(plain: Plain, calibration: Array | None, on_progress: Callable[[str], object] = lambda words: None) -> Whole:
    """A policy in whole numbers, tuned to play as in floats if rounding alone costs too much.

    :param calibration: A column of observations from play.
    :raises InputError: there are too few, or they are of another game.
    """
    x = pixels(plain.game, checked(plain.game, calibration))
    found = _finest(plain, _folded(plain, x), x)
    if agreement(found, x) < WANTED:
        from sparring.export import distil  # JAX

        found = replace(distil.tune(found, x, on_progress), tuned=True)
    return found


def checked(game: Game, calibration: Array | None) -> Array:
    """:raises InputError: there are too few, they are of another game, or some are no numbers."""
    if calibration is None or len(calibration) < LEAST:
        count = 0 if calibration is None else len(calibration)
        raise InputError(f"{count} observations are too few to calibrate whole numbers: give at least {LEAST}")
    element = game.observation.element
    if calibration.dtype != element.base or calibration.shape[1:] != element.shape:
        raise InputError(
            f"the calibration data are {calibration.dtype}{calibration.shape[1:]}, observations of "
            f"{game.name} are {element.base}{element.shape}"
        )
    if not np.isfinite(pixels(game, calibration)).all():
        raise InputError(
            f"the calibration data of {game.name} have NaN or infinity in them: leave such observations out"
        )
    return calibration


@dataclass(frozen=True, eq=False)
class Folded:
    """A policy whose input is what whole numbers can hold well."""

    plain: Plain
    factor: Array
    shift: Array
    form: Rounded


def _folded(plain: Plain, x: Array) -> Folded:
    plain = replace(plain, head=_differences(plain))
    features = x * plain.scale + plain.offset
    if plain.clip is not None:
        features = np.clip(features, -plain.clip, plain.clip)
    low, high = features.min(0), features.max(0)
    first = [(*plain.steps, plain.head)] + ([plain.value] if plain.value and not plain.shares else [])
    if not plain.image and all(isinstance(steps[0], Affine) for steps in first):
        middle = (low + high) / 2
        half = np.maximum((high - low) / 2 * MARGIN, 1e-6 + 1e-3 * np.abs(middle))
        copies = max(1, min(COPIES, MOST_COPIED // len(half)))
        between = np.repeat((np.arange(copies) + 0.5) / copies - 0.5, len(half))
        plain = _from_range(plain, middle, half, copies)
        factor, shift = (np.tile(each / half * 127, copies) for each in (plain.scale, plain.offset - middle))
        return Folded(plain, factor, shift + between, Rounded(1 / 127, 0))
    if plain.image and plain.clip is None and not plain.offset.any():
        ones = np.ones(plain.shape, np.float32)
        return Folded(plain, ones, -128 * ones, Rounded(1 / 255, -128))
    form = _form(low.min(), high.max())
    return Folded(plain, plain.scale / np.float32(form.scale), plain.offset / np.float32(form.scale) + form.zero, form)


def _differences(plain: Plain) -> Affine:
    """Of numbers of which the largest wins, what all have in common is left out."""
    w, b = plain.head.w.astype(np.float64), plain.head.b.astype(np.float64)
    if plain.bound == "argmax":
        for part in np.split(np.arange(len(b)), np.cumsum(choices(plain.game.action))[:-1]):
            w[:, part] -= w[:, part].mean(1, keepdims=True)
            b[part] -= b[part].mean()
    return Affine(w.astype(np.float32), b.astype(np.float32))


def _from_range(plain: Plain, middle: Array, half: Array, copies: int) -> Plain:
    """The same for an input that is in ±1: its first sums take in where each number lies, and how often it comes."""

    def fold(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        first = steps[0]
        assert isinstance(first, Affine)
        w, b = first.w.astype(np.float64) * half[:, None], first.b + middle.astype(np.float64) @ first.w
        return (Affine(np.tile(w / copies, (copies, 1)).astype(np.float32), b.astype(np.float32)), *steps[1:])

    *steps, head = fold((*plain.steps, plain.head))
    assert isinstance(head, Affine)
    value = fold(plain.value) if plain.value and not plain.shares else plain.value
    return replace(plain, shape=(len(half) * copies,), steps=tuple(steps), head=head, value=value)


def _form(low: float, high: float) -> Rounded:
    """Of numbers in a range, which 0 always is in."""
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    scale = max(high - low, 1e-6) / 255
    return Rounded(scale, round(-128 - low / scale))


def _finest(exact: Plain, folded: Folded, x: Array) -> Whole:
    """The range of the outputs that agrees best: where the largest wins, small differences count more than large."""
    tape = tapes.build(folded.plain, unit=True)
    start = (into(x, folded.factor, folded.shift).astype(np.float32) - folded.form.zero) * folded.form.scale
    seen = _ranges(tape, start.astype(np.float32))
    shares = OUTPUT_SHARES if folded.plain.bound == "argmax" else (1.0,)
    tried = [round_policy(exact, folded, tape, seen, *each) for each in itertools.product(HIDDEN_SHARES, shares)]
    few = x[:: max(1, len(x) // (SEARCHED_IMAGES if exact.image else SEARCHED))]
    return max(tried, key=lambda each: agreement(each, few))


def _ranges(tape: Tape, start: Array) -> list[tuple[float, float]]:
    runs = [[(float(each.min()), float(each.max())) for each in tapes.run(tape, some)] for some in _pieces(start)]
    return [(min(low for low, _ in each), max(high for _, high in each)) for each in zip(*runs, strict=True)]


def _pieces(x: Array) -> list[Array]:
    """Images some at a time: the windows of convolutions are large."""
    return np.array_split(x, max(1, -(-len(x) * x[:1].size // PIECE))) if len(x) else [x]


def round_policy(
    exact: Plain, folded: Folded, tape: Tape, seen: list[tuple[float, float]], hidden: float = 1.0, share: float = 1.0
) -> Whole:
    """:param seen: The range of each tensor.
    :param hidden: Of the ranges of hidden tensors, what is kept: few numbers reach far.
    :param share: Of the outputs' range, likewise.
    """
    out = tape.outputs["outputs"]
    forms = [folded.form]
    for op in tape.ops:
        low, high = seen[op.output]
        kept = hidden if op.output < out else 1.0  # what comes after is the value's, of which actions tell nothing
        if op.kind == "reshape":
            forms.append(forms[op.inputs[0]])
        elif op.kind in FIXED:
            forms.append(FIXED[op.kind])
        elif any(later.kind == "tanh" and op.output in later.inputs for later in tape.ops):
            forms.append(_form(max(low * kept, -FARTHEST_TANH), min(high * kept, FARTHEST_TANH)))
        elif op.output == out:
            forms.append(_output_form(folded.plain, low * share, high * share))
        else:
            forms.append(_form(low * kept, high * kept))
    return Whole(exact, folded.plain, tape, folded.factor, folded.shift, forms, weights_of(tape, forms))


FIXED = {"tanh": Rounded(1 / 128, 0), "sigmoid": Rounded(1 / 256, -128)}  # TFLite asks for these


def _output_form(plain: Plain, low: float, high: float) -> Rounded:
    """A Box action beyond its bounds is clipped: no whole number need be there."""
    if plain.bound == "clip" and isinstance(plain.game.action, Box):
        s = scaling(plain.game.action)
        low, high = max(low, float(s.unit_low.min())), min(high, float(s.unit_high.max()))
    return _form(low, high)


def weights_of(tape: Tape, forms: list[Rounded]) -> dict[int, Weights]:
    return {i: _weights(op, forms[op.inputs[0]].scale) for i, op in enumerate(tape.ops) if op.w is not None}


def _weights(op: Op, scale_in: float) -> Weights:
    assert op.w is not None
    assert op.b is not None
    axes = tuple(range(op.w.ndim - 1)) if op.kind == "conv" else None
    scale = np.maximum(np.abs(op.w).max(axes, keepdims=False), 1e-9).reshape(-1).astype(np.float64) / 127
    w = np.clip(np.rint(op.w / scale), -127, 127).astype(np.int8)
    limit = 2**31 - 1
    b = np.clip(np.rint(op.b / (scale_in * scale)), -limit, limit).astype(np.int32)
    return Weights(w, b, scale.astype(np.float32))


def agreement(found: Whole, x: Array) -> float:
    """Of `pixels`: in how many the actions are the same; of a Box, 1 less the error as a share of the range."""
    exact = found.exact
    out = np.concatenate([evaluate(exact, some)[0] for some in _pieces(x)])
    expected = decide(exact.game, out, exact.bound)
    return same_actions(exact.game, decide(exact.game, found.outputs(x)["outputs"], found.bound), expected)


def same_actions(game: Game, ours: Array, expected: Array) -> float:
    """1: all are the same. See `agreement`."""
    if not isinstance(game.action, Box):
        return float((ours == expected).reshape(len(ours), -1).all(1).mean())
    s = scaling(game.action)
    flat = np.abs(ours.astype(np.float64) - expected).reshape(len(ours), -1)
    span = np.where(s.bounded, s.high - s.low, np.maximum(np.ptp(expected.reshape(len(ours), -1), axis=0), 1e-6))
    return 1 - float((flat / span).mean())
