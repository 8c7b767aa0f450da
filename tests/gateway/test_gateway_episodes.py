"""Episodes over HTTP: lists in bounded pages, and the steps of one."""

from typing import Any

import numpy as np
import pytest
from gateway_api import GAME, Api, Setup, fragment

from sparring.data import episode_rows
from sparring.games import Box, Game
from sparring.games.spec import Dict, MultiDiscrete

PATH = f"/v1/games/{GAME.name}/episodes"


@pytest.fixture
def played(setup: Setup, api: Api) -> list[dict[str, Any]]:
    """Six episodes of people and bots, each of one fragment, and one that goes on; the newest first."""
    for i in range(3):
        setup.store.append([fragment(3, player="ann"), fragment(4, player="bob", model="bot", version=i)])
    setup.store.append([fragment(5, terminated=False)])
    return list(api.get(PATH).json()["episodes"])


def test_the_newest_come_first_and_a_list_goes_on_where_the_last_one_stopped(
    api: Api, played: list[dict[str, Any]]
) -> None:
    assert [(e["player"], e["version"], e["steps"], e["return"]) for e in played] == [
        (player, version, steps, float(steps))
        for i in (2, 1, 0)
        for player, version, steps in (("bob", i, 4), ("ann", None, 3))
    ]
    found, query = [], "?limit=4"
    for _ in range(2):
        page = api.get(PATH + query).json()
        found += page["episodes"]
        query = f"?limit=4&before={page['before']}"
    assert (found, page["before"]) == (played, None)


@pytest.mark.parametrize(
    ("query", "chosen"),
    [
        ("player=bob", [0, 2, 4]),
        ("people=true", [1, 3, 5]),
        ("people=false", [0, 2, 4]),
        ("version=1", [2]),
        ("model=bot&version=0", [4]),
        ("people=true&version=0", []),
        ("since=0", [0, 1, 2, 3, 4, 5]),
        ("since=100000000000", []),
    ],
)
def test_a_list_may_be_chosen(api: Api, played: list[dict[str, Any]], query: str, chosen: list[int]) -> None:
    assert api.get(f"{PATH}?{query}").json()["episodes"] == [played[i] for i in chosen]


def test_a_request_looks_at_a_bounded_number(
    api: Api, played: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_rows, "LOOK", 4)
    page = api.get(f"{PATH}?player=ann").json()
    assert ([e["id"] for e in page["episodes"]], page["looked_at"]) == ([played[1]["id"], played[3]["id"]], 4)
    rest = api.get(f"{PATH}?player=ann&before={page['before']}").json()
    assert ([e["id"] for e in rest["episodes"]], rest["before"]) == ([played[5]["id"]], None)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "before=0", "before=x", "player=", "people=yes", "version=-1", "since=1e9"]
)
def test_what_makes_no_sense_is_refused(api: Api, query: str) -> None:
    assert api.get(f"{PATH}?{query}").status == 422


def test_steps_come_as_they_were_in_pages(setup: Setup, api: Api) -> None:
    game = Game("parts", Dict({"at": Box((2,)), "hp": Box((), "float64")}), MultiDiscrete((3, 4)))
    api.register(game)
    from sparring.experience import Columns, pack

    obs = np.zeros(6, game.observation.element)
    obs["hp"], obs["at"] = np.arange(6) + 0.5, np.arange(12).reshape(6, 2)
    action, reward = np.arange(10).reshape(5, 2).astype(game.action.element.base), np.arange(5).astype("<f4")
    chance = np.full(2, -0.5, "<f4")
    common: dict[str, Any] = {"player": "ann", "episode": "e", "time": 1.0}
    first = pack(game, Columns(obs[:4], action[:3], reward[:3]), id="1", start=0, **common)
    rest = Columns(obs[3:], action[3:], reward[3:], chance)
    setup.store.append([first, pack(game, rest, id="2", start=3, truncated=True, model="bot", version=7, **common)])
    path = "/v1/games/parts/episodes/5"
    whole = api.get(path).json()
    assert (whole["steps"], whole["return"], whole["next"], len(whole["rows"])) == (5, 10.0, None, 5)
    assert whole["rows"][1]["obs"] == {"at": [2.0, 3.0], "hp": 1.5}
    assert whole["rows"][1]["action"] == [2, 3]
    assert whole["rows"][4] | {"obs": 0} == {
        "step": 4, "obs": 0, "action": [8, 9], "reward": 4.0, "terminated": False, "truncated": True,
        "next_obs": {"at": [10.0, 11.0], "hp": 5.5}, "log_prob": -0.5, "model": "bot", "version": 7,
    }  # fmt: skip
    assert whole["rows"][0]["next_obs"] is None is whole["rows"][0]["model"] is whole["rows"][0]["log_prob"]
    rows, first_step = [], 0
    while first_step is not None:
        page = api.get(f"{path}?first={first_step}&limit=2").json()
        rows += page["rows"]
        first_step = page["next"]
    assert rows == whole["rows"]
    assert api.get(f"{path}?first=99").json()["rows"] == []


def test_large_observations_make_short_pages(setup: Setup, api: Api) -> None:
    game = Game("picture", Box((300, 400, 3), "uint8"), MultiDiscrete((2,)))
    api.register(game)
    from sparring.experience import Columns, pack

    columns = Columns(np.zeros((6, 300, 400, 3), "u1"), np.zeros((5, 1), game.action.element.base), np.zeros(5, "<f4"))
    setup.store.append([pack(game, columns, id="1", player="a", episode="e", start=0, time=1.0, terminated=True)])
    page = api.get("/v1/games/picture/episodes/5").json()
    assert ([r["step"] for r in page["rows"]], page["next"]) == ([0, 1], 2)


def test_there_must_be_such_an_episode(api: Api, played: list[dict[str, Any]]) -> None:
    reply = api.get(f"{PATH}/{played[0]['id'] + 1}")
    assert (reply.status, "lists them" in reply.json()["detail"]) == (404, True)
    assert api.get("/v1/games/none/episodes").status == api.get("/v1/games/none/episodes/1").status == 404
