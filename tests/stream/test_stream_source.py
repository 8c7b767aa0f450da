"""The stream as Spark sees it, without Spark: what a batch covers, and where the next one begins."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from kinesis_server import Proxy, Server, everything, running
from test_stream_producer import GAME, play, put

from sparring.aws.kinesis import Kinesis
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.store.protocol import Outcome
from sparring.store.sqlite import SqliteStore
from sparring.stream import record
from sparring.stream.producer import Producer
from sparring.stream.sink import StoreSink
from sparring.stream.source import CLOSED, SCHEMA, KinesisReader, Positions, Reached

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


class Batches:
    """Goes through a stream as Spark and the job do, batch by batch."""

    def __init__(self, stream: Kinesis, folder: Path, batch_bytes: int = 1 << 30) -> None:
        self.reader = KinesisReader(stream.address, folder / "positions.json", batch_bytes)
        self.positions = Positions(folder / "positions.json")
        self.offset: dict[str, Any] = self.reader.initialOffset()
        self.fragments: list[Fragment] = []
        self.lag = 0.0

    def next(self, note: bool = True) -> list[str] | None:
        """The shards that were read; none when there is nothing new. `note=False`: killed before it could."""
        end = self.reader.latestOffset(self.offset, None)  # type: ignore[arg-type]
        if end == self.offset:
            return None
        shards, reached = [], {}
        for partition in self.reader.partitions(self.offset, end):
            rows = [row for batch in self.reader.read(partition) for row in batch.to_pylist()]
            mark = json.loads(rows.pop()["mark"])
            shards.append(mark["shard"])
            self.lag = mark["lag"]
            for row in rows:
                self.fragments += record.decode(row["data"])[1]
                reached[mark["shard"]] = row["sequence"]
            if mark["closed"]:
                reached[mark["shard"]] = CLOSED
        if note:
            self.positions.write(Reached(end["batch"], reached))
        self.offset = end
        return shards


def put_all(stream: Kinesis, count: int, seed: int = 0) -> list[Fragment]:
    producer = Producer(stream)
    fragments = play(count, players=40, seed=seed)
    put(producer, fragments)
    producer.close()
    return fragments


def test_parents_come_before_their_children_in_batches_of_their_own(server: Server, tmp_path: Path) -> None:
    stream = server.stream(2)
    sent = put_all(stream, 200)
    for count, seed in ((4, 1), (1, 2), (3, 3)):
        stream.reshard(count)
        sent += put_all(stream, 200, seed)
    batches, read = Batches(stream, tmp_path), list[str]()
    parents = {shard.shard_id: shard.parents for shard in stream.shards()}
    while (shards := batches.next()) is not None:
        for shard in shards:
            assert all(parent in read for parent in parents[shard]), (shard, read)
        assert not any(parent in shards for shard in shards for parent in parents[shard])
        read += shards
    assert set(read) == set(parents)
    assert sorted(f.id for f in batches.fragments) == sorted(f.id for f in sent)
    place = {f.id: i for i, f in enumerate(sent)}
    for player in {f.player for f in sent}:
        mine = [place[f.id] for f in batches.fragments if f.player == player]
        assert mine == sorted(mine)


def test_reading_goes_on_while_shards_are_split_under_it(server: Server, tmp_path: Path) -> None:
    stream = server.stream(1)
    batches, sent = Batches(stream, tmp_path), list[Fragment]()
    assert batches.next() is None
    for count, seed in ((2, 1), (5, 2), (5, 3), (1, 4), (2, 5)):
        stream.reshard(count)
        sent += put_all(stream, 60, seed)
        batches.next()
    while batches.next() is not None:
        continue
    assert sorted(f.id for f in batches.fragments) == sorted(f.id for f in sent)


def test_a_batch_that_was_never_noted_is_read_again_and_one_that_was_is_not(server: Server, tmp_path: Path) -> None:
    stream = server.stream(2)
    first = put_all(stream, 100)
    batches = Batches(stream, tmp_path)
    batches.next(note=False)
    second = put_all(stream, 100, seed=1)
    batches.next()
    assert batches.next() is None
    ids = [f.id for f in batches.fragments]
    assert sorted(ids) == sorted([f.id for f in (*first, *first, *second)])
    again = Batches(stream, tmp_path)  # another process, which knows the offset from Spark's checkpoint
    again.offset = batches.offset
    assert again.next() is None


def test_a_batch_takes_so_many_bytes_of_a_shard_and_says_how_far_behind_it_is(server: Server, tmp_path: Path) -> None:
    stream = server.stream(1, lanes=500)
    producer = Producer(stream)
    sent = play(1000, players=500, steps=200)
    for i in range(0, 1000, 100):
        producer.submit(GAME, sent[i : i + 100]).result(30)
    producer.close()
    size = sum(len(r.data) for records in everything(stream).values() for r in records)
    batches, sizes = Batches(stream, tmp_path, batch_bytes=size // 10), []
    while batches.next() is not None:
        sizes.append(len(batches.fragments))
        if len(sizes) == 1:
            assert batches.lag > 0
    assert batches.lag == 0
    assert len(sizes) >= 3
    assert sorted(f.id for f in batches.fragments) == sorted(f.id for f in sent)


def test_an_iterator_that_expired_is_replaced(server: Server, tmp_path: Path) -> None:
    stream = server.stream(1)
    sent, seen = put_all(stream, 1000), {"pages": 0}

    def mood(action: str, asked: Any) -> Any:
        if action != "GetRecords" or asked["Limit"] == 1:
            return None
        seen["pages"] += 1
        return (400, b'{"__type":"ExpiredIteratorException","message":"old"}') if seen["pages"] == 2 else None

    proxy = Proxy(server.port, mood)
    batches = Batches(Kinesis(f"kinesis://{stream.stream}?endpoint={proxy.endpoint}"), tmp_path)
    while batches.next() is not None:
        continue
    proxy.close()
    assert seen["pages"] > 2
    assert sorted(f.id for f in batches.fragments) == sorted(f.id for f in sent)


def test_a_stream_that_was_made_again_under_its_name_is_read_from_its_beginning(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = server.stream(1)
    put_all(stream, 50)
    stream.reshard(2)
    put_all(stream, 50, seed=1)
    batches = Batches(stream, tmp_path)
    while batches.next() is not None:
        continue
    stream._ask("DeleteStream", {}, None)
    for _ in range(100):
        with contextlib.suppress(InputError):  # there already, for as long as it is being deleted
            stream.create(2, 24)  # its shards have the names of the two of which one was closed and one was read
            break
        time.sleep(0.1)
    sent, before = put_all(stream, 50, seed=2), len(batches.fragments)
    while batches.next() is not None:
        continue
    assert sorted(f.id for f in batches.fragments[before:]) == sorted(f.id for f in sent)
    assert "Reading its oldest record next" in caplog.text


def test_the_end_of_an_old_shard_is_as_far_behind_as_its_last_record(server: Server, tmp_path: Path) -> None:
    stream = server.stream(1)
    put_all(stream, 20)
    stream.reshard(2)
    put_all(stream, 20, seed=1)
    batches = Batches(stream, tmp_path)
    assert batches.next() == ["shardId-000000000000"]
    assert batches.lag > 0  # its children were not read
    while batches.next() is not None:
        continue
    assert batches.lag == 0


def rows(fragments: list[Fragment]) -> pa.RecordBatch:
    data = record.encode([record.declaration(GAME)], [msgspec.msgpack.encode(f) for f in fragments])
    return pa.RecordBatch.from_pylist([{"data": data, "sequence": "1", "arrival": time.time()}], SCHEMA)


def test_a_game_that_is_deleted_while_its_play_is_on_the_stream_does_not_stop_the_job(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    task = StoreSink(store, {})
    task.take(rows(play(5)))
    task._written()
    store.delete_game(GAME.name)
    task.take(rows(play(5, seed=1)))
    result = task.finish()
    assert (result.fragments, result.rejected) == (5, 5)
    assert "no game 'Pole-v0'" in result.newest[0].reason
    following = StoreSink(
        store, {game.name: game for game in store.games()}
    )  # the next task: the record declares it again
    following.take(rows(play(5, seed=2)))
    assert following.finish().fragments == 5
    store.close()


def test_nothing_is_thrown_away_when_it_is_the_store_that_is_out_of_order(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    store.register(GAME)

    def append(fragments: object) -> list[Outcome]:
        raise InputError("cassandra://db/play refuses the login")

    store.append = append  # type: ignore[method-assign]
    task = StoreSink(store, {GAME.name: GAME})
    task.take(rows(play(5)))
    with pytest.raises(InputError, match="refuses the login"):
        task.finish()
    assert task.result.rejected == 0
    store.close()
