"""Actions asked over HTTP, for games that cannot run a bot themselves: the published policy under ONNX Runtime, loaded
once per version and kept while it is in use."""

import asyncio
import logging
from collections import OrderedDict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import Act, Actions
from sparring.client.bot import Loaded
from sparring.client.convert import to_feeds
from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import NAME, Array, column
from sparring.gateway.games import Games
from sparring.gateway.http import JSON, MSGPACK, Refusal, answer, decode, media_type, read_body
from sparring.gateway.models import POLICY, Models

__all__ = ["Acting"]

MAX_OBSERVATIONS = 4096
MAX_BODY = 2 << 20  # lists of anything, see ingest.Limits
MAX_LOADED = 16  # policies in memory
log = logging.getLogger(__name__)


class Acting:
    def __init__(self, games: Games, models: Models) -> None:
        self._games = games
        self._models = models
        self._loaded: OrderedDict[tuple[str, str, int], asyncio.Task[Loaded]] = OrderedDict()

    async def act(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        kind = media_type(request, JSON, MSGPACK)
        asked = decode(await read_body(request, MAX_BODY), kind, Act, "a request for actions")
        if asked.schema is not None and asked.schema != game.schema:
            raise Refusal(409, f"schema {asked.schema[:50]!r} is not this game's ({game.schema!r})")
        version = asked.version if asked.version is not None else await self._latest(game.name, asked.model)
        policy = await self._policy(game, asked.model, version)
        actions, log_prob = await asyncio.to_thread(_run, policy, game, asked)
        return answer(Actions(actions, log_prob, asked.model, version), kind=kind)

    async def _latest(self, game: str, model: str) -> int:
        latest = await self._models.latest(game, model) if NAME.fullmatch(model) else None
        if latest is None:
            raise Refusal(404, f"{game} has no version of the model {model[:100]!r} yet", headers={"retry-after": "2"})
        return latest.manifest.version

    async def _policy(self, game: Game, model: str, version: int) -> Loaded:
        """Callers that come while it is being loaded wait for the same load."""
        key = (game.name, model, version)
        task = self._loaded.get(key)
        if task is None or (task.done() and task.exception() is not None):
            task = self._loaded[key] = asyncio.create_task(self._load(game, model, version))
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return await asyncio.shield(task)

    async def _load(self, game: Game, model: str, version: int) -> Loaded:
        data = await self._models.file(game.name, model, version, POLICY)
        try:
            return await asyncio.to_thread(Loaded, data, game, model, version)
        except InputError as error:  # the publisher's fault, not that of who asks
            log.error("%s %s %d cannot act: %s", game.name, model, version, error)
            raise Refusal(500, f"version {version} of {model!r} cannot act: {error}") from error


def _run(policy: Loaded, game: Game, asked: Act) -> tuple[list[Any], list[float] | None]:
    obs = _observations(game, asked.obs)
    if (why := game.observation.problem(obs)) is not None:
        raise Refusal(422, f"obs {why}")
    noise = policy.noise(np.random.default_rng(), len(obs)) if asked.explore else None
    action, log_prob = policy.run(to_feeds(game.observation, obs), noise)
    return action.tolist(), None if log_prob is None else log_prob.tolist()


def _observations(game: Game, obs: list[Any] | bytes) -> Array:
    element = game.observation.element
    if isinstance(obs, bytes) and len(obs) % element.itemsize:
        raise Refusal(422, f"obs has {len(obs)} bytes, an observation of this game has {element.itemsize}")
    count = len(obs) // element.itemsize if isinstance(obs, bytes) else len(obs)
    if not 1 <= count <= MAX_OBSERVATIONS:
        raise Refusal(422, f"{count} observations in one request, allowed are 1..{MAX_OBSERVATIONS}")
    if isinstance(obs, bytes):
        return np.frombuffer(obs, element)
    try:
        return column(game.observation, obs)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refusal(422, f"obs: {error}") from error
