"""What the client costs a game: `record` while uploads run, `bot.act` next to a bare ONNX Runtime call of the same
graph, actions over HTTP next to a bare request to the same server, mock players next to bare environments, the import
next to NumPy's. The gateway runs in a process of its own.

Rounds alternate; the tables show medians. `python benchmarks/client.py [--rounds 5]`
"""

import argparse
import contextlib
import json
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import urllib3

from sparring.client import Client
from sparring.client.bot import Bot, Loaded
from sparring.client.recorder import Recorder
from sparring.export.onnx import render
from sparring.games import Box, Discrete, Game, catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, Head, QValues, Squashed, param_shapes
from sparring.players.mock import play
from sparring.registry.registry import Registry

STEPS, HERTZ, EPISODE = 3000, 1000, 500
PLAYERS, EPISODES = 8, 60
GAMES = {
    "4 floats": Game("small", Box((4,)), Discrete(2)),
    "44 floats": Game("large", Box((44,)), Box((17,), low=-1.0, high=1.0)),
    "84×84×4 image": Game("image", Box((84, 84, 4), "uint8"), Discrete(4)),
}


@contextlib.contextmanager
def gateway(data: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "sparring.gateway", "--data", str(data), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def record_times(url: str, game: Game, folder: Path) -> list[float]:
    """Microseconds of each `record` of a game that runs at HERTZ."""
    rng = np.random.default_rng(0)
    obs = rng.normal(0, 50, (64, *game.observation.element.shape)).astype(game.observation.element.base)
    action: Any = 1 if isinstance(game.action, Discrete) else np.zeros(17, np.float32)
    taken, due = [], time.perf_counter()
    with Client(url, game, "bench", directory=folder, timeout=2.0) as client:
        for i in range(STEPS):
            began = time.perf_counter()
            client.record(obs[i % 64], action, 1.0, i % EPISODE == EPISODE - 1, False, obs[(i + 1) % 64])
            taken.append((time.perf_counter() - began) * 1e6)
            due += 1 / HERTZ
            time.sleep(max(0.0, due - time.perf_counter()))
        client.close(timeout=0.5)
    return taken


def policy(game: Game, head: Head) -> Policy:
    layers, rng = (Dense(64), Dense(64)), np.random.default_rng(0)
    shapes = param_shapes(game, layers, head)
    params = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    return Policy(game, layers, head, params, 0.1)


def median_times(calls: dict[str, Callable[[], Any]], count: int = 1000) -> dict[str, float]:
    """Microseconds; the calls take turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def act_times(game: Game, head: Head) -> dict[str, float]:
    data = render(policy(game, head))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    loaded = Loaded(data, game, "bot", 1)
    bot = Bot(game, Recorder(game, "bench", lambda cut: None), lambda: loaded)
    one = np.zeros(game.observation.element.shape, np.float32)
    batch, noise = one[None], loaded.noise(np.random.default_rng(0), 1)
    return median_times(
        {
            "run": lambda: session.run(["action"], {"obs": batch}),
            "act": lambda: bot.act(one),
            "run exploring": lambda: session.run(["sampled", "log_prob"], {"obs": batch, "noise": noise}),
            "act exploring": lambda: bot.act(one, explore=True),
        }
    )


def http_times(url: str) -> dict[str, float]:
    """Microseconds of requests over one connection that stays open, by turns."""
    pool, game = urllib3.connection_from_url(url, maxsize=1), catalog.load("CartPole-v1")

    def ask(method: str, path: str, body: bytes | None = None, expected: int = 200) -> None:
        answer = pool.request(method, path, body=body, headers={"content-type": "application/json"})
        assert answer.status == expected, answer.data

    def acting(rows: int, explore: bool = False) -> Callable[[], None]:
        body = json.dumps({"obs": [[0.01, -0.02, 0.03, -0.04]] * rows, "explore": explore}).encode()
        return lambda: ask("POST", f"/v1/games/{game.name}/act", body)

    pool.request("PUT", f"/v1/games/{game.name}", body=game.to_json(), headers={"content-type": "application/json"})
    calls = {"bare": lambda: ask("GET", "/nothing", expected=404), "1": acting(1), "1, exploring": acting(1, True)}
    return median_times({**calls, "64": acting(64)}, count=500)


def bare_rate() -> float:
    """Steps per CPU second of environments that nobody records, played at random."""
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    actions = np.random.default_rng(0).integers(0, 2, 20_000).tolist()
    env.reset(seed=0)
    began = time.process_time()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return len(actions) / (time.process_time() - began)


def play_rate(url: str, folder: Path) -> tuple[float, float]:
    """Steps per second and per CPU second of mock players that record and upload."""
    began = time.process_time()
    summary = play("CartPole-v1", url, players=PLAYERS, episodes=EPISODES, directory=folder, seed=0)
    assert summary.stats.uploaded > 0
    return summary.steps_per_s, summary.steps / (time.process_time() - began)


def import_time(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def table_record(url: str, folder: Path) -> None:
    print("\n| `record`, 1,000 steps/s, server | steps of | p50 µs | p99 µs | worst µs |\n|---|---|---|---|---|")
    with silence() as mute:
        for label, game in GAMES.items():
            for kind, where in (("answers", url), ("never answers", mute)):
                p50, p99, worst = np.percentile(record_times(where, game, folder), [50, 99, 100])
                print(f"| {kind} | {label} | {p50:.1f} | {p99:.1f} | {worst:.0f} |")


def table_act(rounds: int) -> None:
    print("\n| 64-64 policy | bare `session.run` µs | `bot.act` µs | ratio |\n|---|---|---|---|")
    for label, game, head in (("4 → 2", GAMES["4 floats"], QValues()), ("44 → 17", GAMES["44 floats"], Squashed())):
        found = [act_times(game, head) for _ in range(rounds)]
        middle = {name: statistics.median(times[name] for times in found) for name in found[0]}
        for suffix in ("", " exploring"):
            bare, ours = middle[f"run{suffix}"], middle[f"act{suffix}"]
            print(f"| {label}{suffix} | {bare:.1f} | {ours:.1f} | {ours / bare:.2f} |")


def table_http(url: str, rounds: int) -> None:
    print("\n| over HTTP, observations | bare request µs | `/act` µs | ratio |\n|---|---|---|---|")
    found = [http_times(url) for _ in range(rounds)]
    for rows in ("1", "1, exploring", "64"):
        bare, ours = (statistics.median(times[name] for times in found) for name in ("bare", rows))
        ratio = statistics.median(times[rows] / times["bare"] for times in found)
        print(f"| {rows} | {bare:.0f} | {ours:.0f} | {ratio:.2f} |")


def table_play(url: str, folder: Path, rounds: int) -> None:
    found = [(bare_rate(), *play_rate(url, folder)) for _ in range(rounds)]
    bare, wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"\n| CartPole, {PLAYERS} mock players in one process | steps/s |\n|---|---|")
    print(f"| bare environments, random actions, per CPU second | {bare:,.0f} |")
    print(f"| players with a 64-64 policy, recorded and uploaded, per CPU second | {cpu:,.0f} |")
    print(f"| the same per second | {wall:,.0f} |")


def table_import(rounds: int) -> None:
    found = [(import_time("numpy"), import_time("sparring.client")) for _ in range(rounds)]
    numpy, ours = (statistics.median(column) for column in zip(*found, strict=True))
    print("\n| import | seconds |\n|---|---|")
    print(f"| numpy | {numpy:.3f} |\n| sparring.client (imports numpy) | {ours:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.getLogger("sparring.client").setLevel(logging.ERROR)  # one of the servers is meant to be away
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Mock players with a network to run, not random ones.
        Registry(folder / "data" / "registry").publish(policy(catalog.load("CartPole-v1"), QValues()), algorithm="none")
        with gateway(folder / "data") as url:
            table_record(url, folder / "client")
            table_act(rounds)
            table_http(url, rounds)
            table_play(url, folder / "client", rounds)
            table_import(rounds)


if __name__ == "__main__":
    main()
