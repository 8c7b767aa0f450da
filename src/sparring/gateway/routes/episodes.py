"""Finished episodes: the newest ones, and the steps of one."""

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from sparring.api import EpisodeList, EpisodeRows
from sparring.data.episode_rows import find_episodes, read_episode
from sparring.data.selection import Selection
from sparring.experience.validate import MAX_NAME
from sparring.gateway.endpoint import JSON, HTTPProblem, answer, query_int
from sparring.gateway.openapi import Operation

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["operations"]

MOST = 10**15 - 1
LATEST = 10**11  # seconds since 1970
TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
WHOLE = {"type": "integer", "minimum": 0, "maximum": MOST}
LIST: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "limit": ("How many at most", False, {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
    "before": ("Older than this one: `before` of the answer that came last", False, {**WHOLE, "minimum": 1}),
    "player": ("Only this player's", False, TEXT),
    "model": ("Only those that this model ended", False, TEXT),
    "version": ("Only those that this version ended", False, WHOLE),
    "people": ("true: only people's; false: only bots'", False, {"type": "boolean"}),
    "since": ("Only those that arrived since: seconds since 1970", False, {**WHOLE, "maximum": LATEST}),
}
ONE: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "first": ("The first step wanted: `next` of the answer that came last", False, {**WHOLE, "default": 0}),
    "limit": ("How many steps at most", False, {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
}


def operations(parts: "Parts") -> list[Operation]:
    async def episodes(request: Request) -> Response:
        game = await parts.games.get(request.path_params["game"])
        limit = query_int(request, "limit", 100, 1, 1000)
        before = _optional(request, "before", 1, MOST)
        since = _optional(request, "since", 0, LATEST)
        selection = Selection(
            _text(request, "player"),
            _text(request, "model"),
            _optional(request, "version", 0, MOST),
            None if since is None else float(since),
            _flag(request, "people"),
        )
        found = await asyncio.to_thread(find_episodes, parts.store, game.name, selection, before, limit)
        return answer(found)

    async def episode(request: Request) -> Response:
        game, number = await parts.games.get(request.path_params["game"]), request.path_params["episode"]
        first, limit = query_int(request, "first", 0, 0, MOST), query_int(request, "limit", 100, 1, 1000)
        found = await asyncio.to_thread(read_episode, parts.store, game, number, first, limit)
        if found is None:
            listed = f"GET /v1/games/{game.name}/episodes lists them"
            raise HTTPProblem(404, f"{game.name} has no episode {number}: {listed}")
        return answer(found)

    return [
        Operation(
            "GET",
            "/v1/games/{game}/episodes",
            episodes,
            "Finished episodes, the newest first",
            {JSON: EpisodeList},
            errors=(404, 422),
            query=LIST,
        ),
        Operation(
            "GET",
            "/v1/games/{game}/episodes/{episode:version}",
            episode,
            "The steps of an episode",
            {JSON: EpisodeRows},
            errors=(404, 422),
            query=ONE,
        ),
    ]


def _optional(request: Request, name: str, low: int, high: int) -> int | None:
    return query_int(request, name, 0, low, high) if name in request.query_params else None


def _text(request: Request, name: str) -> str | None:
    text = request.query_params.get(name)
    if text is not None and not 0 < len(text) <= MAX_NAME:
        raise HTTPProblem(422, f"{name} has {len(text)} characters: give 1 to {MAX_NAME}")
    return text


def _flag(request: Request, name: str) -> bool | None:
    text = request.query_params.get(name)
    if text is not None and text not in ("true", "false"):
        raise HTTPProblem(422, f"{name} is {text[:50]!r}: give true or false")
    return None if text is None else text == "true"
