"""The search space: which values of an experiment are searched, and how one is drawn. In a file such a value is one of
`{choice: [a, b]}`, `{grid: [a, b]}`, `{uniform: [low, high]}`, `{loguniform: [low, high]}`, `{randint: [low, high]}`.
"""

import difflib
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sparring.errors import InputError

__all__ = ["KINDS", "Axis", "Values", "corners", "draw", "fill", "find", "points", "show"]

KINDS = ("choice", "grid", "uniform", "loguniform", "randint")
GROUPS = (
    "game",
    "algorithm",
    "rollout",
    "resources",
    "stop",
    "evaluation",
    "checkpoint",
    "tune",
)  # their keys are no kinds
DIGITS = 4  # of a drawn number: nobody tunes finer, and people read it
Values = dict[str, Any]  # an axis' name → its value


class Axis(NamedTuple):
    """One searched value."""

    path: tuple[str | int, ...]
    kind: str  # one of KINDS
    values: tuple[Any, ...]  # the options; of a range its low and high end, both included

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def listed(self) -> bool:
        return self.kind in ("choice", "grid")

    @property
    def log(self) -> bool:
        return self.kind == "loguniform"

    def draw(self, rng: np.random.Generator) -> Any:
        if self.listed:
            return self.values[rng.integers(len(self.values))]
        low, high = self.values
        if self.kind == "randint":
            return int(rng.integers(low, high + 1))
        return self.tidy(math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high))

    def tidy(self, value: Any) -> Any:
        """Of few digits and inside the range."""
        if self.listed:
            return value
        low, high = self.values
        if self.kind == "randint":
            return min(max(round(value), low), high)
        return min(max(float(f"{value:.{DIGITS}g}"), low), high)


def find(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[Axis]:
    """Every searched value, in the file's order."""
    if isinstance(data, dict):
        kinds = [key for key in data if key in KINDS]
        if kinds and path:
            yield _axis(path, kinds[0], data)
            return
        _refuse_misspelt(data, path)
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from find(value, (*path, key))


def _axis(path: tuple[str | int, ...], kind: str, data: dict[str, Any]) -> Axis:
    name, values = ".".join(map(str, path)), data[kind]
    written = f"{name}: {msgspec.json.encode(data).decode()}"
    if len(data) != 1:
        raise InputError(f"{written}: a searched value has one key, such as {{{kind}: …}}")
    if not isinstance(values, list) or not values:
        raise InputError(f"{written}: write a list, such as {{{kind}: [1, 2]}}")
    if kind in ("choice", "grid"):
        if any(True for value in values for _ in find(value, ("",))):
            raise InputError(f"{written}: the options are plain values, not searched ones")
        return Axis(path, kind, tuple(values))
    whole = kind == "randint"
    number = int if whole else int | float
    if len(values) != 2 or not all(isinstance(value, number) and not isinstance(value, bool) for value in values):
        what = "whole numbers" if whole else "numbers"
        raise InputError(f"{written}: a range needs two {what}, its low and its high end")
    low, high = values if whole else map(float, values)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"{written}: the low end must be below the high end")
    if kind == "loguniform" and low <= 0:
        raise InputError(f"{written}: a logarithmic range begins above 0")
    return Axis(path, kind, (low, high))


def _refuse_misspelt(data: dict[str, Any], path: tuple[str | int, ...]) -> None:
    if len(data) != 1 or not path or path[0] == "tune" or (len(path) == 1 and path[0] in GROUPS):
        return
    ((key, value),) = data.items()
    near = difflib.get_close_matches(str(key), KINDS, 1)
    if isinstance(value, list) and near:
        raise InputError(f"{'.'.join(map(str, path))}: there is no {key!r}, did you mean {near[0]}?")


def fill(data: dict[str, Any], axes: Sequence[Axis], values: Values) -> dict[str, Any]:
    """A copy of the experiment with plain values in the places of searched ones."""
    data = msgspec.to_builtins(data)
    for axis in axes:
        place: Any = data
        for key in axis.path[:-1]:
            place = place[key]
        place[axis.path[-1]] = msgspec.to_builtins(values[axis.name])
    return data


def points(axes: Sequence[Axis]) -> list[Values]:
    """All combinations of the grid's values; without a grid, one of nothing."""
    grids = [axis for axis in axes if axis.kind == "grid"]
    return [
        {axis.name: value for axis, value in zip(grids, combination, strict=True)}
        for combination in itertools.product(*(axis.values for axis in grids))
    ]


def draw(axes: Sequence[Axis], seed: int, number: int) -> Values:
    """Of trial `number`: a point of the grid, the rest at random. A value depends on nothing but these and its name, so
    a sweep can be prolonged, and searching one thing more changes nothing else."""
    grid = points(axes)
    chosen = grid[number % len(grid)]
    return {
        axis.name: chosen[axis.name]
        if axis.kind == "grid"
        else axis.draw(np.random.default_rng([seed, number, zlib.crc32(axis.name.encode())]))
        for axis in axes
    }


def corners(axes: Sequence[Axis]) -> Iterator[Values]:
    """Every option and every end of a range at least once, the others at their first: to check a space before use."""
    first = {axis.name: axis.values[0] for axis in axes}
    yield first
    for axis in axes:
        for value in axis.values[1:]:
            yield first | {axis.name: value}


def show(value: Any) -> str:
    """Short, for tables and messages: layers as `dense 64 tanh + dense 64 tanh`."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, dict):
        return " ".join(show(each) for each in value.values())
    if isinstance(value, list | tuple):
        return " + ".join(show(each) for each in value)
    return str(value)
