import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_server import GAME, FakeServer, Handler, Reply, problem, walk
from waiting import until

from sparring.client import Client, uploader
from sparring.client.spool import Spool
from sparring.errors import InputError
from sparring.experience import wire

Make = Callable[..., Client]


def play(client: Client, episodes: int, steps: int = 5) -> None:
    for seed in range(episodes):
        for step in walk(steps, seed):
            client.record(*step)


def posts(server: FakeServer) -> int:
    return sum(method == "POST" for method, _ in server.requests)


def test_what_is_recorded_arrives(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)
    play(client, episodes=120)
    assert client.flush()
    assert client.stats.uploaded == 120
    assert client.stats.queued == client.stats.queued_bytes == client.stats.spooled == 0
    assert server.steps() == 600
    assert max(map(len, server.batches)) <= 50
    assert len(server.batches) < 20  # fragments share requests
    assert {f.player for f in server.fragments.values()} == {"anna"}


def test_several_players_share_a_connection(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)
    for name in ("bob", "eve"):
        for step in walk(3):
            client.player(name).record(*step)
    assert client.player("bob") is client.player("bob")
    assert client.flush()
    assert {f.player for f in server.fragments.values()} == {"bob", "eve"}
    assert len({f.episode for f in server.fragments.values()}) == 2


def test_a_server_that_asks_for_fewer_uploads_gets_them(server: FakeServer, client_of: Make) -> None:
    def slowly(handler: Handler, body: bytes) -> Reply | bool:
        reply = server.route(handler, body)
        if handler.command != "POST":
            return False
        return Reply(200, msgspec.json.encode({**msgspec.json.decode(reply.body), "pace": 200.0}))

    server.fault = slowly
    client = client_of(server.url, max_age=0.05)
    play(client, 1)
    assert client.flush()
    before = posts(server)
    for steps in (5, 3):  # an episode, and the beginning of one
        for step in walk(steps, 1)[: min(steps, 4)]:
            client.record(*step)
    time.sleep(5 * uploader.TICK)
    assert posts(server) == before
    assert client.flush()  # who asks for it need not wait
    assert posts(server) == before + 1
    before = posts(server)
    play(client, uploader.MAX_FRAGMENTS + 10)  # and a request's worth does not wait either
    until(lambda: posts(server) > before)


def test_a_slow_game_is_sent_while_it_goes_on(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url, max_age=0.05)
    steps = walk(4)
    for step in steps[:2]:
        client.record(*step)
    until(lambda: server.steps() == 1)  # the newest one waits: its reward may still grow
    for step in steps[2:]:
        client.record(*step)
    until(lambda: server.steps() == 4)
    assert sorted(f.start for f in server.fragments.values())[:2] == [0, 1]


def test_a_reward_that_comes_late_arrives_with_the_last_step(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url, max_age=0.02)
    steps = walk(4)
    for step in steps[:3]:
        client.record(*step)
    until(lambda: server.steps() == 2)
    client.end_episode(reward=7.0)
    assert client.flush()
    last = max(server.fragments.values(), key=lambda f: f.start)
    assert (last.start, last.steps, last.terminated, last.truncated) == (2, 1, True, False)
    assert float(last.columns(GAME).reward[-1]) == pytest.approx(steps[2][2] + 7.0)
    client.record(*steps[0])
    assert client.flush()
    with pytest.raises(InputError, match="sent already"):
        client.end_episode(reward=1.0)


def test_leaving_the_with_block_sends_the_rest(server: FakeServer, tmp_path: Path) -> None:
    with Client(server.url, GAME, "anna", directory=tmp_path) as client:
        client.record(*walk(5)[0])
    (fragment,) = server.fragments.values()
    assert fragment.truncated


def fail_first(times: int, fault: Callable[[Handler, bytes], Reply | None]) -> Callable[[Handler, bytes], Any]:
    """Misbehaves for the first uploads, then stops."""
    left = [times]

    def answer(handler: Handler, body: bytes) -> Reply | bool | None:
        if handler.command != "POST" or left[0] == 0:
            return False
        left[0] -= 1
        return fault(handler, body)

    return answer


def drip(handler: Handler, body: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not handler.server.ending.wait(0.05):
        handler.wfile.write(b" ")


def flood(handler: Handler, body: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not handler.server.ending.is_set():
        handler.wfile.write(b" " * (1 << 20))


def nonsense(handler: Handler, body: bytes) -> None:
    handler.wfile.write(b"\x00\x01\x02 this is not HTTP\r\n\r\n")


FAULTS: dict[str, Callable[[Handler, bytes], Reply | None]] = {
    "an HTML page": lambda h, b: Reply(200, b"<html>hello</html>", {"Content-Type": "text/html"}),
    "an HTML 404": lambda h, b: Reply(404, b"<html>nginx</html>"),
    "a proxy's 403": lambda h, b: Reply(403, b"no"),
    "half a JSON": lambda h, b: Reply(200, b'{"accepted": 1,'),
    "another JSON": lambda h, b: Reply(200, b"[1, 2]"),
    "a redirect": lambda h, b: Reply(307, b"", {"Location": "http://127.0.0.1:9/"}),
    "an error": lambda h, b: Reply(500, b"Traceback"),
    "too many": lambda h, b: problem(429, "slow down", **{"Retry-After": "0"}),
    "disk full": lambda h, b: problem(507, "disk full", **{"Retry-After": "0.05"}),
    "an odd Retry-After": lambda h, b: problem(503, "busy", **{"Retry-After": "tomorrow"}),
    "hangs up": lambda h, b: None,
    "silence": lambda h, b: h.server.ending.wait() and None,
    "drips": drip,
    "floods": flood,
    "nonsense": nonsense,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_misbehaving_server_costs_no_data(server: FakeServer, client_of: Make, name: str) -> None:
    client = client_of(server.url, timeout=0.5)
    server.fault = fail_first(2, FAULTS[name])
    play(client, episodes=3)
    until(lambda: server.steps() == 15)
    until(lambda: client.stats.spooled == client.stats.queued == 0)
    stats = client.stats
    assert (stats.uploaded, stats.rejected, stats.dropped) == (3, 0, 0)
    assert not client.away


def test_retry_after_is_honoured(server: FakeServer, client_of: Make) -> None:
    times: list[float] = []

    def busy(handler: Handler, body: bytes) -> Reply:
        times.append(time.monotonic())
        return problem(503, "busy", **{"Retry-After": "1"})

    client = client_of(server.url)
    server.fault = fail_first(2, busy)
    play(client, episodes=1)
    until(lambda: times)
    assert client.flush()  # waits as well
    assert server.steps() == 5
    assert times[1] - times[0] >= 1.0


def test_patience_is_bounded(server: FakeServer, client_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "MAX_DELAY", 0.0)
    client = client_of(server.url)
    server.fault = fail_first(3, lambda h, b: problem(503, "away"))
    client._uploader._failures = 5000  # a long holiday without network
    play(client, episodes=1)
    until(lambda: server.steps() == 5)


def test_an_acknowledgement_that_got_lost_is_no_second_copy(server: FakeServer, client_of: Make) -> None:
    def deaf(handler: Handler, body: bytes) -> None:
        server.route(handler, body)

    client = client_of(server.url)
    server.fault = fail_first(2, deaf)
    play(client, episodes=3)
    until(lambda: client.stats.duplicates == 3)
    assert server.steps() == 15
    assert client.stats.uploaded == 0


def test_refused_fragments_are_dropped_reported_once_and_the_rest_goes_on(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(server.url)
    nan = np.full(4, np.nan, np.float32)
    for _ in range(3):
        play(client, episodes=1)
        client.record(nan, 0, 0.0, True, False, nan)
        assert client.flush()
    client.record(nan, 0, 0.0, True, False, nan)  # alone: the whole request is refused
    assert client.flush()
    assert (client.stats.uploaded, client.stats.rejected) == (3, 4)
    assert server.steps() == 15
    logged = [r.getMessage() for r in caplog.records if "for good" in r.getMessage()]
    assert logged == ["the server refuses play of 'Pong' for good: obs has NaN or infinite values"]


def test_a_batch_too_large_for_the_server_is_divided(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)

    def small(handler: Handler, body: bytes) -> Reply | bool:
        if handler.command != "POST" or len(wire.decode(wire.decompress(body, "gzip", 1 << 20))) <= 4:
            return False
        return problem(413, "at most 4 fragments")

    server.fault = small
    play(client, episodes=30)
    assert client.flush()
    assert server.steps() == 150
    assert client.stats.rejected == 0


def test_a_server_that_forgot_the_game_is_taught_again(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)
    server.games.clear()
    play(client, episodes=1)
    assert client.flush()
    assert server.games == {"Pong": GAME}
    assert server.steps() == 5


def test_a_game_taken_away_from_a_client_that_only_knows_its_name(server: FakeServer, client_of: Make) -> None:
    server.games["Pong"] = GAME
    client = client_of(server.url, "Pong")
    server.games.clear()
    play(client, episodes=2)
    assert client.flush()
    assert client.stats.rejected == 2
    assert server.games == {}


def test_a_batch_on_which_the_server_stumbles_does_not_block_the_others(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)
    poison: list[str] = []

    def stumble(handler: Handler, body: bytes) -> Reply | bool:
        if handler.command != "POST":
            return False
        ids = [f.id for f in wire.decode(wire.decompress(body, "gzip", 1 << 20))]
        poison.extend(ids if not poison else [])
        return problem(500, "a bug") if set(ids) & set(poison) else False

    server.fault = stumble
    play(client, episodes=1)
    until(lambda: poison)
    play(client, episodes=1)
    until(lambda: server.steps() == 5)
    assert client.stats.spooled == 1


def test_play_without_a_server_arrives_later_in_order(server: FakeServer, client_of: Make) -> None:
    server.fault = lambda handler, body: problem(503, "away") if handler.command == "POST" else False
    for run in range(3):  # three sessions of the game
        client = client_of(server.url)
        play(client, episodes=60)
        client.close(timeout=0.5)
        assert client.stats.spooled == 60 * (run + 1)
        assert client.stats.dropped == 0
    assert server.fragments == {}
    server.fault = None
    client = client_of(server.url)
    assert client.flush()
    assert server.steps() == 900
    order = [id for batch in server.batches for id in batch]
    times = [server.fragments[id].time for id in order]
    assert times == sorted(times)
    assert len(set(order)) == len(order) == 180
    assert list(Path(client.directory).glob("spool/*.batch")) == []


def test_a_server_that_comes_back(client_of: Make) -> None:
    first = FakeServer()
    client = client_of(first.url)
    play(client, episodes=2)
    assert client.flush()
    first.stop()
    play(client, episodes=3)
    until(lambda: client.away)
    second = FakeServer(first.server_port)
    try:
        until(lambda: second.steps() == 15)
        until(lambda: not client.away)
        assert client.stats.uploaded == 5
    finally:
        second.stop()


def test_closing_does_not_wait_for_a_server_that_hangs(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url, timeout=60.0)
    server.fault = lambda handler, body: handler.server.ending.wait() and None
    play(client, episodes=1)
    until(lambda: posts(server))  # it hangs in its first request
    play(client, episodes=4)
    client.close(timeout=0.1)
    assert client.stats.spooled == 5
    server.fault = None
    assert client_of(server.url).flush()
    assert server.steps() == 25


def test_what_waits_on_disk_is_bounded(server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    server.fault = lambda handler, body: problem(503, "away", **{"Retry-After": "600"})
    client = client_of(server.url, spool_bytes=40_000)
    for _ in range(10):
        play(client, episodes=50)
    until(lambda: client.stats.queued < 50)
    client.close(timeout=0.5)
    stats = client.stats
    assert stats.dropped > 0
    assert stats.dropped + stats.spooled == 500
    assert sum(path.stat().st_size for path in client.directory.glob("spool/*.batch")) <= 40_000
    assert sum("was dropped" in r.getMessage() for r in caplog.records) == 1
    server.fault = None
    assert client_of(server.url).flush()
    newest = max(f.time for f in server.fragments.values())
    assert len(server.fragments) == stats.spooled
    assert newest >= time.time() - 60  # the newest play survives, the oldest went


def test_memory_is_bounded_when_there_is_no_disk_either(server: FakeServer, client_of: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    server.fault = lambda handler, body: problem(503, "away")
    client = client_of(server.url, directory=tmp_path / "file", queue_bytes=30_000)
    play(client, episodes=200)
    until(lambda: client.away)
    assert client.stats.queued_bytes <= 30_000
    assert client.stats.dropped > 0
    server.fault = None
    assert client.flush(timeout=30)
    stats = client.stats
    assert stats.uploaded + stats.dropped == 200


def test_a_damaged_file_does_not_stop_the_others(server: FakeServer, client_of: Make) -> None:
    server.fault = lambda handler, body: problem(503, "away")
    for _ in range(2):
        client = client_of(server.url)
        play(client, episodes=1)
        client.close(timeout=0.3)
    first = min(client.directory.glob("spool/*.batch"))
    first.write_bytes(first.read_bytes()[:-20])
    server.fault = None
    client = client_of(server.url)
    assert client.flush()
    assert (client.stats.uploaded, client.stats.rejected) == (1, 1)


def test_only_one_sends_from_a_spool(tmp_path: Path) -> None:
    one, two = Spool(tmp_path / "s", 1 << 20), Spool(tmp_path / "s", 1 << 20)
    one.put(b"body", 1)
    with one.sending() as first, two.sending() as second:
        assert (first, second) == (True, False)
    with two.sending() as again:
        assert again
    two.scan()
    found = two.next()
    assert found is not None
    two.remove(found[0])
    one.scan()
    assert one.next() is None  # the other one sent it
    assert len(one) == 0


def test_two_clients_share_a_spool(server: FakeServer, client_of: Make) -> None:
    server.fault = lambda handler, body: problem(503, "away")
    clients = [client_of(server.url, player=name) for name in ("anna", "bob")]
    for client in clients:
        play(client, episodes=3)
    for client in clients:
        client.close(timeout=0.3)
    server.fault = None
    again = [client_of(server.url, player=name) for name in ("anna", "bob")]
    until(lambda: server.steps() == 30)
    until(lambda: sum(c.stats.uploaded + c.stats.duplicates for c in again) >= 6)
    assert sorted({f.player for f in server.fragments.values()}) == ["anna", "bob"]


SESSION = """
import sys, time
import numpy as np
from sparring.client import Client
from sparring.games import Box, Discrete, Game
client = Client(sys.argv[1], Game("Pong", Box((4,)), Discrete(3)), "anna", directory=sys.argv[2])
obs = np.zeros(4, np.float32)
for i in range(int(sys.argv[3])):
    client.record(obs, 0, float(i), i % 10 == 9, False, obs)
    if i % 100 == 0:
        time.sleep(0.001)
"""


def session(server: FakeServer, directory: Path, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SESSION, server.url, str(directory), str(steps)])


def test_a_game_that_just_ends_loses_nothing(server: FakeServer, tmp_path: Path) -> None:
    assert session(server, tmp_path, 1005).wait(60) == 0
    assert server.steps() == 1005


@pytest.mark.real
def test_a_killed_game_leaves_a_sound_spool(server: FakeServer, client_of: Make, tmp_path: Path) -> None:
    def absent(handler: Handler, body: bytes) -> Reply | bool:
        return problem(503, "away", **{"Retry-After": "0.1"}) if handler.command == "POST" else False

    for away in (True, False):
        for _ in range(5):
            server.fault = absent if away else None
            game = session(server, tmp_path, 10**9)
            seen = posts(server)
            until(lambda seen=seen: posts(server) >= seen + 2)
            os.kill(game.pid, signal.SIGKILL)
            game.wait()
    server.fault = None
    waiting = sum(int(path.stem.rpartition("-")[2]) for path in tmp_path.rglob("*.batch"))
    client = client_of(server.url, directory=tmp_path)
    assert waiting > 0
    assert client.flush(timeout=60)
    assert client.stats.rejected == 0
    assert client.stats.uploaded + client.stats.duplicates == waiting


def test_record_does_not_wait_for_the_network(server: FakeServer, client_of: Make) -> None:
    """While the uploader hangs in a request, `record` goes on: 20,000 steps are kept before the request is let go."""
    let_go = threading.Event()
    server.fault = lambda handler, body: False if let_go.wait(60) else None
    let_go.set()
    client = client_of(server.url, timeout=60.0)
    let_go.clear()
    play(client, episodes=1)
    until(lambda: posts(server))
    play(client, episodes=200, steps=100)
    assert client.stats.queued > 150
    let_go.set()
    assert client.flush(timeout=30)
    assert server.steps() == 20_005


def test_trouble_is_reported_once(server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = client_of(server.url)
    server.fault = fail_first(3, lambda h, b: problem(503, "away", **{"Retry-After": "0"}))
    play(client, episodes=1)
    until(lambda: client.stats.uploaded == 1)
    logged = [r.getMessage() for r in caplog.records if r.name == "sparring.client"]
    assert len(logged) == 2
    assert "answered 503: away. Play goes on; it is kept in" in logged[0]
    assert "is back" in logged[1]
