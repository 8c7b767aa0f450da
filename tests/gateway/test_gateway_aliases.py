"""Which version serves whom, changed over HTTP."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from gateway_api import GAME, JSON, Api, Reply, Setup

from sparring.api import ModelInfo
from sparring.gateway.app import create_app
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.manifest import Alias, Move
from sparring.registry.registry import Registry

NAME = GAME.name
MODELS = f"/v1/games/{NAME}/models"
BOT = f"{MODELS}/bot"


@pytest.fixture(autouse=True)
def published(setup: Setup, random_policy: Callable[..., Policy]) -> None:
    """`bot` has versions 1 to 3, of which 3 is stable."""
    policy = random_policy(GAME, (Dense(4, "relu"),), QValues())
    for _ in range(3):
        setup.registry.publish(policy, algorithm="dqn", reason="first")


def send(api: Api, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    text = b"" if body is None else json.dumps(body).encode()
    return api.request(method, path, text, {**(JSON if body is not None else {}), **headers})


def moved(reply: Reply) -> Move:
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=Move)


def latest(api: Api) -> int:
    version: int = api.get(f"{BOT}/latest").json()["version"]
    serving: int = api.get(f"{BOT}/serving").json()["stable"]["version"]
    named: int = api.get(f"{BOT}/aliases/stable").json()["version"]
    assert version == serving == named
    return version


def test_a_version_is_promoted_and_players_get_it_at_once(api: Api) -> None:
    assert latest(api) == 3
    move = moved(send(api, "PUT", f"{BOT}/aliases/stable", {"version": 1, "reason": "it was best", "by": "anna"}))
    assert (move.alias, move.previous, move.version, move.reason, move.by) == ("stable", 3, 1, "it was best", "anna")
    assert latest(api) == 1
    found = msgspec.json.decode(api.get(f"{BOT}/aliases").body, type=list[Alias])
    assert [(a.name, a.version, a.by, a.reason) for a in found] == [("stable", 1, "anna", "it was best")]


def test_it_is_rolled_back_and_the_journal_tells(api: Api) -> None:
    move = moved(send(api, "POST", f"{BOT}/rollback", {"reason": "players complain"}))
    assert (move.previous, move.version, latest(api)) == (3, 2, 2)
    again = send(api, "POST", f"{BOT}/rollback", {"expected": 3})  # sent twice, it is done once
    assert (again.status, "at version 2, not at version 3" in again.json()["detail"]) == (409, True)
    assert latest(api) == 2
    moves = msgspec.json.decode(api.get(f"{BOT}/moves").body, type=list[Move])
    assert [(m.version, m.by, m.reason) for m in moves][:2] == [
        (2, "person", "players complain"),
        (3, "trainer", "first"),
    ]
    assert len(msgspec.json.decode(api.get(f"{BOT}/moves?limit=1").body, type=list[Move])) == 1
    moved(send(api, "POST", f"{BOT}/rollback", {"expected": 2}))
    assert latest(api) == 3


def test_a_pinned_version_is_not_moved_by_the_trainer(api: Api) -> None:
    assert moved(send(api, "POST", f"{BOT}/pin", {"version": 2})).pinned
    assert latest(api) == 2
    reply = send(api, "PUT", f"{BOT}/aliases/stable", {"version": 3, "by": "trainer"})
    assert (reply.status, "pinned to version 2" in reply.json()["detail"]) == (409, True)
    assert not moved(send(api, "POST", f"{BOT}/unpin", {})).pinned
    assert moved(send(api, "PUT", f"{BOT}/aliases/stable", {"version": 3, "by": "trainer"})).version == 3


def test_an_alias_of_ones_own_is_set_moved_and_removed(api: Api) -> None:
    easy = f"{BOT}/aliases/easy"
    assert moved(send(api, "PUT", easy, {"version": 1, "expected": None})).previous is None
    assert send(api, "PUT", easy, {"version": 2, "expected": None}).status == 409
    assert moved(send(api, "PUT", easy, {"version": 2, "expected": 1})).previous == 1
    assert api.get(easy).json()["version"] == 2
    assert moved(send(api, "DELETE", f"{easy}?reason=nobody+asks&by=ben")).reason == "nobody asks"
    assert api.get(easy).status == 404
    rows = msgspec.json.decode(api.get(MODELS).body, type=list[ModelInfo])
    assert [[a.name for a in row.aliases] for row in rows] == [["stable"]]


def test_a_candidate_gets_a_share(api: Api) -> None:
    moved(send(api, "PUT", f"{BOT}/aliases/candidate", {"version": 1, "share": 0.25}))
    serving = api.get(f"{BOT}/serving").json()
    assert (serving["stable"]["version"], serving["candidate"]["version"], serving["share"]) == (3, 1, 0.25)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("PUT", "bot/aliases/stable", {"version": 9}, 404, "no whole version 9 of the model 'bot': it has 1–3"),
        ("PUT", "nobody/aliases/stable", {"version": 1}, 404, "no model 'nobody': it has bot"),
        ("PUT", "a b/aliases/stable", {"version": 1}, 404, "no model's name"),
        ("PUT", "bot/aliases/a b", {"version": 1}, 404, "is no alias"),
        ("PUT", "bot/aliases/stable", {"version": 1, "expected": 2}, 409, "at version 3, not at version 2"),
        ("PUT", "bot/aliases/stable", {"version": 1, "share": 0.5}, 422, "share is for the alias 'candidate'"),
        ("PUT", "bot/aliases/stable", {"version": 0}, 422, "version"),
        ("PUT", "bot/aliases/stable", {"version": 1, "reason": "x" * 1001}, 422, "reason"),
        ("PUT", "bot/aliases/stable", {"version": 1, "because": "x"}, 422, "because"),
        ("PUT", "bot/aliases/stable", {}, 422, "version"),
        ("PUT", "bot/aliases/stable", None, 415, "application/json"),
        ("DELETE", "bot/aliases/hard", None, 404, "no alias 'hard'"),
        ("DELETE", "bot/aliases/stable", None, 422, "what players get"),
        ("DELETE", "bot/aliases/hard?by=", None, 422, "by has 0 characters"),
        ("POST", "nobody/rollback", {}, 404, "no model 'nobody': it has bot"),
        ("POST", "nobody/pin", {}, 404, "no model 'nobody': it has bot"),
        ("POST", "bot/pin", {"version": 7}, 404, "it has 1–3"),
        ("POST", "bot/rollback", {"expected": None}, 422, "expected"),
        ("GET", "nobody/aliases", None, 404, "no model 'nobody': it has bot"),
        ("GET", "nobody/moves", None, 404, "no model 'nobody': it has bot"),
        ("GET", "bot/moves?limit=0", None, 422, "limit"),
    ],
)
def test_what_is_wrong_is_reported(api: Api, method: str, path: str, body: Any, status: int, words: str) -> None:
    reply = send(api, method, f"{MODELS}/{path}", body)
    assert (reply.status, words in reply.json()["detail"]) == (status, True), reply.body
    assert latest(api) == 3


@pytest.mark.parametrize("path", ["rollback", "pin", "unpin", "aliases/easy"])
def test_a_foreign_web_page_changes_nothing(api: Api, path: str) -> None:
    method = "PUT" if "aliases" in path else "POST"
    reply = send(api, method, f"{BOT}/{path}", {"version": 1}, host="127.0.0.1:8400", origin="https://evil.example")
    assert reply.status == 403
    assert len(api.get(f"{BOT}/moves").json()) == 3


def test_another_gateways_move_is_seen_within_a_second(api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share nothing but the registry."""
    other = Api(create_app(setup.store, Registry(str(setup.registry)), setup.trainer_dir))
    try:
        assert latest(other) == 3
        moved(send(api, "PUT", f"{BOT}/aliases/stable", {"version": 1}))
        clock = other.app.state.parts.models.clock
        monkeypatch.setattr(other.app.state.parts.models, "clock", lambda: clock() + 1.1)
        assert latest(other) == 1
    finally:
        other.close()
