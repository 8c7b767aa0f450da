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
from sparring.registry.registry import Registry

pytestmark = pytest.mark.real
HERE = Path(__file__).parent


@pytest.fixture
def port(tmp_path: Path, random_policy: Callable[..., Policy]) -> Iterator[int]:
    """A platform on which CartPole was played: what the description's examples are about is there."""
    Registry(tmp_path / "registry").publish(random_policy(CARTPOLE, (Dense(4),), QValues()), algorithm="dqn")
    with gateway(tmp_path) as (port, _):
        assert send(port, "PUT", "/v1/games/CartPole-v1", EXAMPLE_GAME)[0] == 201
        assert send(port, "PUT", "/v1/games/Spare", {**EXAMPLE_GAME, "name": "Spare"})[0] == 201
        assert send(port, "POST", "/v1/games/CartPole-v1/fragments", EXAMPLE_UPLOAD)[0] == 200
        yield port


def send(port: int, method: str, path: str, body: Any) -> tuple[int, bytes]:
    return ask(port, method, path, json.dumps(body).encode(), {"content-type": "application/json"})


def test_requests_made_from_the_description_meet_no_surprise(port: int, tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "st", "--config-file", HERE / "schemathesis.toml", "run"]
    command += [f"http://127.0.0.1:{port}/v1/openapi.json", "--phases", "examples,coverage,fuzzing", "-n", "60"]
    command += ["--seed", "1", "--request-timeout", "20", "--warnings", "off"]
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
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
    )
]


@pytest.mark.parametrize(
    ("method", "path", "good", "bad"),
    [
        ("PUT", "/v1/games/{game}", EXAMPLE_GAME, GAMES),
        ("POST", "/v1/games/{game}/fragments", EXAMPLE_UPLOAD, UPLOADS),
        ("POST", "/v1/games/{game}/act", {"obs": [[0, 0, 0, 0]]}, ACTS),
    ],
)
def test_the_description_is_as_strict_as_the_server(port: int, method: str, path: str, good: Any, bad: Any) -> None:
    document = json.loads(ask(port, "GET", "/v1/openapi.json")[1])
    schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    address = path.replace("{game}", "CartPole-v1")
    assert validator.is_valid(good)
    assert send(port, method, address, good)[0] == 200
    for body in bad:
        assert 400 <= send(port, method, address, body)[0] < 500, str(body)[:200]
        assert not validator.is_valid(body), str(body)[:200]
