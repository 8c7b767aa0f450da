"""The steps that every format can write: what a layer's `plain` gives. Light."""

from typing import Literal, NamedTuple

from sparring.games.spec import Array

__all__ = ["Activate", "Affine", "Convolve", "Function", "Normalise", "Step"]

Function = Literal["relu", "tanh", "silu"]


class Affine(NamedTuple):
    """x @ w + b, of a vector; an image is flattened row by row, channels last."""

    w: Array  # (in, out)
    b: Array


class Convolve(NamedTuple):
    """Of an image (height, width, channels), with zeros around it."""

    w: Array  # (kernel, kernel, in, out)
    b: Array
    stride: int
    pads: tuple[tuple[int, int], tuple[int, int]]  # above and below, left and right


class Normalise(NamedTuple):
    """To mean 0 and deviation 1 over a vector."""

    epsilon: float  # added to the variance


class Activate(NamedTuple):
    function: Function


Step = Affine | Convolve | Normalise | Activate
