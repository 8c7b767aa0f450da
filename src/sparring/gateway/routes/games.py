"""The registered games: PUT, list, show. Kept in memory, since every upload asks for one."""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import GameInfo
from sparring.errors import InputError
from sparring.games import Box, Discrete, Game
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer, media_type, read_body
from sparring.gateway.openapi import Operation
from sparring.store.declarations import ADVICE, MAX_DECLARATION, DeclarationTooLarge, NoRoom, Room
from sparring.store.protocol import Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Games", "operations"]

MAX_BODY = 4 * MAX_DECLARATION  # with spaces and line breaks
REST = 9  # a look at the store's games is followed by a rest of so many times what it took, …
MAX_REST = 1.0  # … at most so many seconds


class Games:
    def __init__(self, store: Store, budget: Budget) -> None:
        self._store = store
        self._budget = budget
        self._known: dict[str, Game] = {}
        self._unreadable: dict[str, str] = {}  # games that are stored, but cannot be used: why
        self._next: asyncio.Task[list[Game]] | None = None  # a look that has not begun yet
        self._looking = asyncio.Lock()
        self._rested = 0.0  # when the next look may begin
        self._registering = asyncio.Lock()

    async def get(self, name: str) -> Game:
        """The game, or 404."""
        if (game := self._known.get(name)) is None and NAME.fullmatch(name):
            await self.all()  # another process may have registered it
            game = self._known.get(name)
        if game is None:
            self._require_readable(name)
            raise HTTPProblem(
                404, f"there is no game {name[:100]!r} here: see GET /v1/games, or register it with PUT /v1/games/NAME"
            )
        return game

    async def all(self) -> list[Game]:
        """As the store has them after this call began. All who ask before the next look begins share it, and looks take
        a tenth of the time at most: names that nobody registered, asked for however often, cost no more than that."""
        if self._next is None:
            self._next = asyncio.create_task(self._look())
            self._next.add_done_callback(lambda look: look.cancelled() or look.exception())  # nobody may be left to ask
        return await asyncio.shield(self._next)

    async def _look(self) -> list[Game]:
        async with self._looking:
            await asyncio.sleep(max(0.0, self._rested - time.monotonic()))
            self._next = None  # who asks from now on wants to know what comes after this one
            begin = time.monotonic()
            try:
                games, unreadable = await asyncio.to_thread(self._read)
            finally:
                now = time.monotonic()
                self._rested = now + min(REST * (now - begin), MAX_REST)
            self._known, self._unreadable = {game.name: game for game in games}, unreadable
            return games

    def _read(self) -> tuple[list[Game], dict[str, str]]:
        return self._store.games(), self._store.unreadable()

    async def has(self, name: str) -> bool:
        """Whether it is registered, also if its declaration cannot be read."""
        return name in {game.name for game in await self.all()} or name in self._unreadable

    def _require_readable(self, name: str) -> None:
        """A 503 otherwise: clients keep their play until the game can be used again."""
        if name in self._unreadable:
            raise HTTPProblem(503, self._unreadable[name], headers={"retry-after": "60"})

    def forget(self, name: str) -> None:
        """It was deleted."""
        self._known.pop(name, None)
        self._unreadable.pop(name, None)

    async def put(self, request: Request) -> Response:
        name = request.path_params["game"]
        media_type(request, JSON)
        with self._budget.hold(request) as hold:
            game = Game.from_json(await read_body(request, MAX_BODY, hold, ADVICE))
        if game.name != name:
            raise HTTPProblem(422, f"the address says {name[:100]!r}, the declaration {game.name!r}: use one name")
        async with self._registering:
            known = {game.name: game for game in await self.all()}
            if name in known:
                if known[name].schema != game.schema:
                    raise HTTPProblem(409, _difference(known[name], game))
                return answer(known[name])
            self._require_readable(name)
            try:
                Room(known.values(), len(self._unreadable)).require(game)
                await asyncio.to_thread(self._store.register, game)
            except DeclarationTooLarge as error:
                raise HTTPProblem(413, str(error)) from error
            except NoRoom as error:
                raise HTTPProblem(507, str(error)) from error
            except InputError as error:  # another client was faster, with other spaces
                raise HTTPProblem(409, str(error)) from error
            await self.all()
        return answer(await self.get(name), 201)

    async def show(self, request: Request) -> Response:
        return answer(await self.get(request.path_params["game"]))


def _difference(known: Game, asked: Game) -> str:
    parts = [
        f"{part} (here {getattr(known, part)}, yours {getattr(asked, part)})"
        for part in ("observation", "action", "players")
        if getattr(known, part) != getattr(asked, part)
    ]
    return (
        f"the game {known.name!r} exists with schema {known.schema}, yours is {asked.schema}: they differ in "
        f"{' and '.join(parts)[:2000]}. Use the spaces of GET /v1/games/{known.name}, or another name"
    )


WRITES = (413, 415, 422, 507)
CARTPOLE = Game("CartPole-v1", Box((4,)), Discrete(2), env="CartPole-v1")
EXAMPLE_GAME = msgspec.json.decode(CARTPOLE.to_json())


def operations(parts: "Parts") -> list[Operation]:
    game = "/v1/games/{game}"
    return [
        Operation(
            "PUT",
            game,
            parts.lifecycle.put,
            "Register a game; again with the same spaces is fine",
            {JSON: Game},
            {JSON: Game},
            {200: "It was there already", 201: "Registered"},
            (408, 409, *WRITES),
            example=EXAMPLE_GAME,
        ),
        Operation("GET", "/v1/games", parts.live.games, "All games", {JSON: list[GameInfo]}),
        Operation("GET", game, parts.games.show, "A game's declaration", {JSON: Game}, errors=(404,)),
    ]
