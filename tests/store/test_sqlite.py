"""The SQLite store: its file, group commit, many readers, and what is really gone after an erasure."""

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from store_samples import MAZE, POLE, assert_counts, cut, everything, fragment, raw
from waiting import until

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.store import Outcome, StoreBusy
from sparring.store import queue as queue_module
from sparring.store.sqlite import SqliteStore, connection, fragment_table, quarantine_table, tables
from sparring.store.sqlite import writer as writer_module

STORED = Outcome.STORED


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nobody else can write meanwhile."""
    with raw(path) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")


def commits(path: Path) -> int:
    """How many transactions are in the write-ahead log: each ends with a frame that tells the file's size."""
    log = Path(f"{path}-wal").read_bytes()
    page = int.from_bytes(log[8:12], "big")
    salt = log[16:24]
    frames = [log[at : at + 24] for at in range(32, len(log) - 23, page + 24)]
    return sum(frame[8:16] == salt and frame[4:8] != bytes(4) for frame in frames)


class TestFile:
    def test_everything_is_there_after_a_restart(self, path: Path) -> None:
        parts = cut([2, 3, 4], model="bot", version=1)
        with closing(SqliteStore(path)) as store:
            store.register(POLE)
            store.append(parts[:2])
            store.quarantine("pole", "eve", "id", "why")
        with closing(SqliteStore(path)) as store:
            assert store.games() == [POLE]
            assert store.stats("pole").rejected == 1
            store.append(parts[2:])
            assert everything(store) == parts
            assert [e.steps for e in store.episodes("pole")] == [9]
            assert_counts(store)

    def test_directories_are_made(self, tmp_path: Path) -> None:
        SqliteStore(tmp_path / "a" / "b" / "store.db").close()
        SqliteStore(tmp_path / "a" / "b" / "store.db", readonly=True).close()

    @pytest.mark.parametrize("content", [b"x", b"SQLite", b"SQLite format 3\0" + bytes(10), b"not a database" * 1000])
    def test_a_file_that_is_no_database_is_left_alone(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        for readonly in (False, True):
            with pytest.raises(InputError, match=r"store\.db is not a store"):
                SqliteStore(path, readonly=readonly)
        assert path.read_bytes() == content
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_a_database_of_another_program_is_left_alone(self, path: Path) -> None:
        with raw(path) as db:
            db.execute("CREATE TABLE fragment (a)")
        content = path.read_bytes()
        for readonly in (False, True):
            with pytest.raises(InputError, match="another program"):
                SqliteStore(path, readonly=readonly)
        assert path.read_bytes() == content

    def test_a_newer_format_is_refused(self, path: Path, store: SqliteStore) -> None:
        store.append([fragment()])
        store.close()
        with raw(path) as db:
            db.execute("PRAGMA user_version = 99")
        for readonly in (False, True):
            with pytest.raises(InputError, match=r"format 99.*newer Sparring"):
                SqliteStore(path, readonly=readonly)

    def test_a_directory_in_its_place(self, tmp_path: Path) -> None:
        with pytest.raises(SparringError, match="cannot be used"):
            SqliteStore(tmp_path)

    def test_a_damaged_file_is_reported(self, path: Path, store: SqliteStore) -> None:
        store.append([fragment(100) for _ in range(200)])
        store.close()
        with path.open("r+b") as file:
            file.seek(4 * tables.PAGE)
            file.write(b"\xff" * (path.stat().st_size - 4 * tables.PAGE))
        with closing(SqliteStore(path, readonly=True)) as broken, pytest.raises(SparringError, match="cannot be used"):
            everything(broken)

    def test_a_damaged_fragment_is_reported(self, path: Path, store: SqliteStore) -> None:
        store.append([fragment()])
        with raw(path) as db:
            db.execute("UPDATE fragment SET body = ?", (b"\xc1",))
        with pytest.raises(SparringError, match="damaged"):
            store.tail("pole")


class TestOlderFormat:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """A file of format 1, as it was left by the Sparring that made it."""
        path = tmp_path / "store.db"
        with raw(path) as db:
            db.executescript((Path(__file__).parent / "format-1.sql").read_text())
        return path

    def test_it_goes_on_where_it_was(self, path: Path) -> None:
        with closing(SqliteStore(path)) as store:
            assert store.games() == [MAZE, POLE]
            before = everything(store)
            assert [f.id for f in before] == ["ann-0", "ann-1", "ann-2", "eve-0"]
            assert store.erasure("pole") == ""
            assert store.registration("pole")
            assert store.append(before) == [Outcome.DUPLICATE] * 4
            eve = msgspec.structs.replace(before[3], id="eve-1", start=2, terminated=True)
            assert store.append([eve]) == [STORED]
            assert [(e.player, e.steps) for e in store.episodes("pole")] == [("ann", 9), ("eve", 4)]
            store.discard("pole", ["ann-1"], "why")
            assert store.erase("pole", "ann") == 2
            store.pause("maze", True)
            assert_counts(store)
        with closing(SqliteStore(path)) as store:
            assert store.paused() == {"maze"}
            assert store.append(before[:3]) == [Outcome.ERASED] * 3
            store.delete_game("pole")
            store.register(POLE)
            assert everything(store) == []
            assert_counts(store, MAZE)

    def test_a_reader_that_comes_first_reads_it_and_changes_nothing(self, path: Path) -> None:
        content = path.read_bytes()
        with closing(SqliteStore(path, readonly=True)) as store:
            assert len(everything(store)) == 4
            assert_counts(store, bots_apart=False)
            assert store.paused() == set()
            assert store.erasure("pole") == store.registration("chess") == ""
            first = store.registration("pole")
            assert first
        assert path.read_bytes() == content
        with closing(SqliteStore(path)) as store:
            assert store.registration("pole") == first


class TestReadonly:
    def test_there_must_be_a_store(self, path: Path) -> None:
        with pytest.raises(InputError, match=r"no store at .*sparring up"):
            SqliteStore(path, readonly=True)
        assert not path.exists()

    def test_it_waits_for_a_store_that_is_just_being_made(self, path: Path) -> None:
        path.touch()
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(SqliteStore, path, readonly=True)
            with closing(SqliteStore(path)) as store:
                store.register(POLE)
                with closing(reader.result(20)) as other:
                    assert other.games() == [POLE]

    def test_but_not_for_ever(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "PATIENCE", 0.1)
        path.touch()
        with pytest.raises(InputError, match="is empty"):
            SqliteStore(path, readonly=True)

    def test_it_sees_what_is_written_and_writes_nothing(self, path: Path, store: SqliteStore) -> None:
        threads = threading.active_count()
        with closing(SqliteStore(path, readonly=True)) as reader:
            assert threading.active_count() == threads
            assert everything(reader) == []
            sent = [fragment() for _ in range(20)]
            store.append(sent)
            assert everything(reader) == sent
            for use in (
                lambda: reader.append([fragment()]),
                lambda: reader.submit([fragment()]),
                lambda: reader.register(POLE),
                lambda: reader.erase("pole", "ann"),
                lambda: reader.quarantine("pole", "ann", "id", "why"),
            ):
                with pytest.raises(SparringError, match="reading only"):
                    use()

    def test_it_works_while_the_writer_is_away(self, path: Path, store: SqliteStore) -> None:
        sent = [fragment()]
        store.append(sent)
        store.close()
        with closing(SqliteStore(path, readonly=True)) as reader:
            assert everything(reader) == sent


class TestGroupCommit:
    def test_submissions_that_wait_share_a_transaction(self, path: Path, store: SqliteStore) -> None:
        before = commits(path)
        with held(path):
            futures = [store.submit([fragment(), fragment()]) for _ in range(50)]
        assert [f.result(20) for f in futures] == [[STORED, STORED]] * 50
        assert commits(path) - before <= 3  # the holder's own, the first submission's, and that of all the others
        assert_counts(store)

    def test_callers_who_wait_share_one_too(self, path: Path, store: SqliteStore) -> None:
        before = commits(path)
        with ThreadPoolExecutor(20) as pool:
            with held(path):
                futures = [pool.submit(store.append, [fragment()]) for _ in range(20)]
                until(lambda: len(store._writer._queue.pending) >= 19)  # type: ignore[union-attr]
            assert [f.result(20) for f in futures] == [[STORED]] * 20
        assert commits(path) - before <= 3

    def test_a_submission_that_fails_fails_alone(self, path: Path, store: SqliteStore) -> None:
        with raw(path) as db:
            db.execute(
                "CREATE TRIGGER poison BEFORE INSERT ON fragment WHEN NEW.id = 'poison'"
                " BEGIN SELECT RAISE(ABORT, 'it is poison'); END"
            )
        with held(path):
            good = [store.submit([fragment()]) for _ in range(5)]
            bad = store.submit([fragment(), fragment(id="poison")])
            huge = store.submit([fragment(model="bot", version=(1 << 63))])
            good += [store.submit([fragment()]) for _ in range(5)]
        assert [f.result(20) for f in good] == [[STORED]] * 10
        with pytest.raises(SparringError, match="poison"):
            bad.result(20)
        with pytest.raises(SparringError, match="too large"):
            huge.result(20)
        assert len(everything(store)) == 10
        assert_counts(store)

    def test_an_error_nobody_thought_of_fails_its_own_submission_and_the_thread_goes_on(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        append = fragment_table.append

        def breaks(db: sqlite3.Connection, ledger: Any, submissions: Any, now: float) -> Any:
            if any(f.id == "poison" for s in submissions for f in s.fragments):
                raise ZeroDivisionError("nobody thought of it")
            return append(db, ledger, submissions, now)

        monkeypatch.setattr(fragment_table, "append", breaks)
        with held(path):
            futures = [store.submit([fragment()]) for _ in range(5)]
            bad = store.submit([fragment(id="poison")])
            futures += [store.submit([fragment()]) for _ in range(5)]
        with pytest.raises(SparringError, match="nobody thought of it"):
            bad.result(20)
        assert [f.result(20) for f in futures] == [[STORED]] * 10
        assert "Traceback" in caplog.text
        assert store.submit([fragment()]).result(20) == [STORED]
        assert store._writer._thread.is_alive()  # type: ignore[union-attr]

    def test_a_call_that_breaks_is_reported_to_its_caller_alone(self, path: Path, store: SqliteStore) -> None:
        store.append([fragment(id="damaged", player="eve"), fragment()])
        with raw(path) as db:
            db.execute("UPDATE fragment SET body = ? WHERE id = 'damaged'", (b"\xc1",))
        with ThreadPoolExecutor(8) as pool:
            for _ in range(10):
                with held(path):
                    before = store.submit([fragment()])
                    until(before.running)
                    after = [store.submit([fragment()])]
                    erased = pool.submit(store.erase, "pole", "eve")
                    after += [store.submit([fragment()]) for _ in range(3)]
                    waiting = [pool.submit(store.append, [fragment()]) for _ in range(5)]
                with pytest.raises(SparringError, match="damaged"):
                    erased.result(20)
                assert [f.result(20) for f in (before, *after, *waiting)] == [[STORED]] * 10
        again = store.submit([fragment(id="damaged")])
        with pytest.raises(SparringError, match="damaged"):
            again.result(20)
        assert store.submit([fragment()]).result(20) == [STORED]

    def test_a_cancelled_submission_is_not_stored(self, path: Path, store: SqliteStore) -> None:
        with held(path):
            first = store.submit([fragment()])
            until(first.running)
            second, third = store.submit([fragment(id="second")]), store.submit([fragment(id="third")])
            assert second.cancel()
        wait([first, third], 20)
        assert [f.id for f in everything(store)][1:] == ["third"]

    def test_too_much_waiting_is_busy_for_those_who_do_not_wait(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(queue_module, "PENDING", 10_000)
        with ThreadPoolExecutor(1) as pool:
            with held(path):
                futures = [store.submit([fragment(100)]) for _ in range(20)]
                busy = [f for f in futures if f.done()]
                assert len(busy) >= 10
                with pytest.raises(StoreBusy, match="try again"):
                    busy[0].result()
                patient = pool.submit(store.append, [fragment(100)])
            assert patient.result(20) == [STORED]
            stored = [f.result(20) for f in futures if f not in busy]
        assert len(everything(store)) == len(stored) + 1

    def test_one_submission_may_be_larger_than_the_queue(
        self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(queue_module, "PENDING", 1000)
        monkeypatch.setattr(queue_module, "GROUP", 1000)
        assert store.submit([fragment(1000), fragment(1000)]).result(20) == [STORED, STORED]

    def test_closing_writes_what_was_submitted(self, path: Path, store: SqliteStore) -> None:
        with ThreadPoolExecutor(1) as pool:
            with held(path):
                futures = [store.submit([fragment()]) for _ in range(5)]
                store.quarantine("pole", "eve", "id", "why")
                closed = pool.submit(store.close)
                until(lambda: store._closed)
            closed.result(20)
        assert [f.result(0) for f in futures] == [[STORED]] * 5
        with closing(SqliteStore(path, readonly=True)) as reader:
            assert (reader.stats("pole").fragments, reader.stats("pole").rejected) == (5, 1)

    def test_many_threads(self, store: SqliteStore) -> None:
        batches = [[fragment(player=f"p{i % 5}") for _ in range(3)] for i in range(200)]
        with ThreadPoolExecutor(8) as pool:
            some = list(pool.map(store.append, batches[:100]))
            futures = list(pool.map(store.submit, batches[100:]))
        assert some + [f.result(20) for f in futures] == [[STORED] * 3] * 200
        assert sorted(f.id for f in everything(store)) == sorted(f.id for batch in batches for f in batch)
        assert_counts(store)


class TestReaders:
    def test_following_while_others_write(self, store: SqliteStore) -> None:
        """None missed, none twice, in one order for all, whatever the commits do meanwhile."""
        store.register(MAZE)
        batches = [[fragment(1 + i % 4), fragment(game=MAZE)] for i in range(150)]
        done = threading.Event()

        def follow() -> list[Fragment]:
            seen: list[Fragment] = []
            cursor = 0
            while True:
                last = done.is_set()
                page = store.tail("pole", cursor, 5)
                seen += page.fragments
                cursor = page.cursor
                if last and not page.fragments:
                    return seen

        with ThreadPoolExecutor(6) as pool:
            followers = [pool.submit(follow) for _ in range(2)]
            list(pool.map(store.append, batches))
            done.set()
            seen = [f.result(60) for f in followers]
        assert seen[0] == seen[1] == everything(store, limit=1000)
        assert sorted(f.id for f in seen[0]) == sorted(batch[0].id for batch in batches)

    def test_large_fragments_come_in_several_answers(self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparring.store.sqlite.sqlite_store.ANSWER", 20_000)
        sent = [fragment(500) for _ in range(10)]
        store.append(sent)
        assert len(store.tail("pole").fragments) == 2
        assert everything(store) == sent

    def test_no_query_looks_at_every_fragment(self, path: Path, store: SqliteStore) -> None:
        store.append([f for i in range(50) for f in cut([2, 3], player=f"p{i}")])
        queries: set[str] = set()
        store.games()
        store._idle[0].set_trace_callback(queries.add)
        store.tail("pole", 10, 10)
        store.tail("pole", -1)
        store.sample("pole", 20, np.random.default_rng(0))
        store.stats("pole")
        store.players("pole")
        store.versions("pole")
        store.episodes("pole", 10, 10)
        store._idle[0].set_trace_callback(None)
        with raw(path) as db:
            plans = [row[3] for query in queries for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert len(queries) >= 7
        assert not [plan for plan in plans if "SCAN" in plan]

    def test_the_log_stays_small_while_somebody_reads(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer_module, "CHECKPOINT", 200_000)
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                store.tail("pole", 0, 50)

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            for _ in range(20):
                for _ in range(10):
                    store.append([fragment(100) for _ in range(10)])  # 5 MB in all
                until(lambda: store._writing()._written < writer_module.CHECKPOINT)  # its thread comes to it
            done.set()
            reader.result(20)
        assert path.stat().st_size > 4_000_000
        assert Path(f"{path}-wal").stat().st_size < 2_500_000


class TestQuarantine:
    def test_only_the_newest_are_kept(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quarantine_table, "QUARANTINE", 10)
        with closing(SqliteStore(path)) as store:
            store.register(POLE)
            for i in range(35):
                store.quarantine("pole", "eve" * 1000, str(i), "x" * 10_000)
        with raw(path) as db:
            rows = db.execute("SELECT id, length(player), length(reason) FROM quarantine ORDER BY seq").fetchall()
        assert rows == [(str(i), 200, 1000) for i in range(25, 35)]
        with closing(SqliteStore(path, readonly=True)) as store:
            assert store.stats("pole").rejected == 35

    def test_a_name_that_cannot_be_written_down_does_not_end_the_writer(self, store: SqliteStore) -> None:
        store.quarantine("pole", "\ud800", "\udfff", "it is \ud800")
        assert store.submit([fragment()]).result(20) == [STORED]
        until(lambda: store.stats("pole").rejected == 1)
        assert store._writer._thread.is_alive()  # type: ignore[union-attr]

    def test_it_never_waits_for_the_disk(self, path: Path, store: SqliteStore) -> None:
        with held(path):
            for i in range(10_000):
                store.quarantine("pole", "eve", str(i), "why")
        until(lambda: store.stats("pole").rejected == 10_000)

    def test_what_could_not_be_noted_is_noted_later(
        self, path: Path, store: SqliteStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        store._writer._db.execute("PRAGMA busy_timeout = 10")  # type: ignore[union-attr]
        with held(path):
            store.quarantine("pole", "eve", "id", "why")
            until(lambda: "not noted" in caplog.text)
        store.submit([fragment()]).result(20)
        until(lambda: store.stats("pole").rejected == 1)


def test_two_writers_take_turns_and_neither_loses_sight_of_the_other(tmp_path: Path) -> None:
    """What a writer remembers of the tables is not true any more once another has written."""
    with closing(SqliteStore(tmp_path / "s.db")) as one, closing(SqliteStore(tmp_path / "s.db")) as two:
        one.register(POLE)
        for turn in range(6):
            writer = (one, two)[turn % 2]
            assert writer.append([fragment(episode=str(turn), terminated=True)]) == [Outcome.STORED]
        assert one.stats(POLE.name).fragments == 6
        assert len(everything(one)) == 6
        player = everything(one)[0].player
        assert two.append([fragment(episode="6")]) == [Outcome.STORED]
        assert one.erase(POLE.name, player) == 7  # the chain of a player's fragments has no gap
        assert two.append([fragment(episode="7")]) == [Outcome.STORED]
        assert two.stats(POLE.name).fragments == 1
        assert_counts(two)
