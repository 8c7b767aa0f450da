"""How the SQLite store finds its rows: what is asked often never looks at all players, however many were made up."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from store_samples import assert_counts, fragment

from sparring.store.sqlite import SqliteStore

FORMAT_1 = Path(__file__).parent / "format-1.sql"


def plan(store: SqliteStore, read: Callable[[], object]) -> list[str]:
    """How SQLite finds the rows of each statement that `read` runs: EXPLAIN QUERY PLAN's lines."""
    store.games()  # now there is a connection to read with
    (db,) = store._idle
    statements: list[str] = []
    db.set_trace_callback(statements.append)
    read()
    db.set_trace_callback(None)
    assert statements
    return [row[3] for statement in statements for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]


def assert_quick(store: SqliteStore) -> None:
    steps = plan(store, lambda: store.players("pole"))
    assert "SEARCH tally USING INDEX player_seen (game=?)" in steps
    for step in (*steps, *plan(store, lambda: store.stats("pole"))):
        assert step.startswith("SEARCH "), step  # neither a scan nor a sort


def test_neither_stats_nor_players_look_at_all_players(store: SqliteStore) -> None:
    assert_quick(store)


def test_the_most_recently_seen_come_first(store: SqliteStore) -> None:
    for player in ("ann", "bob", "eve", "bob"):
        store.append([fragment(player=player, model="bot", version=1)])
    assert [p.player for p in store.players("pole")] == ["bob", "eve", "ann"]
    assert [p.player for p in store.players("pole", 2)] == ["bob", "eve"]


def test_a_file_of_an_older_format_gets_the_index_when_it_is_opened(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(FORMAT_1.read_text())
    with closing(SqliteStore(path, readonly=True)) as before:  # which changes nothing, and reads all the same
        players = before.players("pole")
        assert [(p.player, p.steps, p.bot_steps) for p in players] == [("eve", 2, 0), ("ann", 9, 0)]
        assert before.stats("pole").bot_steps == 0
    with closing(SqliteStore(path)) as store:
        again = store.players("pole")
        assert [(p.player, p.steps, p.last_seen) for p in again] == [(p.player, p.steps, p.last_seen) for p in players]
        assert_quick(store)


def test_an_older_file_tells_bots_steps_apart_when_it_is_opened(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(FORMAT_1.read_text())
    reader = SqliteStore(path, readonly=True)
    with closing(reader), closing(SqliteStore(path)) as store:
        for each in (store, reader):  # a reader that was there before sees it as well
            assert [(p.player, p.steps, p.bot_steps) for p in each.players("pole")] == [("eve", 2, 0), ("ann", 9, 9)]
            assert (each.stats("pole").steps, each.stats("pole").bot_steps) == (11, 9)
            assert each.stats("maze").bot_steps == 0
        store.append([fragment(player="eve", model="bot", version=1), fragment(player="eve")])
        assert_counts(store)


def test_so_does_a_file_of_this_format_that_was_made_without_it(path: Path, store: SqliteStore) -> None:
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP INDEX player_seen")
    with closing(SqliteStore(path)) as again:
        assert_quick(again)
