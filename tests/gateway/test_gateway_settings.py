"""Settings of games over the API: shown, set, refused with the right key, and message to clients."""

import json
from contextlib import closing
from typing import Any

import msgspec
import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Reply, Setup, fragment

from sparring.api import TrainerStatus
from sparring.experience import wire
from sparring.gateway.app import create_app
from sparring.store.profile import GameSettings, PromotionRule

PATH = f"/v1/games/{GAME.name}/settings"


def put(api: Api, settings: Any) -> Reply:
    return api.request("PUT", PATH, json.dumps(settings).encode(), JSON)


def test_what_is_set_is_shown_and_kept_beside_the_declaration(api: Api, setup: Setup) -> None:
    shown = api.get(PATH).json()
    assert (shown["game"], shown["settings"], shown["effective"]) == (GAME.name, {}, {"promotion": {}})
    wanted = {"promotion": {"canary": 0.25}, "pace": 5}
    answer = put(api, wanted)
    assert (answer.status, answer.json()["settings"]) == (200, {"promotion": {"canary": 0.25}, "pace": 5.0})
    assert setup.store.profiles()[GAME.name].settings == GameSettings(promotion=PromotionRule(canary=0.25), pace=5)
    assert api.get(PATH).json() == answer.json()
    assert api.register().status == 200  # a client that starts changes nothing
    assert api.get(PATH).json() == answer.json()
    assert put(api, {}).json()["settings"] == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algoritm": "ppo"}, "unknown key algoritm: did you mean algorithm?"),
        ({"promotion": {"canari": 1}}, "unknown key promotion.canari: did you mean promotion.canary?"),
        ({"promotion": {"canary": 2}}, "promotion.canary"),
        ({"promotion": 3}, "a group of keys"),
        ({"pace": 1e6}, "pace"),
        ({"algorithm": "pppo"}, "no algorithm 'pppo', did you mean 'ppo'?"),
        ({"algorithm": "os:system"}, "names a module"),
        ({"hyperparameters": {"layers": [{"layer": "evil:Layer"}]}}, "names a module"),
    ],
)
def test_what_is_wrong_is_reported_with_the_nearest_right_key(api: Api, settings: Any, message: str) -> None:
    answer = put(api, settings)
    assert (answer.status, message in answer.json()["detail"]) == (422, True), answer.json()
    assert api.get(PATH).json()["settings"] == {}


def test_hyperparameters_are_checked_by_their_algorithm_and_for_the_game(api: Api) -> None:
    for settings, message in (
        ({"hyperparameters": {"lrr": 1}}, "unknown key hyperparameters.lrr: did you mean hyperparameters.lr?"),
        ({"algorithm": "td3"}, "TD3 takes Box actions"),
        ({"algorithm": ""}, "no algorithm ''"),
        ({"hyperparameters": {"batch": 10**9}}, "lower the hyperparameter 'batch'"),
        ({"hyperparameters": {"layers": [{"layer": "dense", "units": 10**9}]}}, "parameters, at most"),
    ):
        answer = put(api, settings)
        assert (answer.status, message in answer.json()["detail"]) == (422, True), answer.json()
    assert put(api, {"algorithm": "ppo", "hyperparameters": {"lr": 1e-3}}).status == 200


def test_what_counts_where_nobody_says_anything_is_told(api: Api, setup: Setup) -> None:
    defaults = api.get(PATH).json()["defaults"]
    assert (defaults["algorithm"], defaults["promotion"]["canary"]) == ("dqn", 0.1)
    assert defaults["promotion"].keys() == set(PromotionRule.__struct_fields__)
    (folder := setup.trainer_dir / GAME.name).mkdir(parents=True)
    status = TrainerStatus(GAME.name, "iql", "training")
    (folder / "status.json").write_bytes(msgspec.json.encode(status))
    with closing(Api(create_app(setup.store, setup.registry, setup.trainer_dir))) as another:
        assert another.get(PATH).json()["defaults"]["algorithm"] == "iql"


def test_settings_of_no_game_are_not_found(api: Api) -> None:
    assert api.get("/v1/games/nobody/settings").status == 404
    assert api.request("PUT", "/v1/games/nobody/settings", b"{}", JSON).status == 404


def test_uploads_are_answered_with_the_pace_that_is_asked_for(api: Api, setup: Setup) -> None:
    upload = f"/v1/games/{GAME.name}/fragments"
    assert "pace" not in api.request("POST", upload, wire.encode([fragment()]), MSGPACK).json()
    put(api, {"pace": 5})
    assert api.request("POST", upload, wire.encode([fragment()]), MSGPACK).json()["pace"] == 5
    defaults = GameSettings(pace=7, promotion=PromotionRule(canary=0.5))
    another = Api(create_app(setup.store, setup.registry, defaults=defaults))
    try:
        assert another.request("POST", upload, wire.encode([fragment()]), MSGPACK).json()["pace"] == 5
        assert another.get(PATH).json()["effective"] == {"promotion": {"canary": 0.5}, "pace": 5.0}
        put(api, {})
        another.get(PATH)  # looks what there is now
        assert another.request("POST", upload, wire.encode([fragment()]), MSGPACK).json()["pace"] == 7
    finally:
        another.close()
