"""Which web pages of other origins may ask for a game's bots and send its play: those of the origins in the game's
declaration. Models are everybody's. (Browsers ask first, with a preflight, and obey; game clients send no Origin.)"""

from collections.abc import Mapping
from typing import Literal

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from sparring.gateway.endpoint import HTTPProblem
from sparring.gateway.routes.games import SCHEMA, Games

__all__ = ["Cors", "Sharing"]

Sharing = Literal["game", "all"]  # with the origins that the game allows, or with all
HEADERS = "content-type, content-encoding, if-none-match"  # that a page may send …
EXPOSED = f"etag, retry-after, {SCHEMA}"  # … and read, besides the usual ones
MAX_AGE = "600"  # seconds for which a browser need not ask again


class Cors:
    """Of one route.

    :param method: That pages may use there.
    :param allow: All methods of its path, for who is no page.
    """

    def __init__(self, games: Games, sharing: Sharing, method: str, allow: str) -> None:
        self._games, self._sharing, self._method, self._allow = games, sharing, method, allow

    async def headers(self, scope: Scope) -> dict[str, str]:
        """What an answer to the page needs; empty where it has no right to read it, or where no page asks."""
        origin = _origin(scope)
        if self._sharing == "all":
            return {"access-control-allow-origin": "*", "access-control-expose-headers": EXPOSED}
        if not origin:
            return {}
        vary = {"vary": "Origin"}  # a cache must not give one page the answer for another
        if not await self._allows(scope["path_params"]["game"], origin):
            return vary
        return {**vary, "access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED}

    def preflight(self, scope: Scope, headers: Mapping[str, str]) -> Response:
        """The answer to OPTIONS, from `headers` of the same request."""
        origin = _origin(scope)
        if not origin:
            detail = f"OPTIONS is for web pages, which say their Origin: use {self._allow}"
            raise HTTPProblem(405, detail, headers={"allow": self._allow})
        if "access-control-allow-origin" not in headers:
            raise foreign(origin, scope["path_params"]["game"])
        allowed = {"methods": self._method, "headers": HEADERS}
        answer = {f"access-control-allow-{name}": value for name, value in allowed.items()}
        return Response(None, 204, {**answer, "access-control-max-age": MAX_AGE})

    async def _allows(self, name: str, origin: str) -> bool:
        try:
            game = await self._games.get(name)
        except HTTPProblem:  # the request itself gets the answer
            return False
        return game.allows(origin)


def foreign(origin: str, game: str) -> HTTPProblem:
    return HTTPProblem(
        403,
        f"web pages of {origin[:200]!r} may not use the game {game[:100]!r}: if they are your own, declare it with "
        f'"origins": ["{origin[:200]}"]',
    )


def _origin(scope: Scope) -> str:
    return Headers(scope=scope).get("origin", "").strip()
