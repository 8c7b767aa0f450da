"""The SQLite store in several processes: killed while it writes, read while another writes, on a disk that is full."""

import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from small_disks import enlarge, mounted
from store_samples import MAZE, POLE, assert_counts, everything, fragment

from sparring.errors import SparringError
from sparring.experience import Fragment
from sparring.store import Outcome, StoreFull
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.real

WRITER = textwrap.dedent(
    """
    import os, sys
    from collections import deque
    sys.path.insert(0, sys.argv[2])
    from store_samples import POLE, cut, fragment
    from sparring.store.sqlite import writer
    from sparring.store.sqlite import SqliteStore

    def tell(what, batch):
        os.write(1, f"{what} {' '.join(f.id for f in batch)}\\n".encode())  # whole lines, from any thread

    writer.CHECKPOINT = 300_000  # often, to be killed during one too
    store = SqliteStore(sys.argv[1])
    store.register(POLE)
    waiting = deque()
    for i in range(int(sys.argv[3])):
        batch = cut([30, 1, 200], player=f"p{i % 3}") + [fragment(40) for _ in range(i % 4)]
        tell("sent", batch)
        if i % 5 == 4:
            store.append(batch)
            tell("stored", batch)
        else:
            waiting.append(store.submit(batch))
            waiting[-1].add_done_callback(lambda future, batch=batch: future.result() and tell("stored", batch))
        if len(waiting) > 8:
            waiting.popleft().result()
    store.close()
    """
)


def start_writer(path: Path, batches: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent), str(batches)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_at_any_time_what_was_acknowledged_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    rng = random.Random(1)
    sent: set[str] = set()
    stored: set[str] = set()
    for _ in range(8):
        with start_writer(path, 10**6) as process:
            assert process.stdout is not None
            enough = len(stored) + rng.randrange(1, 400)
            for line in process.stdout:
                what, *ids = line.split()
                (stored if what == "stored" else sent).update(ids)
                if len(stored) >= enough:
                    process.kill()
        assert process.returncode == -9
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with closing(SqliteStore(path)) as store:
        found = [f.id for f in everything(store, limit=1000)]
        assert len(found) == len(set(found))
        assert stored <= set(found) <= sent
        assert_counts(store)
        episodes = {e.episode for e in store.episodes("pole", limit=10**6)}
        assert episodes == _complete(everything(store, limit=1000))


ERASER = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[2])
    from store_samples import POLE, MAZE, fragment
    from sparring.store.sqlite import erasing, writer
    from sparring.store.sqlite import SqliteStore

    writer.CLEANED, writer.GIVEN_BACK, erasing.ERASE = 8, 8, 50_000  # many small pieces, to be killed between any two
    store = SqliteStore(sys.argv[1])
    for turn in range(10**6):
        store.register(POLE)
        store.register(MAZE)
        name = f"gone-{turn}-of-the-test"
        store.append([fragment(200, (POLE, MAZE)[i % 2], player=("kept", name)[i % 3 > 0]) for i in range(60)])
        print("erasing", flush=True)
        store.erase("pole", name)
        store.erase("maze", name)
        if turn % 3 == 2:
            store.delete_game("pole")
    """
)


def test_killed_while_it_erases_the_file_is_whole_and_the_next_process_finishes(tmp_path: Path) -> None:
    path, rng = tmp_path / "store.db", random.Random(2)
    for _ in range(8):
        command = [sys.executable, "-c", ERASER, str(path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(1, 6)):
                assert process.stdout.readline() == "erasing\n"
            time.sleep(rng.random() * 0.2)  # anywhere in what follows
            process.kill()
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with closing(SqliteStore(path)) as store:
            for game in (POLE, MAZE):
                store.register(game)
                assert_counts(store, game)
                for player in store.players(game.name, 1000):
                    if player.player != "kept":
                        store.erase(game.name, player.player)
    with closing(SqliteStore(path)):
        deadline = time.monotonic() + 60
        while b"gone-" in b"".join(file.read_bytes() for file in tmp_path.iterdir()):
            assert time.monotonic() < deadline, "what was erased is still in the files"
            time.sleep(0.05)


def _complete(fragments: list[Fragment]) -> set[str]:
    steps: dict[str, int] = {}
    for f in fragments:
        steps[f.episode] = steps.get(f.episode, 0) + f.steps
    return {f.episode for f in fragments if f.ended and steps[f.episode] == f.start + f.steps}


def test_another_process_follows(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with start_writer(path, 300) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has registered its game
        seen: list[Fragment] = []
        episodes: list[str] = []
        cursor = last = 0
        with closing(SqliteStore(path, readonly=True)) as reader:
            while True:
                line = process.stdout.readline()  # keeps pace with the writer; nothing more once it has ended
                page = reader.tail("pole", cursor, 20)
                seen += page.fragments
                cursor = page.cursor
                for episode in reader.episodes("pole", last, 20):
                    episodes.append(episode.episode)
                    last = episode.cursor
                if not line and not page.fragments:
                    break
            assert seen == everything(reader, limit=1000)
            assert len({f.id for f in seen}) == len(seen) == 300 * 3 + sum(i % 4 for i in range(300))
            episodes += [e.episode for e in reader.episodes("pole", last)]
            assert len(set(episodes)) == len(episodes) == 300
    assert process.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "6m")


def fill(store: SqliteStore, sent: list[Fragment]) -> None:
    for _ in range(1000):
        batch = [fragment(200) for _ in range(20)]
        store.append(batch)
        sent += batch


def test_a_full_disk_keeps_nothing_of_what_it_refuses_and_recovers(small_disk: Path) -> None:
    sent: list[Fragment] = []
    batch = [fragment(10_000) for _ in range(10)]
    with closing(SqliteStore(small_disk / "store.db")) as store:
        store.register(POLE)
        with pytest.raises(StoreFull, match="no room left"):
            fill(store, sent)
        for future in [store.submit(batch) for _ in range(5)]:
            with pytest.raises(StoreFull):
                future.result(20)
        store.quarantine("pole", "eve", "id", "why")
        with pytest.raises(StoreFull):
            store.append(batch)
        assert everything(store) == sent
        assert_counts(store)

        enlarge(small_disk, "64m")
        assert store.append(batch) == [Outcome.STORED] * 10
        assert store.submit(batch).result(20) == [Outcome.DUPLICATE] * 10
        sent += batch
        assert everything(store) == sent
        assert_counts(store)
    with closing(SqliteStore(small_disk / "store.db")) as store:
        assert everything(store) == sent
        assert store.stats("pole").rejected == 1
        assert store.erase("pole", "ann") == len(sent)


def test_no_room_to_make_one(small_disk: Path) -> None:
    with (small_disk / "other").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)
    with pytest.raises(StoreFull, match="no room left"):
        SqliteStore(small_disk / "store.db")


def test_a_path_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SparringError, match="cannot be used"):
        SqliteStore(tmp_path / "file" / "store.db")


def test_another_process_that_opens_and_closes_the_store_takes_nothing_away(tmp_path: Path) -> None:
    """SQLite removes the log with the last connection: ours must count as one, also for other processes."""
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    store.register(POLE)
    look = f"from sparring.store.sqlite import SqliteStore; SqliteStore({str(path)!r}, readonly=True).close()"
    subprocess.run([sys.executable, "-c", look], check=True)
    fragments = [fragment() for _ in range(5)]
    store.append(fragments)
    count = (
        f"from sparring.store.sqlite import SqliteStore; s = SqliteStore({str(path)!r}, readonly=True);"
        f"print(s.stats({POLE.name!r}).fragments)"
    )
    done = subprocess.run([sys.executable, "-c", count], check=True, capture_output=True, text=True)
    assert done.stdout == "5\n"
    store.close()
