"""The job that brings play from a stream into a store: Spark Structured Streaming, a task per shard and batch.

Each task reads a shard, decodes and checks as the gateway does, and appends to the store, which stores an id once. A
batch is over when all of it is in the store; killed anywhere, it is done again. `sparring ingest` runs this, or
`spark-submit` of this file with the same options.
"""

import argparse
import contextlib
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from sparring.api import StreamStatus
from sparring.aws import sdk
from sparring.aws.kinesis import Kinesis
from sparring.errors import InputError, SparringError
from sparring.files import write_whole
from sparring.store import open_store
from sparring.store.protocol import Store
from sparring.stream.sink import ShardResult, StoreSink
from sparring.stream.source import KinesisReader, KinesisSource, Positions, Reached

__all__ = ["BatchReport", "IngestOptions", "main", "run"]

MAX_TEXT = 300
HEARTBEAT = 2.0  # seconds between signs of life
ALARM = 0.5  # of the stream's retention: who is further behind is warned …
AGAIN = 3600.0  # … every so many seconds
FIRST_DELAY, MAX_DELAY = 1.0, 60.0  # between two tries of a batch that fails
LAST_BATCH = 30.0  # seconds that the batch under way gets when the job is asked to stop
log = logging.getLogger("sparring.ingest")


class IngestOptions(msgspec.Struct, frozen=True):
    """`directory`: checkpoint, figures per batch (metrics.jsonl) and status, on a disk that outlives the driver."""

    stream: str
    store: str
    directory: Path
    master: str | None = None  # none: spark-submit's
    every: float = 1.0  # seconds between looks at the stream
    batch_bytes: int = 64 << 20  # per shard
    conf: dict[str, str] = {}
    once: bool = False  # ends when it has caught up
    parent: int | None = None  # ends when this process is gone


class BatchReport(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl."""

    time: float
    batch: int
    seconds: float
    shards: int
    records: int
    bytes: int
    fragments: int
    steps: int
    duplicates: int
    rejected: int
    lag: float


# On executors


class StoredKinesis(KinesisSource):
    """The source whose tasks store what they read: one row per shard comes back, a Result. So records stay in the one
    process that reads, checks and stores them; through Java they would go twice, for nothing. Options: the source's,
    and `store`."""

    @classmethod
    def name(cls) -> str:
        return "sparring-stored-kinesis"

    def schema(self) -> str:
        return "result string"

    def streamReader(self, schema: StructType) -> "StoringReader":
        return StoringReader(self.options["store"], *self.reading())


class StoringReader(KinesisReader):
    def __init__(self, store: str, address: str, positions: Path, batch_bytes: int) -> None:
        super().__init__(address, positions, batch_bytes)
        self._store = store

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        store = _opened(self._store)
        sink = StoreSink(store, {game.name: game for game in store.games()})  # each time: one may have been deleted
        for rows in super().read(partition):
            sink.take(rows)
        result = msgspec.json.encode(sink.finish()).decode()
        yield pa.RecordBatch.from_pydict({"result": [result]})


@functools.lru_cache(maxsize=2)
def _opened(address: str) -> Store:
    """A store per worker process, which does many tasks."""
    return open_store(address)


# On the driver


@dataclass
class _Job:
    options: IngestOptions
    on_batch: Callable[[BatchReport], None]
    store: Store
    stream: Kinesis
    source: str  # the stream, as the store's quarantine knows it
    positions: Positions
    status: StreamStatus
    stopping: threading.Event = field(default_factory=threading.Event)
    saying: threading.Lock = field(default_factory=threading.Lock)  # batches and signs of life are two threads
    rested: float = field(default_factory=time.monotonic)  # when a batch last ended, or there was nothing to do
    lag: float = 0.0  # at that moment
    quiet: float = 0.0  # no warning before

    def batch(self, rows: DataFrame, number: int) -> None:
        """A micro-batch of Spark: all of it is stored, and how far it came is written down, when it returns."""
        begin = time.monotonic()
        results = [msgspec.json.decode(row.result, type=ShardResult) for row in rows.collect()]
        results = [result for result in results if result.batch]  # none: a task without a shard
        if not results:
            return
        reached = {result.shard: result.after for result in results if result.after is not None}
        before, refused = self.refuse(results)
        self.positions.write(Reached(results[0].batch, reached, refused, before))
        self.note(results, time.monotonic() - begin)

    def refuse(self, results: list[ShardResult]) -> tuple[dict[str, int], dict[str, int]]:
        """Into quarantine; what was refused before this batch and with it. A batch that is done again begins with the
        same numbers: in the end each refusal counts once."""
        before = self.positions.refused_before(results[0].batch)
        refused = Counter(before)
        for result in results:
            refused.update(result.refused)
        if any(result.rejected for result in results):
            newest = [one for result in results for one in result.newest]
            self.store.quarantine_from(self.source, refused, newest)
        return before, dict(refused)

    def note(self, results: list[ShardResult], seconds: float) -> None:
        """The batch's figures: for people, for the dashboard, for /metrics."""
        sums = {
            name: sum(getattr(result, name) for result in results)
            for name in ("records", "bytes", "fragments", "steps", "duplicates", "rejected")
        }
        lag = max(result.lag for result in results)
        self.rest(lag)
        done = BatchReport(time.time(), results[0].batch, round(seconds, 3), len(results), **sums, lag=round(lag, 3))
        with (self.options.directory / "metrics.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(done) + b"\n")
        totals = {name: getattr(self.status, name) + value for name, value in sums.items()}
        self.say(
            batches=self.status.batches + 1, **totals, lag=done.lag, steps_per_s=round(done.steps / max(seconds, 1e-3))
        )
        self.on_batch(done)

    def rest(self, lag: float) -> None:
        self.lag, self.rested = lag, time.monotonic()

    def behind(self) -> float:
        """Seconds that the oldest record which was not read may be old: what arrived while a batch takes long, or fails
        again and again, is not in the store."""
        busy = time.monotonic() - self.rested
        return self.lag + (busy if busy > HEARTBEAT else 0.0)

    def beat(self) -> None:
        """A sign of life. A stream forgets: whoever is far behind is warned, and what it forgot unread is counted."""
        behind = self.behind()
        alarm = behind > ALARM * self.status.retention and time.monotonic() >= self.quiet
        retention = self.ask_retention() if alarm else self.status.retention  # somebody may have raised it
        gone = max(0.0, behind - retention)
        if gone:
            self.rest(retention)  # counted once
        missing = round(self.status.missing + gone, 3)
        self.say(lag=round(behind - gone, 3), retention=retention, missing=missing)
        if not alarm or behind <= ALARM * retention:
            return
        self.quiet = time.monotonic() + AGAIN
        message = (
            f"the job is {_hours(behind)} behind the stream {self.status.stream}, which keeps records for"
            f" {_hours(retention)}: `sparring stream status ADDRESS --retention HOURS` lets it keep them longer."
        )
        if gone:
            log.error("%s What arrived in the first %s of that is lost, if anything did", message, _hours(gone))
        else:
            log.warning("%s What is older is lost: mend what holds the job up, or give it more cores", message)

    def ask_retention(self) -> float:
        try:
            return 3600.0 * self.stream.summary(patience=0.0).retention_period_hours
        except SparringError as error:
            log.warning("how long the stream keeps records is not known: %s", error)
            return self.status.retention

    def say(self, **news: Any) -> None:
        with self.saying:
            self.status = msgspec.structs.replace(self.status, **news, updated=time.time())
            write_whole(
                self.options.directory / "status.json", msgspec.json.encode(self.status), parents=True, shared=True
            )


def run(options: IngestOptions, on_batch: Callable[[BatchReport], None] = lambda batch: None) -> None:
    """Until SIGINT or SIGTERM, which let the batch end that is going on; or until it has caught up."""
    stream = Kinesis(options.stream, credentials=sdk.credentials)
    summary = stream.summary()  # a wrong address or missing credentials are reported before Spark starts
    _require_master(options.master)
    store = open_store(options.store)
    options.directory.mkdir(parents=True, exist_ok=True)
    before = _last_words(options.directory / "status.json")
    status = StreamStatus(
        stream.stream,
        "starting",
        retention=3600.0 * summary.retention_period_hours,
        missing=0.0 if before is None else before.missing,
    )
    positions = Positions(options.directory / "positions.json")
    job = _Job(options, on_batch, store, stream, f"{stream.endpoint}/{stream.stream}", positions, status)
    job.lag = 0.0 if before is None else max(0.0, time.time() - before.updated) + before.lag
    with contextlib.closing(store), _signals(job.stopping):
        job.beat()
        spark = _session(options)
        try:
            _keep_running(job, spark)
            spark.stop()
        except Py4JError as error:
            raise SparringError(f"Spark's Java process is gone: {type(error).__name__}") from error


def _last_words(path: Path) -> StreamStatus | None:
    """Of the job before this one: until when everything was read. None: there was none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StreamStatus)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read, so whether the stream forgot something is not known: %s", path, error)
        return None


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h"


def _keep_running(job: _Job, spark: SparkSession) -> None:
    delay = FIRST_DELAY
    while not job.stopping.is_set():
        before = job.status.batches
        query = _start(job, spark)
        job.say(state="running")
        try:
            _watch(job, query)
            job.say(state="stopped", lag=round(job.behind(), 3))
            return
        except PySparkException as error:
            delay = FIRST_DELAY if job.status.batches > before else min(2 * delay, MAX_DELAY)
            why = _cause(error)
            log.error("the batch failed and is done again in %g s: %s", delay, why)
            job.say(state=f"failed: {why}")
            job.beat()
            job.stopping.wait(delay)


def _watch(job: _Job, query: StreamingQuery) -> None:
    """Until it is stopped, or all is read if that is enough; raises what the query fails of."""
    beat = time.monotonic()
    while not job.stopping.is_set():
        if not query.isActive:
            query.awaitTermination()  # raises
        job.stopping.wait(0.2)
        if job.options.parent is not None and os.getppid() != job.options.parent:
            job.stopping.set()
        status = query.status
        if status["message"].startswith("Waiting"):
            job.rest(job.lag if status["isDataAvailable"] else 0.0)
            if job.options.once and not status["isDataAvailable"]:
                break
        if time.monotonic() - beat > HEARTBEAT:
            beat = time.monotonic()
            job.beat()
    deadline = time.monotonic() + LAST_BATCH
    while query.isActive and query.status["isTriggerActive"]:
        if time.monotonic() > deadline:  # a stream that does not answer may keep it for ever
            log.warning("the last batch took over %g s: it is left, and done again at the next start", LAST_BATCH)
            break
        time.sleep(0.05)
    query.stop()


def _start(job: _Job, spark: SparkSession) -> StreamingQuery:
    options = job.options
    rows = (
        spark.readStream.format(StoredKinesis.name())
        .option("store", options.store)
        .option("address", options.stream)
        .option("positions", str(job.positions.path))
        .option("batch_bytes", str(options.batch_bytes))
        .load()
    )
    return (
        rows.writeStream.foreachBatch(job.batch)
        .option("checkpointLocation", (options.directory / "checkpoint").resolve().as_uri())
        .trigger(processingTime=f"{options.every} seconds")
        .queryName("sparring-ingest")
        .start()
    )


def _require_master(address: str | None) -> None:
    """Spark itself would try for a minute, and then tell of it in a hundred lines."""
    if address is None or not address.startswith("spark://"):
        return
    for master in address.removeprefix("spark://").split(","):
        host, _, port = master.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"{address!r} is not a Spark master: write it like spark://10.0.0.8:7077")
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), 5):
            return
    raise SparringError(f"no Spark master answers at {address}: start it, or name another one with --master")


def _session(options: IngestOptions) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("sparring-ingest")
    if options.master is not None:
        builder = builder.master(options.master)
        if options.master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.python.authenticate.socketTimeout": "60s",  # a busy machine is slow to start a Python process
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }
    for key, value in (settings | options.conf).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(StoredKinesis)
    return spark


def _cause(error: PySparkException) -> str:
    """The last line of the worker's traceback, if there is one: Spark wraps it in hundreds."""
    lines = [line.strip().removeprefix("Caused by: ") for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Busy|Full): ", line)]
    return (errors[-1:] or lines[:1] or [type(error).__name__])[0][:MAX_TEXT]


@contextlib.contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> None:
    """For spark-submit; `sparring ingest` is the same."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stream", required=True, help="kinesis://NAME?region=…")
    parser.add_argument("--store", required=True, help="where it goes: cassandra://… or a directory")
    parser.add_argument("--directory", type=Path, required=True, help="for checkpoint, figures and status")
    parser.add_argument("--master", help="default: spark-submit's")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between looks at the stream")
    parser.add_argument("--once", action="store_true", help="end when it has caught up")
    parser.add_argument("--parent", type=int, help="end when this process, which started us, is gone")
    given = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run(IngestOptions(**given), on_batch=lambda batch: print(msgspec.json.encode(batch).decode(), flush=True))
    except SparringError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


if __name__ == "__main__":
    from sparring.stream import ingest  # as a module: what goes to executors is found there by its name

    ingest.main()
