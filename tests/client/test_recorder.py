from typing import Any

import numpy as np
import pytest
from fake_server import GAME, walk

from sparring.client.recorder import Acted, PendingFragment, Recorder
from sparring.errors import InputError
from sparring.experience import Fragment, validate
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete


def recorder(game: Game = GAME, **options: Any) -> tuple[Recorder, list[PendingFragment]]:
    cuts: list[PendingFragment] = []
    return Recorder(game, "anna", cuts.append, **options), cuts


def fragments(cuts: list[PendingFragment], game: Game = GAME) -> list[Fragment]:
    made = [cut.fragment() for cut in cuts]
    assert validate.check(game, made) == [None] * len(made)
    return made


def test_an_episode_is_cut_into_consecutive_fragments() -> None:
    me, cuts = recorder(fragment_steps=100)
    steps = walk(250)
    for step in steps:
        me.record(*step)
    made = fragments(cuts)
    assert [(f.start, f.steps, f.terminated, f.truncated) for f in made] == [
        (0, 100, False, False),
        (100, 100, False, False),
        (200, 50, True, False),
    ]
    assert len({f.episode for f in made}) == 1
    assert len({f.id for f in made}) == 3
    columns = [f.columns(GAME) for f in made]
    np.testing.assert_array_equal(np.concatenate([c.obs[:-1] for c in columns]), [step[0] for step in steps])
    np.testing.assert_array_equal(np.concatenate([c.obs[1:] for c in columns]), [step[5] for step in steps])
    np.testing.assert_array_equal(np.concatenate([c.action for c in columns]), [step[1] for step in steps])
    np.testing.assert_array_equal(np.concatenate([c.reward for c in columns]), [step[2] for step in steps])
    assert made[0].model is None
    assert made[0].version is None
    assert made[0].log_prob is None


def test_the_next_episode_starts_anew() -> None:
    me, cuts = recorder()
    for seed in range(2):
        for step in walk(3, seed):
            me.record(*step)
    first, second = fragments(cuts)
    assert first.episode != second.episode
    assert second.start == 0


def test_a_game_may_reuse_its_observation_buffer() -> None:
    me, cuts = recorder()
    buffer = np.zeros(4, np.float32)
    seen = []
    for i in range(5):
        before = buffer.copy()
        buffer += 1.0
        me.record(before, 0, 0.0, i == 4, False, buffer)
        seen.append(buffer.copy())
    (made,) = fragments(cuts)
    np.testing.assert_array_equal(made.columns(GAME).obs[1:], seen)


def test_steps_that_do_not_follow_each_other_are_not_put_into_one_fragment() -> None:
    me, cuts = recorder()
    a, b, c, d = np.eye(4, dtype=np.float32)
    me.record(a, 0, 1.0, False, False, b)
    me.record(c, 1, 2.0, True, False, d)  # c is not where the first step led
    first, second = fragments(cuts)
    assert first.episode == second.episode
    assert (first.start, second.start) == (0, 1)
    np.testing.assert_array_equal(first.columns(GAME).obs, [a, b])
    np.testing.assert_array_equal(second.columns(GAME).obs, [c, d])


def test_cutting_by_age_keeps_the_episode_going() -> None:
    me, cuts = recorder()
    steps = walk(5)
    for step in steps[:2]:
        me.record(*step)
    me.cut(older_than=3600.0)
    assert cuts == []
    me.cut(older_than=0.0)
    assert len(cuts) == 1
    for step in steps[2:]:
        me.record(*step)
    first, second = fragments(cuts)
    assert first.episode == second.episode
    assert (first.start, first.steps, second.start, second.steps) == (0, 2, 2, 3)


def test_leaving_truncates_what_is_open() -> None:
    me, cuts = recorder()
    for step in walk(5)[:3]:
        me.record(*step)
    me.end_episode()
    me.end_episode()  # nothing is open any more
    me.record(*walk(1, seed=1)[0])
    left, new = fragments(cuts)
    assert left.truncated
    assert left.steps == 3
    assert new.episode != left.episode


def test_a_late_reward_ends_the_episode_with_its_last_step() -> None:
    me, cuts = recorder()
    steps = walk(5)
    for step in steps[:3]:
        me.record(*step)
    me.cut(0.0, but_newest=True)
    me.cut(0.0, but_newest=True)  # one step alone waits
    assert [len(cut.action) for cut in cuts] == [2]
    me.end_episode(reward=10)
    first, last = fragments(cuts)
    assert first.episode == last.episode
    assert (last.start, last.steps, last.terminated, last.truncated) == (2, 1, True, False)
    assert last.columns(GAME).reward[0] == pytest.approx(steps[2][2] + 10)
    np.testing.assert_array_equal(last.columns(GAME).obs, [steps[2][0], steps[2][5]])
    me.record(*steps[0])
    me.end_episode(reward=-1.0, terminated=False)
    assert fragments(cuts)[-1].truncated
    assert fragments(cuts)[-1].episode != last.episode


def test_the_newest_step_waits_also_when_a_fragment_is_full() -> None:
    me, cuts = recorder(fragment_steps=2)
    for step in walk(9)[:2]:
        me.record(*step, acted=Acted("bot", 1, -0.5))
    assert cuts == []
    me.end_episode(reward=3.0)
    (whole,) = fragments(cuts)
    assert (whole.steps, whole.terminated) == (2, True)
    assert len(whole.columns(GAME).log_prob) == 2  # type: ignore[arg-type]


def test_a_late_reward_without_its_step_is_reported() -> None:
    me, cuts = recorder()
    with pytest.raises(InputError, match="no episode is open"):
        me.end_episode(reward=1.0)
    me.record(*walk(1)[0])  # which says that the episode is over
    with pytest.raises(InputError, match="terminated=False"):
        me.end_episode(reward=1.0)
    with pytest.raises(InputError, match="expected a number"):
        me.end_episode(reward="much")  # type: ignore[arg-type]
    assert len(cuts) == 1


def test_a_step_is_the_bots_only_if_it_did_what_the_bot_said() -> None:
    me, cuts = recorder()
    steps = walk(4)
    said = np.int32(steps[0][1]).tobytes()
    other = np.int32((steps[2][1] + 1) % 3).tobytes()
    me.last_act = said, Acted("bot", 7, -0.5)
    me.record(*steps[0])
    me.record(*steps[1])  # nobody was asked: a human
    me.last_act = other, Acted("bot", 7, -0.5)
    me.record(*steps[2])  # the bot said something else
    me.last_act = np.int32(steps[3][1]).tobytes(), Acted("bot", 7, None)
    me.record(*steps[3], acted=None)  # the human says that it was their own idea
    first, *rest = fragments(cuts)
    assert (first.model, first.version, first.steps) == ("bot", 7, 1)
    assert first.columns(GAME).log_prob == pytest.approx([-0.5])
    assert [(f.model, f.version, f.log_prob) for f in rest] == [(None, None, None)]
    assert rest[0].steps == 3


def test_a_fragment_has_one_version_and_log_probs_for_all_steps_or_none() -> None:
    me, cuts = recorder()
    steps = walk(6)
    by = [Acted("bot", 1, -1.0)] * 2 + [Acted("bot", 2, -2.0)] * 2 + [Acted("bot", 2)] * 2
    for step, acted in zip(steps, by, strict=True):
        me.record(*step, acted=acted)
    made = fragments(cuts)
    assert [(f.start, f.version, f.log_prob is not None) for f in made] == [(0, 1, True), (2, 2, True), (4, 2, False)]


RICH = Game(
    "Rich",
    Dict(
        {
            "where": Box((2,)),
            "weapon": Discrete(4, start=1),
            "view": Box((8, 8, 3), "uint8"),
            "keys": MultiDiscrete((2, 3)),
        }
    ),
    MultiDiscrete((3, 2)),
)


def rich(i: int) -> dict[str, Any]:
    return {
        "view": np.full((8, 8, 3), i, np.uint8),
        "keys": [1, i % 3],
        "weapon": np.int64(1 + i % 4),
        "where": (0.5, float(i)),
    }


def test_every_kind_of_space() -> None:
    me, cuts = recorder(RICH)
    for i in range(3):
        me.record(rich(i), np.array([i, 1]), i, i == 2, False, rich(i + 1))
    (made,) = fragments(cuts, RICH)
    columns = made.columns(RICH)
    np.testing.assert_array_equal(columns.action, [[0, 1], [1, 1], [2, 1]])
    np.testing.assert_array_equal(columns.obs["weapon"], [1, 2, 3, 4])
    np.testing.assert_array_equal(columns.obs["where"][:, 1], [0, 1, 2, 3])
    np.testing.assert_array_equal(columns.obs["view"][:, 3, 3, 1], [0, 1, 2, 3])
    np.testing.assert_array_equal(columns.obs["keys"][:, 1], [0, 1, 2, 0])


def test_numbers_of_other_types_are_converted() -> None:
    game = Game("Pendulum", Box((3,)), Box((1,), low=-2.0, high=2.0))
    me, cuts = recorder(game)
    me.record([1, 2, 3], [np.float64(0.5)], np.float32(1.5), np.False_, np.True_, np.array([4.0, 5.0, 6.0]))
    (made,) = fragments(cuts, game)
    np.testing.assert_array_equal(made.columns(game).obs, [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(made.columns(game).action, [[0.5]])
    assert made.truncated


GOOD = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((np.zeros(3, np.float32), 0, 0.0, False, False, GOOD), r"observation: expected shape \(4,\), got \(3,\)"),
        ((GOOD, 0, 0.0, False, False, np.zeros((1, 4))), r"observation: expected shape \(4,\), got \(1, 4\)"),
        ((GOOD, 3, 0.0, False, False, GOOD), "action: 3 is outside 0..2"),
        ((GOOD, 0.5, 0.0, False, False, GOOD), "action: expected a whole number"),
        ((GOOD, 0, "much", False, False, GOOD), "reward: expected a number"),
        ((["a", "b", "c", "d"], 0, 0.0, False, False, GOOD), "observation: expected numbers"),
        (([[1], [2, 3]], 0, 0.0, False, False, GOOD), "observation: "),
        ((None, 0, 0.0, False, False, GOOD), r"observation: expected shape \(4,\)"),
    ],
)
def test_a_misfit_is_reported_at_once_and_not_kept(step: tuple[Any, ...], message: str) -> None:
    me, cuts = recorder()
    with pytest.raises(InputError, match=message):
        me.record(*step)
    me.cut()
    assert cuts == []


def test_a_misfit_names_the_field() -> None:
    me, _ = recorder(RICH)
    with pytest.raises(InputError, match=r"observation.view: expected shape \(8, 8, 3\), got \(8, 8\)"):
        me.record(rich(0) | {"view": np.zeros((8, 8))}, [0, 0], 0, False, False, rich(1))
    with pytest.raises(
        InputError, match="observation: expected a mapping with keys, view, weapon, where; got one with"
    ):
        me.record({"view": 0}, [0, 0], 0, False, False, rich(1))
    with pytest.raises(InputError, match=r"observation\.view: expected whole numbers"):
        me.record(rich(0) | {"view": np.full((8, 8, 3), 0.5)}, [0, 0], 0, False, False, rich(1))


def test_large_observations_make_shorter_fragments() -> None:
    game = Game("Screen", Box((210, 160, 3), "uint8"), Discrete(2))
    me, cuts = recorder(game)
    frames = np.zeros((101, 210, 160, 3), np.uint8)
    for i in range(100):
        me.record(frames[i], 0, 0.0, i == 99, False, frames[i + 1])
    made = fragments(cuts, game)
    assert max(len(f.obs) for f in made) <= 2 << 20
    assert sum(f.steps for f in made) == 100


@pytest.mark.parametrize("name", ["", "x" * 201, "new\nline"])
def test_names_that_the_server_would_refuse(name: str) -> None:
    with pytest.raises(InputError, match="the player's name"):
        Recorder(GAME, name, print)
