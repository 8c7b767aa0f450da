"""A game's finished episodes as the page shows them: curves, means and players, people and bots apart."""

import math
from collections import OrderedDict, deque
from typing import Literal

from sparring.api import CurvePoint, PlayerRow, RecentReturns
from sparring.registry.manifest import DEFAULT_MODEL
from sparring.store.protocol import Episode, PlayerStats

__all__ = ["History", "ReturnLine", "VersionReturns"]

RECENT = 20  # episodes behind a mean
MAX_POINTS = 400  # of the curve of all
MAX_POINTS_APART = 200  # of people's, and of bots'
MAX_PLAYED = 1000  # versions whose episodes are counted
SOON = 100  # versions that may be published, and played, before we hear of it
MAX_PLAYERS = 2000  # whose returns are kept: those who finished an episode last; twice what one question gets


class Recent:
    """How many episodes there were, and the newest of them."""

    __slots__ = ("_newest", "best", "count")

    def __init__(self) -> None:
        self.count = 0
        self.best: float | None = None
        self._newest: deque[tuple[float, int]] = deque(maxlen=RECENT)  # return, steps

    def add(self, episode: Episode) -> None:
        self.count += 1
        self._newest.append((episode.ret, episode.steps))
        if len(self._newest) == RECENT:
            mean = sum([ret for ret, _ in self._newest]) / RECENT
            self.best = mean if self.best is None else max(self.best, mean)

    def returns(self) -> RecentReturns:
        some = len(self._newest)
        if not some:
            return RecentReturns()
        total, steps = (sum(column) for column in zip(*self._newest, strict=True))
        return RecentReturns(self.count, total / some, self.best, steps / some)


class _Bin:
    __slots__ = ("episodes", "high", "low", "steps", "sum", "time", "version")

    def __init__(self, ret: float) -> None:
        self.time, self.steps, self.sum, self.episodes = 0.0, 0, 0.0, 0
        self.low = self.high = ret
        self.version: int | None = None

    def merge(self, other: "_Bin") -> None:
        """`other` comes after this one."""
        self.time, self.steps = other.time, other.steps
        self.sum += other.sum
        self.episodes += other.episodes
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.version = max((v for v in (self.version, other.version) if v is not None), default=None)

    def point(self) -> CurvePoint:
        return CurvePoint(
            self.time, self.steps, self.sum / self.episodes, self.low, self.high, self.episodes, self.version
        )


class ReturnLine:
    """Episodes of all, of people or of bots: their curve in few points, and the newest mean."""

    def __init__(self, points: int) -> None:
        self.recent = Recent()
        self._points = points
        self._bins: list[_Bin] = []
        self._bin_size = 1  # episodes per bin: doubles whenever there would be too many bins

    def add(self, episode: Episode, steps: int, version: int | None) -> None:
        """`steps`: of the game until then, whoever played them; so all curves have one axis."""
        self.recent.add(episode)
        new = _Bin(episode.ret)
        new.time, new.steps, new.sum, new.episodes, new.version = episode.ended, steps, episode.ret, 1, version
        if self._bins and self._bins[-1].episodes < self._bin_size:
            self._bins[-1].merge(new)
            return
        if len(self._bins) == self._points:
            for left, right in zip(self._bins[::2], self._bins[1::2], strict=True):
                left.merge(right)
            self._bins = self._bins[::2]
            self._bin_size *= 2
        self._bins.append(new)

    @property
    def curve(self) -> list[CurvePoint]:
        return [b.point() for b in self._bins]


class VersionReturns:
    """A version's episodes."""

    __slots__ = ("episodes", "squares", "sum")

    def __init__(self) -> None:
        self.episodes, self.sum, self.squares = 0, 0.0, 0.0  # squares: of the distances from the mean (Welford)

    def add(self, ret: float) -> None:
        before = self.sum / self.episodes if self.episodes else 0.0
        self.episodes += 1
        self.sum += ret
        self.squares += (ret - before) * (ret - self.sum / self.episodes)

    @property
    def mean(self) -> float | None:
        return self.sum / self.episodes if self.episodes else None

    @property
    def margin(self) -> float | None:
        """Half of the mean's 95 % interval, by the normal distribution; of few episodes it says nothing."""
        if self.episodes < 5:
            return None
        return 1.96 * math.sqrt(self.squares / (self.episodes - 1) / self.episodes)


class History:
    """Digests the episodes of a game one by one, as they come."""

    def __init__(self) -> None:
        self.cursor = 0
        self.steps = 0
        self.newest = 0  # published version: players may claim to have played any
        self.played: dict[int, VersionReturns] = {}  # by version of the default model
        self.all = ReturnLine(MAX_POINTS)
        self.people, self.bots = ReturnLine(MAX_POINTS_APART), ReturnLine(MAX_POINTS_APART)
        self._players: OrderedDict[str, tuple[Recent, Recent, Recent]] = OrderedDict()  # all, as a person, by bots

    def add(self, episode: Episode) -> None:
        self.cursor = episode.cursor
        self.steps += episode.steps
        version = self._version(episode)
        if version is not None:
            self._count(version, episode.ret)
        by_bot = episode.model is not None
        self.all.add(episode, self.steps, version)
        (self.bots if by_bot else self.people).add(episode, self.steps, version)
        player = self._players.get(episode.player)
        if player is None:
            player = self._players[episode.player] = Recent(), Recent(), Recent()
        self._players.move_to_end(episode.player)
        if len(self._players) > MAX_PLAYERS:
            self._players.popitem(last=False)
        player[0].add(episode)
        player[2 if by_bot else 1].add(episode)

    def _version(self, episode: Episode) -> int | None:
        version = episode.version if episode.model == DEFAULT_MODEL else None
        return None if version is not None and version > self.newest + SOON else version  # made up

    def _count(self, version: int, ret: float) -> None:
        self.played.setdefault(version, VersionReturns()).add(ret)
        if len(self.played) > MAX_PLAYED:  # what is shown are the newest ones
            for old in sorted(self.played)[: MAX_PLAYED // 2]:
                del self.played[old]

    def row(self, player: PlayerStats) -> PlayerRow:
        """A player of the store with what is known of their episodes."""
        kind: Literal["person", "bot", "both"]
        kind = "person" if not player.bot_steps else "bot" if player.bot_steps >= player.steps else "both"
        found = [recent.returns() for recent in self._players.get(player.player, ())] or [RecentReturns()] * 3
        return PlayerRow(
            player.player, player.fragments, player.steps, player.last_seen, player.bot_steps, kind, *found
        )
