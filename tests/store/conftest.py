"""A store in a SQLite file, for every test here that has no other one; and stores on one keyspace of Cassandra."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from store_samples import MAZE, POLE

from sparring.store import open_store
from sparring.store.cassandra import CassandraStore
from sparring.store.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path)) as store:
        store.register(POLE)
        yield store


@pytest.fixture
def opened(cassandra_address: str) -> Iterator[Callable[..., CassandraStore]]:
    """Opens stores on the same empty keyspace of Cassandra, in which POLE and MAZE are registered."""
    with ExitStack() as stores:

        def make(**options: bool) -> CassandraStore:
            store = open_store(cassandra_address, **options)
            assert isinstance(store, CassandraStore)
            return stores.enter_context(closing(store))

        first = make()
        first.register(POLE)
        first.register(MAZE)
        yield make
