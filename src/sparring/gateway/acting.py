"""Actions asked over HTTP, for games that cannot run a bot themselves: the published policy under ONNX Runtime, loaded
once per version and kept while it is in use."""

import asyncio
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import Act, Actions
from sparring.games import Dict, Game
from sparring.games.spec import NAME, Array, column
from sparring.gateway.games import Games
from sparring.gateway.http import JSON, MSGPACK, Refusal, answer, decode, media_type, read_body
from sparring.gateway.models import Models

__all__ = ["Acting"]

MAX_OBSERVATIONS = 4096
MAX_BODY = 8 << 20
MAX_LOADED = 16  # policies in memory
POLICY = "policy.onnx"


class Policy:
    """A loaded policy file. Threads may share it."""

    def __init__(self, data: bytes) -> None:
        import onnxruntime  # here: a gateway that is never asked to act starts faster

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        noise = next(i for i in self._session.get_overridable_initializers() if i.name == "noise")
        self._noise_size = int(noise.shape[1])
        self._uniform = self._session.get_modelmeta().custom_metadata_map["sparring.noise"] == "uniform"
        self._rng = np.random.default_rng()
        self._lock = threading.Lock()  # NumPy's generators are not for several threads

    def act(self, feeds: dict[str, Array], explore: bool) -> tuple[Array, Array | None]:
        if not explore:
            return self._session.run(["action"], feeds)[0], None
        shape = (len(next(iter(feeds.values()))), self._noise_size)
        with self._lock:
            noise = self._rng.random(shape, "f4") if self._uniform else self._rng.standard_normal(shape, "f4")
        action, log_prob = self._session.run(["sampled", "log_prob"], {**feeds, "noise": noise})
        return action, log_prob


class Acting:
    def __init__(self, games: Games, models: Models) -> None:
        self._games = games
        self._models = models
        self._loaded: OrderedDict[tuple[str, str, int], asyncio.Task[Policy]] = OrderedDict()

    async def act(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        kind = media_type(request, JSON, MSGPACK)
        asked = decode(await read_body(request, MAX_BODY), kind, Act, "a request for actions")
        if asked.schema is not None and asked.schema != game.schema:
            raise Refusal(409, f"schema {asked.schema[:50]!r} is not this game's ({game.schema!r})")
        version = asked.version if asked.version is not None else await self._latest(game.name, asked.model)
        policy = await self._policy(game.name, asked.model, version)
        actions, log_prob = await asyncio.to_thread(_act, policy, game, asked)
        return answer(Actions(actions, log_prob, asked.model, version), kind=kind)

    async def _latest(self, game: str, model: str) -> int:
        latest = await self._models.latest(game, model) if NAME.fullmatch(model) else None
        if latest is None:
            raise Refusal(404, f"{game} has no version of the model {model[:100]!r} yet", headers={"retry-after": "2"})
        return latest.manifest.version

    async def _policy(self, game: str, model: str, version: int) -> Policy:
        """Callers that come while it is being loaded wait for the same load."""
        key = (game, model, version)
        task = self._loaded.get(key)
        if task is None or (task.done() and task.exception() is not None):
            data = await self._models.file(game, model, version, POLICY)
            task = self._loaded.setdefault(key, asyncio.create_task(asyncio.to_thread(Policy, data)))
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return await asyncio.shield(task)


def _act(policy: Policy, game: Game, asked: Act) -> tuple[list[Any], list[float] | None]:
    obs = _observations(game, asked.obs)
    if (why := game.observation.problem(obs)) is not None:
        raise Refusal(422, f"obs {why}")
    space = game.observation
    parts = {"obs": obs} if not isinstance(space, Dict) else {f"obs.{name}": obs[name] for name in space.fields}
    feeds = {name: np.ascontiguousarray(part) for name, part in parts.items()}
    action, log_prob = policy.act(feeds, asked.explore)
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
