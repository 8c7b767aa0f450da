"""What `sparring up` prints in its terminal of each game's trainer."""

import os
import threading
from pathlib import Path

import msgspec
import pytest

from sparring import news
from sparring.api import TrainerStatus
from sparring.news import News, following


def write(folder: Path, state: str = "training", decision: str = "", game: str = "arena") -> None:
    path = folder / game / "status.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(msgspec.json.encode(TrainerStatus(game, "dqn", state, decision=decision)))
    os.utime(path, ns=(before + 10**9, before + 10**9))  # whatever the clock's resolution is


def test_a_failure_is_reported_once_with_its_reason(tmp_path: Path) -> None:
    heard = News(tmp_path)
    assert heard.look() == []
    write(tmp_path)
    assert heard.look() == []
    write(tmp_path, "failed: the loss is not finite")
    assert heard.look() == ["arena: training failed: the loss is not finite"]
    for state in ("failed: the loss is not finite", "waiting for play", "failed: the loss is not finite"):
        write(tmp_path, state)
        assert heard.look() == []
    write(tmp_path, "failed: no memory")
    assert heard.look() == ["arena: training failed: no memory"]
    write(tmp_path, "training")
    assert heard.look() == ["arena: training goes on"]
    write(tmp_path, "failed: no memory")
    assert heard.look() == ["arena: training failed: no memory"]


def test_decisions_are_reported_one_line_each(tmp_path: Path) -> None:
    write(tmp_path, decision="version 1 was promoted: the first version", game="old")
    heard = News(tmp_path)
    assert heard.look() == []  # of before
    write(tmp_path, decision="version 2 was rejected: worse")
    write(tmp_path, decision="back to version 1: version 3 collapsed", game="old")
    assert heard.look() == ["arena: version 2 was rejected: worse", "old: back to version 1: version 3 collapsed"]
    assert heard.look() == []


def test_a_torn_status_and_a_deleted_game_stop_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard = News(tmp_path)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "status.json").write_bytes(b"{")
    write(tmp_path, decision="version 2 was promoted: better")
    assert heard.look() == ["arena: version 2 was promoted: better"]
    assert "torn/status.json cannot be read" in caplog.text
    (tmp_path / "arena" / "status.json").unlink()
    assert heard.look() == []


def test_it_is_reported_while_the_platform_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "EVERY", 0.01)
    lines, first, last = list[str](), threading.Event(), threading.Event()

    def hear(line: str) -> None:
        lines.append(line)
        (last if first.is_set() else first).set()
        if not last.is_set():
            raise OSError("the terminal is gone for a moment")

    with following(tmp_path, hear):
        write(tmp_path, decision="version 2 was promoted: better")
        assert first.wait(20)
        write(tmp_path, "failed: no memory", decision="version 2 was promoted: better")
        assert last.wait(20)
    assert lines == ["arena: version 2 was promoted: better", "arena: training failed: no memory"]
