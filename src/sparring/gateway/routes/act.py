"""Actions asked over HTTP, for games that cannot run a bot themselves: the published policy under ONNX Runtime, loaded
once per version and kept while it is in use."""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import MAX_OBSERVATIONS, Act, ActionsInfo
from sparring.client.bot import Loaded
from sparring.client.convert import to_feeds
from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import NAME, Array, column
from sparring.gateway.endpoint import JSON, MSGPACK, Budget, HTTPProblem, answer, decode, media_type, read_body
from sparring.gateway.openapi import Operation
from sparring.gateway.routes.games import Games
from sparring.gateway.routes.models import POLICY, Models
from sparring.networks.random_play import RandomPlay
from sparring.registry.manifest import DEFAULT_MODEL

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Acting", "operations"]

MAX_BODY = 2 << 20  # lists of anything, see fragments.Limits
MAX_LOADED = 16  # policies in memory
# In one answer of random play: anybody may declare a game whose actions nobody could learn.
MAX_RANDOM = 1 << 18
# JSON Schema's way to say it of a request that nobody can answer.
BOTH = {"properties": {"version": {"type": "integer"}, "alias": {"type": "string"}}, "required": ["version", "alias"]}
NOTE = (
    "no version is published yet, so these actions are random. Send model, version and log_prob back with the fragment "
    "that they are in: then they count as a bot's, without them as a person's"
)
log = logging.getLogger(__name__)


class _Asked(Act, frozen=True, forbid_unknown_fields=True):
    """`Act` whose observations are still bytes. As lists they take twenty times the memory. So they become lists in the
    thread that needs them, and not while they wait for a policy."""

    obs: msgspec.Raw


OBSERVATIONS: dict[str, Callable[[bytes], list[Any] | bytes]] = {
    JSON: msgspec.json.Decoder(list[Any] | bytes).decode,
    MSGPACK: msgspec.msgpack.Decoder(list[Any] | bytes).decode,
}
for _decoder in (msgspec.json.Decoder, msgspec.msgpack.Decoder):
    _decoder(_Asked)  # now, see games.spec: threads must not be the first


class Acting:
    def __init__(self, games: Games, models: Models, budget: Budget) -> None:
        self._games = games
        self._models = models
        self._budget = budget
        self._loaded: OrderedDict[tuple[str, str, int], Loaded] = OrderedDict()
        self._loading: dict[tuple[str, str, int], asyncio.Task[Loaded]] = {}

    async def act(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        kind = media_type(request, JSON, MSGPACK)
        with self._budget.hold(request) as hold:
            asked = decode(await read_body(request, MAX_BODY, hold), kind, _Asked, "a request for actions")
            game = self._games.family.find(game.name, asked.schema) or game
            if asked.schema is not None and asked.schema != game.schema:
                raise HTTPProblem(409, f"schema {asked.schema[:50]!r} is not this game's ({game.schema!r})")
            model, version = await self._which(game.name, asked)
            policy = RandomPlay(game) if version is None else await self._policy(game, model, version)
            actions, log_prob = await asyncio.to_thread(_run, policy, game, asked, kind)
        note = NOTE if isinstance(policy, RandomPlay) else msgspec.UNSET
        return answer(ActionsInfo(actions, log_prob, policy.model, policy.version, note), kind=kind)

    def forget(self, game: str) -> None:
        for key in [key for key in self._loaded if key[0] == game]:
            del self._loaded[key]

    async def _which(self, game: str, asked: _Asked) -> tuple[str, int | None]:
        """The model and version that is asked for, or that a player gets; no version: random play."""
        if asked.version is not None and asked.alias is not None:
            raise HTTPProblem(422, f"both version {asked.version} and alias {asked.alias[:100]!r}: give one of them")
        players_get = asked.model is None and asked.version is None and asked.alias is None
        model = await self._models.model_of(game, asked.player) if players_get else DEFAULT_MODEL
        model = model if asked.model is None else asked.model
        if asked.version is not None:
            return model, asked.version
        if asked.alias is not None:
            return model, (await self._models.named(game, model, asked.alias)).version
        if players_get and asked.player is not None and asked.episode is not None:
            drawn = (await self._models.serving(game, model)).draw(asked.player, asked.episode)
            if drawn is not None:
                return model, drawn.version
        return model, await self._latest(game, model)

    async def _latest(self, game: str, model: str) -> int | None:
        """Only the model that everybody gets may have none yet: a name that does not exist is a mistake."""
        latest = await self._models.latest(game, model) if NAME.fullmatch(model) else None
        if latest is None and model != DEFAULT_MODEL:
            why = await self._models.no_model(game, model)
            raise HTTPProblem(404, why, headers={"retry-after": "2"})
        return latest.manifest.version if latest is not None else None

    async def _policy(self, game: Game, model: str, version: int) -> Loaded:
        """Callers that come while it is being loaded wait for the same load. Only a policy that could be loaded takes
        another's place in memory: versions that players made up do not."""
        key = (game.name, model, version)
        if (policy := self._loaded.get(key)) is None:
            if (task := self._loading.get(key)) is None:
                task = self._loading[key] = asyncio.create_task(self._load(game, model, version))
                task.add_done_callback(lambda done: self._keep(key, done))
            return await asyncio.shield(task)
        self._loaded.move_to_end(key)
        return policy

    def _keep(self, key: tuple[str, str, int], done: asyncio.Task[Loaded]) -> None:
        del self._loading[key]
        if not done.cancelled() and done.exception() is None:
            self._loaded[key] = done.result()
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)

    async def _load(self, game: Game, model: str, version: int) -> Loaded:
        data = await self._models.file(game.name, model, version, POLICY)
        try:
            return await asyncio.to_thread(Loaded, data, game, model, version)
        except InputError as error:  # the publisher's fault, not that of who asks
            log.error("%s %s %d cannot act: %s", game.name, model, version, error)
            raise HTTPProblem(500, f"version {version} of {model!r} cannot act: {error}") from error


def _run(policy: Loaded | RandomPlay, game: Game, asked: _Asked, kind: str) -> tuple[list[Any], list[float] | None]:
    try:
        given = OBSERVATIONS[kind](asked.obs)
    except msgspec.ValidationError as error:
        raise HTTPProblem(422, "obs is no list: send a list of observations, also for one of them") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPProblem(422, f"obs: {error}") from error
    obs = _observations(game, given)
    if (why := game.observation.problem(obs)) is not None:
        raise HTTPProblem(422, f"obs {why}")
    explore = asked.explore
    if isinstance(policy, RandomPlay):
        _limit_random(game, len(obs))
        explore = True
    noise = policy.noise(np.random.default_rng(), len(obs)) if explore else None
    action, log_prob = policy.run(to_feeds(game.observation, obs), noise)
    return action.tolist(), None if log_prob is None else log_prob.tolist()


def _limit_random(game: Game, rows: int) -> None:
    numbers = math.prod(game.action.element.shape)
    if rows * numbers > MAX_RANDOM:
        raise HTTPProblem(
            422,
            f"{rows} random actions of {numbers} numbers each, at most {MAX_RANDOM} numbers are given at once: ask for "
            "fewer actions",
        )


def _observations(game: Game, obs: list[Any] | bytes) -> Array:
    element = game.observation.element
    if isinstance(obs, bytes) and len(obs) % element.itemsize:
        raise HTTPProblem(422, f"obs has {len(obs)} bytes, an observation of this game has {element.itemsize}")
    count = len(obs) // element.itemsize if isinstance(obs, bytes) else len(obs)
    if not 1 <= count <= MAX_OBSERVATIONS:
        raise HTTPProblem(422, f"{count} observations in one request, allowed are 1..{MAX_OBSERVATIONS}")
    if isinstance(obs, bytes):
        return np.frombuffer(obs, element)
    try:
        return column(game.observation, obs)
    except (ValueError, TypeError, OverflowError) as error:
        raise HTTPProblem(422, f"obs: {error}") from error


def operations(parts: "Parts") -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/games/{game}/act",
            parts.acting.act,
            "Actions for observations, in the question's encoding; random ones until a version is published",
            {JSON: ActionsInfo, MSGPACK: ActionsInfo},
            {JSON: Act, MSGPACK: Act},
            errors=(404, 408, 409, 413, 415, 422),
            shared="game",
            example={"obs": [[0.0, 0.0, 0.0, 0.0]], "explore": True, "player": "player-1"},
            body_limits={"not": BOTH},
        )
    ]
