"""Play onto a stream, against a real server of the Kinesis API: nothing lost, all in order, whatever happens."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinesis_server import Proxy, Server, everything, moody, running

from sparring.aws.kinesis import Kinesis, StreamBusy
from sparring.client import Client, Unavailable
from sparring.errors import InputError
from sparring.experience import Columns, Fragment, new_id, pack
from sparring.experience.validate import check
from sparring.experience.wire import TooLarge
from sparring.games import Box, Discrete, Game
from sparring.store.protocol import Outcome
from sparring.stream import record
from sparring.stream.producer import MAX_REQUEST, Producer

pytestmark = pytest.mark.real
GAME = Game("Pole-v0", Box((4,)), Discrete(2))
PICTURES = Game("Pictures-v0", Box((200, 200, 3), "uint8"), Discrete(4))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def play(count: int, players: int = 10, game: Game = GAME, steps: int = 20, seed: int = 0) -> list[Fragment]:
    """Fragments of episodes of five fragments each, of several players in turns."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        number, player = divmod(i, players)
        if game.observation.element.base == np.uint8:
            obs = rng.integers(0, 256, (steps + 1, *game.observation.element.shape), np.uint8)
        else:
            obs = rng.uniform(-1, 1, (steps + 1, 4)).astype("<f4")
        columns = Columns(
            obs,
            rng.integers(0, 2, steps).astype("<i4"),
            rng.uniform(0, 1, steps).astype("<f4"),
        )
        found.append(
            pack(
                game,
                columns,
                id=new_id(),
                player=f"player-{player}",
                episode=f"{player}-{number // 5}",
                start=number % 5 * steps,
                time=time.time(),
                terminated=number % 5 == 4,
            )
        )
    return found


def put(producer: Producer, fragments: list[Fragment], game: Game = GAME, chunk: int = 20) -> None:
    """As a gateway does: many at a time, and all acknowledged in the end."""
    chunks = [fragments[i : i + chunk] for i in range(0, len(fragments), chunk)]
    for part, future in [(part, producer.submit(game, part)) for part in chunks]:
        assert future.result(60) == [Outcome.STORED] * len(part)


def arrived(stream: Kinesis) -> dict[str, list[Fragment]]:
    """Per shard, in order, each fragment once: the first time that it came."""
    found: dict[str, list[Fragment]] = {}
    for shard, records in everything(stream).items():
        seen: dict[str, Fragment] = {}
        for r in records:
            games, fragments = record.decode(r.data)
            assert {f.game for f in fragments} <= set(games)
            for f in fragments:
                seen.setdefault(f.id, f)
        found[shard] = list(seen.values())
    return found


def assert_in_order(shards: dict[str, list[Fragment]]) -> None:
    episodes: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for shard, fragments in shards.items():
        for f in fragments:
            episodes[f.player, f.episode].append((shard, f.start))
    for steps in episodes.values():
        assert len({shard for shard, _ in steps}) == 1
        assert steps == sorted(steps)


def test_play_is_spread_over_shards_in_few_records_and_in_order(server: Server) -> None:
    stream = server.stream(4)
    fragments = play(2000, players=100)
    producer = Producer(stream)
    put(producer, fragments, chunk=500)
    producer.close()
    shards = arrived(stream)
    assert sorted(f.id for some in shards.values() for f in some) == sorted(f.id for f in fragments)
    assert {f.id: f for some in shards.values() for f in some} == {f.id: f for f in fragments}
    assert all(len(some) > 200 for some in shards.values())
    assert_in_order(shards)
    assert producer.counts.fragments == 2000
    assert producer.counts.records < 500  # several fragments share a record
    assert producer.counts.retried == 0


def test_every_mood_of_the_service_is_borne(server: Server) -> None:
    """Half of the requests are throttled, in part or as a whole, fail, or are taken without an answer."""
    proxy = Proxy(server.port, moody(seed=7))
    stream = server.stream(3, endpoint=proxy.endpoint, lanes=16)
    fragments = play(3000, players=60)
    producer = Producer(stream)
    try:
        put(producer, fragments)
    finally:
        producer.close()
        proxy.close()
    shards = arrived(Kinesis(f"kinesis://{stream.stream}?endpoint={server.endpoint}"))
    assert sorted(f.id for some in shards.values() for f in some) == sorted(f.id for f in fragments)
    assert_in_order(shards)
    assert producer.counts.retried > 5


def test_requests_are_as_large_as_the_server_takes(server: Server) -> None:
    proxy = Proxy(server.port, lambda action, asked: None)
    stream = server.stream(2, endpoint=proxy.endpoint)
    fragments = play(60, game=PICTURES, players=30, steps=7)  # 60 × 0.9 MB
    producer = Producer(stream, queue_bytes=1 << 30)
    put(producer, fragments, PICTURES)
    producer.close()
    proxy.close()
    sizes = [size for action, _, size, _ in proxy.requests if action == "PutRecords"]
    assert max(sizes) <= MAX_REQUEST
    assert max(sizes) > MAX_REQUEST - (1 << 20)  # filled: this server takes 7 MiB of JSON …
    taken = [size for size in sizes if size <= 5 << 20]
    assert max(taken) > 4 << 20  # … and so half was tried next, and filled too
    shards = arrived(Kinesis(f"kinesis://{stream.stream}?endpoint={server.endpoint}"))
    assert sorted(f.id for some in shards.values() for f in some) == sorted(f.id for f in fragments)
    assert_in_order(shards)


def test_many_small_records_stay_below_500_a_request(server: Server) -> None:
    proxy = Proxy(server.port, lambda action, asked: None)
    stream = server.stream(1, endpoint=proxy.endpoint, lanes=500)
    producer = Producer(stream)
    put(producer, play(3000, players=3000, steps=1), chunk=3000)
    producer.close()
    proxy.close()
    counts = [count for action, count, _, _ in proxy.requests if action == "PutRecords"]
    assert max(counts) > 400
    assert max(counts) <= 500


def test_a_fragment_larger_than_a_record_travels_in_parts(server: Server) -> None:
    stream = server.stream(1)
    producer = Producer(stream)
    large = play(1, game=PICTURES, steps=40)[0]  # 4.9 MB of noise
    assert len(large.obs) > 4 << 20
    producer.submit(PICTURES, [large]).result(30)
    producer.submit(PICTURES, [large]).result(30)  # sent again: the same parts, by their ids
    parts = arrived(stream)["shardId-000000000000"]
    assert check(PICTURES, parts) == [None] * len(parts)
    assert [f.start for f in parts] == sorted(f.start for f in parts)
    assert sum(f.steps for f in parts) == 40
    assert b"".join(f.action for f in parts) == large.action
    assert b"".join(f.reward for f in parts) == large.reward
    frame = PICTURES.observation.element.itemsize
    assert b"".join(f.obs[:-frame] for f in parts) + parts[-1].obs[-frame:] == large.obs
    assert [f.terminated for f in parts] == [False] * len(parts)
    producer.close()


def test_a_single_step_larger_than_a_record_is_refused_with_the_reason(server: Server) -> None:
    huge = Game("Huge-v0", Box((1100, 1000), "uint8"), Discrete(4))
    producer = Producer(server.stream(1))
    obs = np.zeros((2, 1100, 1000), np.uint8)
    columns = Columns(obs, np.zeros(1, "<i4"), np.zeros(1, "<f4"))
    step = pack(huge, columns, id=new_id(), player="p", episode="e", start=0, time=time.time())
    with pytest.raises(TooLarge, match="one step of 'Huge-v0' takes"):
        producer.submit(huge, [step]).result(10)
    producer.close()


def test_when_the_stream_takes_nothing_senders_are_told_and_memory_is_bounded(server: Server) -> None:
    throttle = json.dumps({"__type": "ProvisionedThroughputExceededException", "message": "slow down"}).encode()
    proxy = Proxy(server.port, lambda action, asked: (400, throttle) if action == "PutRecords" else None)
    stream = server.stream(1, endpoint=proxy.endpoint)
    producer = Producer(stream, queue_bytes=100_000, patience=0.5)
    first = producer.submit(GAME, play(50))
    full = producer.submit(GAME, play(200))
    with pytest.raises(StreamBusy, match="does not keep up"):
        full.result(0)
    with pytest.raises(StreamBusy, match="ProvisionedThroughputExceeded"):
        first.result(20)
    proxy.mood = lambda action, asked: None  # and afterwards there is room again
    fragments = play(50)
    put(producer, fragments)
    producer.close()
    proxy.close()


def test_an_answer_with_too_few_results_does_not_end_the_producer(server: Server) -> None:
    answers = iter([(200, b'{"Records": []}'), (200, b'{"Records": [{}, {}, {}]}')])
    proxy = Proxy(server.port, lambda action, asked: next(answers, None) if action == "PutRecords" else None)
    stream = server.stream(1, endpoint=proxy.endpoint)
    producer = Producer(stream)
    fragments = play(50)
    put(producer, fragments)
    producer.close()
    proxy.close()
    shards = arrived(Kinesis(f"kinesis://{stream.stream}?endpoint={server.endpoint}"))
    assert sorted(f.id for some in shards.values() for f in some) == sorted(f.id for f in fragments)
    assert_in_order(shards)


@pytest.mark.parametrize("method", ["_send", "_fill"])
def test_a_fault_that_nobody_foresaw_is_reported_once_and_sending_goes_on(
    method: str, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = server.stream(2)
    producer = Producer(stream)
    fragments, works, faults = play(60), getattr(producer, method), [3]

    def faulty(*args: Any) -> Any:
        result = works(*args) if method == "_fill" else None  # it dies with lanes in its hands
        if faults[0] and producer._busy | dict.fromkeys(lane for lane in producer._lanes if lane.flying):
            faults[0] -= 1
            raise RuntimeError("out of the blue")
        return works(*args) if method == "_send" else result

    monkeypatch.setattr(producer, method, faulty)
    put(producer, fragments)
    assert faults == [0]
    assert [r.levelname for r in caplog.records if "out of the blue" in r.getMessage()] == ["ERROR"]
    faults[0] = 1 << 30  # for good: the sender hears of it when its time is over
    monkeypatch.setattr(producer, "_patience", 0.3)
    with pytest.raises(StreamBusy, match="out of the blue"):
        producer.submit(GAME, play(1)).result(20)
    faults[0] = 0
    producer.close()
    assert not producer._thread.is_alive()
    assert_in_order(arrived(stream))


def test_a_stream_that_is_not_there_is_reported_with_what_to_do(server: Server) -> None:
    missing = Kinesis(f"kinesis://nowhere?endpoint={server.endpoint}")
    with pytest.raises(InputError, match="sparring stream create"):
        missing.summary()
    producer = Producer(missing, patience=0.3)
    with pytest.raises(StreamBusy, match="there is no stream 'nowhere'"):  # not the sender's fault: it tries again
        producer.submit(GAME, play(1)).result(20)
    producer.close()


def test_a_clock_that_jumped_does_not_stop_a_producer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real service refuses signatures that are five minutes off; kinesalite does not, so the proxy does."""
    right = time.time

    def strict(action: str, asked: Any) -> Any:
        stamp = time.strptime(proxy.requests[-1][3]["x-amz-date"], "%Y%m%dT%H%M%SZ")
        if abs(right() - (time.mktime(stamp) - time.timezone)) > 300:
            return 403, b'{"__type":"InvalidSignatureException","message":"Signature expired"}'
        return None

    proxy = Proxy(server.port, strict)
    stream = server.stream(1, endpoint=proxy.endpoint)
    producer = Producer(stream)
    fragments = play(30)
    for days, part in zip((0, 40, -40), (fragments[:10], fragments[10:20], fragments[20:]), strict=True):
        monkeypatch.setattr(time, "time", lambda days=days: right() + days * 86_400)
        put(producer, part)
    monkeypatch.undo()
    producer.close()
    proxy.close()
    assert sum(map(len, arrived(Kinesis(f"kinesis://{stream.stream}?endpoint={server.endpoint}")).values())) == 30


@pytest.mark.parametrize(
    "address",
    ["kinesis://", "kinesis://play", "kinesis://play?regoin=x", "kinesis://a:b@play?region=x", "kinesis://p?lanes=0"],
)
def test_wrong_addresses_are_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(InputError, match=r"address|region|lanes"):
        Kinesis(address)


# The client, and the commands


def test_a_client_writes_to_the_stream_itself(server: Server, tmp_path: Path) -> None:
    stream = server.stream(2)
    with Client(stream.address, GAME, player="ann", directory=tmp_path) as client:
        other = client.player("ben")
        for t in range(250):
            client.record([0, 0, 0, t], t % 2, 1.0, t == 249, False, [0, 0, 0, t + 1])
            other.record([1, 0, 0, t], t % 2, 1.0, t == 249, False, [1, 0, 0, t + 1])
        assert client.flush(30)
        assert client.stats.uploaded == 6
        with pytest.raises(InputError, match="models="):
            client.bot(version=1)
    shards = arrived(stream)
    found = [f for some in shards.values() for f in some]
    assert check(GAME, found) == [None] * 6
    assert_in_order(shards)
    assert {f.player: sum(g.steps for g in found if g.player == f.player) for f in found} == {"ann": 250, "ben": 250}


def test_a_client_keeps_play_while_the_stream_is_away_and_sends_it_later(tmp_path: Path) -> None:
    kept = tmp_path / "kinesalite"
    with running(kept) as server:
        stream = server.stream(1)
        proxy = Proxy(server.port, lambda action, asked: (503, b"") if action == "PutRecords" else None)
        address = f"kinesis://{stream.stream}?endpoint={proxy.endpoint}"
        with Client(address, GAME, player="ann", directory=tmp_path / "client", timeout=1) as client:
            client.record([0, 0, 0, 0], 0, 1.0, True, False, [0, 0, 0, 1])
            assert not client.flush(2)
            client.close(0.5)
            assert client.stats.spooled == 1
        proxy.mood = lambda action, asked: None
        with Client(address, GAME, player="ann", directory=tmp_path / "client") as client:
            assert client.flush(20)
        assert [f.player for some in arrived(stream).values() for f in some] == ["ann"]
        proxy.close()


def test_a_client_of_a_stream_needs_nothing_heavy() -> None:
    code = (
        "import sys; import sparring.client.transports.kinesis;"
        "print([m for m in ('boto3','botocore','pyspark','pyarrow','jax','starlette','typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_models_are_only_for_streams(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="clients of a stream"):
        Client("http://127.0.0.1:9", GAME, player="ann", models="http://127.0.0.1:9", directory=tmp_path)


def test_a_name_alone_is_looked_up_at_models_or_reported(server: Server, tmp_path: Path) -> None:
    stream = server.stream(1)
    with pytest.raises(InputError, match="models="):
        Client(stream.address, "Pole-v0", player="ann", directory=tmp_path)
    with pytest.raises(Unavailable, match="never used on this machine"):
        Client(stream.address, "Pole-v0", player="ann", directory=tmp_path, models="http://127.0.0.1:9")


def cli(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "sparring.cli", *words], capture_output=True, text=True, timeout=60)


def test_streams_are_made_shown_and_resharded_by_commands(server: Server) -> None:
    address = f"kinesis://by-hand?endpoint={server.endpoint}"
    made = cli("stream", "create", address, "--shards", "2", "--retention", "48")
    assert made.returncode == 0, made.stderr
    assert "by-hand: ACTIVE, keeps records for 48 h" in made.stdout
    again = cli("stream", "create", address)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    more = cli("stream", "reshard", address, "--shards", "5")
    assert more.stdout.count(" open ") == 5, more.stdout + more.stderr
    fewer = cli("stream", "reshard", address, "--shards", "3")
    assert fewer.stdout.count(" open ") == 3
    kept = cli("stream", "status", address, "--retention", "24")
    assert "keeps records for 24 h" in kept.stdout
    widths = [s.hash_key_range.width for s in Kinesis(address).shards() if s.open]
    assert sum(widths) == 1 << 128
    assert cli("stream", "status", f"kinesis://other?endpoint={server.endpoint}").returncode == 2
    other = cli("stream", "create", f"kinesis://for-a-week?endpoint={server.endpoint}")
    assert "keeps records for 168 h" in other.stdout


def test_resharding_keeps_players_in_order(server: Server) -> None:
    """While shards are split and merged, a player's play stays in order: parents before children."""
    stream = server.stream(2)
    producer = Producer(stream)
    fragments = play(900, players=30)
    for part, count in zip((fragments[:300], fragments[300:600], fragments[600:]), (2, 4, 1), strict=True):
        stream.reshard(count)
        put(producer, part)
    producer.close()
    shards = {shard.shard_id: shard for shard in stream.shards()}
    records = arrived(stream)
    order: list[str] = []  # parents first
    while len(order) < len(shards):
        order += [s for s, shard in shards.items() if s not in order and all(p in order for p in shard.parents)]
    episodes: dict[str, list[int]] = defaultdict(list)
    for shard in order:
        for f in records[shard]:
            episodes[f.episode].append(f.start)
    assert sum(map(len, episodes.values())) == 900
    assert all(starts == sorted(starts) for starts in episodes.values())
