"""Fragments as bytes: msgpack and JSON rows there and back, and bytes that nobody should trust."""

import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.errors import InputError
from sparring.experience import Columns, Fragment, new_id, pack, validate, wire
from sparring.experience.wire import TooLarge, Unfit, decode, decode_json, decompress, encode
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete

TINY = Game("g", Box((2,), low=-1.0, high=1.0), Discrete(2))


def fragment(game: Game = TINY, steps: int = 3, **fields: Any) -> Fragment:
    columns = Columns(
        np.zeros(steps + 1, game.observation.element), np.zeros(steps, game.action.element), np.ones(steps, "<f4")
    )
    given = {"id": new_id(), "player": "ann", "episode": "e", "start": 0, "time": time.time()}
    return pack(game, columns, **{**given, **fields})


def row(**fields: Any) -> dict[str, Any]:
    good = {"player": "ann", "schema": TINY.schema, "obs": [[0, 0.5]] * 3, "action": [0, 1], "reward": [1, -0.5]}
    return {k: v for k, v in {**good, **fields}.items() if v is not ...}


def one(**fields: Any) -> Fragment | str:
    [got] = decode_json(json.dumps([row(**fields)]).encode(), TINY)
    return got


# Msgpack


def test_msgpack_gives_the_same_fragments_back() -> None:
    there = [
        fragment(),
        fragment(terminated=True, model="bot", version=3),
        msgspec.structs.replace(fragment(truncated=True), log_prob=bytes(12)),
        fragment(player="Zoë 漢字 🎮", start=(1 << 53) - 1),
    ]
    assert decode(encode(there)) == there
    assert decode(encode([])) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\x80",
        b"\x91\x80",
        b"\x91\x01",
        b"\xc1",
        b"[]",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # a list of four billion
        b"\x91\xdf\xff\xff\xff\xff",  # a map of four billion
        b"\x91\x81\xa3obs\xc6\xff\xff\xff\xff",  # four gigabytes of observations
        b"\x91\x81\xa2id\xa2\xff\xfe",  # not UTF-8
    ],
    ids=repr,
)
def test_what_is_not_a_list_of_fragments(body: bytes) -> None:
    with pytest.raises(InputError, match="not a msgpack list of fragments"):
        decode(body)


@pytest.mark.parametrize("fields", [{"id": 1}, {"steps": "3"}, {"obs": "text"}, {"time": None}])
def test_wrong_types(fields: dict[str, Any]) -> None:
    good = msgspec.to_builtins(fragment(), builtin_types=(bytes,))
    assert decode(msgspec.msgpack.encode([good]))
    with pytest.raises(InputError, match="not a msgpack list"):
        decode(msgspec.msgpack.encode([{**good, **fields}]))


def test_every_cut_of_an_upload_is_refused() -> None:
    body = encode([fragment(steps=1)])
    for length in range(len(body)):
        with pytest.raises(InputError):
            decode(body[:length])


def test_bytes_changed_at_random_never_crash_the_check() -> None:
    rng = np.random.default_rng(0)
    body = encode([fragment(), fragment(model="bot", version=1)])
    decoded = 0
    for _ in range(3000):
        changed = bytearray(body)
        for place in rng.integers(0, len(body), rng.integers(1, 5)):
            changed[place] = rng.integers(256)
        try:
            fragments = decode(bytes(changed))
        except InputError:
            continue
        decoded += 1
        for f, reason in zip(fragments, validate.check(TINY, fragments), strict=True):
            if reason is None:
                assert TINY.observation.problem(f.columns(TINY).obs) is None
                assert np.isfinite(f.columns(TINY).reward).all()
    assert decoded > 300  # else this test says nothing


# JSON rows

KINDS: list[tuple[Game, list[Any], list[Any]]] = [
    (TINY, [[0, 0.5], [1, -1], [0.25, 0]], [0, 1]),
    (Game("g", Box(()), Discrete(3, start=5)), [1.5, -2, 3e8], [5, 7]),
    (Game("g", Box((2, 2), "uint8"), MultiDiscrete((2, 3))), [[[0, 255], [1, 2]]] * 3, [[1, 2], [0, 0]]),
    (Game("g", Box((1,), "bool"), Box((2,), low=-1.0, high=1.0)), [[True], [False], [1]], [[0.5, -1], [1, 0]]),
    (Game("g", Box((1,), "int64"), Box((1,), "float64")), [[2**62], [-5], [0]], [[1e-300], [0.1]]),
    (Game("g", Discrete(16), Discrete(4)), [0, 15, 3], [3, 0]),
    (Game("g", MultiDiscrete((2, 9)), Discrete(4)), [[0, 8], [1, 0], [1, 1]], [3, 0]),
    (
        Game("g", Dict({"at": Box((2,)), "gun": Discrete(3), "map": Box((1, 2), "uint8")}), Discrete(2)),
        [{"gun": g, "map": [[g, 7]], "at": [0.5, g]} for g in range(3)],
        [1, 1],
    ),
]


@pytest.mark.parametrize(
    ("game", "obs", "action"), KINDS, ids=lambda v: str(v.observation) if isinstance(v, Game) else ""
)
def test_rows_of_every_kind_of_space(game: Game, obs: list[Any], action: list[Any]) -> None:
    body = {
        "player": "ann",
        "schema": game.schema,
        "obs": obs,
        "action": action,
        "reward": [1, -0.5],
        "log_prob": [-0.5, -1],
    }
    [got] = decode_json(json.dumps([body]).encode(), game)
    assert isinstance(got, Fragment), got
    assert validate.check(game, [got]) == [None]
    columns = got.columns(game)
    for i, want in enumerate(obs):
        for name, value in want.items() if isinstance(want, dict) else [(..., want)]:
            np.testing.assert_array_equal(columns.obs[i][name], np.asarray(value, columns.obs[i][name].dtype))
    for i, want in enumerate(action):
        np.testing.assert_array_equal(columns.action[i], np.asarray(want, columns.action.dtype))
    assert columns.reward.tolist() == [1, -0.5]
    assert columns.log_prob is not None
    assert columns.log_prob.tolist() == [-0.5, -1]
    assert decode(encode([got])) == [got]


def test_what_a_person_leaves_out_is_made_up() -> None:
    first, second = one(), one()
    assert isinstance(first, Fragment)
    assert isinstance(second, Fragment)
    assert validate.check(TINY, [first, second]) == [None, None]
    assert (first.start, first.terminated, first.model) == (0, False, None)
    assert first.id != second.id
    assert first.episode != second.episode


def test_what_a_person_gives_is_kept() -> None:
    given = {
        "id": "mine", "episode": "first", "start": 5, "time": 1.5e9, "terminated": True, "truncated": True,
        "model": "bot", "version": 2,
    }  # fmt: skip
    got = one(**given)
    assert {name: getattr(got, name) for name in given} == given


@pytest.mark.parametrize("name", ["id", "episode", "player"])
def test_an_empty_name_is_refused_and_not_replaced(name: str) -> None:
    got = one(**{name: ""})
    assert isinstance(got, Fragment)
    assert validate.check(TINY, [got]) == [f"{name} must be 1..200 printable characters"]


def test_a_wrong_schema_is_the_check_s_to_refuse() -> None:
    got = one(schema="0123456789abcdef")
    assert isinstance(got, Fragment)
    assert "built for other spaces" in str(validate.check(TINY, [got])[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"obs": [[0, 0.5, 1]] * 3}, "obs: expected rows of shape (2,), got a list of 3 where a list of 2 belongs"),
        ({"obs": [[0, 0.5], [0]]}, "obs: "),
        ({"obs": [["a", "b"]] * 3}, "obs: expected numbers"),
        ({"obs": [{"x": 1}] * 3}, "obs: expected rows"),
        ({"obs": [None] * 3}, "obs: expected rows"),
        ({"action": [0.5, 1]}, "action: expected whole numbers"),
        ({"action": [1 << 40, 1]}, "action: values do not fit int32"),
        ({"action": [[0], [1]]}, "action: expected numbers, got a list of 1"),
    ],
)
def test_rows_that_cannot_be_columns_say_why(fields: dict[str, Any], message: str) -> None:
    got = one(**fields)
    assert isinstance(got, str)
    assert message in got


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": [0, 1, 1]}, "2 steps need 2 actions, 3 were sent"),
        ({"obs": [[0, 0]] * 2}, "2 steps need 3 observations, 2 were sent: the last is the one after the last step"),
        ({"obs": []}, "2 steps need 3 observations, 0 were sent: the last is the one after the last step"),
        ({"log_prob": [0]}, "2 steps need 2 log_probs, 1 was sent"),
        ({"reward": [1]}, "2 steps need 2 rewards, 1 was sent"),
        ({"reward": []}, "2 steps need 2 rewards, 0 were sent"),
        (
            {"obs": [[0, 0]], "action": [1], "reward": [1]},
            "1 step needs 2 observations, 1 was sent: the last is the one after the last step",
        ),
        ({"obs": [[0, 0]] * 2, "action": [1], "reward": [1, 1]}, "1 step needs 1 reward, 2 were sent"),
    ],
)
def test_rows_of_different_lengths_are_refused_in_the_words_of_rows(fields: dict[str, Any], message: str) -> None:
    got = one(**fields)
    assert got == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": [], "action": []}, "steps is 0"),
        ({"obs": [[0, 1e300]] * 3}, "obs has NaN or infinite"),
        ({"reward": [1e300, 0]}, "reward has NaN or infinite"),
        ({"log_prob": [-1e300, 0]}, "log_prob has NaN or infinite"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_rows_that_make_bad_columns_are_refused_by_the_check(fields: dict[str, Any], message: str) -> None:
    got = one(**fields)
    assert isinstance(got, Fragment)
    assert message in str(validate.check(TINY, [got])[0])


def test_one_bad_row_does_not_spoil_the_others() -> None:
    body = json.dumps([row(), row(obs=[[0]] * 3), row()]).encode()
    assert [type(got) for got in decode_json(body, TINY)] == [Fragment, Unfit, Fragment]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"\xff", b"[" * 100_000, b"[NaN]", b'[{"player": "\\ud800"}]', b"7",
        json.dumps([row()]).encode()[:-1],
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_what_is_not_a_json_list_of_fragments(body: bytes) -> None:
    with pytest.raises(InputError, match="not a JSON list of fragments"):
        decode_json(body, TINY)


def test_one_fragment_without_its_list() -> None:
    with pytest.raises(InputError, match=r"it is one object: put it into a list, \[\{…\}\]$"):
        decode_json(json.dumps(row()).encode(), TINY)


NO_FRAGMENT = {
    "a missing field": (row(player=...), "lacks `player`"),
    "missing fields": (row(player=..., reward=...), "lacks `player` and `reward`"),
    "nothing": ({}, "lacks `player`, `obs`, `action`, `reward` and `schema`"),
    "a misspelt field": (row(player=..., palyer="ann"), "lacks `player`, and has `palyer`, which is unknown"),
    "misspelt fields": (row(player=..., a=1, b=2), "lacks `player`, and has `a` and `b`, which are unknown"),
    "a number as obs": (
        row(obs=1.5),
        "has a number as `obs`, where a list belongs: one observation for each step, and one more for what the last "
        "action led to",
    ),
    "an object as obs": (
        row(obs={}),
        "has an object as `obs`, where a list belongs: one observation for each step, and one more for what the last "
        "action led to",
    ),
    "a number as action": (row(action=1), "has a number as `action`, where a list belongs: one action for each step"),
    "a number as reward": (row(reward=1), "has a number as `reward`, where a list belongs: one number for each step"),
    "a number as log_prob": (
        row(log_prob=-1.5),
        "has a number as `log_prob`, where a list belongs: one number for each step",
    ),
    "text as a reward": (row(reward=["1", 1]), "has text as `reward[0]`, where a number belongs"),
    "null as a reward": (row(reward=[1, None]), "has null as `reward[1]`, where a number belongs"),
    "a number as player": (row(player=7), "has a number as `player`, where text belongs"),
    "text as version": (row(version="3"), "has text as `version`, where a whole number belongs"),
    "a half as start": (row(start=0.5), "has a number as `start`, where a whole number belongs"),
    "a number": (7, "is a number: an object with `player`, `obs`, `action`, `reward` and `schema` belongs there"),
    "a list": ([], "is a list: an object with `player`, `obs`, `action`, `reward` and `schema` belongs there"),
}


@pytest.mark.parametrize("what", NO_FRAGMENT)
def test_what_is_no_fragment_is_reported_with_its_number_and_spoils_no_other(what: str) -> None:
    sent, message = NO_FRAGMENT[what]
    got = decode_json(json.dumps([row(), sent, row()]).encode(), TINY)
    assert [type(each) for each in got] == [Fragment, Unfit, Fragment]
    assert got[1] == f"fragment 1 {message}"


@pytest.mark.parametrize(
    "body",
    [b'[{"player": "\xff"}]', b'[{"\xff": 1}]', b"[" + b"[" * 500 + b"]" * 501, b"[1e999]"],
    ids=repr,
)
def test_other_strange_fragments_are_none_either(body: bytes) -> None:
    [got] = decode_json(body, TINY)
    assert str(got).startswith("fragment 0")


def test_too_many_that_are_none_are_not_looked_at() -> None:
    with pytest.raises(TooLarge, match="5 fragments in one request, at most 4"):
        decode_json(b"[{},{},{},{},{}]", TINY, 4)


def test_a_msgpack_fragment_is_reported_with_its_number() -> None:
    good = msgspec.to_builtins(one(), builtin_types=(bytes,))
    bad = {name: value for name, value in good.items() if name not in ("player", "obs")}
    for sent, message in ((bad | {"x": 1}, "lacks `player` and `obs`, and has `x`, which is unknown"),
                       (good | {"obs": [1]}, "has a list as `obs`, where bytes belongs"),
                       (7, "is a number: an object with `id`, ")):  # fmt: skip
        with pytest.raises(InputError) as caught:
            decode(msgspec.msgpack.encode([good, sent]))
        assert f"the body is not a msgpack list of fragments: fragment 1 {message}" in str(caught.value)


def test_a_skipped_field_is_reported_with_its_fragment() -> None:
    body = json.dumps([row(), row(terminate=True), 7, row(mask=1, terminate=True)]).encode()
    found = wire.unknown_fields(body, json=True)
    assert found == {"mask": 3, "terminate": 1}
    assert [wire.unknown_note(*each) for each in found.items()] == [
        "fragment 3 has `mask`, which is unknown and not stored",
        "fragment 1 has `terminate`, which is unknown and not stored: did you mean `terminated`?",
    ]


# Compression

PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
packed = pytest.mark.parametrize("encoding", PACKERS)


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_nothing_to_undo(encoding: str) -> None:
    assert decompress(b"anything", encoding, 3) == b"anything"


@packed
@pytest.mark.parametrize("data", [b"", b"x", b"hello" * 1000, bytes(range(256)) * 100])
def test_decompressed_as_it_was(encoding: str, data: bytes) -> None:
    assert decompress(PACKERS[encoding](data), encoding, 1 << 20) == data
    assert decompress(PACKERS[encoding](data), encoding, len(data)) == data


@packed
def test_one_byte_over_the_limit(encoding: str) -> None:
    with pytest.raises(TooLarge, match="larger than 99 bytes"):
        decompress(PACKERS[encoding](bytes(100)), encoding, 99)


@packed
def test_a_bomb_takes_no_more_memory_than_the_limit(encoding: str) -> None:
    bomb = PACKERS[encoding](bytes(64 << 20))
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decompress(bomb, encoding, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@packed
def test_every_cut_is_noticed(encoding: str) -> None:
    body = PACKERS[encoding](b"some text, some more text")
    for length in range(len(body)):
        with pytest.raises(InputError, match="cut short"):
            decompress(body[:length], encoding, 1 << 20)


@packed
@pytest.mark.parametrize("more", [b"x", b"\0", "again"])
def test_nothing_that_comes_after_is_lost_in_silence(encoding: str, more: bytes | str) -> None:
    body = PACKERS[encoding](b"data")
    with pytest.raises(InputError, match="goes on after the end"):
        decompress(body + (more if isinstance(more, bytes) else body), encoding, 1 << 20)


@packed
def test_damage_is_noticed(encoding: str) -> None:
    """Both forms end with a checksum. Bits of gzip's header that say nothing of the content may differ."""
    data = bytes(range(200)) * 3
    body = PACKERS[encoding](data)
    refused = 0
    for place in range(len(body)):
        changed = bytearray(body)
        changed[place] ^= 0x04
        try:
            assert decompress(bytes(changed), encoding, 1 << 20) == data
        except InputError:
            refused += 1
    assert refused > len(body) - 12


@packed
@pytest.mark.parametrize("body", [b"plain text, not packed", b"\xff" * 100, b"\x1f\x8b\x08" + b"\xff" * 50])
def test_garbage(encoding: str, body: bytes) -> None:
    with pytest.raises(InputError, match=encoding):
        decompress(body, encoding, 1 << 20)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "GZIP\n", "\x00"])
def test_unknown_encodings(encoding: str) -> None:
    with pytest.raises(InputError, match="is not supported: use gzip, deflate or none"):
        decompress(b"", encoding, 1 << 20)


def test_fields_of_a_newer_version_are_skipped_and_named() -> None:
    known = [fragment(), fragment(model="bot", version=1)]
    maps = [msgspec.to_builtins(f, builtin_types=(bytes,)) for f in known]
    body = msgspec.msgpack.encode([{**maps[0], "mask": b"x"}, {**maps[1], "match": {"id": 7}, "mask": None}])
    assert decode(body) == known
    assert [*wire.unknown_fields(body)] == ["mask", "match"]
    assert [*wire.unknown_fields(encode(known))] == []
    text = json.dumps([row(), row(cheat=1)]).encode()
    assert all(isinstance(f, Fragment) for f in decode_json(text, TINY))
    assert [*wire.unknown_fields(text, json=True)] == ["cheat"]
    assert [*wire.unknown_fields(json.dumps([row()]).encode(), json=True)] == []
    many = json.dumps([row(**{f"x{i}": 1 for i in range(1000)})]).encode()
    assert len(wire.unknown_fields(many, json=True)) == wire.MAX_UNKNOWN


def test_what_was_joined_is_split_as_it_was() -> None:
    parts = [wire.encode_one(fragment()), msgspec.msgpack.encode({"newer": 1}), wire.encode_one(fragment(steps=1))]
    assert wire.split(wire.array(parts)) == parts


@pytest.mark.parametrize("json_", [False, True])
def test_names_of_unknown_fields_cost_nothing_that_the_sender_chooses(monkeypatch, json_):
    """The sender chooses how many there are: such a fragment's are not looked at, and the others' are."""
    looked = []
    strict, keys, known = wire._FIELDS[json_]

    class Keys:
        @staticmethod
        def decode(part):
            looked.append(len(keys.decode(part)))
            return keys.decode(part)

    monkeypatch.setitem(wire._FIELDS, json_, (strict, Keys, known))
    flood = {f"field-{i:06}": None for i in range(20_000)}
    pack_all = (lambda rows: json.dumps(rows).encode()) if json_ else msgspec.msgpack.encode
    rows = [flood, {"cheat": 1}]
    assert [*wire.unknown_fields(pack_all(rows), json=json_)] == ["cheat"]
    assert looked == [1]
    looked.clear()
    assert [*wire.unknown_fields(pack_all([{"cheat": 1}] * 500), json=json_)] == ["cheat"]
    assert len(looked) == wire.LOOKED_AT


def test_a_field_whose_name_is_no_text_is_skipped():
    assert [*wire.unknown_fields(b"\x91\x81\xa2\xff\xfe\x01")] == ["?"]
    assert [*wire.unknown_fields(b'[{"\xff": 1}]', json=True)] == ["?"]
