"""What a single Cassandra node forgets of what it acknowledged when its process is killed, per way to sync its commit
log: `python benchmarks/commitlog.py --kills 10`. The figures of docs/cassandra.md, "When a node is killed"."""

import argparse
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from servers import CassandraNode, cassandra_node

COMPRESSED = "commitlog_compression: [{class_name: LZ4Compressor}]"
MODES = {
    "periodic, 10 s (Cassandra's default)": ("periodic\ncommitlog_sync_period: 10s", ""),
    "periodic, 100 ms": ("periodic\ncommitlog_sync_period: 100ms", ""),
    "periodic, 10 s, compressed log": ("periodic\ncommitlog_sync_period: 10s", COMPRESSED),
    "periodic, 10 s, direct I/O": ("periodic\ncommitlog_sync_period: 10s", "commitlog_disk_access_mode: direct"),
    "group, 15 ms": ("group\ncommitlog_sync_group_window: 15ms", ""),
    "batch": ("batch", ""),
    "batch, compressed log": ("batch", COMPRESSED),
}


def write_and_kill(node: CassandraNode, first: int, seconds: float) -> list[tuple[int, float]]:
    """Numbers that were acknowledged, and when; the kill comes while others are on their way."""
    acknowledged: list[tuple[int, float]] = []
    with node.session("kills") as session:
        put = session.prepare("INSERT INTO row (number, body) VALUES (?, ?)")
        until = time.monotonic() + seconds
        numbers, lock, killed = iter(range(first, first + 10**6)), threading.Lock(), threading.Event()

        def write() -> None:
            while not killed.is_set():
                with lock:
                    number = next(numbers)
                session.execute(put, (number, b"x" * 500), timeout=2.0)
                acknowledged.append((number, time.monotonic()))

        def write_until_it_dies() -> None:
            try:
                write()
            except Exception:  # noqa: BLE001 - whatever the driver says of a node that died
                return

        threads = [threading.Thread(target=write_until_it_dies) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(max(until - time.monotonic(), 0))
        node.kill()
        killed.set()
        for thread in threads:
            thread.join()
    return acknowledged


def lost(node: CassandraNode, acknowledged: list[tuple[int, float]]) -> list[float]:
    """How long before the last acknowledgement each of the missing ones was acknowledged."""
    with node.session("kills") as session:
        found = {row.number for row in session.execute("SELECT number FROM row")}
    last = max(when for _, when in acknowledged)
    return [last - when for number, when in acknowledged if number not in found]


def measure(sync: str, settings: str, kills: int, seconds: float) -> str:
    with cassandra_node(commitlog=sync, settings=settings) as node:
        with node.session() as session:
            replication = "{'class': 'SimpleStrategy', 'replication_factor': 1}"
            session.execute(f"CREATE KEYSPACE kills WITH replication = {replication}")
            session.execute("CREATE TABLE kills.row (number int PRIMARY KEY, body blob)")
        total, missing = 0, []
        for kill in range(kills):
            acknowledged = write_and_kill(node, kill * 10**6, seconds)
            node.start()
            total += len(acknowledged)
            missing.append(lost(node, acknowledged))
    times = sum(bool(one) for one in missing)
    oldest = max((age for one in missing for age in one), default=0.0)
    return f"{total:,} | {sum(map(len, missing)):,} | {times} of {kills} | {oldest * 1000:,.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="of writing before each kill")
    given = parser.parse_args()
    print(
        "| commit log | acknowledged | lost | in kills | oldest lost before the end |\n|---|---|---|---|---|",
        flush=True,
    )
    for name, (sync, settings) in MODES.items():
        print(f"| {name} | {measure(sync, settings, given.kills, given.seconds)} |", flush=True)


if __name__ == "__main__":
    main()
