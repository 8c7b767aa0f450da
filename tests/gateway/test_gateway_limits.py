"""What strangers send costs no more than what it says, and never what belongs to others: memory, room, time."""

import asyncio
import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Reply, Setup, fragment, row
from gateway_process import DEADLINE, ask, gateway, port_of, problem_in
from starlette.requests import Request
from waiting import until

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, wire
from sparring.games import Box, Dict, Discrete, Game
from sparring.gateway import endpoint
from sparring.gateway.app import background, create_app
from sparring.gateway.routes import fragments as ingest
from sparring.gateway.routes import games
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.registry import Registry
from sparring.store import declarations
from sparring.store.memory import MemoryStore
from sparring.store.protocol import Outcome, StoreAway, StoreBusy, StoreFull

UPLOAD = f"/v1/games/{GAME.name}/fragments"
ACT = f"/v1/games/{GAME.name}/act"


def peak(pid: int) -> int:
    """The most bytes that the process ever had in memory."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


LONG = "x" * 60_000
MANY = 2000  # rows: as an array of text, each of them as wide as LONG
NASTY = {
    "rows of text": [[LONG, *["y"] * 3]] + [["y"] * 4] * MANY,
    "text for rows": [LONG] + ["y"] * 4 * MANY,
    "text in lists too deep": [[0, 0, 0, [LONG] * 4]] * 2,
    "empty lists": [[]] * 4000,
}


@pytest.mark.real
@pytest.mark.parametrize("what", NASTY)
def test_a_small_json_body_takes_little_memory(tmp_path: Path, what: str, random_policy: Callable[..., Policy]) -> None:
    """A byte of JSON takes some tens in Python lists; NumPy must not make more of it."""
    Registry(tmp_path / "registry").publish(random_policy(GAME, (Dense(4),), QValues()), algorithm="dqn")
    upload, act = json.dumps([row(obs=NASTY[what])]).encode(), json.dumps({"obs": NASTY[what]}).encode()
    with gateway(tmp_path) as (port, process):
        assert ask(port, "POST", UPLOAD, json.dumps([row()]).encode(), JSON)[0] == 200
        assert ask(port, "POST", ACT, json.dumps({"obs": [[0, 0, 0, 0]]}).encode(), JSON)[0] == 200
        before = peak(process.pid)
        assert ask(port, "POST", UPLOAD, upload, JSON)[0] == 422
        assert peak(process.pid) - before < 50 * len(upload) + (16 << 20)
        before = peak(process.pid)
        assert ask(port, "POST", ACT, act, JSON)[0] == 422
        assert peak(process.pid) - before < 50 * len(upload) + (16 << 20)


def test_rows_are_counted_before_room_is_made_for_them(api: Api) -> None:
    """Half a million empty objects, where each would be 3 MiB."""
    game = Game("Wide", Dict({"view": Box((1024, 1024, 3), "uint8"), "gear": Discrete(2)}), Discrete(2))
    assert api.register(game).status == 201
    body = [row(schema=game.schema, obs=[{}] * 500_000)]
    reply = api.request("POST", "/v1/games/Wide/fragments", json.dumps(body, separators=(",", ":")).encode(), JSON)
    assert (reply.status, "send fewer" in reply.json()["detail"]) == (422, True)


def test_too_many_json_fragments_are_refused_before_they_are_looked_at(api: Api) -> None:
    reply = api.request("POST", UPLOAD, json.dumps([row(obs=[])] * 1001).encode(), JSON)
    assert (reply.status, "at most 1000" in reply.json()["detail"]) == (413, True)


class Failing(MemoryStore):
    """A store whose next write fails like this."""

    error: Exception | None = None

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        if self.error is None:
            return super().submit(fragments)
        future: Future[list[Outcome]] = Future()
        future.set_exception(self.error)
        return future


@pytest.fixture
def failing(setup: Setup) -> Iterator[Api]:
    setup.store = Failing()
    setup.store.register(GAME)
    api = Api(create_app(setup.store, setup.registry))
    yield api
    api.close()


@pytest.mark.parametrize(("error", "status"), [(InputError("not this one"), 422), (StoreBusy("too much"), 503)])
def test_healthz_stays_ready_after_a_refused_upload(failing: Api, setup: Setup, error: Exception, status: int) -> None:
    setup.store.error = error
    assert failing.request("POST", UPLOAD, wire.encode([fragment()]), MSGPACK).status == status
    assert failing.get("/healthz").status == 200


@pytest.mark.parametrize(
    ("error", "status"), [(StoreFull("no room"), 507), (StoreAway("gone"), 503), (SparringError("closed"), 500)]
)
def test_healthz_recovers_on_a_quiet_platform(
    failing: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    """Nobody uploads to an instance that its load balancer calls unready: it has to come back by itself."""
    setup.store.error = error
    assert failing.request("POST", UPLOAD, wire.encode([fragment()]), MSGPACK).status == status
    refused = failing.get("/healthz")
    assert (refused.status, str(error) in refused.json()["detail"]) == (503, True)
    monkeypatch.setattr(ingest, "FAILURE_EXPIRES", -1.0)
    assert failing.get("/healthz").status == 200


def head(size: int) -> bytes:
    return f"POST {UPLOAD} HTTP/1.1\r\nContent-Type: application/msgpack\r\nContent-Length: {size}\r\n\r\n".encode()


def in_flight(port: int) -> int:
    return int(float(ask(port, "GET", "/metrics")[1].partition(b"\nsparring_ingest_in_flight_bytes ")[2].split()[0]))


@pytest.fixture
def port(setup: Setup) -> Iterator[int]:
    setup.store.register(GAME)
    with background(create_app(setup.store, setup.registry)) as url:
        yield port_of(url)


def upload_from(address: str, port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE, source_address=(address, 0))
    with contextlib.closing(connection):
        connection.request("POST", UPLOAD, body, MSGPACK)
        return connection.getresponse().status


@pytest.mark.real
def test_slow_connections_of_one_address_deny_nobody_else(port: int) -> None:
    size = 8 << 20
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
            before = in_flight(port)
            slow.sendall(head(size) + bytes(size - 1))  # and then nothing
            until(lambda s=slow, b=before: in_flight(port) >= b + size - 1 or select.select([s], [], [], 0)[0])
        held = in_flight(port)
        assert held > 24 << 20, "this is no attack"
        body = wire.encode([fragment(9000) for _ in range(10)])
        assert len(body) > 1 << 20
        assert upload_from("127.0.0.2", port, body) == 200
        assert in_flight(port) == held
    until(lambda: in_flight(port) == 0)
    assert upload_from("127.0.0.1", port, wire.encode([fragment()])) == 200


@pytest.mark.real
def test_many_players_behind_one_address_upload_at_once(port: int) -> None:
    bodies = [wire.encode([fragment(9000, player=f"p{i}")]) for i in range(100)]
    assert sum(map(len, bodies)) > 16 << 20  # more than one address's share of what is incomplete
    with contextlib.ExitStack() as stack:
        players = []
        for body in bodies:
            player = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
            player.sendall(head(len(body)) + body[:-1])
            players.append(player)
        until(lambda: in_flight(port) == sum(map(len, bodies)) - 100)
        for player, body in zip(players, bodies, strict=True):
            player.sendall(body[-1:])
            assert player.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.real
def test_a_body_that_begins_fast_and_then_drips_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PACE", 0.5)
    monkeypatch.setattr(endpoint, "BODY_TIMEOUT", 10 * DEADLINE)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
        connection.sendall(head(2 << 20) + bytes(1 << 20))
        end = time.monotonic() + DEADLINE
        while not select.select([connection], [], [], 0.05)[0]:
            assert time.monotonic() < end, "it is waited for"
            connection.sendall(b"x")
        status, problem = problem_in(connection.recv(65_536))
        assert (status, "too slowly" in problem["detail"]) == (408, True)
    until(lambda: in_flight(port) == 0)


@pytest.mark.real
def test_a_body_that_comes_at_a_steady_pace_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PACE", 5.0)
    body = wire.encode([fragment(9000)])
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
        connection.sendall(head(len(body)))
        for at in range(0, len(body), 10_000):
            connection.sendall(body[at : at + 10_000])
            until(lambda n=at: in_flight(port) >= min(n + 10_000, len(body) - 1) or n + 10_000 >= len(body))
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("address", "same"),
    [("2001:db8::1", "2001:db8::ffff:1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::2%eth0")],
)
def test_the_addresses_of_one_customer_share_one_share(address: str, same: str) -> None:
    budget = endpoint.Budget(100)

    def add(host: str) -> None:
        request = Request({"type": "http", "client": (host, 1), "headers": []})
        budget.hold(request).add(30)

    add(address)
    add("192.0.2.7")
    with pytest.raises(endpoint.HTTPProblem, match="your address"):
        add(same)
    add("192.0.2.8")


def tiny(name: str) -> Game:
    return Game(name, Box((1,)), Discrete(2))


def test_a_platform_takes_so_many_games_and_no_more(api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "MAX_GAMES", 3)
    assert [api.register(tiny(name)).status for name in "ABCA"] == [201, 201, 507, 200]
    assert "3 games" in api.register(tiny("C")).json()["detail"]
    assert {game.name for game in setup.store.games()} == {GAME.name, "A", "B"}
    assert api.request("DELETE", "/v1/games/A").status == 200
    assert api.register(tiny("C")).status == 201


def test_the_declarations_of_all_games_take_so_many_bytes_and_no_more(
    api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declarations, "MAX_DECLARATIONS", 100_000)
    wide = [Game(name, Box((9000,), low=(0.0,) * 9000), Discrete(2)) for name in "ABC"]
    assert [api.register(game).status for game in wide] == [201, 201, 507]
    assert [api.register(tiny("D")).status, api.register(wide[0]).status] == [201, 200]


class Counting(MemoryStore):
    looks = 0

    def games(self) -> list[Game]:
        self.looks += 1
        time.sleep(0.02)  # so long takes a store with many games
        return super().games()


def test_asking_for_games_that_are_not_there_costs_little(setup: Setup) -> None:
    store = Counting()
    api = Api(create_app(store, setup.registry))

    async def ask_all() -> list[Reply]:
        return await asyncio.gather(*(api.send("GET", f"/v1/games/Nobody-{i}") for i in range(500)))

    begin = time.monotonic()
    assert {reply.status for reply in api.loop.run_until_complete(ask_all())} == {404}
    for i in range(5):
        assert api.get(f"/v1/games/Nobody-{i}").status == 404
    assert store.looks <= 2 + 5
    assert store.looks * 0.02 * games.REST <= time.monotonic() - begin + 0.02 * games.REST
    api.close()


def test_a_game_registered_elsewhere_during_a_look_is_found_by_the_next(setup: Setup) -> None:
    """A gateway may be asked for a game the moment after another gateway took it in."""
    store = Counting()
    api = Api(create_app(store, setup.registry))

    async def scenario() -> tuple[Reply, Reply]:
        early = asyncio.create_task(api.send("GET", "/v1/games/Later"))
        while not store.looks:
            await asyncio.sleep(0)
        await asyncio.sleep(0.005)
        MemoryStore.register(store, tiny("Later"))
        return await api.send("GET", "/v1/games/Later"), await early

    late, early = api.loop.run_until_complete(scenario())
    assert late.status == 200
    assert early.status in (200, 404)
    api.close()
