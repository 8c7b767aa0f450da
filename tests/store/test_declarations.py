"""A stored declaration that cannot be read stops its own game, and no other."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_samples import MAZE, POLE, everything, fragment

from sparring.store import GameUnreadable, Outcome
from sparring.store.declarations import Declarations
from sparring.store.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.register(POLE)
        store.register(MAZE)
        yield store


def declare(store: SqliteStore, name: str, spec: str) -> None:
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE game SET spec = ? WHERE name = ?", (spec, name))


FUTURE = POLE.to_json().decode().replace('"box"', '"sphere"')


class TestSqlite:
    def test_the_other_games_are_there(self, store: SqliteStore) -> None:
        declare(store, "pole", FUTURE)
        assert store.games() == [MAZE]
        assert store.append([fragment(game=MAZE)]) == [Outcome.STORED]
        assert store.unreadable().keys() == {"pole"}
        assert "cannot be read" in store.unreadable()["pole"]
        assert "sphere" in store.unreadable()["pole"]

    def test_who_declares_it_is_told_why(self, store: SqliteStore) -> None:
        declare(store, "pole", FUTURE)
        with pytest.raises(GameUnreadable, match=r"'pole' cannot be used.*sphere.*sparring delete pole"):
            store.register(POLE)
        store.register(MAZE)

    def test_its_play_is_kept_until_it_can_be_read_again(self, store: SqliteStore) -> None:
        assert store.games() == [MAZE, POLE]
        play = fragment()
        store.append([play])
        declare(store, "pole", "{")
        assert store.games() == [MAZE]
        declare(store, "pole", POLE.to_json().decode())
        assert store.games() == [MAZE, POLE]
        assert store.unreadable() == {}
        assert everything(store) == [play]

    def test_it_can_be_deleted_and_declared_again(self, store: SqliteStore) -> None:
        declare(store, "pole", FUTURE)
        store.delete_game("pole")
        assert store.unreadable() == {}
        store.register(POLE)
        assert store.games() == [MAZE, POLE]

    def test_it_is_logged_once(self, store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
        declare(store, "pole", FUTURE)
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                store.games()
                store.unreadable()
        assert len(caplog.records) == 1
        assert "'pole'" in caplog.text


class TestDeclarations:
    def test_what_did_not_change_is_not_parsed_again(self) -> None:
        declarations = Declarations("here")
        stored = [("maze", MAZE.to_json()), ("pole", POLE.to_json())]
        (maze, pole), _ = declarations.read(stored)
        again, _ = declarations.read([("pole", POLE.to_json())])
        assert again[0] is pole
        (other,), _ = declarations.read([("maze", MAZE.to_json())])
        assert other == maze
        assert other is not maze  # it was gone in between, and is not kept in memory for ever

    def test_a_declaration_that_breaks_again_is_reported_again(self, caplog: pytest.LogCaptureFixture) -> None:
        declarations = Declarations("here")
        for spec in (b"{", POLE.to_json(), b"{"):
            declarations.read([("pole", spec)])
        assert len(caplog.records) == 2
