"""Published models over HTTP, and actions asked of the server."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_api import GAME, JSON, Api, Setup

from sparring.api import Act, ActionsInfo, ModelInfo
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.gateway.routes import act as acting
from sparring.gateway.routes import models
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, QValues, Squashed
from sparring.registry.manifest import Manifest
from sparring.registry.registry import RegistryError

MODELS = f"/v1/games/{GAME.name}/models"
ACT = f"/v1/games/{GAME.name}/act"
MSGPACK = {"content-type": "application/msgpack"}


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the second during which `latest` is answered from memory."""
    monkeypatch.setattr(models, "FRESH", -1.0)


@pytest.fixture
def policy(random_policy: Callable[..., Policy]) -> Policy:
    return random_policy(GAME, (Dense(16, "relu"),), QValues(), exploration=0.5)


def publish(setup: Setup, policy: Policy, **fields: Any) -> Manifest:
    return setup.registry.publish(policy, algorithm="dqn", **fields)


def test_nothing_published(api: Api) -> None:
    assert api.get(MODELS).json() == []
    reply = api.get(f"{MODELS}/bot/latest")
    assert (reply.status, reply.headers["content-type"]) == (404, "application/problem+json")


def test_latest_moves_on_and_its_etag_with_it(api: Api, setup: Setup, policy: Policy) -> None:
    first = publish(setup, policy)
    reply = api.get(f"{MODELS}/bot/latest")
    assert msgspec.json.decode(reply.body, type=Manifest) == first
    etag = reply.headers["etag"]
    for asked in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        unchanged = api.get(f"{MODELS}/bot/latest", if_none_match=asked)
        assert (unchanged.status, unchanged.body, unchanged.headers["etag"]) == (304, b"", etag)
    second = publish(setup, policy)
    changed = api.get(f"{MODELS}/bot/latest", if_none_match=etag)
    assert changed.status == 200
    assert changed.json()["version"] == second.version == 2
    assert changed.headers["etag"] != etag


def test_polling_latest_does_not_ask_the_registry_each_time(
    api: Api, setup: Setup, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "FRESH", 1000.0)
    publish(setup, policy)
    asked = []
    look = setup.registry.latest
    monkeypatch.setattr(setup.registry, "latest", lambda *names: asked.append(names) or look(*names))
    assert [api.get(f"{MODELS}/bot/latest").status for _ in range(20)] == [200] * 20
    assert asked == [(GAME.name, "bot")]


@pytest.mark.parametrize(
    ("question", "path"),
    [("latest", f"{MODELS}/bot/latest"), ("serving", f"{MODELS}/bot/serving"), ("ab", f"/v1/games/{GAME.name}/ab")],
)
def test_while_the_registry_is_slow_or_away_what_was_known_is_served(
    api: Api, setup: Setup, policy: Policy, monkeypatch: pytest.MonkeyPatch, question: str, path: str
) -> None:
    monkeypatch.setattr(models, "PATIENCE", 0.0)
    monkeypatch.setattr(models, "FRESH", 1.0)
    publish(setup, policy)
    known, clock, asked, begun, go_on = api.get(path), [100.0], list[str](), threading.Event(), threading.Event()
    assert known.status == 200
    parts = api.app.state.parts.models
    monkeypatch.setattr(parts, "clock", lambda: clock[0])

    def hangs(*names: str) -> None:
        asked.append(question)
        begun.set()
        assert go_on.wait(30)
        raise RegistryError("no network")

    parts.moved(GAME.name)
    assert api.get(path).body == known.body
    monkeypatch.setattr(setup.registry, question, hangs)
    for _ in range(3):  # one look for all who ask meanwhile
        clock[0] += models.FRESH + 1
        assert api.get(path).body == known.body
    assert begun.wait(30)
    assert asked == [question]
    go_on.set()
    for _ in range(3):
        clock[0] += models.FRESH + 1
        assert api.get(path).body == known.body


def test_files_are_those_that_were_published(api: Api, setup: Setup, policy: Policy) -> None:
    manifest = publish(setup, policy)
    for name, info in manifest.files.items():
        reply = api.get(f"{MODELS}/bot/1/files/{name}")
        assert reply.body == setup.registry.read(GAME.name, "bot", 1, name)
        assert reply.headers["etag"] == f'"{info.sha256}"'
        assert "immutable" in reply.headers["cache-control"]
        assert reply.headers["access-control-allow-origin"] == "*"
        assert api.get(f"{MODELS}/bot/1/files/{name}", if_none_match=f'"{info.sha256}"').status == 304
    assert msgspec.json.decode(api.get(f"{MODELS}/bot/1/manifest").body, type=Manifest) == manifest


def test_a_large_file_comes_whole(api: Api, setup: Setup, random_policy: Callable[..., Policy]) -> None:
    publish(setup, random_policy(GAME, (Dense(400, "relu"), Dense(400, "relu")), QValues()))
    reply = api.get(f"{MODELS}/bot/1/files/policy.onnx")
    assert len(reply.body) > 2 * 256 << 10
    assert reply.body == setup.registry.read(GAME.name, "bot", 1, "policy.onnx")


@pytest.mark.parametrize(
    "path",
    [
        "bot/2/manifest",
        "bot/0/manifest",
        "bot/99999999999999999999/manifest",
        "bot/x/manifest",
        "nobody/1/manifest",
        "nobody/latest",
        "%2e%2e/latest",
        "a b/latest",
        "bot/1/files/secret",
        "bot/1/files/..",
        "bot/1/files/manifest.json",
        "bot/2/files/policy.onnx",
        "../1/files/policy.onnx",
        f"bot/{'9' * 5000}/manifest",
        f"bot/{'1' * 5000}/files/policy.onnx",
        f"bot/{'0' * 5000}1/manifest",
        "bot/٣/manifest",
    ],
    ids=lambda path: path[:40],
)
def test_what_is_not_there(api: Api, setup: Setup, policy: Policy, path: str) -> None:
    publish(setup, policy)
    reply = api.get(f"{MODELS}/{path}")
    assert (reply.status, reply.headers["content-type"]) == (404, "application/problem+json")


def test_the_list_of_models(api: Api, setup: Setup, policy: Policy) -> None:
    publish(setup, policy)
    newest = publish(setup, policy)
    publish(setup, policy, model="other")
    rows = msgspec.json.decode(api.get(MODELS).body, type=list[ModelInfo])
    assert [(r.model, r.versions) for r in rows] == [("bot", [1, 2]), ("other", [1])]
    assert rows[0].latest == newest


def test_a_damaged_manifest_hides_nothing_else(
    api: Api, setup: Setup, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    publish(setup, policy)
    damaged = Path(str(setup.registry)) / "games" / GAME.name / "models" / "bot" / "7"
    damaged.mkdir()
    (damaged / "manifest.json").write_bytes(b"{}")
    stats = api.get(f"/v1/games/{GAME.name}/stats")
    assert [version["version"] for version in stats.json()["versions"]] == [1]
    assert [api.get(path).status for path in ("/v1/games", "/metrics")] == [200, 200]
    assert sum("passing over version 7" in message for message in caplog.messages) == 1


def ask(api: Api, obs: Any, game: Game = GAME, **fields: Any) -> ActionsInfo:
    reply = api.request("POST", f"/v1/games/{game.name}/act", json.dumps({"obs": obs, **fields}).encode(), JSON)
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=ActionsInfo)


def test_the_server_acts_as_the_policy_does(api: Api, setup: Setup, policy: Policy) -> None:
    publish(setup, policy)
    obs = np.random.default_rng(0).uniform(-5, 5, (100, 4)).astype("<f4")
    expected, _ = policy.act(obs)
    actions = ask(api, obs.tolist())
    assert actions.action == expected.tolist()
    assert (actions.model, actions.version, actions.log_prob) == ("bot", 1, None)
    assert ask(api, obs[:1].tolist()).action == expected[:1].tolist()
    for body in (Act(obs=obs.tobytes(), schema=GAME.schema), Act(obs=obs.tolist())):
        reply = api.request("POST", ACT, msgspec.msgpack.encode(body), MSGPACK)
        assert reply.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(reply.body, type=ActionsInfo).action == expected.tolist()


def test_exploring_draws_on_the_server(api: Api, setup: Setup, policy: Policy) -> None:
    publish(setup, policy)
    obs = [[0.1, 0.2, 0.3, 0.4]] * 2000
    greedy, drawn = ask(api, obs).action, ask(api, obs, explore=True)
    other = sum(a != b for a, b in zip(greedy, drawn.action, strict=True)) / len(obs)
    assert 0.15 < other < 0.35  # half of them at random, of which half are the greedy one
    assert drawn.log_prob is not None
    probability = {a: np.exp(lp) for a, lp in zip(drawn.action, drawn.log_prob, strict=True)}
    assert probability == pytest.approx({greedy[0]: 0.75, 1 - greedy[0]: 0.25}, rel=1e-4)
    assert ask(api, obs, explore=True).action != drawn.action


def test_the_newest_version_acts_unless_one_is_named(
    api: Api, setup: Setup, policy: Policy, random_policy: Callable[..., Policy]
) -> None:
    publish(setup, policy)
    assert ask(api, [[0, 0, 0, 0]]).version == 1
    publish(setup, random_policy(GAME, (Dense(16, "relu"),), QValues(), seed=7))
    assert ask(api, [[0, 0, 0, 0]]).version == 2
    assert ask(api, [[0, 0, 0, 0]], version=1).version == 1


SPACES = {
    "dict": (Dict({"at": Box((2,)), "weapon": Discrete(3)}), Discrete(4, start=1), Categorical()),
    "box action": (Box((3,), "float64"), Box((2,), low=-2.0, high=2.0), Squashed()),
    "several": (MultiDiscrete((2, 3)), MultiDiscrete((3, 4)), Categorical()),
    "image": (Box((12, 12, 3), "uint8"), Discrete(3), QValues()),
}


@pytest.mark.parametrize("kind", SPACES)
def test_every_kind_of_game_can_be_asked(
    api: Api, setup: Setup, random_policy: Callable[..., Policy], kind: str
) -> None:
    observation, action, head = SPACES[kind]
    game = Game("Kind", observation, action)
    policy = random_policy(game, (Dense(8, "tanh"),), head)
    api.register(game)
    publish(setup, policy)
    rng = np.random.default_rng(0)
    obs = np.zeros(5, observation.element)
    if isinstance(observation, Dict):
        obs["at"], obs["weapon"] = rng.uniform(-1, 1, (5, 2)), rng.integers(0, 3, 5)
        rows: Any = [{"at": o["at"].tolist(), "weapon": int(o["weapon"])} for o in obs]
    else:
        obs[:] = rng.integers(0, 2, obs.shape)
        rows = obs.tolist()
    expected = policy.act(obs)[0]
    answer = ask(api, rows, game)
    np.testing.assert_allclose(np.asarray(answer.action), expected, rtol=1e-4, atol=1e-5)
    raw = api.request("POST", "/v1/games/Kind/act", msgspec.msgpack.encode(Act(obs=obs.tobytes())), MSGPACK)
    assert msgspec.msgpack.decode(raw.body, type=ActionsInfo).action == answer.action


UNBOUNDED = (Box((3,)), Box((2,)), None)


@pytest.mark.parametrize("kind", [*SPACES, "unbounded"])
@pytest.mark.parametrize("explore", [False, True])
def test_actions_are_random_until_a_version_is_published(
    api: Api, setup: Setup, random_policy: Callable[..., Policy], kind: str, explore: bool
) -> None:
    observation, action, head = SPACES.get(kind, UNBOUNDED)
    game = Game("Kind", observation, action)
    api.register(game)
    obs = np.zeros(200, observation.element)
    body = Act(obs=obs.tobytes(), explore=explore)
    reply = api.request("POST", "/v1/games/Kind/act", msgspec.msgpack.encode(body), MSGPACK)
    first = msgspec.msgpack.decode(reply.body, type=ActionsInfo)
    assert (reply.status, first.model, first.version) == (200, "random", 0)
    column = np.asarray(first.action, action.element.base)
    assert action.problem(column) is None
    assert len(np.unique(column, axis=0)) > 2
    assert first.log_prob is not None
    assert len(first.log_prob) == 200
    if not isinstance(action, Box):
        count = len(np.unique(column, axis=0))
        assert first.log_prob[0] == pytest.approx(-np.log(count))
    assert first.note == (
        "no version is published yet, so these actions are random. Send model, version and log_prob back with the "
        "fragment that they are in: then they count as a bot's, without them as a person's"
    )
    if head is None:
        return
    publish(setup, random_policy(game, (Dense(8, "tanh"),), head))
    reply = api.request("POST", "/v1/games/Kind/act", msgspec.msgpack.encode(body), MSGPACK)
    answer = msgspec.msgpack.decode(reply.body, type=ActionsInfo)
    assert (answer.model, answer.version, answer.note) == ("bot", 1, msgspec.UNSET)


@pytest.mark.parametrize("fields", [{"model": "nobody"}, {"model": "random"}, {"version": 1}, {"model": "../x"}])
def test_only_the_model_that_all_get_plays_at_random(api: Api, fields: dict[str, Any]) -> None:
    body = json.dumps({"obs": [[0, 0, 0, 0]], **fields}).encode()
    reply = api.request("POST", ACT, body, JSON)
    assert reply.status == 404
    assert str(fields.get("model", "version 1")) in reply.json()["detail"]


def test_random_actions_take_no_more_memory_than_learned_ones(api: Api) -> None:
    game = Game("Wide", Box((1,)), Box((1000,), low=-1.0, high=1.0))
    api.register(game)
    assert len(ask(api, [[0]] * 262, game).action) == 262
    reply = api.request("POST", "/v1/games/Wide/act", json.dumps({"obs": [[0]] * 263}).encode(), JSON)
    assert reply.status == 422
    assert reply.json()["detail"] == (
        "263 random actions of 1000 numbers each, at most 262144 numbers are given at once: ask for fewer actions"
    )


def test_a_random_action_is_for_an_observation_of_the_game(api: Api) -> None:
    reply = api.request("POST", ACT, json.dumps({"obs": [[11, 0, 0, 0]]}).encode(), JSON)
    assert reply.status == 422
    assert "above" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "obs"),
        ({"obs": []}, 422, "0 observations"),
        ({"obs": {"a": 1}}, 422, "obs is no list: send a list of observations, also for one of them"),
        ({"obs": 7}, 422, "obs is no list: send a list of observations, also for one of them"),
        ({"obs": [[0, 0, 0, 0]] * 4097}, 422, "4097 observations"),
        ({"obs": [0, 0, 0, 0]}, 422, "a list of 4"),
        ({"obs": [[0, 0, 0]]}, 422, "a list of 4"),
        ({"obs": [["a", 0, 0, 0]]}, 422, "obs"),
        ({"obs": [[None, 0, 0, 0]]}, 422, "obs"),
        ({"obs": [[11, 0, 0, 0]]}, 422, "above"),
        ({"obs": [[0, 0, 0, 0]], "schema": "x"}, 409, "schema"),
        ({"obs": [[0, 0, 0, 0]], "version": 9}, 404, "version 9"),
        ({"obs": [[0, 0, 0, 0]], "version": -1}, 422, "version"),
        ({"obs": [[0, 0, 0, 0]], "version": 10**4000}, 422, "version"),
        ({"obs": [[0, 0, 0, 0]], "model": "nobody"}, 404, "nobody"),
        ({"obs": [[0, 0, 0, 0]], "model": "../x"}, 404, "../x"),
        ({"obs": [[0, 0, 0, 0]], "surprise": 1}, 422, "surprise"),
    ],
)
def test_bad_questions(api: Api, setup: Setup, policy: Policy, body: Any, status: int, words: str) -> None:
    publish(setup, policy)
    reply = api.request("POST", ACT, json.dumps(body).encode(), JSON)
    assert reply.status == status, reply.body
    assert words in reply.json()["detail"]


def test_versions_that_do_not_exist_push_no_policy_out_of_memory(
    api: Api, setup: Setup, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []

    class Watched(acting.Loaded):
        def __init__(self, data: bytes, game: Game, model: str, version: int) -> None:
            loads.append(version)
            super().__init__(data, game, model, version)

    monkeypatch.setattr(acting, "Loaded", Watched)
    publish(setup, policy)

    def ask(version: int) -> int:
        return api.request("POST", ACT, json.dumps({"obs": [[0, 0, 0, 0]], "version": version}).encode(), JSON).status

    assert ask(1) == 200
    assert {ask(version) for version in range(2, 2 * acting.MAX_LOADED)} == {404}
    assert (ask(1), loads) == (200, [1])


def test_bad_raw_questions(api: Api, setup: Setup, policy: Policy) -> None:
    publish(setup, policy)
    nan = np.full((1, 4), np.nan, "<f4").tobytes()
    for obs, words in ((b"", "0 observations"), (b"x" * 15, "15 bytes"), (nan, "NaN")):
        reply = api.request("POST", ACT, msgspec.msgpack.encode(Act(obs=obs)), MSGPACK)
        assert reply.status == 422
        assert words in reply.json()["detail"]
    assert api.request("POST", ACT, b"\xc1", MSGPACK).status == 422
    assert api.request("POST", ACT, b"{}", {"content-type": "text/plain"}).status == 415
    assert api.request("POST", ACT, b" " * (9 << 20), JSON).status == 413
