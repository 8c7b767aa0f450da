"""Registering, listing and showing games; erasing a player; what routing refuses."""

import json
from urllib.parse import quote

import msgspec
import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Setup, fragment

from sparring.api import GameInfo
from sparring.experience import wire
from sparring.games import Box, Discrete, Game


def test_a_game_is_registered_once(api: Api, setup: Setup) -> None:
    again = api.register()
    assert (again.status, Game.from_json(again.body)) == (200, GAME)
    assert setup.store.games() == [GAME]
    assert Game.from_json(api.get(f"/v1/games/{GAME.name}").body) == GAME


def test_registering_and_showing_a_game_tell_its_schema(api: Api) -> None:
    other = Game("Other", Box((1,)), Discrete(2))
    for reply in (api.register(other), api.register(other), api.get("/v1/games/Other")):
        assert reply.headers["sparring-schema"] == other.schema


def test_another_schema_under_the_same_name(api: Api, setup: Setup) -> None:
    other = Game(GAME.name, Box((5,)), Discrete(2))
    reply = api.register(other)
    detail = reply.json()["detail"]
    assert reply.status == 409
    assert GAME.schema in detail
    assert other.schema in detail
    assert "observation" in detail
    assert "action (" not in detail
    assert setup.store.games() == [GAME]


def test_a_game_that_another_process_registered_is_found(api: Api, setup: Setup) -> None:
    other = Game("Later", Box((1,)), Discrete(2))
    assert api.get("/v1/games/Later").status == 404
    setup.store.register(other)
    assert Game.from_json(api.get("/v1/games/Later").body) == other


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not a game declaration"),
        (b"{}", "name"),
        (b"[" * 60_000, "not a game declaration"),
        (GAME.to_json().replace(b'"box"', b'"ball"'), "ball"),
        (GAME.to_json().replace(b"Tiny-v0", b"Other-v0"), "Other-v0"),
        (GAME.to_json().replace(b'"n": 2', b'"n": 0'), "n"),
        (json.dumps({**json.loads(GAME.to_json()), "env": "a\x1b]0;b"}).encode(), "control characters"),
        (GAME.to_json().replace(b'"n": 2', b'"n": 2, "surprise": 1'), "surprise"),
        (json.dumps({**json.loads(GAME.to_json()), "players": 10**4000}).encode(), "players"),
    ],
)
def test_bad_declarations(api: Api, body: bytes, words: str) -> None:
    reply = api.request("PUT", f"/v1/games/{GAME.name}", body, JSON)
    assert reply.status == 422, reply
    assert words in reply.json()["detail"]


@pytest.mark.parametrize("name", ["..", "a b", "-x", "x" * 101, "a%00b", "ä"])
def test_bad_names(api: Api, name: str) -> None:
    body = json.dumps({**json.loads(GAME.to_json()), "name": name}).encode()
    assert api.request("PUT", f"/v1/games/{name}", body, JSON).status == 422
    assert api.get(f"/v1/games/{name}").status == 404


def test_a_declaration_needs_its_content_type_and_a_sane_size(api: Api) -> None:
    assert api.request("PUT", "/v1/games/A", b"{}", {"content-type": "text/plain"}).status == 415
    wide = {**json.loads(GAME.to_json()), "observation": {"type": "box", "shape": [20_000], "low": [0.5] * 20_000}}
    for body in (b" " * (256 << 10 | 1), [b" " * 140_000] * 2, json.dumps({**wide, "name": "A"}).encode()):
        reply = api.request("PUT", "/v1/games/A", body, JSON)
        assert (reply.status, "fewer fields" in reply.json()["detail"]) == (413, True)


def test_the_list_of_games_tells_how_they_do(api: Api) -> None:
    frag = fragment(7)
    api.request("POST", f"/v1/games/{GAME.name}/fragments", wire.encode([frag]), MSGPACK)
    rows = msgspec.json.decode(api.get("/v1/games").body, type=list[GameInfo])
    assert [(r.name, r.schema, r.steps, r.latest, r.return_mean) for r in rows] == [
        (GAME.name, GAME.schema, 7, None, 7.0)
    ]


def test_players_are_listed_and_erased(api: Api, setup: Setup) -> None:
    players = ["ann", "bob", "a/b c?", "ü"]
    sent = [fragment(player=player) for player in players for _ in range(2)]
    api.request("POST", f"/v1/games/{GAME.name}/fragments", wire.encode(sent), MSGPACK)
    listed = api.get(f"/v1/games/{GAME.name}/players").json()
    assert {p["player"]: p["fragments"] for p in listed} == dict.fromkeys(players, 2)
    assert len(api.get(f"/v1/games/{GAME.name}/players?limit=1").json()) == 1
    assert api.get(f"/v1/games/{GAME.name}/stats").json()["episodes"] == 8
    assert api.request("DELETE", f"/v1/games/{GAME.name}/players/ann").json() == {"erased": 2}
    assert api.request("DELETE", f"/v1/games/{GAME.name}/players/ann").json() == {"erased": 0}
    assert setup.store.stats(GAME.name).fragments == 6


def test_a_player_with_a_slash_in_the_name_is_erased(api: Api, setup: Setup) -> None:
    sent = [fragment(player="team/ann")]
    api.request("POST", f"/v1/games/{GAME.name}/fragments", wire.encode(sent), MSGPACK)
    assert api.request("DELETE", f"/v1/games/{GAME.name}/players/team/ann").json() == {"erased": 1}


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "1e2", "٣"])
def test_bad_limits(api: Api, limit: str) -> None:
    reply = api.get(f"/v1/games/{GAME.name}/players?limit={quote(limit)}")
    assert reply.status == 422
    assert "limit" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/games/", 404),
        ("GET", "/v1/games/Nobody/stats", 404),
        ("GET", "/v1/games/Nobody/players", 404),
        ("GET", "/v1/games/Nobody/models", 404),
        ("DELETE", "/v1/games/Nobody/players/ann", 404),
        ("GET", "/v1/events?game=Nobody", 404),
        ("GET", "/v1/events", 422),
        ("DELETE", "/v1/games", 405),
        ("POST", f"/v1/games/{GAME.name}", 405),
        ("OPTIONS", f"/v1/games/{GAME.name}/fragments", 405),
    ],
)
def test_every_refusal_is_a_problem(api: Api, method: str, path: str, status: int) -> None:
    reply = api.request(method, path)
    assert (reply.status, reply.headers["content-type"]) == (status, "application/problem+json")
    problem = reply.json()
    assert problem["status"] == status
    assert problem["detail"]


def test_a_405_names_all_methods(api: Api) -> None:
    assert api.request("POST", f"/v1/games/{GAME.name}").headers["allow"] == "DELETE, GET, HEAD, PATCH, PUT"


def test_web_pages_of_other_origins_cannot_write(api: Api) -> None:
    """No CORS header on anything that changes data, and a request with their Origin is refused."""
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    address = f"/v1/games/{GAME.name}/fragments"
    preflight = api.request("OPTIONS", address, headers=origin)
    assert preflight.status == 403
    assert not any(name.startswith("access-control") for name in preflight.headers)
    written = api.request("POST", address, wire.encode([fragment()]), {**MSGPACK, **origin})
    assert (written.status, "evil.example" in written.json()["detail"]) == (403, True)
    assert not any(name.startswith("access-control") for name in written.headers)
