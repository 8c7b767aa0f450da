"""What the Cassandra store promises beyond the contract: several writers and readers, clocks that jump, buckets that
fill, writers that die half way. Against a real node."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from servers import CassandraNode, Counting
from store_samples import MAZE, POLE, assert_counts, cut, everything, fragment
from typer.testing import CliRunner
from waiting import until

from sparring.cli.entry import app
from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.experience.fragment import new_id
from sparring.store import GameUnreadable, NotRegistered, Outcome, Store, StoreAway, StoreBusy, open_store
from sparring.store.cassandra import CassandraStore, buckets, heads, keyspace, migration, schema

pytestmark = pytest.mark.real
STORED, DUPLICATE, CONFLICT = Outcome.STORED, Outcome.DUPLICATE, Outcome.CONFLICT


def ids(fragments: list[Fragment]) -> Counter[str]:
    return Counter(f.id for f in fragments)


class TestBuckets:
    def test_a_full_bucket_is_followed_by_the_next(self, opened: Callable[..., CassandraStore], monkeypatch) -> None:
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 500)
        store, sent = opened(), [fragment(steps=1 + i % 4) for i in range(60)]
        for at in range(0, 60, 6):
            store.append(sent[at : at + 6])
        heads = store._view("pole").order.directory.refresh()
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
        days = {head.day for head in first._view("pole").order.directory.refresh().values()}
        assert len(days) == 2
        assert ids(everything(first)) & ids(sent) == ids(sent)
        assert len(everything(first)) == 42

    def test_ids_that_a_client_makes_up_cost_others_nothing(
        self, opened: Callable[..., CassandraStore], cassandra: CassandraNode
    ) -> None:
        """All of the same minutes and with the same end, so that they lie together: nobody reads but their own."""
        template = new_id()

        def made_up() -> Fragment:
            return fragment(id=template[:12] + new_id()[12:-2] + template[-2:])

        for _ in range(4):
            opened().append([made_up() for _ in range(1000)])
        with Counting(cassandra.host, cassandra.port) as proxy:
            store = open_store(f"cassandra://127.0.0.1:{proxy.port}/tests")
            try:
                assert store.append([made_up()]) == [STORED]  # opens a bucket, among others
                proxy.received = 0
                assert store.append([made_up()]) == [STORED]
                assert proxy.received < 5_000
            finally:
                store.close()
            other = open_store(f"cassandra://127.0.0.1:{proxy.port}/tests")
            try:
                proxy.received = 0
                assert other.append([made_up()]) == [STORED]
                assert 0 < proxy.received < 20_000
            finally:
                other.close()

    def test_a_refusal_that_cannot_be_written_down_does_not_end_the_writer(
        self, opened: Callable[..., CassandraStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened()
        store.append([fragment()])
        monkeypatch.setattr(store._writing(), "_note", lambda *_: 1 / 0)
        store.quarantine("pole", "eve", "an id", "why")
        store.append([fragment()])
        store.append([fragment()])  # by the same thread, after it tried
        assert store._writing()._thread.is_alive()

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
    def half_written(self, opened: Callable[..., CassandraStore], monkeypatch) -> Iterator[list[Fragment]]:
        """Claimed and put, never committed."""
        batch, died, ended = cut([2, 3, 4]), threading.Event(), threading.Event()

        def die(*_: object) -> bool:
            died.set()
            ended.wait()
            raise StoreAway("it is dead")

        with monkeypatch.context() as patch:
            patch.setattr(heads, "advance", die)
            future = opened().submit(batch)
            assert died.wait(60)
        assert not future.done()
        yield batch
        ended.set()

    def test_what_it_did_not_commit_is_not_there(
        self, opened: Callable[..., CassandraStore], half_written: list[Fragment]
    ) -> None:
        store = opened()
        assert store.tail("pole") == store.tail("pole", -1)
        assert [*store.scan("pole")] == store.episodes("pole") == []
        assert store.sample("pole", 5, np.random.default_rng(0)) == []
        assert store.stats("pole").fragments == 0

    def test_others_take_it_over(
        self, opened: Callable[..., CassandraStore], half_written: list[Fragment], monkeypatch
    ) -> None:
        store = opened()
        other = fragment()
        assert store.submit([other]).result(20) == [STORED]
        assert everything(store) == [other]
        assert store.append(half_written) == [STORED] * 3
        assert store.append(half_written) == [DUPLICATE] * 3
        assert everything(store) == [other, *half_written]
        assert_counts(store)

    @pytest.mark.parametrize("arrived", [True, False])
    def test_a_commit_without_an_answer(
        self, opened: Callable[..., CassandraStore], monkeypatch, arrived: bool
    ) -> None:
        store, lost, applied = opened(), [fragment() for _ in range(5)], keyspace.Keyspace.applied

        def silent(self: keyspace.Keyspace, statement: str, *values: object) -> object:
            if arrived:
                applied(self, statement, *values)
            raise StoreAway("no answer")

        store.append([fragment()])
        with monkeypatch.context() as patch:
            patch.setattr(keyspace.Keyspace, "applied", silent)
            with pytest.raises(StoreAway, match="no answer"):
                store.append(lost)
        assert store.append([*lost, fragment()]) == [DUPLICATE if arrived else STORED] * 5 + [STORED]
        assert len(everything(store)) == 7
        assert_counts(store)

    def test_others_who_close_buckets_all_the_time(self, opened: Callable[..., CassandraStore], monkeypatch) -> None:
        """A group whose bucket others closed is stored in another one, in the order in which it came; not for ever."""
        store, sent, applied = opened(), [fragment() for _ in range(12)], keyspace.Keyspace.applied
        rude = 3

        def closing(self: keyspace.Keyspace, statement: str, *values: Any) -> Any:
            nonlocal rude
            if statement == "advance" and rude and not values[3]:
                rude -= 1
                heads.close(self, values[4], values[5], heads.BucketHead(0, values[6] or 0))
            return applied(self, statement, *values)

        monkeypatch.setattr(keyspace.Keyspace, "applied", closing)
        futures = [store.submit([f]) for f in sent]
        assert [future.result(60) for future in futures] == [[STORED]] * 12
        assert everything(store) == sent
        rude = 1000
        with pytest.raises(StoreBusy, match="try again"):
            store.append([fragment()])
        rude = 0
        assert store.append(sent) == [DUPLICATE] * 12
        assert_counts(store)


def test_a_shard_of_ids_that_could_not_be_read_hides_no_duplicate(
    opened: Callable[..., CassandraStore], monkeypatch
) -> None:
    sent, start = [fragment() for _ in range(5)], keyspace.Keyspace.start
    opened().append(sent)
    other = opened()

    def away(self: keyspace.Keyspace, statement: str, *values: object, **options: Any) -> object:
        if statement == "claims":
            raise StoreAway("no answer")
        return start(self, statement, *values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(keyspace.Keyspace, "start", away)
        with pytest.raises(StoreAway, match="no answer"):
            other.append(sent)
    assert other.append(sent) == [DUPLICATE] * 5


def test_a_connection_that_takes_no_more_for_a_moment_is_waited_for(opened: Callable[..., CassandraStore]) -> None:
    """Under load its socket is full, and the driver refuses to send anything."""
    store = opened()
    store.append([fragment()])
    [pool] = store._keyspace.session.get_pools()
    connection = pool._connection
    connection._socket_writable = False
    threading.Timer(0.5, setattr, (connection, "_socket_writable", True)).start()
    assert store.append([fragment()]) == [STORED]
    assert len(everything(store)) == 2


def test_nothing_of_an_erased_player_is_left(opened: Callable[..., CassandraStore], cassandra: CassandraNode) -> None:
    store = opened()
    for _ in range(3):
        store.append([*cut([2, 3], player="evelyn"), fragment(), fragment(player="evelyn", game=MAZE)])
    store.quarantine("pole", "evelyn", "an id", "a reason")
    assert store.erase("pole", "evelyn") == 6
    assert store.erase("maze", "evelyn") == 3
    with cassandra.session("tests") as session:
        for table in schema.SCHEMA:
            rows = [str(row) for row in session.execute(f"SELECT * FROM {table}")]
            assert not [row for row in rows if "evelyn" in row], table
    other = opened(readonly=True)  # which had not looked before
    assert_counts(other)
    assert [p.player for p in other.players("pole")] == ["ann"]


def test_a_game_whose_deletion_was_cut_short_can_be_deleted_and_declared(
    opened: Callable[..., CassandraStore], monkeypatch
) -> None:
    store, run = opened(), keyspace.Keyspace.run
    sent = [fragment() for _ in range(5)]
    other = opened()

    def away(self: keyspace.Keyspace, statement: str, *values: object) -> object:
        if statement == "drop blocks":
            raise StoreAway("no answer")
        return run(self, statement, *values)

    for again in (False, True):
        assert store.append(sent[:3]) == [STORED] * 3
        assert other.append(sent[3:]) == [STORED] * 2  # in another bucket, which is still whole when it is cut short
        with monkeypatch.context() as patch:
            patch.setattr(keyspace.Keyspace, "run", away)
            with pytest.raises(StoreAway):
                store.delete_game("pole")
        assert store.games() == [MAZE]
        if not again:
            store.delete_game("pole")
        store.register(POLE)
        other.register(POLE)
        assert everything(store) == []
    assert store.append(sent) == [STORED] * 5
    assert everything(store) == sent


class TestOpening:
    def test_init_again_and_stats_from_the_command_line(self, opened: Callable[..., CassandraStore]) -> None:
        store = opened()
        store.append([fragment(steps=4)])
        address = str(store.address)
        again = CliRunner().invoke(app, ["store", "init", address]).output
        assert "up to date" in again
        assert "commitlog_sync: batch" in again  # a single node with one copy, which syncs periodically
        output = CliRunner().invoke(app, ["store", "stats", address, "--json"]).output
        assert msgspec.json.decode(output)["pole"]["steps"] == 4

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
                for use in (open_store, lambda a: migration.init(keyspace.Address.parse(a))):
                    with pytest.raises(InputError, match="version 99"):
                        use(cassandra_keyspace)
            finally:
                session.execute(f"UPDATE version SET version = {schema.VERSION} WHERE key = 'store'")

    def test_readonly_writes_no_fragments(self, opened: Callable[..., CassandraStore]) -> None:
        reader = opened(readonly=True)
        for use in (
            lambda: reader.append([fragment()]),
            lambda: reader.register(POLE),
            lambda: reader.erase("pole", "x"),
            lambda: reader.discard("pole", ["x"], "why"),
            lambda: reader.pause("pole", True),
            lambda: reader.delete_game("pole"),
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


def test_a_declaration_that_cannot_be_read_stops_no_other_game(opened: Callable[..., CassandraStore]) -> None:
    store = opened()
    table = f"{store.address.keyspace}.game"
    store._keyspace.session.execute(f"UPDATE {table} SET spec = '{{' WHERE name = 'pole' IF key != null")
    store._games.forget("pole")
    assert store.games() == [MAZE]
    assert "cannot be read" in store.unreadable()["pole"]
    with pytest.raises(GameUnreadable):
        store.register(POLE)
    with pytest.raises(NotRegistered):
        store.append([fragment()])
    assert store.append([fragment(game=MAZE)]) == [Outcome.STORED]
    store.quarantine("pole", "anna", "f-1", "for a reason")
    store.quarantine("maze", "anna", "f-2", "for a reason")
    until(lambda: store.stats("maze").rejected == 1)
    store.delete_game("pole")
    store.register(POLE)
    assert store.games() == [MAZE, POLE]
