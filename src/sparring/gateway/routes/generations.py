"""Generations of a game: its spaces change, and old clients, old play and old bots go on."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import Generation, NewGeneration
from sparring.errors import InputError
from sparring.experience.change import Change
from sparring.games import Game
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer, decode, media_type, read_body
from sparring.gateway.openapi import Operation
from sparring.gateway.routes.games import EXAMPLE_GAME, MAX_BODY, WRITES, Games
from sparring.store.declarations import DeclarationTooLarge, NoRoom, Room
from sparring.store.family import Family
from sparring.store.lineage import Lineage
from sparring.store.profile import Origin, Profile, Revision
from sparring.store.protocol import Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Generations", "operations"]

log = logging.getLogger(__name__)


class Generations:
    def __init__(self, store: Store, games: Games, budget: Budget) -> None:
        self._store, self._games, self._budget = store, games, budget
        self._making = asyncio.Lock()

    async def list(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        await self._games.all()
        return answer([self._info(one) for one in self._games.family.generations(game.name)])

    async def make(self, request: Request) -> Response:
        """Without `confirmed` the answer only says what would change."""
        media_type(request, JSON)
        with self._budget.hold(request) as hold:
            body = await read_body(request, MAX_BODY, hold, "say less")
        asked = decode(body, JSON, NewGeneration, "a new generation")
        async with self._making:
            game = await self._games.get(request.path_params["game"])
            games, family = await self._games.all(), self._games.family
            if (there := family.find(game.name, asked.game.schema)) is not None:
                return answer(self._info(there))  # as it is, or was changed already
            before = family.generations(game.name)[-1]
            change = Change(before, asked.game, asked.defaults)
            number = family.generation(before.name) + 1
            new = msgspec.structs.replace(asked.game, name=self._name(family, before.name, number, asked.game))
            made = Generation(new.name, new.schema, number, before.name, change.words(), exists=asked.confirmed)
            if asked.confirmed:
                await self._register(games, family, before, new, asked.defaults, made)
                await self._games.all()
                log.info("%s: generation %d of %s: %s", new.name, number, before.name, "; ".join(made.changes))
        return answer(made, 201 if asked.confirmed else 200)

    def _info(self, game: Game) -> Generation:
        origin = self._games.profile(game.name).origin
        number = self._games.family.generation(game.name)
        if origin is None:
            return Generation(game.name, game.schema, number, None, [], exists=True)
        return Generation(game.name, game.schema, number, origin.game, list(origin.changes), exists=True)

    def _name(self, family: Family, before: str, number: int, game: Game) -> str:
        first = family.first(before)
        for n in range(number, number + 1000):
            name = f"{first}.{n}"
            if not NAME.fullmatch(name):
                raise HTTPProblem(422, f"{name[:120]!r} would be too long a name: rename the game first")
            there = family.find(name)
            # One without an origin, and with these spaces: a change that was cut short.
            if there is None or (there.schema == game.schema and self._games.profile(name).origin is None):
                return name
        raise HTTPProblem(409, f"all names from {first}.{number} on are taken")

    async def _register(
        self,
        games: Sequence[Game],
        family: Family,
        before: Game,
        new: Game,
        defaults: dict[str, Any],
        made: Generation,
    ) -> None:
        try:
            Room(games, self._games.unreadable).require(new)
        except DeclarationTooLarge as error:
            raise HTTPProblem(413, str(error)) from error
        except NoRoom as error:
            raise HTTPProblem(507, str(error)) from error
        profiles = self._games.profiles

        def work() -> None:
            older = Lineage(self._store, before, family, profiles)
            origin = Origin(
                before.name,
                self._store.registration(before.name),
                made.generation,
                older.end(),
                older.count(),
                defaults,
                tuple(made.changes),
                time.time(),
            )
            settings = profiles.get(before.name, Profile()).settings
            self._store.register(new)
            self._store.revise(new.name, lambda known: Revision(known.game, Profile(settings, origin=origin)))

        try:
            await asyncio.to_thread(work)
        except InputError as error:  # somebody else was faster
            raise HTTPProblem(409, str(error)) from error


def operations(parts: "Parts") -> list[Operation]:
    path = "/v1/games/{game}/generations"
    return [
        Operation(
            "GET",
            path,
            parts.generations.list,
            "A game's generations, the oldest first",
            {JSON: list[Generation]},
            errors=(404,),
        ),
        Operation(
            "POST",
            path,
            parts.generations.make,
            "Change a game's spaces: what would change, in words; with `confirmed`, it is done",
            {JSON: Generation},
            {JSON: NewGeneration},
            {200: "What would change, or the generation that is there", 201: "Made"},
            (404, 408, 409, *WRITES),
            example={"game": EXAMPLE_GAME, "defaults": {}},
        ),
    ]
