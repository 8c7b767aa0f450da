"""A cluster's nodes: `sparring cluster up|status|down`, thin over `ray start`. Every connection needs the token."""

from typing import Annotated

import typer

from sparring import __version__
from sparring.errors import InputError, SparringError
from sparring.launch import load_ray, nodes

__all__ = ["app"]

app = typer.Typer(help="Start, show and stop this machine's part of a Ray cluster.", no_args_is_help=True)
Gpus = Annotated[float | None, typer.Option(min=0, help="GPUs it offers; default: all.")]


@app.command()
def up(
    head: Annotated[bool, typer.Option("--head", help="Begin a cluster: the others join this one.")] = False,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Join the cluster of this head.")] = None,
    host: Annotated[str, typer.Option(help="This machine's address, as the others see it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The head's port.")] = 6379,
    cpus: Annotated[int | None, typer.Option(min=0, help="CPUs it offers; default: all.")] = None,
    gpus: Gpus = None,
) -> None:
    """Make this machine a node of a cluster."""
    if head == (join is not None):
        raise InputError("say either --head, to begin a cluster, or --join HOST:PORT, to join one")
    token = load_ray().use_token()
    if join is not None:
        load_ray().require_head(join, here=False)
    asked = ["--head", f"--port={port}"] if head else [f"--address={join}"]
    asked += [f"--node-ip-address={host}", "--disable-usage-stats"]
    asked += ["--include-dashboard=false"] if head else []
    asked += [f"--num-cpus={cpus}"] if cpus is not None else []
    asked += [f"--num-gpus={gpus:g}"] if gpus is not None else []
    asked += [f"--labels={load_ray().LABEL}={__version__}"]
    nodes.start(*asked, token=token)
    if join is not None:
        try:
            nodes.require_same_version(join)
        except SparringError:
            nodes.stop(token)
            raise
        print(f"joined {join} as {host}")
        return
    print(f"the cluster's head is at {host}:{port}. On other machines, with the same Sparring:")
    print(f"  copy {token} to the same place (it is the cluster's secret), then")
    print(f"  sparring cluster up --join {host}:{port} --host ITS_ADDRESS")
    print("then, on the head:")
    print(f"  sparring train EXPERIMENT.yaml --set runner=ray --set resources.address={host}:{port}")


@app.command()
def status(address: Annotated[str, typer.Option(metavar="HOST:PORT", help="The head's.")] = "127.0.0.1:6379") -> None:
    """Show the nodes of a cluster and what they offer."""
    from rich.console import Console
    from rich.table import Table

    from sparring.experiment import Resources

    cluster = load_ray()
    cluster.connect(Resources(address=address))
    table = Table("node", "address", "state", "CPUs", "GPUs", "memory")
    for node in cluster.ray.nodes():
        has = node["Resources"]
        memory = f"{has.get('memory', 0) / 2**30:.1f} GiB"
        state = "alive" if node["Alive"] else "gone"
        counts = (f"{has.get(kind, 0):g}" for kind in ("CPU", "GPU"))
        table.add_row(node["NodeID"][:8], node["NodeManagerAddress"], state, *counts, memory)
    Console().print(table)


@app.command()
def down() -> None:
    """Stop what `sparring cluster up` started on this machine."""
    stopped = nodes.stop(load_ray().use_token())
    print(f"stopped {stopped} processes" if stopped else "nothing runs here that `sparring cluster up` started")
