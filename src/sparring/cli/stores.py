"""`sparring store init|stats`: make a store on a cluster, look into any. Light: databases load when they are asked."""

from typing import Annotated

import typer

from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer(help="Make a store on a Cassandra cluster, or look into any store.", no_args_is_help=True)


@app.command()
def init(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="cassandra://HOST[:PORT][,HOST…]/KEYSPACE[?replication=3]")
    ],
) -> None:
    """Create a store's keyspace and tables, or bring them up to date. May be repeated.

    Options of the address: replication=3 or dc1:3,dc2:2 (default: 3, or as many as there are nodes) and
    compression=lz4|zstd count here; consistency=QUORUM|LOCAL_QUORUM|ONE|…, dc=NAME and
    tls=true|FILE wherever it is opened. A password is in the environment: CASSANDRA_PASSWORD.
    """
    if not address.startswith("cassandra://"):
        raise InputError(f"{address} needs no init: only stores at cassandra://… do; files are made by `sparring up`")
    from sparring.store.cassandra.keyspace import Address
    from sparring.store.cassandra.migration import init as make

    print(make(Address.parse(address)))


@app.command()
def stats(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="cassandra://…, a store.db, or the data directory that has one.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
) -> None:
    """Show what is in a store, game by game."""
    import msgspec
    from rich.console import Console

    from sparring.store import open_store
    from sparring.terminal import number, table

    store = open_store(address, readonly=True)
    try:
        rows = {game.name: store.stats(game.name) for game in store.games()}
    finally:
        store.close()
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    columns = ("game", ">fragments", ">steps", ">players", ">size", ">rejected")
    cells = [
        (name, number(s.fragments), number(s.steps), number(s.players), number(s.bytes, "B"), number(s.rejected))
        for name, s in rows.items()
    ]
    Console().print(table("store", columns, cells, f"no games in {address} yet"))
