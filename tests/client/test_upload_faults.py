"""What must not stop the client's thread: damaged files, odd manifests, proxies' answers, errors of our own."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_server import GAME, FakeServer, Handler, Reply, policy_file, problem, walk
from waiting import until

from sparring.client import Acted, Client, uploader
from sparring.client.recorder import Recorder
from sparring.client.spool import Spool
from sparring.errors import InputError
from sparring.experience import wire
from sparring.games import Box, Discrete, Game

Make = Callable[..., Client]
OBS = np.zeros(4, np.float32)
NGINX = b"<html>\r\n<head><title>413 Request Entity Too Large</title></head>\r\n</html>\r\n"


def play(client: Client, episodes: int = 1, steps: int = 5, game: Game = GAME) -> None:
    for seed in range(episodes):
        for step in walk(steps, seed, game):
            client.record(*step)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "sparring.client" and r.levelno >= logging.WARNING]


def spooled(server: FakeServer, client_of: Make, clients: int = 3) -> list[Path]:
    """Files of as many clients that found nobody."""
    server.fault = lambda handler, body: problem(503, "away")
    for _ in range(clients):
        client = client_of(server.url)
        play(client)
        client.close(timeout=0.3)
    server.fault = None
    return sorted(client.directory.glob("spool/*.batch"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def of_another_type(path: Path) -> None:
    path.write_bytes(wire.compress(msgspec.msgpack.encode({"not": "a list"})))


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)),
    "of another type": of_another_type,
    "a directory": a_directory,
    "a pipe": a_pipe,
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_spool_file_costs_nothing_else(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    files = spooled(server, client_of)
    DAMAGE[name](files[1])
    caplog.clear()
    client = client_of(server.url)
    play(client)
    assert client.flush()
    assert server.steps() == 15
    play(client)
    assert client.flush()
    assert server.steps() == 20
    assert len(logged(caplog)) == 1


def test_a_file_that_cannot_be_removed_is_not_sent_again_and_again(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = spooled(server, client_of)
    unlink = Path.unlink

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path == files[0]:
            raise PermissionError(13, "Permission denied")
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", refuse)
    caplog.clear()
    client = client_of(server.url)
    play(client)
    until(lambda: server.steps() == 20)
    posts = sum(method == "POST" for method, _ in server.requests)
    play(client, episodes=3)
    until(lambda: server.steps() == 35)
    assert sum(files[0].name in message for message in logged(caplog)) == 1
    assert sum(method == "POST" for method, _ in server.requests) <= posts + 3
    monkeypatch.undo()


ODD = {
    "a number": 5,
    "empty": "",
    "short": "ab",
    "long": "a" * 65,
    "no hex": "Z" * 64,
    "a path": "../" * 8,
    "NUL": "\0",
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_sha256_in_a_manifest_stops_neither_play_nor_bots(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server.publish(GAME, policy_file(GAME), 1)
    client = client_of(server.url, refresh=0.02)
    bot = client.bot()
    manifest = msgspec.to_builtins(server.models["Pong"][0][0]) | {"version": 2}
    manifest["files"]["policy.onnx"]["sha256"] = ODD[name]
    odd = Reply(200, msgspec.json.encode(manifest), {"ETag": '"2"'})
    server.fault = lambda handler, body: odd if handler.path.endswith("/latest") else False
    play(client)
    until(lambda: any("no newer bot for now" in message for message in logged(caplog)))
    looks = len(server.requests)
    play(client)
    until(lambda: server.steps() == 10 and len(server.requests) > looks + 4)
    assert bot.act(OBS) in range(3)
    assert (bot.version, len(logged(caplog))) == (1, 1)
    server.fault = None
    server.publish(GAME, policy_file(GAME, 3), 3)
    until(lambda: bot.act(OBS) is not None and bot.version == 3)


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), KeyError("x"), InputError("no"), MemoryError()])
def test_an_unexpected_error_on_the_way_costs_no_data(
    server: FakeServer,
    client_of: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    client = client_of(server.url)
    play(client)
    assert client.flush()
    request, failing = client._transport.connection.request, threading.Event()

    def break_down(*args: Any, **kwargs: Any) -> Any:
        if failing.is_set():
            raise error
        return request(*args, **kwargs)

    monkeypatch.setattr(client._transport.connection, "request", break_down)
    failing.set()
    play(client, episodes=2)
    until(lambda: client.stats.spooled == 2)
    until(lambda: client._uploader._failures >= 3)
    failing.clear()
    play(client)
    assert client.flush(30)
    assert (server.steps(), client.stats.uploaded, client.stats.dropped) == (20, 4, 0)
    assert len(logged(caplog)) == 1
    assert type(error).__name__ in logged(caplog)[0]


def test_an_unexpected_error_in_the_bots_refresh_leaves_the_uploads_alone(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(server.url, refresh=0.01)
    client.bot()

    def break_down(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(client._source, "latest", break_down)
    until(lambda: logged(caplog))
    monkeypatch.setattr(client, "_tick", break_down)
    monkeypatch.setattr(client._uploader, "_tick", break_down)
    until(lambda: len(logged(caplog)) == 2)
    play(client)
    assert client.flush()
    assert server.steps() == 5
    assert "no newer bot for now: ZeroDivisionError: oops" in logged(caplog)[0]


def test_a_fragment_that_cannot_be_packed_is_dropped_alone(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(server.url)
    play(client)
    recorder = client.player("bob")
    for step in walk(2):
        recorder.record(*step)
    client._uploader._queue[-1].reward.append("nonsense")  # type: ignore[arg-type]
    play(client)
    assert client.flush()
    assert (server.steps(), client.stats.dropped, client.stats.queued_bytes) == (10, 1, 0)
    assert len(logged(caplog)) == 1
    assert "cannot be packed: ValueError" in logged(caplog)[0]


def test_who_acted_is_checked_when_it_is_recorded(server: FakeServer, client_of: Make) -> None:
    """NumPy's numbers were accepted, and ended the thread that sends."""
    client = client_of(server.url)
    client.record(OBS, 0, 1.0, True, False, OBS, acted=Acted("bot", np.int64(7), np.float32(-0.5)))  # type: ignore[arg-type]
    assert client.flush()
    (fragment,) = server.fragments.values()
    assert (fragment.model, fragment.version) == ("bot", 7)
    recorder = Recorder(GAME, "anna", lambda cut: None)
    actors: tuple[Any, ...] = (("bot", "x"), ("bot", 1.5), (5, 1), ("\ud800", 1), ("bot", 1, "x"), ("bot", 1 << 60))
    for wrong in (*(Acted(*actor) for actor in actors), ("bot", 1, None), "bot", 7):
        with pytest.raises(InputError, match="acted: "):
            recorder.record(OBS, 0, 1.0, False, False, OBS, acted=wrong)
    assert not recorder.in_episode


WIDE = Game("Wide", Box((4000,)), Discrete(3))


def wide(client: Client, steps: int, seed: int) -> None:
    """One fragment of about `steps` × 15 kB that compression leaves as they are."""
    obs = np.random.default_rng(seed).standard_normal((steps + 1, 4000)).astype(np.float32)
    for i in range(steps):
        client.record(obs[i], 0, 1.0, i == steps - 1, False, obs[i + 1])


def limited(size: int, reply: Callable[[], Reply]) -> Callable[[Handler, bytes], Reply | bool]:
    return lambda handler, body: reply() if handler.command == "POST" and len(body) > size else False


REPLIES: dict[str, Callable[[], Reply]] = {
    "nginx's": lambda: Reply(413, NGINX, {"Content-Type": "text/html"}),
    "an empty one": lambda: Reply(413),
    "Sparring's": lambda: problem(413, "too much"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_proxys_413_is_halved_and_one_that_stays_too_large_is_set_aside(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server.fault = limited(200_000, REPLIES[name])
    client = client_of(server.url, WIDE)
    for seed in range(12):
        wide(client, 5, seed)  # 90 kB each
    wide(client, 40, 12)  # 650 kB: no half of it is a fragment
    for seed in range(13, 20):
        wide(client, 5, seed)
    until(lambda: len(server.fragments) == 19)
    wide(client, 5, 20)
    until(lambda: len(server.fragments) == 20)
    until(lambda: client.stats.spooled == 1 and client.stats.queued == 0)
    assert (client.stats.uploaded, client.stats.rejected, client.stats.dropped) == (20, 0, 0)
    assert len(logged(caplog)) == 1
    assert "too large" in logged(caplog)[0]
    assert not client.away
    server.fault = None  # somebody raised the limit
    assert client.flush()
    assert len(server.fragments) == 21


def test_spooled_files_are_halved_in_their_place(server: FakeServer, client_of: Make) -> None:
    server.fault = lambda handler, body: problem(503, "away", **{"Retry-After": "600"})
    client = client_of(server.url, WIDE)
    for seed in range(7):
        wide(client, 5, seed)
    client.close(timeout=0.2)
    client = client_of(server.url, WIDE, player="bob")
    wide(client, 5, 7)
    client.close(timeout=0.2)
    assert len(list(client.directory.glob("spool/*.batch"))) == 2
    server.fault = limited(200_000, REPLIES["nginx's"])
    client = client_of(server.url, WIDE)
    assert client.flush()
    times = [f.time for f in server.fragments.values()]
    assert len(times) == 8
    assert times == sorted(times)
    assert (client.stats.uploaded, client.stats.duplicates) == (8, 0)


def test_a_413_without_a_disk_blocks_nothing_else(server: FakeServer, client_of: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    server.fault = limited(200_000, REPLIES["nginx's"])
    client = client_of(server.url, WIDE, directory=tmp_path / "file")
    wide(client, 40, 0)
    for seed in range(1, 5):
        wide(client, 5, seed)
    until(lambda: len(server.fragments) == 4)
    until(lambda: client.stats.queued == 1)
    assert client.stats.dropped == 0
    server.fault = None
    assert client.flush()


def hang_up(handler: Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


POISONED: dict[str, Callable[[Handler], Reply | None]] = {
    "an HTML 404": lambda h: Reply(404, b"<html>nginx</html>"),
    "a firewall's 403": lambda h: Reply(403, b"blocked"),
    "a 502": lambda h: Reply(502, b"<html>bad gateway</html>"),
    "a 503": lambda h: problem(503, "busy"),
    "a short Retry-After": lambda h: problem(429, "slow down", **{"Retry-After": "0.05"}),
    "a redirect": lambda h: Reply(307, b"", {"Location": "http://127.0.0.1:9/"}),
    "an HTML page": lambda h: Reply(200, b"<html>hello</html>"),
    "hangs up": hang_up,
}


@pytest.mark.parametrize("name", POISONED)
def test_a_file_that_fails_again_and_again_lets_the_others_go_first(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Whatever the answer is that only this one gets."""
    client = client_of(server.url)
    poison: list[str] = []

    def stumble(handler: Handler, body: bytes) -> Reply | bool | None:
        if handler.command != "POST":
            return False
        ids = [f.id for f in wire.decode(wire.decompress(body, "gzip", 1 << 20))]
        poison.extend(ids if not poison else [])
        return POISONED[name](handler) if set(ids) & set(poison) else False

    server.fault = stumble
    play(client)
    until(lambda: poison)
    for episodes in range(1, 4):
        play(client)
        until(lambda episodes=episodes: server.steps() == 5 * episodes)
    until(lambda: (client.stats.spooled, client.stats.queued) == (1, 0))
    assert not client.away
    assert len(logged(caplog)) == 1
    server.fault = None
    assert client.flush()
    assert server.steps() == 20


@pytest.mark.parametrize(("commands", "aside"), [(("GET", "PUT", "POST"), 1000.0), (("POST",), 0.1)])
def test_after_an_outage_all_files_are_sent(
    server: FakeServer, client_of: Make, monkeypatch: pytest.MonkeyPatch, commands: tuple[str, ...], aside: float
) -> None:
    """Each of them failed often enough to be set aside. Nobody plays meanwhile, so nothing else tells of the end."""
    monkeypatch.setattr(uploader, "MAX_DELAY", 0.02)
    monkeypatch.setattr(uploader, "ASIDE", aside)
    files = spooled(server, client_of)
    server.fault = lambda handler, body: problem(503, "away") if handler.command in commands else False
    client = client_of(server.url)
    until(lambda: len(client._uploader._spool._aside) == len(files))
    server.fault = None
    until(lambda: server.steps() == 5 * len(files))
    until(lambda: client.stats.spooled == 0)


def test_a_spooled_file_and_its_name_are_on_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine must not take the name away: its directory, and those made for it, are synced after it."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        fsync(fd)
        done.append(os.readlink(f"/proc/self/fd/{fd}"))

    def note_replace(part: Path, path: Path) -> None:
        replace(part, path)
        done.append(f"named {path}")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    directory = tmp_path / "client" / "spool"
    box = Spool(directory, 1 << 20)
    box.put(b"body", 1)
    (path,) = directory.iterdir()
    assert fnmatch(done.pop(0), f"{path}.{os.getpid()}-????????.part")
    assert done == [
        f"named {path}",
        str(directory),
        str(tmp_path / "client"),
        str(tmp_path),
    ]
    done.clear()
    box.put(b"body", 1)
    assert len(done) == 3
    assert done[-1] == str(directory)
