"""A small server of our own making for the client's tests: it keeps what it is sent, and misbehaves on request."""

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np

from sparring import api
from sparring.errors import InputError
from sparring.experience import Fragment, validate, wire
from sparring.export.onnx import render
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, param_shapes
from sparring.registry.manifest import FileInfo, Manifest

GAME = Game("Pong", Box((4,)), Discrete(3))


@dataclass
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def problem(status: int, detail: str, rejected: list[api.Rejected] | None = None, **headers: str) -> Reply:
    body = msgspec.json.encode(api.Problem("No", status, detail, rejected=rejected or []))
    return Reply(status, body, {"Content-Type": "application/problem+json", **headers})


def policy_file(game: Game, seed: int = 0) -> bytes:
    rng, layers = np.random.default_rng(seed), (Dense(64), Dense(64))
    shapes = param_shapes(game, layers, Categorical())
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return render(Policy(game, layers, Categorical(), params))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FakeServer"

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True  # the client gave up, or the test ends

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reply = self.server.answer(self, body)
        if reply is None:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    do_GET = do_PUT = do_POST = answer


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.games: dict[str, Game] = {}
        self.fragments: dict[str, Fragment] = {}
        self.batches: list[list[str]] = []
        self.models: dict[str, list[tuple[Manifest, bytes]]] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[Handler, bytes], Reply | bool | None] | None = None  # False: no fault this time
        self.ending = threading.Event()
        self.connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # most are closed already
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def publish(self, game: Game, data: bytes, version: int, sha256: str | None = None) -> None:
        info = FileInfo(sha256 or hashlib.sha256(data).hexdigest(), len(data))
        manifest = Manifest(game, "bot", version, time.time(), "test", {"policy.onnx": info})
        self.models.setdefault(game.name, []).append((manifest, data))

    def answer(self, handler: Handler, body: bytes) -> Reply | None:
        self.requests.append((handler.command, handler.path))
        if self.fault is not None and (reply := self.fault(handler, body)) is not False:
            assert reply is None or isinstance(reply, Reply)
            return reply
        with self._lock:
            try:
                return self.route(handler, body)
            except InputError as error:
                return problem(422, str(error))

    def route(self, handler: Handler, body: bytes) -> Reply:
        _, _, _, name, *rest = handler.path.split("/")
        match handler.command, rest:
            case "PUT", []:
                game = Game.from_json(body)
                known = self.games.setdefault(name, game)
                return problem(409, "another schema") if known.schema != game.schema else Reply(200, known.to_json())
            case _ if name not in self.games:
                return problem(404, f"no game {name}")
            case "GET", []:
                return Reply(200, self.games[name].to_json())
            case "POST", ["fragments"]:
                return self.upload(self.games[name], handler, body)
            case "GET", ["models", model, *path]:
                return self.model(name, model, path, handler)
            case "POST", ["act"]:
                ask = msgspec.msgpack.decode(body, type=api.Act)
                assert isinstance(ask.obs, bytes)
                rows = len(np.frombuffer(ask.obs, self.games[name].observation.element))
                actions = api.ActionsInfo([2] * rows, [-0.5] * rows if ask.explore else None, "bot", 7)
                return Reply(200, msgspec.msgpack.encode(actions), {"Content-Type": "application/msgpack"})
        return problem(404, f"no route {handler.path}")

    def upload(self, game: Game, handler: Handler, body: bytes) -> Reply:
        assert handler.headers["Content-Type"] == "application/msgpack"
        fragments = wire.decode(wire.decompress(body, handler.headers["Content-Encoding"], 64 << 20))
        reasons = validate.check(game, fragments)
        good = [f for f, reason in zip(fragments, reasons, strict=True) if reason is None]
        rejected = [
            api.Rejected(i, f.id, 422, reason)
            for i, (f, reason) in enumerate(zip(fragments, reasons, strict=True))
            if reason is not None
        ]
        if not good:
            return problem(422, "none is good", rejected)
        fresh = [f for f in good if f.id not in self.fragments]
        self.fragments |= {f.id: f for f in fresh}
        self.batches.append([f.id for f in good])
        return Reply(200, msgspec.json.encode(api.Uploaded(len(fresh), len(good) - len(fresh), rejected)))

    def model(self, game: str, model: str, path: list[str], handler: Handler) -> Reply:
        versions = self.models.get(game, []) if model == "bot" else []
        if path == ["latest"] and versions:
            etag = f'"{versions[-1][0].version}"'
            if handler.headers.get("If-None-Match") == etag:
                return Reply(304, b"", {"ETag": etag})
            return Reply(200, msgspec.json.encode(versions[-1][0]), {"ETag": etag})
        for manifest, data in versions:
            if path == [str(manifest.version), "manifest"]:
                return Reply(200, msgspec.json.encode(manifest))
            if path == [str(manifest.version), "files", "policy.onnx"]:
                return Reply(200, data)
        return problem(404, "no such version")

    def steps(self) -> int:
        return sum(f.steps for f in list(self.fragments.values()))


def walk(steps: int, seed: int = 0, game: Game = GAME) -> list[tuple[Any, ...]]:
    """Arguments of `record` for one episode of a game with Box observations and Discrete actions."""
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((steps + 1, 4)).astype(np.float32)
    return [(obs[i], int(rng.integers(3)), float(i), i == steps - 1, False, obs[i + 1]) for i in range(steps)]
