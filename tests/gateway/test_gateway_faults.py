"""What the platform promises when it is killed or its disk is full: an acknowledged fragment is there, once."""

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_api import GAME, MSGPACK, fragment
from small_disks import enlarge, mounted

from sparring.experience import Fragment, wire
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.real
UPLOAD = f"/v1/games/{GAME.name}/fragments"
# Imports once, then forks a platform per line: thirty starts of an interpreter would be most of the test's time.
FORK_SERVER = """
import os, pathlib, sys
from sparring.platform import up
for line in sys.stdin:
    if (child := os.fork()) == 0:
        ready = lambda url: print(os.getpid(), url, flush=True)
        up(pathlib.Path(line.strip()), port=0, settings=None, ready=ready)
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkServer:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._child: int | None = None

    def start(self, data: Path) -> int:
        """A platform on this directory; its port."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{data}\n")
        self._process.stdin.flush()
        pid, url = self._line().split()
        self._child = int(pid)
        return int(url.rpartition(":")[2])

    def stop(self, signal_: signal.Signals) -> int:
        """Its exit code: negative when the signal ended it."""
        assert self._child is not None
        os.kill(self._child, signal_)
        self._child = None
        return int(self._line().removeprefix("ended "))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        if self._child is not None:
            self.stop(signal.SIGKILL)
        self._process.communicate(timeout=30)


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@contextlib.contextmanager
def opened(data: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(data / "store.db")
    try:
        yield store
    finally:
        store.close()


def send(port: int, batch: list[Fragment]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", UPLOAD, wire.encode(batch), MSGPACK)
        response = connection.getresponse()
        return response.status, response.read()


class Players:
    """Upload without end; a batch that got no answer is sent again to the next process, with the same ids."""

    def __init__(self, count: int) -> None:
        self.acknowledged: dict[str, Fragment] = {}
        self.unanswered: list[list[Fragment]] = [self.batch() for _ in range(count)]
        self.wrong: list[bytes] = []

    def batch(self) -> list[Fragment]:
        return [fragment(10, player="ann") for _ in range(10)]

    @contextlib.contextmanager
    def playing(self, port: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._play, args=(port, i)) for i in range(len(self.unanswered))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join()

    def _play(self, port: int, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):  # it was killed
            while True:
                batch = self.unanswered[number]
                connection.request("POST", UPLOAD, wire.encode(batch), MSGPACK)
                response = connection.getresponse()
                body = response.read()
                answer = json.loads(body)
                if response.status != 200 or answer["accepted"] + answer["duplicates"] != len(batch):
                    self.wrong.append(body)
                    return
                self.acknowledged.update({f.id: f for f in batch})
                self.unanswered[number] = self.batch()


def test_killed_thirty_times_every_acknowledged_fragment_is_there_once(fork_server: ForkServer, tmp_path: Path) -> None:
    rng = random.Random(0)
    players = Players(3)
    with opened(tmp_path) as store:
        store.register(GAME)
    for _ in range(30):
        port = fork_server.start(tmp_path)
        before = len(players.acknowledged)
        with players.playing(port):
            end = time.monotonic() + 30
            while len(players.acknowledged) == before and not players.wrong and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.1))  # not to wait for something: to be killed at any point of the work
            assert fork_server.stop(signal.SIGKILL) == -signal.SIGKILL
        assert not players.wrong
        assert len(players.acknowledged) > before
    with opened(tmp_path) as store:
        stored = store.tail(GAME.name, limit=10_000_000).fragments
        counted = store.stats(GAME.name)
    by_id = {f.id: f for f in stored}
    assert len(by_id) == len(stored), "a fragment is there twice"
    lost = players.acknowledged.keys() - by_id.keys()
    assert not lost, f"{len(lost)} acknowledged fragments are gone"
    assert all(by_id[key] == sent for key, sent in players.acknowledged.items())
    assert (counted.fragments, counted.steps) == (len(stored), 10 * len(stored))
    never_sent = by_id.keys() - players.acknowledged.keys() - {f.id for batch in players.unanswered for f in batch}
    assert not never_sent


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "12m")


def test_a_full_disk_is_507_and_uploads_go_on_when_there_is_room(small_disk: Path, fork_server: ForkServer) -> None:
    with opened(small_disk) as store:
        store.register(GAME)
    port = fork_server.start(small_disk)
    acknowledged: list[str] = []
    for _ in range(1000):
        batch = [fragment(1000) for _ in range(10)]
        status, body = send(port, batch)
        if status != 200:
            break
        acknowledged += [f.id for f in batch]
    problem = json.loads(body)
    assert (status, problem["status"]) == (507, 507)
    assert "disk is full" in problem["detail"]
    health = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(health):
        health.request("GET", "/healthz")
        assert health.getresponse().status == 503
    assert send(port, batch)[0] == 507  # and again: nothing of it was kept
    enlarge(small_disk, "64m")
    status, body = send(port, batch)
    assert (status, json.loads(body)["accepted"]) == (200, 10)
    acknowledged += [f.id for f in batch]
    assert fork_server.stop(signal.SIGTERM) == 0
    with opened(small_disk) as store:
        stored = [f.id for f in store.tail(GAME.name, limit=1_000_000).fragments]
    assert sorted(stored) == sorted(acknowledged)
