"""The OpenAPI document: whole, consistent, and about the routes that there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from gateway_api import GAME, Api, Setup
from starlette.routing import Route

from sparring.gateway import routes
from sparring.gateway.app import create_app

METHODS = {"get", "put", "post", "patch", "delete"}


@pytest.fixture
def document(api: Api) -> dict[str, Any]:
    reply = api.get("/v1/openapi.json")
    assert reply.status == 200
    return dict(reply.json())


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, op) for path, item in document["paths"].items() for method, op in item.items()]


def test_every_route_is_documented_and_every_documented_path_exists(api: Api, document: dict[str, Any]) -> None:
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in api.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD", "OPTIONS"}  # what browsers ask by themselves
    }
    assert routes == {(path, method) for path, method, _ in operations(document)}
    assert len(routes) >= 17


def test_the_document_is_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    assert set(document["info"]) >= {"title", "version"}
    ids = [op["operationId"] for _, _, op in operations(document)]
    assert len(ids) == len(set(ids))
    for path, method, op in operations(document):
        where = f"{method} {path}"
        assert method in METHODS, where
        assert op["summary"], where
        assert op["responses"], where
        for status, response in op["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d", status), where
            assert response["description"], where
            good = int(status) < 400
            assert good or set(response["content"]) == {"application/problem+json"}, where
        in_path = {p["name"] for p in op.get("parameters", []) if p["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path)), where
        assert all(p["required"] for p in op.get("parameters", []) if p["in"] == "path"), where
        bodiless = path.endswith(("/pause", "/resume"))
        assert ("requestBody" in op) == (method in ("put", "post", "patch") and not bodiless), where


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere_and_every_message_is_used(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    used = references(document)
    assert used == {f"#/components/schemas/{name}" for name in schemas}
    assert {"Fragment", "JsonFragment", "Uploaded", "Rejected", "Problem", "Snapshot", "Manifest", "Act"} <= set(
        schemas
    )


def test_uploads_are_documented_in_full(document: dict[str, Any]) -> None:
    upload = document["paths"]["/v1/games/{game}/fragments"]["post"]
    assert set(upload["requestBody"]["content"]) == {"application/msgpack", "application/json"}
    assert set(upload["responses"]) >= {"200", "404", "409", "413", "415", "422", "503", "507"}


HELLO = """
from sparring.gateway.endpoint import JSON, answer
from sparring.gateway.openapi import Operation


def operations(parts):
    async def hello(request):
        return answer([game.name for game in await parts.games.all()])

    return [Operation("GET", "/v1/hello", hello, "Says hello to all games", {JSON: list[str]})]
"""


def test_a_new_route_is_one_file(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    monkeypatch.setattr(routes, "__path__", [*routes.__path__, str(tmp_path)])
    api = Api(create_app(setup.store, setup.registry))
    try:
        api.register()
        assert api.get("/v1/hello").json() == [GAME.name]
        described = api.get("/v1/openapi.json").json()["paths"]["/v1/hello"]["get"]
        assert described["summary"] == "Says hello to all games"
        assert api.request("POST", "/v1/hello").status == 405
    finally:
        api.close()
