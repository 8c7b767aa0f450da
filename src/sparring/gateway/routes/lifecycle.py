"""Pausing, resuming and deleting games. A deleted game is gone from the store, the registry and this gateway's memory;
its trainer sees that by itself."""

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, HTTPProblem, answer
from sparring.gateway.live import Live
from sparring.gateway.openapi import Operation
from sparring.gateway.routes.act import Acting
from sparring.gateway.routes.fragments import Uploads
from sparring.gateway.routes.games import Games
from sparring.gateway.routes.models import Models
from sparring.registry.registry import RegistryError
from sparring.store.protocol import NotRegistered, Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Deleted", "Lifecycle", "Paused", "operations"]

REMEMBERED = 1000  # deleted games
log = logging.getLogger(__name__)


class Paused(msgspec.Struct, frozen=True):
    """Whether the game is trained. Its play is stored either way."""

    game: str
    paused: bool


class Deleted(msgspec.Struct, frozen=True):
    """The game that is gone, and how many published versions with it."""

    deleted: str
    versions: int


class Lifecycle:
    def __init__(
        self, store: Store, games: Games, models: Models, live: Live, uploads: Uploads, acting: Acting
    ) -> None:
        self._store, self._games, self._models = store, games, models
        self._live, self._uploads, self._acting = live, uploads, acting
        self._deleted: OrderedDict[str, None] = OrderedDict()  # until they are declared again
        self._deleting: set[str] = set()

    async def pause(self, request: Request) -> Response:
        return await self._pause(request.path_params["game"], True)

    async def resume(self, request: Request) -> Response:
        return await self._pause(request.path_params["game"], False)

    async def _pause(self, name: str, paused: bool) -> Response:
        game = await self._games.get(name)
        try:
            await asyncio.to_thread(self._store.pause, game.name, paused)
        except NotRegistered as error:  # deleted by another gateway
            raise HTTPProblem(404, str(error)) from error
        self._live.touch(game.name)
        return answer(Paused(game.name, paused))

    async def delete(self, request: Request) -> Response:
        """Again when it was interrupted: what is left of a game that is not registered any more goes as well."""
        name = request.path_params["game"]
        if not NAME.fullmatch(name):
            raise HTTPProblem(404, f"there is no game {name[:100]!r} here: see GET /v1/games")
        known = await self._games.has(name)
        name = found.name if (found := self._games.family.find(name)) is not None else name
        self._deleting.add(name)
        try:
            if known:
                self._remember(name)
            await asyncio.to_thread(self._store.delete_game, name)
            versions = await self._models.delete(name)
        except RegistryError as error:
            log.error("%s: %s", name, error)
            detail = f"the play of {name!r} is deleted, its models are not yet: {error}. Send this again later"
            raise HTTPProblem(503, detail, headers={"retry-after": "5"}) from error
        finally:
            self._deleting.discard(name)
            self._forget(name)
        if not known and not versions:
            raise HTTPProblem(404, f"there is no game {name!r} here, nor models of one: see GET /v1/games")
        log.info("%s: deleted, with %d published versions", name, versions)
        return answer(Deleted(name, versions))

    async def put(self, request: Request) -> Response:
        name = request.path_params["game"]
        if name in self._deleting:
            detail = f"{name[:100]!r} is being deleted: declare it again in a few seconds"
            raise HTTPProblem(503, detail, headers={"retry-after": "2"})
        response = await self._games.put(request)
        self._deleted.pop(name, None)
        return response

    async def upload(self, request: Request) -> Response:
        """A game that was deleted while clients play it is distinguished from one that was never there: clients declare
        the latter again by themselves, and would undo the deletion."""
        name = request.path_params["game"]
        try:
            return await self._uploads.upload(request)
        except NotRegistered:
            if await self._games.has(name):
                raise
            self._remember(name)  # another gateway deleted it
            self._forget(name)
            raise self._gone(name) from None
        except HTTPProblem as refusal:
            if refusal.problem.status == 404 and await self._was_deleted(name):
                raise self._gone(name) from None
            raise

    async def _was_deleted(self, name: str) -> bool:
        """By this gateway, or by one before it."""
        return name in self._deleted or (
            NAME.fullmatch(name) is not None and await asyncio.to_thread(self._store.deleted, name)
        )

    def _gone(self, name: str) -> HTTPProblem:
        return HTTPProblem(410, f"the game {name!r} was deleted here: start the client anew to declare it again")

    def _remember(self, name: str) -> None:
        self._deleted[name] = None
        while len(self._deleted) > REMEMBERED:
            self._deleted.popitem(last=False)

    def _forget(self, name: str) -> None:
        self._games.forget(name)
        self._models.forget(name)
        self._acting.forget(name)
        self._live.drop(name)


def operations(parts: "Parts") -> list[Operation]:
    game, lifecycle = "/v1/games/{game}", parts.lifecycle
    return [
        Operation(
            "POST",
            f"{game}/pause",
            lifecycle.pause,
            "Stop training a game; its play is still stored",
            {JSON: Paused},
            errors=(404, 507),
        ),
        Operation(
            "POST",
            f"{game}/resume",
            lifecycle.resume,
            "Train a paused game again",
            {JSON: Paused},
            errors=(404, 507),
        ),
        Operation(
            "DELETE",
            game,
            lifecycle.delete,
            "Delete a game: its declaration, its play and its published models",
            {JSON: Deleted},
            errors=(404, 507),
        ),
    ]
