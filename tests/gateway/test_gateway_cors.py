"""Web pages of other origins: which may play a game, and which may not. A real page does in tests/dashboard."""

import json
from typing import Any

import msgspec
import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Reply, Setup, fragment, row

from sparring.experience import wire
from sparring.games import Game
from sparring.gateway.app import create_app
from sparring.store.sqlite import SqliteStore

OURS, FOREIGN = "https://my.game", "https://evil.example"
ROOT = f"/v1/games/{GAME.name}"
ASK = json.dumps({"obs": [[0, 0, 0, 0]]}).encode()


def allow(api: Api, *origins: str) -> Reply:
    return api.register(msgspec.structs.replace(GAME, origins=origins))


def preflight(api: Api, path: str, origin: str, method: str = "POST") -> Reply:
    asks = {"access-control-request-method": method, "access-control-request-headers": "content-type"}
    return api.request("OPTIONS", path, headers={"origin": origin, **asks})


def is_shared(reply: Reply) -> bool:
    return any(name.startswith("access-control") for name in reply.headers)


def test_no_page_may_unless_the_game_says_so(api: Api) -> None:
    reply = preflight(api, f"{ROOT}/act", OURS)
    assert (reply.status, is_shared(reply)) == (403, False)
    assert reply.json()["detail"] == (
        "web pages of 'https://my.game' may not use the game 'Tiny-v0': if they are your own, declare it with "
        '"origins": ["https://my.game"]'
    )
    assert api.request("POST", f"{ROOT}/act", ASK, {**JSON, "origin": OURS}).status == 403


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((OURS,), OURS, True),
        ((OURS,), FOREIGN, False),
        ((OURS,), "http://my.game", False),
        ((OURS,), "https://my.game:8443", False),
        ((OURS,), "https://my.game.evil.example", False),
        ((OURS,), "null", False),
        (("https://My.Game:443",), OURS, True),  # as a browser writes it
        (("http://localhost:8000", OURS), "http://localhost:8000", True),
        (("*",), FOREIGN, True),
        (("*",), "null", True),
        ((), OURS, False),
    ],
)
def test_pages_of_the_origins_that_a_game_allows_play_it(
    api: Api, origins: tuple[str, ...], origin: str, allowed: bool
) -> None:
    assert allow(api, *origins).status == 200
    asked = preflight(api, f"{ROOT}/fragments", origin)
    assert asked.status == (204 if allowed else 403)
    if allowed:
        assert asked.headers["access-control-allow-origin"] == origin
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert "content-type" in asked.headers["access-control-allow-headers"]
        assert asked.headers["access-control-max-age"] == "600"
        assert asked.body == b""
    for path, body, kind in (
        ("fragments", wire.encode([fragment()]), MSGPACK),
        ("fragments", json.dumps([row()]).encode(), JSON),
        ("act", ASK, JSON),
    ):
        reply = api.request("POST", f"{ROOT}/{path}", body, {**kind, "origin": origin})
        assert (reply.status, is_shared(reply), reply.headers["vary"]) == (200 if allowed else 403, allowed, "Origin")
    shown = api.get(ROOT, origin=origin)
    assert (shown.status, is_shared(shown)) == (200, allowed)
    if allowed:
        assert "sparring-schema" in shown.headers["access-control-expose-headers"]


def test_a_page_may_read_why_it_was_rejected(api: Api) -> None:
    allow(api, OURS)
    reply = api.request("POST", f"{ROOT}/fragments", json.dumps([row(obs=[])]).encode(), {**JSON, "origin": OURS})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (422, OURS)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", ROOT, GAME.to_json()),
        ("DELETE", ROOT, b""),
        ("POST", f"{ROOT}/pause", b""),
        ("DELETE", f"{ROOT}/players/ann", b""),
        ("POST", "/v1/games/Other-v0/act", ASK),
        ("POST", "/v1/games/nobody/act", ASK),
    ],
)
def test_a_page_gets_no_further_than_its_game_s_play(api: Api, method: str, path: str, body: bytes) -> None:
    allow(api, "*")
    api.register(Game("Other-v0", GAME.observation, GAME.action))
    reply = api.request(method, path, body, {**JSON, "origin": OURS})
    assert (reply.status, is_shared(reply)) == (403, False)
    assert preflight(api, path, OURS, method).status in (403, 405) or method in ("PUT", "DELETE")


@pytest.mark.parametrize("path", ["stats", "players", "rejected"])
def test_other_figures_are_not_for_pages(api: Api, path: str) -> None:
    allow(api, "*")
    assert not is_shared(api.get(f"{ROOT}/{path}", origin=OURS))
    assert preflight(api, f"{ROOT}/{path}", OURS, "GET").status == 405


def test_a_preflight_says_which_method_it_is_good_for(api: Api) -> None:
    """A browser that asks for PUT or DELETE reads that only GET is allowed."""
    allow(api, OURS)
    assert preflight(api, ROOT, OURS, "DELETE").headers["access-control-allow-methods"] == "GET"


def test_models_are_everybody_s_also_after_a_preflight(api: Api) -> None:
    for path in ("models", "models/bot/latest", "models/bot/serving", "models/bot/1/files/policy.onnx"):
        reply = preflight(api, f"{ROOT}/{path}", FOREIGN, "GET")
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "*")
        assert "if-none-match" in reply.headers["access-control-allow-headers"]
        assert api.get(f"{ROOT}/{path}", origin=FOREIGN).headers["access-control-allow-origin"] == "*"


def test_a_foreign_host_is_refused_whatever_the_game_says(api: Api) -> None:
    allow(api, "*")
    assert api.request("POST", f"{ROOT}/act", ASK, {**JSON, "origin": OURS, "host": "evil.example"}).status == 403
    assert preflight(api, f"{ROOT}/act", OURS).status == 204


def test_origins_are_changed_by_declaring_again_and_kept_by_who_does_not_say(api: Api, setup: Setup) -> None:
    answer: Any = allow(api, OURS).json()
    assert answer["origins"] == [OURS]
    assert "origins" in api.register().json()
    assert setup.store.games()[0].origins == (OURS,)
    assert allow(api, FOREIGN).json()["origins"] == [FOREIGN]
    assert preflight(api, f"{ROOT}/act", OURS).status == 403
    assert preflight(api, f"{ROOT}/act", FOREIGN).status == 204
    assert allow(api).json()["origins"] == []
    assert preflight(api, f"{ROOT}/act", FOREIGN).status == 403
    assert setup.store.games()[0].schema == GAME.schema


def test_origins_survive_a_restart(setup: Setup, tmp_path: Any) -> None:
    for allowed in (False, True):
        store = SqliteStore(tmp_path / "store.db")
        api = Api(create_app(store, setup.registry))
        if not allowed:
            api.register()
            allow(api, OURS)
        assert preflight(api, f"{ROOT}/act", OURS).status == 204
        api.close()
        store.close()


@pytest.mark.parametrize(
    "origin", ["my.game", "https://my.game/", "https://my.game/play", "", "https://", "https://a@b", "https://*.game"]
)
def test_what_is_no_origin_is_reported(api: Api, origin: str) -> None:
    body = json.dumps({**json.loads(GAME.to_json()), "origins": [origin]}).encode()
    reply = api.request("PUT", ROOT, body, JSON)
    assert reply.status == 422
    assert (
        f"origins: {origin!r} is no origin of web pages: write it like https://my.game or http://localhost:8000, "
        "without a path, or * for any" in reply.json()["detail"]
    )


def test_there_are_not_too_many(api: Api) -> None:
    body = json.dumps({**json.loads(GAME.to_json()), "origins": [OURS] * 21}).encode()
    reply = api.request("PUT", ROOT, body, JSON)
    assert (reply.status, "origins has 21 entries, at most 20" in reply.json()["detail"]) == (422, True)


def test_options_without_an_origin(api: Api) -> None:
    for path, allow in (("/act", "POST"), ("", api.request("POST", ROOT).headers["allow"]), ("/models", "GET, HEAD")):
        reply = api.request("OPTIONS", ROOT + path)
        assert (reply.status, reply.headers["allow"]) == (405, allow)
