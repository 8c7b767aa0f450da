"""The gateway on real sockets: huge bodies, slow and rude clients, event streams, a clean stop."""

import contextlib
import gzip
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from gateway_api import GAME, MSGPACK, Setup, fragment
from gateway_process import DEADLINE, ask, gateway, port_of, problem_in, talk
from waiting import until

from sparring.errors import InputError
from sparring.experience import wire
from sparring.gateway import endpoint, live
from sparring.gateway import server as gateway_server
from sparring.gateway.app import background, create_app, serve
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.store.memory import MemoryStore
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.real
UPLOAD = f"/v1/games/{GAME.name}/fragments"


@pytest.fixture
def url(setup: Setup) -> Iterator[str]:
    setup.store.register(GAME)
    with background(create_app(setup.store, setup.registry, setup.trainer_dir)) as url:
        yield url


@pytest.mark.parametrize("chunked", [False, True])
def test_a_gigabyte_costs_no_memory(tmp_path: Path, chunked: bool) -> None:
    with gateway(tmp_path) as (port, process):
        assert ask(port, "POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[0] == 200
        memory = psutil.Process(process.pid).memory_info
        before, most = memory().rss, 0
        size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {1 << 30}"
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
            head = f"POST {UPLOAD} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n{size}\r\n\r\n"
            connection.sendall(head.encode())
            piece = bytes(1 << 20)
            piece = b"100000\r\n" + piece + b"\r\n" if chunked else piece
            sent = 0
            with contextlib.suppress(ConnectionError):  # the server hangs up before it has it all
                while sent < 1 << 30:
                    connection.sendall(piece)
                    sent += 1 << 20
                    most = max(most, memory().rss)
            status, problem = problem_in(connection.recv(65_536))
        assert status == 413
        assert str(8 << 20) in problem["detail"]
        assert most - before < 64 << 20
        assert ask(port, "GET", "/healthz")[0] == 200


def test_a_gigabyte_is_refused_before_it_is_sent(url: str) -> None:
    """As curl does it: ask first, with Expect."""
    head = f"POST {UPLOAD} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\nExpect: 100-continue\r\n"
    answer = talk(port_of(url), f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
    assert problem_in(answer)[0] == 413
    assert b"100 Continue" not in answer


def test_many_zip_bombs_at_once_cost_little_memory(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(70 << 20), 9)
    with gateway(tmp_path) as (port, process):
        most, done = 0, threading.Event()
        memory = psutil.Process(process.pid).memory_info

        def watch() -> None:
            nonlocal most
            while not done.wait(0.005):
                most = max(most, memory().rss)

        before = memory().rss
        watcher = threading.Thread(target=watch)
        watcher.start()
        statuses: list[int] = []
        headers = {**MSGPACK, "content-encoding": "gzip"}
        threads = [
            threading.Thread(target=lambda: statuses.append(ask(port, "POST", UPLOAD, bomb, headers)[0]))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
        assert statuses == [413] * 6
        assert most - before < 300 << 20  # two at a time, not six


def test_the_connection_survives_a_small_refusal(url: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(url), timeout=DEADLINE)
    for body, kind, status in (
        (b"x" * 100_000, {"content-type": "text/plain"}, 415),
        (b"x" * 100_000, MSGPACK, 422),
        (wire.encode([fragment()]), MSGPACK, 200),
    ):
        connection.request("POST", UPLOAD, body, kind)
        assert connection.sock is not None
        local = connection.sock.getsockname()
        response = connection.getresponse()
        response.read()
        assert response.status == status
        assert connection.sock is not None, "the server hung up"
        assert connection.sock.getsockname() == local
    connection.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # a client that speaks TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_a_problem(url: str, request_: bytes) -> None:
    assert problem_in(talk(port_of(url), request_))[0] == 400


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200_000 + b"\r\n",
    ],
)
def test_large_headers_are_refused(url: str, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=DEADLINE) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request_)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(65_536)
        assert answer == b"" or problem_in(answer)[0] == 431  # nothing: it hung up while we were still sending
    assert ask(port_of(url), "GET", "/healthz")[0] == 200


def test_headers_that_drip_end_with_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "HEADER_TIMEOUT", 0.2)
    for begin in (b"", b"GET / HTTP/1.1\r\nX:"):
        assert problem_in(talk(port_of(url), begin))[0] == 408
    whole = b"GET /healthz HTTP/1.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=DEADLINE) as connection:
        connection.sendall(whole)  # a good request first: the next one on the connection is watched as well
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HT")
        answer = b""
        while data := connection.recv(65_536):
            answer += data
        assert b"HTTP/1.1 408" in answer


def test_a_body_that_drips_ends_with_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_TIMEOUT", 0.3)
    monkeypatch.setattr(endpoint, "LINGER", 0.1)
    head = f"POST {UPLOAD} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
    for size in ("Transfer-Encoding: chunked", f"Content-Length: {2 << 20}"):
        assert problem_in(talk(port_of(url), f"{head}{size}\r\n\r\n".encode()))[0] == 408


def test_more_connections_than_allowed_are_turned_away(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "_raise_file_limit", lambda: gateway_server.SPARE_FILES + 3)
    with background(create_app(setup.store, setup.registry)) as url, contextlib.ExitStack() as stack:
        for _ in range(3):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(url)), timeout=DEADLINE))
            held.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert held.recv(65_536).startswith(b"HTTP/1.1 200")
        assert problem_in(talk(port_of(url), b""))[0] == 503
        stack.close()
        until(lambda: b"HTTP/1.1 200" in talk(port_of(url), b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n"))


def test_an_event_stream_over_a_socket(url: str) -> None:
    port = port_of(url)

    def watchers() -> int:
        text = ask(port, "GET", "/metrics")[1].decode()
        return int(float(text.partition("\nsparring_watchers ")[2].split()[0]))

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    connection.request("GET", f"/v1/events?game={GAME.name}")
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert watchers() == 1
    assert ask(port, "POST", UPLOAD, wire.encode([fragment(4)]), MSGPACK)[0] == 200
    while True:
        line = response.readline()
        if line.startswith(b"data: ") and json.loads(line[6:])["episodes"] == 1:
            break
    response.close()
    connection.close()
    until(lambda: watchers() == 0)


def test_a_watcher_who_stops_reading_is_hung_up_on(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD", 0.0)
    monkeypatch.setattr(live, "SEND_TIMEOUT", 0.5)
    listen = gateway_server._listen

    def with_small_buffers(host: str, port: int) -> socket.socket:  # else the system takes megabytes off our hands
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(gateway_server, "_listen", with_small_buffers)
    setup.store.register(GAME)
    setup.store.append([fragment(1, player=f"p{i}") for i in range(500)])
    with background(create_app(setup.store, setup.registry)) as url, socket.socket() as connection:
        port = port_of(url)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET /v1/events?game={GAME.name} HTTP/1.1\r\n\r\n".encode())
        until(lambda: b"\nsparring_watchers 1.0\n" in ask(port, "GET", "/metrics")[1])

        def dropped() -> bool:
            ask(port, "POST", UPLOAD, wire.encode([fragment(1)]), MSGPACK)
            return b"\nsparring_watchers 0.0\n" in ask(port, "GET", "/metrics")[1]

        until(dropped)
        connection.settimeout(DEADLINE)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65_536):
                pass  # what was on its way; then the end


@pytest.mark.parametrize("closing", ["", "Connection: close\r\n"])
@pytest.mark.parametrize("much", [False, True])
def test_a_reader_who_stops_in_the_middle_of_a_file_is_hung_up_on(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, random_policy: Callable[..., Policy], closing: str, much: bool
) -> None:
    """Also one who leaves only the end of it."""
    monkeypatch.setattr(gateway_server, "SEND_TIMEOUT", 0.5, raising=False)
    monkeypatch.setattr(gateway_server, "KEEP_ALIVE", 1)
    setup.store.register(GAME)
    layers = (Dense(700), Dense(700)) if much else (Dense(100), Dense(100))
    setup.registry.publish(random_policy(GAME, layers, QValues()), algorithm="dqn")
    listen, small = gateway_server._listen, socket.SO_SNDBUF

    def with_small_buffers(host: str, port: int) -> socket.socket:  # else the system takes megabytes off our hands
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, small, 4096)
        return listener

    monkeypatch.setattr(gateway_server, "_listen", with_small_buffers)
    with background(create_app(setup.store, setup.registry)) as url, socket.socket() as connection:
        server = psutil.Process()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port_of(url)))
        here = connection.getsockname()[1]
        path = f"/v1/games/{GAME.name}/models/bot/1/files/policy.onnx"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{closing}\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 200")

        def held() -> bool:
            theirs = [c for c in server.net_connections("tcp") if c.laddr and c.laddr.port == port_of(url)]
            return any(c.raddr and c.raddr.port == here and c.status != psutil.CONN_CLOSE_WAIT for c in theirs)

        assert held()
        until(lambda: not held())
        came = 0
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65_536):  # what was on its way
                came += len(data)
        assert came < len(setup.registry.read(GAME.name, "bot", 1, "policy.onnx"))


def test_sigterm_lets_uploads_finish_and_loses_none(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    stop = threading.Event()

    def play(port: int) -> None:
        while not stop.is_set():
            batch = [fragment(20) for _ in range(20)]
            try:
                status, body = ask(port, "POST", UPLOAD, wire.encode(batch), MSGPACK)
            except OSError:
                return
            if status == 200:
                assert json.loads(body)["accepted"] == 20
                acknowledged.extend(f.id for f in batch)

    with gateway(tmp_path) as (port, process):
        watching = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        watching.request("GET", f"/v1/events?game={GAME.name}")
        stream = watching.getresponse()
        threads = [threading.Thread(target=play, args=(port,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(acknowledged) > 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert b"event: stats" in stream.read()  # the stream came to an end of its own
        watching.close()
    store = SqliteStore(tmp_path / "store.db", readonly=True)
    stored = [f.id for f in store.tail(GAME.name, limit=1_000_000).fragments]
    store.close()
    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored)


def test_stopping_does_not_wait_for_an_upload_that_never_ends(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "DRAIN", 1)
    setup.store.register(GAME)
    answer: list[bytes] = []
    with background(create_app(setup.store, setup.registry)) as url:
        head = f"POST {UPLOAD} HTTP/1.1\r\nContent-Type: application/msgpack\r\nContent-Length: 1000\r\n\r\n"
        hanging = threading.Thread(target=lambda: answer.append(talk(port_of(url), head.encode())))
        hanging.start()
        until(lambda: b"/fragments" not in ask(port_of(url), "GET", "/metrics")[1])
    hanging.join(DEADLINE)
    assert not hanging.is_alive()
    assert answer == [b""] or problem_in(answer[0])[0] == 503


def test_an_idle_server_stops_at_once_and_frees_its_port(setup: Setup) -> None:
    with background(create_app(setup.store, setup.registry)) as url:
        port = port_of(url)
    with background(create_app(MemoryStore(), setup.registry), port=port) as again:
        assert again == url


def test_a_taken_port_is_the_users_problem(setup: Setup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port}"):
            serve(create_app(setup.store, setup.registry), port=port)


def test_the_gateway_does_not_load_the_training_stack() -> None:
    """It starts in well under a second, and a gateway has no use for it."""
    code = "import sys, sparring.gateway.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "uvicorn" in loaded
    assert not {"jax", "torch", "gymnasium", "onnxruntime"} & set(loaded)
