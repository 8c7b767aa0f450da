"""Spaces and the games made of them: what fits, what is refused, and the hash that two clients must agree on."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.errors import InputError
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space, catalog
from sparring.games.spec import MAX_STEP_BYTES, column

PARTS = Dict({"view": Box((2, 3, 1), "uint8"), "armed": Box((), "bool"), "gear": Discrete(3, start=-1)})
SPACES: list[Space] = [
    Box((4,)),
    Box(()),
    Box((2, 2), "float64", low=-1.0, high=(1.0, 2.0, 3.0, 4.0)),
    Box((84, 84, 3), "uint8", low=0.0, high=255.0),
    Box((3, 84, 84), "uint8"),
    Box((5,), "int8", low=-3.0),
    Discrete(2),
    Discrete(6, start=-3),
    MultiDiscrete((3, 1, 7)),
    PARTS,
]


def game(observation: Space = SPACES[0], action: Any = SPACES[6], **fields: Any) -> Game:
    return Game("g", observation, action, **fields)


def declaration(**fields: Any) -> bytes:
    """A good declaration with some of its fields changed; None leaves one out."""
    good = {"name": "g", "observation": {"type": "box", "shape": [2]}, "action": {"type": "discrete", "n": 2}}
    return json.dumps({k: v for k, v in {**good, **fields}.items() if v is not None}).encode()


# The hash of the spaces


def test_schemas_of_deployed_games_never_change() -> None:
    """A change here locks out every client that is out in the world."""
    assert catalog.load("CartPole-v1").schema == "0c3a29627441c7a9"
    assert catalog.load("Pendulum-v1").schema == "c75759c145291c12"
    assert catalog.declare("any").schema == "943db14f7c94b3f5"


def test_spaces_that_differ_have_schemas_that_differ() -> None:
    others = [Box((5,)), Box((4, 1)), Box((4,), "float64"), Box((4,), low=0), Box((4,), high=0), Discrete(3)]
    named = [Dict({"a": Box((4,))}), Dict({"b": Box((4,))}), MultiDiscrete((2,)), MultiDiscrete((2, 2))]
    games = [game(space) for space in [*SPACES, *others, *named]]
    games += [game(action=Discrete(3)), game(action=Discrete(2, 1)), game(action=Box((1,))), game(players=2)]
    assert len({g.schema for g in games}) == len(games)


def test_schema_is_of_the_spaces_and_not_of_the_words_for_them() -> None:
    here = game(Box((2,), low=(-1.0, 0.0), high=1.0))
    renamed = Game("other", here.observation, here.action, env="Other-v1")
    in_python = game(Box([np.int64(2)], low=[-1, -0.0], high=1), Discrete(np.int64(2)))  # type: ignore[arg-type]
    order = [{"x": Box((1,)), "y": Discrete(2)}, {"y": Discrete(2), "x": Box((1,))}]
    assert renamed.schema == in_python.schema == here.schema
    assert game(Dict(order[0])).schema == game(Dict(order[1])).schema  # type: ignore[arg-type]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_json_gives_the_same_game_back(space: Space) -> None:
    there = game(space, players=3, env="G-v1")
    back = Game.from_json(there.to_json())
    assert (back, back.schema) == (there, there.schema)
    assert back.observation.element == space.element


def test_numbers_of_numpy_go_into_json() -> None:
    there = game(MultiDiscrete(tuple(np.array([2, 3]))), Discrete(np.int64(4), np.int32(-1)))  # type: ignore[arg-type]
    assert Game.from_json(there.to_json()) == game(MultiDiscrete((2, 3)), Discrete(4, -1))


# Declarations of people and strangers

MALFORMED = {
    "nothing": (b"", "truncated"),
    "not an object": (b"[1]", "Expected `object`"),
    "not JSON": (b"\xff\xfe", "malformed"),
    "bad UTF-8": (b'{"name": "\xff"}', "utf-8"),
    "deep": (b'{"observation":' + b"[" * 100_000, "not a game declaration"),
    "NaN": (declaration(observation={"type": "box", "shape": [2], "low": float("nan")}), "malformed"),
    "infinite": (b'{"name":"g","observation":{"type":"box","shape":[2],"low":1e999}}', "out of range"),
    "no name": (declaration(name=None), "`name`"),
    "no action": (declaration(action=None), "`action`"),
    "unknown key": (declaration(acton={}), "`acton`"),
    "unknown key of a box": (declaration(observation={"type": "box", "shape": [2], "hihg": 1}), "`hihg`"),
    "unknown key of a discrete": (declaration(action={"type": "discrete", "n": 2, "nn": 3}), "`nn`"),
    "unknown key of a list": (declaration(action={"type": "multi_discrete", "nvec": [2], "start": 1}), "`start`"),
    "unknown key of a dict": (
        declaration(observation={"type": "dict", "fields": {"a": {"type": "discrete", "n": 2}}, "b": 1}),
        "`b`",
    ),
    "unknown type": (
        declaration(observation={"type": "text"}),
        "observation has the type 'text': use box, discrete, multi_discrete or dict",
    ),
    "unknown type of an action": (
        declaration(action={"type": "text"}),
        "action has the type 'text': use box, discrete or multi_discrete",
    ),
    "unknown type of a field": (
        declaration(observation={"type": "dict", "fields": {"a": {"type": ["box"]}}}),
        "observation.fields.a has the type ['box']: use box, discrete or multi_discrete",
    ),
    "no type": (declaration(observation={"shape": [2]}), "observation has no `type`: use box, discrete, multi_disc"),
    "a list as a space": (
        declaration(observation=[2]),
        'observation is a list of 1: it must be an object like {"type": "box", …}, with the type box, discrete, ',
    ),
    "name is a number": (declaration(name=3), "Expected `str`"),
    "name is a path": (declaration(name="../x"), "game name '../x'"),
    "name is empty": (declaration(name=""), "game name ''"),
    "name is long": (declaration(name="x" * 101), "at most 100"),
    "name has a line": (declaration(name="x\n"), "game name"),
    "no players": (declaration(players=0), "players must be 1..10000"),
    "shape is text": (declaration(observation={"type": "box", "shape": "2"}), "shape"),
    "shape of a half": (declaration(observation={"type": "box", "shape": [2.5]}), "Expected `int`"),
    "shape of nothing": (declaration(observation={"type": "box", "shape": [2, 0]}), "dimension below 1"),
    "shape below nothing": (declaration(observation={"type": "box", "shape": [-2, -2]}), "dimension below 1"),
    "huge shape": (declaration(observation={"type": "box", "shape": [1 << 20, 1 << 20]}), "larger than 4 MiB"),
    "shape that wraps": (declaration(observation={"type": "box", "shape": [1 << 32, 1 << 32]}), "larger than 4 MiB"),
    "shape beyond": (declaration(observation={"type": "box", "shape": [1 << 80]}), "larger than 4 MiB"),
    "many dimensions": (declaration(observation={"type": "box", "shape": [1] * 17}), "17 dimensions"),
    "dtype": (declaration(observation={"type": "box", "shape": [2], "dtype": "float16"}), "one of float32, float64"),
    "low above high": (declaration(observation={"type": "box", "shape": [2], "low": 1, "high": 0}), "low is above"),
    "one low above high": (
        declaration(observation={"type": "box", "shape": [2], "low": [0, 2], "high": 1}),
        "low is above high",
    ),
    "too few bounds": (declaration(observation={"type": "box", "shape": [2], "low": [0]}), "low has 1 values"),
    "bound is text": (declaration(observation={"type": "box", "shape": [2], "high": "1"}), "high"),
    "no choice": (declaration(action={"type": "discrete", "n": 0}), ">= 1"),
    "too many choices": (declaration(action={"type": "discrete", "n": 1 << 21}), "<="),
    "choices are true": (declaration(action={"type": "discrete", "n": True}), "Expected `int`"),
    "start beyond": (declaration(action={"type": "discrete", "n": 2, "start": 1 << 31}), "<="),
    "no parts": (declaration(action={"type": "multi_discrete", "nvec": []}), "length >= 1"),
    "an empty part": (declaration(action={"type": "multi_discrete", "nvec": [2, 0]}), ">= 1"),
    "no fields": (declaration(observation={"type": "dict", "fields": {}}), "at least one field"),
    "field name": (
        declaration(observation={"type": "dict", "fields": {"a.b": {"type": "discrete", "n": 2}}}),
        "'a.b'",
    ),
    "nested dict": (
        declaration(observation={"type": "dict", "fields": {"a": {"type": "dict", "fields": {}}}}),
        "'dict'",
    ),
    "fields too large together": (
        declaration(
            observation={"type": "dict", "fields": {n: {"type": "box", "shape": [600_000]} for n in "ab"}}
        ),
        "all fields is larger",
    ),
    "dict action": (declaration(action={"type": "dict", "fields": {"a": {"type": "discrete", "n": 2}}}), "'dict'"),
    "whole numbers as a box action": (
        declaration(action={"type": "box", "shape": [2], "dtype": "int32"}),
        "use multi_discrete",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_declarations_are_refused_with_what_is_wrong(what: str) -> None:
    text, message = MALFORMED[what]
    with pytest.raises(InputError) as caught:
        Game.declared(text)
    assert "not a game declaration" in str(caught.value)
    assert message in str(caught.value)


def test_the_declaration_that_all_these_were_made_from_is_good() -> None:
    assert Game.from_json(declaration()) == Game("g", Box((2,)), Discrete(2))


@pytest.mark.parametrize("cut", range(0, 90, 7))
def test_a_declaration_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(InputError):
        Game.from_json(declaration()[:cut])


def test_the_largest_space_is_as_large_as_the_text_says() -> None:
    assert Box((MAX_STEP_BYTES // 4,)).element.itemsize == MAX_STEP_BYTES
    with pytest.raises(ValueError, match="larger than 4 MiB"):
        Box((MAX_STEP_BYTES // 4 + 1,))


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), -float("inf"), (0.0, float("nan"))])
def test_bounds_are_finite(bound: Any) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Box((2,), low=bound)
    with pytest.raises(ValueError, match="must be finite"):
        Box((2,), high=bound)


# What is in a space


def test_bounds_have_the_shape_of_the_space() -> None:
    low, high = Box((2, 2), low=-1.0, high=(1.0, 2.0, 3.0, 4.0)).bounds
    assert low is not None
    assert high is not None
    np.testing.assert_array_equal(low, [[-1, -1], [-1, -1]])
    np.testing.assert_array_equal(high, [[1, 2], [3, 4]])
    assert Box((2,)).bounds == (None, None)


@pytest.mark.parametrize("bound", [0.1, 1 / 3, 1e-3, 16777217.0])
def test_a_float32_on_its_bound_is_inside_whichever_way_it_was_rounded(bound: float) -> None:
    space = Box((1,), low=-bound, high=bound)
    here = np.array([[bound], [-bound]], "<f4")
    assert space.problem(here) is None
    assert "upper bound" in str(space.problem(np.nextafter(here, np.float32(np.inf), dtype="<f4")))
    assert "lower bound" in str(space.problem(np.nextafter(here, np.float32(-np.inf), dtype="<f4")))


def test_the_value_outside_is_named_with_its_own_bound() -> None:
    space = Box((2,), low=(0.0, -5.0), high=(1.0, 9.0))
    assert space.problem(np.array([[0, 9], [-1, -3]], "<f4")) == "is below the space's lower bound (-1 < 0)"
    assert space.problem(np.array([[1, 9], [0.5, 9.5]], "<f4")) == "is above the space's upper bound (9.5 > 9)"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("space", [Box((2,)), Box((2,), "float64", low=0.0), Dict({"a": Box((2,)), "b": Discrete(2)})])
def test_only_finite_numbers(space: Any, value: float) -> None:
    rows = np.ones(3, space.element)
    assert space.problem(rows) is None
    (rows["a"] if isinstance(space, Dict) else rows)[1, 1] = value
    assert "NaN or infinite" in space.problem(rows)


def test_booleans_are_two_bytes_of_all() -> None:
    space = Box((2,), "bool")
    assert space.problem(np.frombuffer(b"\0\1\1\0", space.element)) is None
    for byte in (2, 7, 255):
        assert space.problem(np.frombuffer(bytes([0, byte]), space.element)) == "has bytes other than 0 and 1"
    inside = Dict({"a": space, "b": Discrete(2)})
    assert "a has bytes" in str(inside.problem(np.frombuffer(b"\0\3\0\0\0\0", inside.element)))


def test_whole_numbers_in_their_range() -> None:
    for space, good, bad in [
        (Discrete(3), [0, 2], [-1, 3]),
        (Discrete(3, start=-1), [-1, 1], [-2, 2]),
        (MultiDiscrete((2, 3)), [(0, 0), (1, 2)], [(2, 0), (0, 3), (-1, 0)]),
        (Box((1,), "int8", low=-3.0, high=3.0), [(-3,), (3,)], [(-4,), (4,)]),
    ]:
        assert space.problem(np.array(good, space.element.base)) is None
        for value in bad:
            assert space.problem(np.array([value], space.element.base)) is not None, (space, value)
        assert space.problem(np.empty(0, space.element)) is None


def test_images_are_bytes_with_height_and_width_in_either_layout() -> None:
    assert Box((84, 84, 3), "uint8").is_image
    assert Box((3, 84, 84), "uint8").is_image
    assert not Box((84, 84, 3)).is_image
    assert not Box((84, 84), "uint8").is_image


def test_a_step_of_a_dict_is_one_element_without_gaps_ordered_by_name() -> None:
    assert PARTS.element.names == ("armed", "gear", "view")
    assert PARTS.element.itemsize == 1 + 4 + 6


# Rows of a game or of JSON


@pytest.mark.parametrize(
    ("space", "rows"),
    [
        (Box((2,)), [[1, 2], [0.5, -3]]),
        (Box((2,)), np.arange(4).reshape(2, 2)),
        (Box(()), [1.5, 2]),
        (Box((2, 1)), [[[1], [2]]]),
        (Box((2,), "float64"), [[1e300, True]]),
        (Box((2,), "uint8"), [[0, 255.0]]),
        (Box((1,), "bool"), [[True], [0], [1.0]]),
        (Box((1,), "int64"), [[-(2**63)], [2**63 - 1]]),
        (Discrete(5, start=2), [2, 6.0]),
        (MultiDiscrete((2, 3)), [[1, 2], (0, 0)]),
    ],
)
def test_rows_become_a_column(space: Any, rows: Any) -> None:
    got = column(space, rows)
    assert got.dtype == space.element.base
    assert got.shape == (len(rows), *space.element.shape)
    np.testing.assert_array_equal(got, np.asarray(rows))


def test_rows_of_a_dict_become_one_column() -> None:
    rows = [
        {"gear": 1, "armed": True, "view": np.full((2, 3, 1), 7)},
        {"view": np.zeros((2, 3, 1)), "gear": -1, "armed": 0},
    ]
    got = column(PARTS, rows)
    assert got.dtype == PARTS.element
    assert (got["gear"].tolist(), got["armed"].tolist()) == ([1, -1], [True, False])
    assert (got["view"][0] == 7).all()
    assert np.frombuffer(got.tobytes(), PARTS.element).tobytes() == got.tobytes()


def test_an_array_of_the_right_type_is_not_copied() -> None:
    rows = np.ones((5, 2), "<f4")
    assert column(Box((2,)), rows) is rows


@pytest.mark.parametrize(
    ("space", "rows", "message"),
    [
        (Box((2,)), [[1, 2, 3]], "got a list of 3 where a list of 2 belongs"),
        (Box((2,)), [[1, 2], [3]], ""),
        (Box((2,)), [1, 2], "got a number where a list of 2 belongs"),
        (Box((2,)), [["a", "b"]], "expected numbers"),
        (Box((2,)), [[None, 1]], "expected numbers"),
        (Box((2,)), [[1j, 1]], "expected numbers"),
        (Box((2,)), [[10**400, 1]], "expected numbers"),
        (Box((2,)), [{"x": 1}], "got an object where a list of 2 belongs"),
        (Box((1,), "uint8"), [[256]], "do not fit uint8"),
        (Box((1,), "uint8"), [[-1]], "do not fit uint8"),
        (Box((1,), "uint8"), [[0.5]], "whole numbers"),
        (Box((1,), "bool"), [[0.5]], "whole numbers"),
        (Box((1,), "bool"), [[2]], "do not fit bool"),
        (Box((1,), "int64"), [[2.0**63]], "do not fit int64"),
        (Box((1,), "int64"), [[2**63]], "do not fit int64"),
        (Discrete(2), [float("nan")], "whole numbers"),
        (Discrete(2), [float("inf")], "do not fit int32"),
        (Discrete(2), [2**40], "do not fit int32"),
        (Discrete(2), [[0]], "got a list of 1"),
        (PARTS, [{"gear": 0, "armed": 0}], "row 0 lacks view"),
        (PARTS, [{"gear": 0, "armed": 0, "view": 0, "more": 0}], "row 0 has more, which the space has not"),
        (PARTS, [{"gear": 0, "armed": 0, "veiw": 0}], "row 0 lacks view and has veiw, which the space has not"),
        (PARTS, [{"gear": [0], "armed": 0, "view": np.zeros((2, 3, 1))}], "gear: expected numbers, got a list of 1"),
        (PARTS, [[0, 0, 0]], "row 0 is a list of 3, an object with the fields armed, gear, view belongs there"),
        (PARTS, [{"gear": 0.5, "armed": 0, "view": np.zeros((2, 3, 1))}], "whole numbers"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(space: Any, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        column(space, rows)
    assert message in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_a_number_too_large_for_float32_is_not_in_the_space() -> None:
    got = column(Box((1,)), [[1e300]])
    assert Box((1,)).problem(got) == "has NaN or infinite values"


def test_random_declarations_are_games_or_input_errors() -> None:
    """Bytes of a good declaration changed at random: a game whose every part works, or an InputError."""
    rng = np.random.default_rng(0)
    text = game(SPACES[2], MultiDiscrete((2, 3)), players=2).to_json()
    fine = 0
    for _ in range(2000):
        body = bytearray(text)
        for place in rng.integers(0, len(body), rng.integers(1, 4)):
            body[place] = rng.choice(list(b'0123456789.e-+[]{},:"ntf \x00\xff'))
        try:
            got = Game.from_json(bytes(body))
        except InputError:
            continue
        fine += 1
        rows = np.zeros(2, got.observation.element)
        assert isinstance(got.observation.problem(rows), str | None)
        assert Game.from_json(got.to_json()).schema == got.schema
    assert fine > 20  # else this test says nothing


def test_games_are_messages_in_msgpack_too() -> None:
    there = game(PARTS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(there), type=Game) == there


CROWD = """
import os, sys, threading
from sparring.api import Snapshot, TrainerStatus
from sparring.games import Box, Discrete, Game
from sparring.registry.manifest import Manifest, Pointer
import msgspec
sys.setswitchinterval(1e-7)
text = Game("CartPole-v1", Box((4,)), Discrete(2)).to_json()
def decode(kind, together):
    together.wait()
    try:
        msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        pass
for kind in [Game, Manifest, Pointer, TrainerStatus, Snapshot] * 20:
    if (child := os.fork()) == 0:  # a process that has decoded nothing yet
        together = threading.Barrier(8)
        crowd = [threading.Thread(target=decode, args=(kind, together)) for _ in range(8)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        os._exit(0)
    if (code := os.waitpid(child, 0)[1]) != 0:
        sys.exit(f"{kind.__name__}: {code}")
"""


def test_threads_may_be_the_first_to_decode_a_type() -> None:
    """In msgspec that is a segmentation fault, about one time in four here, unless its decoder was made before."""
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
