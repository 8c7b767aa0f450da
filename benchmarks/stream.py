"""Play over a stream into a cluster: a Kinesis API server, Spark and Cassandra, all on this machine.

Ours, fragments from a producer to the store, beside (a) a pipeline that sends every step as a JSON record and stores it
as a row, and (b) the Cassandra driver alone, writing the same fragments as blobs in batches, at its best of several
settings. Also the stream by itself, and our store by itself. In turns, several rounds: the ratios are what counts.
Spark and Cassandra are warm. A second table says where the CPU time goes.

    python benchmarks/stream.py --rounds 3
"""

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

from kinesis_server import running  # noqa: E402
from servers import CassandraNode, cassandra_node  # noqa: E402

from sparring.aws.kinesis import HASHES, Kinesis, Put, default_directory  # noqa: E402
from sparring.experience import Columns, Fragment, new_id, pack  # noqa: E402
from sparring.games import Box, Discrete, Game  # noqa: E402
from sparring.store import open_store  # noqa: E402
from sparring.store.cassandra.keyspace import Address  # noqa: E402
from sparring.store.cassandra.migration import init  # noqa: E402
from sparring.stream.producer import Producer  # noqa: E402

CASES = {
    "4 float32": (Game("pole", Box((4,)), Discrete(2)), 40_000),
    "44 float32": (Game("body", Box((44,)), Discrete(4)), 6_000),
}
STEPS, PLAYERS, SHARDS = 100, 100, 2
ROWS = 20_000  # steps of the pipeline to compare with: it is slow
SETTINGS = ((50, 8), (100, 8), (100, 16), (20, 32), (10, 16))  # rows per batch, batches on their way


def fragments(game: Game, count: int) -> list[Fragment]:
    """Of noise: nothing to gain by compressing. Each has its own bytes."""
    rng = np.random.default_rng()
    size = game.observation.element.shape[0]
    return [
        pack(
            game,
            Columns(
                rng.standard_normal((STEPS + 1, size), np.float32),
                rng.integers(0, 2, STEPS).astype("<i4"),
                rng.standard_normal(STEPS, np.float32),
            ),
            id=new_id(),
            player=f"player-{i % PLAYERS}",
            episode=f"{i % PLAYERS}-{i // PLAYERS // 5}",
            start=i // PLAYERS % 5 * STEPS,
            time=time.time(),
            terminated=i // PLAYERS % 5 == 4,
            model="bot",
            version=1,
        )
        for i in range(count)
    ]


def ours(stream: Kinesis, status: Path, work: list[Fragment], game: Game) -> float:
    """Seconds from the first put to the last fragment in the store."""
    before = json.loads(status.read_bytes())["fragments"]
    begin = time.perf_counter()
    put(stream, work, game)
    _until(lambda: json.loads(status.read_bytes())["fragments"] >= before + len(work))
    return time.perf_counter() - begin


def put(stream: Kinesis, work: list[Fragment], game: Game) -> None:
    producer = Producer(stream)
    chunks = [work[i : i + 50] for i in range(0, len(work), 50)]
    ahead = max(8, (24 << 20) // (50 * len(work[0].obs)))  # less than the producer lets wait
    waiting = [producer.submit(game, chunk) for chunk in chunks[:ahead]]
    for i, chunk in enumerate(chunks[ahead:]):
        waiting[i].result()
        waiting.append(producer.submit(game, chunk))
    for future in waiting:
        future.result()
    producer.close()


def stream_alone(stream: Kinesis, work: list[Fragment], game: Game) -> float:
    """Put and got again by one process: no Spark, nothing decoded, no store. `stream` is a new one."""
    done = threading.Event()

    def get(shard: str) -> None:
        iterator = stream.iterator(shard, None)
        while True:
            over = done.is_set()
            page = stream.page(iterator, 32)
            if not page.records:
                if over:
                    return
                time.sleep(0.05)
            assert page.next_shard_iterator is not None
            iterator = page.next_shard_iterator

    begin = time.perf_counter()
    with ThreadPoolExecutor(SHARDS) as pool:
        readers = [pool.submit(get, shard.shard_id) for shard in stream.shards()]
        put(stream, work, game)
        done.set()
        for reader in readers:
            reader.result()
    return time.perf_counter() - begin


def alone(address: str, work: list[Fragment]) -> float:
    """The store without a stream, from one process."""
    store = open_store(address)
    begin = time.perf_counter()
    for i in range(0, len(work), 1000):
        store.append(work[i : i + 1000])
    seconds = time.perf_counter() - begin
    store.close()
    return seconds


def encoded(work: list[Fragment]) -> list[tuple[str, bytes]]:
    return [(f.id, msgspec.msgpack.encode(f)) for f in work]


def driver(session: Any, bodies: list[tuple[str, bytes]], rows: int, flying: int) -> float:
    """Blobs of fragments by unlogged batches of one partition each, so many on their way: no ids, no order."""
    from cassandra.concurrent import execute_concurrent
    from cassandra.query import BatchStatement, BatchType

    insert = session.prepare("INSERT INTO blobs (part, id, body) VALUES (?, ?, ?)")
    begin = time.perf_counter()

    def batches() -> Iterator[tuple[BatchStatement, None]]:
        for i in range(0, len(bodies), rows):
            batch = BatchStatement(BatchType.UNLOGGED)
            for name, body in bodies[i : i + rows]:
                batch.add(insert, (bodies[i][0], name, body))
            yield batch, None

    execute_concurrent(session, batches(), concurrency=flying)
    return time.perf_counter() - begin


def tried(session: Any, bodies: list[tuple[str, bytes]], rows: int, flying: int) -> float:
    from cassandra.cluster import NoHostAvailable

    try:
        return min(driver(session, bodies, rows, flying) for _ in range(2))
    except NoHostAvailable:  # overloaded: more at once than the server takes
        return math.inf


def rows_in(stream: Kinesis, done: Path, work: list[Fragment], game: Game) -> float:
    """A JSON record per step, 500 a request, to a job that stores a row per record."""
    before = int(done.read_text())
    records = []
    for f in work:
        columns = f.columns(game)
        obs, action, reward = columns.obs.tolist(), columns.action.tolist(), columns.reward.tolist()
        for t in range(f.steps):
            row = {"player": f.player, "episode": f.episode, "step": f.start + t, "obs": obs[t], "action": action[t]}
            row |= {"reward": reward[t], "next_obs": obs[t + 1], "done": f.terminated and t == f.steps - 1}
            records.append((hash(f.player) % HASHES, json.dumps(row).encode()))
    begin = time.perf_counter()
    for i in range(0, len(records), 500):
        results = stream.put([Put(data, "x", str(key)) for key, data in records[i : i + 500]])
        if any(result.error_code for result in results):
            raise RuntimeError("the stream is too slow")
    _until(lambda: int(done.read_text() or 0) >= before + len(records))
    return time.perf_counter() - begin


def rows_sink(cassandra: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task of that pipeline does. Spark sends it to other processes, so it imports what it needs itself."""

    def sink(batches: Iterator[Any]) -> Iterator[Any]:
        import json

        import msgspec
        import pyarrow as pa
        from cassandra.cluster import Cluster
        from cassandra.concurrent import execute_concurrent_with_args

        from sparring.stream.sink import ShardResult
        from sparring.stream.source import Mark

        host, _, port = cassandra.partition(":")
        cluster = Cluster([host], port=int(port))
        session = cluster.connect("bench")
        insert = session.prepare(
            "INSERT INTO steps (player, episode, step, obs, action, reward, next_obs, done)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        )
        count, after = 0, None
        for batch in batches:
            rows = []
            for row in batch.to_pylist():
                if row["mark"] is not None:
                    mark = msgspec.json.decode(row["mark"], type=Mark)
                    continue
                r, after = json.loads(row["data"]), row["sequence"]
                obs, action, after_it = (json.dumps(r[name]) for name in ("obs", "action", "next_obs"))
                rows.append((r["player"], r["episode"], r["step"], obs, action, r["reward"], after_it, r["done"]))
            execute_concurrent_with_args(session, insert, rows, concurrency=100)
            count += len(rows)
        cluster.shutdown()
        result = ShardResult(mark.batch, mark.shard, after, records=count)
        yield pa.RecordBatch.from_pydict({"result": [msgspec.json.encode(result).decode()]})

    return sink


def rows_job(options: argparse.Namespace) -> None:
    """The job of that pipeline: the same source, then JSON, a statement per row, 100 on their way."""
    from pyspark.sql import DataFrame

    from sparring.stream import ingest
    from sparring.stream.sink import ShardResult
    from sparring.stream.source import KinesisSource, Positions, Reached

    positions, stored, sink = Positions(options.dir / "positions.json"), 0, rows_sink(options.cassandra)

    def each(frame: DataFrame, number: int) -> None:
        nonlocal stored
        found = [
            msgspec.json.decode(r.result, type=ShardResult) for r in frame.mapInArrow(sink, "result string").collect()
        ]
        if found:
            positions.write(Reached(found[0].batch, {r.shard: r.after for r in found if r.after is not None}))
            stored += sum(r.records for r in found)
            part = options.dir / "done.part"
            part.write_text(str(stored))
            part.replace(options.dir / "done")

    spark = ingest._session(ingest.IngestOptions(options.stream, "", options.dir, "local[2]"))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")
    spark.dataSource.register(KinesisSource)
    reader = spark.readStream.format(KinesisSource.name()).option("address", options.stream)
    frame = reader.option("positions", str(positions.path)).option("batch_bytes", str(32 << 20)).load()
    query = frame.writeStream.foreachBatch(each).option("checkpointLocation", str(options.dir / "checkpoint"))
    (options.dir / "done").write_text("0")
    query.trigger(processingTime="1 seconds").start().awaitTermination()


PARTS = ("producer", "the stream's server", "Spark: Java", "Spark: Python, which reads, checks and stores", "Cassandra")


def cpu(job: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of each part of the path."""
    servers = {child.name(): child for child in psutil.Process().children()}
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds["producer"] = _cpu(psutil.Process())
    seconds["the stream's server"] = _cpu(servers["node"])
    seconds["Cassandra"] = _cpu(servers["java"])
    for process in (job, *job.children(recursive=True)):
        seconds[PARTS[2] if process.name() == "java" else PARTS[3]] += _cpu(process)
    return seconds


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def settle() -> None:
    """Until Cassandra has flushed and compacted what the one before wrote, which the next would pay for."""
    node = next(child for child in psutil.Process().children() if child.name() == "java")
    _until(lambda: node.cpu_percent(1.0) < 15, 120)


def _until(condition: Any, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("it does not arrive")
        time.sleep(0.02)


@contextlib.contextmanager
def job(ready: Path, *command: str) -> Iterator[psutil.Process]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        try:
            _until(lambda: ready.exists() or process.poll() is not None)
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(log.read().decode()[-3000:])
            yield psutil.Process(process.pid)
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def measure(case: str, rounds: int, folder: Path, node: Any, server: Any) -> list[dict[str, float]]:
    game, count = CASES[case]
    keyspace = game.name
    address = f"cassandra://{node.address}/{keyspace}"
    streams = server.stream(SHARDS), server.stream(SHARDS)
    init(Address.parse(address))
    status = default_directory(folder, streams[0].address, address) / "status.json"
    rows_dir = folder / "rows"
    rows_dir.mkdir()
    ingest = ["-m", "sparring.cli", "ingest", "--stream", streams[0].address, "--store", address, "--data", str(folder)]
    rows = [
        __file__,
        "--role",
        "rows",
        "--stream",
        streams[1].address,
        "--dir",
        str(rows_dir),
        "--cassandra",
        node.address,
    ]
    results = []
    with job(status, *ingest) as path, job(rows_dir / "done", *rows), node.session("bench") as session:
        ours(streams[0], status, fragments(game, count // 2), game)
        rows_in(streams[1], rows_dir / "done", fragments(game, 10), game)
        best = min(SETTINGS, key=lambda s: tried(session, encoded(fragments(game, count)), *s))
        for _ in range(rounds):
            work, steps = fragments(game, count), count * STEPS
            bodies = encoded(work)
            settle()
            before = cpu(path)
            found = {"driver": steps / driver(session, bodies, *best)}
            del bodies
            spent = {part: now - before[part] for part, now in cpu(path).items()}
            found["(b)"] = spent["producer"] + spent["Cassandra"]  # this process is the driver's
            settle()
            before = cpu(path)
            seconds = ours(streams[0], status, work, game)
            spent = {part: now - before[part] for part, now in cpu(path).items()}
            found |= {"ours": steps / seconds, "idle": 2 * seconds - sum(spent.values()), **spent}
            found["stream"] = steps / stream_alone(server.stream(SHARDS), fragments(game, count), game)
            settle()
            found["alone"] = steps / alone(address, fragments(game, count))
            settle()
            found["rows"] = ROWS / rows_in(streams[1], rows_dir / "done", fragments(game, ROWS // STEPS), game)
            found |= {"rows per batch": best[0], "on their way": best[1]}
            print(case, {name: round(value) for name, value in found.items()}, file=sys.stderr, flush=True)
            results.append(found)
    return results


def profile(case: str, results: list[dict[str, float]]) -> Iterator[str]:
    """Where the time of two cores went, from the first put to the last fragment stored."""
    spent = {part: statistics.median(r[part] for r in results) for part in (*PARTS, "idle")}
    names = {"idle": "idle, or other programs'"}
    for part, seconds in spent.items():
        million = seconds / (CASES[case][1] * STEPS / 1e6)
        yield f"| {case} | {names.get(part, part)} | {million:.2f} | {seconds / sum(spent.values()):.0%} |"
    both = {
        "all of the path": sum(spent[part] for part in PARTS),
        "(b), for comparison": statistics.median(r["(b)"] for r in results),
    }
    for name, seconds in both.items():
        yield f"| {case} | {name} | {seconds / (CASES[case][1] * STEPS / 1e6):.2f} | |"


CASSANDRA = "\n".join(
    (
        "batch_size_warn_threshold: 1024KiB",
        "batch_size_fail_threshold: 8192KiB",
        "write_request_timeout: 30s",  # a busy machine is slow, which is no failure here
        "read_request_timeout: 30s",
    )
)
NAMES = {
    "ours": "**producer → stream → Spark → Cassandra**",
    "rows": "(a) a JSON record and a row per step",
    "driver": "(b) the Cassandra driver alone",
    "stream": "the stream alone: put, and got again",
    "alone": "our Cassandra store alone",
}


def make_tables(node: CassandraNode) -> None:
    """Those of the two pipelines that we are compared with."""
    with node.session() as session:
        session.execute("CREATE KEYSPACE bench WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        session.execute("CREATE TABLE bench.blobs (part text, id text, body blob, PRIMARY KEY (part, id))")
        session.execute(
            "CREATE TABLE bench.steps (player text, episode text, step int, obs text, action text, reward float,"
            " next_obs text, done boolean, PRIMARY KEY ((player, episode), step))"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--role", choices=["rows"], help=argparse.SUPPRESS)
    parser.add_argument("--stream", help=argparse.SUPPRESS)
    parser.add_argument("--cassandra", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "rows":
        rows_job(options)
        return
    shares: list[str] = []
    print("| observation | what | steps/s | MB/s | × (a) | of (b) |\n|---|---|---|---|---|---|")
    with running() as server, cassandra_node(flags=(), heap="1g", settings=CASSANDRA) as node:
        make_tables(node)
        for case in [options.case] if options.case else CASES:
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                results = measure(case, options.rounds, Path(folder), node, server)
            game = CASES[case][0]
            size = game.observation.element.itemsize + game.action.element.itemsize + 4
            for key, name in NAMES.items():
                rate = statistics.median(r[key] for r in results)
                ratios = [statistics.median(r[key] / r[to] for r in results) for to in ("rows", "driver")]
                megabytes = rate * size / 1e6
                print(
                    f"| {case} | {name} | {rate:,.0f} | {megabytes:.1f} | {ratios[0]:.1f} | {ratios[1]:.2f} |",
                    flush=True,
                )
            shares += profile(case, results)
            rows, flying = results[0]["rows per batch"], results[0]["on their way"]
            print(f"(b) was best with {rows} rows a batch, {flying} on their way", file=sys.stderr)
    print("\n| observation | part of the path | CPU s per million steps | share |\n|---|---|---|---|")
    print("\n".join(shares))


if __name__ == "__main__":
    main()
