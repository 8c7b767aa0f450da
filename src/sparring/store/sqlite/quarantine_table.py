"""The table of refused fragments."""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

from sparring.store.arrival import Refusal
from sparring.store.protocol import Quarantined
from sparring.store.queue import QUARANTINE
from sparring.store.sqlite.game_table import find_game
from sparring.store.sqlite.tables import SOURCE

__all__ = ["newest", "note", "note_from"]


def note(db: sqlite3.Connection, refusals: Sequence[Refusal], counts: Counter[str]) -> None:
    """Into quarantine; the oldest make room."""
    db.executemany("INSERT INTO quarantine (time, game, player, id, reason) VALUES (?, ?, ?, ?, ?)", refusals)
    db.execute("DELETE FROM quarantine WHERE seq <= (SELECT max(seq) FROM quarantine) - ?", (QUARANTINE,))
    db.executemany("UPDATE game SET rejected = rejected + ? WHERE name = ?", [(n, game) for game, n in counts.items()])


def newest(db: sqlite3.Connection, game: str, limit: int) -> list[Quarantined]:
    """The table has a few thousand rows of all games: no index for this."""
    rows = db.execute(
        "SELECT game, player, id, reason, time FROM quarantine WHERE game = ? ORDER BY seq DESC LIMIT ?", (game, limit)
    )
    return [Quarantined(*row) for row in rows]


def note_from(db: sqlite3.Connection, source: str, totals: Mapping[str, int], refusals: Sequence[Refusal]) -> None:
    """The same again changes nothing: a source's totals replace its lower ones, and each refusal is there once."""
    db.executemany(
        "DELETE FROM quarantine WHERE game = ? AND id = ? AND reason = ?", [(r[1], *r[3:]) for r in refusals]
    )
    grown: Counter[str] = Counter()
    for game, total in totals.items():
        if key := find_game(db, game).key:
            of_source = (key, SOURCE, source, -1)
            where = "game = ? AND kind = ? AND name = ? AND version = ?"
            (before,) = db.execute(f"SELECT ifnull(max(fragments), 0) FROM tally WHERE {where}", of_source).fetchone()
            db.execute(
                "INSERT INTO tally (game, kind, name, version, fragments) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET fragments = excluded.fragments",
                (*of_source, max(before, total)),
            )
            grown[game] = max(total - before, 0)
    note(db, refusals, grown)
