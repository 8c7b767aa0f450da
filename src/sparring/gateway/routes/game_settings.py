"""Settings of games: shown, and set while they are trained. What is wrong is refused here, not by the trainer later."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring import algorithms, plugins
from sparring.api import SettingsInfo
from sparring.errors import InputError
from sparring.fields import convert
from sparring.games import Game
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer, decode, media_type, read_body
from sparring.gateway.openapi import Operation
from sparring.gateway.routes.games import WRITES, Games
from sparring.store.profile import GameSettings, PromotionRule, Revision
from sparring.store.protocol import NotRegistered, Store
from sparring.trainer.settings import Settings

if TYPE_CHECKING:
    from sparring.gateway.live import Live
    from sparring.gateway.parts import Parts

__all__ = ["SettingsOfGames", "operations"]

MAX_BODY = 64 << 10
USUAL = Settings()  # what a trainer does without settings


class SettingsOfGames:
    def __init__(self, store: Store, games: Games, budget: Budget, live: "Live") -> None:
        self._store, self._games, self._budget, self._live = store, games, budget, live
        self._checking = asyncio.Lock()  # a check is a process of its own: one at a time

    async def show(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        await self._games.all()  # another gateway may have changed them
        return answer(await self._info(game))

    async def put(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        media_type(request, JSON)
        with self._budget.hold(request) as hold:
            given = decode(await read_body(request, MAX_BODY, hold, "say less"), JSON, dict[str, Any], "settings")
        settings = convert(given, GameSettings)
        await self._check(game, settings)
        try:
            await asyncio.to_thread(self._store.revise, game.name, lambda known: _with_settings(known, settings))
        except NotRegistered as error:  # deleted meanwhile
            raise HTTPProblem(404, str(error)) from error
        await self._games.all()
        self._live.touch(game.name)
        return answer(await self._info(game))

    async def _info(self, game: Game) -> SettingsInfo:
        own, effective = self._games.profile(game.name).settings, self._games.settings(game.name)
        promotion = {name: getattr(USUAL, name) for name in PromotionRule.__struct_fields__}
        learns = None if effective.algorithm else await self._learns(game)
        return SettingsInfo(game.name, own, effective, GameSettings(learns, promotion=PromotionRule(**promotion)))

    async def _learns(self, game: Game) -> str:
        """The algorithm where none was set: what the trainer says, else what it would begin with."""
        trainer = (await self._live.snapshot(game.name)).trainer
        return trainer.algorithm if trainer else algorithms.default_for(game)

    async def _check(self, game: Game, settings: GameSettings) -> None:
        """What the trainer would refuse. Modules are the operator's to name: whoever reaches this API must not choose
        what is imported here."""
        for text in _texts([settings.algorithm, settings.hyperparameters]):
            if plugins.is_outside(text):
                raise HTTPProblem(
                    422,
                    f"{text[:100]!r} names a module, never to be imported for a client: "
                    f"say it where the platform is started, `sparring up --set algorithm={text[:100]}`",
                )
        if settings.algorithm is None and not settings.hyperparameters:
            return
        whole = self._games.effective(settings)
        name = await self._learns(game) if whole.algorithm is None else whole.algorithm
        if plugins.is_outside(name):  # the operator's: the trainer reports what is wrong
            return
        async with self._checking:
            try:
                await asyncio.to_thread(algorithms.check_for, name, game, whole.hyperparameters)
            except InputError as error:
                raise HTTPProblem(422, str(error).replace("algorithm.", "hyperparameters.")) from error


def _with_settings(known: Revision, settings: GameSettings) -> Revision:
    return Revision(known.game, msgspec.structs.replace(known.profile, settings=settings))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts([key, inner])
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def operations(parts: "Parts") -> list[Operation]:
    settings, path = parts.settings, "/v1/games/{game}/settings"
    return [
        Operation("GET", path, settings.show, "How a game is learned", {JSON: SettingsInfo}, errors=(404,)),
        Operation(
            "PUT",
            path,
            settings.put,
            "Set how a game is learned; takes the place of what was set before, and works within seconds",
            {JSON: SettingsInfo},
            {JSON: GameSettings},
            errors=(404, 408, *WRITES),
            example={"promotion": {"canary": 0.2}, "pace": 5},
        ),
    ]
