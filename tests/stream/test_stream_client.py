"""A game that writes to the stream itself: what its disk may do to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kinesis_server import Proxy, Server, everything, running

from sparring.aws.kinesis import Kinesis
from sparring.client import Client
from sparring.experience import wire
from sparring.games import Box, Discrete, Game
from sparring.stream import record

pytestmark = pytest.mark.real
GAME = Game("Pole-v0", Box((4,)), Discrete(2))
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda body: body[:-20],
    "noise": lambda body: np.random.default_rng(0).bytes(5000),
    "of another type": lambda body: wire.compress(msgspec.msgpack.encode({"not": "a list"})),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def arrived(stream: Kinesis) -> list[float]:
    """The rewards on the stream, each of which is sent once."""
    records = [one for shard in everything(stream).values() for one in shard]
    fragments = [f for one in records for f in record.decode(one.data)[1]]
    return sorted(float(np.frombuffer(f.reward, "<f4")[0]) for f in fragments)


def play(client: Client, reward: float) -> None:
    client.record([0, 0, 0, 0], 0, reward, True, False, [0, 0, 0, 1])


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_spool_file_does_not_end_the_sending(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    stream, away = server.stream(1), True
    proxy = Proxy(server.port, lambda action, asked: (503, b"") if away and action == "PutRecords" else None)
    address = f"kinesis://{stream.stream}?endpoint={proxy.endpoint}"
    for reward in (1.0, 2.0, 3.0):
        with Client(address, GAME, player="ann", directory=tmp_path, timeout=1) as client:
            play(client, reward)
            client.close(0.5)
    files = sorted(tmp_path.rglob("*.batch"))
    assert len(files) == 3
    files[1].write_bytes(DAMAGE[name](files[1].read_bytes()))
    away = False
    caplog.clear()
    with Client(address, GAME, player="ann", directory=tmp_path) as client:
        play(client, 4.0)
        assert client.flush(20)
        play(client, 5.0)
        assert client.flush(20)
        assert (client.stats.uploaded, client.stats.rejected, client.stats.spooled) == (4, 1, 0)
    assert arrived(stream) == [1.0, 3.0, 4.0, 5.0]
    assert sum(r.name == "sparring.client" for r in caplog.records) == 1
    proxy.close()
