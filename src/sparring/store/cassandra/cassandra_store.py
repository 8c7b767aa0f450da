"""A store on a Cassandra cluster: any number of writers and readers, no clock that matters.

- `block`: fragments, some 32 KiB of neighbours a row, in partitions `(game, day, bucket)`. A bucket belongs to one
  writer, who opens the next one when it has 64 MiB: their number follows the load. A fragment's place in its bucket is
  the number of steps until it, so a random step finds its fragment with one look-up (`sample`).
- `bucket`: the directory; `head`: how far each is committed. What lies behind it does not exist. (`heads`: the fence.)
- `claims`: where ids went: a pure function of the id says where to look, whatever day and to whomever it comes again.
  (`buckets`: why a fragment is stored once.)
- `record`: what each commit held without the columns: counts, players, versions and episodes are folds of these.
- `merge`: the order of it all, decided by readers. (`order`: why `tail` misses nothing and repeats nothing.)

Lightweight transactions decide about a bucket's number and its head, about the next entry of the order, about games,
and about what erasures replace. (`migration`: how tables are made and brought up to date.)
"""

import threading
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

import numpy as np

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Submission, failed, refusal, require_checked, require_same, stripes
from sparring.store.cassandra.buckets import GROUP, GROUP_FRAGMENTS, Writer
from sparring.store.cassandra.eraser import Eraser
from sparring.store.cassandra.heads import Head
from sparring.store.cassandra.keyspace import Address, Games, Keyspace
from sparring.store.cassandra.order import Directory, Episodes, Order, Span, Totals
from sparring.store.cassandra.rows import cut, decode_block
from sparring.store.declarations import Declarations, read_declaration
from sparring.store.protocol import (
    Episode,
    NotRegistered,
    Outcome,
    PlayerStats,
    Quarantined,
    Stats,
    StoreBusy,
    Tail,
    VersionStats,
)

__all__ = ["CassandraStore"]

ANSWER = 32 << 20  # bytes in one answer of `tail` or piece of `scan`: fragments of images are large
PIECE = 1000  # fragments in a piece
PAGE = 2 << 20  # bytes asked for at once …
MAX_ROWS = 256  # … if they are as small as the last ones were …
AHEAD = 4  # … and questions on their way while one's answer is used: so much memory a reader takes
PROBES = 64  # look-ups of `sample` on their way at once
MISSES = 20  # rounds of look-ups in a row that found nothing, after which it looks again what there is
SPARSE = 50  # with fewer than one step in so many left by erasures, fragments are counted instead of probed for


class _View:
    """What a process keeps of a game, by its key."""

    def __init__(self, keyspace: Keyspace, key: str) -> None:
        self.key = key
        self.directory, self.order = Directory(keyspace, key), Order(keyspace, key)
        self.totals, self.episodes = Totals(keyspace, key, self.order), Episodes(keyspace, key, self.order)


class CassandraStore:
    """The store at cassandra://HOST[:PORT][,HOST…]/KEYSPACE. `readonly`: nothing is written but the order of things."""

    def __init__(self, address: str, *, readonly: bool = False) -> None:
        self.address = Address.parse(address)
        self._keyspace = Keyspace(self.address)
        self._games = Games(self._keyspace)
        self._declarations = Declarations(self.address)
        self._writer = None if readonly else Writer(self._keyspace, self._games)
        self._lock = threading.Lock()
        self._width = PAGE  # bytes of a block, as they were in the last page that was read
        self._views: dict[str, _View] = {}  # by key

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

    def games(self) -> list[Game]:
        return self._declared()[0]

    def registration(self, game: str) -> str:
        return (self._games.find(game) or ("",))[0]

    def pause(self, game: str, paused: bool) -> None:
        self._writing()
        if not self._keyspace.applied("pause", paused, game)[0]:
            raise NotRegistered(f"there is no game {game!r}")

    def paused(self) -> set[str]:
        return {name for name, _, paused in self._registered() if paused}

    def unreadable(self) -> dict[str, str]:
        return self._declared()[1]

    def _declared(self) -> tuple[list[Game], dict[str, str]]:
        return self._declarations.read(sorted((name, spec) for name, spec, _ in self._registered()))

    def delete_game(self, name: str) -> None:
        """Who writes to it is refused from its next commit on, other readers see it go within a second."""
        self._writing().note_refusals()  # the game's may still be on their way
        for _, key in self._keyspace.run("game", name):
            if key is None:  # it was deleted before
                continue
            self._keyspace.applied("unregister", name, key)
            self._games.forget(name)
            Eraser(self._keyspace, key, self._views.pop(key, _View(self._keyspace, key)).directory).everything()
            self._keyspace.applied("forget game", name, key)

    def deleted(self, name: str) -> bool:
        return any(spec is None for spec, _ in self._keyspace.run("game", name))

    def _registered(self) -> list[tuple[str, str, bool]]:
        return [row for row in self._keyspace.run("games") if row[1] is not None]

    # Writing

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        """On the disks of as many replicas as the consistency asks for, as soon as Cassandra's commit log says so."""
        require_checked(fragments)
        return self._writing().append(Submission(piece) for piece in cut(fragments, GROUP, _weight))

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        writer = self._writing()
        self._keyspace.require_open()
        try:
            return writer.submit(Submission(fragments))
        except (InputError, StoreBusy) as error:
            return failed(error)

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        self._writing().refuse(refusal(game, player, fragment_id, reason))

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Quarantined]) -> None:
        self._writing().note_from(source, totals, [refusal(r.game, r.player, r.id, r.reason) for r in newest])

    def erase(self, game: str, player: str) -> int:
        """Looks through all records of the game. The disks forget with the next compactions after
        `gc_grace_seconds`."""
        self._writing().note_refusals()  # the player's may still be on their way
        return self._eraser(game).player(player)

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        writer = self._writing()
        gone = self._eraser(game).ids(ids)
        for f in gone:
            writer.refuse(refusal(game, f.player, f.id, reason))
        writer.note_refusals()
        return len(gone)

    def erasure(self, game: str) -> str:
        return "".join(str(mark) for (mark,) in self._keyspace.run("erasure", self._games.key(game)))

    def _eraser(self, game: str) -> Eraser:
        view = self._view(game)
        return Eraser(self._keyspace, view.key, view.directory)

    def _writing(self) -> Writer:
        if self._writer is None:
            raise SparringError(f"the store {self.address} is open for reading only")
        return self._writer

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
            for at, span, bodies in self._read(view.key, view.order.spans(begin), limit + 1):
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
            for bucket, head in sorted(view.directory.refresh().items())
            for begin, end in stripes(0, head.steps, share, of, salt=bucket)
        ]
        piece: list[Fragment] = []
        size = 0
        for body in (body for *_, bodies in self._read(view.key, spans) for body in bodies):
            piece += decode_block(body).fragments
            size += len(body)
            if len(piece) >= PIECE or size >= ANSWER:
                yield piece
                piece, size = [], 0
        if piece:
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
        buckets = sorted((number, head) for number, head in view.directory.refresh().items() if head.steps)
        ends = np.cumsum([head.steps for _, head in buckets])
        total = int(ends[-1]) if buckets else 0
        # Without any erasure, the directory says how many steps there are.
        live = self._totals(game).steps if self._keyspace.run("erasure", view.key) else total
        if steps <= 0:
            return []
        if steps >= live:
            return [f for piece in self.scan(game) for f in piece]
        width = max(total // sum(head.fragments for _, head in buckets), 1)  # steps of a fragment, about
        drawn: list[Fragment] = []
        missing, misses = steps, 0
        while missing > 0 and misses < MISSES:
            wanted = missing // width + 1
            if live * SPARSE < total:
                found = self._pick(game, rng, wanted)
            else:
                places = rng.integers(total, size=min(wanted * total // live, PROBES))
                found = self._probe(view.key, buckets, ends, places)
            misses = 0 if found else misses + 1
            for f in found:
                if missing > 0:
                    drawn.append(f)
                    missing -= f.steps
        return drawn + (self.sample(game, missing, rng) if missing > 0 else [])  # others erase meanwhile

    def _probe(self, key: str, buckets: list[tuple[int, Head]], ends: Any, steps: Any) -> list[Fragment]:
        """The fragments that hold these steps, counted over all buckets; an erased one has none."""
        asked, found = [], []
        for step, index in zip(steps.tolist(), np.searchsorted(ends, steps, side="right").tolist(), strict=True):
            bucket, head = buckets[index]
            place = step - (int(ends[index]) - head.steps)
            asked.append((place, self._keyspace.start("block", key, head.day, bucket, place, head.steps)))
        for (place, _), rows in zip(asked, self._keyspace.wait([future for _, future in asked]), strict=True):
            for block in [decode_block(body) for (body,) in rows]:
                index = bisect_right(block.places, place)
                if index < len(block.places) and block.places[index] - block.fragments[index].steps <= place:
                    found.append(block.fragments[index])
        return found

    def _pick(self, game: str, rng: np.random.Generator, count: int) -> list[Fragment]:
        """Where so much was erased that probes mostly find nothing: so many of all there are, drawn as they come by."""
        drawn: dict[int, Fragment] = {}
        total = 0
        for f in (f for piece in self.scan(game) for f in piece):
            total += f.steps
            drawn |= dict.fromkeys(np.flatnonzero(rng.random(count) * total < f.steps).tolist(), f)
        return list(drawn.values())

    # Counting

    def stats(self, game: str) -> Stats:
        totals, key = self._totals(game), self.registration(game)
        rejected = sum(count for (count,) in self._keyspace.run("rejected", key)) if key else 0
        return Stats(totals.fragments, totals.steps, len(totals.players), totals.bytes, rejected)

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        players = self._totals(game).players
        newest = sorted(list(players.items()), key=lambda item: -item[1][2])[:limit]
        return [PlayerStats(name, *counts) for name, counts in newest]

    def versions(self, game: str) -> list[VersionStats]:
        return self._totals(game).versions

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        return self._view(game).episodes.after(after, limit)

    def _totals(self, game: str) -> Totals:
        return self._view(game).totals.advance()

    def _view(self, game: str) -> _View:
        key = self._games.key(game)
        with self._lock:
            return self._views.setdefault(key, _View(self._keyspace, key))


def _weight(f: Fragment) -> int:
    """As part of a group, so that a large batch takes no more memory than a small one."""
    return max(len(f.obs) + len(f.action) + len(f.reward), GROUP // GROUP_FRAGMENTS)
