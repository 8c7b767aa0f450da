"""Sequential statistics: looking after every episode finds no difference where there is none, and soon one where it is
clear. By simulation, all repetitions side by side."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from sparring.games.spec import Array
from sparring.trainer.sequential import freedom, half_width, paired, sizes, squared_errors, unpaired

ALPHA, LEAST = 0.05, 10
RETURNS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "survival": lambda rng, shape: rng.exponential(1.0, shape),  # lengths of episodes
    "rare losses": lambda rng, shape: (rng.random(shape) < 0.9).astype(float),
    "heavy tails": lambda rng, shape: rng.lognormal(0.0, 1.0, shape),
}


def running(x: Array) -> tuple[Array, Array, Array]:
    """Episodes so far, their means and variances, after each episode."""
    n = np.arange(1, x.shape[1] + 1)
    mean = np.cumsum(x, 1) / n
    return n, mean, np.maximum(np.cumsum(x**2, 1) - n * mean**2, 0) / np.maximum(n - 1, 1)


def looks(difference: Array, half: Array) -> tuple[Array, Array]:
    """Whether each repetition found the new one better, or worse, at any look."""
    return (difference > half)[:, LEAST - 1 :].any(1), (difference < -half)[:, LEAST - 1 :].any(1)


@pytest.mark.parametrize("kind", RETURNS)
def test_who_looks_at_pairs_after_every_episode_is_still_seldom_wrong(kind: str) -> None:
    rng = np.random.default_rng(0)
    n, mean, var = running(RETURNS[kind](rng, (1000, 400)) - RETURNS[kind](rng, (1000, 400)))
    better, worse = looks(mean, half_width(np.sqrt(var / n), n - 1, n, ALPHA))
    assert (better | worse).mean() <= ALPHA + 0.01  # of 1,000 repetitions


@pytest.mark.parametrize("kind", RETURNS)
@pytest.mark.parametrize("others", [1, 9])
def test_nor_who_looks_at_a_share_of_play(kind: str, others: int) -> None:
    rng = np.random.default_rng(1)
    n, new, var = running(RETURNS[kind](rng, (1000, 200)))
    m, old, old_var = (x[..., others - 1 :: others] for x in running(RETURNS[kind](rng, (1000, 200 * others))))
    errors = squared_errors(var, n, old_var, m)
    half = half_width(np.sqrt(sum(errors)), freedom(errors[0], n, errors[1], m), sizes(n, m), ALPHA)
    better, worse = looks(new - old, half)
    assert (better | worse).mean() <= ALPHA + 0.01


@pytest.mark.parametrize(("effect", "soon"), [(2.0, 12), (1.0, 20), (0.5, 50)])
def test_a_clear_difference_is_found_soon(effect: float, soon: int) -> None:
    """`effect`: in deviations."""
    n, mean, var = running(np.random.default_rng(2).standard_normal((400, 200)) + effect)
    found = mean > half_width(np.sqrt(var / n), n - 1, n, ALPHA)
    assert np.median(np.where(found.any(1), found.argmax(1) + 1, 1000)) <= soon


def test_the_intervals_of_samples_are_those_of_the_simulations() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal(30) + 3, rng.standard_normal(70)
    n, _, var = running(x[None])
    half = half_width(np.sqrt(var / n), n - 1, n, ALPHA)[0, -1]
    assert paired(x.tolist(), ALPHA) == pytest.approx((x.mean(), x.mean() - half, x.mean() + half, 30))
    found = unpaired(x.tolist(), y.tolist(), ALPHA)
    assert found.low < 3 < found.high
    assert found.low > 2
    assert found.episodes == 30


def test_little_is_known_of_few_episodes_and_of_constant_ones_all() -> None:
    assert paired([], ALPHA) == (0.0, -math.inf, math.inf, 0)
    assert paired([1.0], ALPHA) == (1.0, -math.inf, math.inf, 1)
    assert paired([1.0, 1.0, 1.0], ALPHA).low == -math.inf  # chance would do that
    assert paired([1.0] * 12, ALPHA) == (1.0, 1.0, 1.0, 12)
    assert paired([0.0] * 12, ALPHA) == (0.0, 0.0, 0.0, 12)
    assert unpaired([1.0], [0.0] * 100, ALPHA).high == math.inf
    assert unpaired([5.0] * 12, [1.0] * 100, ALPHA) == (4.0, 4.0, 4.0, 12)
    assert unpaired([5.0] * 12, [4.0, 8.0] * 50, ALPHA).low < 0  # its rare episodes may not have come yet
