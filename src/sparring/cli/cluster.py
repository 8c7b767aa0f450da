"""A cluster's nodes: `sparring cluster up|status|down`, thin over `ray start`. Every connection needs the token."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sparring import __version__
from sparring.errors import InputError, SparringError

__all__ = ["app"]

MARK = "SPARRING_CLUSTER"  # in the environment of all that `up` started: the cluster's token; `down` looks for it

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
    token = _cluster().use_token()
    if join is not None:
        _cluster().require_head(join, here=False)
    asked = ["--head", f"--port={port}"] if head else [f"--address={join}"]
    asked += [f"--node-ip-address={host}", "--disable-usage-stats"]
    asked += ["--include-dashboard=false"] if head else []
    asked += [f"--num-cpus={cpus}"] if cpus is not None else []
    asked += [f"--num-gpus={gpus:g}"] if gpus is not None else []
    asked += [f"--labels={_cluster().LABEL}={__version__}"]
    _start(*asked, token=token)
    if join is not None:
        try:
            _require_same_version(join)
        except SparringError:
            _stop(token)
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

    cluster = _cluster()
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
    stopped = _stop(_cluster().use_token())
    print(f"stopped {stopped} processes" if stopped else "nothing runs here that `sparring cluster up` started")


def _cluster() -> Any:
    from sparring.rollout.pool import load_cluster

    return load_cluster()


def _start(*words: str, token: Path) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {MARK: str(token)})
    said = (done.stdout + done.stderr).strip()
    if "Version mismatch" in said:
        raise InputError(f"this machine cannot join: {said[said.index('Version mismatch') :]}\nInstall the same")
    if done.returncode:
        raise SparringError(f"ray start failed:\n{said[-2000:]}")


def _require_same_version(address: str) -> None:
    from sparring.experiment import Resources

    cluster = _cluster()
    cluster.connect(Resources(address=address))
    cluster.disconnect()


def _stop(token: Path) -> int:
    """By the mark and the network: other Rays of this machine, and of its containers, are not ours to stop."""
    import psutil

    ours, heads = [], set()
    for process in psutil.process_iter():
        try:
            here = os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net")
            if here and process.environ().get(MARK) == str(token):
                heads |= {word for word in process.cmdline() if word.startswith("--gcs_server_port=")}
                process.terminate()
                ours.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
            continue
    _, alive = psutil.wait_procs(ours, timeout=10)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=10)
    _forget(heads)
    return len(ours)


def _forget(heads: set[str]) -> None:
    """Ray notes the address of the head that was started last, for `auto`: it is gone, if it was one of these."""
    from ray._common.utils import get_ray_address_file

    note = Path(get_ray_address_file(None))
    with contextlib.suppress(FileNotFoundError):
        if f"--gcs_server_port={note.read_text().strip().rpartition(':')[2]}" in heads:
            note.unlink()
