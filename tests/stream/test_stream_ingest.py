"""From the stream to the store with real Spark: all that was sent is stored once, whatever is killed on the way."""

import contextlib
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3
import waiting
from kinesis_server import Server, free_port, running
from servers import CassandraNode
from test_stream_producer import GAME, PICTURES, play, put

from sparring.aws.kinesis import Kinesis, Put, default_directory
from sparring.client import Client
from sparring.experience import Fragment, new_id, wire
from sparring.games import Box, Discrete, Game
from sparring.store import Stats, open_store
from sparring.stream import record
from sparring.stream.ingest import __file__ as ingest_job
from sparring.stream.producer import Producer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
until = partial(waiting.until, seconds=300)  # Spark needs a minute to start, on a busy machine more
MINED = os.pathsep.join(filter(None, [str(Path(__file__).parent / "bombs"), os.environ.get("PYTHONPATH")]))
# A small JVM that starts fast; the tasks of one batch may die a hundred times.
SPARK = ["--master", "local[2,100]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.memory=512m"]
SPARK += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]


def stored(store: str, game: Game = GAME) -> list[Fragment]:
    """All of a game, in the order in which the store took it."""
    opened = open_store(store, readonly=True)
    try:
        if game.name not in {known.name for known in opened.games()}:
            return []
        before = opened.stats(game.name).fragments
        found, page = [], opened.tail(game.name)
        while page.fragments:
            found += page.fragments
            page = opened.tail(game.name, page.cursor)
        assert before <= len(found) <= opened.stats(game.name).fragments  # somebody may be writing
        return found
    finally:
        opened.close()


def stats(store: str, game: Game = GAME) -> Stats:
    with contextlib.closing(open_store(store, readonly=True)) as opened:
        return opened.stats(game.name)


def count(store: str, game: Game = GAME) -> int:
    """Of what `stored` would read: cheap enough to be asked again and again."""
    return stats(store, game).fragments


def by_id(fragments: list[Fragment]) -> dict[str, Fragment]:
    found = {f.id: f for f in fragments}
    assert len(found) == len(fragments)  # each once
    return found


class Job:
    """`sparring ingest` on a stream and a data directory, with its files."""

    def __init__(self, stream: Kinesis, data: Path, store: str | None = None, bombs: Path | None = None) -> None:
        self.stream, self.data, self.store = stream, data, store or str(data / "store.db")
        self.directory = default_directory(data, stream.address, self.store)
        self.bombs = bombs
        open_store(self.store).close()  # there from the beginning: tests look into it at any time
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "sparring.cli", "ingest", "--stream", self.stream.address, "--every", "0.2"]
        command += ["--data", str(self.data), "--store", self.store, *SPARK, *options]
        env = dict(os.environ)
        if self.bombs is not None:
            env |= {"PYTHONPATH": MINED, "SPARRING_BOMBS": str(self.bombs), "SPARRING_BOMBS_IN": "job"}
        with (self.data / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait(120)

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return (self.data / "log").read_text()[-3000:]

    def batches(self) -> list[Any]:
        try:
            return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def status(self) -> Any:
        return json.loads((self.directory / "status.json").read_bytes())

    def wait_for(self, fragments: list[Fragment], game: Game = GAME) -> None:
        """Until so many of a game's are there, or one too many."""

        def there() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            return count(self.store, game) >= len(fragments)

        until(there, f"{len(fragments)} fragments")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


BACKLOG = [play(400, players=40, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def job(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A running job on a stream whose shards were split and merged before the job first looked at it."""
    stream = server.stream(2)
    producer = Producer(stream)
    for count, part in zip((2, 5, 2), BACKLOG, strict=True):
        stream.reshard(count)
        put(producer, part)
    producer.close()
    job = Job(stream, tmp_path_factory.mktemp("data"))
    job.start()
    yield job
    job.kill()


def test_a_backlog_over_splits_and_merges_arrives_whole_and_in_order(job: Job) -> None:
    sent = [f for part in BACKLOG for f in part]
    job.wait_for(sent)
    found = stored(job.store)
    assert by_id(found) == by_id(sent)
    starts: dict[str, list[int]] = defaultdict(list)
    for f in found:
        starts[f.episode + f.player].append(f.start)
    # Each part has its own episodes of the same names, in the order of the parts: 0, 20, 40, … and again from 0.
    for found_starts in starts.values():
        assert [s % 100 for s in found_starts] == [s for _ in range(len(found_starts) // 5) for s in range(0, 100, 20)]
    shards = job.stream.shards()
    assert sum(not shard.open for shard in shards) >= 5  # there was something to follow
    until(lambda: json.loads((job.directory / "positions.json").read_bytes())["after"], "positions")


def test_shards_split_while_it_runs_are_followed(job: Job) -> None:
    before = len(stored(job.store))
    producer = Producer(job.stream)
    sent = []
    for seed, shards in ((11, 3), (12, 4), (13, 1)):
        job.stream.reshard(shards)
        part = play(200, players=40, seed=seed)
        put(producer, part)
        sent += part
    producer.close()
    until(lambda: count(job.store) >= before + 600, "all of it")
    found = by_id(stored(job.store))
    assert len(found) == before + 600
    assert all(found[f.id] == f for f in sent)


def send_raw(stream: Kinesis, data: bytes, lane: int = 0) -> None:
    assert stream.put([Put(data, str(lane), "0")])[0].error_code is None


def test_poison_is_refused_with_its_reason_and_the_rest_goes_on(job: Job) -> None:
    other = Game("Other-v0", Box((2,)), Discrete(3))
    good, nan, late, shape, stranger = play(5, seed=5)
    replace = msgspec.structs.replace
    nan = replace(nan, reward=b"\x00\x00\xc0\x7f" * nan.steps)
    late = replace(late, time=time.time() - 1e8)
    shape = replace(shape, obs=shape.obs[:-4])
    stranger = replace(stranger, game="Nowhere-v0")
    clash = replace(good, player="somebody else")
    declared = [record.declaration(GAME)]
    encode = msgspec.msgpack.encode
    send_raw(job.stream, os.urandom(1000))
    send_raw(job.stream, b"")
    send_raw(job.stream, b"[]\nno msgpack")
    send_raw(job.stream, b"[{}]\n" + wire.encode([good]))
    send_raw(job.stream, b"[" + declared[0] + b"]\n" + gzip.compress(b"\xdd\x00\x00\x00\x01" + b"\x00" * (65 << 20)))
    send_raw(job.stream, record.encode(declared, [encode(f) for f in (nan, late, good, shape, stranger)]))
    send_raw(job.stream, record.encode(declared, [encode(clash)]))
    taken = msgspec.structs.replace(GAME, observation=other.observation)
    wrong = replace(good, id=new_id(), schema=taken.schema)
    send_raw(job.stream, record.encode([record.declaration(taken)], [encode(wrong)]))
    last = play(1, seed=6)
    send_raw(job.stream, record.encode(declared, [encode(last[0])]))
    until(lambda: last[0].id in {f.id for f in stored(job.store)}, "what came after the poison")
    found = by_id(stored(job.store))
    assert found[good.id] == good
    assert not {nan.id, late.id, shape.id, stranger.id, wrong.id} & found.keys()

    def reasons() -> dict[str, str]:
        with sqlite3.connect(f"file:{job.store}?mode=ro", uri=True) as db:
            return dict(db.execute("SELECT id, reason FROM quarantine").fetchall())

    until(lambda: len(reasons()) >= 11, "quarantine")
    noted = reasons()
    assert "NaN" in noted[nan.id]
    assert "clock is" in noted[late.id]
    assert "wrong shape" in noted[shape.id]
    assert "does not declare its game 'Nowhere-v0'" in noted[stranger.id]
    assert "taken by a fragment with other content" in noted[good.id]
    assert "built for other spaces" in noted[wrong.id]
    records = [reason for name, reason in noted.items() if name.startswith("record ")]
    assert len(records) == 5
    assert sum("does not begin with a line" in reason for reason in records) == 2
    assert sum("not a msgpack list" in reason for reason in records) == 1
    assert sum("declarations cannot be read" in reason for reason in records) == 1
    assert sum("larger than" in reason for reason in records) == 1
    until(lambda: job.status()["rejected"] == 11, "the count of what was refused")


def test_a_gateway_killed_between_stream_and_client_loses_and_doubles_nothing(job: Job, tmp_path: Path) -> None:
    """The gateway dies five times after the stream has a record and before it tells anybody; the client goes on with
    the next one on the same port. In the end the store has what was played, and the gateway shows the job."""
    before = len(stored(job.store))
    bombs, port = tmp_path / "bombs", free_port()
    bombs.mkdir()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sparring.cli", "up", "--data", str(job.data), "--port", str(port), "--no-train"]
    command += ["--no-ingest", "--stream", job.stream.address, "--print-address"]
    bombed = {"PYTHONPATH": MINED, "SPARRING_BOMBS": str(bombs), "SPARRING_BOMBS_IN": "gateway"}
    env = dict(os.environ) | bombed

    def gateway() -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == url.encode()
        return process

    process = gateway()
    played = 0
    try:
        with Client(url, GAME, player="zoe", directory=tmp_path / "client", timeout=5) as client:
            for kill in range(6):
                if kill < 5:
                    (bombs / "gateway").touch()
                for t in range(300):
                    client.record([kill, 0, 0, t], t % 2, 1.0, t == 299, False, [kill, 0, 0, t + 1])
                played += 300
                if kill < 5:
                    client.flush(0)
                    assert process.wait(60) == -signal.SIGKILL
                    process = gateway()
                assert client.flush(60)
            assert client.stats.dropped == client.stats.rejected == 0
            sent = client.stats.uploaded
        until(lambda: count(job.store) >= before + sent, "what was played")
        mine = [f for f in stored(job.store) if f.player == "zoe"]
        assert len(by_id(mine)) == sent == len(stored(job.store)) - before
        assert sum(f.steps for f in mine) == played

        metrics = urllib3.request("GET", f"{url}/metrics").data.decode()
        lines = (line.split(" ") for line in metrics.splitlines() if line.startswith("sparring_stream_"))
        values = {name.removeprefix("sparring_stream_"): float(value) for name, value in lines}
        assert values["lag_seconds"] < 60
        assert values["rejected_total"] == job.status()["rejected"]
        assert values["put_records_total"] >= 1
        assert (values["retention_seconds"], values["missing_seconds_total"]) == (86400, 0)
        assert "# TYPE sparring_stream_rejected_total counter" in metrics
        counts = [name for name in values if name.endswith("_total")]
        assert len(counts) == 11
        for name in counts:  # as version 0.1 called them
            assert values[name.removesuffix("_total")] == values[name]
        shown = urllib3.request("GET", f"{url}/v1/games/{GAME.name}/stats").json()
        assert shown["stream"]["stream"] == job.stream.stream
        assert shown["stream"]["state"] == "running"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_it_stops_gracefully_and_the_platform_goes_on_without_reading_again(job: Job) -> None:
    """The last of those that share the job: then `sparring up --stream` runs one of its own from its checkpoint."""
    job.wait_for([f for part in BACKLOG for f in part])
    until(lambda: sum(batch["fragments"] for batch in job.batches()) == count(job.store), "the last batch's note")
    batches, total = job.batches(), len(stored(job.store))
    assert job.status()["state"] == "running"
    assert job.stop() == 0
    assert job.status()["state"] == "stopped"
    assert "Traceback" not in (job.data / "log").read_text()
    assert sum(batch["rejected"] for batch in batches) == job.status()["rejected"]
    assert all(batch["lag"] >= 0 and batch["bytes"] >= 0 and batch["seconds"] > 0 for batch in batches)
    command = [sys.executable, "-m", "sparring.cli", "up", "--data", str(job.data), "--port", "0", "--no-train"]
    with subprocess.Popen([*command, "--print-address", "--stream", job.stream.address], stdout=subprocess.PIPE) as up:
        try:
            assert up.stdout is not None
            url = up.stdout.readline().decode().strip()
            with Client(url, GAME, player="amy", directory=job.data / "client") as client:
                for t in range(100):
                    client.record([0, 0, 0, t], t % 2, 1.0, t == 99, False, [0, 0, 0, t + 1])
                assert client.flush(60)
            until(lambda: count(job.store) > total, "the platform's own job")
            shown = urllib3.request("GET", f"{url}/v1/games/{GAME.name}/stats").json()
            assert shown["stream"]["duplicates"] == 0
        finally:
            up.send_signal(signal.SIGINT)
        assert up.wait(90) == 0
    assert len(stored(job.store)) == total + 1
    assert job.status()["state"] == "stopped"
    new = job.batches()[len(batches) :]
    assert sum(batch["fragments"] for batch in new) == 1
    assert sum(batch["duplicates"] for batch in new) == 0


def test_a_fragment_that_the_store_cannot_hold_is_refused_and_the_rest_of_its_batch_goes_on(
    server: Server, tmp_path: Path, cassandra: CassandraNode, cassandra_address: str
) -> None:
    """Nine MiB of black pictures are a small record, and more than Cassandra takes in one write."""
    job = Job(server.stream(1), tmp_path, cassandra_address)
    frame = PICTURES.observation.element.itemsize
    *fragments, huge = [
        msgspec.structs.replace(f, obs=bytes(frame * (f.steps + 1)))
        for f in (*play(7, game=PICTURES, steps=2), *play(1, game=PICTURES, steps=80))
    ]
    assert len(huge.obs) > 9 << 20
    sent = [*fragments[:4], huge, *fragments[4:]]
    send_raw(job.stream, record.encode([record.declaration(PICTURES)], [msgspec.msgpack.encode(f) for f in sent], True))
    job.start("--once")
    try:
        assert job.wait(240) == 0, job.log()
        assert by_id(stored(job.store, PICTURES)) == by_id(fragments)
        assert job.status()["rejected"] == stats(job.store, PICTURES).rejected == 1
        with cassandra.session() as session:
            (note,) = [row for row in session.execute("SELECT id, reason FROM tests.quarantine") if row.id == huge.id]
        assert "9 MiB, at most 8 fit" in note.reason
    finally:
        job.kill()


@pytest.mark.parametrize(("hours", "missing"), [(30, 6), pytest.param(13, 0, marks=pytest.mark.slow)])
def test_what_a_stream_forgot_while_the_job_was_away_is_reported_and_counted(
    server: Server, tmp_path: Path, hours: int, missing: int
) -> None:
    """The stream keeps a day. The job was away for 30 hours, or for 13: by its own last words, set back."""
    job = Job(server.stream(1), tmp_path)
    producer = Producer(job.stream)
    put(producer, play(20))
    job.start("--once")
    assert job.wait(240) == 0, job.log()
    first = job.status()
    assert (first["state"], first["lag"], first["retention"], first["missing"]) == ("stopped", 0, 86_400, 0)
    assert "behind the stream" not in job.log()

    path = job.directory / "status.json"
    path.write_bytes(msgspec.json.encode({**first, "updated": time.time() - 3600 * hours}))
    put(producer, play(20, seed=1))
    producer.close()
    job.start("--once")
    assert job.wait(240) == 0, job.log()
    assert f"the job is {hours}.0 h behind the stream" in job.log()
    assert ("of that is lost" in job.log()) == bool(missing)
    assert not missing or f"What arrived in the first {missing}.0 h of that is lost" in job.log()
    late = job.status()
    assert 3600 * missing <= late["missing"] < 3600 * missing + 300
    assert late["lag"] == 0
    assert len(stored(job.store)) == 40


@pytest.mark.slow
def test_it_stops_when_the_stream_does_not_answer_any_more(tmp_path: Path) -> None:
    with running() as gone:
        job = Job(gone.stream(1), tmp_path)
        with contextlib.closing(Producer(job.stream)) as producer:
            put(producer, play(20))
        job.start("--once", "--every", "30")
        until(lambda: (job.directory / "checkpoint" / "offsets" / "0").exists(), "a batch")
    try:
        assert job.stop() == 0, job.log()
        assert job.status()["state"] == "stopped"
    finally:
        job.kill()


WORKER = ("reading", "read", "before", "inside", "after")
DRIVER = ("driver-unwritten", "java", "driver-uncommitted")


@pytest.mark.parametrize("drivers", [DRIVER[:1], pytest.param(DRIVER, marks=pytest.mark.slow)], ids=["one", "three"])
def test_spark_killed_before_inside_and_after_the_sink_stores_everything_once(
    server: Server, tmp_path: Path, cassandra_address: str, drivers: tuple[str, ...]
) -> None:
    """11 or 23 deaths by SIGKILL while play keeps coming, and Cassandra behind it. Most are of Python workers that run
    a shard's task: before they read, when they have read a page, before they store, when one chunk is stored and others
    may not be, and when all is stored and nobody knows; Spark does the task again. The others are of the driver: when
    the batch is stored but not noted, its Java process before a batch, and when the batch is noted but Spark has not
    committed it; another process goes on from the checkpoint, and in the end `spark-submit` of the job's file brings
    the rest. What is refused on the way counts once, too."""
    bombs = tmp_path / "bombs"
    bombs.mkdir()
    job = Job(server.stream(3), tmp_path, cassandra_address, bombs)
    producer = Producer(job.stream)
    sent: list[Fragment] = []
    deaths = bad = 0

    def explode(*places: str) -> None:
        """Play goes on until somebody came to each of the places; a task that died at one may die at the next."""
        nonlocal deaths, bad
        for place in places:
            (bombs / place).touch()
        deadline, due = time.monotonic() + 400, 0.0
        while left := [place for place in places if (bombs / place).exists()]:
            assert time.monotonic() < deadline, f"nobody came to {left}: {job.log()}"
            if time.monotonic() > due:
                part = play(60, players=30, seed=len(sent))
                put(producer, [*part, *(msgspec.structs.replace(f, id=new_id(), obs=b"") for f in part[:3])])
                send_raw(job.stream, b"no record", deaths % 64)
                sent.extend(part)
                bad += 3
                due = time.monotonic() + 2
            time.sleep(0.05)
        deaths += len(places)

    try:
        for driver in drivers:
            job.start()
            explode(*WORKER)
            if driver == DRIVER[0]:
                explode(*WORKER)
            explode(driver)
            code = job.wait(120)
            assert code == (1 if driver == "java" else -signal.SIGKILL), job.log()
        assert deaths == (23 if drivers == DRIVER else 11)
        producer.close()
        submit = [str(Path(sys.executable).with_name("spark-submit")), *SPARK, ingest_job]
        submit += ["--stream", job.stream.address, "--store", job.store, "--directory", str(job.directory), "--once"]
        env = dict(os.environ) | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(submit, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert by_id(stored(job.store)) == by_id(sent)
        assert stats(job.store).rejected == bad
    finally:
        job.kill()
