"""`sparring up`, `play` and `demo` as a user types them: real processes, a real loop."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
from servers import processes_with
from waiting import until

from sparring.platform import _Child, _kept

pytestmark = pytest.mark.real
SPARRING = [sys.executable, "-m", "sparring.cli"]


def run(*args: str, timeout: float = 240, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*SPARRING, *args], capture_output=True, text=True, timeout=timeout, check=False, env=env)


@contextmanager
def platform(data: Path, *options: str) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    command = [*SPARRING, "up", "--data", str(data), "--port", "0", "--print-address", "--publish-every", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), url
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


def get(url: str, path: str) -> Any:
    response = urllib3.request("GET", url + path, timeout=10)
    assert response.status == 200, response.data
    return response.json()


@contextmanager
def players(url: str, game: str, *words: str) -> Iterator[None]:
    """Who play on while the block runs: how much play a first version needs is nobody's promise."""
    command = [*SPARRING, "play", game, "--server", url, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def settled(url: str) -> Any:
    """A game's totals once they have stopped moving: they are renewed once a second."""
    before = get(url, "/v1/games/CartPole-v1/stats")["stats"]
    for _ in range(20):
        time.sleep(1.5)
        now = get(url, "/v1/games/CartPole-v1/stats")["stats"]
        if now == before:
            return now
        before = now
    raise AssertionError("the totals keep moving though nobody plays")


def processes(data: Path) -> list[int]:
    """Of ours that name this data directory."""
    return processes_with(str(data), "sparring")


def test_the_demo_makes_bots_good_and_cleans_up(tmp_path: Path) -> None:
    data = tmp_path / "demo"
    done = run("demo", "--data", str(data), "--limit", "170", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    mean = re.search(r"the players average\s+([\d.]+)\s+over\s+20 episodes", done.stdout)
    assert mean is not None, done.stdout
    assert float(mean[1]) >= 475
    assert "http://127.0.0.1:" in done.stdout
    assert processes(data) == []
    reasons = [json.loads(path.read_bytes())["reason"] for path in (data / "registry").glob("**/moves/1.json")]
    assert len(reasons) == 1
    assert reasons[0].startswith("better than play at random in ")


def test_a_demo_that_cannot_reach_its_goal_says_so(tmp_path: Path) -> None:
    done = run("demo", "--target", "100000", "--limit", "8")
    assert done.returncode == 1
    assert "did not reach" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["sqlite", "cassandra"])
def test_up_goes_on_where_it_stopped(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    store = ["--store", request.getfixturevalue("cassandra_address")] if kind == "cassandra" else []

    def trained(url: str) -> Any:
        trainer = get(url, "/v1/games/CartPole-v1/stats")["trainer"]
        return trainer if trainer and trainer["updates"] > 0 else None

    with platform(tmp_path, *store) as (url, process):
        played = run("play", "CartPole-v1", "--server", url, "--players", "3", "--episodes", "40", "--seed", "1")
        assert played.returncode == 0, played.stderr
        assert "120 episodes" in played.stdout
        before = until(lambda: trained(url), "training")
        until(lambda: get(url, "/v1/games/CartPole-v1/stats")["latest"], "a version")
        stored = settled(url)
        for command, expected in (("games", "CartPole-v1"), ("players", "player-001"), ("models", "v1")):
            shown = run(command, *([] if command == "games" else ["CartPole-v1"]), "--server", url)
            assert shown.returncode == 0, shown.stderr
            assert expected in shown.stdout
        assert run("players", "CartPole-v1", "player-002", "--server", url).stdout.count("player-0") == 1
        assert run("players", "CartPole-v1", "nobody", "--server", url).returncode == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert processes(tmp_path) == []
    with platform(tmp_path, *store) as (url, _):
        again = get(url, "/v1/games/CartPole-v1/stats")
        assert again["stats"] == stored
        assert again["episodes"] == 120
        after = until(lambda: trained(url), "the trainer's return")
        assert after["updates"] >= before["updates"]  # not from the beginning
        assert after["steps"] <= stored["steps"]


def test_the_trainer_goes_when_the_platform_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    with platform(tmp_path) as (url, process):
        assert run("play", "CartPole-v1", "--server", url, "--episodes", "5").returncode == 0
        stored = settled(url)
        until(lambda: True if len(processes(tmp_path)) >= 2 else None, "the trainer")
        process.kill()
        process.wait(10)
    until(lambda: True if not processes(tmp_path) else None, "the trainer to notice", 60)
    with platform(tmp_path) as (url, _):
        assert get(url, "/v1/games/CartPole-v1/stats")["stats"] == stored
    with sqlite3.connect(tmp_path / "store.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_killed_trainer_is_replaced_and_goes_on(tmp_path: Path) -> None:
    def trainer_of(parent: int) -> int | None:
        return next((pid for pid in processes(tmp_path) if pid != parent), None)

    with platform(tmp_path) as (url, process):
        first = until(lambda: trainer_of(process.pid), "the trainer")
        os.kill(first, signal.SIGKILL)
        second = until(lambda: trainer_of(process.pid) if trainer_of(process.pid) != first else None, "another trainer")
        assert second != first
        with players(url, "CartPole-v1", "--seed", "2"):
            until(lambda: get(url, "/v1/games") or None, "the game")
            until(lambda: get(url, "/v1/games/CartPole-v1/stats")["latest"], "a version by the new trainer")


def test_a_trainer_that_cannot_be_started_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that keeps it must not die of it: the platform would stay up without a trainer, and say nothing."""
    log, ran = tmp_path / "child.log", tmp_path / "ran"
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('yes')"
    missing = tmp_path / "python"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparring.platform.RESTART_AFTER", 0.05)
        with _kept(_Child([str(missing), "-c", code, str(ran)], log, dict(os.environ))):
            until(lambda: "trying again" in caplog.text or None, "the first try")
            missing.symlink_to(sys.executable)
            until(lambda: ran.exists() or None, "another try")
    (tmp_path / "trainer.log").mkdir()
    refused = run("up", "--data", str(tmp_path), "--port", "0")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "trainer.log" in refused.stderr


def test_two_platforms_do_not_share_a_directory(tmp_path: Path) -> None:
    with platform(tmp_path, "--no-train") as (_, process):
        second = run("up", "--data", str(tmp_path), "--port", "0")
        assert second.returncode == 2
        assert str(process.pid) in second.stderr
        assert "Traceback" not in second.stderr


def test_continuous_actions_are_learned_too(tmp_path: Path) -> None:
    with platform(tmp_path) as (url, _):
        with players(url, "Pendulum-v1", "--players", "4", "--seed", "3"):
            until(lambda: get(url, "/v1/games") or None, "the game")
            until(lambda: get(url, "/v1/games/Pendulum-v1/stats")["latest"], "a version", 240)
        manifest = get(url, "/v1/games/Pendulum-v1/models/bot/latest")
        assert manifest["algorithm"] == "sac"
        body = json.dumps({"obs": [[1.0, 0.0, 0.0]]})
        answer = urllib3.request(
            "POST", f"{url}/v1/games/Pendulum-v1/act", body=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status == 200
        assert -2 <= answer.json()["action"][0][0] <= 2


def test_ctrl_c_ends_play_and_sends_what_was_recorded(tmp_path: Path) -> None:
    with platform(tmp_path, "--no-train") as (url, _):
        command = [*SPARRING, "play", "CartPole-v1", "--server", url, "--players", "2", "--rate", "100"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as player:
            until(lambda: get(url, "/v1/games") or None, "the game")
            until(lambda: get(url, "/v1/games/CartPole-v1/stats")["stats"]["steps"] or None, "records")
            player.send_signal(signal.SIGINT)
            output, errors = player.communicate(timeout=60)
        assert player.returncode == 0, errors
        assert errors == ""
        steps = re.search(r"([\d.]+)( k)? steps", output)
        assert steps is not None, output
        played = float(steps[1]) * (1000 if steps[2] else 1)

        def arrived() -> bool | None:  # figures are renewed once a second
            stored = get(url, "/v1/games/CartPole-v1/stats")["stats"]["steps"]
            return True if stored == pytest.approx(played, rel=0.01) else None

        until(arrived, f"{played} steps in the store", 20)


def test_play_without_a_server_says_what_to_do() -> None:
    done = run("play", "CartPole-v1", "--server", "http://127.0.0.1:9", "--episodes", "1")
    assert done.returncode == 1
    assert "sparring up" in done.stderr
    assert "Traceback" not in done.stderr
