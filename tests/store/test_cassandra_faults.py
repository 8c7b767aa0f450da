"""Nodes that are killed under load and come back: what was acknowledged is there, once, and the gateway says what to
do meanwhile. Each test has nodes of its own."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from servers import CassandraNode, cassandra_node, free_port
from store_samples import POLE, assert_counts, everything, fragment

from sparring.experience import Fragment, wire
from sparring.gateway.app import background, create_app
from sparring.registry.registry import Registry
from sparring.store import Outcome, StoreAway, open_store
from sparring.store.cassandra import CassandraStore, migration
from sparring.store.cassandra.keyspace import Address

pytestmark = pytest.mark.real


class Uploader(threading.Thread):
    """Sends batches through a gateway without end; one that is not acknowledged is sent again, as clients do."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.acknowledged: list[Fragment] = []
        self.refusals: list[tuple[int, str | None]] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            batch = [fragment(steps=20) for _ in range(10)]
            while not self._send(batch):
                time.sleep(0.1)  # also when we are to stop: whether it was stored is not known before
            self.acknowledged += batch

    def _send(self, batch: list[Fragment]) -> bool:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            body = wire.encode(batch)
            connection.request("POST", "/v1/games/pole/fragments", body, {"content-type": "application/msgpack"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                self.refusals.append((answer.status, answer.headers["retry-after"]))
            return answer.status == 200


def await_(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@contextlib.contextmanager
def gateway(address: str, folder: Path) -> Iterator[str]:
    store = open_store(address)
    store.register(POLE)
    with background(create_app(store, Registry(folder / "registry"))) as url:
        yield url
    store.close()


def test_a_node_killed_under_load_loses_nothing_acknowledged(tmp_path: Path) -> None:
    # With its defaults a single node forgets what it acknowledged up to 100 ms before a kill (docs/cassandra.md).
    with cassandra_node(commitlog="batch") as node:
        address = f"cassandra://{node.address}/faults"
        assert "warning" not in migration.init(Address.parse(address))
        with gateway(address, tmp_path) as url:
            uploaders = [Uploader(url) for _ in range(2)]
            for uploader in uploaders:
                uploader.start()
            await_(lambda: all(len(u.acknowledged) >= 50 for u in uploaders))
            node.kill()
            await_(lambda: all(u.refusals for u in uploaders))
            with pytest.raises(StoreAway):
                open_store(address)
            node.start()
            counts = [len(u.acknowledged) for u in uploaders]
            await_(lambda: all(len(u.acknowledged) >= n + 50 for u, n in zip(uploaders, counts, strict=True)))
            for uploader in uploaders:
                uploader.stopping.set()
            for uploader in uploaders:
                uploader.join()
        assert {refusal for u in uploaders for refusal in u.refusals} <= {(503, "5"), (503, "1")}
        reader = open_store(address, readonly=True)
        try:
            sent = {f.id: f for u in uploaders for f in u.acknowledged}
            stored = everything(reader, limit=1000)
            assert len(stored) == len(sent)
            assert {f.id: f for f in stored} == sent
            assert_counts(reader)
        finally:
            reader.close()


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[list[CassandraNode]]:
    free = psutil.virtual_memory().available / 2**30
    if free < 6:
        pytest.skip(f"three nodes take 3 GB of memory and some more: {free:.1f} GB are free, 6 are asked for")
    port, storage_port = free_port(), free_port()
    nodes = [
        CassandraNode(tmp_path / f"{i}", f"127.0.0.{i}", heap="512m", port=port, storage_port=storage_port)
        for i in (1, 2, 3)
    ]
    try:
        nodes[0].start()  # the others ask it who is there
        for node in nodes[1:]:
            node.launch()
        for node in nodes[1:]:
            node.wait()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.slow
def test_one_of_three_nodes_killed_under_load(three_nodes: list[CassandraNode]) -> None:
    """Copies: 3, consistency QUORUM: nobody has to wait for the third, and it gets what it missed."""
    address = f"cassandra://{','.join(node.address for node in three_nodes)}/faults"
    await_(lambda: all(_nodes_up(node) == 3 for node in three_nodes))
    made = migration.init(Address.parse(address))
    assert "copies: 3" in made
    assert "warning" not in made
    writers = [open_store(address) for _ in range(2)]
    reader = open_store(address, readonly=True)
    assert isinstance(reader, CassandraStore)
    writers[0].register(POLE)
    acknowledged: list[list[Fragment]] = [[], []]
    stopping = threading.Event()

    def write(w: int) -> None:
        while not stopping.is_set():
            batch = [fragment(steps=20) for _ in range(10)]
            while True:
                try:
                    outcomes = writers[w].append(batch)
                    break
                except StoreAway:
                    time.sleep(0.2)
            assert set(outcomes) <= {Outcome.STORED, Outcome.DUPLICATE}
            acknowledged[w].extend(batch)

    def more() -> None:
        before = [len(a) for a in acknowledged]
        await_(lambda: all(len(a) >= n + 100 for a, n in zip(acknowledged, before, strict=True)))

    threads = [threading.Thread(target=write, args=(w,)) for w in range(2)]
    for thread in threads:
        thread.start()
    try:
        more()
        three_nodes[2].kill()
        more()
        three_nodes[2].start()
        more()
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    sent = {f.id: f for part in acknowledged for f in part}
    stored = everything(reader, limit=1000)
    assert len(stored) == len(sent)
    assert {f.id: f for f in stored} == sent
    assert_counts(reader)
    for store in (*writers, reader):
        store.close()


def _nodes_up(node: CassandraNode) -> int:
    with node.session() as session:
        return 1 + len(list(session.execute("SELECT peer FROM system.peers_v2")))
