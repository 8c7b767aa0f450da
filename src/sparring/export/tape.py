"""A policy as a list of operations on tensors, of kinds that TFLite has and C writes easily. Floats and whole numbers
are the same list; `export/whole_numbers.py` says how its tensors are rounded.

A tape is for one observation; `run` takes a batch, in NumPy and, with `xp=jax.numpy`, in JAX.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from sparring.games.spec import Array
from sparring.networks.layers import Pads
from sparring.networks.plain import Plain
from sparring.networks.plain_steps import Activate, Affine, Convolve, Normalise, Step

__all__ = ["Kind", "Op", "Tape", "build", "run"]

Kind = Literal["dense", "conv", "reshape", "relu", "tanh", "sigmoid", "multiply", "rsqrt"]


class Op(NamedTuple):
    """One operation. Tensors are known by number; the input is 0.

    :param w: Of dense (in, out), of conv (kernel, kernel, in, out).
    :param relu: Whether negative numbers become 0 at once.
    :param fixed: What it multiplies with is no weight: tuning leaves it.
    """

    kind: Kind
    inputs: tuple[int, ...]
    output: int
    w: Array | None = None
    b: Array | None = None
    relu: bool = False
    stride: int = 1
    pads: Pads = ((0, 0), (0, 0))
    fixed: bool = False


@dataclass
class Tape:
    shapes: list[tuple[int, ...]]  # of tensors, without the batch
    ops: list[Op] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)

    def add(self, kind: Kind, *inputs: int, shape: tuple[int, ...], **more: Any) -> int:
        self.shapes.append(shape)
        self.ops.append(Op(kind, inputs, len(self.shapes) - 1, **more))
        return len(self.shapes) - 1


def build(plain: Plain, *, unit: bool = False) -> Tape:
    """From the features, scaled and clipped already.

    :param unit: The outputs of a head that is squashed are so, in ±1.
    """
    tape = Tape([plain.shape])
    hidden = _steps(tape, plain.steps, 0)
    out = _steps(tape, (plain.head,), hidden)
    if unit and plain.bound == "tanh":
        out = tape.add("tanh", out, shape=tape.shapes[out])
    tape.outputs["outputs"] = out
    if plain.value:
        tape.outputs["value"] = _steps(tape, plain.value, hidden if plain.shares else 0)
    return tape


def _steps(tape: Tape, steps: Sequence[Step], x: int) -> int:
    i = 0
    while i < len(steps):
        step = steps[i]
        relu = i + 1 < len(steps) and _is_relu(steps[i + 1]) and not isinstance(step, Activate)
        if isinstance(step, Affine) and i + 1 < len(steps) and isinstance(steps[i + 1], Normalise):
            step = _centred(step)
        x = _step(tape, step, x, relu)
        i += 1 + relu
    return x


def _step(tape: Tape, step: Step, x: int, relu: bool) -> int:
    shape = tape.shapes[x]
    match step:
        case Affine(w, b):
            if len(shape) > 1:
                x = tape.add("reshape", x, shape=(math.prod(shape),))
            return tape.add("dense", x, shape=(len(b),), w=w, b=b, relu=relu)
        case Convolve(w, b, stride, pads):
            sides = ((n + sum(pad) - len(w)) // stride + 1 for n, pad in zip(shape[:2], pads, strict=True))
            return tape.add("conv", x, shape=(*sides, len(b)), w=w, b=b, relu=relu, stride=stride, pads=pads)
        case Normalise(epsilon):  # its mean is 0 already: `_centred`
            square = tape.add("multiply", x, x, shape=shape)
            mean, added = np.full((*shape, 1), 1 / shape[0], np.float32), np.array([epsilon], np.float32)
            # As a product: the Edge TPU takes means over numbers only where there are 4, 8, 12 … of them.
            variance = tape.add("dense", square, shape=(1,), w=mean, b=added, fixed=True)
            return tape.add("multiply", x, tape.add("rsqrt", variance, shape=(1,)), shape=shape, relu=relu)
        case Activate("silu"):
            return tape.add("multiply", x, tape.add("sigmoid", x, shape=shape), shape=shape)
        case Activate("tanh"):
            return tape.add("tanh", x, shape=shape)
    return tape.add("relu", x, shape=shape)  # of something else than sums


def _is_relu(step: Step) -> bool:
    return isinstance(step, Activate) and step.function == "relu"


def _centred(step: Affine) -> Affine:
    """Sums of mean 0, so that a norm has only a deviation left to divide by."""
    w, b = step.w.astype(np.float64), step.b.astype(np.float64)
    return Affine((w - w.mean(1, keepdims=True)).astype(np.float32), (b - b.mean()).astype(np.float32))


Rounding = Callable[[int, Any], Any]


def run(
    tape: Tape, x: Any, xp: Any = np, weights: Any = None, rounded: Rounding = lambda number, value: value
) -> list[Any]:
    """All tensors, of a batch of inputs.

    :param weights: (w, b) of the operations that have them, in other arrays than theirs.
    :param rounded: What becomes of each tensor once it is computed.
    """
    found: dict[int, Any] = {0: rounded(0, x)}
    for i, op in enumerate(tape.ops):
        w, b = (op.w, op.b) if weights is None else weights[i]
        given = [found[j] for j in op.inputs]
        z = _compute(xp, op, tape.shapes[op.output], given, w, b)
        found[op.output] = rounded(op.output, xp.maximum(z, 0) if op.relu else z)
    return [found[i] for i in range(len(tape.shapes))]


def _compute(xp: Any, op: Op, shape: tuple[int, ...], given: list[Any], w: Any, b: Any) -> Any:
    x = given[0]
    match op.kind:
        case "dense":
            return x @ w + b
        case "conv":
            return _convolve(xp, x, w, op) + b
        case "reshape":
            return x.reshape(len(x), *shape)
        case "relu":
            return xp.maximum(x, 0)
        case "tanh":
            return xp.tanh(x)
        case "sigmoid":
            return 0.5 + 0.5 * xp.tanh(0.5 * x)
        case "multiply":
            return x * given[1]
        case "rsqrt":
            return 1 / xp.sqrt(x)
    raise AssertionError(op.kind)


def _convolve(xp: Any, x: Any, w: Any, op: Op) -> Any:
    if xp is not np:
        import jax

        return jax.lax.conv_general_dilated(
            x, w, (op.stride, op.stride), op.pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    x = np.pad(x, [(0, 0), *op.pads, (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[:2], (1, 2))[:, :: op.stride, :: op.stride]
    return np.tensordot(windows, w, ((4, 5, 3), (0, 1, 2)))
