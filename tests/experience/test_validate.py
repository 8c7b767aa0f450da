"""The door: what may enter, what may not and why; whatever is sent, nothing bad passes."""

from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.experience import Columns, Fragment, new_id, pack
from sparring.experience.validate import DAY, FUTURE, MAX_STEPS, PAST, check
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete

NOW = 1.8e9
TINY = Game("g", Box((2,), low=-1.0, high=1.0), Discrete(3, start=1))
GAMES = [
    TINY,
    Game(
        "g",
        Dict({"at": Box((2,), low=0.0, high=9.0), "gun": Discrete(3), "lit": Box((), "bool")}),
        Box((2,), low=-1.0, high=1.0),
    ),
    Game("g", Box((2, 2, 1), "uint8"), MultiDiscrete((2, 3))),
]


def fragment(game: Game = TINY, steps: int = 4, seed: int = 0, **fields: Any) -> Fragment:
    rng = np.random.default_rng(seed)
    columns = Columns(
        sample(game.observation, steps + 1, rng),
        sample(game.action, steps, rng),
        rng.standard_normal(steps).astype("<f4"),
        -rng.random(steps).astype("<f4"),
    )
    given = {"id": new_id(NOW), "player": "ann", "episode": "e", "start": 0, "time": NOW, "model": "bot", "version": 1}
    return msgspec.structs.replace(pack(game, columns, **given), **fields)


def sample(space: Any, count: int, rng: np.random.Generator) -> Any:
    """Elements of the space, bounds among them."""
    out = np.zeros(count, space.element)
    if isinstance(space, Dict):
        for name, part in space.fields.items():
            out[name] = sample(part, count, rng)
    elif isinstance(space, Discrete):
        out[:] = rng.integers(space.start, space.start + space.n, count)
    elif isinstance(space, MultiDiscrete):
        out[:] = rng.integers(0, space.nvec, out.shape)
    elif space.dtype.startswith("float"):
        low, high = space.bounds
        out[:] = rng.uniform(low, high, out.shape)
        out[0] = high
    else:
        out[:] = rng.integers(0, 2 if space.dtype == "bool" else 256, out.shape)
    return out


def reason(f: Fragment, game: Game = TINY) -> str | None:
    [got] = check(game, [f], NOW)
    return got


def with_value(f: Fragment, name: str, place: int, value: float, dtype: str = "<f4") -> Fragment:
    column = np.frombuffer(getattr(f, name), dtype).copy()
    column[place] = value
    return msgspec.structs.replace(f, **{name: column.tobytes()})


@pytest.mark.parametrize("game", GAMES, ids=str)
def test_good_fragments_enter(game: Game) -> None:
    assert check(game, [fragment(game, steps, seed=steps) for steps in (1, 2, 50)], NOW) == [None] * 3
    assert reason(fragment(game, log_prob=None, model=None, version=None), game) is None
    assert check(game, [], NOW) == []


NOT_A_NAME = "must be 1..200 printable characters"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another game": ({"game": "h"}, "it is for the game 'h', this is 'g'"),
    "another schema": ({"schema": "0" * 16}, "the client was built for other spaces"),
    "no steps": ({"steps": 0, "obs": bytes(8), "action": b"", "reward": b"", "log_prob": b""}, "steps is 0"),
    "steps below none": ({"steps": -1}, "steps is -1"),
    "more steps than allowed": ({"steps": MAX_STEPS + 1}, f"allowed are 1..{MAX_STEPS}"),
    "steps beyond": ({"steps": 1 << 63}, "allowed are 1..10000"),
    "a step too many": (
        {"steps": 5},
        "5 steps need 6 observations, 5 were sent: the last is the one after the last step",
    ),
    "a step too few": ({"steps": 3}, "obs has 40 bytes, 3 steps need 32"),
    "obs without the last": ({"obs": bytes(32)}, "4 steps need 5 observations, 4 were sent"),
    "obs as float64": ({"obs": bytes(80)}, "wrong shape or dtype"),
    "obs cut within a number": ({"obs": bytes(39)}, "obs has 39 bytes"),
    "action as int64": ({"action": bytes(32)}, "action has 32 bytes, 4 steps need 16"),
    "reward as float64": ({"reward": bytes(32)}, "reward has 32 bytes"),
    "log_prob of fewer": ({"log_prob": bytes(12)}, "4 steps need 4 log_probs, 3 were sent"),
    "log_prob of none": ({"log_prob": b""}, "4 steps need 4 log_probs, 0 were sent"),
    "empty id": ({"id": ""}, f"id {NOT_A_NAME}"),
    "long id": ({"id": "x" * 201}, f"id {NOT_A_NAME}"),
    "empty player": ({"player": ""}, f"player {NOT_A_NAME}"),
    "long player": ({"player": "x" * 201}, f"player {NOT_A_NAME}"),
    "zero in a player": ({"player": "ann\0"}, f"player {NOT_A_NAME}"),
    "line in a player": ({"player": "ann\nbob"}, f"player {NOT_A_NAME}"),
    "escape in a player": ({"player": "\x1b[31mann"}, f"player {NOT_A_NAME}"),
    "direction in a player": ({"player": "\u202eann"}, f"player {NOT_A_NAME}"),
    "surrogate in a player": ({"player": "\ud800"}, f"player {NOT_A_NAME}"),
    "empty episode": ({"episode": ""}, f"episode {NOT_A_NAME}"),
    "tab in an episode": ({"episode": "\t"}, f"episode {NOT_A_NAME}"),
    "empty model": ({"model": ""}, f"model {NOT_A_NAME}"),
    "model without version": ({"version": None}, "model and version go together"),
    "version without model": ({"model": None}, "model and version go together"),
    "start below none": ({"start": -1}, "start and version"),
    "start beyond": ({"start": 1 << 53}, "start and version"),
    "version below none": ({"version": -1}, "start and version"),
    "version beyond": ({"version": 1 << 63}, "start and version"),
    "a year behind": ({"time": NOW - 365 * DAY}, "its clock is -365.0 days off"),
    "a year ahead": ({"time": NOW + 365 * DAY}, "its clock is +365.0 days off"),
    "milliseconds": (
        {"time": NOW * 1000 + 7},
        "time is 1800000000007: send seconds, not milliseconds (in JavaScript: Date.now() / 1000)",
    ),
    "microseconds": ({"time": NOW * 1e6}, "its clock is +20833312500.0 days off"),
    "no clock": ({"time": 0.0}, "days off the server's (allowed: −60 to +1)"),
    "clock NaN": ({"time": float("nan")}, "its clock is"),
    "clock infinite": ({"time": float("inf")}, "its clock is"),
    "clock infinite behind": ({"time": -float("inf")}, "its clock is"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason(what: str) -> None:
    fields, message = REFUSED[what]
    assert message in str(reason(msgspec.structs.replace(fragment(), **fields)))


@pytest.mark.parametrize(
    ("column", "value", "dtype", "message"),
    [
        ("obs", np.nan, "<f4", "obs has NaN or infinite values"),
        ("obs", np.inf, "<f4", "obs has NaN or infinite values"),
        ("obs", 1.5, "<f4", "obs is above the space's upper bound (1.5 > 1)"),
        ("obs", -1.5, "<f4", "obs is below the space's lower bound (-1.5 < -1)"),
        ("action", 0, "<i4", "action is outside 1..3"),
        ("action", 4, "<i4", "action is outside 1..3"),
        ("action", -(2**31), "<i4", "action is outside 1..3"),
        ("reward", np.nan, "<f4", "reward has NaN or infinite values"),
        ("reward", -np.inf, "<f4", "reward has NaN or infinite values"),
        ("log_prob", np.nan, "<f4", "log_prob has NaN or infinite values"),
        ("log_prob", np.inf, "<f4", "log_prob has NaN or infinite values"),
    ],
)
@pytest.mark.parametrize("place", [0, -1])
def test_refused_for_one_value(column: str, value: float, dtype: str, message: str, place: int) -> None:
    bad = with_value(fragment(), column, place, value, dtype)
    assert reason(bad) == message
    good = [fragment(seed=i) for i in range(3)]
    assert check(TINY, [good[0], bad, *good[1:]], NOW) == [None, message, None, None]


@pytest.mark.parametrize("name", ["x" * 200, "Zoë 漢字 🎮", "a b", "'; DROP TABLE fragments; --", "../..", "<script>"])
def test_names_are_anything_that_can_be_printed(name: str) -> None:
    assert reason(fragment(player=name, episode=name, id=name, model=name)) is None


@pytest.mark.parametrize("seconds", [-PAST, -PAST / 2, 0.0, FUTURE])
def test_clocks_may_be_off_by_weeks_of_being_offline(seconds: float) -> None:
    assert reason(fragment(time=NOW + seconds)) is None
    assert reason(fragment(time=NOW - PAST - 1)) is not None
    assert reason(fragment(time=NOW + FUTURE + 1)) is not None


def test_the_longest_fragment() -> None:
    assert reason(fragment(steps=MAX_STEPS)) is None
    assert reason(fragment(steps=MAX_STEPS + 1)) is not None


def test_the_present_is_the_server_s() -> None:
    assert check(TINY, [fragment(time=NOW)], NOW + 365 * DAY) != [None]
    assert check(TINY, [fragment(time=1e9)]) != [None]


def test_each_of_a_batch_is_told_its_own_reason() -> None:
    bad = [fragment(player=""), with_value(fragment(), "reward", 0, np.nan), with_value(fragment(), "obs", 0, 7)]
    batch = [fragment(seed=1), bad[0], fragment(seed=2), bad[1], bad[2], fragment(seed=3)]
    found = check(TINY, batch, NOW)
    assert [r is None for r in found] == [True, False, True, False, False, True]
    assert found == [reason(f) for f in batch]


# Whatever is sent

COLUMNS = ("obs", "action", "reward", "log_prob")
ODD: dict[str, list[Any]] = {
    "id": ["", "x" * 201, "\0", "ok"],
    "player": ["", "\n", "\ud800", "bob"],
    "game": ["", "h"],
    "schema": ["", "0" * 16],
    "steps": [0, 1, 3, 5, -1, 1 << 62, MAX_STEPS],
    "start": [-1, 7, 1 << 60],
    "time": [0.0, float("nan"), float("inf"), -1e308, NOW + 1],
    "terminated": [True],
    "model": [None, "", "other"],
    "version": [None, -1, 5],
    "log_prob": [None, b""],
}


def mutated(f: Fragment, rng: np.random.Generator) -> Fragment:
    """One to three changes of the kind that bugs, bad luck and bad people make."""
    for _ in range(rng.integers(1, 4)):
        if rng.random() < 0.4:
            name = str(rng.choice(list(ODD)))
            f = msgspec.structs.replace(f, **{name: ODD[name][rng.integers(len(ODD[name]))]})
            continue
        name = str(rng.choice(COLUMNS))
        data = bytearray(getattr(f, name) or b"")
        kind = rng.integers(4)
        if kind == 0 or not data:  # another size
            data = data[: rng.integers(len(data) + 1)] + bytes(int(rng.integers(9)))
        elif kind == 1:  # a flipped bit
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        elif kind == 2 and len(data) >= 4:  # a number that is none, or a large one
            place = 4 * int(rng.integers(len(data) // 4))
            value = rng.choice([np.nan, np.inf, -np.inf, 3e38, 1.0001])
            data[place : place + 4] = np.float32(value).tobytes()
        else:  # noise
            data = bytearray(rng.bytes(len(data)))
        f = msgspec.structs.replace(f, **{name: bytes(data)})
    return f


def is_good(game: Game, f: Fragment) -> bool:
    """By hand, element by element: what a learner may rely on."""
    columns = f.columns(game)
    assert (len(columns.obs), len(columns.action), len(columns.reward)) == (f.steps + 1, f.steps, f.steps)
    rows = [(game.observation, row) for row in columns.obs] + [(game.action, row) for row in columns.action]
    numbers = [*columns.reward, *([] if columns.log_prob is None else columns.log_prob)]
    return all(inside(space, row) for space, row in rows) and bool(np.isfinite(numbers).all())


def inside(space: Any, value: Any) -> bool:
    if isinstance(space, Dict):
        return all(inside(part, value[name]) for name, part in space.fields.items())
    if isinstance(space, Discrete):
        return bool(space.start <= value < space.start + space.n)
    if isinstance(space, MultiDiscrete):
        return all(0 <= v < n for v, n in zip(value, space.nvec, strict=True))
    low, high = -np.inf if space.low is None else space.low, np.inf if space.high is None else space.high
    raw = np.asarray(value)
    if space.dtype == "bool":
        return set(raw.tobytes()) <= {0, 1}
    return bool(np.isfinite(raw).all() and (raw >= low).all() and (raw <= high).all())


@pytest.mark.parametrize("game", GAMES, ids=lambda game: type(game.observation).__name__ + type(game.action).__name__)
def test_nothing_bad_enters_and_nothing_crashes(game: Game) -> None:
    rng = np.random.default_rng(7)
    passed = 0
    for seed in range(1500):
        f = mutated(fragment(game, seed=seed), rng)
        why = reason(f, game)
        assert why is None or (isinstance(why, str) and why)
        if why is None:
            passed += 1
            assert is_good(game, f), f
    assert 20 < passed < 1200  # else this test says nothing


@pytest.mark.parametrize("game", GAMES, ids=lambda game: type(game.observation).__name__ + type(game.action).__name__)
def test_a_batch_is_judged_as_its_fragments_are_one_by_one(game: Game) -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        batch = [fragment(game, int(rng.integers(1, 9)), seed) for seed in range(rng.integers(1, 12))]
        batch = [mutated(f, rng) if rng.random() < 0.2 else f for f in batch]
        assert check(game, batch, NOW) == [reason(f, game) for f in batch]


FREE = Game("g", Dict({"at": Box((2,)), "high": Box((), "float64", low=0.0)}), Box((1,)))


@pytest.mark.parametrize("value", [3e38, -3e38, 1.1e6, -1.1e6])
def test_rewards_that_would_break_learning_are_refused_unless_declared(value: float) -> None:
    bad = with_value(fragment(), "reward", 2, value)
    why = reason(bad)
    assert why is not None
    assert why.startswith(f"reward reaches {np.float32(value):.9g}, the ")
    assert "1e+06" in why
    assert '"reward": [LOW, HIGH]' in why
    declared = msgspec.structs.replace(TINY, reward=(-3.4e38, 3.4e38))
    assert declared.schema == TINY.schema  # spaces are the same: stored play stays good
    assert reason(bad, declared) is None


def test_declared_reward_bounds_are_kept_in_float32() -> None:
    game = msgspec.structs.replace(TINY, reward=(0.0, 0.1))
    good = fragment(reward=np.full(4, 0.1, "<f4").tobytes())  # the nearest float32 is above 0.1
    assert reason(good, game) is None
    assert (
        reason(with_value(good, "reward", 0, 0.11), game)
        == "reward reaches 0.109999999, the most that is allowed is 0.1"
    )
    assert reason(with_value(good, "reward", 0, -1e-9), game) is not None
    for bounds in ((1.0, 0.0), (float("-inf"), 0.0), (0.0, float("nan"))):
        with pytest.raises(ValueError, match="two finite numbers"):
            msgspec.structs.replace(TINY, reward=bounds)


@pytest.mark.parametrize(
    ("field", "value", "refused"), [("at", 1e16, True), ("high", 1e16, True), ("at", 1.8e12, False)]
)
def test_enormous_numbers_without_a_declared_bound_are_refused(field: str, value: float, refused: bool) -> None:
    obs = np.zeros(5, FREE.observation.element)
    obs[field][3] = value
    columns = Columns(obs, np.zeros((4, 1), "<f4"), np.zeros(4, "<f4"))
    f = pack(FREE, columns, id=new_id(NOW), player="ann", episode="e", start=0, time=NOW)
    why = reason(f, FREE)
    assert (why is not None) == refused
    assert (
        why is None
        or why
        == f"obs {field} reaches {obs[field].max():.9g}, the most that is allowed is 1e+15: a space "
        "whose numbers are larger declares `low` and `high`"
    )
    action = msgspec.structs.replace(f, obs=bytes(len(f.obs)), action=np.full(4, -1e16, "<f4").tobytes())
    assert "action reaches -1.0000000" in (reason(action, FREE) or "")
    bounded = msgspec.structs.replace(
        FREE, observation=Dict({"at": Box((2,), low=-1e30, high=1e30), "high": Box((), "float64", low=0.0, high=1e300)})
    )
    assert reason(msgspec.structs.replace(f, schema=bounded.schema), bounded) is None
