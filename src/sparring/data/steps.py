"""Play as rows, one for each step: what Parquet, CSV and RLlib's columns hold. Rows become fragments again here.

`next_obs` is what an action led to. Our files have it in the last row of each fragment alone, since elsewhere it is the
next row's `obs`; files of others may have it everywhere.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.experience import Columns, Fragment
from sparring.experience.fragment import REWARD, pack
from sparring.experience.validate import MAX_STEPS
from sparring.games import Game
from sparring.games.spec import Array, Dict, Space

__all__ = ["Steps", "content_id", "cut_steps", "leaves", "longest", "need", "of_fragments", "renamed"]
__all__ += ["whole_numbers"]

PIECE = 4 << 20  # bytes of observations in a fragment that is made of rows: every store takes it
MOST = 1000  # steps in one
LARGEST = 128 << 20  # bytes of observations in a fragment that has an id: an upload has no more


@dataclass
class Steps:
    """Consecutive rows. Texts are None, numbers NaN or -1 where there are none."""

    obs: Array
    action: Array
    reward: Array
    next_obs: Array  # where `has_next`; anything elsewhere
    has_next: Array
    terminated: Array
    truncated: Array
    step: Array  # within the episode; -1: not known
    time: Array
    log_prob: Array
    version: Array
    fragment: list[str | None]
    player: list[str | None]
    episode: list[str | None]
    model: list[str | None]

    def __len__(self) -> int:
        return len(self.reward)

    def slice(self, first: int, last: int) -> "Steps":
        return replace(self, **{name: getattr(self, name)[first:last] for name in self.__dataclass_fields__})

    def followed_by(self, other: "Steps") -> "Steps":
        joined: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            joined[name] = mine + theirs if isinstance(mine, list) else np.concatenate([mine, theirs])
        return replace(self, **joined)


def leaves(space: Space, name: str) -> list[tuple[str, str | None, Space]]:
    """The columns of a space: name, field (of a dict), its own space."""
    if isinstance(space, Dict):
        return [(f"{name}.{field}", field, space.fields[field]) for field in sorted(space.fields)]
    return [(name, None, space)]


def longest(game: Game) -> int:
    """Steps of a fragment that is made of rows."""
    return max(min(MOST, PIECE // game.observation.element.itemsize), 1)


def of_fragments(game: Game, fragments: Sequence[Fragment]) -> Steps:
    """The rows of fragments."""
    columns = [f.columns(game) for f in fragments]
    lengths = [f.steps for f in fragments]
    ends = np.cumsum(lengths) - 1
    total = int(ends[-1]) + 1
    last = {name: np.zeros(total, bool) for name in ("has_next", "terminated", "truncated")}
    last["has_next"][ends] = True
    last["terminated"][ends] = [f.terminated for f in fragments]
    last["truncated"][ends] = [f.truncated for f in fragments]
    obs = np.concatenate([c.obs[:-1] for c in columns])
    next_obs = np.zeros_like(obs)
    next_obs[ends] = np.stack([c.obs[-1] for c in columns])

    def each(values: Sequence[str | None]) -> list[str | None]:
        return [value for value, count in zip(values, lengths, strict=True) for _ in range(count)]

    nothing = [np.full(n, np.nan, REWARD) for n in lengths]
    log_prob = [n if c.log_prob is None else c.log_prob for c, n in zip(columns, nothing, strict=True)]
    return Steps(
        obs=obs,
        action=np.concatenate([c.action for c in columns]),
        reward=np.concatenate([c.reward for c in columns]),
        next_obs=next_obs,
        **last,
        step=np.concatenate([np.arange(f.start, f.start + f.steps) for f in fragments]),
        time=np.repeat([f.time for f in fragments], lengths),
        log_prob=np.concatenate(log_prob),
        version=np.repeat([-1 if f.version is None else f.version for f in fragments], lengths),
        fragment=each([f.id for f in fragments]),
        player=each([f.player for f in fragments]),
        episode=each([f.episode for f in fragments]),
        model=each([f.model for f in fragments]),
    )


def content_id(f: Fragment) -> str:
    """An id that follows from the content: the same rows are the same fragment, whoever reads them again."""
    about = (f.player, f.episode, f.start, f.steps, f.terminated, f.truncated, f.model, f.version)
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16)
    for buffer in (f.obs, f.action, f.reward, f.log_prob or b""):
        digest.update(buffer)
    return digest.hexdigest()


def cut_steps(game: Game, blocks: Iterator[Steps], player: str, source: str, now: float) -> Iterator[Fragment | str]:
    """Fragments of rows that come in blocks, or why some rows are none. `player` and `source` name what has no player
    and no episode; `now` is the time of what has none."""
    waiting: Steps | None = None
    largest = min(MAX_STEPS, LARGEST // game.observation.element.itemsize) + 1  # rows: so many are rejected, whole
    episodes = Numbers(source)
    for block in blocks:
        rows = block if waiting is None else waiting.followed_by(block)
        first = 0
        for last in _ends(rows, longest(game), largest):
            yield _fragment(game, rows, first, last, player, episodes, now)
            first = last
        waiting = rows.slice(first, len(rows))
    if waiting is not None and len(waiting):
        yield _fragment(game, waiting, 0, len(waiting), player, episodes, now)


class Numbers:
    """Names of episodes, and steps within them, where rows do not tell."""

    def __init__(self, source: str) -> None:
        self._source, self._episode, self._step = source, 0, 0
        self._last: tuple[str | None, str | None] = (None, None)

    def place(self, player: str | None, episode: str | None, steps: int, ended: bool) -> tuple[str, int]:
        if (player, episode) != self._last:
            self._step, self._last = 0, (player, episode)
        name, start = episode or f"{self._source}/{self._episode}", self._step
        self._step += steps
        if ended:
            self._episode += 1
            self._step, self._last = 0, (None, None)
        return name, start


def _ends(rows: Steps, most: int, largest: int) -> Iterator[int]:
    """Where fragments end that the next row is known not to belong to."""
    first = 0
    keys = list(zip(rows.fragment, rows.player, rows.episode, rows.model, rows.version.tolist(), strict=True))
    over = rows.terminated | rows.truncated
    for i in range(len(rows) - 1):
        long = i + 1 - first >= (most if rows.fragment[i] is None else largest)
        if over[i] or long or keys[i] != keys[i + 1]:
            yield i + 1
            first = i + 1


def _fragment(
    game: Game, rows: Steps, first: int, last: int, player: str, episodes: Numbers, now: float
) -> Fragment | str:
    at = last - 1
    terminated, truncated = bool(rows.terminated[at]), bool(rows.truncated[at])
    name, start = episodes.place(rows.player[at], rows.episode[at], last - first, terminated or truncated)
    if rows.has_next[at]:
        after = rows.next_obs[at : at + 1]
    elif last < len(rows) and _who(rows, last) == _who(rows, at) and not (terminated or truncated):
        after = rows.obs[last : last + 1]
    else:
        return f"episode {name!r} ends without `next_obs`: the last observation is missing"
    log_prob = rows.log_prob[first:last]
    version = int(rows.version[at])
    made = pack(
        game,
        Columns(
            np.concatenate([rows.obs[first:last], after]),
            rows.action[first:last],
            rows.reward[first:last],
            None if np.isnan(log_prob).any() else log_prob,
        ),
        id=rows.fragment[at] or "?",
        player=rows.player[at] or player,
        episode=name,
        start=int(rows.step[first]) if rows.step[first] >= 0 else start,
        time=float(rows.time[at]) if rows.time[at] > 0 else now,
        terminated=terminated,
        truncated=truncated,
        model=rows.model[at],
        version=None if version < 0 else version,
    )
    return made if rows.fragment[at] else renamed(made)


def _who(rows: Steps, at: int) -> tuple[str | None, str | None]:
    return rows.player[at], rows.episode[at]


def renamed(f: Fragment) -> Fragment:
    return msgspec.structs.replace(f, id=content_id(f))


def whole_numbers(name: str, values: Array) -> Array:
    """As int64, of float64 that are -1 where there is none."""
    values = np.nan_to_num(values, nan=-1.0)
    if not ((values == np.trunc(values)) & (np.abs(values) < 2.0**53)).all():
        raise ValueError(f"`{name}` must be whole numbers")
    return values.astype(np.int64)


def need(found: Sequence[str], wanted: Sequence[str], where: object) -> None:
    """InputError where columns are missing."""
    if missing := [name for name in wanted if name not in found]:
        has = ", ".join(sorted(found)[:30])
        raise InputError(f"{where} has no column {', '.join(missing[:10])}: it has {has}; see docs/data.md")
