"""What stores report besides fragments, as sums in their order: counts, players, versions and episodes."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from sparring.store.arrival import Played, Unfinished
from sparring.store.protocol import Episode, PlayerStats, Stats, VersionStats

__all__ = ["Counted", "Totals", "UnfinishedEpisodes", "pieces"]


class Counted(Played, Protocol):
    """What is counted of a fragment."""

    @property
    def player(self) -> str: ...
    @property
    def episode(self) -> str: ...


W = TypeVar("W")


class Totals:
    """In memory: a few hundred bytes a player."""

    def __init__(self) -> None:
        self.fragments = self.steps = self.bytes = self.bot_steps = 0
        self._players: dict[str, tuple[int, int, float, int]] = {}  # fragments, steps, last seen, steps by bots
        self._versions: dict[tuple[str, int], tuple[int, int]] = {}

    def add(self, f: Counted, size: int, when: float) -> None:
        self.fragments += 1
        self.steps += f.steps
        self.bytes += size
        by_bots = 0 if f.model is None else f.steps
        self.bot_steps += by_bots
        count, steps, seen, bots = self._players.get(f.player, (0, 0, 0.0, 0))
        self._players[f.player] = count + 1, steps + f.steps, max(seen, when), bots + by_bots
        version = (f.model or "", -1 if f.version is None else f.version)
        count, steps = self._versions.get(version, (0, 0))
        self._versions[version] = count + 1, steps + f.steps

    def stats(self, rejected: int) -> Stats:
        return Stats(self.fragments, self.steps, len(self._players), self.bytes, rejected, self.bot_steps)

    def players(self, limit: int) -> list[PlayerStats]:
        newest = sorted(list(self._players.items()), key=lambda item: -item[1][2])[:limit]
        return [PlayerStats(name, *counts) for name, counts in newest]

    def versions(self) -> list[VersionStats]:
        return [
            VersionStats(model or None, None if version < 0 else version, *counts)
            for (model, version), counts in sorted(self._versions.items())
        ]


class UnfinishedEpisodes:
    """Of those that are not complete, `most` are kept; the ones without news for the longest are let go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.unfinished: dict[tuple[str, str], Unfinished] = {}

    def add(self, f: Counted, ret: float, when: float, cursor: int) -> Episode | None:
        """The episode that is complete now. One that comes whole has nothing to do with what is left of its name."""
        name = (f.player, f.episode)
        episode = Unfinished() if f.start == 0 and f.ended else self.unfinished.pop(name, Unfinished())
        if episode.add(f, ret):
            return Episode(*name, episode.steps, episode.ret, when, episode.model, episode.version, cursor)
        self.unfinished[name] = episode  # the newest news last
        if len(self.unfinished) > self._most:
            del self.unfinished[next(iter(self.unfinished))]
        return None


def pieces(episode: Episode, newest_first: Iterable[tuple[Counted, W]], first: int, last: int | None) -> list[W] | None:
    """Where an episode's fragments are that hold steps from `first` to before `last`, in their order. They are found
    from its cursor back, among others; none when what is given ends before all of it was there."""
    found: list[tuple[int, int, W]] = []
    missing = episode.steps
    for f, where in newest_first:
        if (f.player, f.episode) == (episode.player, episode.episode):
            found.append((f.start, f.steps, where))
            missing -= f.steps
            if missing <= 0:
                break
    found.sort(key=lambda piece: piece[0])
    wanted = [where for start, steps, where in found if start + steps > first and (last is None or start < last)]
    return None if missing else wanted
