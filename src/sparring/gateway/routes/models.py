"""Published models over HTTP: list, latest (polled by every player, so it is cached and answers 304), manifests and
files, which never change once published. While the registry is away, what was known last is served."""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import ModelInfo
from sparring.errors import InputError
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Blob, HTTPProblem, answer
from sparring.gateway.openapi import ETAG, UNLESS_KNOWN, Operation
from sparring.gateway.routes.games import Games
from sparring.registry.manifest import Manifest
from sparring.registry.registry import Registry, RegistryError

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["POLICY", "Latest", "Models", "operations"]

T = TypeVar("T")
log = logging.getLogger(__name__)
THREADS = 4  # questions to the registry at once
FRESH = 1.0  # seconds during which `latest` is answered from memory
PATIENCE = 1.0  # seconds that a caller waits for the registry when there is an older answer
POLICY = "policy.onnx"
MAX_CACHED = 1000
MAX_CACHED_BYTES = 64 << 20
# Models are public to web pages of other origins: a browser game loads its bot from here.
OPEN = {"access-control-allow-origin": "*"}
FOREVER = {**OPEN, "cache-control": "public, max-age=31536000, immutable"}
TYPES = {".json": JSON, ".md": "text/markdown; charset=utf-8"}


class _Version(Convertor[int]):
    """In a path: as long as versions get. (Python itself refuses to read a number of thousands of digits.)"""

    regex = "[0-9]{1,15}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("version", _Version())


@dataclass(frozen=True)
class Latest:
    manifest: Manifest
    body: bytes
    etag: str


@dataclass
class Look:
    """A look at the registry, and what the one before found."""

    asked: float
    task: asyncio.Task[Latest | None]
    before: Latest | None

    @property
    def known(self) -> Latest | None:
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if done else self.before


class Models:
    def __init__(self, registry: Registry, games: Games) -> None:
        self._registry = registry
        self._games = games
        self._latest: OrderedDict[tuple[str, str], Look] = OrderedDict()
        self._versions: OrderedDict[tuple[str, str], tuple[int, list[int]]] = OrderedDict()  # with the latest of then
        self._away = False
        # Of their own: a registry that hangs must not take the threads that uploads are written with.
        self._threads = ThreadPoolExecutor(THREADS, "registry")
        self._manifests: OrderedDict[tuple[str, str, int], Manifest] = OrderedDict()
        self._files: OrderedDict[str, bytes] = OrderedDict()  # by sha256

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def delete(self, game: str) -> int:
        """From the registry: how many versions there were."""
        return await self._ask(self._registry.delete_game, game)

    def forget(self, game: str) -> None:
        """The game was deleted: nothing of it is served any more."""
        caches: tuple[OrderedDict[Any, Any], ...] = (self._latest, self._versions, self._manifests)
        for cache in caches:
            for key in [key for key in cache if key[0] == game]:
                del cache[key]

    async def _ask(self, question: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, question, *args)

    async def latest(self, game: str, model: str) -> Latest | None:
        """At most `FRESH` old, unless the registry is away. Callers that come while it is being looked up share the
        answer."""
        key, now = (game, model), time.monotonic()
        look = self._latest.get(key)
        if look is None or (now - look.asked > FRESH and look.task.done()):
            before = look.known if look else None
            look = self._latest[key] = Look(now, asyncio.create_task(self._look_up(game, model, before)), before)
            self._latest.move_to_end(key)
            while len(self._latest) > MAX_CACHED:
                self._latest.popitem(last=False)
        if look.before is not None:
            await asyncio.wait([look.task], timeout=max(look.asked + PATIENCE - now, 0))
            if not look.task.done():
                return look.before
        return await asyncio.shield(look.task)

    async def _look_up(self, game: str, model: str, before: Latest | None) -> Latest | None:
        try:
            manifest = await self._ask(self._registry.latest, game, model)
            if manifest is not None and (before is None or before.manifest != manifest) and POLICY in manifest.files:
                self._keep(manifest)
                await self.file(game, model, manifest.version, POLICY)  # now: later the registry may be away
            self._away = False
        except RegistryError as error:
            if not self._away:
                log.warning("%s; what is known is served", error)
            self._away = True
            if before is None:
                raise
            return before
        if manifest is None:
            return None
        body = msgspec.json.encode(manifest)
        return Latest(manifest, body, _etag(hashlib.sha256(body).hexdigest()))

    async def manifest(self, game: str, model: str, version: int) -> Manifest:
        """Of one version, or 404."""
        key = (game, model, version)
        if (found := self._manifests.get(key)) is None:
            try:
                found = await self._ask(self._registry.manifest, *key)
            except InputError as error:  # not published, or a number that no version has
                raise HTTPProblem(404, str(error)) from error
            self._keep(found)
        return found

    def _keep(self, manifest: Manifest) -> None:
        self._manifests[manifest.game.name, manifest.model, manifest.version] = manifest
        while len(self._manifests) > MAX_CACHED:
            self._manifests.popitem(last=False)

    async def newest(self, game: str, model: str, count: int) -> list[Manifest]:
        """Of the newest versions, oldest first; while the registry is away, those that are known."""
        if (latest := await self.latest(game, model)) is None:
            return []
        key, newest = (game, model), latest.manifest.version
        known = self._versions.get(key)
        found = []
        try:
            if known is None or known[0] != newest:  # listing a bucket is slow and costs: once per version
                known = self._versions[key] = newest, await self._ask(self._registry.versions, game, model)
                while len(self._versions) > MAX_CACHED:
                    self._versions.popitem(last=False)
            for version in known[1][-count:]:
                found.append(await self.manifest(game, model, version))
        except RegistryError:
            return found or [latest.manifest]  # `latest` has told
        return found

    async def file(self, game: str, model: str, version: int, name: str) -> bytes:
        manifest = await self.manifest(game, model, version)
        if (info := manifest.files.get(name)) is None:
            files = ", ".join(sorted(manifest.files))
            raise HTTPProblem(404, f"version {version} of {model!r} has no file {name[:100]!r}; it has {files}")
        if (data := self._files.get(info.sha256)) is None:
            data = await self._ask(self._registry.read, game, model, version, name)
            self._files[info.sha256] = data
            size = sum(map(len, self._files.values()))
            while size > MAX_CACHED_BYTES and len(self._files) > 1:
                size -= len(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(info.sha256)
        return data

    # Handlers

    async def list(self, request: Request) -> Response:
        game = (await self._games.get(request.path_params["game"])).name
        rows = []
        for model in await self._ask(self._registry.models, game):
            versions = await self._ask(self._registry.versions, game, model)
            latest = await self.latest(game, model)
            rows.append(ModelInfo(model, versions, latest.manifest if latest else None))
        return answer(rows, headers={**OPEN, "cache-control": "no-cache"})

    async def get_latest(self, request: Request) -> Response:
        game, model = await self._names(request)
        if (latest := await self.latest(game, model)) is None:
            raise HTTPProblem(
                404,
                f"{game} has no version of the model {model!r} yet: the trainer publishes one after some play",
                headers={"retry-after": "2", **OPEN},
            )
        headers = {**OPEN, "etag": latest.etag, "cache-control": "no-cache"}
        if _matches(request, latest.etag):
            return Response(None, 304, headers)
        return Response(latest.body, 200, headers, JSON)

    async def get_manifest(self, request: Request) -> Response:
        game, model = await self._names(request)
        return answer(await self.manifest(game, model, request.path_params["version"]), headers=FOREVER)

    async def get_file(self, request: Request) -> Response:
        game, model = await self._names(request)
        version, name = request.path_params["version"], request.path_params["name"]
        info = (await self.manifest(game, model, version)).files.get(name)
        headers = {**FOREVER, "x-content-type-options": "nosniff"}
        if info is not None:
            headers["etag"] = _etag(info.sha256)
            if _matches(request, headers["etag"]):
                return Response(None, 304, headers)
        data = await self.file(game, model, version, name)
        kind = TYPES.get(name[name.rfind(".") :], "application/octet-stream")
        return Blob(data, 200, headers, kind)

    async def _names(self, request: Request) -> tuple[str, str]:
        game = await self._games.get(request.path_params["game"])
        model = request.path_params["model"]
        if not NAME.fullmatch(model):
            raise HTTPProblem(404, f"{model[:100]!r} is no model's name: see GET /v1/games/{game.name}/models")
        return game.name, model


def _etag(digest: str) -> str:
    return f'"{digest}"'


def _matches(request: Request, etag: str) -> bool:
    asked = request.headers.get("if-none-match", "")
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in asked.split(",")) if asked else False


def operations(parts: "Parts") -> list[Operation]:
    models, model = parts.models, "/v1/games/{game}/models/{model}"
    return [
        Operation(
            "GET",
            "/v1/games/{game}/models",
            models.list,
            "The game's models",
            {JSON: list[ModelInfo]},
            errors=(404,),
        ),
        Operation(
            "GET",
            f"{model}/latest",
            models.get_latest,
            "The newest version's manifest",
            {JSON: Manifest},
            statuses=UNLESS_KNOWN,
            errors=(404,),
            headers=ETAG,
        ),
        Operation(
            "GET",
            model + "/{version:version}/manifest",
            models.get_manifest,
            "A version's manifest; never changes",
            {JSON: Manifest},
            errors=(404,),
        ),
        Operation(
            "GET",
            model + "/{version:version}/files/{name}",
            models.get_file,
            "A version's file; never changes",
            {"application/octet-stream": bytes, "text/markdown": bytes, JSON: bytes},
            statuses=UNLESS_KNOWN,
            errors=(404,),
            headers=ETAG,
        ),
    ]
