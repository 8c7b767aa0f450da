"""The gateway called in-process, without sockets, and fragments to send to it."""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparring.experience import Columns, Fragment, new_id, pack
from sparring.games import Box, Discrete, Game
from sparring.registry.registry import Registry

GAME = Game("Tiny-v0", Box((4,), low=-10.0, high=10.0), Discrete(2))
MSGPACK = {"content-type": "application/msgpack"}
JSON = {"content-type": "application/json"}


def fragment(steps: int = 5, game: Game = GAME, **fields: Any) -> Fragment:
    rng = np.random.default_rng(steps)
    columns = Columns(
        rng.uniform(-1, 1, (steps + 1, 4)).astype("<f4"), rng.integers(0, 2, steps).astype("<i4"), np.ones(steps, "<f4")
    )
    now = time.time()
    given = {"id": new_id(), "player": "ann", "episode": new_id(), "start": 0, "time": now, "terminated": True}
    packed = pack(game, columns, **{k: fields.pop(k, v) for k, v in given.items()}, model=fields.pop("model", None))
    return replaced(packed, **fields)


def replaced(f: Fragment, **fields: Any) -> Fragment:
    values = {name: getattr(f, name) for name in f.__struct_fields__}
    return Fragment(**{**values, **fields})


def row(steps: int = 3, **fields: Any) -> dict[str, Any]:
    """A fragment as a person writes it in JSON."""
    return {
        "player": "ann",
        "schema": GAME.schema,
        "obs": [[0.5, 0, -1, 1]] * (steps + 1),
        "action": [0] * steps,
        "reward": [1.0] * steps,
        **fields,
    }


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """An application on an event loop of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.answered = False  # whether the newest request has an answer yet
        self.loop = asyncio.new_event_loop()
        self._lifespan = app.router.lifespan_context(app)
        self.loop.run_until_complete(self._lifespan.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self.loop.close()

    def request(
        self, method: str, path: str, body: bytes | Iterable[bytes] = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        return self.loop.run_until_complete(self.send(method, path, body, headers))

    async def send(
        self, method: str, path: str, body: bytes | Iterable[bytes] = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """`body` as chunks is sent without a Content-Length."""
        chunked = not isinstance(body, bytes)
        given = {"transfer-encoding": "chunked"} if chunked else {"content-length": str(len(body))}
        given.update(headers or {})
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "http_version": "1.1",
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
        }
        chunks = iter(body) if chunked else iter([body])
        reply = Reply(0, {}, b"")
        self.answered = False

        async def receive() -> dict[str, Any]:
            chunk = next(chunks, None)
            return {"type": "http.request", "body": chunk or b"", "more_body": chunked and chunk is not None}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.answered = True
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                reply.body += message.get("body", b"")

        await self.app(scope, receive, send)
        return reply

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def register(self, game: Game = GAME) -> Reply:
        return self.request("PUT", f"/v1/games/{game.name}", game.to_json(), JSON)


@dataclass
class Setup:
    store: Any
    registry: Registry
    trainer_dir: Path
