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
and about what erasures replace.
"""

import threading
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Submission, failed, refusal, require_checked, require_same, stripes
from sparring.store.buckets import GROUP, GROUP_FRAGMENTS, Writer
from sparring.store.eraser import Eraser
from sparring.store.heads import Head
from sparring.store.keyspace import Address, Games, Keyspace
from sparring.store.order import Directory, Episodes, Order, Span, Totals
from sparring.store.protocol import (
    Episode,
    NotRegistered,
    Outcome,
    PlayerStats,
    Refused,
    Stats,
    StoreBusy,
    Tail,
    VersionStats,
)
from sparring.store.rows import Block, decode_block

__all__ = ["CassandraStore"]

T = TypeVar("T")
ANSWER = 32 << 20  # bytes in one answer of `tail` or piece of `scan`: fragments of images are large
PIECE = 1000  # fragments in a piece
PAGE = 2 << 20  # bytes asked for at once …
MAX_ROWS = 256  # … if they are as small as the last ones were …
AHEAD = 4  # … and questions on their way while one's answer is used: so much memory a reader takes
EVERYTHING = 1 << 30  # a limit that is none
JOINED = 1 << 16  # steps of stretches that are read as one
PROBES = 64  # look-ups of `sample` on their way at once
MISSES = 20  # rounds of look-ups in a row that found nothing, after which it looks again what there is
SPARSE = 50  # with fewer than one step in so many left by erasures, fragments are counted instead of probed for


class _View:
    """What a process keeps of a game, by its key."""

    def __init__(self, keyspace: Keyspace, key: str) -> None:
        self.key = key
        self.directory, self.order = Directory(keyspace, key), Order(keyspace, key)
        self.totals, self.episodes = Totals(keyspace, key, self.order), Episodes(keyspace, key, self.order)
        self.folding = threading.Lock()  # guards these two, which are brought up to date by one at a time


class CassandraStore:
    """The store at cassandra://HOST[:PORT][,HOST…]/KEYSPACE. `readonly`: nothing is written but the order of things."""

    def __init__(self, address: str, *, readonly: bool = False) -> None:
        self.address = Address.parse(address)
        self._keyspace = Keyspace(self.address)
        self._games = Games(self._keyspace)
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
            require_same(Game.from_json(row[-1]), game)
        self._games.forget(game.name)

    def games(self) -> list[Game]:
        return sorted((Game.from_json(spec) for _, spec, _ in self._registered()), key=lambda game: game.name)

    def registration(self, game: str) -> str:
        return (self._games.find(game) or ("",))[0]

    def pause(self, game: str, paused: bool) -> None:
        self._writing()
        if not self._keyspace.applied("pause", paused, game)[0]:
            raise NotRegistered(f"there is no game {game!r}")

    def paused(self) -> set[str]:
        return {name for name, _, paused in self._registered() if paused}

    def unreadable(self) -> dict[str, str]:
        return {}  # `games` leaves none out: it raises

    def delete_game(self, name: str) -> None:
        """Who writes to it is refused from its next commit on, other readers see it go within a second."""
        self._writing().note_refusals()  # the game's may still be on their way
        for _, key in self._keyspace.run("game", name):
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
        return self._writing().append(Submission(piece) for piece in _pieces(fragments))

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        writer = self._writing()
        self._keyspace.require_open()
        try:
            return writer.submit(Submission(fragments))
        except (InputError, StoreBusy) as error:
            return failed(error)

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        self._writing().refuse(refusal(game, player, fragment_id, reason))

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Refused]) -> None:
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
        cursor, size = after, 0
        for at, span, block, width in self._follow(view, after, limit):
            taken = block.fragments[: limit - len(fragments)]
            fragments += taken
            cursor = at + block.places[len(taken) - 1] - span.begin
            size += width
            if len(fragments) == limit or size >= ANSWER:
                break
        return Tail(fragments, cursor)

    def _follow(self, view: _View, after: int, limit: int) -> Iterator[tuple[int, Span, Block, int]]:
        """What blocks hold after the cursor, each with its span, the cursor where that begins, and the block's size."""
        reached = [after]
        found = False
        while not found:
            begin = reached[0]
            for row in self._blocks(view.key, _joined(_spans(view.order, begin, reached)), limit):
                found = True
                yield row
            if reached[0] == begin:  # else, if nothing was found, all of it was erased: on with what comes after it
                return

    def _blocks(
        self, key: str, spans: Iterable[tuple[int, Span]], limit: int
    ) -> Iterator[tuple[int, Span, Block, int]]:
        """Of the first block of a span some may lie before it: perhaps all that erasures left of it."""
        for (at, span), body in self._read(key, spans, limit + 1):
            block = decode_block(body)
            first = bisect_right(block.places, span.begin)
            if first:
                block = Block(block.places[first:], block.fragments[first:])
            if block.places:
                yield at, span, block, len(body)

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        view = self._view(game)
        spans = [
            (0, Span(head.day, bucket, begin, end))
            for bucket, head in sorted(view.directory.refresh().items())
            for begin, end in stripes(0, head.steps, share, of, salt=bucket)
        ]
        piece: list[Fragment] = []
        size = 0
        for _, body in self._read(view.key, spans, EVERYTHING):
            piece += decode_block(body).fragments
            size += len(body)
            if len(piece) >= PIECE or size >= ANSWER:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece

    def _read(
        self, key: str, spans: Iterable[tuple[int, Span]], limit: int
    ) -> Iterator[tuple[tuple[int, Span], bytes]]:
        """Blocks that end in the spans, in order; the next questions are on their way while an answer is used."""
        waiting: deque[tuple[tuple[int, Span], Any]] = deque()
        spans = iter(spans)
        while True:
            while len(waiting) < AHEAD and (span := next(spans, None)) is not None:
                where, rows = span[1], min(max(PAGE // self._width, 16), MAX_ROWS)
                values = (key, where.day, where.bucket, where.begin, where.end, min(limit, EVERYTHING))
                waiting.append((span, self._keyspace.start("slice", *values, fetch_size=rows)))
            if not waiting:
                return
            span, future = waiting.popleft()
            for (body,) in self._pages(future):
                yield span, body

    def _pages(self, future: Any) -> Iterator[tuple[bytes]]:
        """All rows of an answer: while one page is used, the next is fetched."""
        while True:
            with self._keyspace.asking():
                rows = future.result().current_rows
                more = future.has_more_pages
                if more:
                    future.start_fetching_next_page()
            if rows:
                self._width = max(sum([len(body) for (body,) in rows]) // len(rows), 1)
            yield from rows
            if not more:
                return

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
        found: Iterable[Fragment]
        while missing > 0:
            wanted = missing // width + 1
            if misses == MISSES:  # others erase meanwhile
                return drawn + self.sample(game, missing, rng)
            if live * SPARSE < total:
                found = self._pick(game, rng, wanted)
            else:
                places = rng.integers(total, size=min(wanted * total // live, PROBES))
                found = self._probe(view.key, buckets, ends, places)
            misses += 1
            for f in found:
                drawn.append(f)
                missing, misses = missing - f.steps, 0
                if missing <= 0:
                    break
        return drawn

    def _probe(self, key: str, buckets: list[tuple[int, Head]], ends: Any, steps: Any) -> Iterator[Fragment]:
        """The fragments that hold these steps, counted over all buckets; an erased one has none."""
        asked = []
        for step, index in zip(steps.tolist(), np.searchsorted(ends, steps, side="right").tolist(), strict=True):
            bucket, head = buckets[index]
            place = step - (int(ends[index]) - head.steps)
            asked.append((place, self._keyspace.start("slice", key, head.day, bucket, place, head.steps, 1)))
        for place, future in asked:
            with self._keyspace.asking():
                rows = future.result().current_rows
            for (body,) in rows:
                block = decode_block(body)
                index = bisect_right(block.places, place)
                if index < len(block.places) and block.places[index] - block.fragments[index].steps <= place:
                    yield block.fragments[index]

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
        view = self._view(game)
        with view.folding:
            return view.episodes.after(after, limit)

    def _totals(self, game: str) -> Totals:
        view = self._view(game)
        with view.folding:
            view.totals.advance()
            return view.totals

    def _view(self, game: str) -> _View:
        key = self._games.key(game)
        with self._lock:
            return self._views.setdefault(key, _View(self._keyspace, key))


def _pieces(fragments: Sequence[Fragment]) -> Iterator[Sequence[Fragment]]:
    """Of the size of a group, so that a large batch takes no more memory than a small one."""
    first, size = 0, 0
    for i, f in enumerate(fragments):
        size += len(f.obs) + len(f.action) + len(f.reward)
        if i + 1 - first == GROUP_FRAGMENTS or size >= GROUP:
            yield fragments[first : i + 1]
            first, size = i + 1, 0
    if first < len(fragments) or not fragments:
        yield fragments[first:]


def _spans(order: Order, begin: int, reached: list[int]) -> Iterator[tuple[int, Span]]:
    """Stretches after the cursor, each with its own; the log is not extended for more than there is in it."""
    for entry in order.entries(begin, enough=lambda: reached[0] > begin):
        at = entry.at
        for span in entry.spans:
            skipped = max(begin - at, 0)
            if skipped < span.steps:
                yield at + skipped, Span(span.day, span.bucket, span.begin + skipped, span.end)
            at += span.steps
        reached[0] = entry.end


def _joined(spans: Iterable[tuple[int, Span]]) -> Iterator[tuple[int, Span]]:
    """Neighbours as one: a reader who follows closely left many short entries behind, all of one bucket."""
    last: tuple[int, Span] | None = None
    for at, span in spans:
        if last is not None:
            before = last[1]
            if before.steps < JOINED and (before.bucket, before.end) == (span.bucket, span.begin):
                last = last[0], Span(span.day, span.bucket, before.begin, span.end)
                continue
            yield last
        last = at, span
    if last is not None:
        yield last
