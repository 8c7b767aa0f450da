"""The SQLite store's file: its tables, how it is opened, and what a transaction writes.

A fragment's *place* is the number of steps its game had when it was stored, itself included. Places only grow and those
of erased fragments are not used again, so a place is `tail`'s cursor; and a random step number finds its fragment with
one lookup, so `sample` is uniform over steps without a scan.
"""

import errno
import hashlib
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, new_id
from sparring.games import Game
from sparring.store.arrival import Submission, Unfinished, decode, require_same, same
from sparring.store.protocol import NotRegistered, Outcome, StoreFull
from sparring.store.sqlite import pages

__all__ = [
    "GAME",
    "MODEL",
    "PLACES",
    "PLAYER",
    "QUARANTINE",
    "Ledger",
    "Refusal",
    "append",
    "connect",
    "digest",
    "find_game",
    "find_player",
    "is_older",
    "note",
    "note_from",
    "open_reader",
    "open_writer",
    "register",
    "tallies",
    "transaction",
    "trouble",
]

T = TypeVar("T")

VERSION = 2  # of these tables
MAGIC = b"SQLite format 3\0"  # SQLite itself takes a shorter file for an empty one, and overwrites it
APPLICATION = 0x53504152  # "SPAR" in the file's header
PLACES = 1 << 44  # seq = game · PLACES + place: one B-tree for all games, each with a range to grow at its end
PAGE = 8192  # bytes; measured: larger ones write more for counters and ids, smaller ones take longer for bodies
QUARANTINE = 4096  # refused fragments kept
REMEMBERED = 10_000  # tallies a writer keeps in mind
PATIENCE = 5.0  # seconds to wait for a lock, or for a file that is just being made

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

GAME, PLAYER, MODEL, SOURCE = "game", "player", "model", "source"  # kinds of tally; of a source: what it refused

Refusal = tuple[float, str, str, str, str]  # time, game, player, fragment's id, reason


_New = tuple[Fragment, memoryview, float, int]  # its body, sum of rewards, bytes of columns
_Bodies = dict[str, bytes | memoryview]  # by fragment's id
_Tally = tuple[str, str, str, int]  # game, kind, name, version
_Play = tuple[str, str, str]  # game, player, fragment's id


# Opening


def open_writer(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = connect(path, "rwc")
        with _closing_on_error(db):
            if _version(db, path) == 0:
                db.execute(f"PRAGMA page_size = {PAGE}")
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            for pragma in ("synchronous = FULL", "wal_autocheckpoint = 0", "secure_delete = ON", "cache_size = -16384"):
                db.execute(f"PRAGMA {pragma}")
            with transaction(db):
                _upgrade(db, _version(db, path))
    except (sqlite3.Error, OSError) as error:
        raise trouble(path, error) from error
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """Not SQLite's own read-only mode: that cannot make the files a log needs when the writer is away."""
    if not path.is_file():
        raise InputError(f"there is no store at {path}: `sparring up` makes one, or give the directory that has it")
    try:
        db = connect(path)
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


_looked_at: set[Path] = set()
_open: Counter[Path] = Counter()  # connections of this process
_looking = threading.Lock()


class _Connection(sqlite3.Connection):
    """One that is counted, because `pages` may only close its file after the last of them."""

    path: Path | None = None

    def close(self) -> None:
        super().close()
        with _looking:
            if self.path is not None:
                _open[self.path] -= 1
                if not _open[self.path]:
                    del _open[self.path]
                    pages.close(self.path)
                self.path = None


def connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    path = path.absolute()
    with _looking:
        # Once per process, before it has a connection: POSIX drops all locks of a process on a file when it closes the
        # file anywhere, and SQLite's among them. Another process that closed the store then deleted the log under us.
        if path not in _looked_at and path.is_file() and _beginning(path) not in (b"", MAGIC):
            raise _no_store(path)
        _looked_at.add(path)
    uri = f"{path.as_uri()}?mode={mode}"
    db = sqlite3.connect(
        uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False, factory=_Connection
    )
    with _looking:
        db.path = path
        _open[path] += 1
    return db


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


@contextmanager
def _closing_on_error(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        db.close()
        raise


def _upgrade(db: sqlite3.Connection, version: int) -> None:
    """Makes the tables, or brings older ones along."""
    if version == 0:
        for statement in SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
    for later in range(max(version, 1) + 1, VERSION + 1):
        for statement in UPGRADES[later]:
            db.execute(statement)
    # Names of deleted games that were not declared again. Not in UPGRADES: there are files of format 2 without it.
    db.execute("CREATE TABLE IF NOT EXISTS deleted (key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)")
    db.execute(f"PRAGMA user_version = {VERSION}")


def is_older(db: sqlite3.Connection) -> bool:
    """Whether a reader is before a file that no writer has opened since the tables grew."""
    return bool(db.execute("PRAGMA user_version").fetchone()[0] < VERSION)


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
        return _no_store(path)
    return SparringError(f"the store {path} cannot be used: {error}")


def _no_store(path: Path) -> InputError:
    return InputError(f"{path} is not a store (nor any SQLite database): give another path, or move it away")


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
    (key,) = db.execute(
        "SELECT 1 + max(ifnull((SELECT max(key) FROM game), 0), ifnull(max(key), 0)) FROM doomed"
    ).fetchone()
    db.execute(
        "INSERT INTO game (key, name, schema, spec, registration) VALUES (?, ?, ?, ?, ?)",
        (key, game.name, game.schema, game.to_json().decode(), new_id()),
    )
    db.execute("INSERT INTO tally (game, kind, name, version) VALUES (?, ?, '', -1)", (key, GAME))
    db.execute("DELETE FROM deleted WHERE name = ?", (game.name,))


class Shelf(NamedTuple):
    """A game's range of places. Keys begin at 1: a game that is not there has key 0, and nothing."""

    key: int
    schema: str
    place: int  # of its newest fragment


def find_game(db: sqlite3.Connection, name: str) -> Shelf:
    row = db.execute(
        "SELECT game.key, schema, erased + steps FROM game JOIN tally ON tally.game = game.key AND kind = ?"
        " WHERE game.name = ?",
        (GAME, name),
    ).fetchone()
    return Shelf(*row) if row else Shelf(0, "", 0)


def find_player(db: sqlite3.Connection, game: str, name: str) -> tuple[int, int]:
    """Its key and its newest fragment's seq; zeros for one that is not there."""
    row: tuple[int, int] | None = db.execute(
        "SELECT key, newest FROM tally WHERE game = ? AND kind = ? AND name = ?",
        (find_game(db, game).key, PLAYER, name),
    ).fetchone()
    return row or (0, 0)


# Appending. By the batch throughout: SQLite takes some 20 µs for a row of 3 kB, and each call into it several more.


class Ledger:
    """What a writer knows of the tables without asking: where games and tallies are. Gone after any failure and after
    any other write, and then asked for again."""

    def __init__(self) -> None:
        self.games: dict[str, Shelf] = {}
        self.erased: set[str] = set()  # games of which something was
        self.tallies: dict[_Tally, tuple[int, int]] = {}  # key and newest
        self.version = 0  # of the data, which another connection's commit changes

    def forget(self) -> None:
        self.games.clear()
        self.erased.clear()
        self.tallies.clear()

    def refresh(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA data_version").fetchone()
        if version != self.version:
            self.forget()
            self.version = version


def append(
    db: sqlite3.Connection, ledger: Ledger, submissions: Sequence[Submission], now: float
) -> list[list[Outcome] | InputError]:
    """The answer to each submission, all in one transaction. One that does not belong here is refused, alone."""
    try:
        return _transact(db, ledger, submissions, now, [])
    except sqlite3.IntegrityError:  # some ids are there already, which is rare enough to be found out this way
        return _transact(db, ledger, submissions, now, [f.id for s in submissions for f in s.fragments])


def _transact(
    db: sqlite3.Connection, ledger: Ledger, submissions: Sequence[Submission], now: float, suspects: list[str]
) -> list[list[Outcome] | InputError]:
    """`suspects`: ids that may be there already. Looked up inside the transaction: another writer could add one."""
    try:
        with transaction(db):
            ledger.refresh(db)
            known = _known(db, suspects)
            return _append(db, ledger, submissions, now, known)
    except BaseException:
        ledger.forget()
        raise


def _append(
    db: sqlite3.Connection, ledger: Ledger, submissions: Sequence[Submission], now: float, known: _Bodies
) -> list[list[Outcome] | InputError]:
    answers: list[list[Outcome] | InputError] = []
    new: list[_New] = []
    for submission in submissions:
        strays = [game for game in submission.games if not _has_game(db, ledger, *game)]
        if strays:
            answers.append(NotRegistered("no game {!r} with schema {!r} is registered here".format(*strays[0])))
        else:
            answers.append(_sort(submission, known, _erased(db, ledger, submission), new))
    if new:
        _insert(db, ledger, new, now)
    return answers


def _has_game(db: sqlite3.Connection, ledger: Ledger, name: str, schema: str) -> bool:
    if name not in ledger.games:
        shelf = find_game(db, name)
        if not shelf.key:
            return False
        ledger.games[name] = shelf
        if db.execute("SELECT 1 FROM tombstone WHERE game = ? LIMIT 1", (shelf.key,)).fetchone():
            ledger.erased.add(name)
    return ledger.games[name].schema == schema


def _known(db: sqlite3.Connection, ids: list[str]) -> _Bodies:
    """Bodies of those that are there already. They are compared as a whole: exact, and no digest to make of each. Rows
    that a deleted game still has make room: a duplicate of one would be lost as soon as it is razed."""
    found: _Bodies = {}
    for some in _portions(ids):
        db.execute(
            f"DELETE FROM fragment WHERE id IN {_marks(len(some), 1)} AND seq / {PLACES} IN (SELECT key FROM doomed)",
            some,
        )
        found.update(db.execute(f"SELECT id, body FROM fragment WHERE id IN {_marks(len(some), 1)}", some).fetchall())
    return found


def _erased(db: sqlite3.Connection, ledger: Ledger, submission: Submission) -> set[_Play]:
    """What was there once. Only games of which something was erased pay for the look."""
    found: set[_Play] = set()
    for game in ledger.erased & {name for name, _ in submission.games}:
        ids = {digest(f.player, f.id): (game, f.player, f.id) for f in submission.fragments if f.game == game}
        for some in _portions(list(ids)):
            rows = db.execute(
                f"SELECT id FROM tombstone WHERE game = ? AND id IN {_marks(len(some), 1)}",
                (ledger.games[game].key, *some),
            )
            found.update(ids[row[0]] for row in rows)
    return found


def digest(player: str, fragment_id: str) -> bytes:
    """What is kept of an erased fragment: clients choose ids, and may have written a player's name into them. Another
    player who chooses the same id has other play."""
    return hashlib.blake2b(f"{len(player)} {player} {fragment_id}".encode(), digest_size=16).digest()


def _sort(submission: Submission, known: _Bodies, erased: set[_Play], new: list[_New]) -> list[Outcome]:
    arrivals = zip(submission.fragments, submission.bodies, submission.returns, submission.sizes, strict=True)
    ids = {f.id for f in submission.fragments}
    if not erased and len(ids) == len(submission.fragments) and known.keys().isdisjoint(ids):  # the usual case
        new += arrivals
        known.update(zip([f.id for f in submission.fragments], submission.bodies, strict=True))
        return [Outcome.STORED] * len(ids)
    outcomes = []
    for arrival in arrivals:
        f, body = arrival[:2]
        if (f.game, f.player, f.id) in erased:
            outcomes.append(Outcome.ERASED)
        elif f.id in known:
            again = known[f.id] == body or same(decode(known[f.id]), f)
            outcomes.append(Outcome.DUPLICATE if again else Outcome.CONFLICT)
        else:
            known[f.id] = body
            new.append(arrival)
            outcomes.append(Outcome.STORED)
    return outcomes


class _Sum:
    """What one transaction adds to a tally, then also the tally's key and newest fragment."""

    __slots__ = ("bytes", "fragments", "key", "newest", "steps")

    def __init__(self) -> None:
        self.fragments = self.steps = self.bytes = self.key = self.newest = 0


def _insert(db: sqlite3.Connection, ledger: Ledger, new: list[_New], now: float) -> None:
    tallies = _sums(new)
    for tally, total in tallies.items():
        total.key, total.newest = ledger.tallies.get(tally) or _open_tally(db, ledger.games[tally[0]].key, tally)
    players = {(game, name): total for (game, kind, name, _), total in tallies.items() if kind == PLAYER}
    places = {name: game.key * PLACES + game.place for name, game in ledger.games.items()}
    episodes = _Episodes(db, now)
    rows = []
    for f, body, ret, _ in new:
        player = players[f.game, f.player]
        places[f.game] = seq = places[f.game] + f.steps
        rows.append((seq, f.id, player.newest, f.steps, body))
        player.newest = seq
        episodes.add(f, ret, player.key, seq)
    _insert_rows(db, "fragment", rows)
    episodes.write()
    db.executemany(
        "UPDATE tally SET fragments = fragments + ?, steps = steps + ?, bytes = bytes + ?, last_seen = ?, newest = ?"
        " WHERE key = ?",
        [(t.fragments, t.steps, t.bytes, now, t.newest, t.key) for t in tallies.values()],
    )
    for name, game in ledger.games.items():
        ledger.games[name] = game._replace(place=places[name] - game.key * PLACES)
    if len(ledger.tallies) > REMEMBERED:
        ledger.tallies.clear()
    ledger.tallies.update({tally: (total.key, total.newest) for tally, total in tallies.items()})


def _open_tally(db: sqlite3.Connection, game: int, tally: _Tally) -> tuple[int, int]:
    """Its key and newest fragment; made if it is not there."""
    row: tuple[int, int] | None = db.execute(
        "SELECT key, newest FROM tally WHERE game = ? AND kind = ? AND name = ? AND version = ?", (game, *tally[1:])
    ).fetchone()
    if row is not None:
        return row
    if tally[1] == PLAYER:
        db.execute("UPDATE game SET players = players + 1 WHERE key = ?", (game,))
    made = db.execute("INSERT INTO tally (game, kind, name, version) VALUES (?, ?, ?, ?)", (game, *tally[1:]))
    return made.lastrowid or 0, 0


def _sums(new: list[_New]) -> dict[_Tally, _Sum]:
    groups: defaultdict[tuple[str, str, str | None, int | None], _Sum] = defaultdict(_Sum)
    whose = {(f.game, f.player, f.model, f.version) for f, _, _, _ in new}
    if len(whose) == 1:  # an upload is one player's, mostly: then no loop but these
        group = groups[whose.pop()]
        group.fragments = len(new)
        group.steps, group.bytes = sum([f.steps for f, _, _, _ in new]), sum([size for _, _, _, size in new])
        new = []
    for f, _, _, size in new:
        group = groups[f.game, f.player, f.model, f.version]
        group.fragments += 1
        group.steps += f.steps
        group.bytes += size
    sums: defaultdict[_Tally, _Sum] = defaultdict(_Sum)
    for (game, player, model, version), group in groups.items():
        for tally in tallies(player, model, version):
            total = sums[game, *tally]
            total.fragments += group.fragments
            total.steps += group.steps
            total.bytes += group.bytes
    return sums


def tallies(player: str, model: str | None, version: int | None) -> tuple[tuple[str, str, int], ...]:
    """Where a fragment counts: kind, name and version of the tallies."""
    return (GAME, "", -1), (PLAYER, player, -1), (MODEL, model or "", -1 if version is None else version)


_Part = tuple[tuple[int, str], Fragment, float, int]  # player and episode, the fragment, its sum of rewards, its seq


class _Episodes:
    """The episodes that this transaction begins, continues and completes."""

    def __init__(self, db: sqlite3.Connection, now: float) -> None:
        self.db = db
        self.now = now
        self.complete: list[tuple[Any, ...]] = []
        self.unfinished: dict[tuple[int, str], Unfinished | None] = {}  # none: not any more
        self.parts: list[_Part] = []
        self.begun: dict[tuple[int, str], list[_Part]] = {}  # from the first step on, without a gap so far

    def add(self, f: Fragment, ret: float, player: int, seq: int) -> None:
        """An episode that comes whole, as most do, needs neither to be looked up nor remembered."""
        name = (player, f.episode)
        whole = self.begun.get(name)
        if whole and whole[-1][1].start + whole[-1][1].steps != f.start:
            self.parts += self.begun.pop(name)
            whole = None
        if whole is None and f.start:
            self.parts.append((name, f, ret, seq))
            return
        if whole is None:
            self.begun[name] = whole = []
        whole.append((name, f, ret, seq))
        if f.ended:
            del self.begun[name]
            total = sum([part[2] for part in whole])
            self.complete.append((seq, *name, f.start + f.steps, total, self.now, f.model, f.version))

    def write(self) -> None:
        for parts in self.begun.values():
            self.parts += parts
        stored = self.find(list({name for name, _, _, _ in self.parts}))
        self.unfinished.update(stored)
        for name, f, ret, seq in self.parts:
            episode = self.unfinished.get(name)
            if episode is None:
                self.unfinished[name] = episode = Unfinished()
            if episode.add(f, ret):
                self.complete.append((seq, *name, episode.steps, episode.ret, self.now, episode.model, episode.version))
                self.unfinished[name] = None
        _insert_rows(self.db, "episode", self.complete)
        gone = [name for name in stored if self.unfinished[name] is None]
        self.db.executemany("DELETE FROM unfinished WHERE player = ? AND name = ?", gone)
        rows = [(*name, *msgspec.structs.astuple(e)) for name, e in self.unfinished.items() if e is not None]
        _insert_rows(self.db, "unfinished", rows)

    def find(self, names: list[tuple[int, str]]) -> dict[tuple[int, str], Unfinished]:
        found = {}
        for some in _portions(names):
            rows = self.db.execute(
                "SELECT player, name, steps, ret, length, model, version"
                f" FROM (VALUES {_marks(2, len(some))}) JOIN unfinished ON player = column1 AND name = column2",
                [value for name in some for value in name],
            )
            found.update({(row[0], row[1]): Unfinished(*row[2:]) for row in rows.fetchall()})
        return found


def _insert_rows(db: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    """Many to a statement: each statement lets go of Python's lock and has to win it back from busy threads."""
    verb = "REPLACE" if table == "unfinished" else "INSERT"
    for some in _portions(rows):
        marks = _marks(len(some[0]), len(some))
        db.execute(f"{verb} INTO {table} VALUES {marks}", [value for row in some for value in row])


def _portions(rows: list[T]) -> Iterator[list[T]]:
    """Of 1, 2, 4, … 128: few different statements, which SQLite then has ready, and few of them."""
    first = 0
    while left := len(rows) - first:
        size = min(128, 1 << (left.bit_length() - 1))
        yield rows[first : first + size]
        first += size


@cache
def _marks(width: int, count: int) -> str:
    return ",".join(["(" + ",".join("?" * width) + ")"] * count)


# Refusing


def note(db: sqlite3.Connection, refusals: Sequence[Refusal], counts: Counter[str]) -> None:
    """Into quarantine; the oldest make room."""
    db.executemany("INSERT INTO quarantine (time, game, player, id, reason) VALUES (?, ?, ?, ?, ?)", refusals)
    db.execute("DELETE FROM quarantine WHERE seq <= (SELECT max(seq) FROM quarantine) - ?", (QUARANTINE,))
    db.executemany("UPDATE game SET rejected = rejected + ? WHERE name = ?", [(n, game) for game, n in counts.items()])


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
