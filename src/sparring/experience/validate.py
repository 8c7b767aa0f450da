"""What may enter: the one check behind the gateway and every other door. Schema, sizes, finiteness, bounds, clock.

A batch of good fragments is checked as a few long arrays, not one by one; only a batch with something wrong is looked
at fragment by fragment, to name what it is.
"""

import time
from collections.abc import Sequence

import numpy as np

from sparring.experience.fragment import REWARD, Fragment
from sparring.games.spec import Game, Space

__all__ = ["MAX_STEPS", "check"]

MAX_STEPS = 10_000
MAX_NAME = 200
DAY = 86_400.0
FUTURE, PAST = 1 * DAY, 60 * DAY  # a client may have been offline for weeks; nobody plays tomorrow


def check(game: Game, fragments: Sequence[Fragment], now: float | None = None) -> list[str | None]:
    """Per fragment: None when it may enter, else the reason for a person."""
    now = time.time() if now is None else now
    reasons = [_frame(game, f, now) for f in fragments]
    good = [f for f, reason in zip(fragments, reasons, strict=True) if reason is None]
    if good and _values(game, good) is not None:
        return [reason or _values(game, [f]) for f, reason in zip(fragments, reasons, strict=True)]
    return reasons


def _frame(game: Game, f: Fragment, now: float) -> str | None:
    """Everything that can be told without looking at the values."""
    if f.game != game.name:
        return f"it is for the game {f.game!r}, this is {game.name!r}"
    if f.schema != game.schema:
        return f"schema {f.schema!r} is not this game's ({game.schema!r}): the client was built for other spaces"
    if not 1 <= f.steps <= MAX_STEPS:
        return f"steps is {f.steps}, allowed are 1..{MAX_STEPS}"
    sizes = (
        ("obs", f.obs, (f.steps + 1) * game.observation.element.itemsize),
        ("action", f.action, f.steps * game.action.element.itemsize),
        ("reward", f.reward, f.steps * REWARD.itemsize),
    )
    for name, buffer, expected in sizes:
        if len(buffer) != expected:
            return f"{name} has {len(buffer)} bytes, {f.steps} steps need {expected}: wrong shape or dtype"
    if f.log_prob is not None and len(f.log_prob) != f.steps * REWARD.itemsize:
        return f"log_prob has {len(f.log_prob)} bytes, {f.steps} steps need {f.steps * REWARD.itemsize}"
    for name, text in (("id", f.id), ("player", f.player), ("episode", f.episode), ("model", f.model)):
        if text is not None and not (0 < len(text) <= MAX_NAME and text.isprintable()):
            return f"{name} must be 1..{MAX_NAME} printable characters"
    if (f.model is None) != (f.version is None):
        return "model and version go together: give both, or neither for a human"
    if not 0 <= f.start < 1 << 53 or not 0 <= (f.version or 0) < 1 << 53:
        return "start and version must be whole numbers from 0 to 2^53"
    if not now - PAST <= f.time <= now + FUTURE:  # also false for NaN
        days = (f.time - now) / DAY
        return f"its clock is {days:+.1f} days off the server's (allowed: −{PAST / DAY:g} to +{FUTURE / DAY:g})"
    return None


def _values(game: Game, fragments: Sequence[Fragment]) -> str | None:
    """The first thing wrong with the values of these fragments, whose sizes are right."""
    columns: tuple[tuple[str, Space], ...] = (("obs", game.observation), ("action", game.action))
    for name, space in columns:
        joined = b"".join([getattr(f, name) for f in fragments])
        if (why := space.problem(np.frombuffer(joined, space.element))) is not None:
            return f"{name} {why}"
    for name in ("reward", "log_prob"):
        joined = b"".join([getattr(f, name) or b"" for f in fragments])
        if not np.isfinite(np.frombuffer(joined, REWARD)).all():
            return f"{name} has NaN or infinite values"
    return None
