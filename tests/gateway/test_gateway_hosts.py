"""Which names a gateway answers to, and which web pages may change something: DNS rebinding and foreign pages."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Setup, fragment
from gateway_process import DEADLINE, gateway, problem_in

from sparring.errors import InputError
from sparring.experience import wire
from sparring.gateway.app import create_app

UPLOAD = f"/v1/games/{GAME.name}/fragments"


@pytest.fixture
def named(setup: Setup) -> Iterator[Api]:
    setup.store.register(GAME)
    names = ["Play.Example.org", "*.cluster.local"]
    api = Api(create_app(setup.store, setup.registry, allowed_hosts=names))
    yield api
    api.close()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8400",
        "app.localhost:8400",
        "127.0.0.1",
        "127.0.0.1:8400",
        "10.1.2.3:80",
        "[::1]",
        "[::1]:8400",
        "[2001:db8::7]:8400",
        "",
    ],
)
def test_names_of_this_machine_and_addresses_are_answered(api: Api, host: str) -> None:
    assert api.get("/v1/games", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8400",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "localhost@evil.example",
        "evil.example/localhost",
        "[::1].evil.example",
        "[evil.example]",
        "127.0.0.1:8400:evil",
        "play.example.org",
        "x" * 5000,
        "é",
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/games", "/healthz", "/metrics", f"/v1/games/{GAME.name}/stats"])
def test_a_page_whose_name_was_rebound_to_us_reads_nothing(api: Api, host: str, path: str) -> None:
    reply = api.get(path, host=host)
    assert (reply.status, reply.headers["content-type"]) == (403, "application/problem+json")
    assert "--allowed-host" in reply.json()["detail"]
    assert len(reply.body) < 1000


@pytest.mark.parametrize(
    "host", ["play.example.org", "PLAY.example.org.:443", "gateway.cluster.local", "a.b.cluster.local"]
)
def test_a_name_that_the_gateway_was_told_is_answered(named: Api, host: str) -> None:
    assert named.get("/v1/games", host=host).status == 200


@pytest.mark.parametrize("host", ["example.org", "a.play.example.org", "cluster.local", "evil-cluster.local"])
def test_a_name_that_is_nearly_one_it_was_told_is_not(named: Api, host: str) -> None:
    assert named.get("/v1/games", host=host).status == 403


def test_any_name_if_it_was_told_so(setup: Setup) -> None:
    api = Api(create_app(setup.store, setup.registry, allowed_hosts=["*"]))
    assert api.get("/v1/games", host="whatever.example").status == 200
    api.close()


@pytest.mark.parametrize(
    "name", ["", "https://play.example.org", "play.example.org:80", "a b", "*.", "**", "-x", "10.0.0.1/8"]
)
def test_what_is_no_name_is_the_users_problem(setup: Setup, name: str) -> None:
    with pytest.raises(InputError, match="not a host's name"):
        create_app(setup.store, setup.registry, allowed_hosts=[name])


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8400", None, 200),  # a game client
        ("127.0.0.1:8400", "http://127.0.0.1:8400", 200),  # the dashboard
        ("play.example.org", "https://play.example.org", 200),
        ("127.0.0.1:8400", "https://play.example.org", 200),  # behind a proxy that sends its own Host
        ("127.0.0.1:8400", "https://evil.example", 403),
        ("127.0.0.1:8400", "http://127.0.0.1:3000", 403),  # another program on this machine
        ("127.0.0.1:8400", "http://localhost", 403),
        ("127.0.0.1:8400", "http://203.0.113.6", 403),
        ("127.0.0.1:8400", "https://evil.cluster.local", 403),
        ("127.0.0.1:8400", "null", 403),
        ("", "null", 403),
        ("", "", 403),
    ],
)
def test_only_our_own_pages_change_something(named: Api, host: str, origin: str | None, status: int) -> None:
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    upload = wire.encode([fragment()])
    for method, path, body, kind in (
        ("POST", UPLOAD, upload, MSGPACK),
        ("PUT", f"/v1/games/{GAME.name}", GAME.to_json(), JSON),
        ("DELETE", f"/v1/games/{GAME.name}/players/nobody", b"", {}),
    ):
        assert named.request(method, path, body, {**kind, **headers}).status == status, method


def test_pages_of_any_origin_may_load_models(named: Api) -> None:
    reply = named.get(f"/v1/games/{GAME.name}/models", host="127.0.0.1", origin="https://game.example")
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.real
def test_the_gateways_own_option(tmp_path: Path) -> None:
    with gateway(tmp_path, "--allowed-host", "a.example", "--allowed-host", "b.example") as (port, _):
        for hosts, status in (
            (("a.example",), 200),
            (("b.example:8400",), 200),
            (("c.example",), 403),
            ((), 200),
            (("localhost", "a.example"), 400),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
                lines = "".join(f"Host: {host}\r\n" for host in hosts)
                connection.sendall(f"GET /healthz HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
                answer = b""
                while data := connection.recv(65_536):
                    answer += data
            assert int(answer.split()[1]) == status
            assert status == 200 or problem_in(answer)[1]["detail"]
