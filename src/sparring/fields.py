"""Fields of configurations: the types that several of them use, and how a wrong key or value is reported. Light."""

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from sparring.errors import InputError

__all__ = [
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "check_keys",
    "convert",
    "explain",
]

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]

S = TypeVar("S", bound=msgspec.Struct)


def convert(
    data: Mapping[str, Any], kind: type[S], path: str = "", decode: Callable[[type, Any], Any] | None = None
) -> S:
    """A configuration out of what a file says.

    :param path: where in the file it is, such as "algorithm.".
    :param decode: makes what msgspec does not know, such as layers from outside.
    :raises InputError: names the key, and the nearest right one.
    """
    check_keys(data, kind, path)
    try:
        return msgspec.convert(data, kind, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise InputError(explain(error, path)) from error


def check_keys(data: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    """msgspec names an unknown key, but neither its neighbours nor the right one."""
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    hints = get_type_hints(kind)
    for key, value in data.items():
        full = f"{path}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f"did you mean {path}{near[0]}?" if near else f"there are {', '.join(fields)}"
            raise InputError(f"unknown key {full}: {hint}")
        inner = hints[fields[key]]
        if get_origin(inner) is Literal and value not in get_args(inner):
            raise InputError(f"{full} is {value!r}: choose one of {', '.join(get_args(inner))}")
        if get_origin(inner) is None and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                names = ", ".join(field.encode_name for field in msgspec.structs.fields(inner))
                raise InputError(f"{full} is {value!r}, but a group of keys: {names}")
            check_keys(value, inner, f"{full}.")


def explain(error: msgspec.ValidationError, path: str = "") -> str:
    """'Expected `int`, got `str` - at `$.rollout.workers`' → 'rollout.workers: expected `int`, got `str`'."""
    message, at, place = str(error).rpartition(" - at `$.")
    if not at:
        return f"{path.rstrip('.')}: {error}" if path else str(error)
    return f"{path}{place.rstrip('`')}: {message[0].lower()}{message[1:]}"
