"""Ingest over HTTP on loopback: the gateway in a process of its own, load from another, requests of 50 fragments × 100
steps, every acknowledged fragment checked and on disk. Next to it, in the same run: the store's own append rate for the
same fragments, and a plain FastAPI + SQLite endpoint that takes JSON and keeps a row per record.

Runs alternate, each on a fresh directory; the tables show medians.
`python benchmarks/ingest.py [--rounds 5] [--dir DIR] [--sustain SECONDS]`
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from sparring.experience import Columns, Fragment, new_id, pack, wire
from sparring.games import Box, Discrete, Game

BATCH, STEPS, PLAYERS, PER_EPISODE = 50, 100, 20, 5
CONNECTIONS = 8
CASES = {  # game, requests to the gateway, requests to the endpoint with a row per record
    "4 floats": (Game("small", Box((4,)), Discrete(2)), 300, 12),
    "44 floats": (Game("large", Box((44,)), Box((17,), low=-1.0, high=1.0)), 60, 6),
}


def batches(game: Game, count: int) -> list[list[Fragment]]:
    """An upload is one player's; episodes are five fragments long. Observations wander, as a game's do."""
    rng = np.random.default_rng(0)
    columns = []
    for _ in range(BATCH):
        obs = np.cumsum(rng.normal(0, 0.05, (STEPS + 1, *game.observation.element.shape)), 0, dtype="<f4")
        if isinstance(game.action, Discrete):
            action = rng.integers(0, game.action.n, STEPS).astype("<i4")
        else:
            action = rng.uniform(-1, 1, (STEPS, *game.action.element.shape)).astype("<f4")
        columns.append(Columns(obs, action, np.ones(STEPS, "<f4"), rng.uniform(-1, 0, STEPS).astype("<f4")))
    return [[_fragment(game, columns[i], b, i) for i in range(BATCH)] for b in range(count)]


def _fragment(game: Game, columns: Columns, b: int, i: int) -> Fragment:
    return pack(
        game,
        columns,
        id=new_id(),
        player=f"player-{b % PLAYERS}",
        episode=f"{b}-{i // PER_EPISODE}",
        start=i % PER_EPISODE * STEPS,
        time=time.time(),
        terminated=i % PER_EPISODE == PER_EPISODE - 1,
        model="bot",
        version=b,
    )


# The load: a process that prepares its requests, says so, and sends them on a signal.


def load(options: argparse.Namespace) -> None:
    game, _, _ = CASES[options.case]
    requests = _bodies(options, game)
    address = ("127.0.0.1", options.port)
    connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    sys.stdin.readline()
    latencies: list[float] = []
    begin, lock, sent = time.perf_counter(), threading.Lock(), 0

    def send(connection: socket.socket) -> None:
        nonlocal sent
        while True:
            with lock:
                number, sent = sent, sent + 1
                if number >= options.count or (request := next(requests, None)) is None:
                    return
            due = time.perf_counter()
            if options.rate:  # latency counts from when the request was due, also when we are late
                due = begin + number / options.rate
                time.sleep(max(0.0, due - time.perf_counter()))
            _exchange(connection, request)
            latencies.append(time.perf_counter() - due)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(send, connections))
    print(json.dumps({"seconds": time.perf_counter() - begin, "latencies": latencies}), flush=True)


def _bodies(options: argparse.Namespace, game: Game) -> Iterator[list[bytes]]:
    """Requests as head and body. Many more than fit into memory are made of one by writing new ids into it."""
    path, kind, encoding = f"/v1/games/{game.name}/fragments", "application/msgpack", ""
    if options.kind == "rows":
        path, kind = "/records", "application/json"
        bodies = [_rows(game, batch) for batch in batches(game, options.count)]
    elif options.kind == "again":
        return _renewed(options, game, path)
    else:
        bodies = [wire.encode(batch) for batch in batches(game, options.count)]
    if options.kind == "gzip":
        encoding, bodies = "Content-Encoding: gzip\r\n", [zlib.compress(body, 1, 31) for body in bodies]
    return iter([[_head(path, kind, encoding, body), body] for body in bodies])


def _renewed(options: argparse.Namespace, game: Game, path: str) -> Iterator[list[bytes]]:
    batch = batches(game, 1)[0]
    template = wire.encode(batch)
    places = [template.index(f.id.encode()) for f in batch]
    head = _head(path, "application/msgpack", "", template)
    for _ in range(options.count):
        body = bytearray(template)
        for place in places:
            body[place : place + 32] = new_id().encode()
        yield [head, bytes(body)]


def _head(path: str, kind: str, encoding: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{encoding}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


def _rows(game: Game, batch: list[Fragment]) -> bytes:
    rows = []
    for f in batch:
        columns = f.columns(game)
        for t in range(f.steps):
            rows.append(
                {
                    "player": f.player,
                    "episode": f.episode,
                    "step": f.start + t,
                    "obs": columns.obs[t].tolist(),
                    "action": columns.action[t].tolist(),
                    "reward": float(columns.reward[t]),
                    "done": f.ended and t == f.steps - 1,
                    "model": f.model,
                    "version": f.version,
                }
            )
    return msgspec.json.encode(rows)


def _exchange(connection: socket.socket, request: list[bytes]) -> None:
    connection.sendall(request[0])
    connection.sendall(request[1])
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += _receive(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += _receive(connection)
    if not head.startswith(b"HTTP/1.1 200") or (b'"accepted"' in body and b'"accepted":%d,' % BATCH not in body):
        raise RuntimeError(f"refused: {answer[:500]!r}")


def _receive(connection: socket.socket) -> bytes:
    if not (data := connection.recv(65_536)):
        raise RuntimeError("the server hung up")
    return data


# The endpoint to compare with: what a first version of such a service looks like.


def rows(options: argparse.Namespace) -> None:
    import sqlite3

    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Record(BaseModel):
        player: str
        episode: str
        step: int
        obs: list[float]
        action: int | list[float]
        reward: float
        done: bool
        model: str | None = None
        version: int | None = None

    app = FastAPI()
    db = sqlite3.connect(options.dir / "rows.db", check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(
        "CREATE TABLE record (player TEXT, episode TEXT, step INTEGER, obs TEXT, action TEXT, reward REAL,"
        " done INTEGER, model TEXT, version INTEGER)"
    )
    lock = threading.Lock()

    @app.post("/records")
    def add(records: list[Record]) -> dict[str, int]:
        values = [
            (r.player, r.episode, r.step, json.dumps(r.obs), json.dumps(r.action), r.reward, r.done, r.model, r.version)
            for r in records
        ]
        with lock, db:
            db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return {"stored": len(values)}

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning")).run([listener])


# Measuring


@contextlib.contextmanager
def server(*command: str) -> Iterator[tuple[int, psutil.Process]]:
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().rpartition(":")[2]), psutil.Process(process.pid)
        finally:
            process.terminate()


def fire(port: int, case: str, kind: str, count: int, rate: float = 0.0, during: Callable[[], Any] = int) -> Any:
    """Runs the load; its seconds and latencies. `during` is called again and again meanwhile."""
    command = [sys.executable, __file__, "--role", "load", "--case", case, "--kind", kind]
    command += ["--port", str(port), "--count", str(count), "--rate", str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the load could not be prepared")
        process.stdin.write("go\n")
        process.stdin.flush()
        stop = threading.Event()
        watch = threading.Thread(target=lambda: [during() for _ in iter(lambda: stop.wait(0.5), True)])
        watch.start()
        result = process.stdout.readline()
        stop.set()
        watch.join()
        if not result:
            raise RuntimeError("the load failed")
        return json.loads(result)


@contextlib.contextmanager
def gateway(folder: Path, game: Game) -> Iterator[tuple[int, psutil.Process]]:
    import urllib3

    with server("-m", "sparring.gateway", "--data", str(folder), "--port", "0") as (port, process):
        url, kind = f"http://127.0.0.1:{port}/v1/games/{game.name}", {"Content-Type": "application/json"}
        if urllib3.request("PUT", url, body=game.to_json(), headers=kind).status != 201:
            raise RuntimeError("the game could not be registered")
        yield port, process


def append(path: Path, game: Game, count: int) -> float:
    """Steps/s of the store alone, with as many batches on their way as the load has connections."""
    from sparring.store.sqlite import SqliteStore

    work = batches(game, count)
    store = SqliteStore(path)
    store.register(game)
    begin, waiting = time.perf_counter(), deque()
    for batch in work:
        waiting.append(store.submit(batch))
        if len(waiting) == CONNECTIONS:
            waiting.popleft().result()
    for future in waiting:
        future.result()
    seconds = time.perf_counter() - begin
    store.close()
    return count * BATCH * STEPS / seconds


def intake(path: Path, game: Game) -> float:
    """Steps/s of a trainer that reads what the gateway stored into its replay window."""
    from sparring.algorithms.replay import Replay
    from sparring.store.sqlite import SqliteStore

    store, replay = SqliteStore(path, readonly=True), Replay(game, 1_000_000)
    begin, cursor, steps = time.perf_counter(), 0, 0
    while fragments := (page := store.tail(game.name, cursor)).fragments:
        replay.extend([f.columns(game) for f in fragments], [f.terminated for f in fragments])
        cursor, steps = page.cursor, steps + sum(f.steps for f in fragments)
    seconds = time.perf_counter() - begin
    store.close()
    return steps / seconds


def round_of(case: str, folder: Path) -> dict[str, float]:
    game, count, few = CASES[case]
    steps = BATCH * STEPS
    found = {"append": append(folder / "alone.db", game, count)}
    for kind in ("plain", "gzip"):
        with gateway(folder / kind, game) as (port, _):
            found[kind] = count * steps / fire(port, case, kind, count)["seconds"]
            if kind == "plain":
                half = fire(port, case, kind, count, rate=found[kind] / steps / 2)["latencies"]
                found["p50"], found["p99"] = np.quantile(half, [0.5, 0.99])
    found["intake"] = intake(folder / "plain" / "store.db", game)
    with server(__file__, "--role", "rows", "--dir", str(folder)) as (port, _):
        found["rows"] = few * steps / fire(port, case, "rows", few)["seconds"]
    return found


def sustain(case: str, folder: Path, seconds: float, rate: float) -> tuple[float, float, float]:
    """Resident MiB of the gateway: before, after, and the most in between, under as much load as it takes."""
    game, _, _ = CASES[case]
    with gateway(folder, game) as (port, process):
        fire(port, case, "again", 200)  # what it takes to have everything imported and every buffer made
        seen = [process.memory_info().rss]
        count = max(1, int(seconds * rate / BATCH / STEPS))
        fire(port, case, "again", count, during=lambda: seen.append(process.memory_info().rss))
        return seen[0] / 2**20, process.memory_info().rss / 2**20, max(seen) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--sustain", type=float, default=20.0, help="seconds of load to look at the memory; 0: none")
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--role", choices=["load", "rows"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        {"load": load, "rows": rows}[options.role](options)
        return
    cases = [options.case] if options.case else list(CASES)
    results: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                results[case].append(round_of(case, Path(folder)))
    report(results)
    if options.sustain:
        print("\n| observation | gateway's RSS, MiB: start | end | most |\n|---|---|---|---|")
        for case in cases:
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                rate = statistics.median(r["plain"] for r in results[case])
                start, end, most = sustain(case, Path(folder), options.sustain, rate)
                print(f"| {case} | {start:.0f} | {end:.0f} | {most:.0f} |", flush=True)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    names = {
        "append": "store alone",
        "plain": "gateway",
        "gzip": "gateway, gzip",
        "rows": "FastAPI, a row per record",
        "intake": "trainer's intake (tail → replay)",
    }
    print(f"{os.cpu_count()} cores, {CONNECTIONS} connections, {BATCH} × {STEPS} steps per request\n")
    print("| observation | what | steps/s | of the store alone | × row per record | of the gateway |")
    print("|---|---|---|---|---|---|")
    for case, rounds in results.items():
        for key, name in names.items():
            ratios = [statistics.median(r[key] / r[to] for r in rounds) for to in ("append", "rows", "plain")]
            rate = statistics.median(r[key] for r in rounds)
            print(f"| {case} | {name} | {rate:,.0f} | {ratios[0]:.2f} | {ratios[1]:.1f} | {ratios[2]:.2f} |")
    print("\n| observation | acknowledgement at half load: p50 | p99 |\n|---|---|---|")
    for case, rounds in results.items():
        p50, p99 = (statistics.median(r[key] for r in rounds) * 1000 for key in ("p50", "p99"))
        print(f"| {case} | {p50:.1f} ms | {p99:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
