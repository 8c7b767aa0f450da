"""What people watch: the digest of episodes, snapshots, event streams, metrics and health."""

import asyncio
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client
import pytest
from gateway_api import GAME, MSGPACK, Api, Setup, fragment, replaced
from prometheus_client.parser import text_string_to_metric_families

from sparring.api import GameInfo, PlayerRow, RecentReturns, Snapshot, StreamStatus, TrainerStatus
from sparring.errors import SparringError
from sparring.experience import Fragment, wire
from sparring.gateway import history as history_module
from sparring.gateway import live
from sparring.gateway.app import create_app
from sparring.gateway.history import History
from sparring.gateway.live import Rate
from sparring.gateway.prometheus import Histogram
from sparring.gateway.routes import models
from sparring.networks.policy import Policy
from sparring.networks.spec import QValues
from sparring.store.memory import MemoryStore
from sparring.store.protocol import Episode, PlayerStats

STATS = f"/v1/games/{GAME.name}/stats"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are made anew whenever asked."""
    monkeypatch.setattr(models, "FRESH", -1.0)
    monkeypatch.setattr(live, "PERIOD", 0.0)


def upload(api: Api, *fragments: Fragment) -> None:
    reply = api.request("POST", f"/v1/games/{GAME.name}/fragments", wire.encode(list(fragments)), MSGPACK)
    assert reply.status == 200


def snapshot(api: Api) -> Snapshot:
    return msgspec.json.decode(api.get(STATS).body, type=Snapshot)


def episode(number: int, ret: float, version: int | None = None, player: str = "ann") -> Episode:
    model = None if version is None else "bot"
    return Episode(player, f"e{number}", 10, ret, 1000.0 + number, model, version, number)


def digest(returns: list[float]) -> History:
    history = History()
    for number, ret in enumerate(returns, 1):
        history.add(episode(number, ret))
    return history


@pytest.mark.parametrize("count", [1, 399, 400, 401, 800, 801, 5000])
def test_the_curve_covers_the_whole_life_in_few_points(count: int) -> None:
    history = digest([float(i) for i in range(count)])
    curve = history.all.curve
    assert len(curve) == count if count <= 400 else 200 <= len(curve) <= 400
    assert sum(p.episodes for p in curve) == count
    assert sum(p.mean * p.episodes for p in curve) == pytest.approx(count * (count - 1) / 2)
    assert (curve[0].low, curve[-1].high) == (0, count - 1)
    assert all(a.high < b.low for a, b in pairwise(curve))
    assert (curve[-1].time, curve[-1].steps) == (1000 + count, 10 * count)
    assert all(p.low <= p.mean <= p.high for p in curve)


def test_means_are_over_the_newest_twenty() -> None:
    history = digest([100.0] * 20 + [0.0] * 5)
    assert history.all.recent.returns() == RecentReturns(25, 75.0, 100.0, 10.0)
    assert digest([1.0, 2.0]).all.recent.returns() == RecentReturns(2, 1.5, None, 10.0)
    assert History().all.recent.returns() == RecentReturns()


def test_people_and_bots_are_apart() -> None:
    history = History()
    for number in range(1, 501):
        history.add(episode(number, 10.0, 1, "ann") if number % 5 else episode(number, -1.0, None, "bob"))
    assert history.people.recent.returns() == RecentReturns(100, -1.0, -1.0, 10.0)
    assert history.bots.recent.returns() == RecentReturns(400, 10.0, 10.0, 10.0)
    assert history.all.recent.returns() == RecentReturns(500, 7.8, 7.8, 10.0)
    people, bots = history.people.curve, history.bots.curve
    assert max(len(people), len(bots)) <= 200
    assert {p.mean for p in people} == {-1.0}
    assert {p.mean for p in bots} == {10.0}
    assert {p.version for p in people} == {None}
    assert (people[-1].steps, bots[-1].steps) == (5000, 4990)  # of the game: one axis for both
    assert sum(p.episodes for p in (*people, *bots)) == 500


@pytest.mark.parametrize(("bot_steps", "kind"), [(0, "person"), (60, "both"), (100, "bot")])
def test_a_players_row(bot_steps: int, kind: str) -> None:
    history = History()
    for number in range(1, 31):
        history.add(episode(number, float(number), None if number % 3 else 1))
    row = history.row(PlayerStats("ann", 7, 100, 5.0, bot_steps))
    assert (row.player, row.fragments, row.steps, row.last_seen, row.bot_steps) == ("ann", 7, 100, 5.0, bot_steps)
    assert row.kind == kind
    assert row.all == RecentReturns(30, 20.5, 20.5, 10.0)
    assert (row.person.episodes, row.bot.episodes) == (20, 10)
    assert row.person.return_mean == pytest.approx(15.0)
    assert row.bot.return_mean == 16.5
    assert history.row(PlayerStats("eve", 1, 1, 5.0)).all == RecentReturns()


def test_only_so_many_players_returns_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_PLAYERS", 3)
    history = History()
    for number, player in enumerate("abcad", 1):
        history.add(episode(number, 1.0, None, player))
    counts = {name: history.row(PlayerStats(name, 1, 1, 0.0)).all.episodes for name in "abcd"}
    assert counts == {"a": 2, "b": 0, "c": 1, "d": 1}


def test_versions_in_play() -> None:
    history = History()
    for number, (ret, version) in enumerate([(1.0, None), (2.0, 1), (4.0, 1), (9.0, 3), (5.0, 2)], 1):
        history.add(episode(number, ret, version))
    assert {v: (p.episodes, p.mean) for v, p in history.played.items()} == {1: (2, 3.0), 2: (1, 5.0), 3: (1, 9.0)}
    assert [p.version for p in history.all.curve] == [None, 1, 1, 3, 2]


def test_a_versions_mean_has_a_margin() -> None:
    history, returns = History(), [100.0 + i for i in range(40)]
    for number, ret in enumerate(returns, 1):
        history.add(episode(number, ret, 1))
    assert history.played[1].margin == pytest.approx(1.96 * statistics.stdev(returns) / 40**0.5)
    history.add(episode(41, 1.0, 2))
    assert history.played[2].margin is None


def test_versions_that_players_made_up_take_no_memory() -> None:
    history = History()
    history.newest = 5000
    for version in (*range(1, 5001), *range(10**6, 10**6 + 5000), 2**53 - 1):
        history.add(episode(1, 1.0, version))
    assert len(history.played) <= history_module.MAX_PLAYED
    assert max(history.played) == 5000
    assert set(range(5000 - live.MAX_VERSIONS, 5001)) <= history.played.keys()
    assert max(p.version for p in history.all.curve if p.version is not None) == 5000


def test_rates_are_read_while_uploads_add_to_them() -> None:
    """Snapshots are built in a thread, uploads are counted in the event loop."""
    rate, stop, errors = Rate(), threading.Event(), list[Exception]()

    def read() -> None:
        while not stop.is_set():
            try:
                rate.per_second(10.0)
            except RuntimeError as error:
                errors.append(error)
                return

    reader, before = threading.Thread(target=read), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for second in range(100_000):
            rate.add(1, 1, float(second))
    finally:
        sys.setswitchinterval(before)
        stop.set()
        reader.join()
    assert errors == []


def test_rates_are_over_the_last_seconds() -> None:
    rate = Rate()
    for second in range(10, 20):
        rate.add(2, 200, second + 0.25)
        rate.add(1, 100, second + 0.75)
    assert rate.per_second(20.1) == (3.0, 300.0)
    assert rate.per_second(22.0) == pytest.approx((1.8, 180.0))
    assert rate.per_second(30.0) == (0.0, 0.0)


def test_a_snapshot_tells_everything(api: Api, setup: Setup, random_policy: Callable[..., Policy]) -> None:
    assert snapshot(api).episodes == 0
    setup.registry.publish(
        random_policy(GAME, (), QValues()), algorithm="dqn", metrics={"evaluation/return_mean": 12.5}
    )
    status = TrainerStatus(GAME.name, "dqn", "training", updates=7, lag=3)
    (setup.trainer_dir / GAME.name).mkdir(parents=True)
    (setup.trainer_dir / GAME.name / "status.json").write_bytes(msgspec.json.encode(status))
    upload(api, *[fragment(5, model="bot", version=1, player=name) for name in ("ann", "bob", "bob")], fragment(9))
    seen = snapshot(api)
    assert (seen.game, seen.episodes, seen.return_mean, seen.length_mean) == (GAME.name, 4, 6.0, 6.0)
    assert (seen.stats.fragments, seen.stats.steps, seen.active_players) == (4, 24, 2)
    assert {(p.player, p.steps, p.bot_steps, p.kind) for p in seen.players} == {
        ("ann", 14, 5, "both"),
        ("bob", 10, 10, "bot"),
    }
    rows = msgspec.json.decode(api.get(f"/v1/games/{GAME.name}/players").body, type=list[PlayerRow])
    assert rows == seen.players
    assert {row.player: row.person.return_mean for row in rows} == {"ann": 9.0, "bob": None}
    assert (seen.people.steps, seen.people.episodes, seen.people.return_mean) == (9, 1, 9.0)
    assert (seen.bots.steps, seen.bots.episodes, seen.bots.return_mean) == (15, 3, 5.0)
    assert (len(seen.people.curve), len(seen.bots.curve), len(seen.curve)) == (1, 3, 4)
    [game] = msgspec.json.decode(api.get("/v1/games").body, type=list[GameInfo])
    assert (game.return_mean, game.people_return_mean, game.bot_return_mean) == (6.0, 9.0, 5.0)
    assert (seen.latest, seen.trainer) == (1, status)
    [version] = seen.versions
    assert (version.version, version.evaluation, version.played, version.return_mean) == (1, 12.5, 3, 5.0)
    assert seen.curve[-1].version is None
    assert seen.time == pytest.approx(time.time(), abs=60)


def test_versions_that_are_tried_before_there_is_one_for_players_are_listed(
    api: Api, setup: Setup, random_policy: Callable[..., Policy]
) -> None:
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn", alias=None)
    upload(api, fragment(5, model="random", version=0), fragment(9, model="bot", version=1))
    seen = snapshot(api)
    assert seen.latest is None
    assert [(version.version, version.played, version.return_mean) for version in seen.versions] == [(1, 1, 9.0)]


def test_history_is_rebuilt_by_a_new_process(api: Api, setup: Setup) -> None:
    upload(api, *[fragment(3) for _ in range(30)])
    before = snapshot(api)
    again = Api(create_app(setup.store, setup.registry, setup.trainer_dir))
    after = snapshot(again)
    assert (after.episodes, after.return_mean, after.return_best, after.curve) == (30, 3.0, 3.0, before.curve)
    again.close()


def test_a_long_history_is_taken_in_page_by_page(api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PAGE", 7)
    monkeypatch.setattr(live, "MAX_PAGES", 5)
    monkeypatch.setattr(live, "ACTIVE", -1.0)  # as if the last upload were long ago: nothing else brings it on
    upload(api, *[fragment(2) for _ in range(100)])
    seen = [snapshot(api) for _ in range(4)]
    assert [s.episodes for s in seen] == [35, 70, 100, 100]
    assert [s.behind for s in seen] == [True, True, False, False]


def test_erasing_takes_a_players_episodes_off_the_curve(api: Api) -> None:
    upload(api, fragment(3, player="ann"), fragment(9, player="bob"))
    assert snapshot(api).return_mean == 6.0
    api.request("DELETE", f"/v1/games/{GAME.name}/players/bob")
    seen = snapshot(api)
    assert (seen.episodes, seen.return_mean, [p.player for p in seen.players]) == (1, 3.0, ["ann"])


def test_what_was_erased_at_another_gateway_or_discarded_goes_as_well(
    api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ACTIVE", -1.0)  # as if the last upload were long ago: nothing else brings it on
    monkeypatch.setattr(live, "ERASED_EVERY", 0.0)
    other = Api(create_app(setup.store, setup.registry, setup.trainer_dir))
    try:
        odd = fragment(6, player="eve")
        upload(api, fragment(3, player="ann"), fragment(9, player="bob"), odd)
        assert snapshot(other).return_mean == 6.0
        api.request("DELETE", f"/v1/games/{GAME.name}/players/bob")
        seen = snapshot(other)
        assert (seen.episodes, seen.return_mean) == (2, 4.5)
        assert {p.player for p in seen.players} == {"ann", "eve"}
        setup.store.discard(GAME.name, [odd.id], "learning from it alone makes what was learned useless")
        assert [(s.episodes, s.return_mean) for s in map(snapshot, (api, other))] == [(1, 3.0)] * 2
        setup.store.delete_game(GAME.name)
        setup.store.register(GAME)
        assert [s.episodes for s in map(snapshot, (api, other))] == [0, 0]
    finally:
        other.close()


@pytest.mark.parametrize("text", [b"", b"{", b'{"game": 1}', b"\xff", b'{"game": "\xff"}'])
def test_a_torn_status_is_no_status(api: Api, setup: Setup, text: bytes) -> None:
    (setup.trainer_dir / GAME.name).mkdir(parents=True)
    (setup.trainer_dir / GAME.name / "status.json").write_bytes(text)
    assert snapshot(api).trainer is None


def test_a_status_that_cannot_be_read_stops_nothing_else(api: Api, setup: Setup) -> None:
    (setup.trainer_dir / GAME.name / "status.json").mkdir(parents=True)
    assert snapshot(api).trainer is None
    assert [api.get(path).status for path in ("/v1/games", "/metrics")] == [200, 200]


def test_nothing_is_computed_for_a_game_that_nobody_changed(
    api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ACTIVE", -1.0)  # as if the last upload were long ago
    upload(api, fragment())
    first = snapshot(api)
    asked: list[str] = []
    look = setup.store.stats
    monkeypatch.setattr(setup.store, "stats", lambda game: asked.append(game) or look(game))
    assert snapshot(api) == first
    assert asked == []
    upload(api, fragment())
    assert snapshot(api).stats.fragments == 2
    assert asked == [GAME.name]


class Stream:
    """The server's side of an event stream, without sockets."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self.gone = asyncio.Event()
        self.aborted = False

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        for block in message["body"].decode().split("\n\n"):
            if found := re.search(r"^event: (\w+)\ndata: (.*)$", block, re.MULTILINE):
                self.events.put_nowait((found[1], json.loads(found[2])))

    async def next(self, kind: str) -> Any:
        async with asyncio.timeout(10):
            while True:
                name, data = await self.events.get()
                if name == kind:
                    return data

    def abort(self) -> None:
        self.aborted = True


@asynccontextmanager
async def watching(api: Api, game: str = GAME.name) -> AsyncIterator[tuple[Stream, "asyncio.Task[None]"]]:
    stream = Stream()
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/events",
        "query_string": f"game={game}".encode(),
        "root_path": "",
        "headers": [],
        "extensions": {"sparring.abort": {"abort": stream.abort}},
    }
    task = asyncio.create_task(api.app(scope, stream.receive, stream.send))
    try:
        yield stream, task
    finally:
        stream.gone.set()
        stream.reading.set()
        async with asyncio.timeout(10):
            await task


def watchers(api: Api) -> int:
    found = re.search(rb"^sparring_watchers (\d+\.0)$", api.get("/metrics").body, re.MULTILINE)
    assert found
    return int(float(found[1]))


def test_watchers_get_snapshots_and_versions(api: Api, setup: Setup, random_policy: Callable[..., Policy]) -> None:
    body = wire.encode([fragment(4)])
    policy = random_policy(GAME, (), QValues())

    async def scenario() -> None:
        async with watching(api) as (stream, _):
            first = await stream.next("stats")
            assert (stream.status, stream.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
            assert (first["game"], first["episodes"]) == (GAME.name, 0)
            await api.send("POST", f"/v1/games/{GAME.name}/fragments", body, MSGPACK)
            while (await stream.next("stats"))["episodes"] == 0:
                pass
            await asyncio.to_thread(setup.registry.publish, policy, algorithm="dqn")
            assert (await stream.next("version"))["version"] == 1
            while (await stream.next("stats"))["latest"] != 1:
                pass

    api.loop.run_until_complete(scenario())
    assert watchers(api) == 0


def test_a_watcher_is_not_told_of_the_version_it_began_with(
    api: Api, setup: Setup, random_policy: Callable[..., Policy]
) -> None:
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn")
    body = wire.encode([fragment(4)])

    async def scenario() -> None:
        async with watching(api) as (stream, _):
            assert (await stream.next("stats"))["latest"] == 1
            await api.send("POST", f"/v1/games/{GAME.name}/fragments", body, MSGPACK)
            for _ in range(3):
                async with asyncio.timeout(10):
                    assert (await stream.events.get())[0] == "stats"

    api.loop.run_until_complete(scenario())


def test_a_watcher_that_does_not_read_is_dropped(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SEND_TIMEOUT", 0.3)
    body = wire.encode([fragment(4)])

    async def scenario() -> None:
        async with watching(api) as (stream, task), watching(api) as (other, _):
            await stream.next("stats")
            stream.reading.clear()
            await api.send("POST", f"/v1/games/{GAME.name}/fragments", body, MSGPACK)
            async with asyncio.timeout(10):
                await task
            assert stream.aborted
            assert not other.aborted
            await other.next("stats")

    api.loop.run_until_complete(scenario())
    assert watchers(api) == 0


def test_an_idle_game_is_heard_of_now_and_then(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ACTIVE", -1.0)
    monkeypatch.setattr(live, "IDLE_PERIOD", 0.2)

    async def scenario() -> None:
        async with watching(api) as (stream, _):
            times = [(await stream.next("stats"))["time"] for _ in range(3)]
            assert times == sorted(set(times))

    api.loop.run_until_complete(scenario())


def test_watchers_are_told_also_when_somebody_polls(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller's request makes the snapshot; the watchers get that one."""
    monkeypatch.setattr(live, "PERIOD", 0.2)
    monkeypatch.setattr(live, "IDLE_PERIOD", 1000.0)

    async def scenario() -> None:
        async with watching(api) as (stream, _):
            await stream.next("stats")
            polling = asyncio.create_task(poll())
            try:
                for count in (1, 2, 3):
                    body = wire.encode([fragment(4)])
                    await api.send("POST", f"/v1/games/{GAME.name}/fragments", body, MSGPACK)
                    while (await stream.next("stats"))["episodes"] != count:
                        pass
            finally:
                polling.cancel()

    async def poll() -> None:
        while True:
            await api.send("GET", STATS)
            await asyncio.sleep(0.01)

    api.loop.run_until_complete(scenario())


def test_however_many_ask_at_once_so_many_streams_are_opened(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 3)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            asked = [await stack.enter_async_context(watching(api)) for _ in range(8)]
            async with asyncio.timeout(10):
                while not all(stream.status for stream, _ in asked):
                    await asyncio.sleep(0.01)
            assert sorted(stream.status for stream, _ in asked) == [200] * 3 + [503] * 5

    api.loop.run_until_complete(scenario())


def test_streams_end_when_the_server_stops(api: Api) -> None:
    async def scenario() -> None:
        async with watching(api) as (stream, task):
            await stream.next("stats")
            api.app.state.stopping()
            async with asyncio.timeout(10):
                await task
        assert (await api.send("GET", f"/v1/events?game={GAME.name}")).status == 503

    api.loop.run_until_complete(scenario())


def test_trouble_with_one_game_does_not_end_the_streams(
    api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, broken, failures = setup.store.stats, threading.Event(), 0

    def stats(game: str) -> Any:
        nonlocal failures
        if broken.is_set():
            failures += 1
            raise SparringError("the disk is slow")
        return look(game)

    monkeypatch.setattr(setup.store, "stats", stats)
    body = wire.encode([fragment(4)])

    async def scenario() -> None:
        async with watching(api) as (stream, _):
            await stream.next("stats")
            broken.set()
            await api.send("POST", f"/v1/games/{GAME.name}/fragments", body, MSGPACK)
            async with asyncio.timeout(10):
                while failures < 2:
                    await asyncio.sleep(0.01)
            broken.clear()
            while (await stream.next("stats"))["stats"]["fragments"] != 1:
                pass

    api.loop.run_until_complete(scenario())


def test_the_latest_version_of_the_metrics_is_the_one_that_players_get(
    api: Api, setup: Setup, random_policy: Callable[..., Policy]
) -> None:
    upload(api, fragment(4))
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn", alias=None)
    text = api.get("/metrics").body.decode()
    assert "# HELP sparring_latest_version The version that players get (stable)." in text
    assert "sparring_latest_version{" not in text
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn")
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn", alias=None)
    (game,) = [f for f in text_string_to_metric_families(api.get("/metrics").body.decode()) if "latest" in f.name]
    assert [sample.value for sample in game.samples] == [2]


def test_metrics(api: Api, setup: Setup, random_policy: Callable[..., Policy]) -> None:
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn")
    frag = fragment(4)
    upload(api, frag, fragment(4), replaced(fragment(4), schema="x"))
    upload(api, frag)
    api.get("/nowhere")
    answered = api.get("/metrics")
    assert dict(answered.headers)["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answered.body.decode()))
    samples = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    labels = {s.name: set(s.labels) for family in families for s in family.samples}
    expected = {
        ("sparring_requests_total", "POST", "/v1/games/{game}/fragments", "200"): 2,
        ("sparring_requests_total", "GET", "unknown", "404"): 1,
        ("sparring_ingest_fragments_total", "accepted"): 2,
        ("sparring_ingest_fragments_total", "duplicate"): 1,
        ("sparring_ingest_fragments_total", "rejected"): 1,
        ("sparring_ingest_steps_total",): 8,
        ("sparring_ingest_ack_seconds_bucket", "+Inf"): 2,
        ("sparring_ingest_ack_seconds_count",): 2,
        ("sparring_ingest_in_flight_bytes",): 0,
        ("sparring_store_fragments", GAME.name): 2,
        ("sparring_store_rejected", GAME.name): 1,
        ("sparring_latest_version", GAME.name): 1,
    }
    assert {key: samples.get(key) for key in expected} == expected
    assert samples["process_resident_memory_bytes",] > 1 << 20
    assert samples["process_start_time_seconds",] == pytest.approx(time.time(), abs=600)
    assert labels["sparring_requests_total"] == {"route", "method", "status"}
    assert labels["sparring_store_steps"] == {"game"}
    kinds = {family.name: family.type for family in families}
    assert len(kinds) == len(families)
    assert kinds["sparring_requests"] == kinds["sparring_ingest_received_bytes"] == "counter"
    assert kinds["sparring_store_steps"] == "gauge"


def test_metrics_of_people_bots_and_the_trainer(api: Api, setup: Setup) -> None:
    def said() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(api.get("/metrics").body.decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    assert ("sparring_trainer_failed", GAME.name) not in said()  # no trainer has said anything
    upload(api, fragment(4), fragment(6, model="bot", version=1))
    path = setup.trainer_dir / GAME.name / "status.json"
    path.parent.mkdir(parents=True)
    for state, failed in (("failed: out of luck", 1.0), ("training, but cannot publish: away", 0.0)):
        path.write_bytes(msgspec.json.encode(TrainerStatus(GAME.name, "dqn", state)))
        assert said()["sparring_trainer_failed", GAME.name] == failed
    samples = said()
    assert samples["sparring_steps", GAME.name, "people"] == 4
    assert samples["sparring_steps", GAME.name, "bots"] == 6
    assert samples["sparring_return_mean", GAME.name, "people"] == 4
    assert samples["sparring_return_mean", GAME.name, "bots"] == 6
    assert samples["sparring_active_players", GAME.name] == 1


def test_metrics_of_a_stream(setup: Setup, tmp_path: Path) -> None:
    job = StreamStatus("play", "running", records=7, steps=300, retention=86400.0, missing=1.5, updated=time.time())
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(job))
    api = Api(create_app(setup.store, setup.registry, stream_status=tmp_path / "status.json"))
    try:
        text = api.get("/metrics").body.decode()
    finally:
        api.close()
    for name, value in {"records": "7.0", "steps": "300.0", "missing_seconds": "1.5", "batches": "0.0"}.items():
        assert f"# TYPE sparring_stream_{name}_total counter\nsparring_stream_{name}_total {value}\n" in text
        assert f"# TYPE sparring_stream_{name} gauge\nsparring_stream_{name} {value}\n" in text  # as in version 0.1
    assert "# TYPE sparring_stream_retention_seconds gauge\nsparring_stream_retention_seconds 86400.0\n" in text
    assert "sparring_stream_lag_seconds_total" not in text


def test_the_histogram_counts_as_prometheus_does() -> None:
    bounds = (0.1, 0.5, 1.0)
    ours, theirs = Histogram(bounds), prometheus_client.Histogram("h", "h", buckets=bounds, registry=None)
    for value in (0.05, 0.1, 0.100001, 0.5, 3.0):
        ours.observe(value)
        theirs.observe(value)
    [family] = theirs.collect()
    counted = [(s.labels["le"], s.value) for s in family.samples if s.name == "h_bucket"]
    assert ours.buckets() == counted == [("0.1", 2.0), ("0.5", 4.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert ours.sum == next(s.value for s in family.samples if s.name == "h_sum")


def test_the_names_of_0_1_are_all_there(api: Api, setup: Setup, random_policy: Callable[..., Policy]) -> None:
    """Alerts and charts are made of them."""
    setup.registry.publish(random_policy(GAME, (), QValues()), algorithm="dqn")
    upload(api, fragment(4))
    text = api.get("/metrics").body.decode()
    names = set(re.findall(r"^(\w+)", re.sub("^#.*", "", text, flags=re.M), re.M))
    store = {f"sparring_store_{name}" for name in ("fragments", "steps", "players", "bytes", "rejected")}
    ack = {f"sparring_ingest_ack_seconds_{name}" for name in ("bucket", "sum", "count")}
    counts = {f"sparring_ingest_{name}_total" for name in ("fragments", "steps", "bytes", "received_bytes")}
    others = {"sparring_requests_total", "sparring_ingest_in_flight_bytes", "sparring_watchers"}
    process = {"process_start_time_seconds", "process_resident_memory_bytes"}
    later = {"sparring_steps", "sparring_return_mean", "sparring_active_players"}
    assert names == store | ack | counts | others | process | later | {"sparring_latest_version"}


def test_health(api: Api, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}

    def broken() -> Any:
        raise SparringError("the store is closed")

    monkeypatch.setattr(setup.store, "games", broken)
    assert api.get("/healthz").status == 503


def test_the_dashboard_is_served_safely(api: Api) -> None:
    page = api.get("/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert api.get("/", if_none_match=page.headers["etag"]).status == 304
    for name in re.findall(r'(?:src|href)="(static/[^"]+)"', page.body.decode()):
        assert api.get(f"/{name}").status == 200, name
    for name in ("..", "../__init__.py", "%2e%2e/__init__.py", ".hidden", "nothing.js", "index.html/", "a\\b.js"):
        assert api.get(f"/static/{name}").status == 404, name


def test_an_empty_store(setup: Setup) -> None:
    api = Api(create_app(MemoryStore(), setup.registry))
    assert api.get("/v1/games").json() == []
    assert api.get("/metrics").status == 200
    api.close()
