"""What was rejected of a game, and why."""

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from sparring.api import RejectedFragment
from sparring.gateway.endpoint import JSON, answer, query_int
from sparring.gateway.openapi import Operation

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["operations"]

LIMIT = ("How many at most", False, {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})


def operations(parts: "Parts") -> list[Operation]:
    async def rejected(request: Request) -> Response:
        game = await parts.games.get(request.path_params["game"])
        limit = query_int(request, "limit", 100, 1, 1000)
        found = await asyncio.to_thread(parts.store.quarantined, game.name, limit)
        return answer([RejectedFragment(q.time, q.player, q.id, q.reason) for q in found])

    return [
        Operation(
            "GET",
            "/v1/games/{game}/rejected",
            rejected,
            "Rejected fragments with their reasons, the newest first",
            {JSON: list[RejectedFragment]},
            errors=(404, 422),
            query={"limit": LIMIT},
        )
    ]
