"""The table of games: how one is registered and found."""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from sparring.experience import new_id
from sparring.games import Game
from sparring.store.arrival import require_same
from sparring.store.declarations import read_declaration, revised
from sparring.store.profile import Revision
from sparring.store.protocol import NotRegistered
from sparring.store.sqlite.tables import GAME

__all__ = ["Shelf", "find_game", "register", "revise"]


def register(db: sqlite3.Connection, game: Game) -> None:
    row = db.execute("SELECT spec FROM game WHERE name = ?", (game.name,)).fetchone()
    if row is not None:
        require_same(read_declaration(game.name, row[0]), game)
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


def revise(db: sqlite3.Connection, name: str, change: Callable[[Revision], Revision]) -> Revision:
    row = db.execute("SELECT spec FROM game WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise NotRegistered(f"no game {name!r} is registered here")
    new, text = revised(name, row[0], change)
    db.execute("UPDATE game SET spec = ? WHERE name = ?", (text.decode(), name))
    return new


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
