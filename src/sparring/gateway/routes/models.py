"""Published models over HTTP: list, latest (polled by every player, so it is cached and answers 304), manifests and
files, which never change once published. While the registry is away, what was known last is served."""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import ModelInfo
from sparring.errors import InputError, SparringError
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Blob, HTTPProblem, answer
from sparring.gateway.openapi import ETAG, UNLESS_KNOWN, Operation
from sparring.gateway.routes.games import Games
from sparring.registry.ab import AbTests
from sparring.registry.manifest import DEFAULT_MODEL, STABLE, Manifest, Serving
from sparring.registry.registry import Registry, RegistryError

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["POLICY", "Latest", "Models", "operations", "tagged"]

T = TypeVar("T")
log = logging.getLogger(__name__)
THREADS = 4  # questions to the registry at once
FRESH = 1.0  # seconds during which is answered from memory
PATIENCE = 1.0  # seconds that a caller waits for the registry when there is an older answer
POLICY = "policy.onnx"
MAX_CACHED = 1000
MAX_CACHED_BYTES = 64 << 20
FOREVER = {"cache-control": "public, max-age=31536000, immutable"}
SCHEMA = {
    "schema": ("Of the generation that is meant; none: the game of that name", False, {"type": "string"}),
}
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
class Look(Generic[T]):
    """A look at the registry, and what the one before found."""

    asked: float
    task: asyncio.Task[T]
    before: T | None

    @property
    def known(self) -> T | None:
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if done else self.before


class Models:
    def __init__(self, registry: Registry, games: Games) -> None:
        self._registry = registry
        self._games = games
        self.clock = time.monotonic
        self._looks: OrderedDict[tuple[str, ...], Look[Any]] = OrderedDict()  # by game, what was asked, and model
        # Numbers of versions, with the latest and the candidate of then.
        self._versions: OrderedDict[tuple[str, str], tuple[tuple[int, int | None], list[int]]] = OrderedDict()
        self._away = False
        # Of their own: a registry that hangs must not take the threads that uploads are written with.
        self._threads = ThreadPoolExecutor(THREADS, "registry")
        self._manifests: OrderedDict[tuple[str, str, int], Manifest] = OrderedDict()
        self._files: OrderedDict[str, bytes] = OrderedDict()  # by sha256
        self._damaged: OrderedDict[tuple[str, str, int], None] = OrderedDict()  # manifests that were logged

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def delete(self, game: str) -> int:
        """From the registry: how many versions there were."""
        return await self.ask(self._registry.delete_game, game)

    def forget(self, game: str) -> None:
        """The game was deleted: nothing of it is served any more."""
        self.moved(game)
        for key in [key for key in self._manifests if key[0] == game]:
            del self._manifests[key]

    def moved(self, game: str) -> None:
        """Something was moved here: the next answer says so."""
        caches: tuple[OrderedDict[Any, Any], ...] = (self._looks, self._versions)
        for cache in caches:
            for key in [key for key in cache if key[0] == game]:
                del cache[key]

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """The registry, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, question, *args)

    async def latest(self, game: str, model: str) -> Latest | None:
        """The version that players get."""
        return await self._fresh("latest", self._latest, game, model)

    async def serving(self, game: str, model: str) -> Serving:
        """What players get, with the candidate."""
        return await self._fresh("serving", self._serving, game, model)

    async def ab(self, game: str) -> AbTests:
        """A/B tests of a game."""
        return await self._fresh("ab", self._ab, game)

    async def _fresh(self, what: str, question: Callable[..., Coroutine[Any, Any, T]], game: str, *model: str) -> T:
        """An answer at most `FRESH` old; while the registry is away or slow, what was known last. Callers that come
        while it is being looked up share the answer.

        :param question: of what was known, the game and the model."""
        key, now = (game, what, *model), self.clock()
        look: Look[T] | None = self._looks.get(key)
        if look is None or (now - look.asked > FRESH and look.task.done()):
            before = look.known if look else None
            look = Look(now, asyncio.create_task(self._ask_again(question, before, game, *model)), before)
            self._looks[key] = look
            self._looks.move_to_end(key)
            while len(self._looks) > MAX_CACHED:
                self._looks.popitem(last=False)
        if look.before is not None:
            await asyncio.wait([look.task], timeout=max(look.asked + PATIENCE - now, 0))
            if not look.task.done():
                return look.before
        return await asyncio.shield(look.task)

    async def _ask_again(
        self, question: Callable[..., Coroutine[Any, Any, T]], before: T | None, game: str, *model: str
    ) -> T:
        try:
            found = await question(before, game, *model)
            self._away = False
        except RegistryError as error:
            if not self._away:
                log.warning("%s; what is known is served", error)
            self._away = True
            if before is None:
                raise
            return before
        return found

    async def _latest(self, before: Latest | None, game: str, model: str) -> Latest | None:
        manifest = await self.ask(self._registry.latest, game, model)
        if manifest is None or (before is not None and before.manifest == manifest):
            return None if manifest is None else before
        await self._hold(manifest)
        body = msgspec.json.encode(manifest)
        return Latest(manifest, body, _etag(hashlib.sha256(body).hexdigest()))

    async def _serving(self, _: Serving | None, game: str, model: str) -> Serving:
        found = await self.ask(self._registry.serving, game, model)
        for manifest in (found.stable, found.candidate):
            if manifest is not None:
                await self._hold(manifest)
        return found

    async def _ab(self, _: AbTests | None, game: str) -> AbTests:
        return await self.ask(self._registry.ab, game)

    async def _hold(self, manifest: Manifest) -> None:
        """With its policy, now: later the registry may be away."""
        if POLICY in manifest.files:
            self._keep(manifest)
            await self.file(manifest.game.name, manifest.model, manifest.version, POLICY)

    async def named(self, game: str, model: str, alias: str) -> Manifest:
        """The version that an alias names, or 404."""
        if not NAME.fullmatch(model):
            raise HTTPProblem(404, await self.no_model(game, model))
        if alias == STABLE:
            found = (await self.serving(game, model)).stable
        else:
            found = await self.ask(self._registry.named, game, model, alias) if NAME.fullmatch(alias) else None
        if found is None:
            there = ", ".join(await self.ask(self._registry.aliases, game, model))
            found_there = f"it has {there}" if there else await self.no_model(game, model)
            raise HTTPProblem(404, f"{game} has no alias {alias[:100]!r} of the model {model!r}: {found_there}")
        return found

    async def model_of(self, game: str, player: str | None) -> str:
        """The model that a player gets; `bot` unless an A/B test gives another one, which has a version."""
        running = (await self.ab(game)).running if player is not None else None
        given = DEFAULT_MODEL if running is None or player is None else running.model(player)
        gone = given != DEFAULT_MODEL and await self.latest(game, given) is None  # somebody deleted its files
        return DEFAULT_MODEL if gone else given

    async def no_model(self, game: str, model: str) -> str:
        """For people, of a model that has no version for players. Which have one is asked only where a name may be
        wrong: every player of a new game asks for `bot`, and listing a bucket is slow and costs."""
        if model == DEFAULT_MODEL:
            return f"{game} has no version of the model {model!r} yet: the trainer publishes one after some play"
        return await self.ask(self._registry.no_model, game, model)

    async def manifest(self, game: str, model: str, version: int) -> Manifest:
        """Of one version, or 404."""
        key = (game, model, version)
        if (found := self._manifests.get(key)) is None:
            try:
                found = await self.ask(self._registry.manifest, *key)
            except InputError as error:  # not published, or a number that no version has
                raise HTTPProblem(404, str(error)) from error
            self._keep(found)
        return found

    def _keep(self, manifest: Manifest) -> None:
        self._manifests[manifest.game.name, manifest.model, manifest.version] = manifest
        while len(self._manifests) > MAX_CACHED:
            self._manifests.popitem(last=False)

    async def newest(self, game: str, model: str, count: int, candidate: int | None = None) -> list[Manifest]:
        """Of the newest versions, oldest first; while the registry is away, those that are known. `candidate`: the
        version that the trainer tries now, as far as the caller knows."""
        latest = await self.latest(game, model)  # none: a first candidate may be tried
        key, newest = (game, model), (latest.manifest.version if latest else 0, candidate)
        known = self._versions.get(key)
        found: list[Manifest] = []
        try:
            if known is None or known[0] != newest:  # listing a bucket is slow and costs: once for each of them
                known = self._versions[key] = newest, await self.ask(self._registry.versions, game, model)
                while len(self._versions) > MAX_CACHED:
                    self._versions.popitem(last=False)
            shown = known[1][-count:]
            for first in range(0, len(shown), THREADS):
                some = [self._if_readable(game, model, version) for version in shown[first : first + THREADS]]
                found += filter(None, await asyncio.gather(*some))
        except RegistryError:
            return found or ([latest.manifest] if latest else [])  # `latest` has logged why
        return found

    async def _if_readable(self, game: str, model: str, version: int) -> Manifest | None:
        """None: it was retired, or its manifest is damaged, which is logged once and keeps nothing else from view."""
        try:
            return await self.manifest(game, model, version)
        except RegistryError:
            raise
        except HTTPProblem:
            return None
        except SparringError as error:
            if (game, model, version) not in self._damaged:
                log.warning("passing over version %d: %s", version, error)
                self._damaged[game, model, version] = None
                while len(self._damaged) > MAX_CACHED:
                    self._damaged.popitem(last=False)
            return None

    async def file(self, game: str, model: str, version: int, name: str) -> bytes:
        manifest = await self.manifest(game, model, version)
        if (info := manifest.files.get(name)) is None:
            files = ", ".join(sorted(manifest.files))
            raise HTTPProblem(404, f"version {version} of {model!r} has no file {name[:100]!r}; it has {files}")
        if (data := self._files.get(info.sha256)) is None:
            data = await self.ask(self._registry.read, game, model, version, name)
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
        for model in await self.ask(self._registry.models, game):
            versions = await self.ask(self._registry.versions, game, model)
            latest = await self.latest(game, model)
            aliases = await self.ask(self._registry.aliases, game, model)
            rows.append(ModelInfo(model, versions, latest.manifest if latest else None, [*aliases.values()]))
        return answer(rows, headers={"cache-control": "no-cache"})

    async def get_latest(self, request: Request) -> Response:
        game, model = await self.names(request)
        if (latest := await self.latest(game, model)) is None:
            raise HTTPProblem(404, await self.no_model(game, model), headers={"retry-after": "2"})
        headers = {"etag": latest.etag, "cache-control": "no-cache"}
        if _matches(request, latest.etag):
            return Response(None, 304, headers)
        return Response(latest.body, 200, headers, JSON)

    async def get_serving(self, request: Request) -> Response:
        game, model = await self.names(request)
        return tagged(request, await self.serving(game, model))

    async def get_alias(self, request: Request) -> Response:
        game, model = await self.names(request)
        return tagged(request, await self.named(game, model, request.path_params["alias"]))

    async def get_manifest(self, request: Request) -> Response:
        game, model = await self.names(request)
        return answer(await self.manifest(game, model, request.path_params["version"]), headers=FOREVER)

    async def get_file(self, request: Request) -> Response:
        game, model = await self.names(request)
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

    async def names(self, request: Request) -> tuple[str, str]:
        """Game and model of a path, or 404."""
        game = await self._games.get(request.path_params["game"], request.query_params.get("schema"))
        model = request.path_params["model"]
        if not NAME.fullmatch(model):
            raise HTTPProblem(404, f"{model[:100]!r} is no model's name: see GET /v1/games/{game.name}/models")
        return game.name, model


def _etag(digest: str) -> str:
    return f'"{digest}"'


def tagged(request: Request, message: Serving | Manifest | AbTests) -> Response:
    """For who asks again and again."""
    body = msgspec.json.encode(message)
    headers = {"etag": _etag(hashlib.sha256(body).hexdigest()), "cache-control": "no-cache"}
    if _matches(request, headers["etag"]):
        return Response(None, 304, headers)
    return Response(body, 200, headers, JSON)


def _matches(request: Request, etag: str) -> bool:
    asked = request.headers.get("if-none-match", "")
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in asked.split(",")) if asked else False


def operations(parts: "Parts") -> list[Operation]:
    """Shared with web pages of all origins: a browser game loads its bot from here."""
    models, model = parts.models, "/v1/games/{game}/models/{model}"
    get = partial(Operation, "GET", errors=(404,), shared="all")
    polled = partial(get, statuses=UNLESS_KNOWN, headers=ETAG, query=SCHEMA)
    what = "What players get: the stable version, and the candidate with its share of the episodes"
    files = {"application/octet-stream": bytes, "text/markdown": bytes, JSON: bytes}
    return [
        get("/v1/games/{game}/models", models.list, "The game's models", {JSON: list[ModelInfo]}),
        polled(f"{model}/latest", models.get_latest, "The newest version's manifest", {JSON: Manifest}),
        polled(f"{model}/serving", models.get_serving, what, {JSON: Serving}),
        polled(
            model + "/aliases/{alias}",
            models.get_alias,
            "The manifest of the version that an alias names",
            {JSON: Manifest},
        ),
        get(
            model + "/{version:version}/manifest",
            models.get_manifest,
            "A version's manifest; never changes",
            {JSON: Manifest},
            query=SCHEMA,
        ),
        polled(model + "/{version:version}/files/{name}", models.get_file, "A version's file; never changes", files),
    ]
