"""What may enter: the one check behind the gateway and every other door. Schema, sizes, finiteness, bounds, clock.

A batch of good fragments is checked as a few long arrays, not one by one. Only a batch with something wrong is looked
at fragment by fragment, to name what it is.
"""

import time
from collections.abc import Sequence

import numpy as np

from sparring.experience.fragment import REWARD, Fragment
from sparring.games.spec import Array, Box, Dict, Game, Space

__all__ = ["MAX_NUMBER", "MAX_REWARD", "MAX_STEPS", "check", "miscounted"]

MAX_STEPS = 10_000
MAX_NAME = 200
# One enormous number makes a network NaN, and all that was learned with it: losses square rewards, in float32, which
# ends at 3.4e38. A return of 10,000 steps of the largest reward still has a square of 1e20.
MAX_REWARD = 1e6  # where the game declares no `reward`
MAX_NUMBER = 1e15  # in an observation or action without a bound of its own: a clock in milliseconds is at 1.8e12
MAX_LOG_PROB = 1e6
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
    """Everything that can be checked without looking at the values."""
    if f.game != game.name:
        return f"it is for the game {f.game!r}, this is {game.name!r}"
    if f.schema != game.schema:
        return f"schema {f.schema!r} is not this game's ({game.schema!r}): the client was built for other spaces"
    if not 1 <= f.steps <= MAX_STEPS:
        return f"steps is {f.steps}, allowed are 1..{MAX_STEPS}"
    sizes = (
        ("obs", f.obs, f.steps + 1, game.observation.element.itemsize),
        ("action", f.action, f.steps, game.action.element.itemsize),
        ("reward", f.reward, f.steps, REWARD.itemsize),
        ("log_prob", f.log_prob, f.steps, REWARD.itemsize),
    )
    for name, buffer, rows, size in sizes:
        if buffer is not None and len(buffer) != rows * size:
            if len(buffer) % size == 0 and len(buffer) < rows * size:
                return miscounted(name, f.steps, len(buffer) // size)
            return f"{name} has {len(buffer)} bytes, {_needs(f.steps)} {rows * size}: wrong shape or dtype"
    for name, text in (("id", f.id), ("player", f.player), ("episode", f.episode), ("model", f.model)):
        if text is not None and not (0 < len(text) <= MAX_NAME and text.isprintable()):
            return f"{name} must be 1..{MAX_NAME} printable characters"
    if (f.model is None) != (f.version is None):
        return "model and version go together: give both, or neither for a human"
    if not 0 <= f.start < 1 << 53 or not 0 <= (f.version or 0) < 1 << 53:
        return "start and version must be whole numbers from 0 to 2^53"
    if not now - PAST <= f.time <= now + FUTURE:  # also false for NaN
        if now - PAST <= f.time / 1000 <= now + FUTURE:
            return f"time is {f.time:.0f}: send seconds, not milliseconds (in JavaScript: Date.now() / 1000)"
        days = (f.time - now) / DAY
        return f"its clock is {days:+.1f} days off the server's (allowed: −{PAST / DAY:g} to +{FUTURE / DAY:g})"
    return None


NOUNS = {"obs": "observation", "action": "action", "reward": "reward", "log_prob": "log_prob"}


def miscounted(column: str, steps: int, rows: int) -> str:
    """Of a column whose number of rows does not fit a fragment's steps: also too many."""
    need, last = (steps + 1, ": the last is the one after the last step") if column == "obs" else (steps, "")
    were = "1 was" if rows == 1 else f"{rows} were"
    return f"{_needs(steps)} {need} {NOUNS[column]}{'s' * (need != 1)}, {were} sent{last}"


def _needs(steps: int) -> str:
    return "1 step needs" if steps == 1 else f"{steps} steps need"


def _values(game: Game, fragments: Sequence[Fragment]) -> str | None:
    """The first thing wrong with the values of these fragments, whose sizes are right."""
    columns: tuple[tuple[str, Space], ...] = (("obs", game.observation), ("action", game.action))
    for name, space in columns:
        joined = b"".join([getattr(f, name) for f in fragments])
        column = np.frombuffer(joined, space.element)
        if (why := space.problem(column) or _enormous(space, column)) is not None:
            return f"{name} {why}"
    declared = ': a game whose rewards are larger declares them, `"reward": [LOW, HIGH]`' if not game.reward else ""
    for name, bounds, hint in (
        ("reward", game.reward or (-MAX_REWARD, MAX_REWARD), declared),
        ("log_prob", (-MAX_LOG_PROB, MAX_LOG_PROB), ""),
    ):
        values = np.frombuffer(b"".join([getattr(f, name) or b"" for f in fragments]), REWARD)
        if not np.isfinite(values).all():
            return f"{name} has NaN or infinite values"
        if (why := _outside(values, *bounds)) is not None:
            return f"{name} {why}{hint}"
    return None


def _enormous(space: Space, column: Array) -> str | None:
    """Numbers too large to learn from, where the space has no bound that says otherwise."""
    if isinstance(space, Dict):
        found = ((name, _enormous(part, column[name])) for name, part in space.fields.items())
        return next((f"{name} {why}" for name, why in found if why is not None), None)
    if not isinstance(space, Box) or column.dtype.kind != "f":
        return None
    low = -MAX_NUMBER if space.low is None else -np.inf
    high = MAX_NUMBER if space.high is None else np.inf
    why = None if (low, high) == (-np.inf, np.inf) else _outside(column, low, high)
    return why and f"{why}: a space whose numbers are larger declares `low` and `high`"


def _outside(values: Array, low: float, high: float) -> str | None:
    """Bounds in the numbers' own precision: the float32 nearest to 0.1 is above 0.1, and still within it."""
    if not values.size:
        return None
    with np.errstate(over="ignore"):  # beyond float32 there is no bound
        least, most = values.dtype.type(low), values.dtype.type(high)
    if (value := values.min()) < least:
        return f"reaches {value:.9g}, the least that is allowed is {low:g}"
    if (value := values.max()) > most:
        return f"reaches {value:.9g}, the most that is allowed is {high:g}"
    return None
