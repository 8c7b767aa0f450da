"""The store against SQLite itself: durable appends in batches of 50 fragments × 100 steps, next to a bare transaction
of the same bytes in the same batches, as durable (WAL, synchronous=FULL) and otherwise with SQLite's defaults; and how
fast a trainer can take it in again (`tail`).

Runs alternate, each on a fresh file; the table shows medians. `python benchmarks/store.py [--rounds 7] [--dir DIR]`
"""

import argparse
import os
import sqlite3
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from sparring.experience import Fragment, new_id, wire
from sparring.games import Box, Discrete, Game
from sparring.store import Outcome
from sparring.store.sqlite import SqliteStore
from sparring.store.sqlite.tables import PAGE
from sparring.store.sqlite.writer import CHECKPOINT

BATCH, STEPS, PLAYERS, PER_EPISODE = 50, 100, 20, 5
CASES = {
    "4 floats": (Game("small", Box((4,)), Discrete(2)), 1_500),
    "44 floats": (Game("large", Box((44,)), Box((17,), low=-1.0, high=1.0)), 150),
}


def uploads(game: Game, count: int) -> list[bytes]:
    """Each is one player's, as it comes over the wire; episodes are five fragments long."""
    begin = time.time()
    columns = [
        (os.urandom((STEPS + 1) * game.observation.element.itemsize), os.urandom(STEPS * game.action.element.itemsize))
        for _ in range(BATCH)
    ]
    floats = np.linspace(0, 1, STEPS, dtype="<f4").tobytes()
    return [
        wire.encode(
            [
                Fragment(
                    id=new_id(begin + (b * BATCH + i) / 1000),  # clients make them as time goes by
                    game=game.name,
                    schema=game.schema,
                    player=f"player-{b % PLAYERS}",
                    episode=f"{b}-{i // PER_EPISODE}",
                    start=i % PER_EPISODE * STEPS,
                    time=begin,
                    steps=STEPS,
                    obs=obs,
                    action=action,
                    reward=floats,
                    log_prob=floats,
                    terminated=i % PER_EPISODE == PER_EPISODE - 1,
                    model="bot",
                    version=b // 50,
                )
                for i, (obs, action) in enumerate(columns)
            ]
        )
        for b in range(count)
    ]


def bare(path: Path, game: Game, work: list[bytes], *pragmas: str) -> float:
    """Seconds SQLite needs for the same columns, one blob to a fragment, in one table with an integer key."""
    db = sqlite3.connect(path, isolation_level=None)
    for pragma in (*pragmas, "journal_mode = WAL", "synchronous = FULL"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, blob BLOB)")
    seconds = 0.0
    for upload in work:
        rows = [(f.obs + f.action + f.reward + (f.log_prob or b""),) for f in wire.decode(upload)]
        begin = time.perf_counter()
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO t (blob) VALUES (?)", rows)
        db.execute("COMMIT")
        seconds += time.perf_counter() - begin
    db.close()
    return seconds


def tuned(path: Path, game: Game, work: list[bytes]) -> float:
    """The same with the store's page size and checkpoints: what SQLite can do at best for such rows."""
    return bare(path, game, work, f"page_size = {PAGE}", f"wal_autocheckpoint = {CHECKPOINT // PAGE}")


def append(path: Path, game: Game, work: list[bytes]) -> float:
    """One caller who waits for every acknowledgement."""
    store = SqliteStore(path)
    store.register(game)
    seconds = 0.0
    for upload in work:
        fragments = wire.decode(upload)
        begin = time.perf_counter()
        store.append(fragments)
        seconds += time.perf_counter() - begin
    store.close()
    return seconds


def submit(path: Path, game: Game, work: list[bytes]) -> float:
    """A gateway: eight uploads on their way at any time; decoding them is in the time."""
    store = SqliteStore(path)
    store.register(game)
    begin = time.perf_counter()
    waiting: deque[Future[list[Outcome]]] = deque()
    for upload in work:
        waiting.append(store.submit(wire.decode(upload)))
        if len(waiting) == 8:
            waiting.popleft().result()
    for future in waiting:
        future.result()
    seconds = time.perf_counter() - begin
    store.close()
    return seconds


def tail(path: Path, game: Game, work: list[bytes]) -> float:
    """A trainer reads what `submit` left."""
    store = SqliteStore(path, readonly=True)
    begin = time.perf_counter()
    cursor, count = 0, 0
    while fragments := (page := store.tail(game.name, cursor)).fragments:
        cursor, count = page.cursor, count + len(fragments)
    seconds = time.perf_counter() - begin
    store.close()
    if count != BATCH * len(work):
        raise RuntimeError(f"tail gave {count} of {BATCH * len(work)} fragments")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=".", help="on the disk to measure; a temporary directory is made in it")
    options = parser.parse_args()
    print("| observation | what | fragments/s | steps/s | MB/s | of bare SQLite |")
    print("|---|---|---|---|---|---|")
    for name, (game, count) in CASES.items():
        work = uploads(game, count)
        sizes = [len(f.obs) + len(f.action) + len(f.reward) + len(f.log_prob or b"") for f in wire.decode(work[0])]
        seconds: dict[str, list[float]] = {
            "bare SQLite": [],
            "bare SQLite, our page size": [],
            "append": [],
            "submit, 8 in flight": [],
            "tail": [],
        }
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                seconds["bare SQLite"].append(bare(Path(folder, "bare.db"), game, work))
                seconds["bare SQLite, our page size"].append(tuned(Path(folder, "tuned.db"), game, work))
                seconds["append"].append(append(Path(folder, "append.db"), game, work))
                seconds["submit, 8 in flight"].append(submit(Path(folder, "submit.db"), game, work))
                seconds["tail"].append(tail(Path(folder, "submit.db"), game, work))
        for what, times in seconds.items():
            ratio = statistics.median(b / t for b, t in zip(seconds["bare SQLite"], times, strict=True))
            rate = BATCH * count / statistics.median(times)
            print(f"| {name} | {what} | {rate:,.0f} | {rate * STEPS:,.0f} | ", end="")
            print(f"{sum(sizes) * count / 1e6 / statistics.median(times):,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
