"""Random play: within every space, with the log-probabilities that learners count with."""

import math
from typing import Any

import numpy as np
import pytest

from sparring.algorithms.replay import encode_action
from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.games.spec import Array
from sparring.networks.random_play import RandomPlay
from sparring.networks.spec import scaling
from sparring.trainer.simulator import Chance

MIXED = Box((3,), low=(-1e308, 0.0, -2.0), high=(1e308, 1e308, 4.0))  # no bound, one, two


def drawn(action: Any, rows: int = 1000) -> tuple[Array, Array]:
    play = RandomPlay(Game("Any", Box((1,)), action))
    return play.run({}, play.noise(np.random.default_rng(0), rows))


@pytest.mark.parametrize(
    "action",
    [
        Discrete(4, start=3),
        MultiDiscrete((2, 5)),
        Box((2,), low=-1.0, high=(1.0, 3.0)),
        Box((), "float64", low=0.1, high=0.3),
        Box((2, 3)),
        Box((2,), low=0.0),
        Box((2,), high=-50.0),
        Box((2,), low=(-1e308, 0.0), high=1.0),
        MIXED,
    ],
    ids=str,
)
def test_it_stays_in_every_space(action: Any) -> None:
    column, log_prob = drawn(action)
    assert (column.dtype, column.shape) == (action.element.base, (1000, *action.element.shape))
    assert action.problem(column) is None
    assert len(np.unique(column, axis=0)) >= 4
    assert (log_prob.dtype, log_prob.shape) == (np.dtype("<f4"), (1000,))
    assert np.isfinite(log_prob).all()
    again = Chance(Game("Any", Box((1,)), action), seed=0).act(np.zeros((1000, 1)))[0]
    np.testing.assert_array_equal(again, column)  # a first candidate meets the same player in the simulator


@pytest.mark.parametrize(
    ("action", "log_prob"),
    [
        (Discrete(4, start=3), -math.log(4)),
        (MultiDiscrete((2, 5)), -math.log(10)),
        (Box((2,), low=-1.0, high=(1.0, 3.0)), -math.log(4)),  # in units of ±1, as learners see actions
    ],
)
def test_what_is_drawn_evenly_is_equally_likely(action: Any, log_prob: float) -> None:
    np.testing.assert_allclose(drawn(action)[1], np.full(1000, log_prob), rtol=1e-5)


def normal(x: Array) -> Array:
    return -0.5 * x * x - 0.5 * math.log(2 * math.pi)


def test_numbers_without_bounds_are_normal() -> None:
    column, log_prob = drawn(Box((2, 3)))
    np.testing.assert_allclose(log_prob, normal(column.reshape(1000, 6)).sum(1), rtol=1e-4)
    assert abs(column.mean()) < 0.1
    assert abs(column.std() - 1) < 0.1


@pytest.mark.parametrize(
    ("space", "bound", "mass"),
    [
        (Box((1,), low=0.5), 0.5, 0.5),  # around the bound, since 0 is beyond it
        (Box((1,), high=-50.0), -50.0, 0.5),
        (Box((1,), low=-1.0), -1.0, 0.158655),
        (Box((1,), high=1.0), 1.0, 0.158655),
    ],
)
def test_on_a_bound_lies_the_mass_beyond_it(space: Box, bound: float, mass: float) -> None:
    column, log_prob = drawn(space, 20_000)
    on_bound = column[:, 0] == np.float32(bound)
    assert on_bound.mean() == pytest.approx(mass, abs=0.01)
    np.testing.assert_allclose(log_prob[on_bound], math.log(mass), rtol=1e-4)
    centre = 0.0 if abs(bound) == 1 else bound
    np.testing.assert_allclose(log_prob[~on_bound], normal(column[~on_bound, 0] - centre), rtol=1e-3, atol=1e-4)


def test_each_number_of_an_action_has_its_own_bounds() -> None:
    column, log_prob = drawn(MIXED, 20_000)
    assert scaling(MIXED).bounded.tolist() == [False, False, True]
    clipped = column[:, 1] == 0
    expected = normal(column[:, 0]) + np.where(clipped, math.log(0.5), normal(column[:, 1])) - math.log(2)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-3, atol=1e-4)
    unit = encode_action(Game("Any", Box((1,)), MIXED), column)
    assert np.abs(unit[:, 2]).max() <= 1
    assert np.histogram(unit[:, 2], 10, (-1, 1))[0] == pytest.approx(2000, rel=0.1)
