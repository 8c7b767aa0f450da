"""Games that are declared on the stream: the ingest job takes no more of them than the gateway does."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from test_stream_producer import GAME, play

from sparring.games import Game
from sparring.store import declarations
from sparring.store.profile import Origin, Profile, Revision
from sparring.store.sqlite import SqliteStore
from sparring.stream import record
from sparring.stream.sink import ShardResult, StoreSink
from sparring.stream.source import SCHEMA

pytestmark = pytest.mark.real


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.register(GAME)
        yield store


def named(name: str) -> Game:
    return msgspec.structs.replace(GAME, name=name)


def take(store: SqliteStore, *games: Game) -> ShardResult:
    """A task that reads a record of each game, with two fragments."""
    rows = []
    for number, game in enumerate(games):
        fragments = [msgspec.structs.replace(f, game=game.name, schema=game.schema) for f in play(2, seed=number)]
        data = record.encode([record.declaration(game)], [msgspec.msgpack.encode(f) for f in fragments])
        rows.append({"data": data, "sequence": str(number), "arrival": time.time()})
    task = StoreSink(store, {game.name: game for game in store.games()})
    for row in rows:  # some come in a row's own batch
        task.take(pa.RecordBatch.from_pylist([row], SCHEMA))
    return task.finish()


def test_so_many_games_and_no_more(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "MAX_GAMES", 3)
    games = [named(name) for name in ("a", "b", "c")]
    result = take(store, *games, GAME)
    assert [game.name for game in store.games()] == [GAME.name, "a", "b"]
    assert (result.fragments, result.rejected, result.refused) == (6, 2, {"?": 2})
    assert {r.game for r in result.newest} == {"c"}
    assert "this platform has 3 games, and takes no more" in result.newest[0].reason
    store.delete_game("a")
    assert take(store, named("c")).fragments == 2


def test_the_declarations_take_so_many_bytes_and_no_more(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(msgspec.json.encode(GAME))
    monkeypatch.setattr(declarations, "MAX_DECLARATIONS", 2 * size)
    result = take(store, named("a"), named("b"))
    assert [game.name for game in store.games()] == [GAME.name, "a"]
    assert (result.fragments, result.rejected) == (2, 2)
    assert "at most" in result.newest[0].reason


def test_an_enormous_declaration_is_not_taken(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "MAX_DECLARATION", len(msgspec.json.encode(GAME)))
    result = take(store, named("a-game-with-a-longer-name-than-that"))
    assert (result.fragments, result.rejected) == (0, 2)
    assert "the declaration has" in result.newest[0].reason


def test_a_game_whose_stored_declaration_cannot_be_read_stops_no_other(store: SqliteStore) -> None:
    store.register(named("a"))
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE game SET spec = '{' WHERE name = 'a'")
    result = take(store, named("a"), GAME)
    assert (result.fragments, result.rejected) == (2, 2)
    assert "cannot be read" in result.newest[0].reason


def test_play_of_a_renamed_game_is_stored_under_its_first_name(store: SqliteStore) -> None:
    store.revise(GAME.name, lambda known: Revision(known.game, Profile(names=("arena",))))
    result = take(store, named("arena"), GAME)
    assert (result.fragments, result.rejected) == (4, 0)
    assert [game.name for game in store.games()] == [GAME.name]
    assert store.stats(GAME.name).fragments == 4


def test_play_of_a_changed_game_is_stored_with_its_generation(store: SqliteStore) -> None:
    """A client that writes to the stream asks nobody: its schema says which it is."""
    changed = Game(GAME.name, GAME.observation, GAME.action, players=2)
    assert take(store, changed).rejected == 2
    second = msgspec.structs.replace(changed, name=f"{GAME.name}.2")
    store.register(second)
    origin = Origin(GAME.name, store.registration(GAME.name), 2, 0)
    store.revise(second.name, lambda known: Revision(known.game, Profile(origin=origin)))
    result = take(store, changed, GAME)
    assert (result.fragments, result.rejected) == (4, 0)
    assert [store.stats(game.name).fragments for game in (GAME, second)] == [2, 2]
