"""Stores: the seam (`protocol`), the embedded default (`sqlite`), a cluster's (`cassandra`) and the one for unit tests
(`memory`).

Implementations are imported when one is opened: clients import the seam's messages and need no database for it.
"""

from pathlib import Path

from sparring.errors import InputError
from sparring.store.protocol import (
    Episode,
    GameUnreadable,
    NotRegistered,
    Outcome,
    PlayerStats,
    Refused,
    Stats,
    Store,
    StoreAway,
    StoreBusy,
    StoreFull,
    Tail,
    VersionStats,
)

__all__ = [
    "Episode",
    "GameUnreadable",
    "NotRegistered",
    "Outcome",
    "PlayerStats",
    "Refused",
    "Stats",
    "Store",
    "StoreAway",
    "StoreBusy",
    "StoreFull",
    "Tail",
    "VersionStats",
    "open_store",
]


def open_store(address: str, *, readonly: bool = False) -> Store:
    """The store at an address. Addresses are plain text: send them to other processes, and open there.

    :param address: `cassandra://HOST[:PORT][,HOST…]/KEYSPACE[?…]`, a file, or a data directory with a store.db.
    :param readonly: Nothing is written, and a store that is not there is not made.
    :raises InputError: there is no store at that address, or no such kind of store.
    """
    if address.startswith("cassandra://"):
        from sparring.store.cassandra import CassandraStore

        return CassandraStore(address, readonly=readonly)
    if "://" in address:
        raise InputError(f"there is no store of the kind {address.partition('://')[0]!r}: use cassandra://… or a path")
    from sparring.store.sqlite import SqliteStore

    path = Path(address)
    return SqliteStore(path / "store.db" if path.is_dir() else path, readonly=readonly)
