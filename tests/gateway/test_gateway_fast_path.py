"""What our own client sends is checked at once, in the event loop: no thread, no decoding one by one."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_api import GAME, MSGPACK, Api, Setup, fragment

from sparring.client import Client
from sparring.experience import validate, wire
from sparring.gateway.app import background, create_app
from sparring.gateway.routes import fragments
from sparring.store.memory import MemoryStore

GZIPPED = {**MSGPACK, "content-encoding": "gzip"}
UPLOAD = f"/v1/games/{GAME.name}/fragments"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that went to a thread."""
    sizes: list[int] = []
    upload = fragments.Uploads._take_in_thread

    async def counted(self: Any, body: bytes, *rest: Any) -> Any:
        sizes.append(len(body))
        return await upload(self, body, *rest)

    monkeypatch.setattr(fragments.Uploads, "_take_in_thread", counted)
    return sizes


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many fragments were looked at together, each time that values were looked at."""
    sizes: list[int] = []
    values = validate._values

    def counted(game: Any, some: Any) -> str | None:
        sizes.append(len(some))
        return values(game, some)

    monkeypatch.setattr(validate, "_values", counted)
    return sizes


def test_the_bytes_of_our_client_take_the_fast_path(
    setup: Setup, tmp_path: Path, threads: list[int], checks: list[int]
) -> None:
    rng = np.random.default_rng(0)
    with (
        background(create_app(setup.store, setup.registry)) as url,
        Client(url, GAME, player="ann", directory=tmp_path / "client") as client,
    ):
        for _ in range(40):
            obs = rng.uniform(-1, 1, (101, 4)).astype(np.float32)
            for i in range(100):
                client.record(obs[i], int(rng.integers(2)), 1.0, i == 99, False, obs[i + 1])
        assert client.flush()
        assert client.stats.uploaded == 40
    assert setup.store.stats(GAME.name).steps == 4000
    assert threads == []
    assert sum(checks) == 40  # each was looked at once …
    assert len(checks) <= 10  # … and most of them together


def test_large_uploads_go_to_a_thread(api: Api, setup: Setup, threads: list[int]) -> None:
    many = wire.compress(wire.encode([fragment(100) for _ in range(101)]))
    assert api.request("POST", UPLOAD, many, GZIPPED).status == 200
    large = wire.compress(wire.encode([fragment(5000) for _ in range(2)]))
    assert len(large) > fragments.INLINE_GZIP
    assert api.request("POST", UPLOAD, large, GZIPPED).status == 200
    assert threads == [len(many), len(large)]
    assert setup.store.stats(GAME.name).fragments == 103


@pytest.mark.parametrize("claimed", [0, 100, 1 << 20])
def test_a_body_that_lies_about_its_size(api: Api, setup: Setup, threads: list[int], claimed: int) -> None:
    """gzip's last four bytes are the sender's word."""
    plain = wire.encode([fragment(1000, log_prob=bytes(4000)) for _ in range(20)])
    body = gzip.compress(plain)[:-4] + claimed.to_bytes(4, "little")
    assert len(plain) > fragments.INLINE_INFLATED
    assert len(body) <= fragments.INLINE_GZIP
    reply = api.request("POST", UPLOAD, body, GZIPPED)
    assert (reply.status, len(threads)) == (422, 1)
    assert setup.store.stats(GAME.name).fragments == 0


def test_deflate_and_json_go_to_a_thread(api: Api, threads: list[int]) -> None:
    body = zlib.compress(wire.encode([fragment()]))
    assert api.request("POST", UPLOAD, body, {**MSGPACK, "content-encoding": "deflate"}).status == 200
    assert len(threads) == 1


def test_the_limit_holds_for_small_bodies(setup: Setup) -> None:
    api = Api(create_app(MemoryStore(), setup.registry, limits=fragments.Limits(decompressed=1000)))
    api.register()
    reply = api.request("POST", UPLOAD, wire.compress(wire.encode([fragment(100)])), GZIPPED)
    assert reply.status == 413
    api.close()
