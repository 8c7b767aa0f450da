"""The API's own description against the server: requests made from it, and whether it is as strict."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gateway_process import ask, gateway

from sparring.gateway.routes.fragments import EXAMPLE_UPLOAD
from sparring.gateway.routes.games import CARTPOLE, EXAMPLE_GAME
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.ab import AbResults
from sparring.registry.registry import Registry

pytestmark = pytest.mark.real
HERE = Path(__file__).parent


@pytest.fixture
def port(tmp_path: Path, random_policy: Callable[..., Policy]) -> Iterator[int]:
    """A platform on which CartPole was played: what the description's examples are about is there."""
    registry, policy = Registry(tmp_path / "registry"), random_policy(CARTPOLE, (Dense(4),), QValues())
    for model in ("bot", "bot", "careful"):
        registry.publish(policy, algorithm="dqn", model=model)
    registry.start_ab("CartPole-v1", {"bot": 0.5, "careful": 0.5}, by="person")
    registry.stop_ab("CartPole-v1", results=AbResults([], 0.95, "no clear difference yet"), by="person")
    with gateway(tmp_path) as (port, _):
        assert send(port, "PUT", "/v1/games/CartPole-v1", EXAMPLE_GAME)[0] == 201
        assert send(port, "PUT", "/v1/games/Spare", {**EXAMPLE_GAME, "name": "Spare"})[0] == 201
        assert send(port, "POST", "/v1/games/CartPole-v1/fragments", EXAMPLE_UPLOAD)[0] == 200
        yield port


def send(port: int, method: str, path: str, body: Any) -> tuple[int, bytes]:
    return ask(port, method, path, json.dumps(body).encode(), {"content-type": "application/json"})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_requests_made_from_the_description_meet_no_surprise(port: int, tmp_path: Path, examples: int) -> None:
    command = [Path(sys.executable).parent / "st", "--config-file", HERE / "schemathesis.toml", "run"]
    command += [f"http://127.0.0.1:{port}/v1/openapi.json", "--phases", "examples,coverage,fuzzing"]
    command += ["-n", str(examples), "--seed", "1", "--request-timeout", "20", "--warnings", "off"]
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "No issues found" in done.stdout


def test_every_example_of_the_description_is_answered_with_success(port: int) -> None:
    document = json.loads(ask(port, "GET", "/v1/openapi.json")[1])
    operations = [(method, path, op) for path, item in document["paths"].items() for method, op in item.items()]
    for method, path, operation in sorted(
        operations, key=lambda o: (o[0] == "delete", -len(o[1]))
    ):  # the game itself last
        if path == "/v1/events":
            continue  # does not end
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        status, answer = send(port, method.upper(), path, body) if body else ask(port, method.upper(), path)
        assert status in (200, 201), (method, path, answer)


def changed(example: Any, *path: str | int, value: Any) -> Any:
    """A copy with this one place changed."""
    copied = inner = copy.deepcopy(example)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


BOX = {"type": "box", "shape": [4]}
GAMES = [
    changed(EXAMPLE_GAME, *path, value=value)
    for path, value in [
        (("name",), "a b"),
        (("name",), ""),
        (("name",), "x" * 101),
        (("players",), 0),
        (("players",), 10**9),
        (("env",), 7),
        (("action",), {**BOX, "dtype": "int8"}),
        (("action",), {"type": "dict", "fields": {"a": BOX}}),
        (("action", "n"), 0),
        (("action", "n"), 1 << 21),
        (("observation",), {"type": "ball"}),
        (("observation", "dtype"), "float16"),
        (("observation", "shape"), [0]),
        (("observation", "shape"), [-1]),
        (("observation", "shape"), [1] * 17),
        (("observation", "shape"), [1 << 23]),
        (("observation", "low"), "low"),
        (("observation",), {"type": "dict", "fields": {}}),
        (("observation",), {"type": "dict", "fields": {"a b": BOX}}),
        (("observation",), {"type": "dict", "fields": {"a": {"type": "dict", "fields": {"a": BOX}}}}),
        (("observation",), {"type": "multi_discrete", "nvec": []}),
    ]
]
UPLOADS = [
    [],
    {},
    EXAMPLE_UPLOAD * 1001,
    *[
        changed(EXAMPLE_UPLOAD, 0, field, value=value)
        for field, value in [
            ("player", ""),
            ("player", "x" * 201),
            ("player", "a\nb"),
            ("player", None),
            ("obs", []),
            ("obs", [[0, 0, 0, 0]]),
            ("obs", ["text", "text"]),
            ("action", []),
            ("action", [None]),
            ("action", [0] * 10_001),
            ("reward", []),
            ("reward", ["1"]),
            ("id", ""),
            ("episode", "x" * 201),
            ("start", -1),
            ("start", 1 << 53),
            ("start", 0.5),
            ("version", -1),
            ("log_prob", []),
        ]
    ],
]
ACTS = [
    {"obs": [[0, 0, 0, 0]], **fields}
    for fields in (
        {"obs": []},
        {"obs": ""},
        {"obs": None},
        {"obs": [[0, 0, 0, 0]] * 4097},
        {"version": 0},
        {"version": 10**15},
        {"version": "1"},
        {"explore": 1},
        {"surprise": 1},
        {"model": "a b"},
        {"alias": "a b"},
        {"alias": "stable", "version": 1},
        {"player": ""},
        {"episode": "x" * 201},
    )
]
BECAUSE = [{"reason": "x" * 1001}, {"reason": None}, {"by": ""}, {"by": "x" * 101}, {"surprise": 1}]
SHARES = {"shares": {"bot": 0.5, "careful": 0.5}}
SETTINGS = [
    {"surprise": 1},
    {"algorithm": 3},
    {"hyperparameters": []},
    {"pace": -1},
    {"pace": 301},
    {"pace": "5"},
    {"promotion": {"canary": 1.5}},
    {"promotion": {"surprise": 1}},
    {"promotion": {"keep": 0.5}},
]
CHANGES = [
    {"surprise": 1},
    {"name": "a b"},
    {"name": None},
    {"env": 7},
    {"env": "a\nb"},
    {"env_kwargs": [1]},
    {"env_kwargs": {"gravity": {}}},
    {"archived": None},
    {"archived": 1},
]
GENERATIONS = [
    {},
    {"game": None},
    *({"game": game} for game in GAMES),
    {"game": EXAMPLE_GAME, "defaults": []},
    {"game": EXAMPLE_GAME, "confirmed": 1},
    {"game": EXAMPLE_GAME, "surprise": 1},
]
STARTS = [{"shares": {"bot": 1}}, {"shares": {"bot": 0.5, "a b": 0.5}}, {"shares": {"bot": "0.5", "careful": 0.5}}, {}]


@pytest.mark.parametrize(
    ("method", "path", "good", "bad"),
    [
        ("PUT", "/v1/games/{game}", EXAMPLE_GAME, GAMES),
        ("POST", "/v1/games/{game}/fragments", EXAMPLE_UPLOAD, UPLOADS),
        ("POST", "/v1/games/{game}/act", {"obs": [[0, 0, 0, 0]]}, ACTS),
        (
            "PUT",
            "/v1/games/{game}/models/{model}/aliases/{alias}",
            {"version": 1},
            [{}, *({"version": 1, **wrong} for wrong in (*BECAUSE, {"version": 0}, {"expected": 0}, {"share": 1.5}))],
        ),
        ("POST", "/v1/games/{game}/models/{model}/rollback", {}, [*BECAUSE, {"expected": None}, {"expected": 0}]),
        ("POST", "/v1/games/{game}/models/{model}/pin", {"version": None}, [*BECAUSE, {"version": 0}]),
        ("POST", "/v1/games/{game}/models/{model}/unpin", {}, [*BECAUSE, {"version": 1}]),
        ("PUT", "/v1/games/{game}/settings", {"algorithm": "dqn", "pace": 5, "promotion": {"canary": 0.2}}, SETTINGS),
        ("PATCH", "/v1/games/{game}", {"name": "pole", "archived": False, "env_kwargs": None}, CHANGES),
        ("POST", "/v1/games/{game}/generations", {"game": EXAMPLE_GAME, "defaults": {}}, GENERATIONS),
        ("POST", "/v1/games/{game}/ab", SHARES, [*STARTS, *(SHARES | wrong for wrong in BECAUSE)]),
    ],
)
def test_the_description_is_as_strict_as_the_server(port: int, method: str, path: str, good: Any, bad: Any) -> None:
    document = json.loads(ask(port, "GET", "/v1/openapi.json")[1])
    schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    address = path.replace("{game}", "CartPole-v1").replace("{model}", "bot").replace("{alias}", "easy")
    assert validator.is_valid(good)
    assert send(port, method, address, good)[0] == 200
    for body in bad:
        assert 400 <= send(port, method, address, body)[0] < 500, str(body)[:200]
        assert not validator.is_valid(body), str(body)[:200]
