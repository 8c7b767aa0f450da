"""The SQLite store's tables, and how those of an older file are brought along.

A fragment's *place* is the number of steps its game had when it was stored, itself included. Places only grow, and
those of erased fragments are not used again, so a place is `tail`'s cursor. A random step number finds its fragment
with one lookup, so `sample` is uniform over steps without a scan.
"""

import sqlite3
from pathlib import Path

from sparring.errors import InputError

__all__ = ["GAME", "MODEL", "PAGE", "PLACES", "PLAYER", "SOURCE", "counts_bots", "is_older", "upgrade", "version_of"]

VERSION = 2  # of these tables
APPLICATION = 0x53504152  # "SPAR" in the file's header
PLACES = 1 << 44  # seq = game · PLACES + place: one B-tree for all games, each with a range to grow at its end
PAGE = 8192  # bytes; measured: larger ones write more for counters and ids, smaller ones take longer for bodies

SCHEMA = (
    # erased: steps, since the beginning.
    """CREATE TABLE game (
    key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, schema TEXT NOT NULL, spec TEXT NOT NULL,
    players INTEGER NOT NULL DEFAULT 0, rejected INTEGER NOT NULL DEFAULT 0, erased INTEGER NOT NULL DEFAULT 0)""",
    # Counters of games, players and models' versions, in one table because a transaction touches one of each: that is
    # one page to write instead of three. A human's name is '' and what has no version has -1: NULLs are never UNIQUE.
    # newest: of a player, the seq of his newest fragment.
    """CREATE TABLE tally (
    key INTEGER PRIMARY KEY, game INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    fragments INTEGER NOT NULL DEFAULT 0, steps INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    last_seen REAL NOT NULL DEFAULT 0, newest INTEGER NOT NULL DEFAULT 0, UNIQUE (game, kind, name, version))""",
    # previous: the same player's fragment before this one, for `erase`; an index by player would cost a tenth of the
    # append rate. body: the fragment as on the wire (msgpack).
    """CREATE TABLE fragment (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, previous INTEGER NOT NULL, steps INTEGER NOT NULL,
    body BLOB NOT NULL)""",
    # Complete episodes; seq is that of the fragment that completed it.
    """CREATE TABLE episode (
    seq INTEGER PRIMARY KEY, player INTEGER NOT NULL, name TEXT NOT NULL, steps INTEGER NOT NULL, ret REAL NOT NULL,
    ended REAL NOT NULL, model TEXT, version INTEGER)""",
    # The others, as in arrival.Unfinished.
    """CREATE TABLE unfinished (
    player INTEGER NOT NULL, name TEXT NOT NULL, steps INTEGER NOT NULL, ret REAL NOT NULL, length INTEGER,
    model TEXT, version INTEGER, PRIMARY KEY (player, name)) WITHOUT ROWID""",
    """CREATE TABLE quarantine (
    seq INTEGER PRIMARY KEY, time REAL NOT NULL, game TEXT NOT NULL, player TEXT NOT NULL,
    id TEXT NOT NULL, reason TEXT NOT NULL)""",
)

# What a version added to the tables of the one before: run for new files, too.
UPGRADES = {
    2: (
        # registration: a mark of its own for each. erasures: how often something was erased or discarded.
        "ALTER TABLE game ADD COLUMN registration TEXT NOT NULL DEFAULT 'first'",
        "ALTER TABLE game ADD COLUMN paused INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE game ADD COLUMN erasures INTEGER NOT NULL DEFAULT 0",
        # Digests of the players and ids that were erased or discarded.
        "CREATE TABLE tombstone (game INTEGER NOT NULL, id BLOB NOT NULL, PRIMARY KEY (game, id)) WITHOUT ROWID",
        # Where a discarded fragment was in its player's chain, and what came before it.
        "CREATE TABLE gap (seq INTEGER PRIMARY KEY, previous INTEGER NOT NULL)",
        # Keys of deleted games whose rows are still being removed.
        "CREATE TABLE doomed (key INTEGER PRIMARY KEY)",
        # A row while bytes of erased rows may be in the file: how many of its pages are known to have none.
        "CREATE TABLE scrub (key INTEGER PRIMARY KEY, pages INTEGER NOT NULL)",
    ),
}

# Not in UPGRADES: there are files of format 2 without these, and an older Sparring can do without them.
ADDED = (
    # Names of deleted games that were not declared again.
    "CREATE TABLE IF NOT EXISTS deleted (key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    # The most recently seen players, without a look at all of them. Of players alone: an append then changes one entry.
    "CREATE INDEX IF NOT EXISTS player_seen ON tally (game, last_seen) WHERE kind = 'player'",
)

# The same holds for the column that says how many of a tally's steps bots made. What is there by then: of games and
# models it is known; of a player it follows from the complete episodes, all of his steps if bots played all of those.
COUNT_BOTS = (
    "ALTER TABLE tally ADD COLUMN bot_steps INTEGER NOT NULL DEFAULT 0",
    "UPDATE tally SET bot_steps = steps WHERE kind = 'model' AND name != ''",
    "UPDATE tally SET bot_steps = model.steps FROM"
    " (SELECT game, sum(bot_steps) AS steps FROM tally WHERE kind = 'model' GROUP BY game) AS model"
    " WHERE kind = 'game' AND model.game = tally.game",
    "UPDATE tally SET bot_steps = min(steps, iif(played.people, played.bots, steps)) FROM"
    " (SELECT player, sum(iif(model IS NULL, 0, steps)) AS bots, sum(model IS NULL) AS people"
    " FROM episode GROUP BY player HAVING bots > 0) AS played WHERE kind = 'player' AND tally.key = played.player",
)

GAME, PLAYER, MODEL, SOURCE = "game", "player", "model", "source"  # kinds of tally; of a source: what it refused


def upgrade(db: sqlite3.Connection, version: int) -> None:
    """Makes the tables, or brings older ones along."""
    if version == 0:
        for statement in SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
    for later in range(max(version, 1) + 1, VERSION + 1):
        for statement in UPGRADES[later]:
            db.execute(statement)
    for statement in (*ADDED, *(() if counts_bots(db) else COUNT_BOTS)):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {VERSION}")


def is_older(db: sqlite3.Connection) -> bool:
    """Whether a reader is before a file that no writer has opened since the tables grew."""
    return bool(db.execute("PRAGMA user_version").fetchone()[0] < VERSION)


def counts_bots(db: sqlite3.Connection) -> bool:
    """Whether the tallies tell bots' steps apart: not in a file that only older writers have opened."""
    return "bot_steps" in [row[1] for row in db.execute("PRAGMA table_info(tally)")]


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """Of the tables; 0 when there are none yet. Reads only: a file that is not ours stays as it is."""
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if tables and application != APPLICATION:
        raise InputError(f"{path} is a database of another program: give another path")
    if version > VERSION:
        raise InputError(
            f"the store {path} has format {version}, this Sparring knows formats up to {VERSION}: use a newer Sparring"
        )
    return version
