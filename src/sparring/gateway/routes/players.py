"""Players: who played, and taking all of one out again."""

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import PlayerRow
from sparring.gateway.endpoint import JSON, answer
from sparring.gateway.openapi import Operation

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["operations"]

LIMIT = ("How many at most", False, {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})


class Erased(msgspec.Struct, frozen=True):
    """How many fragments of a player were deleted."""

    erased: int


def operations(parts: "Parts") -> list[Operation]:
    async def erase(request: Request) -> Response:
        game = await parts.games.get(request.path_params["game"])
        erased = 0
        for one in parts.games.family.generations(game.name):  # the older play is learned from by the newer ones
            erased += await asyncio.to_thread(parts.store.erase, one.name, request.path_params["player"])
            parts.live.touch(one.name)
        return answer(Erased(erased))

    return [
        Operation(
            "GET",
            "/v1/games/{game}/players",
            parts.live.players,
            "Players, the most recently seen first",
            {JSON: list[PlayerRow]},
            errors=(404, 422),
            query={"limit": LIMIT},
        ),
        Operation(
            "DELETE",
            "/v1/games/{game}/players/{player:path}",
            erase,
            "Erase all that a player sent",
            {JSON: Erased},
            errors=(404, 507),
        ),
    ]
