"""A Kinesis stream as a source of Spark Structured Streaming, in Python: a partition per shard.

Nobody can tell where a shard ends without reading it. So Spark's offset says where a batch *begins*: its number, and
per shard the sequence number after which to read. Where the batch ended is known when all of it is in the store; it is
written down (`Positions`), and the next batch begins there. Whoever finds nothing written down, after a crash, begins
at the last batch's own beginning again: what was stored is stored once. Shards are read parents first: the children of
a split or a merge begin when all of their parents is in the store.
"""

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from sparring.aws import sdk
from sparring.aws.kinesis import IteratorExpired, Kinesis, PositionUnknown, Record, RecordPage
from sparring.files import write_whole

__all__ = ["KinesisReader", "KinesisSource", "Mark", "Positions", "Reached"]

CLOSED = "closed"  # instead of a sequence number: the shard was read to its end
OLDEST = ""  # instead of a sequence number: from the beginning
PAGE = 8 << 20  # bytes of a page to aim at: some servers know no bound
FIRST_PAGE, MAX_PAGE = 16, 10_000  # records
BATCH_SECONDS = 10.0  # after which a batch ends, and how far it came is noted
LINGER = 0.3  # seconds to wait for more where all was read: a batch of its own would cost more
POLL = 0.2  # seconds between looks for more: a shard answers five times a second
GAP = 60.0  # seconds to look for the next record where the stream says that there is one
log = logging.getLogger("sparring.ingest")
SCHEMA = pa.schema([("data", pa.binary()), ("sequence", pa.string()), ("arrival", pa.float64()), ("mark", pa.string())])


class Mark(msgspec.Struct, frozen=True):
    """The last row of a partition: what was read."""

    batch: int
    shard: str
    closed: bool  # there will never be more
    lag: float  # seconds by which this shard's reader is behind its writers; 0: it caught up


class Reached(msgspec.Struct, frozen=True):
    """How far a batch came."""

    batch: int
    after: dict[str, str]  # per shard that was read
    refused: dict[str, int] = {}  # per game, since the beginning …
    refused_before: dict[str, int] = {}  # … and without this batch


class Positions:
    """The place on the driver's disk where the end of the newest batch is written down."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, reached: Reached) -> None:
        write_whole(self.path, msgspec.json.encode(reached), sync=True)

    def read(self, batch: int) -> dict[str, str]:
        """Empty: the end of this batch is not known."""
        reached = self._newest()
        return reached.after if reached.batch == batch else {}

    def refused_before(self, batch: int) -> dict[str, int]:
        """What was refused until this batch, which may be done again."""
        reached = self._newest()
        return reached.refused_before if reached.batch == batch else reached.refused

    def _newest(self) -> Reached:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Reached)
        except FileNotFoundError:
            return Reached(0, {})


class KinesisSource(DataSource):
    """Options: `address` (kinesis://…), `positions` (a file on the driver's disk), `batch_bytes` (per shard)."""

    @classmethod
    def name(cls) -> str:
        return "sparring-kinesis"

    def schema(self) -> str:
        return "data binary, sequence string, arrival double, mark string"

    def reading(self) -> tuple[str, Path, int]:
        return self.options["address"], Path(self.options["positions"]), int(self.options["batch_bytes"])

    def streamReader(self, schema: StructType) -> "KinesisReader":
        return KinesisReader(*self.reading())


class KinesisReader(DataSourceStreamReader):
    """The first three methods run in one process beside the driver, `read` on executors."""

    def __init__(self, address: str, positions: Path, batch_bytes: int) -> None:
        self._address, self._positions, self._batch_bytes = address, Positions(positions), batch_bytes

    def initialOffset(self) -> dict[str, object]:
        return {"batch": 0, "after": {}}

    def latestOffset(self, start: dict, limit: ReadLimit) -> dict:  # type: ignore[type-arg]  # as Spark declares it
        """The start of the next batch, or `start` itself when nothing new is on the stream."""
        stream = _stream(self._address)
        shards = {shard.shard_id: shard for shard in stream.shards()}
        known = {**start["after"], **self._positions.read(start["batch"])}
        # The stream forgets, and so do we; and a closed shard that is open is another stream's, of the same name.
        after = {n: at for n, at in known.items() if n in shards and not (at == CLOSED and shards[n].open)}
        for name, shard in shards.items():
            if all(parent not in shards or after.get(parent) == CLOSED for parent in shard.parents):
                after.setdefault(name, OLDEST)
        left = {name: at for name, at in after.items() if at != CLOSED}
        if not any(not shards[name].open or _has_news(stream, name, at) for name, at in left.items()):
            return start
        return {"batch": start["batch"] + 1, "after": after}

    def partitions(self, start: dict, end: dict) -> Sequence[InputPartition]:  # type: ignore[type-arg]
        if start == end:
            return []
        writable = {shard.shard_id for shard in _stream(self._address).shards() if shard.open}
        return [
            InputPartition((end["batch"], name, at, name in writable))
            for name, at in end["after"].items()
            if at != CLOSED
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch, shard, at, writable = partition.value
        reading = _Reading(_stream(self._address), shard, at, writable, self._batch_bytes)
        for records in reading.pages():
            yield _rows(records)
        mark = Mark(batch, shard, reading.closed, reading.lag)
        yield pa.RecordBatch.from_pylist([{"mark": msgspec.json.encode(mark).decode()}], SCHEMA)


class _Reading:
    """One shard, from a place to its end, or, while it is still written to, until nothing comes any more; or for so
    many bytes or seconds.

    Only a page without a successor is an end: pages may be empty before it."""

    def __init__(self, stream: Kinesis, shard: str, at: str, writable: bool, limit: int) -> None:
        self.stream, self.shard, self.at, self.writable, self.limit = stream, shard, at, writable, limit
        self.closed = False
        self.lag = 0.0
        self.arrived: float | None = None  # when the newest that was read did

    def pages(self) -> Iterator[list[Record]]:
        iterator = _iterator(self.stream, self.shard, self.at)
        begun = news = time.monotonic()
        taken, count = 0, FIRST_PAGE
        while True:
            try:
                page = self.stream.page(iterator, count)
            except IteratorExpired:  # the store was slow
                iterator = _iterator(self.stream, self.shard, self.at)
                continue
            # Some servers always say that they are 0 behind.
            caught_up = self.writable and page.millis_behind_latest == 0 and len(page.records) < count
            if page.records:
                yield page.records
                self.at, self.arrived = page.records[-1].sequence_number, page.records[-1].approximate_arrival_timestamp
                size = sum(len(record.data) for record in page.records)
                taken, news = taken + size, time.monotonic()
                room = min(PAGE, self.limit - taken)
                count = min(MAX_PAGE, max(1, room * len(page.records) // max(size, 1)))
            if page.next_shard_iterator is None:
                self.closed = True  # its children begin where it ended, and were not read yet
                self.lag = max(0.0, time.time() - self.arrived) if self.arrived is not None else 0.0
                return
            now = time.monotonic()
            over = taken >= self.limit or (taken and now > begun + BATCH_SECONDS)  # one without a record gets nowhere
            if over or now > news + (LINGER if caught_up else GAP):
                self.lag = 0.0 if caught_up else _lag(page)
                return
            iterator = page.next_shard_iterator
            if caught_up or not page.records:
                time.sleep(POLL)


def _lag(page: RecordPage) -> float:
    """By the stream's own clock where it tells, else by ours: a figure to look at, nothing depends on it."""
    behind = page.millis_behind_latest / 1000
    return max(behind, time.time() - page.records[-1].approximate_arrival_timestamp) if page.records else behind


def _iterator(stream: Kinesis, shard: str, at: str) -> str:
    """A place that the stream does not know is of another stream of this name, or long forgotten: all that this one has
    is read. What was stored is stored once."""
    try:
        return stream.iterator(shard, at or None)
    except PositionUnknown as error:
        log.error("%s. Reading its oldest record next", error)
        return stream.iterator(shard, None)


def _has_news(stream: Kinesis, shard: str, at: str) -> bool:
    page = stream.page(_iterator(stream, shard, at), 1)
    return bool(page.records) or page.millis_behind_latest > 0


def _rows(records: list[Record]) -> pa.RecordBatch:
    columns = [
        pa.array([record.data for record in records], pa.binary()),
        pa.array([record.sequence_number for record in records], pa.string()),
        pa.array([record.approximate_arrival_timestamp for record in records], pa.float64()),
        pa.nulls(len(records), pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@functools.lru_cache(maxsize=4)
def _stream(address: str) -> Kinesis:
    """A process reads again and again: connections are kept."""
    return Kinesis(address, credentials=sdk.credentials)
