"""Values as a game gives them ↔ the bytes of a fragment's columns and the inputs of a policy.

Converters are made once per space: the usual value, an array of the right type, passes with two comparisons.
"""

import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparring.errors import InputError
from sparring.games.spec import Action, Array, Box, Dict, Discrete, MultiDiscrete, Part, Space, column

__all__ = ["to_action", "to_bytes", "to_feed", "to_feeds"]


def to_bytes(space: Space, what: str) -> Callable[[Any], bytes]:
    """One element → its bytes in a column. Raises InputError that names `what`."""
    if isinstance(space, Dict):
        parts = [(name, to_bytes(space.fields[name], f"{what}.{name}")) for name in sorted(space.fields)]

        def fields(value: Any) -> bytes:
            _check_fields(value, parts, what)
            return b"".join([convert(value[name]) for name, convert in parts])

        return fields
    if isinstance(space, Discrete):
        pack, whole = struct.Struct("<i").pack, _whole(space, what)
        return lambda value: pack(whole(value))
    dtype, shape = space.element.base, space.element.shape

    def array(value: Any) -> bytes:
        if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
            return value.tobytes()
        return _row(space, value, what).tobytes()

    return array


def to_feed(space: Space) -> Callable[[Any], dict[str, Array]]:
    """One observation → the inputs of a policy for a batch of one."""
    if not isinstance(space, Dict):
        row = _to_row(space, "observation")
        return lambda value: {"obs": row(value)}
    parts = [(name, _to_row(part, f"observation.{name}")) for name, part in sorted(space.fields.items())]

    def fields(value: Any) -> dict[str, Array]:
        _check_fields(value, parts, "observation")
        return {f"obs.{name}": convert(value[name]) for name, convert in parts}

    return fields


def to_feeds(space: Space, obs: Any) -> dict[str, Array]:
    """A batch of observations, as a column or, for a Dict, as a mapping of columns → the inputs of a policy."""
    if not isinstance(space, Dict):
        return {"obs": _column(space, obs, "observation")}
    structured = isinstance(obs, np.ndarray) and obs.dtype.names is not None
    names = obs.dtype.names if structured else obs
    if not (structured or isinstance(obs, Mapping)) or set(names) != space.fields.keys():
        raise InputError(f"observation: expected columns named {', '.join(sorted(space.fields))}")
    feeds = {f"obs.{name}": _column(part, obs[name], f"observation.{name}") for name, part in space.fields.items()}
    if len({len(feed) for feed in feeds.values()}) != 1:
        raise InputError("observation: its fields have different numbers of rows")
    return feeds


def to_action(space: Action) -> Callable[[Array], Any]:
    """A column of one action → what the game's `step` takes."""
    if isinstance(space, Discrete):
        return lambda column: int(column[0])
    return lambda column: column[0]


def _to_row(space: Part, what: str) -> Callable[[Any], Array]:
    if isinstance(space, Discrete):
        whole = _whole(space, what)
        return lambda value: np.array([whole(value)], np.int32)
    dtype, shape = space.element.base, space.element.shape

    def row(value: Any) -> Array:
        if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
            return value[None]
        return _row(space, value, what)

    return row


def _whole(space: Discrete, what: str) -> Callable[[Any], int]:
    low, high = space.start, space.start + space.n - 1

    def whole(value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError as error:
            raise InputError(f"{what}: expected a whole number from {low} to {high}, got {value!r}") from error
        if not low <= number <= high:
            raise InputError(f"{what}: {number} is outside {low}..{high}")
        return number

    return whole


def _row(space: Box | MultiDiscrete, value: Any, what: str) -> Array:
    """The patient way: lists, other number types, wrong things."""
    shape = space.element.shape
    try:
        array = np.asarray(value)
        if isinstance(space, MultiDiscrete):
            array = array.reshape(-1)  # Gymnasium's may have several dimensions, ours are flat
        if array.shape != shape:
            raise InputError(f"{what}: expected shape {shape}, got {array.shape}")
        return column(space, array[None])
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{what}: {error}") from error


def _column(space: Part, values: Any, what: str) -> Array:
    try:
        array = np.asarray(values)
        if isinstance(space, MultiDiscrete) and array.ndim > 2:
            array = array.reshape(len(array), -1)
        return np.ascontiguousarray(column(space, array))
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{what}: {error}") from error


def _check_fields(value: Any, parts: list[tuple[str, Any]], what: str) -> None:
    if not isinstance(value, Mapping) or len(value) != len(parts) or any(name not in value for name, _ in parts):
        found = f"one with {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
        raise InputError(f"{what}: expected a mapping with {', '.join(name for name, _ in parts)}; got {found}")
