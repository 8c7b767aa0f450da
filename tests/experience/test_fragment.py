"""The fragment itself: its id, its columns."""

import time
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.experience import Columns, Fragment, new_id, pack
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space

SPACES: list[tuple[Space, Any]] = [
    (Box((4,)), Discrete(3, start=-1)),
    (Box((3, 8, 8), "uint8"), MultiDiscrete((2, 3))),
    (Box((), "float64"), Box((2,), low=-1.0, high=1.0)),
    (Discrete(5), Discrete(2)),
    (MultiDiscrete((2, 9)), Discrete(2)),
    (Dict({"b": Box((2,)), "a": Discrete(3), "c": Box((2, 2), "bool")}), Box((1,), "float64")),
]


def fragment(**fields: Any) -> Fragment:
    game = Game("g", Box((2,)), Discrete(2))
    columns = Columns(np.arange(8, dtype="<f4").reshape(4, 2), np.array([0, 1, 1], "<i4"), np.arange(3.0))
    given = {"id": "f", "player": "ann", "episode": "e", "start": 0, "time": 1e9, "model": "bot", "version": 1}
    return msgspec.structs.replace(pack(game, columns, **given), **fields)


# Ids


def test_ids_are_unique() -> None:
    assert len({new_id() for _ in range(20_000)}) == 20_000


def test_ids_are_ordered_by_time() -> None:
    times = [0.0, 0.001, 1.0, 1e9, 1e9 + 0.001, 1.7e9, 4e9, 2.8e11]
    ids = [new_id(now) for now in times]
    assert sorted(ids) == ids
    assert [int(i[:12], 16) for i in ids] == [int(t * 1000) for t in times]


def test_ids_are_now_unless_told() -> None:
    before, made, after = time.time(), new_id(), time.time()
    assert int(before * 1000) <= int(made[:12], 16) <= int(after * 1000)


def test_ids_are_uuids_of_version_7() -> None:
    for _ in range(100):
        made = uuid.UUID(new_id())
        assert (made.version, made.variant) == (7, uuid.RFC_4122)


# Columns


@pytest.mark.parametrize(("observation", "action"), SPACES, ids=str)
def test_columns_come_back_as_they_went_in(observation: Space, action: Any) -> None:
    game, steps, rng = Game("g", observation, action), 7, np.random.default_rng(0)

    def column(element: np.dtype[Any], count: int) -> Any:
        return np.frombuffer(rng.integers(0, 2, element.itemsize * count, np.uint8).tobytes(), element)

    there = Columns(
        column(observation.element, steps + 1),
        column(action.element, steps),
        rng.standard_normal(steps).astype("<f4"),
        rng.standard_normal(steps).astype("<f4"),
    )
    made = pack(game, there, id="i", player="p", episode="e", start=3, time=1e9, terminated=True)
    assert (made.game, made.schema, made.steps, made.start) == ("g", game.schema, steps, 3)
    back = made.columns(game)
    for name in ("obs", "action", "reward", "log_prob"):
        old, new = getattr(there, name), getattr(back, name)
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new.tobytes() == old.tobytes()
    without = pack(
        game, Columns(there.obs, there.action, there.reward), id="i", player="p", episode="e", start=0, time=0
    )
    assert without.columns(game).log_prob is None


def test_columns_are_views() -> None:
    made = fragment()
    game = Game("g", Box((2,)), Discrete(2))
    assert not made.columns(game).obs.flags.owndata
    assert not made.columns(game).obs.flags.writeable


def test_columns_that_are_not_contiguous_are_packed_as_they_read() -> None:
    game = Game("g", Box((2,)), Discrete(2))
    backwards = np.arange(8, dtype="<f4").reshape(4, 2)[::-1]
    made = pack(
        game,
        Columns(backwards, np.zeros(3, "<i4"), np.arange(6.0)[::2]),
        id="i",
        player="p",
        episode="e",
        start=0,
        time=0,
    )
    np.testing.assert_array_equal(made.columns(game).obs, backwards)
    np.testing.assert_array_equal(made.columns(game).reward, [0, 2, 4])


@pytest.mark.parametrize(
    ("terminated", "truncated", "ended"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_an_episode_ends_by_rule_or_otherwise(terminated: bool, truncated: bool, ended: bool) -> None:
    assert fragment(terminated=terminated, truncated=truncated).ended is ended
