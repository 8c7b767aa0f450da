"""`sparring stream create|status|reshard` and `sparring ingest`. Spark loads only where it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.aws.kinesis import Kinesis

__all__ = ["app", "ingest", "require_spark"]

app = typer.Typer(help="Make, show and reshard the stream that play travels on.", no_args_is_help=True)
AddressArgument = Annotated[str, typer.Argument(help="kinesis://NAME?region=REGION, see docs/stream.md.")]
Shards = Annotated[int, typer.Option(min=1, help="Each takes 1 MB or 1,000 records a second.")]
Retention = Annotated[int, typer.Option(min=24, max=8760, help="Hours that the stream keeps records, read or not.")]
WEEK = 168  # hours: a job may be away for a long weekend. More than 24 cost extra: see docs/aws.md


@app.command(epilog="Example:\n\n  $ sparring stream create 'kinesis://play?region=eu-central-1' --shards 4")
def create(address: AddressArgument, shards: Shards = 1, retention: Retention = WEEK) -> None:
    """Make a stream."""
    from rich.console import Console

    stream = _stream(address)
    with Console().status(f"making {stream.stream}…"):
        stream.create(shards, retention)
    _show(address)


@app.command(epilog="Example:\n\n  $ sparring stream status 'kinesis://play?region=eu-central-1'")
def status(
    address: AddressArgument,
    retention: Annotated[int | None, typer.Option(min=24, max=8760, help="Change it to so many hours.")] = None,
) -> None:
    """Show a stream's shards, or change how long it keeps records."""
    if retention is not None:
        _stream(address).retain(retention)
    _show(address)


@app.command(epilog="Example:\n\n  $ sparring stream reshard 'kinesis://play?region=eu-central-1' --shards 8")
def reshard(address: AddressArgument, shards: Shards) -> None:
    """Split or merge shards until there are so many. Writers and the ingest job follow by themselves."""
    from rich.console import Console

    stream = _stream(address)
    with Console().status(f"resharding {stream.stream}…") as line:
        stream.reshard(shards, lambda now: line.update(f"{stream.stream} has {now} shards, {shards} are wanted…"))
    _show(address)


def ingest(
    stream: Annotated[str, typer.Option(help="Where play comes from: kinesis://NAME?region=REGION.")],
    store: Annotated[
        str | None, typer.Option(help="Where it goes: cassandra://…; default: the store in --data.")
    ] = None,
    data: Annotated[Path, typer.Option(help="The platform's directory; the checkpoint is under it.")] = Path(
        ".sparring"
    ),
    master: Annotated[str, typer.Option(help="Spark's: local[2], spark://HOST:PORT, …")] = "local[2]",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks at the stream.")] = 1.0,
    batch_mib: Annotated[int, typer.Option(min=1, help="MiB of each shard in one batch, at most.")] = 64,
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark; repeatable.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when it has caught up.")] = False,
) -> None:
    """Bring play from a stream into a store, with Spark. Ctrl-C ends it after the batch; the same command goes on."""
    require_spark()
    import logging

    from rich.console import Console

    from sparring.aws.kinesis import default_directory
    from sparring.stream.ingest import BatchReport, IngestOptions, run
    from sparring.terminal import number

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = dict(_setting(text) for text in conf or [])
    address = store or str(data / "store.db")
    console = Console()

    def report(batch: BatchReport) -> None:
        lag = f"{number(batch.lag, 's')} behind" if batch.lag else "caught up"
        rate = number(batch.steps / max(batch.seconds, 1e-3))
        console.print(
            f"batch {batch.batch}: {number(batch.records)} records, {number(batch.bytes, 'B')}, {number(batch.steps)}"
            f" steps ({rate}/s), {batch.duplicates} duplicates, {batch.rejected} rejected; {lag}",
            highlight=False,
        )

    directory = default_directory(data, stream, address)
    console.print(f"starting Spark ({master}); figures of each batch go to {directory / 'metrics.jsonl'}", markup=False)
    run(IngestOptions(stream, address, directory, master, every, batch_mib << 20, settings, once), report)
    console.print("Stopped.")


def require_spark() -> None:
    import importlib.util
    import shutil

    if importlib.util.find_spec("pyspark") is None or importlib.util.find_spec("pyarrow") is None:
        raise InputError("reading a stream needs Spark: pip install 'sparring[spark]'")
    if shutil.which("java") is None:
        raise InputError(
            "Spark needs Java 17 or later, and there is no `java` here: install it (openjdk-17-jre-headless)"
        )


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("spark."):
        raise InputError(f"--conf {text!r}: write it like spark.executor.memory=2g")
    return key, value


def _stream(address: str) -> "Kinesis":
    from sparring.aws import sdk
    from sparring.aws.kinesis import Kinesis

    return Kinesis(address, credentials=sdk.credentials)


def _show(address: str) -> None:
    from rich.console import Console

    from sparring.aws.kinesis import HASHES
    from sparring.terminal import table

    stream = _stream(address)
    summary, shards = stream.summary(), stream.shards()
    title = f"{summary.stream_name}: {summary.stream_status}, keeps records for {summary.retention_period_hours} h"
    rows = [
        (
            shard.shard_id,
            "open" if shard.open else "closed",
            f"{shard.hash_key_range.width / HASHES:.1%}",
            ", ".join(shard.parents) or "–",
        )
        for shard in shards
    ]
    Console().print(table(title, ("shard", "state", ">of the keys", "made from"), rows))
