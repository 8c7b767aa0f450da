"""A store in memory with the semantics of the durable ones: for unit tests, and as their definition."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, new_id
from sparring.games import Game
from sparring.store.arrival import refusal, require_checked, require_same, returns, same, stripes
from sparring.store.counts import Totals, UnfinishedEpisodes, pieces
from sparring.store.declarations import revised
from sparring.store.profile import Profile, Revision, write_declaration
from sparring.store.protocol import (
    Episode,
    EpisodePage,
    NotRegistered,
    Outcome,
    PlayerStats,
    Quarantined,
    Stats,
    Tail,
    VersionStats,
)

__all__ = ["MemoryStore"]

QUARANTINE = 4096  # rejected fragments kept of each game


@dataclass
class _Shelf:
    """All there is of one game."""

    registration: str = ""
    profile: Profile = field(default_factory=Profile)
    paused: bool = False
    erased: set[tuple[str, str]] = field(default_factory=set)  # players and ids
    erasures: int = 0
    place: int = 0  # steps ever stored
    rejected: int = 0
    quarantine: deque[Quarantined] = field(default_factory=lambda: deque(maxlen=QUARANTINE))  # the newest last
    sources: dict[str, int] = field(default_factory=dict)  # what each of them says that it refused
    fragments: dict[int, Fragment] = field(default_factory=dict)  # by place, in order
    arrived: dict[int, float] = field(default_factory=dict)  # when, by place

    def totals(self) -> Totals:
        totals = Totals()
        for place, f in self.fragments.items():
            size = len(f.obs) + len(f.action) + len(f.reward) + len(f.log_prob or b"")
            totals.add(f, size, self.arrived[place])
        return totals


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

    def profiles(self) -> dict[str, Profile]:
        with self._lock:
            self._require_open()
            return {name: shelf.profile for name, shelf in self._shelves.items()}

    def revise(self, game: str, change: Callable[[Revision], Revision]) -> Revision:
        with self._lock:
            self._require_open()
            if game not in self._shelves:
                raise NotRegistered(f"no game {game!r} is registered here")
            known = Revision(self._games[game], self._shelves[game].profile)
            new, _ = revised(game, write_declaration(known), change)
            self._games[game], self._shelves[game].profile = new.game, new.profile
            return new

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
            return [self._add(f) for f in fragments]

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        future: Future[list[Outcome]] = Future()
        try:
            future.set_result(self.append(fragments))
        except InputError as error:
            future.set_exception(error)
        return future

    def _add(self, f: Fragment) -> Outcome:
        shelf = self._shelves[f.game]
        if (f.player, f.id) in shelf.erased:
            return Outcome.ERASED
        if f.id in self._ids:
            return Outcome.DUPLICATE if same(self._ids[f.id], f) else Outcome.CONFLICT
        self._ids[f.id] = f
        shelf.place += f.steps
        shelf.fragments[shelf.place] = f
        shelf.arrived[shelf.place] = time.time()
        return Outcome.STORED

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        with self._lock:
            self._require_open()
            if game in self._shelves:
                self._shelves[game].rejected += 1
                self._note(Quarantined(game, player, fragment_id, reason))

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Quarantined]) -> None:
        with self._lock:
            self._require_open()
            for game in totals.keys() & self._shelves.keys():
                shelf = self._shelves[game]
                before = shelf.sources.get(source, 0)
                shelf.sources[source] = max(before, totals[game])
                shelf.rejected += shelf.sources[source] - before
            for refused in newest:
                if refused.game in self._shelves:
                    shelf = self._shelves[refused.game]
                    others = [q for q in shelf.quarantine if (q.id, q.reason) != (refused.id, refused.reason)]
                    shelf.quarantine = deque(others, maxlen=QUARANTINE)
                    self._note(refused)

    def _note(self, q: Quarantined) -> None:
        when, game, player, fragment_id, reason = refusal(q.game, q.player, q.id, q.reason)
        self._shelves[game].quarantine.append(Quarantined(game, player, fragment_id, reason, when))

    def quarantined(self, game: str, limit: int = 100) -> list[Quarantined]:
        with self._lock:
            return list(self._shelf(game).quarantine)[::-1][:limit]

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
            others = [q for q in shelf.quarantine if q.player != player]
            shelf.quarantine = deque(others, maxlen=QUARANTINE)
            return len(self._remove(shelf, lambda f: f.player == player))

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        with self._lock:
            shelf, wanted = self._shelf(game), set(ids)
            gone = self._remove(shelf, lambda f: f.id in wanted)
            for f in gone:
                self._note(Quarantined(game, f.player, f.id, reason))
            shelf.rejected += len(gone)
            return len(gone)

    def _remove(self, shelf: _Shelf, doomed: Callable[[Fragment], bool]) -> list[Fragment]:
        places = [place for place, f in shelf.fragments.items() if doomed(f)]
        gone = [shelf.fragments.pop(place) for place in places]
        for f in gone:
            del self._ids[f.id]
            shelf.erased.add((f.player, f.id))
        shelf.erasures += bool(gone)
        return gone

    def erasure(self, game: str) -> str:
        with self._lock:
            return str(self._shelf(game).erasures or "")

    def stats(self, game: str) -> Stats:
        with self._lock:
            shelf = self._shelf(game)
            return shelf.totals().stats(shelf.rejected)

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        with self._lock:
            return self._shelf(game).totals().players(limit)

    def versions(self, game: str) -> list[VersionStats]:
        with self._lock:
            return self._shelf(game).totals().versions()

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        with self._lock:
            shelf, unfinished = self._shelf(game), UnfinishedEpisodes(sys.maxsize)
            sums = returns(list(shelf.fragments.values()))
            added = [
                unfinished.add(f, ret, shelf.arrived[place], place)
                for (place, f), ret in zip(shelf.fragments.items(), sums, strict=True)
            ]
            return [e for e in added if e is not None and e.cursor > after][:limit]

    def newest_episodes(self, game: str, before: int | None = None, limit: int = 100) -> EpisodePage:
        found = [e for e in self.episodes(game, limit=sys.maxsize) if before is None or e.cursor < before][::-1]
        return EpisodePage(found[:limit], found[limit - 1].cursor if len(found) > limit else None)

    def episode(
        self, game: str, cursor: int, first: int = 0, last: int | None = None
    ) -> tuple[Episode, list[Fragment]] | None:
        found = [e for e in self.episodes(game, limit=sys.maxsize) if e.cursor == cursor]
        with self._lock:
            fragments = [(f, f) for place, f in self._shelf(game).fragments.items() if place <= cursor]
        wanted = [(e, pieces(e, reversed(fragments), first, last)) for e in found]
        return next(((e, some) for e, some in wanted if some is not None), None)

    def _shelf(self, game: str) -> _Shelf:
        """A game that is not there has nothing."""
        self._require_open()
        return self._shelves.get(game) or _Shelf()

    def _require_open(self) -> None:
        if self._closed:
            raise SparringError("the store is closed")
