"""A store by its address."""

from pathlib import Path

from sparring.errors import InputError
from sparring.store.protocol import Store
from sparring.store.sqlite import SqliteStore

__all__ = ["open_store"]


def open_store(address: str) -> Store:
    """`cassandra://HOST:PORT/KEYSPACE`, or the path of a SQLite file."""
    if "://" in address and not address.startswith("sqlite://"):
        raise InputError(f"{address!r} is not a store's address")
    return SqliteStore(Path(address.removeprefix("sqlite://")))
