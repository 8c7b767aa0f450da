"""Writers and erasers that stand still (SIGSTOP) for longer than every limit, while others go on, and then go on
themselves: each fragment is stored once, and nothing that was erased comes back."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from servers import CassandraNode
from store_samples import assert_counts, everything, fragment

from sparring.experience import Fragment, wire
from sparring.store import Outcome
from sparring.store.cassandra import CassandraStore, order, schema

pytestmark = pytest.mark.real
STORED, DUPLICATE = Outcome.STORED, Outcome.DUPLICATE
SCRIPT = Path(__file__).parent / "paused_writer.py"
PAUSE = 5.0  # seconds; the process waits for an answer for two, and others for its commit for one
LIMIT = 120.0


class Process:
    def __init__(self, address: str, *args: str) -> None:
        self._process = subprocess.Popen([sys.executable, SCRIPT, address, *args], stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_stopped(self) -> None:
        deadline = time.monotonic() + LIMIT
        while True:
            pid, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WNOHANG)
            if pid:
                assert os.WIFSTOPPED(status), f"it ended without stopping: {status}"
                return
            assert time.monotonic() < deadline, "it did not stop"
            time.sleep(0.05)

    def finish(self) -> str:
        self._process.send_signal(signal.SIGCONT)
        out, _ = self._process.communicate(timeout=LIMIT)
        assert self._process.returncode == 0
        return out.strip()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate()


def assert_once(store: CassandraStore, sent: list[Fragment]) -> None:
    """In whatever way it is looked at."""
    expected = Counter(f.id for f in sent)
    assert Counter(f.id for f in everything(store)) == expected
    assert Counter(f.id for piece in store.scan("pole") for f in piece) == expected
    shares = [piece for share in range(3) for piece in store.scan("pole", share, 3)]
    assert Counter(f.id for piece in shares for f in piece) == expected
    assert store.stats("pole").fragments == len(sent)
    assert Counter(f.id for f in store.sample("pole", 10**9, np.random.default_rng(0))) == expected
    rng, drawn = np.random.default_rng(1), Counter[str]()
    for _ in range(30):
        drawn.update(f.id for f in store.sample("pole", 3 * len(sent) - 1, rng))
    assert drawn.keys() == expected.keys()
    assert_counts(store)


@pytest.mark.parametrize("point", ["claimed", "looked", "put", "committed"])
def test_a_paused_writer_and_another_with_its_fragments_store_each_once(
    opened: Callable[..., CassandraStore], cassandra_address: str, tmp_path: Path, point: str
) -> None:
    sent = [fragment() for _ in range(12)]
    (tmp_path / "fragments").write_bytes(wire.encode(sent))
    with Process(cassandra_address, point, "append", str(tmp_path / "fragments")) as writer:
        writer.wait_until_stopped()
        other = opened()
        there = point == "committed"  # although it does not know
        more = fragment()
        assert other.append([*sent[:8], more]) == [DUPLICATE if there else STORED] * 8 + [STORED]
        assert_once(opened(readonly=True), [*(sent if there else sent[:8]), more])
        time.sleep(PAUSE)
        # Its answer was lost, or its commit comes too late: it sends all of them again.
        assert writer.finish().split() == ["duplicate"] * 8 + ["duplicate" if there else "stored"] * 4
        last = fragment()
        assert other.append([*sent, last]) == [DUPLICATE] * 12 + [STORED]
    for store in (other, opened(readonly=True)):
        assert_once(store, [*sent, more, last])


def test_two_erasers_one_of_them_paused_bring_nobody_back(
    opened: Callable[..., CassandraStore], cassandra: CassandraNode, cassandra_address: str
) -> None:
    store = opened()
    players = ["annabel", "bartholomew", "charlotte"]
    batches = [[fragment(player=players[i % n]) for i in range(30)] for n in (3, 2)]
    for batch in batches:
        store.append(batch)
    with Process(cassandra_address, "read", "erase", "annabel") as eraser:
        eraser.wait_until_stopped()
        assert opened().erase("pole", "bartholomew") == 25
        time.sleep(PAUSE)
        assert int(eraser.finish()) == 25
    left = [f for batch in batches for f in batch if f.player == "charlotte"]
    for reader in (store, opened(readonly=True)):
        assert_once(reader, left)
    assert [p.player for p in store.players("pole")] == ["charlotte"]
    with cassandra.session("tests") as session:
        for table in schema.SCHEMA:
            rows = [str(row) for row in session.execute(f"SELECT * FROM {table}")]
            assert not [row for row in rows if "annabel" in row or "bartholomew" in row], table
    assert opened().append(batches[0]) == [
        Outcome.DUPLICATE if f.player == "charlotte" else Outcome.ERASED for f in batches[0]
    ]


def test_buckets_of_killed_writers_are_closed_and_carried_no_longer(
    opened: Callable[..., CassandraStore], cassandra_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragments").write_bytes(wire.encode([fragment(player="dead")]))
    for _ in range(3):
        with Process(cassandra_address, "put", "append", str(tmp_path / "fragments")) as writer:
            writer.wait_until_stopped()
    reader, alive = opened(readonly=True), opened()
    alive.append([fragment()])
    assert len(everything(reader)) == 1

    def carried() -> dict[int, object]:
        return dict(reader._view("pole").order._newest().open)  # type: ignore[union-attr]

    assert len(carried()) == 4
    monkeypatch.setattr(order, "IDLE", 0.2)
    deadline = time.monotonic() + LIMIT
    while len(carried()) > 1:
        assert time.monotonic() < deadline
        alive.append([fragment()])
        reader.tail("pole", -1)
        time.sleep(0.05)
    while not all(
        head.closed for head in reader._view("pole").order.directory.refresh().values()
    ):  # the living one's, too
        assert time.monotonic() < deadline
        reader.tail("pole", -1)
        time.sleep(0.05)
    assert alive.append([fragment(), fragment()]) == [STORED, STORED]  # in another bucket
    assert_counts(reader)
