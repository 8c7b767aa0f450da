"""The route table's row, and the OpenAPI 3.1 document made of the rows and of the message types."""

import http
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from sparring import __version__
from sparring.api import Problem
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Handler

__all__ = ["ETAG", "UNLESS_KNOWN", "Operation", "document"]

PROBLEM = "application/problem+json"
# What any request may end with: two Hosts, a Host or Origin that is not ours, our fault, a store that does not answer.
ALWAYS = (400, 403, 500, 503)
Schema = dict[str, Any]
NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME.pattern}$"}
PATH: dict[str, Schema] = {  # by the names in paths, with an example that the platform has once CartPole was played
    "game": {"schema": NAME_SCHEMA, "example": "CartPole-v1"},
    "model": {"schema": NAME_SCHEMA, "example": "bot"},
    "version": {"schema": {"type": "integer", "minimum": 1, "maximum": 10**15 - 1}, "example": 1},
    "episode": {"schema": {"type": "integer", "minimum": 1, "maximum": 10**15 - 1}, "example": 1},
    "alias": {"schema": NAME_SCHEMA, "example": "stable"},
    "name": {"schema": {"type": "string", "minLength": 1}, "example": "policy.onnx"},
    "file": {"schema": {"type": "string", "minLength": 1}, "example": "dashboard.js"},
    "player": {"schema": {"type": "string", "minLength": 1}, "example": "player-1"},
}
# Of an operation that answers 304.
UNLESS_KNOWN = {200: "OK", 304: "You have it"}
ETAG: dict[str, Schema] = {
    "If-None-Match": {"type": "string", "description": "The ETag of what you have: 304 if it still is the newest"}
}


@dataclass(frozen=True)
class Operation:
    """One method on one path. `body` and `answer` map media types to message types; `bytes` stands for a raw body."""

    method: str
    path: str  # as Starlette writes it: {version:version}
    handler: Handler
    summary: str
    answer: dict[str, Any]
    body: dict[str, Any] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=lambda: {200: "OK"})  # the good ones
    errors: tuple[int, ...] = ()
    query: dict[str, tuple[str, bool, Schema]] = field(default_factory=dict)  # name → (about, required, schema)
    headers: dict[str, Schema] = field(default_factory=dict)  # request headers worth knowing: schema with description
    example: Any = None  # of the body, as JSON
    body_limits: Schema = field(default_factory=dict)  # added to its schema
    shared: Literal["game", "all"] | None = None  # with web pages of origins that the game allows, or of all: see cors
    path_examples: dict[str, Any] = field(default_factory=dict)  # instead of those of PATH

    @property
    def public_path(self) -> str:
        return re.sub(r":\w+}", "}", self.path)


def document(operations: Sequence[Operation]) -> Schema:
    messages = {t for op in operations for t in (*op.body.values(), *op.answer.values()) if t is not str}
    ordered = sorted(messages | {Problem}, key=repr)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for op in operations:
        paths.setdefault(op.public_path, {})[op.method.lower()] = _operation(op, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sparring",
            "version": __version__,
            "description": "Train game bots from play: register a game, upload what players did, fetch the newest bot.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(op: Operation, schema_of: dict[Any, Schema]) -> Schema:
    content = {kind: {"schema": _schema(t, schema_of)} for kind, t in op.answer.items()}
    responses: dict[str, Schema] = {
        str(status): {"description": about, **({"content": content} if status != 304 else {})}
        for status, about in op.statuses.items()
    }
    for status in sorted({*op.errors, *ALWAYS}):
        responses[str(status)] = {
            "description": http.HTTPStatus(status).phrase,
            "content": {PROBLEM: {"schema": schema_of[Problem]}},
        }
    name = re.sub(r"\W+", "_", f"{op.method.lower()}{op.public_path}").strip("_")
    out: Schema = {"summary": op.summary, "operationId": name, "responses": responses}
    if parameters := _parameters(op):
        out["parameters"] = parameters
    if op.body:
        body = {kind: {"schema": _schema(t, schema_of) | op.body_limits} for kind, t in op.body.items()}
        if op.example is not None:
            body[JSON]["example"] = op.example
        out["requestBody"] = {"required": True, "content": body}
    return out


def _schema(t: Any, schema_of: dict[Any, Schema]) -> Schema:
    if t is bytes:
        return {}  # OpenAPI 3.1: a raw body has no schema
    return {"type": "string"} if t is str else schema_of[t]


def _parameters(op: Operation) -> list[Schema]:
    names = re.findall(r"{(\w+)(?::\w+)?}", op.path)
    examples = {name: {"example": value} for name, value in op.path_examples.items()}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, **PATH[name], **examples.get(name, {})} for name in names
    ]
    parameters += [
        {"name": name, "in": "query", "required": required, "description": about, "schema": schema}
        for name, (about, required, schema) in op.query.items()
    ]
    parameters += [
        {"name": name, "in": "header", "required": False, "schema": schema} for name, schema in op.headers.items()
    ]
    return parameters
