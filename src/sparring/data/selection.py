"""Which play is meant: by player, model, version, time, and whether people or bots acted."""

import re
import time
from datetime import UTC, datetime

import msgspec

from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.store.protocol import Episode

__all__ = ["Selection", "parse_since"]

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Selection(msgspec.Struct, frozen=True):
    """None: any."""

    player: str | None = None
    model: str | None = None
    version: int | None = None
    since: float | None = None  # seconds since 1970
    people: bool | None = None  # True: people alone; False: bots alone

    def __contains__(self, f: Fragment) -> bool:
        return self.names(f) and (self.since is None or f.time >= self.since)

    def names(self, played: Fragment | Episode) -> bool:
        """Whether it is among those chosen, whenever it was."""
        return (
            (self.player is None or played.player == self.player)
            and (self.model is None or played.model == self.model)
            and (self.version is None or played.version == self.version)
            and (self.people is None or (played.model is None) == self.people)
        )

    @classmethod
    def of(
        cls, player: str | None, model: str | None, version: int | None, since: str | None, people: bool, bots: bool
    ) -> "Selection":
        """From a command's options."""
        if people and bots:
            raise InputError("--people and --bots leave nothing: drop both for all play")
        if people and (model is not None or version is not None):
            raise InputError("--people have no model and no version: drop one of them")
        who = True if people else False if bots else None
        return cls(player, model, version, None if since is None else parse_since(since), who)


def parse_since(text: str, now: float | None = None) -> float:
    """`7d`, `12h`, `30min`, or a date as 2026-11-18 or 2026-11-18T12:00 (UTC unless it says otherwise)."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)", text.strip()):
        return (time.time() if now is None else now) - float(found[1]) * UNITS[found[2]]
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise InputError(f"since {text!r}: give a date like 2026-11-18, or an age like 7d, 12h, 30min") from error
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
