"""The registered games: PUT, list, show. Kept in memory, since every upload asks for one."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import NAME
from sparring.gateway.http import JSON, Refusal, answer, media_type, read_body
from sparring.store.protocol import Store

__all__ = ["Games"]

MAX_DECLARATION = 1 << 20


class Games:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Game] = {}

    async def get(self, name: str) -> Game:
        """The game, or 404."""
        if (game := self._known.get(name)) is None and NAME.fullmatch(name):
            await self.all()  # another process may have registered it
            game = self._known.get(name)
        if game is None:
            raise Refusal(
                404, f"there is no game {name[:100]!r} here: see GET /v1/games, or register it with PUT /v1/games/NAME"
            )
        return game

    async def all(self) -> list[Game]:
        games = await asyncio.to_thread(self._store.games)
        self._known = {game.name: game for game in games}
        return games

    async def put(self, request: Request) -> Response:
        name = request.path_params["game"]
        media_type(request, JSON)
        game = Game.from_json(await read_body(request, MAX_DECLARATION))
        if game.name != name:
            raise Refusal(422, f"the address says {name[:100]!r}, the declaration {game.name!r}: use one name")
        known = {game.name: game for game in await self.all()}.get(name)
        if known is not None and known.schema != game.schema:
            raise Refusal(409, _difference(known, game))
        try:
            await asyncio.to_thread(self._store.register, game)
        except InputError as error:  # another client was faster, with other spaces
            raise Refusal(409, str(error)) from error
        await self.all()
        return answer(self._known[name], 200 if known else 201)

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
