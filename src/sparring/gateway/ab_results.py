"""How an A/B test stands, from the episodes that were finished since it began.

A bot's episode counts for the model that played it. A person's counts for the model that the person gets. Each person
counts once, by the mean of their episodes: people differ more from each other than their episodes do.
"""

import math
from typing import NamedTuple

from sparring.registry.ab import AbArm, AbResults, AbTest, Returns
from sparring.registry.manifest import DEFAULT_MODEL
from sparring.store.protocol import Episode, Store
from sparring.trainer.sequential import freedom, half_width, sizes, squared_errors

__all__ = ["AbCount"]

ALPHA = 0.05
LEAST = 10  # episodes, or people: nothing is said of fewer
PAGE = 1000  # episodes that are read at once
MAX_PEOPLE = 100_000  # of a test; more are left out


class Moments(NamedTuple):
    """Of a sample: its size, mean and variance."""

    size: int = 0
    mean: float = 0.0
    variance: float = 0.0


class RunningMoments:
    """Numbers of which only size, mean and variance are kept (Welford)."""

    def __init__(self) -> None:
        self._size, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self._size += 1
        before = value - self._mean
        self._mean += before / self._size
        self._squares += before * (value - self._mean)

    @property
    def moments(self) -> Moments:
        return Moments(self._size, self._mean, self._squares / max(self._size - 1, 1))


class AbCount:
    """One test's episodes. Reads what is new each time it is asked."""

    def __init__(self, game: str, test: AbTest) -> None:
        self.game, self.test = game, test
        self._mark, self._cursor, self._left_out = "", 0, 0
        self._begin()

    def results(self, store: Store) -> AbResults:
        """Also from the beginning, when something was erased meanwhile."""
        if (mark := store.erasure(self.game)) != self._mark:
            self._begin()
            self._mark = mark
        while True:
            page = store.episodes(self.game, self._cursor, PAGE)
            for episode in page:
                self._cursor = max(self._cursor, episode.cursor)
                self._count(episode)
            if len(page) < PAGE:
                return self._results()

    def _begin(self) -> None:
        self._cursor, self._left_out = self.test.cursor, 0
        self._bots = {model: RunningMoments() for model in self.test.shares}
        self._people: dict[str, dict[str, tuple[int, float]]] = {model: {} for model in self.test.shares}

    def _count(self, episode: Episode) -> None:
        if not math.isfinite(episode.ret):
            return
        given = self.test.model(episode.player)
        if episode.model == given:
            self._bots[given].add(episode.ret)
        elif episode.model is None:
            people = self._people[given]
            if episode.player in people or sum(map(len, self._people.values())) < MAX_PEOPLE:
                n, mean = people.get(episode.player, (0, 0.0))
                people[episode.player] = n + 1, mean + (episode.ret - mean) / (n + 1)
            else:
                self._left_out += 1
        elif episode.model in self.test.shares:
            self._left_out += 1

    def _results(self) -> AbResults:
        shares = self.test.shares
        first = DEFAULT_MODEL if DEFAULT_MODEL in shares else min(shares)
        models = [first, *(model for model in sorted(shares) if model != first)]
        bots = {model: self._bots[model].moments for model in models}
        people = {model: _of_people(self._people[model]) for model in models}
        arms = []
        for model in models:
            against = None if model == first else first
            played = sum(n for n, _ in self._people[model].values())
            arms.append(
                AbArm(
                    model,
                    shares[model],
                    _returns(bots[model], bots[against] if against else None, bots[model].size),
                    _returns(people[model], people[against] if against else None, played, people[model].size),
                )
            )
        return AbResults(arms, 1 - ALPHA, _verdict(arms), self._left_out)


def _of_people(people: dict[str, tuple[int, float]]) -> Moments:
    sample = RunningMoments()
    for _, mean in people.values():
        sample.add(mean)
    return sample.moments


def _returns(own: Moments, other: Moments | None, episodes: int, players: int | None = None) -> Returns:
    if own.size == 0:
        return Returns(players=players)
    low = high = difference = difference_low = difference_high = None
    if own.size >= LEAST:
        half = float(half_width(math.sqrt(own.variance / own.size), own.size - 1, own.size, ALPHA))
        low, high = _finite(own.mean - half), _finite(own.mean + half)
    if other is not None and other.size:
        difference = own.mean - other.mean
        if min(own.size, other.size) >= LEAST:
            a, b = squared_errors(own.variance, own.size, other.variance, other.size)
            nu = freedom(a, own.size, b, other.size)
            half = float(half_width(math.sqrt(a + b), nu, sizes(own.size, other.size), ALPHA))
            difference_low, difference_high = _finite(difference - half), _finite(difference + half)
    return Returns(episodes, own.mean, low, high, players, difference, difference_low, difference_high)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _verdict(arms: list[AbArm]) -> str:
    first = arms[0].model
    found = []
    for arm in arms[1:]:
        for whose, returns in (("bots'", arm.bots), ("people's", arm.people)):
            low, high = returns.difference_low, returns.difference_high
            if low is None or high is None or low <= 0 <= high:
                continue
            how = "better" if low > 0 else "worse"
            found.append(
                f"{arm.model} is {how} than {first} in {whose} play: "
                f"{returns.difference:+.4g} (95 %: {low:+.4g} … {high:+.4g})"
            )
    played = [arm.bots.episodes + arm.people.episodes for arm in arms]
    if any(played) and not played[0]:
        return f"nobody has played {first} yet, which the others are compared with"
    return "; ".join(found) or "no clear difference yet"
