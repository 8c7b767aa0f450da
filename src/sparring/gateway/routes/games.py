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
from sparring.store.protocol import Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Games", "operations"]

# Of declarations. One takes twenty times its bytes in memory, and 70 µs a KiB each time that the games are read.
MAX_DECLARATION = 64 << 10  # without spaces and line breaks
MAX_BODY = 4 * MAX_DECLARATION  # with them
MAX_GAMES = 1000
MAX_DECLARATIONS = 4 << 20  # bytes of all of them
ADVICE = "give one bound for all elements instead of a list of them, and fewer fields"
REST = 9  # a look at the store's games is followed by a rest of so many times what it took, …
MAX_REST = 1.0  # … at most so many seconds


class Games:
    def __init__(self, store: Store, budget: Budget) -> None:
        self._store = store
        self._budget = budget
        self._known: dict[str, Game] = {}
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
                games = await asyncio.to_thread(self._store.games)
            finally:
                now = time.monotonic()
                self._rested = now + min(REST * (now - begin), MAX_REST)
            self._known = {game.name: game for game in games}
            return games

    def forget(self, name: str) -> None:
        """It was deleted."""
        self._known.pop(name, None)

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
            _require_room(known, game)
            try:
                await asyncio.to_thread(self._store.register, game)
            except InputError as error:  # another client was faster, with other spaces
                raise HTTPProblem(409, str(error)) from error
            await self.all()
        return answer(await self.get(name), 201)

    async def show(self, request: Request) -> Response:
        return answer(await self.get(request.path_params["game"]))


def _require_room(known: dict[str, Game], game: Game) -> None:
    size, full = len(msgspec.json.encode(game)), ""
    if size > MAX_DECLARATION:
        raise HTTPProblem(413, f"the declaration has {size} bytes, at most {MAX_DECLARATION} are allowed: {ADVICE}")
    size += sum(len(msgspec.json.encode(other)) for other in known.values())
    if len(known) >= MAX_GAMES:
        full = f"this platform has {len(known)} games, and takes no more"
    elif size > MAX_DECLARATIONS:
        full = f"the games' declarations would take {size} bytes, at most {MAX_DECLARATIONS} are allowed"
    if full:
        raise HTTPProblem(
            507, f"{full}: delete games that nobody plays (`sparring delete GAME`), or run another platform"
        )


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
