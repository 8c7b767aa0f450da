"""The Cassandra store against Cassandra's own driver, on one node: appends next to unlogged single-partition batches of
the same blobs, several on their way; `scan` and `tail` next to the driver's scan of the same blobs; `sample`; memory.

Runs alternate; the table shows medians, and the median of each round's ratio.
`python benchmarks/cassandra_store.py [--rounds 5] [--address HOST:PORT]`
"""

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cassandra import ConsistencyLevel
from cassandra.cluster import Cluster
from cassandra.query import BatchStatement, BatchType

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from servers import CassandraNode
from store import CASES, STEPS, uploads

from sparring.experience import wire
from sparring.games import Game
from sparring.store import Outcome
from sparring.store.arrival import encoder
from sparring.store.cassandra import CassandraStore, migration
from sparring.store.cassandra.keyspace import Address

KEYSPACE = "benchmark"
IN_FLIGHT = 8
BATCH_BYTES = 256 << 10
DRAWS = 300


@contextlib.contextmanager
def node(address: str | None) -> Iterator[tuple[str, int]]:
    if address is not None:
        host, _, port = address.partition(":")
        yield host, int(port or 9042)
        return
    with tempfile.TemporaryDirectory(prefix="sparring-benchmark-") as folder:
        thresholds = "batch_size_warn_threshold: 2048KiB\nbatch_size_fail_threshold: 2048KiB"
        server = CassandraNode(Path(folder) / "node", heap="1500m", flags=(), settings=thresholds)
        server.start()
        try:
            yield server.host, server.port
        finally:
            server.kill()


class Driver:
    """The driver by itself: a table of blobs, partitions of about 64 MB."""

    def __init__(self, host: str, port: int) -> None:
        self.cluster = Cluster([host], port=port)
        self.session = self.cluster.connect(KEYSPACE)
        self.session.execute(
            "CREATE TABLE IF NOT EXISTS blobs (run int, part int, place bigint, body blob,"
            " PRIMARY KEY ((run, part), place)) WITH compression = {'class': 'LZ4Compressor'}"
        )
        self.put = self.session.prepare("INSERT INTO blobs (run, part, place, body) VALUES (?, ?, ?, ?)")
        self.put.consistency_level = ConsistencyLevel.QUORUM
        self.get = self.session.prepare("SELECT place, body FROM blobs WHERE run = ? AND part = ?")
        self.get.consistency_level = ConsistencyLevel.QUORUM
        self.parts: dict[int, int] = {}

    def append(self, run: int, bodies: list[bytes]) -> float:
        begin = time.perf_counter()
        waiting: deque[Any] = deque()
        per_batch = max(BATCH_BYTES // len(bodies[0]), 1)
        per_part = max((64 << 20) // len(bodies[0]), 1)
        for at in range(0, len(bodies), per_batch):
            batch = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.QUORUM)
            for i in range(at, min(at + per_batch, len(bodies))):
                batch.add(self.put, (run, at // per_part, i, bodies[i]))
            if len(waiting) == IN_FLIGHT:
                waiting.popleft().result()
            waiting.append(self.session.execute_async(batch))
        for future in waiting:
            future.result()
        self.parts[run] = (len(bodies) - 1) // per_part + 1
        return time.perf_counter() - begin

    def scan(self, run: int, count: int) -> float:
        """Partition by partition, as large a page as is fastest, the next one on its way."""
        begin, found, size = time.perf_counter(), 0, 0
        self.session.default_fetch_size = 1000
        for part in range(self.parts[run]):
            for row in self.session.execute(self.get, (run, part)):
                found += 1
                size += len(row.body)
        assert found == count
        return time.perf_counter() - begin


def submit(store: CassandraStore, work: list[bytes]) -> float:
    """A gateway: eight uploads on their way at any time; decoding them is in the time."""
    begin = time.perf_counter()
    waiting: deque[Future[list[Outcome]]] = deque()
    for upload in work:
        waiting.append(store.submit(wire.decode(upload)))
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().result()
    for future in waiting:
        future.result()
    return time.perf_counter() - begin


def append(store: CassandraStore, work: list[bytes]) -> float:
    """A Spark task: all of it in one call."""
    fragments = [f for upload in work for f in wire.decode(upload)]
    begin = time.perf_counter()
    outcomes = store.append(fragments)
    assert set(outcomes) == {Outcome.STORED}
    return time.perf_counter() - begin


def tail(store: CassandraStore, game: Game) -> tuple[float, int]:
    begin, cursor, count = time.perf_counter(), 0, 0
    while fragments := (page := store.tail(game.name, cursor, 2000)).fragments:
        cursor, count = page.cursor, count + len(fragments)
    return time.perf_counter() - begin, count


def scan(store: CassandraStore, game: Game) -> tuple[float, int]:
    begin = time.perf_counter()
    count = sum(len(piece) for piece in store.scan(game.name))
    return time.perf_counter() - begin, count


class Rates:
    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}

    def add(self, what: str, count: int, seconds: float) -> None:
        self.rates.setdefault(what, []).append(count / seconds)

    def rows(self, case: str, size: int, base: str, names: list[str]) -> Iterator[str]:
        for name in names:
            rate = statistics.median(self.rates[name])
            ratios = [a / b for a, b in zip(self.rates[name], self.rates[base], strict=True)]
            ratio, mb = statistics.median(ratios), rate * size / 1e6
            yield f"| {case} | {name} | {rate:,.0f} | {rate * STEPS:,.0f} | {mb:,.0f} | {ratio:.2f} |"


def measure(host: str, port: int, name: str, game: Game, count: int, rounds: int, say: Callable[[str], None]) -> None:
    address = f"cassandra://{host}:{port}/{KEYSPACE}"
    driver, rates = Driver(host, port), Rates()
    rss, process = [], psutil.Process()
    for run in range(rounds):
        store = CassandraStore(address)
        mine = Game(f"{game.name}-{run}", game.observation, game.action)
        store.register(mine)
        work = uploads(mine, 2 * count)
        bodies = [encoder.encode(f) for upload in work for f in wire.decode(upload)]
        half = len(bodies) // 2
        key = hash((name, run)) & 0x7FFFFFFF
        rates.add("driver: batches", len(bodies), driver.append(key, bodies))
        rates.add("submit, 8 in flight", half, submit(store, work[:count]))
        rates.add("append", half, append(store, work[count:]))
        store.close()
        size, total = len(bodies[0]), len(bodies)
        del work, bodies
        gc.collect()
        reader = CassandraStore(address, readonly=True)
        rss.append(process.memory_info().rss)
        rates.add("driver: scan", total, driver.scan(key, total))
        for what, read in (("scan", scan), ("tail", tail)):
            seconds, found = read(reader, mine)
            assert found == total
            rates.add(what, total, seconds)
        rss.append(process.memory_info().rss)
        reader.close()
    case = f"{name}, {size / 1000:.1f} kB"
    for row in rates.rows(case, size, "driver: batches", ["driver: batches", "submit, 8 in flight", "append"]):
        say(row)
    for row in rates.rows(case, size, "driver: scan", ["driver: scan", "scan", "tail"]):
        say(row)
    reader = CassandraStore(address, readonly=True)
    rng, times = np.random.default_rng(0), []
    for _ in range(DRAWS):
        begin = time.perf_counter()
        drawn = reader.sample(mine.name, 256, rng)
        times.append(time.perf_counter() - begin)
        assert sum(f.steps for f in drawn) >= 256
    p50, p99 = np.quantile(times, [0.5, 0.99]) * 1000
    say(
        f"{case}: sample of 256 steps p50 {p50:.1f} ms, p99 {p99:.1f} ms; reading {total * size / 1e6:.0f} MB three "
        f"times took the reader from {rss[0] >> 20} to {max(rss[1::2]) >> 20} MiB"
    )
    reader.close()
    driver.cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of fragments")
    parser.add_argument("--address", help="HOST:PORT of a node; default: one of its own")
    args = parser.parse_args()
    notes: list[str] = []

    def say(line: str) -> None:
        if line.startswith("|"):
            print(line, flush=True)
        else:
            notes.append(line)

    with node(args.address) as (host, port):
        migration.init(Address.parse(f"cassandra://{host}:{port}/{KEYSPACE}"))
        say("| fragment | what | fragments/s | steps/s | MB/s | of the driver |\n|---|---|---|---|---|---|")
        for name, (game, count) in CASES.items():
            measure(host, port, name, game, max(int(count * args.scale / 2), 4), args.rounds, say)
    print("\n".join(["", *notes]))


if __name__ == "__main__":
    main()
