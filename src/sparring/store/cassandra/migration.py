"""How a keyspace and its tables are made, and brought up to date: `sparring store init`."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from sparring.errors import InputError
from sparring.store.cassandra import heads, rows
from sparring.store.cassandra.heads import BucketHead
from sparring.store.cassandra.keyspace import COMPRESSIONS, Address, Keyspace, parse_replication
from sparring.store.cassandra.rows import decode_block, groups
from sparring.store.cassandra.schema import SCHEMA, STATEMENTS, VERSION

__all__ = ["init"]

TIMEOUT = 60.0  # seconds for a change of tables
PIECE = 16  # blocks read at once: each may have 8 MiB
CLAIMS = 4096  # claims written at once
OLDER = {  # statements about tables of version 2
    "give key": "UPDATE game SET key = ? WHERE name = ? IF key = null",
    "older buckets": "SELECT game, bucket, day, steps, fragments, bytes FROM bucket",
}


def init(address: Address) -> str:
    """Creates the keyspace and its tables, or brings them up to date; what was done, for people. Again is fine."""
    with closing(Keyspace(address, complete=False)) as keyspace, keyspace.asking():
        return _make(keyspace) + _warning(keyspace)


def _make(keyspace: Keyspace) -> str:
    address, session, found = keyspace.address, keyspace.session, keyspace.version
    if found == 1:
        raise InputError(
            f"{address} has a store of version 1: bring it to version 2 first, with `sparring store init` of"
            " Sparring 0.1.0"
        )
    nodes = max(len(session.cluster.metadata.all_hosts()), len(address.hosts))
    copies = address.replication or str(min(nodes, 3))
    if found == 0 or address.replication is not None:
        what = "ALTER KEYSPACE" if found else "CREATE KEYSPACE IF NOT EXISTS"
        replication = parse_replication(copies)
        session.execute(f"{what} {address.keyspace} WITH replication = {replication}", timeout=TIMEOUT)
    if found < VERSION:
        session.set_keyspace(address.keyspace)
        for table, definition in SCHEMA.items():
            cql = f"CREATE TABLE IF NOT EXISTS {table} {definition}"
            session.execute(cql.format(compression=COMPRESSIONS[address.compression]), timeout=TIMEOUT)
        if found:
            _upgrade(keyspace)
        session.execute("INSERT INTO version (key, version) VALUES ('store', %s)", (VERSION,))
    if found == 0:
        return f"made the store {address} (copies: {copies})"
    changed = f"; copies: {copies}, run `nodetool repair`" if address.replication else ""
    done = f"was brought from version {found} to {VERSION}" if found < VERSION else f"is up to date (version {found})"
    return f"the store {address} {done}{changed}"


def _warning(keyspace: Keyspace) -> str:
    """Where a node that is killed forgets what it acknowledged, and there is no other copy."""
    where = "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = %s"
    replication = keyspace.session.execute(where, (keyspace.address.keyspace,)).one()[0]
    copies = sum(int(value) for name, value in replication.items() if name != "class")
    if copies > 1 or keyspace.setting("commitlog_sync") != "periodic":
        return ""
    return (
        "\nwarning: there is one copy of everything, and this node syncs its commit log periodically: when its process"
        " is killed, it forgets what it acknowledged last. Set `commitlog_sync: batch` in its cassandra.yaml, or have"
        " more copies (docs/cassandra.md)"
    )


def _upgrade(keyspace: Keyspace) -> None:
    """From version 2, which had a bucket's head in the directory, claims that said no content, and no keys of games.
    All of its buckets are closed; the claims are made anew from what is stored. Nobody may write meanwhile; again is
    fine, also after one that was cut short."""
    session = keyspace.session
    tables = session.cluster.metadata.keyspaces[keyspace.address.keyspace].tables
    if "key" not in tables["game"].columns:
        session.execute("ALTER TABLE game ADD (key text, paused boolean, deleted boolean)", timeout=TIMEOUT)
    keyspace.prepare(STATEMENTS | OLDER)
    for name, *_ in keyspace.run("games"):
        keyspace.applied("give key", name, name)
    if "claim" in tables:
        for game, bucket, day, *head in keyspace.run("older buckets"):
            steps, fragments, size = (value or 0 for value in head)
            for claims in groups(_claims(keyspace, game, day, bucket, steps), CLAIMS, lambda _: 1):
                keyspace.write("claim", claims)
            heads.advance(keyspace, game, bucket, BucketHead(day), BucketHead(day, steps, fragments, size, closed=True))
    for table in ("claim", "lock"):
        session.execute(f"DROP TABLE IF EXISTS {table}", timeout=TIMEOUT)


def _claims(keyspace: Keyspace, game: str, day: int, bucket: int, steps: int) -> Iterator[tuple[Any, ...]]:
    for _, body in keyspace.pages("blocks", game, day, bucket, 0, steps, fetch_size=PIECE):
        for claim, f in rows.claims(game, bucket, decode_block(body)):
            yield *claim, rows.checksum(f)
