"""How a keyspace and its tables are made, and brought up to date: `sparring store init`."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from sparring.errors import InputError
from sparring.store.cassandra import heads
from sparring.store.cassandra.heads import Head
from sparring.store.cassandra.keyspace import COMPRESSIONS, Address, Keyspace, parse_replication
from sparring.store.cassandra.rows import checksum, decode_block, digest, locate, older_claim
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
    replication = parse_replication(address.replication or str(min(nodes, 3)))
    if found == 0:
        _execute(session, f"CREATE KEYSPACE IF NOT EXISTS {address.keyspace} WITH replication = {replication}")
    elif address.replication is not None:
        _execute(session, f"ALTER KEYSPACE {address.keyspace} WITH replication = {replication}")
    if found < VERSION:
        session.set_keyspace(address.keyspace)
        for cql in SCHEMA:
            _execute(session, cql.format(compression=COMPRESSIONS[address.compression]))
        if found:
            _upgrade(keyspace)
        session.execute("INSERT INTO version (key, version) VALUES ('store', %s)", (VERSION,))
    copies = ", ".join(f"{name} {count}" for name, count in replication.items() if name != "class")
    if found == 0:
        return f"made the store {address} ({copies.replace('replication_factor', 'copies:')})"
    changed = f"; copies: {copies.removeprefix('replication_factor ')}, run `nodetool repair`"
    done = f"was brought from version {found} to {VERSION}" if found < VERSION else f"is up to date (version {found})"
    return f"the store {address} {done}{changed if address.replication else ''}"


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
        _execute(session, "ALTER TABLE game ADD (key text, paused boolean, deleted boolean)")
    keyspace.prepare(STATEMENTS | OLDER)
    for name, *_ in keyspace.run("games"):
        keyspace.applied("give key", name, name)
    if "claim" in tables:
        for game, bucket, day, *head in keyspace.run("older buckets"):
            steps, fragments, size = (value or 0 for value in head)
            claims: list[tuple[Any, ...]] = []
            for claim in _claims(keyspace, game, day, bucket, steps):
                claims.append(claim)
                if len(claims) == CLAIMS:
                    keyspace.write("claim", claims)
                    claims.clear()
            keyspace.write("claim", claims)
            heads.advance(keyspace, game, bucket, Head(day), Head(day, steps, fragments, size, closed=True))
    for table in ("claim", "lock"):
        _execute(session, f"DROP TABLE IF EXISTS {table}")


def _claims(keyspace: Keyspace, game: str, day: int, bucket: int, steps: int) -> Iterator[tuple[Any, ...]]:
    for _, body in keyspace.pages("blocks", game, day, bucket, 0, steps, fetch_size=PIECE):
        block = decode_block(body)
        for place, f in zip(block.places, block.fragments, strict=True):
            yield *locate(f.id), older_claim(game, bucket, place, f), digest(f), checksum(f)


def _execute(session: Any, cql: str) -> None:
    session.execute(cql, timeout=TIMEOUT)
