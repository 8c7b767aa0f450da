"""Parts by name: `ppo` is one of ours, `my_module:MyAlgorithm` is anybody's. Algorithms, layers, export formats,
stores and metrics sinks are found here, so that all of them are named, loaded and refused alike."""

import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping
from inspect import isabstract
from typing import Any
from urllib.parse import parse_qsl

from sparring.errors import InputError

__all__ = ["check_name", "find", "is_outside", "make", "parse_outside"]

OUTSIDE = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?:\?(.*))?")  # module:Attribute, with options in addresses


def is_outside(name: str) -> bool:
    """Whether the name is `module:Attribute`, a part that is not ours."""
    return ":" in name


def check_name(kind: str, name: str, ours: Mapping[str, str]) -> None:
    """Loads nothing: a name of ours is known, anybody else's is taken for good.

    :raises InputError: it is neither; the nearest of ours is named.
    """
    if name not in ours and not is_outside(name):
        near = difflib.get_close_matches(name, ours, 1)
        hint = f", did you mean {near[0]!r}?" if near else f": choose one of {', '.join(ours)}, or module:Name"
        raise InputError(f"no {kind} {name!r}{hint}")


def find(kind: str, name: str, ours: Mapping[str, str]) -> Any:
    """The part that a name means.

    :param kind: what is looked for, for errors: "algorithm", "layer", …
    :param name: a key of `ours`, or `module:Attribute`. A module of one's own lies where one works.
    :param ours: names and where they are, as `package.module:Attribute`. Modules load when they are used.
    :raises InputError: there is no such part, or its module cannot be imported.
    """
    check_name(kind, name, ours)
    if name in ours:
        module, _, attribute = ours[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise InputError(f"{kind} {name!r}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    try:
        return getattr(loaded, attribute)
    except AttributeError as error:
        names = [key for key in vars(loaded) if not key.startswith("_")]
        near = difflib.get_close_matches(attribute, names, 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{kind} {name!r}: {module!r} has no {attribute!r}{hint}") from error


def parse_outside(address: str) -> tuple[str, dict[str, str]] | None:
    """Of an address `module:Class?option=value&…`: the name and the options. None: it is none, such as a URL, a path
    or a file that is there."""
    found = OUTSIDE.fullmatch(address)
    if found is None or os.path.exists(address):
        return None
    return found[1], dict(parse_qsl(found[2] or "", keep_blank_values=True))


def make(kind: str, name: str, options: Mapping[str, Any], kind_of: type) -> Any:
    """A part from outside, made with its options.

    :param kind: what it is, for errors.
    :param name: `module:Class`.
    :param options: its keyword arguments.
    :param kind_of: the class or protocol that it has to follow.
    :raises InputError: there is none, it does not take these options, or lacks what it has to have.
    """
    found = find(kind, name, {})
    seam = f"{kind_of.__module__}.{kind_of.__name__}"
    if isabstract(kind_of) and not (isinstance(found, type) and issubclass(found, kind_of)):
        raise InputError(f"{kind} {name!r} is {found!r}: it has to be a subclass of {seam}")
    needed = [key for key in dir(kind_of) if not key.startswith("_") and callable(getattr(kind_of, key))]
    if missing := [key for key in needed if not hasattr(found, key)]:
        raise InputError(f"{kind} {name!r} has no {', '.join(missing)}: see {seam}")
    try:
        return found(**options)
    except TypeError as error:
        given = ", ".join(options) or "no options"
        raise InputError(f"{kind} {name!r} cannot be made with {given}: {error}") from error
