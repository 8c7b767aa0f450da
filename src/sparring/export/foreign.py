"""Files that others made (.onnx, .tflite), played as far as their shapes say how. A file has one input of an
observation's shape, or of its numbers in a row. Its output is a number for each action, the numbers of a Box action, or
the choice itself.

Pixels go in as they are where the input is uint8, as 0 to 1 where it is float32, and by the input's own scale where it
is int8.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparring.errors import InputError
from sparring.games import Box, Discrete, Game, compatible
from sparring.games.spec import Array
from sparring.networks.plain import decide, pixels
from sparring.networks.spec import action_size

__all__ = ["ForeignRunner", "Tensor", "check_game", "input_of", "output_of"]


class Tensor(NamedTuple):
    """An input or output of a file."""

    name: str
    shape: tuple[int | None, ...]  # None: any
    dtype: np.dtype[Any]
    scale: float = 0.0  # of whole numbers; 0: they are none
    zero: int = 0


def check_game(declaration: str, game: Game, where: object) -> None:
    """:raises InputError: the file was made for a game with other spaces."""
    if (why := compatible.difference(Game.from_json(declaration), game)) is not None:
        raise InputError(f"{where} does not play {game.name}: {why}")


def input_of(tensors: Sequence[Tensor], game: Game, where: object) -> Callable[[Array], Array]:
    """What turns a column of one observation into the file's input.

    :raises InputError: it has several inputs, or one of another shape or type.
    """
    if len(tensors) != 1:
        names = ", ".join(tensor.name for tensor in tensors)
        raise InputError(
            f"{where} has {len(tensors)} inputs ({names}), of others' files only those with one are played"
        )
    tensor, sample = tensors[0], np.zeros(1, game.observation.element)
    raw = isinstance(game.observation, Box) and game.observation.is_image
    as_is: Callable[[Array], Array] = np.ascontiguousarray
    forms: list[Callable[[Array], Array]] = [lambda obs: pixels(game, obs)]
    if isinstance(game.observation, Box):
        forms.append(as_is)
    for form in forms:
        if _fits(tensor.shape, form(sample).shape):
            return _typed(tensor, form, raw, where)
    shapes = " or ".join(dict.fromkeys(str(form(sample).shape) for form in forms))
    raise InputError(
        f"{where} takes {tensor.name} of shape {tensor.shape}, an observation of {game.name} is {shapes} with its batch"
    )


def _fits(expected: Sequence[int | None], found: tuple[int, ...]) -> bool:
    return len(expected) == len(found) and all(a in (None, b) for a, b in zip(expected, found, strict=True))


def _typed(tensor: Tensor, form: Callable[[Array], Array], raw: bool, where: object) -> Callable[[Array], Array]:
    kind, unit = tensor.dtype, np.float32(1 / 255 if raw else 1)
    if kind == np.float32:
        return lambda obs: form(obs).astype(np.float32) * unit
    if kind == np.uint8 and raw:
        return form
    if kind in (np.int8, np.uint8) and tensor.scale:
        info = np.iinfo(kind)
        factor = np.float32(unit / tensor.scale)
        return lambda obs: np.clip(np.rint(form(obs) * factor) + tensor.zero, info.min, info.max).astype(kind)
    raise InputError(
        f"{where} takes {tensor.name} as {kind}: float32, and int8 or uint8 with a scale, are what we give"
    )


def output_of(tensors: Sequence[Tensor], game: Game, where: object) -> tuple[int, Callable[[Array], Array]]:
    """Which output acts, and what turns it into a column of one action.

    :raises InputError: none of them could.
    """
    size, action = action_size(game.action), game.action
    for i, tensor in enumerate(tensors):
        numbers = math.prod(n or 1 for n in tensor.shape)
        if numbers == size and (tensor.dtype.kind == "f" or tensor.scale):
            return i, lambda found, t=tensor: decide(game, _number(t, found).reshape(1, size), "clip")
        if isinstance(action, Discrete) and numbers == 1 and tensor.dtype.kind in "iu" and not tensor.scale:
            return i, lambda found: _choice(found, action, where)
    shapes = ", ".join(f"{tensor.name} {tensor.dtype}{tensor.shape}" for tensor in tensors)
    raise InputError(f"{where} gives {shapes}: none of them is {size} numbers, or a choice, for {game.name}")


def _choice(found: Array, action: Discrete, where: object) -> Array:
    if not 0 <= (chosen := int(found.reshape(()))) < action.n:
        raise InputError(f"{where} gives the choice {chosen}: there are 0 to {action.n - 1}")
    return np.array([chosen + action.start], "<i4")


def _number(tensor: Tensor, found: Array) -> Array:
    if not tensor.scale:
        return found.astype(np.float32)
    return (found.astype(np.float32) - tensor.zero) * np.float32(tensor.scale)


@dataclass(frozen=True)
class ForeignRunner:
    """Somebody else's file: its numbers are taken for the game's by their shapes alone."""

    into: Callable[[Array], Array]
    call: Callable[[Array], Array]
    act: Callable[[Array], Array]

    def prepare(self, obs: Array) -> Array:
        return self.into(obs)

    def run(self, ready: Array) -> Array:
        return self.call(ready)

    def action(self, found: Array) -> Array:
        return self.act(found)

    def outputs(self, found: Array) -> None:
        return None

    def value(self, found: Array) -> None:
        return None
