"""What the Cassandra store promises beyond the contract: several writers and readers, clocks that jump, buckets that
fill, writers that die half way. Against a real node."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from servers import CassandraNode
from store_samples import MAZE, POLE, assert_counts, cut, everything, fragment
from typer.testing import CliRunner

from sparring.cli import app
from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.experience.fragment import new_id
from sparring.store import Outcome, Store, StoreAway, StoreBusy, buckets, keyspace, open_store
from sparring.store.cassandra import CassandraStore

pytestmark = pytest.mark.real
STORED, DUPLICATE, CONFLICT = Outcome.STORED, Outcome.DUPLICATE, Outcome.CONFLICT


@pytest.fixture
def opened(cassandra_address: str) -> Iterator[Callable[..., CassandraStore]]:
    """Opens stores on the same empty keyspace, in which POLE and MAZE are registered."""
    stores: list[CassandraStore] = []

    def make(**options: bool) -> CassandraStore:
        store = open_store(cassandra_address, **options)
        assert isinstance(store, CassandraStore)
        stores.append(store)
        return store

    first = make()
    first.register(POLE)
    first.register(MAZE)
    yield make
    for store in stores:
        store.close()


def ids(fragments: list[Fragment]) -> Counter[str]:
    return Counter(f.id for f in fragments)


class TestBuckets:
    def test_a_full_bucket_is_followed_by_the_next(self, opened: Callable[..., CassandraStore], monkeypatch) -> None:
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 500)
        store, sent = opened(), [fragment(steps=1 + i % 4) for i in range(60)]
        for at in range(0, 60, 6):
            store.append(sent[at : at + 6])
        heads = store._directory("pole").refresh()
        assert len(heads) > 3
        assert all(head.bytes < 500 + 6 * 200 for head in heads.values())
        assert everything(store) == sent
        assert [f for piece in store.scan("pole") for f in piece] == sent
        assert_counts(store)

    def test_what_comes_again_is_known_whatever_the_day_bucket_and_writer(
        self, opened: Callable[..., CassandraStore], monkeypatch
    ) -> None:
        """Ids with their time in them, and ids without."""
        sent = [*[fragment() for _ in range(20)], *[fragment(id=f"{i} of mine") for i in range(20)]]
        first = opened()
        assert first.append(sent) == [STORED] * 40
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
        monkeypatch.setattr(buckets, "_today", lambda: int(time.time() // 86_400) + 1)
        other = [msgspec.structs.replace(f, player="eve") for f in sent]
        for store in (first, opened()):
            assert store.append(sent) == [DUPLICATE] * 40
            assert store.append([fragment()]) == [STORED]  # in a bucket of the new day
            assert store.append(other) == [CONFLICT] * 40
        days = {head.day for head in first._directory("pole").refresh().values()}
        assert len(days) == 2
        assert ids(everything(first)) & ids(sent) == ids(sent)
        assert len(everything(first)) == 42

    def test_a_writer_forgets_shards_and_reads_them_again(
        self, opened: Callable[..., CassandraStore], monkeypatch
    ) -> None:
        monkeypatch.setattr(buckets, "REMEMBERED", 10)
        store = opened()
        sent = [fragment(id=new_id(time.time() - 3600 * hour)) for hour in range(30)]
        for f in sent:
            assert store.append([f]) == [STORED]
        assert len(store._writer._shards) < 15
        assert store.append(sent) == [DUPLICATE] * 30

    def test_a_fragment_too_large_for_one_write_is_refused(self, opened: Callable[..., CassandraStore]) -> None:
        big = msgspec.structs.replace(fragment(), obs=bytes(buckets.FRAGMENT))
        with pytest.raises(InputError, match="at most 8 fit"):
            opened().append([big])
        with pytest.raises(InputError, match="at most 8 fit"):
            opened().submit([big]).result(20)


class TestManyWriters:
    def test_readers_see_each_fragment_once_and_in_the_same_order(
        self, opened: Callable[..., CassandraStore], monkeypatch
    ) -> None:
        """Three writers, one of whose clocks jumps by a day at every look; buckets roll over; two readers follow."""
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 5_000)
        jumps = itertools.cycle([0, -1, 2])
        monkeypatch.setattr(buckets, "_today", lambda: 20_000 + next(jumps))
        writers = [opened() for _ in range(3)]
        sent = [[fragment(steps=1 + i % 5, player=f"{w}") for i in range(120)] for w in range(3)]
        done = threading.Event()
        seen: list[list[Fragment]] = [[], []]

        def write(w: int) -> None:
            for at in range(0, 120, 12):
                assert writers[w].append(sent[w][at : at + 12]) == [STORED] * 12

        def follow(store: Store, found: list[Fragment]) -> None:
            cursor, last = 0, False
            while True:
                page = store.tail("pole", cursor, 37)
                assert page.cursor >= cursor
                found += page.fragments
                cursor = page.cursor
                if not page.fragments:
                    if last:
                        return
                    time.sleep(0.02)
                last = done.is_set()

        threads = [threading.Thread(target=write, args=(w,)) for w in range(3)]
        readers = [threading.Thread(target=follow, args=(opened(readonly=True), found)) for found in seen]
        for thread in threads + readers:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        for thread in readers:
            thread.join()
        assert seen[0] == seen[1] == everything(opened(), limit=1000)
        assert ids(seen[0]) == ids([f for part in sent for f in part])
        for w in range(3):  # each writer's own are in the order in which it stored them
            assert [f for f in seen[0] if f.player == f"{w}"] == sent[w]

    def test_shares_are_disjoint_and_together_all(self, opened: Callable[..., CassandraStore], monkeypatch) -> None:
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 400_000)
        monkeypatch.setattr("sparring.store.arrival.STRIPE", 100)
        sent = []
        for store in (opened(), opened()):
            for _ in range(5):
                batch = [fragment(steps=1 + i % 40) for i in range(100)]
                store.append(batch)
                sent += batch
        for of in (1, 2, 3, 8):
            reader = opened(readonly=True)  # each as another process would
            shares = [[f for piece in reader.scan("pole", share, of) for f in piece] for share in range(of)]
            assert ids([f for share in shares for f in share]) == ids(sent)
            assert max(map(len, shares)) < 2 * len(sent) / of  # and nobody has most of it

    def test_the_same_fragments_at_two_writers_at_once(self, opened: Callable[..., CassandraStore]) -> None:
        """As when a client gives up waiting for one gateway and asks another: each is stored once, none is lost."""
        batches = [[fragment() for _ in range(20)] for _ in range(6)]
        outcomes: list[Counter[Outcome]] = [Counter(), Counter()]

        def write(store: CassandraStore, found: Counter[Outcome]) -> None:
            for batch in batches:
                found.update(store.append(batch))

        threads = [threading.Thread(target=write, args=(opened(), found)) for found in outcomes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together = outcomes[0] + outcomes[1]
        assert together == {STORED: 120, DUPLICATE: 120}
        assert ids(everything(opened())) == ids([f for batch in batches for f in batch])


class TestWritersThatDie:
    @pytest.fixture
    def half_written(self, opened: Callable[..., CassandraStore], monkeypatch) -> list[Fragment]:
        """Claimed and put, never committed."""
        batch, died = cut([2, 3, 4]), threading.Event()

        def die(self: buckets.Writer, group: buckets._Group) -> None:
            for future in group.futures:
                future.result()
            died.set()

        with monkeypatch.context() as patch:
            patch.setattr(buckets.Writer, "_commit", die)
            future = opened().submit(batch)
            assert died.wait(60)
        assert not future.done()
        return batch

    def test_what_it_did_not_commit_is_not_there(
        self, opened: Callable[..., CassandraStore], half_written: list[Fragment]
    ) -> None:
        store = opened()
        assert store.tail("pole") == store.tail("pole", -1)
        assert [*store.scan("pole")] == store.episodes("pole") == []
        assert store.sample("pole", 5, np.random.default_rng(0)) == []
        assert store.stats("pole").fragments == 0

    def test_others_wait_before_they_take_it_over(
        self, opened: Callable[..., CassandraStore], half_written: list[Fragment], monkeypatch
    ) -> None:
        store = opened()
        other = fragment()
        with pytest.raises(StoreBusy, match="another writer"):
            store.submit([*half_written, other]).result(20)
        assert store.submit([other]).result(20) == [STORED]
        assert everything(store) == [other]
        monkeypatch.setattr(buckets, "PATIENCE", 0.5)
        assert store.append(half_written) == [STORED] * 3
        assert store.append(half_written) == [DUPLICATE] * 3
        assert everything(store) == [other, *half_written]
        assert_counts(store)

    def test_a_commit_without_an_answer_is_settled_before_the_next(
        self, opened: Callable[..., CassandraStore], monkeypatch
    ) -> None:
        store, lost, run = opened(), [fragment() for _ in range(5)], keyspace.Keyspace.run

        def silent(self: keyspace.Keyspace, statement: str, *values: object) -> object:
            if statement == "commit":
                raise StoreAway("no answer")
            return run(self, statement, *values)

        with monkeypatch.context() as patch:
            patch.setattr(keyspace.Keyspace, "run", silent)
            with pytest.raises(StoreAway, match="no answer"):
                store.append(lost)
        assert store.append([*lost, fragment()]) == [DUPLICATE] * 5 + [STORED]
        assert len(everything(store)) == 6
        assert_counts(store)


def test_what_is_only_duplicates_may_take_its_time(opened: Callable[..., CassandraStore], monkeypatch) -> None:
    """Else a slow store would have to be asked again, and again without end: it has nothing to give up."""
    store, sent = opened(), [fragment() for _ in range(5)]
    store.append(sent)
    monkeypatch.setattr(buckets, "DEADLINE", 0.0)
    assert store.append(sent) == [DUPLICATE] * 5
    with pytest.raises(StoreAway, match="takes longer than 0 s"):
        store.append([*sent, fragment()])


def test_a_shard_of_ids_that_could_not_be_read_hides_no_duplicate(
    opened: Callable[..., CassandraStore], monkeypatch
) -> None:
    sent, run = [fragment() for _ in range(5)], keyspace.Keyspace.run
    opened().append(sent)
    other = opened()

    def away(self: keyspace.Keyspace, statement: str, *values: object) -> object:
        if statement == "claims":
            raise StoreAway("no answer")
        return run(self, statement, *values)

    with monkeypatch.context() as patch:
        patch.setattr(keyspace.Keyspace, "run", away)
        with pytest.raises(StoreAway, match="no answer"):
            other.append(sent)
    assert other.append(sent) == [DUPLICATE] * 5


def test_nothing_of_an_erased_player_is_left(opened: Callable[..., CassandraStore], cassandra: CassandraNode) -> None:
    store = opened()
    for _ in range(3):
        store.append([*cut([2, 3], player="evelyn"), fragment(), fragment(player="evelyn", game=MAZE)])
    store.quarantine("pole", "evelyn", "an id", "a reason")
    assert store.erase("pole", "evelyn") == 6
    assert store.erase("maze", "evelyn") == 3
    with cassandra.session("tests") as session:
        for table in keyspace.TABLES:
            rows = [str(row) for row in session.execute(f"SELECT * FROM {table}")]
            assert not [row for row in rows if "evelyn" in row], table
    other = opened(readonly=True)  # which had not looked before
    assert_counts(other)
    assert [p.player for p in other.players("pole")] == ["ann"]


class TestBlocks:
    """Fragments of one commit share rows."""

    def test_a_reader_stops_and_goes_on_anywhere_in_one(self, opened: Callable[..., CassandraStore]) -> None:
        store, sent = opened(), [fragment(steps=1 + i % 5) for i in range(40)]
        store.append(sent)
        for limit in (1, 3, 39, 41):
            cursor, seen = 0, []
            while (page := store.tail("pole", cursor, limit)).fragments:
                assert len(page.fragments) <= limit
                cursor, seen = page.cursor, seen + page.fragments
            assert seen == sent

    @pytest.mark.parametrize("limit", [1, 100])
    def test_what_comes_after_one_whose_rest_was_erased(
        self, opened: Callable[..., CassandraStore], limit: int
    ) -> None:
        store, later = opened(), fragment()
        store.append([fragment(), fragment(), fragment(player="eve"), fragment(player="eve")])
        cursor = store.tail("pole", 0, 2).cursor
        store.append([later])
        store.erase("pole", "eve")
        assert store.tail("pole", cursor, limit).fragments == [later]

    def test_an_eraser_whose_clock_is_behind_erases_too(
        self, opened: Callable[..., CassandraStore], monkeypatch
    ) -> None:
        store, left = opened(), fragment()
        store.append([fragment(player="eve"), left, fragment(player="bob")])
        store.erase("pole", "eve")
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: 0)
            store.erase("pole", "bob")
        assert everything(store) == [left]

    def test_one_fragment_of_many_is_compared_with_what_comes_again(
        self, opened: Callable[..., CassandraStore]
    ) -> None:
        sent = [fragment() for _ in range(30)]
        opened().append(sent)
        changed = msgspec.structs.replace(sent[7], time=0.5)
        assert opened().append([sent[3], changed, sent[29]]) == [DUPLICATE, CONFLICT, DUPLICATE]

    def test_what_comes_again_and_again_is_known_by_few_reads(
        self, opened: Callable[..., CassandraStore], monkeypatch
    ) -> None:
        """Each time by a process of its own, as the tasks of a killed job: every claim stays to be looked at."""
        sent, start, asked = [fragment() for _ in range(1000)], keyspace.Keyspace.start, Counter[str]()
        opened().append(sent)

        def counted(self: keyspace.Keyspace, statement: str, *values: object, **options: object) -> object:
            asked[statement] += 1
            return start(self, statement, *values, **options)

        monkeypatch.setattr(keyspace.Keyspace, "start", counted)
        for turn in range(1, 7):
            asked.clear()
            assert opened().append(sent) == [DUPLICATE] * 1000
            assert 0 < asked["holding"] < 20 * (turn + 1)

    def test_among_neighbours_that_were_erased(self, opened: Callable[..., CassandraStore]) -> None:
        sent = [fragment(player="eve" if i % 3 else "ann") for i in range(30)]
        store = opened()
        store.append(sent)
        store.erase("pole", "eve")
        assert opened().append(sent) == [STORED if i % 3 else DUPLICATE for i in range(30)]


def test_another_process_notices_an_erasure(opened: Callable[..., CassandraStore]) -> None:
    store, other = opened(), opened(readonly=True)
    store.append([*cut([2, 3], player="eve"), *cut([4], player="ann")])
    assert (other.stats("pole").players, len(other.episodes("pole"))) == (2, 2)
    store.erase("pole", "eve")
    assert_counts(other)
    assert [e.player for e in other.episodes("pole")] == ["ann"]


class TestOpening:
    def test_init_again_and_stats_from_the_command_line(self, opened: Callable[..., CassandraStore]) -> None:
        store = opened()
        store.append([fragment(steps=4)])
        address = str(store.address)
        again = CliRunner().invoke(app, ["store", "init", address]).output
        assert "up to date" in again
        assert "commitlog_sync: batch" in again  # a single node with one copy, which syncs periodically
        told = CliRunner().invoke(app, ["store", "stats", address, "--json"]).output
        assert msgspec.json.decode(told)["pole"]["steps"] == 4

    def test_what_is_not_a_store(self, cassandra: CassandraNode, cassandra_keyspace: str) -> None:
        where = f"cassandra://{cassandra.address}"
        with pytest.raises(InputError, match="sparring store init"):
            open_store(f"{where}/nothing")
        with pytest.raises(InputError, match="another program"):
            open_store(f"{where}/system_auth")
        with pytest.raises(StoreAway, match="is it up"):
            open_store("cassandra://127.0.0.1:1/tests")

    def test_a_newer_store_is_left_alone(self, cassandra: CassandraNode, cassandra_keyspace: str) -> None:
        with cassandra.session("tests") as session:
            session.execute("UPDATE version SET version = 99 WHERE key = 'store'")
            try:
                for use in (open_store, lambda a: keyspace.init(keyspace.Address.parse(a))):
                    with pytest.raises(InputError, match="version 99"):
                        use(cassandra_keyspace)
            finally:
                session.execute(f"UPDATE version SET version = {keyspace.VERSION} WHERE key = 'store'")

    def test_an_older_store_is_brought_along(
        self, cassandra: CassandraNode, opened: Callable[..., CassandraStore]
    ) -> None:
        """Version 1 had a table with a row per fragment. Its writer died before a migration that was cut short."""
        store, sent = opened(), [fragment(steps=1 + i % 4) for i in range(300)]
        store.append(sent[:200])
        store.append(sent[200:])
        address = str(store.address)
        with cassandra.session("tests") as session:
            session.execute(
                "CREATE TABLE fragment (game text, day int, bucket int, place bigint, body blob,"
                " PRIMARY KEY ((game, day, bucket), place))"
            )
            insert = session.prepare("INSERT INTO fragment (game, day, bucket, place, body) VALUES (?, ?, ?, ?, ?)")
            for game, day, bucket, _, body in session.execute("SELECT game, day, bucket, place, body FROM block"):
                block = buckets.decode_block(body)
                for place, one in zip(block.places, block.fragments, strict=True):
                    session.execute(insert, (game, day, bucket, place, msgspec.msgpack.encode(one)))
            session.execute("DROP TABLE block")
            session.execute("UPDATE version SET version = 1 WHERE key = 'store'")
            with pytest.raises(InputError, match=r"a store of version 1, we need 2: run `sparring store init"):
                open_store(address)
            assert "from version 1 to 2" in keyspace.init(keyspace.Address.parse(address))
            session.execute("UPDATE version SET version = 1 WHERE key = 'store'")  # killed before it was noted
            keyspace.init(keyspace.Address.parse(address))
        after = opened()
        assert everything(after) == sent
        assert after.append(sent[150:]) == [DUPLICATE] * 150
        assert_counts(after)

    def test_readonly_writes_no_fragments(self, opened: Callable[..., CassandraStore]) -> None:
        reader = opened(readonly=True)
        for use in (
            lambda: reader.append([fragment()]),
            lambda: reader.register(POLE),
            lambda: reader.erase("pole", "x"),
        ):
            with pytest.raises(SparringError, match="reading only"):
                use()

    def test_batches_fit_what_the_server_takes(self, opened: Callable[..., CassandraStore], tmp_path: Path) -> None:
        """This node has Cassandra's defaults, which refuse batches above 50 KiB."""
        store = opened()
        assert store._keyspace.batch_bytes < 50 << 10
        sent = [fragment(steps=2000) for _ in range(5)] + [fragment(steps=100) for _ in range(100)]
        assert store.append(sent) == [STORED] * 105
        assert everything(store) == sent
