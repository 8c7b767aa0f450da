"""An alias in its three forms: the file that points to a version, the entry in the journal, and what people see."""

import msgspec

from sparring.errors import InputError
from sparring.games.spec import NAME
from sparring.registry.manifest import STABLE, Alias, Move, Pointer

__all__ = ["alias_after", "alias_at", "check_alias", "path_of", "pointer_of", "pointer_to"]


def check_alias(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InputError(f"alias name {name[:100]!r}: use letters, digits, '.', '_' and '-', at most 100, no slash")
    return name


def pointer_of(raw: bytes | None) -> Pointer | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Pointer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # torn; the journal is asked, and the next move writes it anew


def path_of(folder: str, alias: str) -> str:
    return f"{folder}/latest.json" if alias == STABLE else f"{folder}/aliases/{alias}.json"


def alias_at(name: str, p: Pointer) -> Alias:
    return Alias(name, p.version or 0, p.since, p.by, p.reason, p.evidence, p.pinned, p.share)


def alias_after(m: Move) -> Alias:
    return Alias(m.alias, m.version or 0, m.time, m.by, m.reason, m.evidence, m.pinned, m.share)


def pointer_to(m: Move) -> Pointer:
    return Pointer(m.version, m.sha256, m.time, m.by, m.reason, m.evidence, m.pinned, m.share, m.number)
