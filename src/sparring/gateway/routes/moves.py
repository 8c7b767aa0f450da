"""Which version serves whom: aliases are set and removed, `stable` is rolled back and pinned. What was moved, by whom
and why, is in the journal."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import Pin, Rollback, SetAlias, Unpin
from sparring.games.spec import NAME
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer, decode, media_type, query_int, read_body
from sparring.gateway.live import Live
from sparring.gateway.openapi import Operation
from sparring.gateway.routes.models import Models
from sparring.registry.manifest import CANDIDATE, Alias, Move
from sparring.registry.registry import Moved, NotPublished, Pinned, Registry

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Changes", "operations", "query_text", "read_message"]

T = TypeVar("T")
MODEL = "/v1/games/{game}/models/{model}"
BODY_ERRORS = (404, 408, 409, 413, 415, 422)
MAX_BODY = 64 << 10
LIMIT = ("How many at most", False, {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50})
REASON = ("Why, in a sentence for people", False, {"type": "string", "maxLength": 1000})
WHO = ("Who asks", False, {"type": "string", "minLength": 1, "maxLength": 100, "default": "person"})
log = logging.getLogger(__name__)


class Changes:
    def __init__(self, registry: Registry, models: Models, live: Live, budget: Budget) -> None:
        self._registry, self._models, self._live, self._budget = registry, models, live, budget

    async def list(self, request: Request) -> Response:
        game, model = await self._models.names(request)
        found = await self._models.ask(self._registry.aliases, game, model)
        if not found:
            await self._check_model(game, model)
        return answer([*found.values()])

    async def moves(self, request: Request) -> Response:
        game, model = await self._models.names(request)
        found = await self._models.ask(self._registry.moves, game, model, query_int(request, "limit", 50, 1, 1000))
        if not found:
            await self._check_model(game, model)
        return answer(found)

    async def set(self, request: Request) -> Response:
        asked = await read_message(request, SetAlias, self._budget)
        alias = _alias(request)
        if asked.share and alias != CANDIDATE:
            raise HTTPProblem(422, f"share is for the alias {CANDIDATE!r}: who asks for {alias!r} always gets it")
        move = partial(
            self._registry.move,
            alias=alias,
            version=asked.version,
            reason=asked.reason,
            by=asked.by,
            share=asked.share,
            expected=asked.expected,
        )
        return await self._move(request, move)

    async def remove(self, request: Request) -> Response:
        reason, by = query_text(request, "reason", "", 0, 1000), query_text(request, "by", "person", 1, 100)
        return await self._move(
            request, partial(self._registry.move, alias=_alias(request), version=None, reason=reason, by=by)
        )

    async def rollback(self, request: Request) -> Response:
        asked = await read_message(request, Rollback, self._budget)
        expected = UNSET if asked.expected is UNSET else asked.expected
        return await self._move(
            request, partial(self._registry.rollback, reason=asked.reason, by=asked.by, expected=expected)
        )

    async def pin(self, request: Request) -> Response:
        asked = await read_message(request, Pin, self._budget)
        return await self._move(
            request, partial(self._registry.pin, version=asked.version, reason=asked.reason, by=asked.by)
        )

    async def unpin(self, request: Request) -> Response:
        asked = await read_message(request, Unpin, self._budget)
        return await self._move(request, partial(self._registry.pin, pinned=False, reason=asked.reason, by=asked.by))

    async def _move(self, request: Request, move: Callable[..., Move]) -> Response:
        game, model = await self._models.names(request)
        await self._check_model(game, model)
        try:
            done = await self._models.ask(move, game, model)
        except NotPublished as error:
            raise HTTPProblem(404, str(error)) from error
        except (Pinned, Moved) as error:
            raise HTTPProblem(409, str(error)) from error
        finally:
            self._models.moved(game)
            self._live.touch(game)
        log.info("%s %s: %s from %s to %s by %s: %s", game, model, *_words(done))
        return answer(done)

    async def _check_model(self, game: str, model: str) -> None:
        if not await self._models.ask(self._registry.versions, game, model):
            there = ", ".join(await self._models.ask(self._registry.models, game))
            raise HTTPProblem(404, f"{game} has no model {model!r}: it has {there or 'none yet'}")


def _words(move: Move) -> tuple[Any, ...]:
    return move.alias, move.previous, move.version, move.by, move.reason


def _alias(request: Request) -> str:
    alias: str = request.path_params["alias"]
    if not NAME.fullmatch(alias):
        raise HTTPProblem(404, f"{alias[:100]!r} is no alias: use letters, digits, '.', '_' and '-', at most 100")
    return alias


async def read_message(request: Request, into: type[T], budget: Budget) -> T:
    """A small JSON body."""
    kind = media_type(request, JSON)
    with budget.hold(request) as hold:
        return decode(await read_body(request, MAX_BODY, hold, "say it in fewer words"), kind, into, "what this takes")


def query_text(request: Request, name: str, default: str, low: int, high: int) -> str:
    text = request.query_params.get(name, default)
    if not low <= len(text) <= high:
        raise HTTPProblem(422, f"{name} has {len(text)} characters: allowed are {low} to {high}")
    return text


def operations(parts: "Parts") -> list[Operation]:
    return [*_of_aliases(parts.changes), *_of_stable(parts.changes)]


def _of_aliases(changes: Changes) -> list[Operation]:
    return [
        Operation(
            "GET", f"{MODEL}/aliases", changes.list, "Names that point to versions", {JSON: list[Alias]}, errors=(404,)
        ),
        Operation(
            "PUT",
            MODEL + "/aliases/{alias}",
            changes.set,
            "Point an alias to a version; `stable` is what players get: this promotes it",
            {JSON: Move},
            {JSON: SetAlias},
            errors=BODY_ERRORS,
            example={"version": 1, "reason": "for beginners"},
            path_examples={"alias": "easy"},
        ),
        Operation(
            "DELETE",
            MODEL + "/aliases/{alias}",
            changes.remove,
            "Remove an alias of your own",
            {JSON: Move},
            errors=(404, 409, 422),
            query={"reason": REASON, "by": WHO},
            path_examples={"alias": "easy"},
        ),
        Operation(
            "GET",
            f"{MODEL}/moves",
            changes.moves,
            "The journal: which alias was moved, when, from where, by whom and why; the newest first",
            {JSON: list[Move]},
            errors=(404, 422),
            query={"limit": LIMIT},
        ),
    ]


def _of_stable(changes: Changes) -> list[Operation]:
    return [
        Operation(
            "POST",
            f"{MODEL}/rollback",
            changes.rollback,
            "Point `stable` to where it was before",
            {JSON: Move},
            {JSON: Rollback},
            errors=BODY_ERRORS,
            example={"reason": "players complain"},
        ),
        Operation(
            "POST",
            f"{MODEL}/pin",
            changes.pin,
            "Hold `stable`: the trainer does not move it",
            {JSON: Move},
            {JSON: Pin},
            errors=BODY_ERRORS,
            example={"version": 1, "reason": "the tournament"},
        ),
        Operation(
            "POST",
            f"{MODEL}/unpin",
            changes.unpin,
            "Let the trainer move `stable` again",
            {JSON: Move},
            {JSON: Unpin},
            errors=BODY_ERRORS,
            example={"reason": "the tournament is over"},
        ),
    ]
