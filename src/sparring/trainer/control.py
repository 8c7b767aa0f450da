"""People's returns as a control group: when theirs change at the same time as the bots', it was not the bots' version.

A bug in the game, another season, rewards of another size: such a change for all looks like a collapse of the version
that players have. It would promote what suits the change. So promotions wait until people's returns are as before, or
the change has lasted so long that it is how the game is now.

Each player is compared with themselves, as far as they played before: that others play now is no change of the game.
"""

import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

import msgspec
import numpy as np

from sparring.trainer.sequential import unpaired

__all__ = ["Control"]

NOW, BEFORE = 30, 200  # newest returns, and those before them
MOST = 100  # of one player that are remembered: somebody who never sleeps must not drive out all others
SEVERAL = 3  # players from whom on none of them decides alone, and …
SHARE = 10  # … has no more than so many of the newest
LEAST = 10  # of each, without which nothing is known; also of a player, to be compared with themselves
ALPHA = 0.01
FAR = 1.0  # deviations: less than that is another hour of the day
LASTING = 24 * 3600.0  # seconds after which a change is how the game is

PlayedReturn = tuple[str, float]  # who, and the return


class Control(msgspec.Struct):
    """It outlives a restart, with the trainer's memory."""

    episodes: list[PlayedReturn] = []  # of people, the newest last
    before: list[PlayedReturn] = []  # while something is different: what they were before
    since: float = 0.0  # … and since when
    lasted: bool = False  # the last change has stayed: it is how the game is

    def note(self, player: str, ret: float) -> None:
        if not math.isfinite(ret):
            return
        theirs = [i for i, (who, _) in enumerate(self.episodes) if who == player]
        if len(theirs) >= MOST:
            del self.episodes[theirs[0]]
        self.episodes = [*self.episodes[1 - NOW - BEFORE :], (player, ret)]

    def forget_others(self, players: Set[str]) -> None:
        """Those who are not among these were erased."""
        self.episodes = [each for each in self.episodes if each[0] in players]
        self.before = [each for each in self.before if each[0] in players]

    @property
    def changed(self) -> bool:
        """Whether it is different now, as of the last look."""
        return bool(self.before)

    def look(self, now: float) -> str:
        """Why promotions wait, for people; "" when they do not."""
        recent, older = self._newest()
        if not self.before:
            found = _compare(recent, older)
            if found is not None and found.differs and not _one_players(recent, older):
                self.before, self.since = older, now
        else:
            found = _compare(recent, self.before)
            lasts = now - self.since > LASTING
            if lasts or (found is not None and not found.differs):
                # From now on what is recent is what is usual: nothing of the time between is compared.
                self.lasted = lasts
                self.episodes, self.before, self.since = recent, [], 0.0
        if not self.before:
            return ""
        figures = "" if found is None else f" from {found.before:.4g} to {found.now:.4g}"
        return f"people's returns changed{figures}, so it is not the bots' version: nothing moves"

    def _newest(self) -> tuple[list[PlayedReturn], list[PlayedReturn]]:
        """And those before them."""
        counts: Counter[str] = Counter()
        few = len({who for who, _ in self.episodes}) < SEVERAL
        recent: list[PlayedReturn] = []
        older: list[PlayedReturn] = []
        for who, ret in reversed(self.episodes):
            counts[who] += 1
            (recent if len(recent) < NOW and (few or counts[who] <= SHARE) else older).append((who, ret))
        return recent[::-1], older[::-1]


def _one_players(recent: Sequence[PlayedReturn], before: Sequence[PlayedReturn]) -> bool:
    """Whether it is one player whose returns changed, and not those of the others."""
    for busy, _ in Counter(who for who, _ in recent).most_common(NOW // SHARE):
        rest = _compare([each for each in recent if each[0] != busy], [each for each in before if each[0] != busy])
        if rest is not None and not rest.differs:
            return True
    return False


class _Comparison(NamedTuple):
    before: float
    now: float
    differs: bool  # clearly, and by much


def _compare(recent: Sequence[PlayedReturn], before: Sequence[PlayedReturn]) -> _Comparison | None:
    """None: too little is known of those who play now. Who has played little counts as one of many such."""
    counts: dict[str, int] = {}
    for player, _ in before:
        counts[player] = counts.get(player, 0) + 1

    def by(played: Sequence[PlayedReturn]) -> list[tuple[str | None, float]]:
        return [(who if counts.get(who, 0) >= LEAST else None, ret) for who, ret in played]

    groups: dict[str | None, list[float]] = {}
    for who, ret in by(before):
        groups.setdefault(who, []).append(ret)
    usual = {who: math.fsum(rets) / len(rets) for who, rets in groups.items() if len(rets) >= LEAST}
    now = [(usual[who], ret - usual[who]) for who, ret in by(recent) if who in usual]
    then = [ret - usual[who] for who, ret in by(before) if who in usual]
    if len(now) < LEAST:
        return None
    interval = unpaired([apart for _, apart in now], then, ALPHA)
    much = abs(interval.difference) > FAR * float(np.std(then))
    was = math.fsum(each for each, _ in now) / len(now)
    return _Comparison(was, was + interval.difference, much and (interval.low > 0 or interval.high < 0))
