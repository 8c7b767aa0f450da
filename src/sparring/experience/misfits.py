"""Why something is no fragment, in words for who wrote it. Asked only about what could not be decoded."""

import difflib
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

__all__ = ["explain", "misspelt", "no_object"]

LISTS = {
    "obs": "one observation for each step, and one more for what the last action led to",
    "action": "one action for each step",
    "reward": "one number for each step",
    "log_prob": "one number for each step",
}
EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]+)`(, got `(?P<got>[^`]+)`)?( - at `\$(?P<path>[^`]*)`)?")
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "bytes": "bytes",
}
MAX_NAMES = 20  # that are listed


def explain(fields: dict[str, msgspec.Raw], into: type[msgspec.Struct], decode: Callable[..., Any]) -> str | None:
    """What is wrong with one fragment; None where that is not known.

    :param fields: By name.
    :param into: What it should be.
    :param decode: Of a field: `decode(raw, type=…)`.
    """
    if missing := [name for name in _required(into) if name not in fields]:
        unknown = sorted(fields.keys() - set(into.__struct_fields__))[:MAX_NAMES]
        are = "is" if len(unknown) == 1 else "are"
        return f"lacks {_names(missing)}" + (f", and has {_names(unknown)}, which {are} unknown" if unknown else "")
    for name, hint in get_type_hints(into).items():
        if name in fields and (why := _wrong(name, fields[name], hint, decode)) is not None:
            return why
    return None


def no_object(error: Exception, into: type[msgspec.Struct]) -> str:
    """Of something else in the place of a fragment."""
    found = EXPECTED.match(str(error))
    what = _got(found["got"] if found else None)
    return f"is {what}: an object with {_names(_required(into))} belongs there"


def _required(into: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(into) if field.required]


def misspelt(name: str, into: type[msgspec.Struct]) -> str:
    """The field that may be meant, for the end of a sentence."""
    near = difflib.get_close_matches(name, into.__struct_fields__, 1)
    return f": did you mean `{near[0]}`?" if near else ""


def _wrong(name: str, raw: msgspec.Raw, hint: Any, decode: Callable[..., Any]) -> str | None:
    try:
        decode(raw, type=hint)
    except msgspec.ValidationError as error:
        found = EXPECTED.match(str(error))
        if found is None:
            return f"has a wrong `{name}`: {error}"
        got, path = _got(found["got"]), found["path"] or ""
        if name in LISTS and not path and "array" in found["wanted"]:
            return f"has {got} as `{name}`, where a list belongs: {LISTS[name]}"
        return f"has {got} as `{name}{path}`, where {_wanted(found['wanted'])} belongs"
    except UnicodeDecodeError:
        return f"has text as `{name}` that is no UTF-8"
    return None


def _got(what: str | None) -> str:
    return "a number" if what == "int" else WORDS.get(str(what), "something else")


def _wanted(types: str) -> str:
    """`str | null` → text."""
    words = [WORDS.get(each, each) for each in types.split(" | ") if each != "null"]
    return " or ".join(words)


def _names(names: list[str]) -> str:
    quoted = [f"`{name[:64]}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
