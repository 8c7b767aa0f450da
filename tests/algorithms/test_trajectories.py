"""Fragments become segments of one shape, and nothing of them is lost, doubled or joined with what does not follow."""

import numpy as np
import pytest

from sparring.algorithms.replay import END, STEP, TERMINAL, encode_action
from sparring.algorithms.trajectories import Trajectories, from_fragments, from_rows
from sparring.errors import InputError
from sparring.experience.fragment import Columns
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.policy import Policy
from sparring.networks.spec import Gaussian

GAME = Game("g", Box((2,)), Discrete(1000, start=7))


def fragment(number: int, steps: int, log_prob: bool = True) -> Columns:
    """Every step differs from every other: by fragment and place in it."""
    obs = np.stack([np.full(steps + 1, number), np.arange(steps + 1)], -1).astype(np.float32)
    place = np.arange(steps)
    return Columns(
        obs, (place + 7).astype("<i4"), (place + number).astype("<f4"), -place.astype("<f4") if log_prob else None
    )


def steps_of(data: Trajectories) -> list[tuple[float, ...]]:
    """(fragment, place, next place, action, reward, log_prob, terminated, ended) of every step there is."""
    found = []
    for s, t in np.argwhere(data.mask):
        number, place = data.obs[s, t]
        assert data.obs[s, t + 1][0] == number  # the next observation is of the same fragment
        found.append(
            (
                *(number, place, data.obs[s, t + 1][1], data.action[s, t], data.reward[s, t], data.log_prob[s, t]),
                *(data.terminated[s, t], data.ended[s, t]),
            )
        )
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_step_is_there_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 30)
    terminated = rng.random(30) < 0.5
    length = int(rng.integers(1, 30))
    data = from_fragments(
        GAME, [fragment(i, n) for i, n in enumerate(lengths)], list(terminated), steps=int(sum(lengths)), length=length
    )
    found = steps_of(data)
    expected = [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    assert [step[:2] for step in found] == expected
    for number, place, following, action, reward, log_prob, terminal, ended in found:
        last = place == lengths[int(number)] - 1
        assert (following, action, reward, log_prob) == (place + 1, place, place + number, -place)
        assert terminal == (last and terminated[int(number)])
        assert ended or not last
    assert data.ended[:, -1].tolist() == data.mask[:, -1].tolist()  # what a segment cuts does not flow on
    inner = data.ended[:, :-1] & ~data.terminated[:, :-1]
    assert all(data.obs[s, t][1] == lengths[int(data.obs[s, t][0])] - 1 for s, t in np.argwhere(inner))


def test_one_shape_whatever_the_lengths() -> None:
    rng = np.random.default_rng(0)
    shapes = set()
    for mean in (5, 20, 300, 2000):
        lengths: list[int] = []
        while sum(lengths) < 2000:
            lengths.append(min(int(rng.integers(mean, 2 * mean)), 2000 - sum(lengths)))
        data = from_fragments(GAME, [fragment(i, n) for i, n in enumerate(lengths)], [True] * len(lengths), steps=2000)
        assert data.mask.sum() == 2000
        shapes.add(data.obs.shape)
    assert len(shapes) == 1
    ones = from_fragments(GAME, [fragment(i, 1) for i in range(2000)], [True] * 2000, steps=2000)
    assert ones.mask.sum() == 2000
    assert ones.mask.shape == (2 * shapes.pop()[0], 256)


def test_a_fragment_that_fills_a_segment_wastes_nothing() -> None:
    data = from_fragments(GAME, [fragment(0, 16), fragment(1, 16)], [False, True], steps=26, length=16)
    assert data.mask[:2].all()
    assert data.obs[0, 16].tolist() == [0, 16]
    assert data.obs[1, 0].tolist() == [1, 0]
    assert data.terminated.sum() == 1


def test_what_people_played_is_left_out() -> None:
    data = from_fragments(GAME, [fragment(0, 5, log_prob=False), fragment(1, 6)], [True, False], steps=11)
    assert {step[0] for step in steps_of(data)} == {1}
    assert not data.terminated.any()
    with pytest.raises(InputError, match="log-probabilities"):
        from_fragments(GAME, [fragment(0, 5, log_prob=False)], [True], steps=11)


def test_rows_of_actors() -> None:
    """Two environments, four steps; one episode is terminated, one cut, each followed by a row without a step."""
    kind = np.array([[STEP, TERMINAL, END, STEP, END], [STEP, STEP, END, TERMINAL, END]], np.uint8)
    obs = np.arange(10, dtype=np.float32).reshape(2, 5, 1)
    values = np.arange(10, dtype=np.float32).reshape(2, 5)
    game = Game("g", Box((1,)), Discrete(10))
    data = from_rows(game, obs, values.astype("<i4"), values, kind, -values)
    assert data.obs.shape == (2, 5, 1)
    assert data.mask.tolist() == [[True, True, False, True], [True, True, False, True]]
    assert data.terminated.tolist() == [[False, True, False, False], [False, False, False, True]]
    assert data.ended.tolist() == [[False, True, False, True], [False, True, False, True]]
    assert data.action.tolist() == data.reward.tolist() == (-data.log_prob).tolist() == values[:, :4].tolist()


def test_observations_of_every_space_are_encoded() -> None:
    space = Dict({"at": Box((2,), "float64"), "weapon": Discrete(3, start=1)})
    obs = np.zeros(4, space.element)
    obs["weapon"] = [1, 2, 3, 1]
    columns = Columns(obs, np.array([[0, 1]] * 3, "<i4"), np.zeros(3, "<f4"), np.zeros(3, "<f4"))
    data = from_fragments(Game("g", space, MultiDiscrete((2, 3))), [columns], [True], steps=3, length=4)
    assert data.obs[0, :4].tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0]]
    assert data.action[0, :3].tolist() == [[0, 1]] * 3
    image = Box((3, 8, 9), "uint8")
    columns = Columns(np.zeros((3, 3, 8, 9), "u1"), np.zeros(2, "<i4"), np.zeros(2, "<f4"), np.zeros(2, "<f4"))
    assert from_fragments(Game("g", image, Discrete(2)), [columns], [True], steps=2, length=4).obs.shape == (
        1,
        5,
        8,
        9,
        3,
    )


@pytest.mark.parametrize(
    "action",
    [
        Box((2,), low=(-1.0, 0.3), high=(2.0, 1 / 3)),
        Box((2,), "float64", low=-0.1, high=0.7),
        Box((1, 2), low=1000.0, high=1000.01),
        Box((3,), low=(0.0, -1e308, -1.0), high=(1e308, 0.5, 1.0)),
        Box((2,)),
        Box((1,), low=3.0, high=3.0),
    ],
)
def test_bounds_are_encoded_exactly_and_nothing_else_as_one(action: Box) -> None:
    """A clipped Gaussian has mass there: who reads an action back must see the same as the policy that took it."""
    game, size = Game("g", Box((1,)), action), int(np.prod(action.shape))
    params = {"head.w": np.zeros((1, size), "f4"), "head.b": np.zeros(size, "f4"), "head.log_std": np.zeros(size, "f4")}
    policy = Policy(game, (), Gaussian(), params)
    s = policy.scaling
    found, _ = policy.act(np.zeros((4000, 1), "f4"), policy.noise(np.random.default_rng(0), 4000))
    unit, flat = encode_action(game, found), found.reshape(4000, -1)
    assert unit.dtype == np.float32
    assert np.isfinite(unit).all()
    assert ((unit == s.unit_high) == (flat == s.high)).all()
    if (s.low < s.high).all():
        assert ((unit == s.unit_low) == (flat == s.low)).all()
        rounding = 4 * np.spacing(np.abs(s.centre)) + 1e-6 * s.half
        assert (np.abs(s.centre + s.half * unit.astype("f8") - flat) <= rounding).all()
