"""The registered games: PUT, list, show. Kept in memory, since every upload asks for one."""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import GameInfo
from sparring.errors import InputError
from sparring.experience.change import Change
from sparring.games import Box, Discrete, Game
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer, media_type, read_body
from sparring.gateway.openapi import Operation
from sparring.store.declarations import ADVICE, MAX_DECLARATION, DeclarationTooLarge, NoRoom, Room
from sparring.store.family import Family
from sparring.store.profile import GameSettings, Profile, Revision
from sparring.store.protocol import NotRegistered, Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Games", "operations"]

SCHEMA = "sparring-schema"  # a header: what clients send along with their play
MAX_BODY = 4 * MAX_DECLARATION  # with spaces and line breaks
REST = 9  # a look at the store's games is followed by a rest of so many times what it took, …
MAX_REST = 1.0  # … at most so many seconds
LOOK_AGAIN = 5.0  # seconds after which what people decided about games is looked up again


class Games:
    def __init__(self, store: Store, budget: Budget, defaults: GameSettings = GameSettings()) -> None:
        self._store = store
        self._defaults = defaults
        self._profiles: dict[str, Profile] = {}
        self._looked = 0.0  # when the newest look ended
        self._budget = budget
        self._family = Family((), {})
        self._unreadable: dict[str, str] = {}  # games that are stored, but cannot be used: why
        self._next: asyncio.Task[list[Game]] | None = None  # a look that has not begun yet
        self._looking = asyncio.Lock()
        self._rested = 0.0  # when the next look may begin
        self._registering = asyncio.Lock()

    async def get(self, name: str, schema: str | None = None) -> Game:
        """The game, or its generation of that schema; or 404."""
        if (game := self._family.find(name, schema)) is None and NAME.fullmatch(name):
            await self.all()  # another process may have registered it
            game = self._family.find(name, schema)
        if game is None:
            self._require_readable(name)
            raise HTTPProblem(
                404, f"there is no game {name[:100]!r} here: see GET /v1/games, or register it with PUT /v1/games/NAME"
            )
        return game

    async def all(self) -> list[Game]:
        """As the store has them after this call began. All who ask before the next look begins share it. Looks take a
        tenth of the time at most, so names that nobody registered cost no more than that, however often they are asked
        for."""
        return await asyncio.shield(self._next or self._begin_look())

    def _begin_look(self) -> "asyncio.Task[list[Game]]":
        self._next = asyncio.create_task(self._look())
        self._next.add_done_callback(lambda look: look.cancelled() or look.exception())  # nobody may be left to ask
        return self._next

    async def _look(self) -> list[Game]:
        async with self._looking:
            await asyncio.sleep(max(0.0, self._rested - time.monotonic()))
            self._next = None  # who asks from now on wants to know what comes after this one
            begin = time.monotonic()
            try:
                games, profiles, unreadable = await asyncio.to_thread(self._read)
            finally:
                now = time.monotonic()
                self._rested = now + min(REST * (now - begin), MAX_REST)
            self._family, self._unreadable = Family(games, profiles), unreadable
            self._profiles, self._looked = profiles, now
            return games

    def _read(self) -> tuple[list[Game], dict[str, Profile], dict[str, str]]:
        return self._store.games(), self._store.profiles(), self._store.unreadable()

    def profile(self, name: str) -> Profile:
        """What people decided about a game, as it was known at the newest look. After a while there is another look,
        for which nobody waits: another gateway may have changed it."""
        if self._next is None and time.monotonic() - self._looked > LOOK_AGAIN:
            self._begin_look()
        return self._profiles.get(name, Profile())

    @property
    def profiles(self) -> dict[str, Profile]:
        return self._profiles

    @property
    def unreadable(self) -> int:
        """How many games are stored, but cannot be used."""
        return len(self._unreadable)

    @property
    def family(self) -> Family:
        """As of the newest look."""
        return self._family

    def settings(self, name: str) -> GameSettings:
        """With the platform's own where a game has none."""
        return self.effective(self.profile(name).settings)

    def effective(self, settings: GameSettings) -> GameSettings:
        return settings.over(self._defaults)

    async def has(self, name: str) -> bool:
        """Whether it is registered, also if its declaration cannot be read."""
        await self.all()
        return self._family.find(name) is not None or name in self._unreadable

    def _require_readable(self, name: str) -> None:
        """A 503 otherwise: clients keep their play until the game can be used again."""
        if name in self._unreadable:
            raise HTTPProblem(503, self._unreadable[name], headers={"retry-after": "60"})

    def forget(self, name: str) -> None:
        """It was deleted."""
        self._profiles = {other: profile for other, profile in self._profiles.items() if other != name}
        self._family = Family((game for game in self._family.games if game.name != name), self._profiles)
        self._unreadable.pop(name, None)

    async def put(self, request: Request) -> Response:
        name = request.path_params["game"]
        media_type(request, JSON)
        with self._budget.hold(request) as hold:
            game = Game.from_json(await read_body(request, MAX_BODY, hold, ADVICE))
        if game.name != name:
            raise HTTPProblem(422, f"the address says {name[:100]!r}, the declaration {game.name!r}: use one name")
        async with self._registering:
            games = await self.all()
            known = self._family.find(name)
            if (same := self._family.find(name, game.schema)) is not None:
                return _answer(await self._revised(same, game))
            if known is not None:
                raise HTTPProblem(409, _difference(self._family.generations(name)[-1], game))
            self._require_readable(name)
            try:
                Room(games, len(self._unreadable)).require(game)
                await asyncio.to_thread(self._store.register, game)
            except DeclarationTooLarge as error:
                raise HTTPProblem(413, str(error)) from error
            except NoRoom as error:
                raise HTTPProblem(507, str(error)) from error
            except InputError as error:  # another client was faster, with other spaces
                raise HTTPProblem(409, str(error)) from error
            await self.all()
        return _answer(await self.get(name), 201)

    async def _revised(self, known: Game, asked: Game) -> Game:
        """A known game with the origins of a new declaration, if that has some."""
        if asked.origins is msgspec.UNSET or asked.origins == known.origins:
            return known
        origins = asked.origins

        def revise(now: Revision) -> Revision:
            return msgspec.structs.replace(now, game=msgspec.structs.replace(now.game, origins=origins))

        try:
            await asyncio.to_thread(self._store.revise, known.name, revise)
        except NotRegistered as error:  # deleted by another gateway
            raise HTTPProblem(404, str(error)) from error
        await self.all()
        return await self.get(known.name)

    async def show(self, request: Request) -> Response:
        return _answer(await self.get(request.path_params["game"]))


def _answer(game: Game, status: int = 200) -> Response:
    """The schema goes into a header: clients of version 0.1 refuse a declaration with a field that they do not know."""
    return answer(game, status, headers={"cache-control": "no-store", SCHEMA: game.schema})


def _difference(known: Game, asked: Game) -> str:
    return (
        f"the game {known.name!r} exists with schema {known.schema}, yours is {asked.schema}: "
        f"{'; '.join(Change(known, asked).words())[:2000]}. If the game has changed, `sparring change {known.name} "
        f"FILE.json` makes a new generation of it, and old clients go on; else use the spaces of GET "
        f"/v1/games/{known.name}, or another name"
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
            "Register a game; safe to repeat with the same spaces. The header Sparring-Schema tells its schema",
            {JSON: Game},
            {JSON: Game},
            {200: "It was there already", 201: "Registered"},
            (408, 409, *WRITES),
            example=EXAMPLE_GAME,
        ),
        Operation(
            "GET",
            "/v1/games",
            parts.live.games,
            "All games",
            {JSON: list[GameInfo]},
            errors=(422,),
            query={"archived": ("Also those that are archived", False, {"type": "boolean", "default": False})},
        ),
        Operation(
            "GET",
            game,
            parts.games.show,
            "A game's declaration; the header Sparring-Schema tells its schema",
            {JSON: Game},
            errors=(404,),
            shared="game",
        ),
    ]
