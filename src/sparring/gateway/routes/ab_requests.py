"""A/B tests: several models of a game, each for a share of its players."""

import asyncio
import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from sparring.api import StartAb
from sparring.gateway.ab_results import AbCount
from sparring.gateway.endpoint import JSON, Budget, HTTPProblem, answer
from sparring.gateway.live import Live
from sparring.gateway.openapi import ETAG, NAME_SCHEMA, UNLESS_KNOWN, Operation
from sparring.gateway.routes.games import Games
from sparring.gateway.routes.models import Models, tagged
from sparring.gateway.routes.moves import REASON, WHO, query_text, read_message
from sparring.registry.ab import AbResults, AbTest, AbTests
from sparring.registry.registry import AbRunning, NotPublished, NotRunning, Registry
from sparring.store.protocol import Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Testing", "operations"]

MAX_COUNTS = 100
KEEP = ("The model that all players get from now on; without it they get `bot`", False, NAME_SCHEMA)
WHICH = ("Only if it is the test of this id", False, {"type": "string"})
log = logging.getLogger(__name__)


class Testing:
    def __init__(
        self, store: Store, registry: Registry, games: Games, models: Models, live: Live, budget: Budget
    ) -> None:
        self._store, self._registry, self._games = store, registry, games
        self._models, self._live, self._budget = models, live, budget
        self._counts: OrderedDict[str, AbCount] = OrderedDict()  # by the tests' ids
        self._counting = asyncio.Lock()

    async def get(self, request: Request) -> Response:
        game = (await self._games.get(request.path_params["game"])).name
        return tagged(request, await self._models.ab(game))

    async def results(self, request: Request) -> Response:
        game = (await self._games.get(request.path_params["game"])).name
        tests = await self._models.ab(game)
        found = None
        if tests.running is not None:
            found = await self._results(game, tests.running)
        elif tests.ended:
            found = tests.ended[0].results
        if found is None:
            raise HTTPProblem(404, f"there was no A/B test of {game}: POST /v1/games/{game}/ab starts one")
        return answer(found)

    async def start(self, request: Request) -> Response:
        game = (await self._games.get(request.path_params["game"])).name
        asked = await read_message(request, StartAb, self._budget)
        cursor = (await asyncio.to_thread(self._store.tail, game, -1)).cursor
        start = partial(self._registry.start_ab, reason=asked.reason, by=asked.by, cursor=cursor)
        try:
            test = await self._models.ask(start, game, asked.shares)
        except NotPublished as error:
            raise HTTPProblem(404, str(error)) from error
        except AbRunning as error:
            raise HTTPProblem(409, str(error)) from error
        finally:
            self._moved(game)
        log.info("%s: an A/B test of %s starts: %s", game, ", ".join(test.shares), test.reason)
        return answer(test)

    async def stop(self, request: Request) -> Response:
        game = (await self._games.get(request.path_params["game"])).name
        keep = request.query_params.get("keep")
        reason, by = query_text(request, "reason", "", 0, 1000), query_text(request, "by", "person", 1, 100)
        running = (await self._models.ask(self._registry.ab, game)).running
        results = None if running is None else await self._results(game, running)
        expected = request.query_params.get("test")
        stop = partial(self._registry.stop_ab, results=results, reason=reason, by=by, expected=expected)
        try:
            test = await self._models.ask(stop, game, keep)
        except (NotPublished, NotRunning) as error:
            raise HTTPProblem(404, str(error)) from error
        except AbRunning as error:
            raise HTTPProblem(409, str(error)) from error
        finally:
            self._moved(game)
        self._counts.pop(test.id, None)
        log.info("%s: the A/B test of %s ended, kept: %s; %s", game, ", ".join(test.shares), test.kept, results)
        return answer(test)

    async def _results(self, game: str, test: AbTest) -> AbResults:
        async with self._counting:
            if (count := self._counts.get(test.id)) is None:
                count = self._counts[test.id] = AbCount(game, test)
                while len(self._counts) > MAX_COUNTS:
                    self._counts.popitem(last=False)
            return await asyncio.to_thread(count.results, self._store)

    def _moved(self, game: str) -> None:
        self._models.moved(game)
        self._live.touch(game)


def operations(parts: "Parts") -> list[Operation]:
    testing, path = parts.testing, "/v1/games/{game}/ab"
    return [
        Operation(
            "GET",
            path,
            testing.get,
            "The A/B test that runs, and those that have ended",
            {JSON: AbTests},
            statuses=UNLESS_KNOWN,
            errors=(404,),
            headers=ETAG,
        ),
        Operation(
            "POST",
            path,
            testing.start,
            "Start an A/B test: each player gets one of several models, and keeps it",
            {JSON: AbTest},
            {JSON: StartAb},
            errors=(404, 408, 409, 413, 415, 422),
            example={"shares": {"bot": 0.5, "careful": 0.5}, "reason": "do players prefer careful?"},
        ),
        Operation(
            "DELETE",
            path,
            testing.stop,
            "End the A/B test that runs",
            {JSON: AbTest},
            errors=(404, 409, 422),
            query={"keep": KEEP, "reason": REASON, "by": WHO, "test": WHICH},
        ),
        Operation(
            "GET",
            f"{path}/results",
            testing.results,
            "How the newest A/B test stands: returns of each model, with intervals",
            {JSON: AbResults},
            errors=(404,),
        ),
    ]
