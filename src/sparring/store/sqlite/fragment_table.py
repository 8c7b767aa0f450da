"""The table of fragments: how they are appended, a batch to a transaction, with all that counts them."""

import sqlite3
from collections.abc import Sequence

from sparring.errors import InputError
from sparring.store.arrival import Submission, decode, same
from sparring.store.protocol import NotRegistered, Outcome
from sparring.store.sqlite.connection import transaction
from sparring.store.sqlite.episode_table import EpisodeTable
from sparring.store.sqlite.game_table import Shelf, find_game
from sparring.store.sqlite.statements import insert_rows, marks, portions
from sparring.store.sqlite.tables import PLACES, PLAYER
from sparring.store.sqlite.tally_table import Arrival, Tally, open_tally, sums
from sparring.store.sqlite.tombstone_table import Tombstone, any_erased, erased

__all__ = ["Ledger", "append"]

REMEMBERED = 10_000  # tallies a writer keeps in mind

_Bodies = dict[str, bytes | memoryview]  # by fragment's id


class Ledger:
    """What a writer knows of the tables without asking: where games and tallies are. Gone after any failure and after
    any other write, and then asked for again."""

    def __init__(self) -> None:
        self.games: dict[str, Shelf] = {}
        self.erased: set[str] = set()  # games of which something was
        self.tallies: dict[Tally, tuple[int, int]] = {}  # key and newest
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
    new: list[Arrival] = []
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
        if any_erased(db, shelf.key):
            ledger.erased.add(name)
    return ledger.games[name].schema == schema


def _known(db: sqlite3.Connection, ids: list[str]) -> _Bodies:
    """Bodies of those that are there already. They are compared as a whole: exact, and no digest to make of each. Rows
    that a deleted game still has make room: a duplicate of one would be lost as soon as it is razed."""
    found: _Bodies = {}
    for some in portions(ids):
        db.execute(
            f"DELETE FROM fragment WHERE id IN {marks(len(some), 1)} AND seq / {PLACES} IN (SELECT key FROM doomed)",
            some,
        )
        found.update(db.execute(f"SELECT id, body FROM fragment WHERE id IN {marks(len(some), 1)}", some).fetchall())
    return found


def _erased(db: sqlite3.Connection, ledger: Ledger, submission: Submission) -> set[Tombstone]:
    """What was there once. Only games of which something was erased pay for the look."""
    found: set[Tombstone] = set()
    for game in ledger.erased & {name for name, _ in submission.games}:
        found |= erased(db, ledger.games[game].key, game, submission.fragments)
    return found


def _sort(submission: Submission, known: _Bodies, erased: set[Tombstone], new: list[Arrival]) -> list[Outcome]:
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


def _insert(db: sqlite3.Connection, ledger: Ledger, new: list[Arrival], now: float) -> None:
    tallies = sums(new)
    for tally, total in tallies.items():
        total.key, total.newest = ledger.tallies.get(tally) or open_tally(db, ledger.games[tally[0]].key, tally)
    players = {(game, name): total for (game, kind, name, _), total in tallies.items() if kind == PLAYER}
    places = {name: game.key * PLACES + game.place for name, game in ledger.games.items()}
    episodes = EpisodeTable(db, now)
    rows = []
    for f, body, ret, _ in new:
        player = players[f.game, f.player]
        places[f.game] = seq = places[f.game] + f.steps
        rows.append((seq, f.id, player.newest, f.steps, body))
        player.newest = seq
        episodes.add(f, ret, player.key, seq)
    insert_rows(db, "fragment", rows)
    episodes.write()
    db.executemany(
        "UPDATE tally SET fragments = fragments + ?, steps = steps + ?, bot_steps = bot_steps + ?, bytes = bytes + ?,"
        " last_seen = ?, newest = ? WHERE key = ?",
        [(t.fragments, t.steps, t.bot_steps, t.bytes, now, t.newest, t.key) for t in tallies.values()],
    )
    for name, game in ledger.games.items():
        ledger.games[name] = game._replace(place=places[name] - game.key * PLACES)
    if len(ledger.tallies) > REMEMBERED:
        ledger.tallies.clear()
    ledger.tallies.update({tally: (total.key, total.newest) for tally, total in tallies.items()})
