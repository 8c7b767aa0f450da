"""A store on a Cassandra cluster: any number of writers and readers, no clock that matters.

What lies in which table is in docs/cassandra.md. A fragment's place in its bucket is the number of steps until it, so a
random step finds its fragment with one look-up (`sample`). Lightweight transactions decide about a bucket's number and
its head, about the next entry of the order, about games, and about what erasures replace.
"""

import heapq
import threading
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Submission, refusal, require_checked, require_same, stripes
from sparring.store.cassandra.buckets import GROUP_FRAGMENTS, CassandraWriter
from sparring.store.cassandra.eraser import Eraser
from sparring.store.cassandra.keyspace import Address, Keyspace, KnownGames
from sparring.store.cassandra.order import Span
from sparring.store.cassandra.records import PROBES, Records, probe
from sparring.store.cassandra.rows import decode_block, groups
from sparring.store.declarations import read_declaration, revised
from sparring.store.durable import DurableStore
from sparring.store.profile import Revision
from sparring.store.protocol import (
    Episode,
    EpisodePage,
    NotRegistered,
    Outcome,
    PlayerStats,
    Quarantined,
    Stats,
    StoreBusy,
    Tail,
    VersionStats,
)
from sparring.store.queue import GROUP

__all__ = ["CassandraStore"]

ANSWER = 32 << 20  # bytes in one answer of `tail`: fragments of images are large
PAGE = 2 << 20  # bytes asked for at once …
MAX_ROWS = 256  # … if they are as small as the last ones were …
AHEAD = 4  # … and questions on their way while one's answer is used: so much memory a reader takes
REVISIONS = 20  # tries to change a game's profile while others do


class CassandraStore(DurableStore[CassandraWriter]):
    """The store at cassandra://HOST[:PORT][,HOST…]/KEYSPACE. `readonly`: nothing is written but the order of things."""

    def __init__(self, address: str, *, readonly: bool = False) -> None:
        self.address = Address.parse(address)
        self._keyspace = Keyspace(self.address)
        self._games = KnownGames(self._keyspace)
        super().__init__(self.address, None if readonly else CassandraWriter(self._keyspace, self._games))
        self._lock = threading.Lock()
        self._width = PAGE  # bytes of a block, as they were in the last page that was read
        self._views: dict[str, Records] = {}  # by the game's key

    def close(self) -> None:
        """Writes what was submitted, then closes. Twice is fine."""
        if self._writer is not None:
            self._writer.close()
        self._keyspace.close()

    # Games

    def register(self, game: Game) -> None:
        self._writing()
        if self.deleted(game.name):  # and that was cut short: its claims would hide what is sent anew
            self.delete_game(game.name)
        key = f"{game.name} {uuid.uuid4().hex}"
        applied, row = self._keyspace.applied("register", game.to_json().decode(), key, game.name)
        if not applied:
            require_same(read_declaration(game.name, row[-1]), game)
        self._games.forget(game.name)

    def registration(self, game: str) -> str:
        return self._games.find(game)[0]

    def pause(self, game: str, paused: bool) -> None:
        self._writing()
        if not self._keyspace.applied("pause", paused, game)[0]:
            raise NotRegistered(f"there is no game {game!r}")

    def paused(self) -> set[str]:
        return {name for name, _, paused in self._registered() if paused}

    def revise(self, game: str, change: Callable[[Revision], Revision]) -> Revision:
        self._writing()
        for _ in range(REVISIONS):
            spec = next((spec for spec, _ in self._keyspace.run("game", game)), None)
            if spec is None:
                raise NotRegistered(f"there is no game {game!r}")
            new, text = revised(game, spec, change)
            if self._keyspace.applied("revise", text.decode(), game, spec)[0]:
                self._games.forget(game)
                return new
        raise StoreBusy(f"others change the game {game!r} all the time: try later")

    def _specs(self) -> list[tuple[str, str]]:
        return sorted((name, spec) for name, spec, _ in self._registered())

    def delete_game(self, name: str) -> None:
        """Who writes to it is refused from its next commit on, other readers see it go within a second."""
        self._writing().note_refusals()  # the game's may still be on their way
        for _, key in self._keyspace.run("game", name):
            if key is None:  # it was deleted before
                continue
            self._keyspace.applied("unregister", name, key)
            self._games.forget(name)
            self._views.pop(key, None)
            Eraser(self._keyspace, key).everything()
            self._keyspace.applied("forget game", name, key)

    def deleted(self, name: str) -> bool:
        return any(spec is None for spec, _ in self._keyspace.run("game", name))

    def _registered(self) -> list[tuple[str, str, bool]]:
        return [row for row in self._keyspace.run("games") if row[1] is not None]

    # Writing

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        """On the disks of as many replicas as the consistency asks for, as soon as Cassandra's commit log says so."""
        require_checked(fragments)
        return self._writing().append(Submission(piece) for piece in groups(fragments, GROUP, _weight))

    def quarantined(self, game: str, limit: int = 100) -> list[Quarantined]:
        """Each writer has rows of its own, in no order: some thousand, which are gone after a month."""
        rows = self._keyspace.pages("quarantined", self._games.key(game), fetch_size=1000)
        return [Quarantined(game, *row[2:]) for row in heapq.nlargest(limit, rows, key=lambda row: row[-1])]

    def erase(self, game: str, player: str) -> int:
        """Looks through all records of the game. The disks forget with the next compactions after
        `gc_grace_seconds`."""
        self._writing().note_refusals()  # the player's may still be on their way
        return Eraser(self._keyspace, self._games.key(game)).player(player)

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        writer = self._writing()
        gone = Eraser(self._keyspace, self._games.key(game)).ids(ids)
        for f in gone:
            writer.refuse(refusal(game, f.player, f.id, reason))
        writer.note_refusals()
        return len(gone)

    def erasure(self, game: str) -> str:
        return "".join(str(mark) for (mark,) in self._keyspace.run("erasure", self._games.key(game)))

    # Reading fragments

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        view = self._view(game)
        if after < 0:
            return Tail([], view.order.tip())
        limit = max(limit, 1)
        fragments: list[Fragment] = []
        begin, cursor, reached, size = -1, after, after, 0
        while not fragments and reached > begin:  # else all of it was erased: on with what comes after it
            begin = reached
            for at, span, bodies in self._read(view.game, view.order.spans(begin), limit + 1):
                for body in bodies:
                    block = decode_block(body)
                    first = bisect_right(block.places, span.begin)  # of a span's first block some may lie before it
                    if taken := block.fragments[first : first + limit - len(fragments)]:
                        fragments += taken
                        cursor = at + block.places[first + len(taken) - 1] - span.begin
                    size += len(body)
                    if len(fragments) == limit or size >= ANSWER:
                        return Tail(fragments, cursor)
                reached = at + span.steps
        return Tail(fragments, cursor)

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        view = self._view(game)
        spans = [
            (0, Span(head.day, bucket, begin, end))
            for bucket, head in sorted(view.order.directory.refresh().items())
            for begin, end in stripes(0, head.steps, share, of, salt=bucket)
        ]
        for *_, bodies in self._read(view.game, spans):
            if piece := [f for body in bodies for f in decode_block(body).fragments]:
                yield piece

    def _read(
        self, key: str, spans: Iterable[tuple[int, Span]], most: int = MAX_ROWS
    ) -> Iterator[tuple[int, Span, list[bytes]]]:
        """Pages of blocks that end in the spans, in order; while one is used, the next ones are on their way."""
        waiting: deque[tuple[int, Span, Any]] = deque()
        spans = iter(spans)
        while True:
            for at, span in islice(spans, AHEAD - len(waiting)):
                rows = min(max(PAGE // self._width, 16), MAX_ROWS, most)
                values = (key, span.day, span.bucket, span.begin, span.end)
                waiting.append((at, span, self._keyspace.start("blocks", *values, fetch_size=rows)))
            if not waiting:
                return
            at, span, future = waiting.popleft()
            more = True
            while more:
                with self._keyspace.asking():
                    bodies = [body for _, body in future.result().current_rows]
                    more = future.has_more_pages
                    if more:
                        future.start_fetching_next_page()
                self._width = max(sum([len(body) for body in bodies]) // max(len(bodies), 1), 1)
                yield at, span, bodies

    def sample(self, game: str, steps: int, rng: np.random.Generator) -> list[Fragment]:
        view = self._view(game)
        drawn: list[Fragment] = []
        missing = steps
        while missing > 0:
            heads = view.order.directory.refresh()
            spans = [Span(head.day, bucket, 0, head.steps) for bucket, head in sorted(heads.items()) if head.steps]
            ends = np.cumsum([0, *(span.steps for span in spans)])
            total = live = int(ends[-1])
            count = sum(head.fragments for head in heads.values())
            if self._keyspace.run("erasure", view.game):
                totals = view.totals()
                live, count = totals.steps, totals.fragments
            if steps >= live:
                return [f for piece in self.scan(game) for f in piece]
            wanted = missing * count // live + 1
            probes = max(wanted * total // live, 1)  # of all steps there ever were: erased ones find nothing
            if probes <= count:
                places = rng.integers(total, size=min(probes, PROBES))
                at = np.searchsorted(ends, places, side="right") - 1
                begins = (places - ends[at]).tolist()
                asked = [msgspec.structs.replace(spans[i], begin=begin) for i, begin in zip(at, begins, strict=True)]
                found = probe(self._keyspace, view.game, asked)
            else:
                found = self._pick(game, rng, wanted)
            for f in found:
                if missing > 0:
                    drawn.append(f)
                    missing -= f.steps
        return drawn

    def _pick(self, game: str, rng: np.random.Generator, count: int) -> list[Fragment]:
        """Where probes find nothing, since so much was erased: so many of all there are, drawn as they come by."""
        drawn: dict[int, Fragment] = {}
        total = 0
        for f in (f for piece in self.scan(game) for f in piece):
            total += f.steps
            drawn |= dict.fromkeys(np.flatnonzero(rng.random(count) * total < f.steps).tolist(), f)
        return list(drawn.values())

    # Counting

    def stats(self, game: str) -> Stats:
        key = self.registration(game)
        rejected = sum(count for (count,) in self._keyspace.run("rejected", key)) if key else 0
        return self._view(game).totals().stats(rejected)

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        return self._view(game).totals().players(limit)

    def versions(self, game: str) -> list[VersionStats]:
        return self._view(game).totals().versions()

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        return self._view(game).episodes(after, limit)

    def newest_episodes(self, game: str, before: int | None = None, limit: int = 100) -> EpisodePage:
        return self._view(game).newest(before, limit)

    def episode(
        self, game: str, cursor: int, first: int = 0, last: int | None = None
    ) -> tuple[Episode, list[Fragment]] | None:
        return self._view(game).episode(cursor, first, last)

    def _view(self, game: str) -> Records:
        key = self._games.key(game)
        with self._lock:
            return self._views.setdefault(key, Records(self._keyspace, key))


def _weight(f: Fragment) -> int:
    """As part of a group, so that a large batch takes no more memory than a small one."""
    return max(len(f.obs) + len(f.action) + len(f.reward), GROUP // GROUP_FRAGMENTS)
