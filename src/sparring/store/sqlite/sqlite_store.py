"""The embedded store: one SQLite file, a row per fragment. Writing is `writer`'s (group commit, one thread);
here is what callers see, and reading: any number of threads and processes, at any time (WAL)."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from sparring.errors import SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Submission, decode, stripes
from sparring.store.durable import DurableStore
from sparring.store.profile import Revision
from sparring.store.protocol import (
    Episode,
    EpisodePage,
    NotRegistered,
    Outcome,
    PlayerStats,
    Quarantined,
    Stats,
    Tail,
    VersionStats,
)
from sparring.store.sqlite import connection, episode_reading, erasing, game_table, quarantine_table, tables
from sparring.store.sqlite.game_table import find_game
from sparring.store.sqlite.tables import GAME, MODEL, PLACES, PLAYER
from sparring.store.sqlite.writer import SqliteWriter

__all__ = ["SqliteStore"]

ANSWER = 64 << 20  # bytes in one answer of `tail`: fragments of images are large


class SqliteStore(DurableStore[SqliteWriter]):
    """A store in the file `path`, made if absent. `readonly` opens one that another process writes."""

    def __init__(self, path: str | os.PathLike[str], *, readonly: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._closed = False
        super().__init__(self.path, None if readonly else SqliteWriter(self.path))
        # Connections that no thread reads with now.
        self._idle = [connection.open_reader(self.path)] if readonly else []
        self._counts_bots = not readonly  # else it may be a file that only older writers have opened

    def close(self) -> None:
        """Writes what was submitted, then closes. Twice is fine."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if self._writer is not None:
            self._writer.close()
        for db in idle:
            db.close()

    def register(self, game: Game) -> None:
        self._writing().call(lambda db: game_table.register(db, game))

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        return self._writing().append(Submission(fragments))

    def quarantined(self, game: str, limit: int = 100) -> list[Quarantined]:
        with self._reading() as db:
            return quarantine_table.newest(db, game, limit)

    def erase(self, game: str, player: str) -> int:
        """Some at a time, so that appends get through in between; then the bytes are removed from the files too."""
        writer = self._writing()
        writer.note_refusals()  # the player's may still be on their way
        erased = rows = 0
        while (some := writer.call(lambda db: erasing.erase(db, game, player)))[1]:
            erased, rows = erased + some[0], rows + some[1]
        if rows:
            writer.scrub()
        return erased

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        writer, discarded = self._writing(), 0
        for first in range(0, len(ids), 64):
            some = ids[first : first + 64]
            discarded += writer.call(lambda db, some=some: erasing.discard(db, game, some, reason))  # type: ignore[misc]
        return discarded

    def erasure(self, game: str) -> str:
        return str(self._of_game("erasures", game) or "")

    def registration(self, game: str) -> str:
        return str(self._of_game("registration", game) or "")

    def _of_game(self, column: str, game: str) -> str | int | None:
        with self._reading() as db:
            if tables.is_older(db):
                column = {"registration": "'first'", "erasures": "0"}[column]
            row = db.execute(f"SELECT {column} FROM game WHERE name = ?", (game,)).fetchone()
            return row[0] if row else None

    def pause(self, game: str, paused: bool) -> None:
        if not self._writing().call(
            lambda db: db.execute("UPDATE game SET paused = ? WHERE name = ?", (paused, game)).rowcount
        ):
            raise NotRegistered(f"no game {game!r} is registered here")

    def paused(self) -> set[str]:
        with self._reading() as db:
            if tables.is_older(db):
                return set()
            return {name for (name,) in db.execute("SELECT name FROM game WHERE paused")}

    def delete_game(self, name: str) -> None:
        writer = self._writing()
        writer.note_refusals()
        gone = writer.call(lambda db: erasing.doom(db, name))
        while writer.call(erasing.raze):
            gone += 1
        if gone:
            writer.scrub()

    def deleted(self, name: str) -> bool:
        with self._reading() as db:
            if tables.is_older(db):
                return False
            return db.execute("SELECT 1 FROM deleted WHERE name = ?", (name,)).fetchone() is not None

    def revise(self, game: str, change: Callable[[Revision], Revision]) -> Revision:
        return self._writing().call(lambda db: game_table.revise(db, game, change))

    def _specs(self) -> list[tuple[str, str]]:
        with self._reading() as db:
            return db.execute("SELECT name, spec FROM game ORDER BY name").fetchall()

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        with self._reading() as db:
            shelf = find_game(db, game)
            if after < 0:
                return Tail([], shelf.place)
        found = self._slice(game, after, PLACES - 1, limit)
        return Tail([f for _, f in found], found[-1][0] if found else after)

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        with self._reading() as db:
            end = find_game(db, game).place
        for place, last in stripes(0, end, share, of):
            while place < last and (piece := self._slice(game, place, last)):
                place = piece[-1][0]
                yield [f for _, f in piece]

    def _slice(self, game: str, after: int, last: int, limit: int = 1000) -> list[tuple[int, Fragment]]:
        """Fragments with their places, after the one place up to the other; fewer than `limit` when they are large."""
        with self._reading() as db:
            first, _ = _span(find_game(db, game).key)
            rows = db.execute(
                "SELECT seq, body FROM fragment WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
                (first + after, first + last, limit),
            )
            found, size = [], 0
            for seq, body in rows:
                found.append((seq - first, decode(body)))
                size += len(body)
                if size >= ANSWER:
                    break
            rows.close()
            return found

    def sample(self, game: str, steps: int, rng: np.random.Generator) -> list[Fragment]:
        with self._reading() as db:
            drawn: list[Fragment] = []
            missing = steps
            while missing > 0:
                (key, _, place), stats = find_game(db, game), _stats(db, game)
                if stats.steps <= steps:
                    rows = db.execute("SELECT body FROM fragment WHERE seq > ? AND seq < ?", _span(key))
                    return [decode(body) for (body,) in rows]
                wanted = missing * stats.fragments // stats.steps + 1
                probes = wanted * place // stats.steps  # of all steps there ever were: erased ones find nothing
                if probes <= stats.fragments:
                    found = _probe(db, key, rng.integers(place, size=probes).tolist())
                else:
                    found = _pick(db, key, wanted, rng)
                for f in found:
                    drawn.append(f)
                    missing -= f.steps
                    if missing <= 0:
                        break
            return drawn

    def stats(self, game: str) -> Stats:
        with self._reading() as db:
            return _stats(db, game, self._bot_steps(db))

    def _bot_steps(self, db: sqlite3.Connection) -> str:
        """The column, where there is one."""
        self._counts_bots = self._counts_bots or tables.counts_bots(db)
        return "bot_steps" if self._counts_bots else "0"

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        with self._reading() as db:
            rows = db.execute(
                # The kind is written out: SQLite takes the index player_seen only when it can see that it applies.
                f"SELECT name, fragments, steps, last_seen, {self._bot_steps(db)} FROM tally"
                f" WHERE game = ? AND kind = '{PLAYER}' ORDER BY last_seen DESC LIMIT ?",
                (find_game(db, game).key, limit),
            )
            return [PlayerStats(*row) for row in rows]

    def versions(self, game: str) -> list[VersionStats]:
        with self._reading() as db:
            rows = db.execute(
                "SELECT nullif(name, ''), nullif(version, -1), fragments, steps FROM tally WHERE game = ? AND kind = ?"
                " ORDER BY name, version",
                (find_game(db, game).key, MODEL),
            )
            return [VersionStats(*row) for row in rows]

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        with self._reading() as db:
            return episode_reading.after(db, find_game(db, game).key, after, limit)

    def newest_episodes(self, game: str, before: int | None = None, limit: int = 100) -> EpisodePage:
        with self._reading() as db:
            return episode_reading.newest(db, find_game(db, game).key, before, limit)

    def episode(
        self, game: str, cursor: int, first: int = 0, last: int | None = None
    ) -> tuple[Episode, list[Fragment]] | None:
        with self._reading() as db:
            return episode_reading.one(db, find_game(db, game).key, cursor, first, last)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to nobody else. Statements are short and no transaction is held, so the log can start over."""
        with self._lock:
            if self._closed:
                raise SparringError(f"the store {self.path} is closed")
            db = self._idle.pop() if self._idle else None
        db = db or connection.open_reader(self.path)
        try:
            yield db
        except sqlite3.Error as error:
            raise connection.trouble(self.path, error) from error
        except msgspec.MsgspecError as error:
            raise SparringError(f"the store {self.path} holds a damaged fragment: {error}") from error
        finally:
            self._give_back(db)

    def _give_back(self, db: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(db)
                return
        db.close()


def _stats(db: sqlite3.Connection, game: str, bot_steps: str = "0") -> Stats:
    row = db.execute(
        f"SELECT fragments, steps, players, bytes, rejected, {bot_steps} FROM game"
        " JOIN tally ON tally.game = game.key AND kind = ? WHERE game.name = ?",
        (GAME, game),
    ).fetchone()
    return Stats(*row) if row else Stats(0, 0, 0, 0, 0)


def _span(game: int) -> tuple[int, int]:
    return game * PLACES, (game + 1) * PLACES


def _probe(db: sqlite3.Connection, game: int, steps: list[int]) -> Iterator[Fragment]:
    """The fragments that hold these steps, counted from the game's first; an erased one has none."""
    first, end = _span(game)
    for step in steps:
        row = db.execute(
            "SELECT seq - steps <= ?1, body FROM fragment WHERE seq > ?1 AND seq < ?2 ORDER BY seq LIMIT 1",
            (first + step, end),
        ).fetchone()
        if row and row[0]:
            yield decode(row[1])


def _pick(db: sqlite3.Connection, game: int, count: int, rng: np.random.Generator) -> Iterator[Fragment]:
    """Where so much was erased that probes would mostly find nothing: looks at the steps of every fragment left."""
    rows = db.execute("SELECT seq, steps FROM fragment WHERE seq > ? AND seq < ?", _span(game)).fetchall()
    ends = np.cumsum([steps for _, steps in rows])
    steps = rng.integers(ends[-1], size=count) if rows else np.empty(0)
    for index in np.searchsorted(ends, steps, side="right").tolist():
        row = db.execute("SELECT body FROM fragment WHERE seq = ?", rows[index][:1]).fetchone()
        if row:
            yield decode(row[0])
