"""A/B tests over HTTP: started, ended, and how they stand."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_api import GAME, JSON, Api, Reply, Setup, fragment

from sparring.experience import Columns, new_id, pack
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.ab import AbArm, AbResults, AbTest, AbTests, Returns

NAME = GAME.name
AB = f"/v1/games/{NAME}/ab"
HALVES = {"bot": 0.5, "careful": 0.5}


@pytest.fixture(autouse=True)
def published(setup: Setup, random_policy: Callable[..., Policy]) -> None:
    for model in HALVES:
        setup.registry.publish(random_policy(GAME, (Dense(4, "relu"),), QValues()), algorithm="dqn", model=model)


def send(api: Api, method: str, path: str = AB, body: Any = None) -> Reply:
    return api.request(method, path, b"" if body is None else json.dumps(body).encode(), JSON if body else {})


def start(api: Api, **fields: Any) -> AbTest:
    reply = send(api, "POST", body={"shares": HALVES, **fields})
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=AbTest)


def results(api: Api) -> dict[str, AbArm]:
    found = msgspec.json.decode(api.get(f"{AB}/results").body, type=AbResults)
    return {arm.model: arm for arm in found.arms}


def players(test: AbTest, model: str) -> Iterator[str]:
    return (name for name in (f"p{n}" for n in range(10_000)) if test.model(name) == model)


def play(setup: Setup, player: str, ret: float, model: str | None) -> None:
    """One finished episode with this return."""
    columns = Columns(np.zeros((2, 4), "<f4"), np.zeros(1, "<i4"), np.array([ret], "<f4"))
    fields: dict[str, Any] = {} if model is None else {"version": 1}
    one = pack(
        GAME,
        columns,
        id=new_id(),
        player=player,
        episode=new_id(),
        start=0,
        time=time.time(),
        terminated=True,
        model=model,
        **fields,
    )
    setup.store.append([one])


def test_a_test_is_started_followed_and_ended(api: Api) -> None:
    none = api.get(AB)
    assert msgspec.json.decode(none.body, type=AbTests) == AbTests()
    test = start(api, reason="which one?", by="anna")
    reply = api.get(AB, if_none_match=none.headers["etag"])
    assert msgspec.json.decode(reply.body, type=AbTests).running == test
    assert api.get(AB, if_none_match=reply.headers["etag"]).status == 304
    again = send(api, "POST", body={"shares": HALVES})
    assert (again.status, "sparring ab stop" in again.json()["detail"]) == (409, True)
    ended = msgspec.json.decode(send(api, "DELETE").body, type=AbTest)
    assert (ended.id, ended.kept, ended.reason, ended.by) == (test.id, None, "which one?", "anna")
    assert msgspec.json.decode(api.get(AB).body, type=AbTests) == AbTests(None, [ended])
    assert send(api, "DELETE").status == 404


def test_only_the_test_that_was_looked_at_is_ended(api: Api, setup: Setup) -> None:
    seen = start(api)
    assert send(api, "DELETE", f"{AB}?test={seen.id}").status == 200
    other = start(api, reason="meanwhile")
    late = send(api, "DELETE", f"{AB}?test={seen.id}&keep=careful")
    assert (late.status, "another A/B test" in late.json()["detail"]) == (409, True)
    assert setup.registry.ab(NAME).running == other
    assert setup.registry.versions(NAME, "bot") == [1]
    assert send(api, "DELETE", f"{AB}?test={other.id}").status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "", {"shares": {"bot": 0.5, "nobody": 0.5}}, 404, "model 'nobody' for players: it has bot, careful"),
        ("POST", "", {"shares": {"bot": 0.5, "careful": 0.4}}, 422, "add up to 0.9"),
        ("POST", "", {"shares": {"bot": 1}}, 422, "two models"),
        ("POST", "", {"shares": {"bot": 0.5, "a b": 0.5}}, 422, "model name"),
        ("POST", "", {"shares": HALVES, "surprise": 1}, 422, "surprise"),
        ("DELETE", "", None, 404, "sparring ab start"),
        ("GET", "/results", None, 404, "there was no A/B test"),
    ],
)
def test_what_is_wrong_is_reported(api: Api, method: str, path: str, body: Any, status: int, words: str) -> None:
    reply = send(api, method, AB + path, body)
    assert (reply.status, words in reply.json()["detail"]) == (status, True), reply.body


def test_bots_and_people_are_apart_and_intervals_hold_what_they_promise(api: Api, setup: Setup) -> None:
    play(setup, "early", 1000.0, "bot")  # before it begins
    test, rng = start(api), np.random.default_rng(0)
    for model, bots, people in (("bot", 10.0, 50.0), ("careful", 20.0, 50.0)):
        names = players(test, model)
        for _ in range(40):
            name = next(names)
            play(setup, name, float(rng.normal(bots, 2.0)), model)
            play(setup, name, float(rng.normal(people, 2.0)), None)
    play(setup, next(players(test, "bot")), 1000.0, "careful")  # asked for it by name
    play(setup, "somebody", 1000.0, "wild")  # has nothing to do with it
    found = msgspec.json.decode(api.get(f"{AB}/results").body, type=AbResults)
    bot, careful = found.arms
    assert (bot.model, bot.share, careful.model, found.left_out, found.confidence) == ("bot", 0.5, "careful", 1, 0.95)
    for arm, mean in ((bot, 10.0), (careful, 20.0)):
        assert arm.bots.episodes == arm.people.episodes == arm.people.players == 40
        assert arm.bots.mean == pytest.approx(mean, abs=1.5)
        assert arm.bots.low is not None
        assert arm.bots.high is not None
        assert arm.bots.low < mean < arm.bots.high
        assert arm.bots.high - arm.bots.low < 5
    assert bot.bots.difference is None
    assert careful.bots.difference_low is not None
    assert careful.bots.difference_high is not None
    assert 5 < careful.bots.difference_low < 10 < careful.bots.difference_high < 15
    assert careful.people.difference_low is not None
    assert careful.people.difference_high is not None
    assert careful.people.difference_low < 0 < careful.people.difference_high
    assert found.verdict.startswith("careful is better than bot in bots' play: +")
    assert "people" not in found.verdict


def test_where_nobody_gets_the_first_model_there_is_nothing_to_compare_with(api: Api, setup: Setup) -> None:
    play(setup, next(players(start(api), "careful")), 20.0, "careful")
    found = msgspec.json.decode(api.get(f"{AB}/results").body, type=AbResults)
    assert found.verdict == "nobody has played bot yet, which the others are compared with"


def test_people_count_once_each(api: Api, setup: Setup) -> None:
    """One person who plays all day says nothing about the others."""
    test = start(api)
    for model, ret in (("bot", 0.0), ("careful", 9.0)):
        names = players(test, model)
        often, once = next(names), next(names)
        for n in range(100):
            play(setup, often, ret + n % 2, None)
        play(setup, once, 5.0, None)
    arms = results(api)
    assert (arms["bot"].people.episodes, arms["bot"].people.players, arms["bot"].people.mean) == (101, 2, 2.75)
    assert arms["careful"].people.difference == 4.5
    assert arms["careful"].people.difference_low is None  # two people


def test_what_was_erased_does_not_count_any_more(api: Api, setup: Setup) -> None:
    test = start(api)
    name, other = (next(players(test, model)) for model in HALVES)
    for _ in range(3):
        play(setup, name, 1.0, "bot")
    play(setup, other, 1.0, "careful")
    assert results(api)["bot"].bots.episodes == 3
    play(setup, name, 1.0, "bot")
    assert results(api)["bot"].bots.episodes == 4  # adds up from look to look
    setup.store.erase(NAME, name)
    assert {model: arm.bots.episodes for model, arm in results(api).items()} == {"bot": 0, "careful": 1}
    assert results(api)["bot"].bots == Returns()


def test_the_results_stay_with_the_test_and_the_kept_model_is_what_players_get(api: Api, setup: Setup) -> None:
    test = start(api)
    play(setup, next(players(test, "careful")), 7.0, "careful")
    wrong = send(api, "DELETE", f"{AB}?keep=wild")
    assert (wrong.status, "which are bot, careful" in wrong.json()["detail"]) == (404, True)
    ended = msgspec.json.decode(send(api, "DELETE", f"{AB}?keep=careful&reason=nicer").body, type=AbTest)
    assert ended.kept == "careful"
    assert ended.results is not None
    assert [arm.bots.episodes for arm in ended.results.arms] == [0, 1]
    assert msgspec.json.decode(api.get(f"{AB}/results").body, type=AbResults) == ended.results
    latest = api.get(f"/v1/games/{NAME}/models/bot/latest").json()
    assert latest["version"] == 2
    assert api.get(f"/v1/games/{NAME}/models/bot/moves").json()[0]["reason"] == "kept version 1 of 'careful': nicer"


def test_the_trainers_candidates_are_for_players_of_the_bot_only(api: Api, setup: Setup) -> None:
    setup.registry.move(NAME, "bot", "candidate", 1, reason="", by="trainer", share=1.0)
    test = start(api)
    for model in HALVES:
        body = {"obs": [[0, 0, 0, 0]], "player": next(players(test, model)), "episode": "e"}
        assert send(api, "POST", f"/v1/games/{NAME}/act", body).json()["model"] == model


def test_players_of_a_model_that_was_deleted_get_the_bot(api: Api, setup: Setup) -> None:
    player = next(players(start(api), "careful"))
    shutil.rmtree(Path(str(setup.registry)) / "games" / NAME / "models" / "careful")
    setup.registry._targets.clear()  # as after a restart
    asked = {"obs": [[0, 0, 0, 0]], "player": player}
    assert send(api, "POST", f"/v1/games/{NAME}/act", asked).json()["model"] == "bot"
    assert send(api, "POST", f"/v1/games/{NAME}/act", {**asked, "model": "careful"}).status == 404


def test_a_deleted_game_leaves_no_test(api: Api, setup: Setup) -> None:
    start(api)
    assert api.request("DELETE", f"/v1/games/{NAME}").status == 200
    api.register()
    setup.store.append([fragment()])
    assert msgspec.json.decode(api.get(AB).body, type=AbTests) == AbTests()
