"""The SQLite store's file: its tables, how it is opened, and what a transaction writes.

A fragment's *place* is the number of steps its game had when it was stored, itself included. Places only grow and those
of erased fragments are not used again, so a place is `tail`'s cursor; and a random step number finds its fragment with
one lookup, so `sample` is uniform over steps without a scan.
"""

import errno
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Unfinished, require_same
from sparring.store.protocol import Outcome, StoreFull

__all__ = [
    "PLACES",
    "QUARANTINE",
    "Arrival",
    "Refusal",
    "erase",
    "find_game",
    "forget",
    "insert",
    "note",
    "open_reader",
    "open_writer",
    "register",
    "transaction",
    "trouble",
]

VERSION = 1  # of these tables
APPLICATION = 0x53504152  # "SPAR" in the file's header
PLACES = 1 << 44  # seq = game · PLACES + place: one B-tree for all games, each with a range to grow at its end
PAGE = 16_384  # bytes; measured: 1.5–2 times the rate of 4096 for rows of 3 to 26 kB
QUARANTINE = 4096  # refused fragments kept
PATIENCE = 5.0  # seconds to wait for a lock, or for a file that is just being made
ERASE = 16 << 20  # bytes erased in one transaction

SCHEMA = (
    """CREATE TABLE game (
    key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, place INTEGER NOT NULL DEFAULT 0,
    fragments INTEGER NOT NULL DEFAULT 0, steps INTEGER NOT NULL DEFAULT 0, players INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0, rejected INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE player (
    key INTEGER PRIMARY KEY, game INTEGER NOT NULL, name TEXT NOT NULL,
    fragments INTEGER NOT NULL, steps INTEGER NOT NULL, last_seen REAL NOT NULL, UNIQUE (game, name))""",
    "CREATE INDEX player_seen ON player (game, last_seen)",
    # Who acted: a model's version; '' and -1 are a human, because NULLs are never equal in a UNIQUE.
    """CREATE TABLE actor (
    key INTEGER PRIMARY KEY, game INTEGER NOT NULL, model TEXT NOT NULL, version INTEGER NOT NULL,
    fragments INTEGER NOT NULL, steps INTEGER NOT NULL, UNIQUE (game, model, version))""",
    # body: the fragment as on the wire (msgpack). The other columns are what is searched for or counted down by.
    """CREATE TABLE fragment (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, player INTEGER NOT NULL, actor INTEGER NOT NULL,
    steps INTEGER NOT NULL, bytes INTEGER NOT NULL, body BLOB NOT NULL)""",
    "CREATE INDEX fragment_player ON fragment (player)",
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

Refusal = tuple[float, str, str, str, str]  # time, game, player, fragment's id, reason


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A fragment with what was made of it on its caller's thread."""

    fragment: Fragment
    body: bytes
    ret: float


# Opening


def open_writer(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = _connect(path, "rwc")
        with _closing_on_error(db):
            if _version(db, path) == 0:
                db.execute(f"PRAGMA page_size = {PAGE}")
            db.execute("PRAGMA journal_mode = WAL")
            for pragma in ("synchronous = FULL", "wal_autocheckpoint = 0", "secure_delete = ON", "cache_size = -16384"):
                db.execute(f"PRAGMA {pragma}")
            with transaction(db):
                if _version(db, path) == 0:
                    _create(db)
    except (sqlite3.Error, OSError) as error:
        raise trouble(path, error) from error
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """Not SQLite's own read-only mode: that cannot make the files a log needs when the writer is away."""
    if not path.is_file():
        raise InputError(f"there is no store at {path}: `sparring up` makes one, or give the directory that has it")
    try:
        db = _connect(path, "rw")
        with _closing_on_error(db):
            deadline = time.monotonic() + PATIENCE
            while _version(db, path) == 0:  # its writer is just making it
                if time.monotonic() > deadline:
                    raise InputError(f"{path} is empty: `sparring up` has not made a store of it")
                time.sleep(0.02)
            db.execute("PRAGMA query_only = ON")
    except sqlite3.Error as error:
        raise trouble(path, error) from error
    return db


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False)


@contextmanager
def _closing_on_error(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        db.close()
        raise


def _create(db: sqlite3.Connection) -> None:
    for statement in SCHEMA:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _version(db: sqlite3.Connection, path: Path) -> int:
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


def trouble(path: Path, error: Exception) -> SparringError | StoreFull:
    """What to tell people when SQLite or the disk under it fails."""
    if _is_full(path, error):
        return StoreFull(f"no room left on the disk of the store {path}: free some; nothing stored is lost")
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return InputError(f"{path} is not a store (nor any SQLite database): give another path, or move it away")
    return SparringError(f"the store {path} cannot be used: {error}")


def _is_full(path: Path, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):  # what a full disk is called when the log's index grows
        disk = os.statvfs(path.parent)
        return disk.f_bavail * disk.f_frsize < 1 << 20
    return code == sqlite3.SQLITE_FULL


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite ends some failed ones by itself
            db.execute("ROLLBACK")
        raise


# Games and players


def register(db: sqlite3.Connection, game: Game) -> None:
    row = db.execute("SELECT spec FROM game WHERE name = ?", (game.name,)).fetchone()
    if row is not None:
        require_same(Game.from_json(row[0]), game)
        return
    db.execute("INSERT INTO game (name, spec) VALUES (?, ?)", (game.name, game.to_json().decode()))


def find_game(db: sqlite3.Connection, name: str) -> tuple[int, int]:
    """Its key and the place of its newest fragment. Keys begin at 1; a game that is not there is 0 and has nothing."""
    row: tuple[int, int] | None = db.execute("SELECT key, place FROM game WHERE name = ?", (name,)).fetchone()
    return row or (0, 0)


def _find_player(db: sqlite3.Connection, game: int, name: str) -> int:
    row = db.execute("SELECT key FROM player WHERE game = ? AND name = ?", (game, name)).fetchone()
    return row[0] if row else 0


# Appending. By the batch throughout: SQLite's own work on a row of 3 kB takes some 30 µs, each call into it several.


def insert(
    db: sqlite3.Connection, submissions: Sequence[Sequence[Arrival]], now: float
) -> list[list[Outcome] | InputError]:
    """The answer to each submission. One for an unknown game is refused as a whole, alone."""
    games = {name: find_game(db, name) for name in {a.fragment.game for s in submissions for a in s}}
    bodies = _bodies(db, [a.fragment.id for s in submissions for a in s])
    answers: list[list[Outcome] | InputError] = []
    new: list[Arrival] = []
    for submission in submissions:
        unknown = [a.fragment.game for a in submission if not games[a.fragment.game][0]]
        if unknown:
            answers.append(InputError(f"no game {unknown[0]!r} is registered here"))
        else:
            answers.append([_sort(a, bodies, new) for a in submission])
    if new:
        _insert_new(db, new, games, now)
    return answers


def _sort(arrival: Arrival, bodies: dict[str, bytes], new: list[Arrival]) -> Outcome:
    known = bodies.setdefault(arrival.fragment.id, arrival.body)
    if known is arrival.body:
        new.append(arrival)
        return Outcome.STORED
    return Outcome.DUPLICATE if known == arrival.body else Outcome.CONFLICT


def _bodies(db: sqlite3.Connection, ids: list[str]) -> dict[str, bytes]:
    """Of those that are there already. Whole bodies are compared: exact, and no digest to make of every fragment."""
    found: dict[str, bytes] = {}
    marks = ",".join("?" * 64)
    for first in range(0, len(ids), 64):
        some = ids[first : first + 64]
        rows = db.execute(f"SELECT id, body FROM fragment WHERE id IN ({marks})", some + [None] * (64 - len(some)))
        found.update(rows.fetchall())
    return found


class _Sum:
    __slots__ = ("bytes", "fragments", "steps")

    def __init__(self) -> None:
        self.fragments = self.steps = self.bytes = 0

    def add(self, steps: int, size: int) -> None:
        self.fragments += 1
        self.steps += steps
        self.bytes += size


def _insert_new(db: sqlite3.Connection, new: list[Arrival], games: dict[str, tuple[int, int]], now: float) -> None:
    sums: dict[int, _Sum] = {}
    players: dict[tuple[int, str], _Sum] = {}
    actors: dict[tuple[int, str, int], _Sum] = {}
    labels = []
    for f in [arrival.fragment for arrival in new]:
        game = games[f.game][0]
        size = len(f.obs) + len(f.action) + len(f.reward) + len(f.log_prob or b"")
        player, actor = (game, f.player), (game, f.model or "", -1 if f.version is None else f.version)
        labels.append((game, player, actor, size))
        sums.setdefault(game, _Sum()).add(f.steps, size)
        players.setdefault(player, _Sum()).add(f.steps, size)
        actors.setdefault(actor, _Sum()).add(f.steps, size)
    player_keys, newcomers = _count_players(db, players, now)
    actor_keys = {actor: _count_actor(db, actor, total) for actor, total in actors.items()}

    places = {key: key * PLACES + place for key, place in games.values()}
    episodes = _Episodes(db, now)
    rows = []
    for arrival, (game, player, actor, size) in zip(new, labels, strict=True):
        f = arrival.fragment
        places[game] = seq = places[game] + f.steps
        rows.append((seq, f.id, player_keys[player], actor_keys[actor], f.steps, size, arrival.body))
        episodes.add(f, arrival.ret, player_keys[player], seq)
    _insert_rows(db, "fragment", rows)
    episodes.write()
    for game, total in sums.items():
        db.execute(
            "UPDATE game SET place = place + ?2, fragments = fragments + ?1, steps = steps + ?2, bytes = bytes + ?3,"
            " players = players + ?4 WHERE key = ?5",
            (total.fragments, total.steps, total.bytes, newcomers[game], game),
        )


def _count_players(
    db: sqlite3.Connection, players: dict[tuple[int, str], _Sum], now: float
) -> tuple[dict[tuple[int, str], int], Counter[int]]:
    """Their keys, and how many each game sees for the first time."""
    keys, newcomers = {}, Counter[int]()
    for player, total in players.items():
        [(key, fragments)] = db.execute(
            "INSERT INTO player (game, name, fragments, steps, last_seen) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (game, name) DO UPDATE SET fragments = fragments + excluded.fragments,"
            " steps = steps + excluded.steps, last_seen = excluded.last_seen RETURNING key, fragments",
            (*player, total.fragments, total.steps, now),
        ).fetchall()
        keys[player] = key
        newcomers[player[0]] += fragments == total.fragments
    return keys, newcomers


def _count_actor(db: sqlite3.Connection, actor: tuple[int, str, int], total: _Sum) -> int:
    [(key,)] = db.execute(
        "INSERT INTO actor (game, model, version, fragments, steps) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (game, model, version) DO UPDATE SET fragments = fragments + excluded.fragments,"
        " steps = steps + excluded.steps RETURNING key",
        (*actor, total.fragments, total.steps),
    ).fetchall()
    return int(key)


class _Episodes:
    """The episodes that this transaction begins, continues and completes."""

    def __init__(self, db: sqlite3.Connection, now: float) -> None:
        self.db = db
        self.now = now
        self.complete: list[tuple[Any, ...]] = []
        self.unfinished: dict[tuple[int, str], Unfinished | None] = {}  # none: there is none any more

    def add(self, f: Fragment, ret: float, player: int, seq: int) -> None:
        name = (player, f.episode)
        whole = f.start == 0 and f.ended  # one fragment, as short episodes are: nothing to look up or to remember
        episode = Unfinished() if whole else self.find(name)
        complete = episode.add(f, ret)
        if complete:
            self.complete.append((seq, *name, episode.steps, episode.ret, self.now, episode.model, episode.version))
        if not whole:
            self.unfinished[name] = None if complete else episode

    def find(self, name: tuple[int, str]) -> Unfinished:
        if name in self.unfinished:
            return self.unfinished[name] or Unfinished()
        row = self.db.execute(
            "SELECT steps, ret, length, model, version FROM unfinished WHERE player = ? AND name = ?", name
        ).fetchone()
        return Unfinished(*row) if row else Unfinished()

    def write(self) -> None:
        _insert_rows(self.db, "episode", self.complete)
        gone = [name for name, episode in self.unfinished.items() if episode is None]
        self.db.executemany("DELETE FROM unfinished WHERE player = ? AND name = ?", gone)
        rows = [(*name, *msgspec.structs.astuple(e)) for name, e in self.unfinished.items() if e is not None]
        _insert_rows(self.db, "unfinished", rows)


def _insert_rows(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Many to a statement: each statement lets go of Python's lock and has to win it back from busy threads."""
    first = 0
    for count in (32, 8, 1):
        while len(rows) - first >= count:
            some = rows[first : first + count]
            db.execute(_insertion(table, len(some[0]), count), [value for row in some for value in row])
            first += count


@cache
def _insertion(table: str, width: int, count: int) -> str:
    row = "(" + ",".join("?" * width) + ")"
    return f"INSERT OR {'REPLACE' if table == 'unfinished' else 'ABORT'} INTO {table} VALUES {','.join([row] * count)}"


# Erasing and refusing


def erase(db: sqlite3.Connection, game: str, player: str, last: int) -> int:
    """Some of the player's fragments up to the place `last`: how many; 0 when none are left."""
    game_key = find_game(db, game)[0]
    player_key = _find_player(db, game_key, player)
    found = db.execute(
        "SELECT seq, actor, steps, bytes FROM fragment WHERE player = ? AND seq <= ? ORDER BY seq LIMIT 1000",
        (player_key, game_key * PLACES + last),
    ).fetchall()
    rows, total = [], _Sum()
    for row in found:
        rows.append(row)
        total.add(*row[2:])
        if total.bytes >= ERASE:
            break
    db.executemany("DELETE FROM episode WHERE seq = ?", [row[:1] for row in rows])
    db.executemany("DELETE FROM fragment WHERE seq = ?", [row[:1] for row in rows])
    db.executemany(
        "UPDATE actor SET fragments = fragments - 1, steps = steps - ?2 WHERE key = ?1", [row[1:3] for row in rows]
    )
    db.execute("DELETE FROM actor WHERE game = ? AND fragments = 0", (game_key,))
    db.execute(
        "UPDATE player SET fragments = fragments - ?, steps = steps - ? WHERE key = ?",
        (total.fragments, total.steps, player_key),
    )
    db.execute(
        "UPDATE game SET fragments = fragments - ?, steps = steps - ?, bytes = bytes - ? WHERE key = ?",
        (total.fragments, total.steps, total.bytes, game_key),
    )
    return total.fragments


def forget(db: sqlite3.Connection, game: str, player: str) -> None:
    """What is left of a player whose fragments are erased."""
    db.execute("DELETE FROM quarantine WHERE game = ? AND player = ?", (game, player))
    game_key = find_game(db, game)[0]
    key = _find_player(db, game_key, player)
    db.execute("DELETE FROM unfinished WHERE player = ?", (key,))
    gone = db.execute("DELETE FROM player WHERE key = ? AND fragments = 0", (key,)).rowcount
    db.execute("UPDATE game SET players = players - ? WHERE key = ?", (gone, game_key))


def note(db: sqlite3.Connection, refusals: Sequence[Refusal], counts: Counter[str]) -> None:
    """Into quarantine; the oldest make room."""
    db.executemany("INSERT INTO quarantine (time, game, player, id, reason) VALUES (?, ?, ?, ?, ?)", refusals)
    db.execute("DELETE FROM quarantine WHERE seq <= (SELECT max(seq) FROM quarantine) - ?", (QUARANTINE,))
    db.executemany("UPDATE game SET rejected = rejected + ? WHERE name = ?", [(n, game) for game, n in counts.items()])
