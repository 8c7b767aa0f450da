"""Which of two policies is better, asked after every episode. Pure statistics.

Who looks again and again and stops when it suits finds differences where there are none. These intervals hold at all
times at once: with probability 1 − alpha none of them, however often one looks, leaves out the true difference.

They come from the t-test's mixture martingale (Lai 1976; Lindon et al. 2022; Wang & Ramdas 2025). For a mean of normal
values, whose deviation nobody knows, they are exact from the second value on. For other returns they become so as
episodes add up, like every interval of a mean. Hence the least number of episodes, which the caller keeps to. What has
not happened in those episodes, such as one loss in a hundred that costs everything, no interval can know of.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Interval", "half_width", "paired", "unpaired"]

# The mixture's weight: intervals are narrowest, relative to the best possible, at about eight times so many episodes.
WEIGHT = 5.0


class Interval(NamedTuple):
    """A difference of mean returns, and between what it lies."""

    difference: float
    low: float
    high: float
    episodes: int  # of the new policy

    def words(self, alpha: float) -> str:
        """For people. :param alpha: with which it was made."""
        return f"{self.difference:+.4g} ({100 * (1 - alpha):g} %: {self.low:+.4g} … {self.high:+.4g})"

    def numbers(self) -> dict[str, float]:
        """For machines: those that are finite."""
        found = {"difference": self.difference, "low": self.low, "high": self.high, "episodes": float(self.episodes)}
        return {name: value for name, value in found.items() if math.isfinite(value)}


def half_width(error: Any, freedom: Any, size: Any, alpha: float) -> Any:
    """Of the interval around a mean or a difference of means; infinite where too little is known. Arrays or numbers.

    With B = √r ((1 + t²/ν) / (1 + r t²/ν))^((ν+1)/2), r = w / (w + n): B stays below 1/alpha with probability
    1 − alpha, for ever. The interval has the values whose B does.

    :param error: the standard error of the mean, or of the difference.
    :param freedom: ν, the degrees of freedom of that.
    :param size: n, episodes; of two samples, n₁n₂ / (n₁ + n₂).
    """
    error, freedom, size = (np.asarray(x, float) for x in (error, freedom, size))
    ratio = WEIGHT / (WEIGHT + size)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        bound = np.exp(-np.log(alpha**2 * ratio) / (freedom + 1))
        square = np.where(bound * ratio < 1, (bound - 1) / (1 - bound * ratio), np.inf)
        width = np.where(np.isinf(square), np.inf, np.sqrt(freedom * square) * error)
    return np.where(freedom > 0, width, np.inf)


def paired(differences: Sequence[float], alpha: float) -> Interval:
    """Of the mean of differences between two policies that played the same episodes."""
    x, n = np.asarray(differences, float), len(differences)
    if n < 2:
        return Interval(float(x.mean()) if n else 0.0, -math.inf, math.inf, n)
    mean, error = float(x.mean()), float(x.std(ddof=1)) / math.sqrt(n)
    half = float(half_width(error, n - 1, n, alpha))
    return Interval(mean, mean - half, mean + half, n)


def unpaired(new: Sequence[float], old: Sequence[float], alpha: float) -> Interval:
    """Of the difference of two means, of as many episodes each as there are. Their deviations may differ (Welch)."""
    a, b = np.asarray(new, float), np.asarray(old, float)
    if min(len(a), len(b)) < 2:
        difference = float(a.mean() - b.mean()) if len(a) and len(b) else 0.0
        return Interval(difference, -math.inf, math.inf, len(a))
    difference = float(a.mean() - b.mean())
    va, vb = squared_errors(float(a.var(ddof=1)), len(a), float(b.var(ddof=1)), len(b))
    half = float(half_width(math.sqrt(va + vb), freedom(va, len(a), vb, len(b)), sizes(len(a), len(b)), alpha))
    return Interval(difference, difference - half, difference + half, len(a))


def squared_errors(a: Any, n: Any, b: Any, m: Any) -> tuple[Any, Any]:
    """Of two means, from the variances of their samples. The smaller sample may not have met yet what is rare, so its
    variance counts as no less than the other's."""
    return np.where(n < m, np.maximum(a, b), a) / n, np.where(m < n, np.maximum(a, b), b) / m


def sizes(n: Any, m: Any) -> Any:
    """Two samples tell as much of a difference as a single one of this size tells of a mean."""
    return n * m / (n + m)


def freedom(va: Any, n: Any, vb: Any, m: Any) -> Any:
    """Welch's degrees of freedom, from the squared standard errors of two means."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.asarray((va + vb) ** 2) / (va**2 / (n - 1) + vb**2 / (m - 1))
    return np.where(np.isfinite(found), found, n + m - 2.0)
