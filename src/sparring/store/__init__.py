"""Stores: the seam (`protocol`), the embedded default (`sqlite`), a cluster's (`cassandra`) and the one for unit tests
(`memory`).

Implementations are imported when one is opened: clients import the seam's messages and need no database for it.
"""

from pathlib import Path

from sparring import plugins
from sparring.errors import InputError
from sparring.store.protocol import (
    Episode,
    EpisodePage,
    GameUnreadable,
    NotRegistered,
    Outcome,
    PlayerStats,
    Quarantined,
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
    "EpisodePage",
    "GameUnreadable",
    "NotRegistered",
    "Outcome",
    "PlayerStats",
    "Quarantined",
    "Stats",
    "Store",
    "StoreAway",
    "StoreBusy",
    "StoreFull",
    "Tail",
    "VersionStats",
    "is_file",
    "open_store",
]

STORES = {"cassandra": "sparring.store.cassandra:CassandraStore"}  # scheme → class, made with the whole address


def is_file(address: str) -> bool:
    """Whether the store at an address is a file on this machine."""
    return "://" not in address and plugins.parse_outside(address) is None


def open_store(address: str, *, readonly: bool = False) -> Store:
    """The store at an address. Addresses are plain text: send them to other processes, and open there.

    :param address: `cassandra://HOST[:PORT][,HOST…]/KEYSPACE[?…]`, a file, a data directory with a store.db, or
        `module:Class?option=value`: a store from outside, made with its options and `readonly` as keyword arguments.
    :param readonly: Nothing is written, and a store that is not there is not made.
    :raises InputError: there is no store at that address, or no such kind of store.
    """
    if (outside := plugins.parse_outside(address)) is not None:
        name, options = outside
        made: Store = plugins.make("store", name, options | {"readonly": readonly}, kind_of=Store)
        return made
    scheme, separator, _ = address.partition("://")
    if separator:
        if scheme not in STORES:
            use = ", ".join(f"{each}://…" for each in STORES)
            raise InputError(f"there is no store of the kind {scheme!r}: use {use}, a path, or module:Class")
        opened: Store = plugins.find("store", scheme, STORES)(address, readonly=readonly)
        return opened
    from sparring.store.sqlite import SqliteStore

    path = Path(address)
    return SqliteStore(path / "store.db" if path.is_dir() else path, readonly=readonly)
