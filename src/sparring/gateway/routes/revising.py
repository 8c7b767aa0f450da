"""Changing a game that is there: its name, its simulator, whether it is archived."""

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import GameChange
from sparring.errors import InputError
from sparring.games import Game, env_check
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer, decode, media_type, read_body
from sparring.gateway.live import Live
from sparring.gateway.openapi import Operation
from sparring.gateway.routes.games import WRITES, Games
from sparring.store.profile import Revision
from sparring.store.protocol import NotRegistered, Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Revising", "operations"]

MAX_BODY = 64 << 10
MAX_NAMES = 100  # of one game
log = logging.getLogger(__name__)


class Revising:
    def __init__(self, store: Store, games: Games, live: Live, budget: Budget) -> None:
        self._store, self._games, self._live, self._budget = store, games, live, budget
        self._changing = asyncio.Lock()  # names are given to one game each
        self._trying = asyncio.Lock()  # simulators are tried one at a time; whoever changes none does not wait

    async def patch(self, request: Request) -> Response:
        media_type(request, JSON)
        with self._budget.hold(request) as hold:
            asked = decode(await read_body(request, MAX_BODY, hold, "say less"), JSON, GameChange, "a change of a game")
        name = request.path_params["game"]
        if asked.env is UNSET and asked.env_kwargs is UNSET:
            return await self._change(name, asked)
        async with self._trying:
            game = await self._games.get(name)
            if (wanted := _simulated(game, asked)) != game:
                await self._require_env(wanted)
            return await self._change(name, asked)

    async def _change(self, name: str, asked: GameChange) -> Response:
        async with self._changing:
            game = await self._games.get(name)
            if isinstance(asked.name, str):
                await self._require_free(game, asked.name)
            try:
                await asyncio.to_thread(self._store.revise, game.name, lambda known: _revised(known, asked))
            except NotRegistered as error:  # deleted meanwhile
                raise HTTPProblem(404, str(error)) from error
            await self._games.all()
        self._live.touch(game.name)
        log.info("%s: changed by %s", game.name, msgspec.json.encode(asked).decode())
        return answer(await self._games.get(game.name))

    async def _require_env(self, game: Game) -> None:
        if game.env is None:
            if game.env_kwargs:
                raise HTTPProblem(422, f"{game.name} has no simulator that could be set: name one as its env, too")
            return
        try:
            await env_check.require(game)
        except InputError as error:
            raise HTTPProblem(422, str(error)) from error

    async def _require_free(self, game: Game, name: str) -> None:
        if not NAME.fullmatch(name):
            raise HTTPProblem(422, f"{name[:100]!r} is no game's name: use letters, digits, '.', '_' and '-'")
        await self._games.all()
        found = self._games.family.find(name)
        if found is not None and found.name != game.name:
            raise HTTPProblem(409, f"there is a game {name!r} already: choose another name")
        if len(self._games.profile(game.name).names) >= MAX_NAMES:
            raise HTTPProblem(409, f"{game.name!r} has {MAX_NAMES} names already, and old clients know each")


def _simulated(game: Game, asked: GameChange) -> Game:
    """The game with the simulator that is asked for."""
    env = game.env if asked.env is UNSET else asked.env
    before = game.env_kwargs if env == game.env else UNSET
    return msgspec.structs.replace(
        game, env=env, env_kwargs=(before if asked.env_kwargs is UNSET else asked.env_kwargs) or UNSET
    )


def _revised(known: Revision, asked: GameChange) -> Revision:
    game, profile = _simulated(known.game, asked), known.profile
    if asked.archived is not UNSET:
        profile = msgspec.structs.replace(profile, archived=asked.archived)
    if asked.name is not UNSET:
        others = tuple(name for name in profile.names if name != asked.name)
        profile = msgspec.structs.replace(profile, names=(*others, asked.name))
    return Revision(game, profile)


def operations(parts: "Parts") -> list[Operation]:
    return [
        Operation(
            "PATCH",
            "/v1/games/{game}",
            parts.revising.patch,
            "Change a game: a further name, its simulator, archived or not",
            {JSON: Game},
            {JSON: GameChange},
            errors=(404, 408, 409, *WRITES),
            example={"archived": False},
        )
    ]
