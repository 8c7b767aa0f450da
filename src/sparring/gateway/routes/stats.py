"""How it goes with a game, asked for or pushed. (`live` makes what is shown.)"""

from typing import TYPE_CHECKING

from sparring.api import Snapshot
from sparring.gateway.endpoint import JSON
from sparring.gateway.openapi import Operation

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["operations"]


def operations(parts: "Parts") -> list[Operation]:
    live = parts.live
    return [
        Operation("GET", "/v1/games/{game}/stats", live.stats, "How it goes", {JSON: Snapshot}, errors=(404,)),
        Operation(
            "GET",
            "/v1/events",
            live.events,
            "Live: `stats` (Snapshot) about once a second, `version` (Manifest) when one is published",
            {"text/event-stream": str},
            errors=(404, 422),
            query={"game": ("The game to watch", True, {"type": "string"})},
        ),
    ]
