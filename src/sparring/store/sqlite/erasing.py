"""What the SQLite store does to remove things, a bounded piece to a transaction: a player's fragments, single ones that
turned out to be bad, and whole games."""

import sqlite3
from collections import Counter
from collections.abc import Sequence

from sparring.experience import Fragment
from sparring.store.arrival import Submission, decode, refusal
from sparring.store.sqlite.game_table import find_game
from sparring.store.sqlite.quarantine_table import note
from sparring.store.sqlite.tables import MODEL, PLACES, PLAYER
from sparring.store.sqlite.tally_table import find_player, tallies
from sparring.store.sqlite.tombstone_table import bury

__all__ = ["discard", "doom", "erase", "raze", "unfinished"]

DELETED = 1000  # names of deleted games that are remembered
ERASE, ROWS = 2 << 20, 500  # bytes and rows erased in one transaction: appends wait for it


def erase(db: sqlite3.Connection, game: str, player: str) -> tuple[int, int]:
    """Erases some of the player's fragments, the newest first, and with the last of them all else there is. Answers how
    many fragments, and how many rows in all: no rows when nothing is left."""
    key, seq = find_player(db, game, player)
    seqs: list[tuple[int]] = []
    gone: list[Fragment] = []
    size = 0
    while seq and size < ERASE and len(gone) < ROWS:
        row = db.execute("SELECT previous, body FROM fragment WHERE seq = ?", (seq,)).fetchone()
        if row is not None:
            seqs.append((seq,))
            gone.append(decode(row[1]))
            size += len(row[1])
            seq = row[0]
        else:
            seq = _bridge(db, seq)
    db.executemany("DELETE FROM episode WHERE seq = ?", seqs)
    db.execute("UPDATE tally SET newest = ? WHERE key = ?", (seq, key))
    _remove(db, find_game(db, game).key, seqs, gone)
    return len(gone), len(gone) + (0 if seq else _forget(db, game, player))


def _leave_bytes(db: sqlite3.Connection) -> None:
    """Removed rows may have left copies in the file: they are to be looked for, also after a crash."""
    db.execute("REPLACE INTO scrub VALUES (1, 0)")


def _bridge(db: sqlite3.Connection, seq: int) -> int:
    """What came before a fragment that was discarded; with that its note is not needed any more."""
    (previous,) = db.execute("DELETE FROM gap WHERE seq = ? RETURNING previous", (seq,)).fetchone()
    return int(previous)


def _remove(db: sqlite3.Connection, game: int, seqs: list[tuple[int]], gone: list[Fragment]) -> None:
    """The rows, and what the tallies count of them; their ids stay known."""
    if not gone:
        return
    _leave_bytes(db)
    db.executemany("DELETE FROM fragment WHERE seq = ?", seqs)
    bury(db, game, gone)
    db.executemany(
        "UPDATE tally SET fragments = fragments - 1, steps = steps - ?, bytes = bytes - ?,"
        " bot_steps = max(min(bot_steps - ?, steps - ?), 0)"
        " WHERE game = ? AND kind = ? AND name = ? AND version = ?",
        [
            (f.steps, size, 0 if f.model is None else f.steps, f.steps, game, *tally)
            for f, size in zip(gone, Submission(gone).sizes, strict=True)
            for tally in tallies(f.player, f.model, f.version)
        ],
    )
    db.execute("DELETE FROM tally WHERE game = ? AND kind = ? AND fragments = 0", (game, MODEL))
    steps = sum(f.steps for f in gone)
    db.execute("UPDATE game SET erased = erased + ?, erasures = erasures + 1 WHERE key = ?", (steps, game))


def _forget(db: sqlite3.Connection, game: str, player: str) -> int:
    """What is left of a player whose fragments are erased: how many rows."""
    refused = db.execute("DELETE FROM quarantine WHERE game = ? AND player = ?", (game, player)).rowcount
    rows = refused + _forget_player(db, game, player)
    if rows:
        _leave_bytes(db)
    return rows


def _forget_player(db: sqlite3.Connection, game: str, player: str) -> int:
    key, seq = find_player(db, game, player)
    gone = db.execute("DELETE FROM tally WHERE key = ? AND fragments = 0", (key,)).rowcount
    while gone and seq:  # fragments that were all discarded
        seq = _bridge(db, seq)
    unfinished = db.execute("DELETE FROM unfinished WHERE player = ?", (key,)).rowcount
    db.execute("UPDATE game SET players = players - ? WHERE name = ?", (gone, game))
    return unfinished + gone


def discard(db: sqlite3.Connection, game: str, ids: Sequence[str], reason: str) -> int:
    """Of these fragments those that are there."""
    key = find_game(db, game).key
    seqs: list[tuple[int]] = []
    gone: list[Fragment] = []
    for name in dict.fromkeys(ids):
        row = db.execute("SELECT seq, previous, body FROM fragment WHERE id = ?", (name,)).fetchone()
        if row is None or row[0] // PLACES != key:
            continue
        seqs.append(row[:1])
        gone.append(decode(row[2]))
        db.execute("INSERT INTO gap VALUES (?, ?)", row[:2])
        _reopen(db, game, row[0], gone[-1])
    _remove(db, key, seqs, gone)
    note(db, [refusal(game, f.player, f.id, reason) for f in gone], Counter({game: len(gone)}))
    for player in {f.player for f in gone}:
        if not db.execute(
            "SELECT fragments FROM tally WHERE game = ? AND kind = ? AND name = ?", (key, PLAYER, player)
        ).fetchone()[0]:
            _forget_player(db, game, player)
    return len(gone)


def _reopen(db: sqlite3.Connection, game: str, seq: int, f: Fragment) -> None:
    """The episode of a fragment that is discarded is not complete, and never will be."""
    player, _ = find_player(db, game, f.player)
    if db.execute("DELETE FROM episode WHERE seq = ?", (seq,)).rowcount:
        return
    if db.execute("DELETE FROM unfinished WHERE player = ? AND name = ?", (player, f.episode)).rowcount:
        return
    end = (seq // PLACES + 1) * PLACES
    db.execute(
        "DELETE FROM episode WHERE seq = (SELECT seq FROM episode"
        " WHERE seq > ? AND seq < ? AND player = ? AND name = ? ORDER BY seq LIMIT 1)",
        (seq, end, player, f.episode),
    )


# Games


def doom(db: sqlite3.Connection, name: str) -> int:
    """Ends a game's registration. Its rows are removed by `raze`; until then its key is not used again."""
    if key := find_game(db, name).key:
        db.execute("INSERT INTO doomed VALUES (?)", (key,))
        db.execute("DELETE FROM game WHERE key = ?", (key,))
        db.execute("REPLACE INTO deleted (name) VALUES (?)", (name,))
        db.execute("DELETE FROM deleted WHERE key <= (SELECT max(key) FROM deleted) - ?", (DELETED,))
    refused = db.execute("DELETE FROM quarantine WHERE game = ?", (name,)).rowcount
    if key or refused:
        _leave_bytes(db)
    return key + refused


def unfinished(db: sqlite3.Connection) -> tuple[bool, bool]:
    """Whether rows of deleted games are left, and whether bytes of removed ones may be in the file."""
    doomed, scrub = [db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in ("doomed", "scrub")]
    return doomed is not None, scrub is not None


def raze(db: sqlite3.Connection) -> bool:
    """Some rows of games that were deleted; False when none are left."""
    row = db.execute("SELECT key FROM doomed LIMIT 1").fetchone()
    if row is None:
        return False
    span = (row[0] * PLACES, (row[0] + 1) * PLACES)
    removals: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("DELETE FROM fragment WHERE seq > ? AND seq <= ?", (span[0], _end_of_piece(db, span))),
        ("DELETE FROM episode WHERE seq IN (SELECT seq FROM episode WHERE seq > ? AND seq < ? LIMIT 1000)", span),
        ("DELETE FROM gap WHERE seq IN (SELECT seq FROM gap WHERE seq > ? AND seq < ? LIMIT 1000)", span),
        (
            "DELETE FROM tombstone WHERE game = ?1 AND id IN (SELECT id FROM tombstone WHERE game = ?1 LIMIT 1000)",
            row,
        ),
        (
            "DELETE FROM unfinished WHERE (player, name) IN (SELECT player, unfinished.name FROM tally"
            " JOIN unfinished ON player = key WHERE game = ? LIMIT 1000)",
            row,
        ),
        ("DELETE FROM tally WHERE key IN (SELECT key FROM tally WHERE game = ? LIMIT 1000)", row),
    )
    for statement, values in removals:
        if db.execute(statement, values).rowcount:
            return True
    _leave_bytes(db)
    db.execute("DELETE FROM doomed WHERE key = ?", row)
    return True


def _end_of_piece(db: sqlite3.Connection, span: tuple[int, int]) -> int:
    """Up to which seq fragments go at once."""
    size, end = 0, span[0]
    rows = db.execute("SELECT seq, length(body) FROM fragment WHERE seq > ? AND seq < ? LIMIT ?", (*span, ROWS))
    for seq, length in rows:
        size, end = size + length, seq
        if size >= ERASE:
            break
    rows.close()
    return end
