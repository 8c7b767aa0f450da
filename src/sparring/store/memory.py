"""A store in memory with the semantics of the durable ones: for unit tests, and as their definition."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, new_id
from sparring.games import Game
from sparring.store.arrival import Unfinished, require_checked, require_same, returns, same, stripes
from sparring.store.protocol import Episode, NotRegistered, Outcome, PlayerStats, Quarantined, Stats, Tail, VersionStats

__all__ = ["MemoryStore"]


@dataclass
class _Shelf:
    """All there is of one game."""

    registration: str = ""
    paused: bool = False
    erased: set[tuple[str, str]] = field(default_factory=set)  # players and ids
    erasures: int = 0
    place: int = 0  # steps ever stored
    rejected: int = 0
    sources: dict[str, int] = field(default_factory=dict)  # what each of them says that it refused
    fragments: dict[int, Fragment] = field(default_factory=dict)  # by place, in order
    episodes: dict[int, Episode] = field(default_factory=dict)  # by the place of the fragment that completed it
    unfinished: dict[tuple[str, str], Unfinished] = field(default_factory=dict)
    last_seen: dict[str, float] = field(default_factory=dict)


class MemoryStore:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._games: dict[str, Game] = {}
        self._shelves: dict[str, _Shelf] = {}
        self._ids: dict[str, Fragment] = {}
        self._deleted: set[str] = set()  # names of games
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def register(self, game: Game) -> None:
        with self._lock:
            self._require_open()
            require_same(self._games.setdefault(game.name, game), game)
            self._shelves.setdefault(game.name, _Shelf(new_id()))

    def games(self) -> list[Game]:
        with self._lock:
            self._require_open()
            return [self._games[name] for name in sorted(self._games)]

    def unreadable(self) -> dict[str, str]:
        return {}

    def registration(self, game: str) -> str:
        with self._lock:
            return self._shelf(game).registration

    def pause(self, game: str, paused: bool) -> None:
        with self._lock:
            self._require_open()
            if game not in self._shelves:
                raise NotRegistered(f"no game {game!r} is registered here")
            self._shelves[game].paused = paused

    def paused(self) -> set[str]:
        with self._lock:
            self._require_open()
            return {name for name, shelf in self._shelves.items() if shelf.paused}

    def delete_game(self, name: str) -> None:
        with self._lock:
            self._require_open()
            if self._games.pop(name, None) is not None:
                self._deleted.add(name)
            for f in self._shelves.pop(name, _Shelf()).fragments.values():
                del self._ids[f.id]

    def deleted(self, name: str) -> bool:
        with self._lock:
            self._require_open()
            return name in self._deleted - self._games.keys()

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        require_checked(fragments)
        with self._lock:
            self._require_open()
            for f in fragments:
                if f.game not in self._games or self._games[f.game].schema != f.schema:
                    raise NotRegistered(f"no game {f.game!r} with schema {f.schema!r} is registered here")
            return [self._add(f, ret) for f, ret in zip(fragments, returns(fragments), strict=True)]

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        future: Future[list[Outcome]] = Future()
        try:
            future.set_result(self.append(fragments))
        except InputError as error:
            future.set_exception(error)
        return future

    def _add(self, f: Fragment, ret: float) -> Outcome:
        shelf, now = self._shelves[f.game], time.time()
        if (f.player, f.id) in shelf.erased:
            return Outcome.ERASED
        if f.id in self._ids:
            return Outcome.DUPLICATE if same(self._ids[f.id], f) else Outcome.CONFLICT
        self._ids[f.id] = f
        shelf.place += f.steps
        shelf.fragments[shelf.place] = f
        shelf.last_seen[f.player] = now
        name = (f.player, f.episode)
        episode = Unfinished() if f.start == 0 and f.ended else shelf.unfinished.setdefault(name, Unfinished())
        if episode.add(f, ret):
            if shelf.unfinished.get(name) is episode:
                del shelf.unfinished[name]
            shelf.episodes[shelf.place] = Episode(
                *name, episode.steps, episode.ret, now, episode.model, episode.version, shelf.place
            )
        return Outcome.STORED

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        with self._lock:
            self._require_open()
            if game in self._shelves:
                self._shelves[game].rejected += 1

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Quarantined]) -> None:
        with self._lock:
            self._require_open()
            for game in totals.keys() & self._shelves.keys():
                shelf = self._shelves[game]
                before = shelf.sources.get(source, 0)
                shelf.sources[source] = max(before, totals[game])
                shelf.rejected += shelf.sources[source] - before

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        with self._lock:
            shelf = self._shelf(game)
            if after < 0:
                return Tail([], shelf.place)
            places = [place for place in shelf.fragments if place > after][:limit]
            return Tail([shelf.fragments[place] for place in places], places[-1] if places else after)

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        with self._lock:
            shelf = self._shelf(game)
            spans = list(stripes(0, shelf.place, share, of))
            fragments = list(shelf.fragments.items())
        for begin, end in spans:
            if piece := [f for place, f in fragments if begin < place <= end]:
                yield piece

    def sample(self, game: str, steps: int, rng: np.random.Generator) -> list[Fragment]:
        with self._lock:
            fragments = list(self._shelf(game).fragments.values())
        weights = np.array([f.steps for f in fragments], float)
        if weights.sum() <= steps:
            return fragments
        drawn: list[Fragment] = []
        while sum(f.steps for f in drawn) < steps:
            drawn.append(fragments[rng.choice(len(fragments), p=weights / weights.sum())])
        return drawn

    def erase(self, game: str, player: str) -> int:
        with self._lock:
            shelf = self._shelf(game)
            gone = [place for place, f in shelf.fragments.items() if f.player == player]
            for place in gone:
                self._remove(shelf, place)
                shelf.episodes.pop(place, None)
            self._forget(shelf, player)
            shelf.erasures += bool(gone)
            return len(gone)

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        with self._lock:
            shelf, wanted = self._shelf(game), set(ids)
            gone = [place for place, f in shelf.fragments.items() if f.id in wanted]
            for place in gone:
                f = self._remove(shelf, place)
                if (
                    shelf.episodes.pop(place, None) is None
                    and shelf.unfinished.pop((f.player, f.episode), None) is None
                ):
                    name = (f.player, f.episode)
                    later = [at for at, e in shelf.episodes.items() if at > place and (e.player, e.episode) == name]
                    shelf.episodes.pop(min(later, default=0), None)
                if all(f.player != other.player for other in shelf.fragments.values()):
                    self._forget(shelf, f.player)
            shelf.rejected += len(gone)
            shelf.erasures += bool(gone)
            return len(gone)

    def _remove(self, shelf: _Shelf, place: int) -> Fragment:
        f = shelf.fragments.pop(place)
        del self._ids[f.id]
        shelf.erased.add((f.player, f.id))
        return f

    def _forget(self, shelf: _Shelf, player: str) -> None:
        shelf.unfinished = {name: e for name, e in shelf.unfinished.items() if name[0] != player}
        shelf.last_seen.pop(player, None)

    def erasure(self, game: str) -> str:
        with self._lock:
            return str(self._shelf(game).erasures or "")

    def stats(self, game: str) -> Stats:
        with self._lock:
            shelf = self._shelf(game)
            fragments = list(shelf.fragments.values())
            size = sum(len(f.obs) + len(f.action) + len(f.reward) + len(f.log_prob or b"") for f in fragments)
            steps = sum(f.steps for f in fragments)
            return Stats(len(fragments), steps, len(shelf.last_seen), size, shelf.rejected)

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        with self._lock:
            shelf = self._shelf(game)
            rows = []
            for player, last_seen in sorted(shelf.last_seen.items(), key=lambda item: -item[1])[:limit]:
                steps = [f.steps for f in shelf.fragments.values() if f.player == player]
                rows.append(PlayerStats(player, len(steps), sum(steps), last_seen))
            return rows

    def versions(self, game: str) -> list[VersionStats]:
        with self._lock:
            steps: dict[tuple[str | None, int | None], list[int]] = {}
            for f in self._shelf(game).fragments.values():
                steps.setdefault((f.model, f.version), []).append(f.steps)
            order = sorted(steps, key=lambda who: (who[0] or "", -1 if who[1] is None else who[1]))
            return [VersionStats(*who, len(steps[who]), sum(steps[who])) for who in order]

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        with self._lock:
            return [e for place, e in self._shelf(game).episodes.items() if place > after][:limit]

    def _shelf(self, game: str) -> _Shelf:
        """A game that is not there has nothing."""
        self._require_open()
        return self._shelves.get(game) or _Shelf()

    def _require_open(self) -> None:
        if self._closed:
            raise SparringError("the store is closed")
