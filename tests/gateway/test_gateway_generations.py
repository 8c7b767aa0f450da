"""A game changes while it is played: old clients go on, new ones get their own generation, each by its schema."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_api import JSON, MSGPACK, Api, Reply, Setup

from sparring.client import Client
from sparring.client.transports.base import SchemaMismatch
from sparring.experience import Columns, Fragment, new_id, pack, wire
from sparring.games import Box, Dict, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.store.profile import GameSettings, Profile, Revision

OLD = Game("arena", Dict({"position": Box((2,)), "ammo": Box(())}), Discrete(2))
NEW = Game("arena", Dict({"position": Box((2,)), "shield": Box(())}), Discrete(3))
GENERATIONS = "/v1/games/arena/generations"


def played(game: Game, player: str = "ann") -> Fragment:
    columns = Columns(np.zeros(3, game.observation.element), np.zeros(2, "<i4"), np.ones(2, "<f4"))
    given = {"id": new_id(), "player": player, "episode": new_id(), "start": 0, "time": time.time()}
    return pack(game, columns, terminated=True, **given)


def upload(api: Api, game: Game) -> int:
    return api.request("POST", "/v1/games/arena/fragments", wire.encode([played(game)]), MSGPACK).status


def make(api: Api, confirmed: bool = True, **defaults: Any) -> Reply:
    body = {"game": json.loads(NEW.to_json()), "defaults": defaults, "confirmed": confirmed}
    return api.request("POST", GENERATIONS, json.dumps(body).encode(), JSON)


@pytest.fixture
def arena(api: Api, setup: Setup) -> Api:
    assert api.register(OLD).status == 201
    assert upload(api, OLD) == 200
    setup.store.revise("arena", lambda known: Revision(known.game, Profile(GameSettings(pace=5))))
    return api


def test_a_changed_game_is_refused_with_what_changed_and_the_command(arena: Api) -> None:
    answer = arena.register(NEW)
    assert answer.status == 409
    for words in (
        "you added `shield`",
        "you dropped `ammo`",
        "the action has 3 values, it had 2",
        "sparring change arena",
    ):
        assert words in answer.json()["detail"]


def test_nothing_changes_until_it_is_confirmed(arena: Api, setup: Setup) -> None:
    answer = make(arena, confirmed=False, shield=0.5)
    assert (answer.status, answer.json()["name"], answer.json()["exists"]) == (200, "arena.2", False)
    assert answer.json()["changes"][0] == "you added `shield`: in old play it is 0.5"
    assert "arena.2" not in {game.name for game in setup.store.games()}
    assert upload(arena, NEW) == 409
    assert make(arena, confirmed=False, sheeld=1).status == 422


def test_each_client_is_served_by_its_own_generation(
    arena: Api, setup: Setup, random_policy: Callable[..., Policy]
) -> None:
    made = make(arena, shield=0.5)
    assert (made.status, made.json()["generation"], made.json()["continues"]) == (201, 2, "arena")
    again = make(arena)
    assert (again.status, again.json()["name"], again.json()["exists"]) == (200, "arena.2", True)
    assert [g["name"] for g in arena.get(GENERATIONS).json()] == ["arena", "arena.2"]
    assert (arena.register(OLD).json()["name"], arena.register(NEW).json()["name"]) == ("arena", "arena.2")
    assert (upload(arena, OLD), upload(arena, NEW)) == (200, 200)
    rows = [{"player": "bob", "schema": NEW.schema, "obs": [{"position": [0, 0], "shield": 1}] * 2} | LAST]
    assert arena.request("POST", "/v1/games/arena/fragments", json.dumps(rows).encode(), JSON).status == 200
    assert [setup.store.stats(name).fragments for name in ("arena", "arena.2")] == [2, 2]
    origin = setup.store.profiles()["arena.2"].origin
    assert origin is not None
    assert (origin.game, origin.fragments, origin.defaults) == ("arena", 1, {"shield": 0.5})
    assert setup.store.profiles()["arena.2"].settings.pace == 5  # as it was for the old one
    for game in setup.store.games()[-2:]:
        setup.registry.publish(random_policy(game, (Dense(4),), QValues()), algorithm="dqn")
    latest = "/v1/games/arena/models/bot/latest"
    assert arena.get(latest).json()["game"]["name"] == "arena"  # a client of before does not say which
    assert arena.get(f"{latest}?schema={NEW.schema}").json()["game"]["name"] == "arena.2"
    ask = {"schema": NEW.schema, "obs": [{"position": [0, 0], "shield": 1}]}
    assert arena.request("POST", "/v1/games/arena/act", json.dumps(ask).encode(), JSON).status == 200
    assert arena.request("DELETE", "/v1/games/arena.2/players/ann").json() == {"erased": 3}  # in both


LAST = {"action": [2], "reward": [1.0], "terminated": True}


@pytest.mark.real
def test_clients_of_both_forms_play_side_by_side(
    setup: Setup, tmp_path: Path, random_policy: Callable[..., Policy]
) -> None:
    def client(game: Game) -> Client:
        return Client(url, game, "ann", directory=tmp_path / "client", refresh=0.05)

    with background(create_app(setup.store, setup.registry)) as url, client(OLD) as old:
        with pytest.raises(SchemaMismatch, match=r"you added `shield`.*sparring change arena"):
            client(NEW)
        body = {"game": json.loads(NEW.to_json()), "confirmed": True}
        old._gateway.connection.request(  # type: ignore[attr-defined]
            "POST", "games", "arena", "generations", body=json.dumps(body).encode(), headers=JSON
        )
        for game in setup.store.games():
            setup.registry.publish(random_policy(game, (Dense(4),), QValues()), algorithm="dqn")
        with client(NEW) as new:
            for one, obs in ((old, {"position": [0, 0], "ammo": 1}), (new, {"position": [0, 0], "shield": 1})):
                bot = one.bot()
                assert bot.version == 1
                one.record(obs, bot.act(obs), 1.0, True, False, obs)
                assert one.flush()
                assert one.stats.rejected == 0
    assert [setup.store.stats(name).fragments for name in ("arena", "arena.2")] == [1, 1]
