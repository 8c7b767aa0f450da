"""A trainer that hangs: stopped by SIGSTOP, which is as silent as any hang, under a real platform."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from servers import processes_with
from waiting import until

from sparring.api import TrainerStatus
from sparring.games import Box, Discrete, Game
from sparring.heartbeat import Heartbeat, SilenceLimits, Watch
from sparring.store.sqlite import SqliteStore

GAME = Game("larger", Box((2,)), Discrete(2))
UP = """
import logging, sys
from pathlib import Path
from sparring import platform
from sparring.heartbeat import SilenceLimits
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")  # as `sparring up` does
platform.up(Path(sys.argv[1]), port=0, limits=SilenceLimits(reported=float(sys.argv[2]), killed=float(sys.argv[3])))
"""


class Site:
    """The terminal of a platform, and its trainer."""

    def __init__(self, data: Path, terminal: Path) -> None:
        self.data, self.terminal = data, terminal

    def says(self, words: str) -> None:
        until(lambda: words in self.terminal.read_text(), self.terminal.read_text)

    def trainers(self) -> list[int]:
        return processes_with(str(self.data), "sparring.trainer.process")

    def trainer(self, but: int = 0) -> int:
        """The one that runs, once it had its first look at the games."""
        since = self.updated()

        def running() -> int:
            others = [pid for pid in self.trainers() if pid != but]
            return others[0] if others and self.updated() > since else 0

        return int(until(running, self.terminal.read_text))

    def updated(self) -> float:
        try:
            status = (self.data / "trainer" / GAME.name / "status.json").read_bytes()
        except FileNotFoundError:
            return 0.0
        return msgspec.json.decode(status, type=TrainerStatus).updated


@contextmanager
def platform(path: Path, reported: float, killed: float) -> Iterator[Site]:
    with closing(SqliteStore(path / "data" / "store.db")) as store:
        store.register(GAME)
    site = Site(path / "data", path / "terminal")
    with site.terminal.open("wb") as terminal:
        process = subprocess.Popen(
            [sys.executable, "-c", UP, str(site.data), str(reported), str(killed)], stderr=terminal
        )
    try:
        yield site
    finally:
        for pid in site.trainers():
            os.kill(pid, signal.SIGCONT)
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.real
def test_the_terminal_says_that_the_trainer_is_silent_and_that_it_is_back(tmp_path: Path) -> None:
    with platform(tmp_path, reported=4.0, killed=3600.0) as site:
        trainer = site.trainer()
        os.kill(trainer, signal.SIGSTOP)
        site.says(f"the trainer (process {trainer}) has given no sign of life for 4 s")
        os.kill(trainer, signal.SIGCONT)
        site.says("the trainer is back after")
        assert site.trainers() == [trainer]
        assert site.terminal.read_text().count("no sign of life") == 1


@pytest.mark.real
def test_a_trainer_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    with platform(tmp_path, reported=2.0, killed=4.0) as site:
        trainer = site.trainer()
        os.kill(trainer, signal.SIGSTOP)
        (site.data / "trainer.turn").write_text(f"0 {GAME.name}")
        site.says(f"the trainer (process {trainer}) gave no sign of life for 4 s: killed and replaced")
        assert site.trainer(but=trainer) != trainer  # which looks at the games, and says so
        assert trainer not in site.trainers()
        until(lambda: "hung in this game's turn" in (site.data / "trainer.log").read_text(), site.terminal.read_text)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sparring.heartbeat.time", clock)
    return clock


def silent_for(watch: Watch, clock: Clock, seconds: int) -> bool:
    for _ in range(seconds):
        clock.now += 1.0
        if watch.hung(7):
            return True
    return False


def test_a_process_has_longer_for_its_first_sign_of_life(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Watch(SilenceLimits(reported=5.0, killed=10.0, start=20.0))) as watch:
        assert not silent_for(watch, clock, 20)
        assert not caplog.records
        assert silent_for(watch, clock, 1)


def test_a_machine_that_slept_is_not_a_trainer_that_hangs(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Watch(SilenceLimits(reported=5.0, killed=10.0, start=20.0))) as watch:
        heart = Heartbeat(os.dup(watch.pipe))
        heart.beat()
        assert not watch.hung(7)
        clock.now += 3600.0
        assert not watch.hung(7)
        assert not caplog.records
        assert not silent_for(watch, clock, 9)
        assert silent_for(watch, clock, 1)
        assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_trainer_never_waits_for_a_platform_that_does_not_read(clock: Clock) -> None:
    with closing(Watch(SilenceLimits())) as watch:
        heart = Heartbeat(os.dup(watch.pipe))
        for _ in range(100_000):  # more than a pipe holds
            clock.now += 1.0
            heart.beat()
        assert not watch.hung(7)
