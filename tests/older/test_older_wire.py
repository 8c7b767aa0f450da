"""Versions of the wire: what 0.1 sent and answered is understood, and what a newer version will add does no harm.

`wire-0.1/` holds the bytes of a client and a gateway of version 0.1, recorded. Never make them anew: they are only
worth something as long as they are old.
"""

import importlib
import json
import logging
import math
import pkgutil
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import urllib3

import sparring.api
from sparring.api import Act, ActionsInfo, CurvePoint, Problem, Uploaded
from sparring.client import Client
from sparring.errors import InputError
from sparring.experience import Fragment, new_id, validate, wire
from sparring.games import Box, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.registry.manifest import Manifest
from sparring.registry.registry import Registry
from sparring.store.cassandra import rows
from sparring.store.memory import MemoryStore
from sparring.store.sqlite import SqliteStore
from sparring.stream import record

OLDER = Path(__file__).parent / "wire-0.1"
GAME = Game("Pole-v0", Box((4,)), Discrete(2))
OBS = np.zeros(4, np.float32)
NEWER = {"mask": b"\x01\x00\x01", "match": "m-7", "team": {"side": 2}}


class Fragment01(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """As version 0.1 reads it."""

    id: str
    game: str
    schema: str
    player: str
    episode: str
    start: int
    time: float
    steps: int
    obs: bytes
    action: bytes
    reward: bytes
    terminated: bool = False
    truncated: bool = False
    log_prob: bytes | None = None
    model: str | None = None
    version: int | None = None


@pytest.fixture(autouse=True)
def any_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded play gets older."""
    monkeypatch.setattr(validate, "PAST", math.inf)
    monkeypatch.setattr(validate, "FUTURE", math.inf)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def gateway(tmp_path: Path, store: MemoryStore) -> Iterator[str]:
    with background(create_app(store, Registry(tmp_path / "registry"))) as url:
        yield url


class Recorded(BaseHTTPRequestHandler):
    """Answers as the gateway of version 0.1 did."""

    server: "OlderGateway"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        last = self.path.partition("?")[0].rpartition("/")[2]
        name = {"policy.onnx": "file", GAME.name: "register"}.get(last, last)
        if not (OLDER / f"{name}.headers.json").exists():  # it knows nothing of what came later
            self.refuse(404, "there is nothing here")
            return
        headers = json.loads((OLDER / f"{name}.headers.json").read_bytes())
        if name == "act":
            unknown = msgspec.msgpack.decode(body).keys() - {"obs", "schema", "model", "version", "explore"}
            if unknown:
                self.refuse(422, f"Object contains unknown field `{min(unknown)}`")
                return
        if name == "fragments":
            self.server.uploads.append(wire.decompress(body, self.headers["Content-Encoding"], 1 << 20))
        reply = (OLDER / f"{name}.answer").read_bytes()
        self.send_response(headers["status"])
        for key, value in {**headers["answer"], "Content-Length": str(len(reply))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(reply)

    def refuse(self, status: int, why: str) -> None:
        reply = json.dumps({"type": "about:blank", "title": "No", "status": status, "detail": why}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_GET = do_PUT = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class OlderGateway(ThreadingHTTPServer):
    daemon_threads = True
    uploads: list[bytes]


@pytest.fixture
def older_gateway() -> Iterator[OlderGateway]:
    server = OlderGateway(("127.0.0.1", 0), Recorded)
    server.uploads = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def post(url: str, path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> tuple[int, bytes]:
    answer = urllib3.request(method, f"{url}{path}", body=body, headers=headers)
    return answer.status, answer.data


def newer(fragment: Fragment, **fields: Any) -> bytes:
    """As a version after this one might encode it."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(fragment, builtin_types=(bytes,)), **(fields or NEWER)})


def recorded() -> list[Fragment]:
    return wire.decode(wire.decompress((OLDER / "fragments.request").read_bytes(), "gzip", 1 << 20))


def test_an_older_client_is_understood(gateway: str, store: MemoryStore) -> None:
    for name, method, path in (
        ("register", "PUT", f"/v1/games/{GAME.name}"),
        ("fragments", "POST", f"/v1/games/{GAME.name}/fragments"),
    ):
        headers = json.loads((OLDER / f"{name}.headers.json").read_bytes())
        status, answer = post(gateway, path, (OLDER / f"{name}.request").read_bytes(), headers["request"], method)
        assert (status, answer) == (headers["status"], (OLDER / f"{name}.answer").read_bytes())
    assert store.tail(GAME.name).fragments == recorded()
    assert {f.version for f in recorded()} == {None, 1}
    ask = msgspec.msgpack.decode((OLDER / "act.request").read_bytes(), type=Act)
    assert (ask.schema, ask.explore) == (GAME.schema, True)


def test_an_older_gateway_is_understood(older_gateway: OlderGateway, tmp_path: Path) -> None:
    """And understands us: it reads strictly."""
    url = f"http://127.0.0.1:{older_gateway.server_port}"
    with Client(url, GAME, player="ann", directory=tmp_path) as client:
        bot = client.bot()
        assert bot.version == 1
        assert bot.act(OBS) in range(2)
        assert client.act(OBS, explore=True) in range(2)
        for _ in range(3):
            client.record(OBS, bot.act(OBS, explore=True), 1.0, True, False, OBS)
        assert client.flush()
        assert (client.stats.uploaded, client.stats.rejected) == (3, 0)
    read = [f for body in older_gateway.uploads for f in msgspec.msgpack.decode(body, type=list[Fragment01])]
    assert [f.steps for f in read] == [1, 1, 1]


def test_older_play_on_disk_is_sent(gateway: str, store: MemoryStore, tmp_path: Path) -> None:
    with Client(gateway, GAME, player="ann", directory=tmp_path) as client:
        spool = client.directory / "spool"
    shutil.copytree(OLDER / "spool", spool, dirs_exist_ok=True)
    with Client(gateway, GAME, player="ann", directory=tmp_path) as client:
        assert client.flush()
        assert (client.stats.uploaded, client.stats.spooled) == (1, 0)
    assert [f.player for f in store.tail(GAME.name).fragments] == ["bob"]


@pytest.mark.parametrize("encoding", ["msgpack", "gzip", "json"])
def test_a_newer_client_loses_nothing_that_is_known(gateway: str, store: MemoryStore, encoding: str) -> None:
    declared = {**json.loads(GAME.to_json()), "mask": {"type": "box"}}
    headers = {"Content-Type": "application/json"}
    status, answer = post(gateway, f"/v1/games/{GAME.name}", json.dumps(declared).encode(), headers, "PUT")
    assert (status, Game.from_json(answer)) == (201, GAME)
    sent = recorded()
    body = wire.array([newer(sent[0]), newer(sent[1], mask=None), msgspec.msgpack.encode(sent[2])])
    headers = {"Content-Type": "application/msgpack"}
    if encoding == "gzip":
        body, headers = wire.compress(body), {**headers, "Content-Encoding": "gzip"}
    elif encoding == "json":
        rows = [
            {
                "id": f.id,
                "player": f.player,
                "schema": f.schema,
                "obs": f.columns(GAME).obs.tolist(),
                "action": f.columns(GAME).action.tolist(),
                "reward": f.columns(GAME).reward.tolist(),
            }
            for f in sent
        ]
        rows[0] |= {"mask": [1, 0], "match": "m-7", "team": {"side": 2}}
        body, headers = json.dumps(rows).encode(), {"Content-Type": "application/json"}
    status, answer = post(gateway, f"/v1/games/{GAME.name}/fragments?wire=9", body, headers)
    uploaded = msgspec.json.decode(answer, type=Uploaded)
    assert (status, uploaded.accepted, uploaded.rejected) == (200, 3, [])
    assert uploaded.ignored == ["mask", "match", "team"]
    kept = store.tail(GAME.name).fragments
    assert [(f.id, f.obs, f.action, f.reward) for f in kept] == [(f.id, f.obs, f.action, f.reward) for f in sent]
    assert encoding == "json" or kept == sent


def test_what_is_known_is_still_checked(gateway: str) -> None:
    post(gateway, f"/v1/games/{GAME.name}", GAME.to_json(), {"Content-Type": "application/json"}, "PUT")
    bad = newer(recorded()[0], mask=1, steps=99)
    headers = {"Content-Type": "application/msgpack"}
    status, answer = post(gateway, f"/v1/games/{GAME.name}/fragments", wire.array([bad]), headers)
    assert status == 422
    assert b"steps need" in answer


def test_a_newer_gateway_is_understood(
    tmp_path: Path, gateway: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with more in them; one of them says that it does not know a field of ours."""
    with Client(gateway, GAME, player="ann", directory=tmp_path) as client:
        request = client._transport.connection.request  # type: ignore[attr-defined]

        def more(method: str, *path: str, **options: Any) -> Any:
            answer = request(method, *path, **options)
            if path[-1] != "fragments":
                return answer
            fields = {**json.loads(answer.body), "cursor": [1, 2], "ignored": ["mask"]}
            return type(answer)(answer.status, answer.headers, json.dumps(fields).encode(), answer.origin)

        monkeypatch.setattr(client._transport.connection, "request", more)  # type: ignore[attr-defined]
        client.record(OBS, 0, 1.0, True, False, OBS)
        client.record(OBS, 0, 1.0, True, False, OBS)
        assert client.flush()
        assert client.stats.uploaded == 2
    logged = [r.getMessage() for r in caplog.records if r.name == "sparring.client" and r.levelno >= logging.WARNING]
    assert logged == [f"{gateway} is older than this client, and does not store: mask"]


@pytest.mark.parametrize(
    ("name", "kind"), [("fragments", Uploaded), ("register", Game), ("latest", Manifest), ("act", ActionsInfo)]
)
def test_answers_with_more_in_them(name: str, kind: Any) -> None:
    text = (OLDER / f"{name}.answer").read_bytes()
    codec: Any = msgspec.msgpack if name == "act" else msgspec.json
    fields = codec.decode(text)
    if name == "latest":
        fields["game"]["mask"] = {"type": "box"}
        fields["files"]["policy.onnx"]["signature"] = "abc"
        fields["data"]["players"] = 7
    assert codec.decode(codec.encode({**fields, "newer": [1, {"x": 2}]}), type=kind) == codec.decode(text, type=kind)


def test_a_problem_with_more_in_it() -> None:
    """RFC 9457 allows for it."""
    assert msgspec.json.decode(b'{"title":"No","status":422,"detail":"why","trace":[1]}', type=Problem).status == 422


def test_a_space_with_more_in_it_is_refused() -> None:
    """Its bytes cannot be read without knowing what that is."""
    declared = json.loads(GAME.to_json())
    declared["observation"]["packed"] = True
    with pytest.raises(InputError, match="packed"):
        Game.from_json(json.dumps(declared))


def test_a_person_who_misspells_a_field_is_told(tmp_path: Path) -> None:
    path = tmp_path / "game.json"
    path.write_text(json.dumps({**json.loads(GAME.to_json()), "rewrad": [0, 1]}))
    with pytest.raises(InputError, match="`rewrad`, did you mean 'reward'"):
        Client("http://127.0.0.1:9", path, player="ann", directory=tmp_path)


def test_records_of_the_stream() -> None:
    games, fragments = record.decode((OLDER / "stream.record").read_bytes())
    assert (games, fragments) == ({GAME.name: GAME}, recorded())
    declared = json.dumps({**json.loads(GAME.to_json()), "mask": 1}).encode()
    games, fragments = record.decode(record.encode([declared], [newer(f) for f in recorded()], compress=True))
    assert (games, fragments) == ({GAME.name: GAME}, recorded())


def test_rows_of_a_store_on_sqlite(tmp_path: Path) -> None:
    path, sent = tmp_path / "store.db", recorded()
    store = SqliteStore(path)
    store.register(GAME)
    store.append(sent)
    store.close()
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT seq, body FROM fragment ORDER BY seq").fetchall()
        for seq, body in rows:
            more = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), **NEWER})
            db.execute("UPDATE fragment SET body = ? WHERE seq = ?", (more, seq))
        spec = json.loads(db.execute("SELECT spec FROM game").fetchone()[0])
        db.execute("UPDATE game SET spec = ?", (json.dumps({**spec, "mask": 1}),))
    db.close()
    store = SqliteStore(path)
    try:
        assert store.games() == [GAME]
        assert store.tail(GAME.name).fragments == sent
        assert store.append([msgspec.structs.replace(sent[0], id=new_id())])
        assert len(store.tail(GAME.name).fragments) == 4
    finally:
        store.close()


def modules() -> Iterator[Any]:
    """Wherever they lie: those of messages and rows."""
    for room in ("store", "stream", "registry", "experience"):
        package = importlib.import_module(f"sparring.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(("ingest", "source", "__main__")):  # they need Spark
                yield importlib.import_module(found.name)


@pytest.mark.parametrize("longer", [False, True])
def test_rows_of_a_store_on_cassandra(longer: bool) -> None:
    """Shorter than what this version writes: of 0.1, which wrote two elements. Longer: of a later version."""
    sent = recorded()
    ours = msgspec.msgpack.decode(msgspec.msgpack.encode(rows.FragmentBlock([4, 8, 12], [])))
    ours[1] = msgspec.Raw(wire.array([newer(f) for f in sent]))
    block = rows.decode_block(msgspec.msgpack.encode([*ours, True, "more"] if longer else ours[:2]))
    assert (block.places, block.fragments) == ([4, 8, 12], sent)


def test_nothing_that_is_kept_or_sent_is_read_strictly() -> None:
    kinds = {
        kind
        for module in [*modules(), sparring.api]
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }
    strict = {kind.__name__ for kind in kinds if kind.__struct_config__.forbid_unknown_fields}
    # A question, or an order, that is half understood has a wrong answer. Settings are an order that is kept: what a
    # later version set is not guessed at (`store.profile.read_profile` says so).
    orders = {
        "SetAlias",
        "Pin",
        "Unpin",
        "GameChange",
        "Rollback",
        "StartAb",
        "NewGeneration",
        "GameSettings",
        "PromotionRule",
    }
    assert strict == {"Act"} | orders
    assert sum(kind.__struct_config__.array_like for kind in kinds) >= 5
    point = CurvePoint(1.0, 2, 3.0, 4.0, 5.0, 6, 7)
    longer = [*msgspec.to_builtins(point), "more"]
    assert msgspec.json.decode(msgspec.json.encode(longer), type=CurvePoint) == point
