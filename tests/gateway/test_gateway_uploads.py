"""Uploads: what is stored, what is refused, and what the answer says of it."""

import asyncio
import gzip
import json
import random
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_api import GAME, JSON, MSGPACK, Api, Reply, Setup, fragment, replaced, row

from sparring.api import Problem, Uploaded
from sparring.experience import Fragment, validate, wire
from sparring.games import Box, Dict, Discrete, Game
from sparring.gateway.app import create_app
from sparring.gateway.routes.fragments import Limits
from sparring.store.memory import MemoryStore
from sparring.store.protocol import StoreBusy, StoreFull

UPLOAD = f"/v1/games/{GAME.name}/fragments"
YEAR = 365 * 86_400.0


def upload(api: Api, *fragments: Fragment) -> Reply:
    return api.request("POST", UPLOAD, wire.encode(list(fragments)), MSGPACK)


def stored(setup: Setup) -> int:
    return setup.store.stats(GAME.name).fragments


def assert_problem(reply: Reply, status: int, *words: str) -> dict[str, Any]:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = reply.json()
    assert problem["status"] == status
    assert problem["title"]
    for word in words:
        assert word in problem["detail"]
    return problem


def test_good_fragments_are_stored_as_they_were_sent(api: Api, setup: Setup) -> None:
    sent = [fragment(steps) for steps in (1, 5, 100)]
    reply = upload(api, *sent)
    assert (reply.status, reply.json()) == (200, {"accepted": 3, "duplicates": 0, "rejected": []})
    assert setup.store.tail(GAME.name).fragments == sent


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
def test_compressed_uploads(api: Api, setup: Setup, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    body = pack(wire.encode([fragment()]))
    assert api.request("POST", UPLOAD, body, {**MSGPACK, "content-encoding": encoding}).status == 200
    assert stored(setup) == 1


def test_uploads_large_enough_for_a_thread(api: Api, setup: Setup) -> None:
    sent = [fragment(5000) for _ in range(8)]
    assert upload(api, *sent).json()["accepted"] == 8
    assert setup.store.tail(GAME.name).fragments == sent


def test_chunked_uploads(api: Api, setup: Setup) -> None:
    body = wire.encode([fragment(200)])
    assert api.request("POST", UPLOAD, [body[i : i + 100] for i in range(0, len(body), 100)], MSGPACK).status == 200
    assert stored(setup) == 1


def test_the_same_upload_again_stores_nothing(api: Api, setup: Setup) -> None:
    sent = [fragment(), fragment()]
    upload(api, *sent)
    assert upload(api, *sent).json() == {"accepted": 0, "duplicates": 2, "rejected": []}
    assert stored(setup) == 2


def column(values: Any, kind: str = "<f4") -> bytes:
    return np.asarray(values, kind).tobytes()


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "wrong schema": ({"schema": "0123456789abcdef"}, 409, "schema"),
    "another game's": ({"game": "Other-v0"}, 422, "Other-v0"),
    "too few observations": ({"obs": column(np.zeros((5, 4)))}, 422, "5 steps need 6 observations, 5 were sent"),
    "wrong shape": ({"obs": column(np.zeros((6, 3)))}, 422, "wrong shape or dtype"),
    "wrong dtype": ({"obs": column(np.zeros((6, 4)), "<f8")}, 422, "wrong shape or dtype"),
    "action of the wrong dtype": ({"action": column([0] * 5, "<i8")}, 422, "action has 40 bytes"),
    "short rewards": ({"reward": column([1] * 4)}, 422, "5 steps need 5 rewards, 4 were sent"),
    "short log_prob": ({"log_prob": column([-1] * 4)}, 422, "log_prob"),
    "NaN observation": ({"obs": column(np.full((6, 4), np.nan))}, 422, "NaN"),
    "infinite reward": ({"reward": column([np.inf] * 5)}, 422, "reward has NaN or infinite"),
    "NaN log_prob": ({"log_prob": column([np.nan] * 5)}, 422, "log_prob has NaN"),
    "observation out of bounds": ({"obs": column(np.full((6, 4), 11.0))}, 422, "above the space's upper bound"),
    "action outside": ({"action": column([0, 1, 2, 0, 0], "<i4")}, 422, "action is outside 0..1"),
    "negative action": ({"action": column([0, -1, 0, 0, 0], "<i4")}, 422, "action is outside"),
    "no steps": ({"steps": 0, "obs": column(np.zeros((1, 4))), "action": b"", "reward": b""}, 422, "steps is 0"),
    "negative steps": ({"steps": -1}, 422, "steps is -1"),
    "a clock a year ahead": ({"time": time.time() + YEAR}, 422, "365.0 days off"),
    "a clock a year behind": ({"time": time.time() - YEAR}, 422, "-365.0 days off"),
    "a clock that is no number": ({"time": float("nan")}, 422, "clock"),
    "no id": ({"id": ""}, 422, "id must be"),
    "control characters": ({"player": "a\nb"}, 422, "player must be"),
    "a very long player": ({"player": "x" * 100_000}, 422, "player must be"),
    "a model without version": ({"model": "bot"}, 422, "model and version"),
    "a negative start": ({"start": -1}, 422, "start"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_fragment_is_refused_and_noted(api: Api, setup: Setup, name: str) -> None:
    fields, status, words = BAD[name]
    bad = replaced(fragment(), **fields)
    problem = assert_problem(upload(api, bad), status, words)
    assert [(r["index"], r["id"], r["status"]) for r in problem["rejected"]] == [(0, bad.id, status)]
    stats = setup.store.stats(GAME.name)
    assert (stats.fragments, stats.rejected) == (0, 1)


@pytest.mark.parametrize("name", BAD)
def test_the_rest_of_a_batch_is_stored(api: Api, setup: Setup, name: str) -> None:
    fields, status, _ = BAD[name]
    good = [fragment(), fragment()]
    reply = upload(api, good[0], replaced(fragment(), **fields), good[1])
    answer = reply.json()
    assert (reply.status, answer["accepted"], answer["duplicates"]) == (200, 2, 0)
    assert [(r["index"], r["status"]) for r in answer["rejected"]] == [(1, status)]
    assert answer["rejected"][0]["reason"]
    assert setup.store.tail(GAME.name).fragments == good


def test_what_is_no_fragment_is_rejected_by_name_and_the_rest_is_stored(api: Api, setup: Setup) -> None:
    wrong = {"playr": "ann", **{k: v for k, v in row().items() if k != "player"}}
    reply = api.request("POST", UPLOAD, json.dumps([row(), wrong, row(terminate=True)]).encode(), JSON)
    assert (reply.status, stored(setup)) == (200, 2)
    answer = reply.json()
    why = "fragment 1 lacks `player`, and has `playr`, which is unknown"
    assert [(r["index"], r["status"], r["reason"]) for r in answer["rejected"]] == [(1, 422, why)]
    assert answer["ignored"] == ["playr", "terminate"]
    assert answer["notes"] == [
        "fragment 2 has `terminate`, which is unknown and not stored: did you mean `terminated`?",
    ]
    assert [note.reason for note in setup.store.quarantined(GAME.name)] == [why]
    reply = api.request("POST", UPLOAD, json.dumps([wrong, 7]).encode(), JSON)
    problem = assert_problem(reply, 422, f"all 2 fragments were rejected, the first: {why.replace('1', '0')}")
    assert len(problem["rejected"]) == 2


def test_what_is_no_fragment_is_noted_with_who_sent_it(api: Api, setup: Setup) -> None:
    unfit = [row(id="e1", reward=[1.0]), row(id="e2", action=[[0]] * 5), {**row(id="e3"), "reward": "many"}, 7]
    problem = assert_problem(api.request("POST", UPLOAD, json.dumps(unfit).encode(), JSON), 422)
    assert [each["id"] for each in problem["rejected"]] == ["e1", "e2", "e3", ""]
    assert {note.player for note in setup.store.quarantined(GAME.name)} == {row()["player"], ""}


def test_milliseconds_are_told_apart_from_seconds(api: Api) -> None:
    now = int(time.time() * 1000)
    reply = api.request("POST", UPLOAD, json.dumps([row(time=now)]).encode(), JSON)
    assert_problem(reply, 422)
    assert reply.json()["detail"] == (
        f"time is {now}: send seconds, not milliseconds (in JavaScript: Date.now() / 1000)"
    )


def test_an_id_with_other_content_is_a_conflict(api: Api, setup: Setup) -> None:
    first = fragment()
    upload(api, first)
    problem = assert_problem(upload(api, replaced(first, player="bob")), 409, first.id, "other content")
    assert problem["rejected"][0]["id"] == first.id
    assert setup.store.tail(GAME.name).fragments == [first]


def test_every_fate_in_one_batch_is_reported_in_order(api: Api, setup: Setup) -> None:
    known, new = fragment(), fragment()
    upload(api, known)
    conflict = replaced(known, player="bob")
    nan = replaced(fragment(), reward=column([np.nan] * 5))
    reply = upload(api, conflict, known, nan, new, replaced(fragment(), schema="x"))
    answer = reply.json()
    assert (reply.status, answer["accepted"], answer["duplicates"]) == (200, 1, 1)
    assert [(r["index"], r["status"]) for r in answer["rejected"]] == [(0, 409), (2, 422), (4, 409)]
    assert setup.store.stats(GAME.name).rejected == 3


def test_an_id_twice_in_one_batch(api: Api, setup: Setup) -> None:
    once = fragment()
    answer = upload(api, once, once, replaced(once, player="bob")).json()
    assert (answer["accepted"], answer["duplicates"]) == (1, 1)
    assert [(r["index"], r["id"], r["status"]) for r in answer["rejected"]] == [(2, once.id, 409)]
    assert stored(setup) == 1


def test_different_faults_have_one_status(api: Api) -> None:
    wrong_schema = replaced(fragment(), schema="x")
    assert_problem(upload(api, wrong_schema, replaced(wrong_schema, id="b")), 409, "all 2 fragments")
    assert_problem(upload(api, wrong_schema, replaced(fragment(), id="")), 422, "all 2 fragments")


def test_json_rows(api: Api, setup: Setup) -> None:
    rows = [row(), row(id="mine", episode="e", terminated=True, log_prob=[-0.5] * 3, model="bot", version=3)]
    assert api.request("POST", UPLOAD, json.dumps(rows).encode(), JSON).json()["accepted"] == 2
    second = setup.store.tail(GAME.name).fragments[1]
    assert (second.id, second.episode, second.version, second.terminated) == ("mine", "e", 3, True)
    np.testing.assert_array_equal(second.columns(GAME).obs, np.array([[0.5, 0, -1, 1]] * 4, "f4"))


JSON_BAD: dict[str, tuple[dict[str, Any], int]] = {
    "wrong schema": ({"schema": "x"}, 409),
    "wrong shape": ({"obs": [[0, 0, 0]] * 4}, 422),
    "ragged": ({"obs": [[0, 0, 0, 0], [0, 0], [0], []]}, 422),
    "text": ({"obs": [["a", "b", "c", "d"]] * 4}, 422),
    "objects": ({"obs": [{"a": 1}] * 4}, 422),
    "null": ({"obs": [[None] * 4] * 4}, 422),
    "deep": ({"obs": [[[[[0]]]]] * 4}, 422),
    "a huge whole number": ({"action": [10**30, 0, 0]}, 422),
    "half an action": ({"action": [0.5, 0, 0]}, 422),
    "action outside": ({"action": [5, 0, 0]}, 422),
    "too large for float32": ({"reward": [1e300, 0, 0]}, 422),
    "too few rewards": ({"reward": [0.0]}, 422),
    "empty": ({"obs": [], "action": [], "reward": []}, 422),
    "a clock a year off": ({"time": time.time() + YEAR}, 422),
}


@pytest.mark.parametrize("name", JSON_BAD)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_bad_json_rows(api: Api, setup: Setup, name: str) -> None:
    fields, status = JSON_BAD[name]
    problem = assert_problem(api.request("POST", UPLOAD, json.dumps([row(**fields)]).encode(), JSON), status)
    assert [(r["index"], r["status"]) for r in problem["rejected"]] == [(0, status)]
    mixed = api.request("POST", UPLOAD, json.dumps([row(), row(**fields)]).encode(), JSON).json()
    assert (mixed["accepted"], [r["index"] for r in mixed["rejected"]]) == (1, [1])
    assert stored(setup) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"obs": [[0.0] * 4] * 3}, "3 steps need 4 observations, 3 were sent"),
        ({"obs": [[0.0] * 4], "reward": [1.0], "action": [0]}, "1 step needs 2 observations, 1 was sent"),
        ({"action": [0]}, "3 steps need 3 actions, 1 was sent"),
        ({"log_prob": [0.0] * 4}, "3 steps need 3 log_probs, 4 were sent"),
        ({"obs": [[0.0] * 4], "reward": [], "action": []}, "steps is 0"),
        ({"obs": [[0.0] * 3] * 4}, "obs: "),
    ],
)
def test_json_is_answered_in_its_own_words(api: Api, fields: dict[str, Any], words: str) -> None:
    """Whoever sends numbers in lists knows nothing of columns of bytes."""
    problem = assert_problem(api.request("POST", UPLOAD, json.dumps([row(**fields)]).encode(), JSON), 422)
    (rejected,) = problem["rejected"]
    assert words in rejected["reason"]
    assert "bytes" not in json.dumps(problem)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        b'["\\ud800"]',
    ],
)
def test_what_is_no_json_list_of_fragments(api: Api, setup: Setup, body: bytes) -> None:
    assert_problem(api.request("POST", UPLOAD, body, JSON), 422, "JSON list of fragments")
    assert stored(setup) == 0


def test_a_dict_game_takes_json_and_msgpack(api: Api, setup: Setup) -> None:
    game = Game("Declared", Dict({"at": Box((2,)), "weapon": Discrete(3)}), Box((1,), low=-1.0, high=1.0))
    api.register(game)
    obs = [{"at": [0, 1], "weapon": 2}] * 2
    line = {"player": "ann", "schema": game.schema, "obs": obs, "action": [[0.5]], "reward": [0.0]}
    address = f"/v1/games/{game.name}/fragments"
    assert api.request("POST", address, json.dumps([line]).encode(), JSON).status == 200
    sent = setup.store.tail(game.name).fragments[0]
    assert api.request("POST", address, wire.encode([replaced(sent, id="b")]), MSGPACK).json()["accepted"] == 1
    lacking = {**line, "obs": [{"at": [0, 1]}] * 2}
    assert_problem(api.request("POST", address, json.dumps([lacking]).encode(), JSON), 422, "obs: row 0 lacks weapon")


def test_truncated_bytes(api: Api, setup: Setup) -> None:
    body = wire.encode([fragment(), fragment()])
    packed = gzip.compress(body)
    for cut in range(0, len(body), 37):
        assert_problem(api.request("POST", UPLOAD, body[:cut], MSGPACK), 422)
    for cut in range(0, len(packed), 17):
        reply = api.request("POST", UPLOAD, packed[:cut], {**MSGPACK, "content-encoding": "gzip"})
        assert_problem(reply, 422)
    assert stored(setup) == 0


def test_random_bytes(api: Api, setup: Setup) -> None:
    rng = random.Random(1)
    for _ in range(300):
        body = rng.randbytes(rng.randrange(1, 300))
        kind = rng.choice([MSGPACK, JSON])
        encoding = rng.choice([{}, {"content-encoding": "gzip"}, {"content-encoding": "deflate"}])
        reply = api.request("POST", UPLOAD, body, {**kind, **encoding})
        assert reply.status in (413, 422), (body, reply)
        assert reply.headers["content-type"] == "application/problem+json"
    assert stored(setup) == 0


def test_flipped_bits_are_refused_or_still_a_valid_fragment(api: Api, setup: Setup) -> None:
    """A changed byte can make another good number; it can never make the server fail or store what does not check."""
    rng = random.Random(2)
    for _ in range(300):
        body = bytearray(wire.encode([fragment(), fragment()]))
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        assert api.request("POST", UPLOAD, bytes(body), MSGPACK).status in (200, 409, 413, 422)
    kept = setup.store.tail(GAME.name, limit=10_000).fragments
    assert validate.check(GAME, kept) == [None] * len(kept)


def test_random_json_columns_are_refused(api: Api, setup: Setup) -> None:
    rng = random.Random(3)

    def value(depth: int) -> Any:
        kinds = [None, True, 0, -1, 2**70, 1e308, "x", [], {}]
        if depth and rng.random() < 0.5:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        return rng.choice(kinds)

    for _ in range(300):
        columns = ["obs", "action", "reward"]
        fields = {name: value(3) for name in rng.sample(columns, rng.randrange(1, 4))}
        reply = api.request("POST", UPLOAD, json.dumps([row(**fields)]).encode(), JSON)
        assert reply.status in (409, 422), (fields, reply)
    assert stored(setup) == 0


def test_zip_bombs(api: Api, setup: Setup) -> None:
    bomb = gzip.compress(bytes(70 << 20), 9)
    assert len(bomb) < 1 << 20
    packed = {**MSGPACK, "content-encoding": "gzip"}
    assert_problem(api.request("POST", UPLOAD, bomb, packed), 413, "decompressed")
    spaces = gzip.compress(b"[" + b" " * (3 << 20) + b"]")
    assert_problem(api.request("POST", UPLOAD, spaces, {**JSON, "content-encoding": "gzip"}), 413, "decompressed")


def test_json_is_for_small_uploads(api: Api) -> None:
    reply = api.request("POST", UPLOAD, b"[" + b" " * (2 << 20) + b"]", JSON)
    assert_problem(reply, 413, str(2 << 20))


def test_a_bomb_of_fragments_is_counted_before_it_is_decoded(api: Api) -> None:
    for head in (b"\xdd\x7f\xff\xff\xff", b"\xdc\xff\xff"):
        assert_problem(api.request("POST", UPLOAD, head + b"\x80" * 100_000, MSGPACK), 413, "fragments in one request")


def test_limits_on_the_number_of_fragments(api: Api, setup: Setup) -> None:
    assert upload(api, *[fragment(1) for _ in range(1000)]).json()["accepted"] == 1000
    assert_problem(upload(api, *[fragment(1) for _ in range(1001)]), 413, "1001 fragments", "1000")
    assert_problem(api.request("POST", UPLOAD, json.dumps([row(1)] * 1001).encode(), JSON), 413, "1001")
    assert_problem(upload(api), 422, "empty")
    assert_problem(api.request("POST", UPLOAD, b"[]", JSON), 422, "empty")
    assert stored(setup) == 1000


def test_a_large_content_length_is_refused_unread(api: Api) -> None:
    def body() -> Iterator[bytes]:
        assert api.answered
        yield b"what the client was still sending is thrown away"

    reply = api.request("POST", UPLOAD, body(), {**MSGPACK, "content-length": str(9 << 20)})
    assert_problem(reply, 413, str(9 << 20), str(8 << 20))


def test_a_chunked_body_is_cut_at_the_limit(api: Api) -> None:
    answered_after = 0

    def body() -> Iterator[bytes]:
        nonlocal answered_after
        for sent in range(0, 32 << 20, 64 << 10):
            if not api.answered:
                answered_after = sent
            yield bytes(64 << 10)

    assert_problem(api.request("POST", UPLOAD, body(), MSGPACK), 413, str(8 << 20))
    assert answered_after == 8 << 20


def test_unknown_game(api: Api) -> None:
    reply = api.request("POST", "/v1/games/Nobody-v0/fragments", wire.encode([fragment()]), MSGPACK)
    assert_problem(reply, 404, "Nobody-v0", "PUT /v1/games")


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "image/png"]
)
def test_other_content_types(api: Api, setup: Setup, kind: str) -> None:
    reply = api.request("POST", UPLOAD, wire.encode([fragment()]), {"content-type": kind} if kind else {})
    assert_problem(reply, 415, "application/msgpack")
    assert stored(setup) == 0


def test_other_content_encodings(api: Api) -> None:
    for encoding in ("br", "zstd", "gzip, gzip"):
        reply = api.request("POST", UPLOAD, wire.encode([fragment()]), {**MSGPACK, "content-encoding": encoding})
        assert_problem(reply, 415, encoding)


class SlowStore(MemoryStore):
    """Keeps what is submitted until `write`; fails as it is set to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[list[Fragment], Future[Any]]] = []
        self.error: Exception | None = None

    def submit(self, fragments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.waiting.append((fragments, future))
        return future

    def write(self) -> None:
        waiting, self.waiting = self.waiting, []
        for fragments, future in waiting:
            if self.error is not None:
                future.set_exception(self.error)
            else:
                future.set_result(self.append(fragments))


@pytest.fixture
def slow(setup: Setup) -> Iterator[tuple[Api, SlowStore]]:
    store = SlowStore()
    store.register(GAME)
    api = Api(create_app(store, setup.registry, None, Limits(in_flight=100_000)))
    yield api, store
    api.close()


def test_overload_is_refused_until_the_disk_has_caught_up(slow: tuple[Api, SlowStore]) -> None:
    api, store = slow
    body = wire.encode([fragment(1500)])
    assert 30_000 < len(body) < 50_000

    async def scenario() -> None:
        first = [
            asyncio.create_task(api.send("POST", UPLOAD, wire.encode([fragment(1500)]), MSGPACK)) for _ in range(2)
        ]
        while len(store.waiting) < 2:
            await asyncio.sleep(0)
        refused = await api.send("POST", UPLOAD, body, MSGPACK)
        assert_problem(refused, 503, "try again")
        assert float(refused.headers["retry-after"]) > 0
        store.write()
        assert [reply.status for reply in await asyncio.gather(*first)] == [200, 200]
        again = asyncio.create_task(api.send("POST", UPLOAD, body, MSGPACK))
        while not store.waiting:
            await asyncio.sleep(0)
        store.write()
        assert (await again).json() == {"accepted": 1, "duplicates": 0, "rejected": []}

    api.loop.run_until_complete(scenario())
    assert store.stats(GAME.name).fragments == 3


def test_an_upload_larger_than_the_whole_budget_gets_in_alone(slow: tuple[Api, SlowStore]) -> None:
    api, store = slow

    async def scenario() -> Reply:
        task = asyncio.create_task(api.send("POST", UPLOAD, wire.encode([fragment(9000)]), MSGPACK))
        while not store.waiting:
            await asyncio.sleep(0)
        store.write()
        return await task

    assert api.loop.run_until_complete(scenario()).status == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreFull("no room"), 507), (StoreBusy("much is waiting"), 503), (OSError("the disk is gone"), 500)],
)
def test_a_store_that_fails_loses_nothing_silently(slow: tuple[Api, SlowStore], error: Exception, status: int) -> None:
    api, store = slow
    body = wire.encode([fragment()])

    async def send() -> Reply:
        task = asyncio.create_task(api.send("POST", UPLOAD, body, MSGPACK))
        while not store.waiting:
            await asyncio.sleep(0)
        store.write()
        return await task

    store.error = error
    reply = api.loop.run_until_complete(send())
    assert_problem(reply, status)
    assert (status == 500) != ("retry-after" in reply.headers)
    assert b"disk is gone" not in reply.body
    assert api.get("/healthz").status == (200 if isinstance(error, StoreBusy) else 503)
    store.error = None
    assert api.loop.run_until_complete(send()).json()["accepted"] == 1
    assert api.get("/healthz").status == 200
    assert store.stats(GAME.name).fragments == 1


def test_a_full_disk_does_not_hide_what_was_stored(setup: Setup) -> None:
    """Noting the refused ones fails, the good ones are in: the answer says so."""

    class NoQuarantine(MemoryStore):
        def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
            raise StoreFull("no room")

    store = NoQuarantine()
    store.register(GAME)
    api = Api(create_app(store, setup.registry, None))
    answer = upload(api, fragment(), replaced(fragment(), schema="x")).json()
    assert (answer["accepted"], len(answer["rejected"])) == (1, 1)
    api.close()


def test_what_goes_wrong_inside_stays_inside(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def submit(self, fragments: Any) -> Any:
            raise ZeroDivisionError("secret detail")

    store = Broken()
    store.register(GAME)
    api = Api(create_app(store, setup.registry, None))
    reply = upload(api, fragment())
    assert_problem(reply, 500)
    assert b"secret" not in reply.body
    assert b"Traceback" not in reply.body
    assert "secret detail" in caplog.text
    api.close()


def test_an_answer_decodes_as_the_message_it_is(api: Api) -> None:
    msgspec.json.decode(upload(api, fragment()).body, type=Uploaded)
    msgspec.json.decode(upload(api, replaced(fragment(), schema="x")).body, type=Problem)


def test_what_was_rejected_is_reported_with_its_reason(api: Api) -> None:
    bad = [row(id=f"bad-{i}", player="eve", reward=[float("1e9")] * 3) for i in range(3)]
    upload = api.request("POST", "/v1/games/tiny/fragments".replace("tiny", GAME.name), json.dumps(bad).encode(), JSON)
    assert upload.status == 422
    path = f"/v1/games/{GAME.name}/rejected"
    found = api.get(path).json()
    assert [(r["player"], r["id"]) for r in found] == [("eve", "bad-2"), ("eve", "bad-1"), ("eve", "bad-0")]
    assert all("reward reaches 1e+09" in r["reason"] and r["time"] > 0 for r in found)
    assert [r["id"] for r in api.get(f"{path}?limit=1").json()] == ["bad-2"]
    assert api.get(f"{path}?limit=0").status == 422
    assert api.get("/v1/games/none/rejected").status == 404
