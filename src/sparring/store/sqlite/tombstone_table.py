"""The table of what was erased or discarded, as digests: a retried upload brings nothing back."""

import hashlib
import sqlite3
from collections.abc import Iterable

from sparring.experience import Fragment
from sparring.store.sqlite.statements import marks, portions

__all__ = ["Tombstone", "any_erased", "bury", "digest", "erased"]

Tombstone = tuple[str, str, str]  # game, player, fragment's id


def any_erased(db: sqlite3.Connection, game: int) -> bool:
    """Whether something of the game ever was."""
    return db.execute("SELECT 1 FROM tombstone WHERE game = ? LIMIT 1", (game,)).fetchone() is not None


def erased(db: sqlite3.Connection, key: int, game: str, fragments: Iterable[Fragment]) -> set[Tombstone]:
    """Those of the game's fragments that were there once."""
    found: set[Tombstone] = set()
    ids = {digest(f.player, f.id): (game, f.player, f.id) for f in fragments if f.game == game}
    for some in portions(list(ids)):
        rows = db.execute(
            f"SELECT id FROM tombstone WHERE game = ? AND id IN {marks(len(some), 1)}",
            (key, *some),
        )
        found.update(ids[row[0]] for row in rows)
    return found


def bury(db: sqlite3.Connection, game: int, gone: Iterable[Fragment]) -> None:
    db.executemany("INSERT OR IGNORE INTO tombstone VALUES (?, ?)", [(game, digest(f.player, f.id)) for f in gone])


def digest(player: str, fragment_id: str) -> bytes:
    """What is kept of an erased fragment: clients choose ids, and may have written a player's name into them. Another
    player who chooses the same id has other play."""
    return hashlib.blake2b(f"{len(player)} {player} {fragment_id}".encode(), digest_size=16).digest()
