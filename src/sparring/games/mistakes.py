"""What is wrong with a declaration, in words for who wrote it, where msgspec's would not help."""

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["explain", "kind"]

PARTS = ("box", "discrete", "multi_discrete")
SPACES = {"observation": (*PARTS, "dict"), "action": PARTS}


def explain(text: bytes | str) -> str | None:
    """The first space of a declaration that is none; None where it is something else that is wrong."""
    try:
        declared = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(declared, dict):
        return None
    for part, kinds in SPACES.items():
        if part not in declared:
            continue
        if (why := _explain_space(part, declared[part], kinds)) is not None:
            return why
        fields = declared[part].get("fields")
        for name, space in fields.items() if isinstance(fields, dict) else ():
            if (why := _explain_space(f"{part}.fields.{name[:64]}", space, PARTS)) is not None:
                return why
    return None


def _explain_space(where: str, space: Any, kinds: Sequence[str]) -> str | None:
    there = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    if not isinstance(space, dict):
        return f'{where} is {kind(space)}: it must be an object like {{"type": "box", …}}, with the type {there}'
    if "type" not in space:
        return f"{where} has no `type`: use {there}"
    if space["type"] not in kinds:
        return f"{where} has the type {space['type']!r:.60}: use {there}"
    return None


def kind(value: object) -> str:
    """What a value is in JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
    return type(value).__name__
