"""Reading complete episodes out of the SQLite store: the newest ones, and one's fragments."""

import sqlite3
from collections.abc import Iterator

from sparring.experience import Fragment
from sparring.store.arrival import decode
from sparring.store.counts import pieces
from sparring.store.protocol import Episode, EpisodePage
from sparring.store.sqlite.tables import PLACES, is_older

__all__ = ["after", "newest", "one"]

WALK = 10_000  # fragments of a player that are looked at to find an episode's
COLUMNS = (
    "SELECT player.name, e.name, e.steps, e.ret, e.ended, e.model, e.version, e.seq - ?1"
    " FROM episode e JOIN tally player ON player.key = e.player"
)


def after(db: sqlite3.Connection, game: int, cursor: int, limit: int) -> list[Episode]:
    """`game` is the game's key."""
    rows = db.execute(
        f"{COLUMNS} WHERE e.seq > ?1 + ?2 AND e.seq < ?1 + ?3 ORDER BY e.seq LIMIT ?4",
        (game * PLACES, cursor, PLACES, limit),
    )
    return [Episode(*row) for row in rows]


def newest(db: sqlite3.Connection, game: int, before: int | None, limit: int) -> EpisodePage:
    end = PLACES if before is None else min(before, PLACES)
    rows = db.execute(
        f"{COLUMNS} WHERE e.seq > ?1 AND e.seq < ?1 + ?2 ORDER BY e.seq DESC LIMIT ?3", (game * PLACES, end, limit + 1)
    )
    found = [Episode(*row) for row in rows]
    return EpisodePage(found[:limit], found[limit - 1].cursor if len(found) > limit else None)


def one(
    db: sqlite3.Connection, game: int, cursor: int, first: int, last: int | None
) -> tuple[Episode, list[Fragment]] | None:
    """Only the fragments that are wanted are in memory together."""
    page = newest(db, game, cursor + 1, 1).episodes
    if not page or page[0].cursor != cursor:
        return None
    wanted = pieces(page[0], _chain(db, game * PLACES + cursor), first, last)
    if wanted is None:
        return None
    found = []
    for seq in wanted:
        row = db.execute("SELECT body FROM fragment WHERE seq = ?", (seq,)).fetchone()
        if row is None:
            return None  # erased meanwhile
        found.append(decode(row[0]))
    return page[0], found


def _chain(db: sqlite3.Connection, seq: int) -> Iterator[tuple[Fragment, int]]:
    """A player's fragments from this one back, and where they are."""
    older = is_older(db)
    for _ in range(WALK):
        row = db.execute("SELECT previous, body FROM fragment WHERE seq = ?", (seq,)).fetchone()
        if row is not None:
            yield decode(row[1]), seq
        elif not older:  # it was discarded
            row = db.execute("SELECT previous FROM gap WHERE seq = ?", (seq,)).fetchone()
        if row is None or not row[0]:
            return
        seq = row[0]
