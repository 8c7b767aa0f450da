"""Keyspaces of older versions, as those versions left them, brought along by `sparring store init`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servers import CassandraNode
from store_samples import MAZE, POLE, assert_counts, everything, fragment
from typer.testing import CliRunner

from sparring.cli.entry import app
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.store import Outcome, StoreAway, open_store
from sparring.store.cassandra import heads, migration
from sparring.store.cassandra.keyspace import Address

pytestmark = pytest.mark.real
STORED, DUPLICATE, CONFLICT = Outcome.STORED, Outcome.DUPLICATE, Outcome.CONFLICT
NAMES = ["ann-0", "ann-1", "ann-2", "ann-3"]


@pytest.fixture
def address(cassandra: CassandraNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a store of version 2: what is committed are four fragments of ann, four of bob and one of another game."""
    monkeypatch.setattr(migration, "PIECE", 2)  # there are more rows than are read at once
    with cassandra.session() as session:
        session.execute("DROP KEYSPACE IF EXISTS older")
        replication = {"class": "NetworkTopologyStrategy", "replication_factor": "1"}
        session.execute(f"CREATE KEYSPACE older WITH replication = {replication}")
        session.set_keyspace("older")
        for statement in (Path(__file__).parent / "cassandra-2.cql").read_text().split(";\n"):
            if statement.strip():
                session.execute(statement)
        yield f"cassandra://{cassandra.address}/older"
        session.execute("DROP KEYSPACE older")


def test_a_store_of_version_1_is_told_what_can_bring_it_along(cassandra: CassandraNode, address: str) -> None:
    with cassandra.session("older") as session:
        session.execute("UPDATE version SET version = 1 WHERE key = 'store'")
    with pytest.raises(InputError, match="a store of version 1, we need 3: run `sparring store init"):
        open_store(address)
    with pytest.raises(InputError, match=r"version 1: bring it to version 2 first, .* of Sparring 0\.1\.0"):
        migration.init(Address.parse(address))
    with cassandra.session("older") as session:
        assert "key" not in session.cluster.metadata.keyspaces["older"].tables["game"].columns  # and left alone


def test_an_older_store_is_brought_along(address: str) -> None:
    with pytest.raises(InputError, match="a store of version 2, we need 3: run `sparring store init"):
        open_store(address)
    output = CliRunner().invoke(app, ["store", "init", address]).output
    assert "from version 2 to 3" in output
    with contextlib.closing(open_store(address)) as store:
        assert store.games() == [MAZE, POLE]
        before = everything(store)
        assert [f.id for f in before if f.player == "ann"] == NAMES
        assert [f.id for f in before if f.player == "bob"][3:] == ["bob-3"]
        assert sorted(f.id for piece in store.scan("pole") for f in piece) == sorted(f.id for f in before)
        assert len(before) == 8
        assert [f.id for f in everything(store, MAZE)] == ["maze-0"]
        assert store.stats("pole").rejected == 1
        assert [(e.player, e.steps) for e in store.episodes("pole")] == [("ann", 9)]
        assert_counts(store)
        later = [msgspec.structs.replace(f, time=5.0) for f in before]
        assert store.append([*later, *everything(store, MAZE)]) == [DUPLICATE] * 9
        assert store.append([msgspec.structs.replace(before[0], start=9)]) == [CONFLICT]
        new: list[Fragment] = [fragment(), fragment(id="bob-late", player="bob")]  # the second was never committed
        assert store.append([*new, before[5]]) == [STORED, STORED, DUPLICATE]
        assert everything(store) == [*before, *new]
        assert store.discard("pole", [before[0].id], "why") == 1
        assert store.erase("pole", "bob") == 5
        assert store.append([before[0], before[-1], before[1]]) == [Outcome.ERASED, Outcome.ERASED, DUPLICATE]
        assert_counts(store)
        store.delete_game("pole")
        store.register(POLE)
        assert everything(store) == []
        assert store.append(before) == [STORED] * 8
        assert_counts(store)
    with contextlib.closing(open_store(address, readonly=True)) as reader:
        assert everything(reader) == before
        assert_counts(reader, MAZE)


@pytest.mark.parametrize("after", ["nothing", "a bucket", "everything"])
def test_a_migration_that_was_cut_short_is_finished(
    cassandra: CassandraNode, address: str, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    advance, left = heads.advance, 0 if after == "nothing" else 1

    def away(*args: Any) -> bool:
        nonlocal left
        if not left:
            raise StoreAway("no answer")
        left -= 1
        return advance(*args)

    if after == "everything":
        migration.init(Address.parse(address))
        with cassandra.session("older") as session:  # killed before it was noted
            session.execute("UPDATE version SET version = 2 WHERE key = 'store'")
    else:
        with monkeypatch.context() as patch:
            patch.setattr(heads, "advance", away)
            with pytest.raises(StoreAway):
                migration.init(Address.parse(address))
    migration.init(Address.parse(address))
    with contextlib.closing(open_store(address)) as store:
        before = everything(store)
        assert len(before) == 8
        assert store.append(before) == [DUPLICATE] * 8
        assert_counts(store)
