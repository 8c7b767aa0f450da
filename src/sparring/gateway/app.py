"""The HTTP API: the operations that the modules in `routes` declare become an application and its OpenAPI document."""

from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sparring.gateway import routes
from sparring.gateway.cors import Cors
from sparring.gateway.endpoint import JSON, Endpoint, HTTPProblem, answer
from sparring.gateway.hosts import Hosts
from sparring.gateway.openapi import Operation, document
from sparring.gateway.parts import Parts
from sparring.gateway.routes.fragments import Limits
from sparring.gateway.server import background, serve
from sparring.registry.registry import Registry
from sparring.store.profile import GameSettings
from sparring.store.protocol import Store

__all__ = ["background", "create_app", "serve"]


def create_app(
    store: Store,
    registry: Registry,
    trainer_dir: Path | None = None,
    limits: Limits | None = None,
    stream_status: Path | None = None,
    allowed_hosts: Sequence[str] = (),
    defaults: GameSettings = GameSettings(),
) -> Starlette:
    """The gateway over a store and a registry, which stay the caller's to close. `trainer_dir` is where the trainer
    writes its status, one folder per game; `stream_status` is the file of the job between stream and store.
    `allowed_hosts`: the names that it answers to besides those of this machine, see `hosts`. `defaults`: settings of
    games for which nothing else was set."""
    hosts = Hosts(allowed_hosts)
    parts = Parts(store, registry, trainer_dir, limits or Limits(), stream_status, defaults)
    table = routes.collect(parts)
    metrics = parts.metrics

    async def openapi(request: Request) -> Response:
        return answer(document(table))

    table.append(Operation("GET", "/v1/openapi.json", openapi, "This API as an OpenAPI 3.1 document", {JSON: dict}))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.request("unknown", request.method, error.status_code)
        return _routing_problem(request, error, table_routes).response()

    table_routes = [_route(op, table, parts, hosts) for op in table]
    app = Starlette(
        routes=table_routes,
        exception_handlers={HTTPException: refused},
        lifespan=parts.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.stopping = parts.live.stop
    app.state.operations = table
    app.state.parts = parts
    return app


def _route(op: Operation, table: Sequence[Operation], parts: Parts, hosts: Hosts) -> Route:
    methods, pages = [op.method], None
    if op.shared is not None:
        there = {other.method for other in table if other.path == op.path}
        allow = ", ".join(sorted(there | ({"HEAD"} if "GET" in there else set())))
        methods, pages = [op.method, "OPTIONS"], Cors(parts.games, op.shared, op.method, allow)
    return Route(op.path, Endpoint(op.public_path, op.handler, parts.metrics, hosts.check, pages), methods=methods)


def _routing_problem(request: Request, error: HTTPException, routes: list[Route]) -> HTTPProblem:
    path = request.url.path
    if error.status_code == 405:
        allowed = ", ".join(
            sorted({m for route in routes if route.path_regex.match(path) for m in route.methods or ()} - {"OPTIONS"})
        )
        return HTTPProblem(405, f"{request.method} is not for {path[:200]}: use {allowed}", headers={"allow": allowed})
    return HTTPProblem(404, f"there is nothing at {path[:200]}: /v1/openapi.json describes what there is")
