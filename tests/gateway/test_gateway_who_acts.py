"""Which model and version answers a request for actions."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_api import GAME, JSON, Api, Setup

from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues

NAME = GAME.name
PLAYERS = [f"player-{n}" for n in range(30)]


@pytest.fixture
def policy(random_policy: Callable[..., Policy]) -> Policy:
    return random_policy(GAME, (Dense(4, "relu"),), QValues(), exploration=0.5)


@pytest.fixture(autouse=True)
def published(setup: Setup, policy: Policy) -> None:
    """`bot` with versions 1 and 2, `easy` names 1; `careful` with version 1."""
    for model in ("bot", "bot", "careful"):
        setup.registry.publish(policy, algorithm="dqn", model=model)
    setup.registry.move(NAME, "bot", "easy", 1, reason="", by="person")


def act(api: Api, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"obs": [[0, 0, 0, 0]], **fields}).encode()
    reply = api.request("POST", f"/v1/games/{NAME}/act", body, JSON)
    return reply.status, reply.json()


def who(api: Api, **fields: Any) -> tuple[str, int]:
    status, answer = act(api, **fields)
    assert status == 200, answer
    return answer["model"], answer["version"]


def test_an_alias_names_the_version(api: Api) -> None:
    assert who(api, alias="easy") == ("bot", 1)
    assert who(api, alias="stable") == ("bot", 2)
    assert who(api, alias="stable", model="careful") == ("careful", 1)
    assert who(api, alias=None, version=1) == ("bot", 1)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"alias": "hard"}, 404, "no alias 'hard' of the model 'bot': it has stable, easy"),
        ({"alias": "stable", "model": "nobody"}, 404, "it has bot, careful"),
        ({"alias": "a b"}, 404, "no alias 'a b'"),
        ({"alias": "stable", "model": "a b"}, 404, "no version of the model 'a b'"),
        ({"model": ""}, 404, "no version of the model '' for players: it has bot, careful"),
        ({"model": "nobody"}, 404, "no version of the model 'nobody' for players: it has bot, careful"),
        ({"version": 9}, 404, "no version 9 of the model 'bot'"),
        ({"version": 1, "alias": "easy"}, 422, "both version 1 and alias 'easy'"),
        ({"player": ""}, 422, "player"),
        ({"player": "x" * 201}, 422, "player"),
    ],
)
def test_what_is_not_there_is_an_error(api: Api, fields: dict[str, Any], status: int, words: str) -> None:
    found, answer = act(api, **fields)
    assert (found, words in answer["detail"]) == (status, True), answer


def test_an_ab_test_decides_for_players(api: Api, setup: Setup) -> None:
    assert {who(api, player=player)[0] for player in PLAYERS} == {"bot"}
    test = setup.registry.start_ab(NAME, {"bot": 0.5, "careful": 0.5}, by="person")
    parts_forget(api)
    found = {player: who(api, player=player)[0] for player in PLAYERS}
    assert found == {player: test.model(player) for player in PLAYERS}
    assert set(found.values()) == {"bot", "careful"}
    careful = next(player for player, model in found.items() if model == "careful")
    assert who(api) == ("bot", 2)  # nobody is named
    assert who(api, player=careful, model="bot") == ("bot", 2)
    assert who(api, player=careful, alias="easy") == ("bot", 1)
    assert who(api, player=careful, version=1) == ("bot", 1)


def parts_forget(api: Api) -> None:
    """Instead of waiting a second for the gateway's memory to grow old."""
    api.app.state.parts.models.moved(NAME)


def test_a_candidate_plays_its_share_of_the_episodes(api: Api, setup: Setup) -> None:
    setup.registry.move(NAME, "bot", "candidate", 1, reason="", by="person", share=0.5)
    parts_forget(api)
    asked = [{"player": "ann", "episode": f"e{n}"} for n in range(30)]
    versions = [who(api, **fields)[1] for fields in asked]
    assert set(versions) == {1, 2}
    assert versions == [who(api, **fields)[1] for fields in asked]  # within an episode it stays
    assert {who(api, player="ann")[1] for _ in range(20)} == {2}
    assert {who(api, alias="stable", **fields)[1] for fields in asked} == {2}
    assert {who(api, model="bot", **fields)[1] for fields in asked} == {2}
