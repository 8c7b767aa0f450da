"""The HTTP API: one table of routes, from which both the application and its OpenAPI document are made."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sparring.api import Act, Actions, GameInfo, ModelInfo, Snapshot, Uploaded
from sparring.errors import SparringError
from sparring.experience import Fragment
from sparring.experience.wire import JsonFragment
from sparring.games import Box, Discrete, Game
from sparring.gateway.hosts import Hosts
from sparring.gateway.http import JSON, MSGPACK, Budget, Endpoint, Refusal, answer
from sparring.gateway.live import Live
from sparring.gateway.openapi import Operation, document
from sparring.gateway.prometheus import Metrics, counter, gauge
from sparring.gateway.routes import pages
from sparring.gateway.routes.act import Acting
from sparring.gateway.routes.fragments import ENCODINGS, Ingest, Limits
from sparring.gateway.routes.games import Games
from sparring.gateway.routes.lifecycle import Deleted, Lifecycle, Paused
from sparring.gateway.routes.models import Models
from sparring.gateway.server import background, serve
from sparring.registry.manifest import Manifest
from sparring.registry.registry import Registry
from sparring.store.protocol import PlayerStats, Store
from sparring.stream.stream_store import StreamedStore

__all__ = ["background", "create_app", "serve"]

HEALTH_TIMEOUT = 2.0
WRITES = (413, 415, 422, 507)

CARTPOLE = Game("CartPole-v1", Box((4,)), Discrete(2), env="CartPole-v1")
EXAMPLE_GAME = msgspec.json.decode(CARTPOLE.to_json())
EXAMPLE_UPLOAD = [
    {
        "player": "player-1",
        "schema": CARTPOLE.schema,
        "obs": [[0.0, 0.0, 0.0, 0.0], [0.0, 0.2, 0.0, -0.3]],
        "action": [1],
        "reward": [1.0],
    }
]


class Erased(msgspec.Struct, frozen=True):
    """How many fragments of a player were deleted."""

    erased: int


class Health(msgspec.Struct, frozen=True):
    status: str


def create_app(
    store: Store,
    registry: Registry,
    trainer_dir: Path | None = None,
    limits: Limits | None = None,
    stream_status: Path | None = None,
    allowed_hosts: Sequence[str] = (),
) -> Starlette:
    """The gateway over a store and a registry, which stay the caller's to close. `trainer_dir` is where the trainer
    writes its status, one folder per game; `stream_status` is the file of the job between stream and store.
    `allowed_hosts`: the names that it answers to besides those of this machine, see `hosts`."""
    hosts = Hosts(allowed_hosts)
    platform = _Platform(store, registry, trainer_dir, limits or Limits(), stream_status)
    table = platform.operations()
    metrics = platform.metrics

    async def openapi(request: Request) -> Response:
        return answer(document(table))

    table.append(Operation("GET", "/v1/openapi.json", openapi, "This API as an OpenAPI 3.1 document", {JSON: dict}))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.request("unknown", request.method, error.status_code)
        return _routing_refusal(request, error, routes).response()

    routes = [
        Route(op.path, Endpoint(op.public_path, op.handler, metrics, hosts.check), methods=[op.method]) for op in table
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: refused},
        lifespan=platform.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.stopping = platform.live.stop
    app.state.operations = table
    return app


def _routing_refusal(request: Request, error: HTTPException, routes: list[Route]) -> Refusal:
    path = request.url.path
    if error.status_code == 405:
        allowed = ", ".join(
            sorted({m for route in routes if route.path_regex.match(path) for m in route.methods or ()})
        )
        return Refusal(405, f"{request.method} is not for {path[:200]}: use {allowed}", headers={"allow": allowed})
    return Refusal(404, f"there is nothing at {path[:200]}: /v1/openapi.json describes what there is")


class _Platform:
    """The parts of the gateway, and what needs several of them."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        trainer_dir: Path | None,
        limits: Limits,
        stream_status: Path | None,
    ) -> None:
        self.store = store
        self.limits = limits
        self.metrics = Metrics()
        self.budget = Budget(limits.in_flight)
        self.games = Games(store, self.budget)
        self.models = Models(registry, self.games)
        self.live = Live(store, self.games, self.models, trainer_dir, stream_status)
        self.ingest = Ingest(store, self.games, self.metrics, limits, self.budget, self.live.changed)
        self.acting = Acting(self.games, self.models, self.budget)
        self.lifecycle = Lifecycle(store, self.games, self.models, self.live, self.ingest, self.acting)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        pushing = asyncio.create_task(self.live.run())
        try:
            yield
        finally:
            pushing.cancel()
            self.ingest.close()
            self.models.close()

    async def erase(self, request: Request) -> Response:
        game = await self.games.get(request.path_params["game"])
        erased = await asyncio.to_thread(self.store.erase, game.name, request.path_params["player"])
        self.live.forget(game.name)
        return answer(Erased(erased))

    async def health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await self.games.all()
        except (TimeoutError, OSError, SparringError) as error:
            raise Refusal(503, f"the store does not answer: {error or 'it takes too long'}") from error
        if (why := self.ingest.failing) is not None:
            raise Refusal(503, f"the newest upload could not be written: {why}", headers={"retry-after": "10"})
        return answer(Health("ok"))

    async def get_metrics(self, request: Request) -> Response:
        rows = [(game.name, await self.live.snapshot(game.name)) for game in await self.games.all()]
        totals = {
            "fragments": "Fragments in the store.",
            "steps": "Steps in the store.",
            "players": "Players in the store.",
            "bytes": "Bytes of columns in the store.",
            "rejected": "Fragments ever put into quarantine.",
        }
        latest = [({"game": game}, s.latest) for game, s in rows if s.latest is not None]
        lags = [({"game": game}, s.trainer.lag) for game, s in rows if s.trainer is not None]
        taken = [
            *(
                gauge(f"sparring_store_{name}", about, [({"game": game}, getattr(s.stats, name)) for game, s in rows])
                for name, about in totals.items()
            ),
            gauge("sparring_ingest_in_flight_bytes", "Bytes of request bodies in memory.", self.budget.used),
            gauge("sparring_watchers", "Open event streams.", self.live.watchers),
            gauge("sparring_latest_version", "Newest published version.", latest),
            gauge("sparring_trainer_lag_fragments", "Fragments stored that the trainer has not taken in.", lags),
            *self._stream_metrics(),
        ]
        return Response(self.metrics.text(taken), media_type="text/plain; version=0.0.4")

    def _stream_metrics(self) -> Iterator[Metric]:
        """Of the way over a stream, if there is one: what this gateway put there, and the job behind it."""
        counts: dict[str, tuple[str, float]] = {}
        if isinstance(self.store, StreamedStore):
            put = self.store.producer.counts
            counts |= {
                "put_fragments": ("Fragments that this gateway put onto the stream.", put.fragments),
                "put_records": ("Records that they made.", put.records),
                "put_bytes": ("Bytes of these records.", put.bytes),
                "put_retries": ("Times that the stream did not take a record at once.", put.retried),
            }
        if (job := self.live.stream()) is not None:
            behind = job.behind(time.time())
            yield gauge("sparring_stream_lag_seconds", "How far the ingest job is behind the stream's writers.", behind)
            about = "How long the stream keeps a record, read or not."
            yield gauge("sparring_stream_retention_seconds", about, job.retention)
            counts |= {
                "missing_seconds": ("Play that the stream forgot before it was read, in time.", job.missing),
                "batches": ("Batches of the ingest job since it began.", job.batches),
                "records": ("Records that it read.", job.records),
                "bytes": ("Bytes of these records.", job.bytes),
                "steps": ("Steps that it brought into the store.", job.steps),
                "duplicates": ("Fragments that were there already.", job.duplicates),
                "rejected": ("Fragments and records that it refused.", job.rejected),
            }
        for name, (about, value) in counts.items():
            yield counter(f"sparring_stream_{name}", about, value)
            # The name of version 0.1, which had them as gauges: alerts and charts go on.
            yield gauge(f"sparring_stream_{name}", f"{about} (Use sparring_stream_{name}_total.)", value)

    def operations(self) -> list[Operation]:
        game, model = "/v1/games/{game}", "/v1/games/{game}/models/{model}"
        known = "The ETag of what you have: 304 if it still is the newest"
        etag: dict[str, dict[str, Any]] = {"If-None-Match": {"type": "string", "description": known}}
        unless_known = {200: "OK", 304: "You have it"}
        limit = ("How many at most", False, {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})
        return [
            Operation(
                "PUT",
                game,
                self.lifecycle.put,
                "Register a game; again with the same spaces is fine",
                {JSON: Game},
                {JSON: Game},
                {200: "It was there already", 201: "Registered"},
                (408, 409, *WRITES),
                example=EXAMPLE_GAME,
            ),
            Operation("GET", "/v1/games", self.live.games, "All games", {JSON: list[GameInfo]}),
            Operation("GET", game, self.games.show, "A game's declaration", {JSON: Game}, errors=(404,)),
            Operation(
                "POST",
                f"{game}/fragments",
                self.lifecycle.upload,
                "Upload fragments: stored for good once answered; those refused are listed, the others are stored",
                {JSON: Uploaded},
                {MSGPACK: list[Fragment], JSON: list[JsonFragment]},
                {200: "At least one fragment is stored, now or since an earlier upload"},
                (404, 408, 409, 410, *WRITES),
                headers={"Content-Encoding": {"enum": [*ENCODINGS[1:]], "description": "none: identity"}},
                example=EXAMPLE_UPLOAD,
                body_limits={"minItems": 1, "maxItems": self.limits.fragments},
            ),
            Operation(
                "POST",
                f"{game}/pause",
                self.lifecycle.pause,
                "Stop training a game; its play is still stored",
                {JSON: Paused},
                errors=(404, 507),
            ),
            Operation(
                "POST",
                f"{game}/resume",
                self.lifecycle.resume,
                "Train a paused game again",
                {JSON: Paused},
                errors=(404, 507),
            ),
            Operation(
                "DELETE",
                game,
                self.lifecycle.delete,
                "Delete a game: its declaration, its play and its published models",
                {JSON: Deleted},
                errors=(404, 507),
            ),
            Operation(
                "GET",
                f"{game}/models",
                self.models.list,
                "The game's models",
                {JSON: list[ModelInfo]},
                errors=(404,),
            ),
            Operation(
                "GET",
                f"{model}/latest",
                self.models.get_latest,
                "The newest version's manifest",
                {JSON: Manifest},
                statuses=unless_known,
                errors=(404,),
                headers=etag,
            ),
            Operation(
                "GET",
                model + "/{version:version}/manifest",
                self.models.get_manifest,
                "A version's manifest; never changes",
                {JSON: Manifest},
                errors=(404,),
            ),
            Operation(
                "GET",
                model + "/{version:version}/files/{name}",
                self.models.get_file,
                "A version's file; never changes",
                {"application/octet-stream": bytes, "text/markdown": bytes, JSON: bytes},
                statuses=unless_known,
                errors=(404,),
                headers=etag,
            ),
            Operation(
                "POST",
                f"{game}/act",
                self.acting.act,
                "Actions for observations, answered in the encoding of the question",
                {JSON: Actions, MSGPACK: Actions},
                {JSON: Act, MSGPACK: Act},
                errors=(404, 408, 409, 413, 415, 422),
                example={"obs": [[0.0, 0.0, 0.0, 0.0]], "explore": True},
            ),
            Operation("GET", f"{game}/stats", self.live.stats, "How it goes", {JSON: Snapshot}, errors=(404,)),
            Operation(
                "GET",
                f"{game}/players",
                self.live.players,
                "Players, the most recently seen first",
                {JSON: list[PlayerStats]},
                errors=(404, 422),
                query={"limit": limit},
            ),
            Operation(
                "DELETE",
                game + "/players/{player:path}",
                self.erase,
                "Erase all that a player sent",
                {JSON: Erased},
                errors=(404, 507),
            ),
            Operation(
                "GET",
                "/v1/events",
                self.live.events,
                "Live: `stats` (Snapshot) about once a second, `version` (Manifest) when one is published",
                {"text/event-stream": str},
                errors=(404, 422),
                query={"game": ("The game to watch", True, {"type": "string"})},
            ),
            Operation("GET", "/healthz", self.health, "Whether uploads can be stored", {JSON: Health}),
            Operation("GET", "/metrics", self.get_metrics, "Prometheus metrics", {"text/plain": str}),
            Operation(
                "GET", "/", pages.home, "The dashboard", {"text/html": bytes}, statuses=unless_known, headers=etag
            ),
            Operation(
                "GET",
                "/static/{file}",
                pages.static,
                "The dashboard's files",
                {"*/*": bytes},
                statuses=unless_known,
                errors=(404,),
                headers=etag,
            ),
        ]
