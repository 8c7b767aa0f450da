"""A store on a Cassandra cluster: upserts only, any number of writers and readers, no clock that matters.

- `block`: fragments, some 32 KiB of neighbours a row, in partitions `(game, day, bucket)`. A bucket belongs to one
  writer, who opens the next one when it has 64 MiB: their number follows the load. A fragment's place in its bucket is
  the number of steps until it, so a random step finds its fragment with one look-up (`sample`).
- `bucket`: the directory. What lies behind a bucket's committed `steps` does not exist. (`buckets`: how it is written.)
- `claim`: where ids went: a pure function of the id says where to look, whatever day and to whomever it comes again.
- `record`: what each commit held without the columns: counts, players, versions and episodes are folds of these.
- `merge`: the order of it all, decided by readers. (`order`: why `tail` misses nothing and repeats nothing.)

Lightweight transactions decide who owns a bucket's number, which entry of the order is next and which spaces a game
has; none is in the way of an append.
"""

import threading
import time
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
from sparring.store.arrival import Submission, encoder, failed, refusal, require_checked, require_same, stripes
from sparring.store.buckets import (
    BLOCK,
    GROUP,
    GROUP_FRAGMENTS,
    Block,
    Part,
    Writer,
    decode_block,
    decode_parts,
    encode_block,
    encode_parts,
    fragment_at,
)
from sparring.store.keyspace import Address, Keyspace
from sparring.store.order import Directory, Episodes, Head, Order, Span, Totals
from sparring.store.protocol import Episode, Outcome, PlayerStats, Refused, Stats, StoreBusy, Tail, VersionStats

__all__ = ["CassandraStore"]

T = TypeVar("T")
ANSWER = 32 << 20  # bytes in one answer of `tail` or piece of `scan`: fragments of images are large
PIECE = 1000  # fragments in a piece
PAGE = 2 << 20  # bytes asked for at once …
MAX_ROWS = 256  # … if they are as small as the last ones were …
AHEAD = 4  # … and questions on their way while one's answer is used: so much memory a reader takes
EVERYTHING = 1 << 30  # a limit that is none
PROBES = 64  # look-ups of `sample` on their way at once
SPARSE = 50  # with fewer than one step in so many left by erasures, fragments are counted instead of probed for
LOCK = 60  # seconds after which an eraser that died no longer keeps others waiting


class CassandraStore:
    """The store at cassandra://HOST[:PORT][,HOST…]/KEYSPACE. `readonly`: nothing is written but the order of things."""

    def __init__(self, address: str, *, readonly: bool = False) -> None:
        self.address = Address.parse(address)
        self._keyspace = Keyspace(self.address)
        self._writer = None if readonly else Writer(self._keyspace)
        self._lock = threading.RLock()
        self._width = BLOCK  # bytes of a block, as they were in the last page that was read
        self._views: dict[tuple[str, str], Any] = {}
        self._folding = threading.RLock()  # guards totals and episodes, which are brought up to date by one at a time

    def close(self) -> None:
        """Writes what was submitted, then closes. Twice is fine."""
        if self._writer is not None:
            self._writer.close()
        self._keyspace.close()

    def register(self, game: Game) -> None:
        self._writing()
        applied, row = self._keyspace.applied("register", game.name, game.to_json().decode())
        if not applied:
            require_same(Game.from_json(row[-1]), game)

    def games(self) -> list[Game]:
        return sorted((Game.from_json(spec) for (spec,) in self._keyspace.run("games")), key=lambda game: game.name)

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
        """Looks through all records of the game; one player at a time. The disks forget with the next compactions after
        `gc_grace_seconds`."""
        self._writing().note_refusals()  # the player's may still be on their way
        owner, keyspace = uuid.uuid4(), self._keyspace
        while not keyspace.applied("take lock", f"erase {game}", owner, LOCK)[0]:
            time.sleep(0.2)
        try:
            erased = sum(
                self._erase(game, bucket, head, player) for bucket, head in self._directory(game).refresh().items()
            )
            for writer, slot, who in keyspace.run("quarantined", game):
                if who == player:
                    keyspace.run("release", game, writer, slot)
            if erased:
                keyspace.run("mark erasure", game, uuid.uuid4())
        finally:
            keyspace.applied("drop lock", f"erase {game}", owner)
        return erased

    def _erase(self, game: str, bucket: int, head: Head, player: str) -> int:
        keyspace, partition = self._keyspace, (game, head.day, bucket)
        erased = 0
        for place, _, parts in keyspace.run("records", *partition, 0, head.steps):
            all_parts = decode_parts(parts)
            gone = [part for part in all_parts if part.player == player]
            if not gone:
                continue
            self._erase_from_blocks(partition, gone[0].place - gone[0].steps, place, player)
            left = encode_parts([part for part in all_parts if part.player != player])
            keyspace.run("replace record", left, *partition, place)
            erased += len(gone)
        return erased

    def _erase_from_blocks(self, partition: tuple[str, int, int], begin: int, end: int, player: str) -> None:
        """What replaces a block is made later than it, also by an eraser whose clock is behind."""
        futures = []
        for place, body, written in self._keyspace.run("blocks", *partition, begin, end):
            block = decode_block(body)
            left = [(at, f) for at, f in zip(block.places, block.fragments, strict=True) if f.player != player]
            now = max(time.time_ns() // 1000, written + 1)
            if not left:
                futures.append(self._keyspace.start("delete", now, *partition, place))
            elif len(left) < len(block.places):
                body = encode_block([at for at, _ in left], [encoder.encode(f) for _, f in left])
                futures.append(self._keyspace.start("replace", now, body, *partition, place))
        with self._keyspace.asking():
            for future in futures:
                future.result()

    def _writing(self) -> Writer:
        if self._writer is None:
            raise SparringError(f"the store {self.address} is open for reading only")
        return self._writer

    # Reading fragments

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        order = self._order(game)
        if after < 0:
            return Tail([], order.tip())
        limit = max(limit, 1)
        fragments: list[Fragment] = []
        cursor, size = after, 0
        for at, span, block, width in self._follow(game, order, after, limit):
            taken = block.fragments[: limit - len(fragments)]
            fragments += taken
            cursor = at + block.places[len(taken) - 1] - span.begin
            size += width
            if len(fragments) == limit or size >= ANSWER:
                break
        return Tail(fragments, cursor)

    def _follow(self, game: str, order: Order, after: int, limit: int) -> Iterator[tuple[int, Span, Block, int]]:
        """What blocks hold after the cursor, each with its span, the cursor where that begins, and the block's size."""
        spans: list[tuple[int, Span]] = []
        found = False
        while not found:
            wanted, begin = 0, after
            for entry in order.entries(begin, enough=lambda: bool(spans)):
                at = entry.at
                for span in entry.spans:
                    end = at + span.end - span.begin
                    if end > begin:
                        cut = _cut(span, max(begin - at, 0))
                        spans.append((max(begin, at), cut))
                        wanted += cut.fragments
                    at = end
                after = entry.end
                if wanted >= limit:
                    break
            if not spans:
                return
            for row in self._blocks(game, spans, limit):
                found = True
                yield row
            spans.clear()  # if nothing was found, all of it was erased: on with what comes after it

    def _blocks(self, game: str, spans: list[tuple[int, Span]], limit: int) -> Iterator[tuple[int, Span, Block, int]]:
        """Of the first block of a span some may lie before it: perhaps all that erasures left of it."""
        for (at, span), body in self._read(game, _joined(spans), limit + 1):
            block = decode_block(body)
            first = bisect_right(block.places, span.begin)
            if first:
                block = Block(block.places[first:], block.fragments[first:])
            if block.places:
                yield at, span, block, len(body)

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        spans = [
            (0, Span(head.day, bucket, begin, end, *_part_of(head, (end - begin) / head.steps)))
            for bucket, head in sorted(self._directory(game).refresh().items())
            for begin, end in stripes(0, head.steps, share, of, salt=bucket)
        ]
        piece: list[Fragment] = []
        size = 0
        for _, body in self._read(game, _joined(spans), EVERYTHING):
            piece += decode_block(body).fragments
            size += len(body)
            if len(piece) >= PIECE or size >= ANSWER:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece

    def _read(
        self, game: str, spans: Iterable[tuple[int, Span]], limit: int
    ) -> Iterator[tuple[tuple[int, Span], bytes]]:
        """Blocks that end in the spans, in order; the next questions are on their way while an answer is used."""
        waiting: deque[tuple[tuple[int, Span], Any]] = deque()
        spans = iter(spans)
        while True:
            while len(waiting) < AHEAD and (span := next(spans, None)) is not None:
                waiting.append((span, self._ask(game, span[1], limit)))
            if not waiting:
                return
            span, future = waiting.popleft()
            for (body,) in self._pages(future):
                yield span, body

    def _ask(self, game: str, span: Span, limit: int) -> Any:
        width = max(span.bytes // max(span.fragments, 1), self._width)
        size = min(max(PAGE // width, 16), MAX_ROWS)
        return self._keyspace.start(
            "slice", game, span.day, span.bucket, span.begin, span.end, min(limit, EVERYTHING), fetch_size=size
        )

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
        buckets = sorted((number, head) for number, head in self._directory(game).refresh().items() if head.steps)
        ends = np.cumsum([head.steps for _, head in buckets])
        total = int(ends[-1]) if buckets else 0
        live = self._live(game, total)
        if steps <= 0:
            return []
        if steps >= live:
            return [f for piece in self.scan(game) for f in piece]
        width = max(total // sum(head.fragments for _, head in buckets), 1)  # steps of a fragment, about
        drawn: list[Fragment] = []
        missing = steps
        while missing > 0:
            wanted = missing // width + 1
            if live * SPARSE < total:
                found = self._pick(game, buckets, rng, wanted)
            else:
                found = self._probe(game, buckets, ends, rng.integers(total, size=min(wanted * total // live, PROBES)))
            for f in found:
                drawn.append(f)
                missing -= f.steps
                if missing <= 0:
                    break
        return drawn

    def _live(self, game: str, total: int) -> int:
        """Steps that are not erased. Without any erasure, the directory says how many there are."""
        return self._totals(game).steps if self._keyspace.run("erasure", game) else total

    def _probe(self, game: str, buckets: list[tuple[int, Head]], ends: Any, steps: Any) -> Iterator[Fragment]:
        """The fragments that hold these steps, counted over all buckets; an erased one has none."""
        asked = []
        for step, index in zip(steps.tolist(), np.searchsorted(ends, steps, side="right").tolist(), strict=True):
            bucket, head = buckets[index]
            place = step - (int(ends[index]) - head.steps)
            asked.append((place, self._keyspace.start("slice", game, head.day, bucket, place, head.steps, 1)))
        for place, future in asked:
            with self._keyspace.asking():
                rows = future.result().current_rows
            for (body,) in rows:
                block = decode_block(body)
                index = bisect_right(block.places, place)
                if index < len(block.places) and block.places[index] - block.fragments[index].steps <= place:
                    yield block.fragments[index]

    def _pick(
        self, game: str, buckets: list[tuple[int, Head]], rng: np.random.Generator, count: int
    ) -> Iterator[Fragment]:
        """Where so much was erased that probes mostly find nothing: looks at the records of all there is."""
        where: list[tuple[tuple[str, int, int], Part]] = []
        for bucket, head in buckets:
            partition = (game, head.day, bucket)
            for _, _, parts in self._keyspace.run("records", *partition, 0, head.steps):
                where += [(partition, part) for part in decode_parts(parts)]
        weights = np.array([part.steps for _, part in where], float)
        for index in rng.choice(len(where), count, p=weights / weights.sum()).tolist() if where else ():
            partition, part = where[index]
            for (body,) in self._keyspace.run("holding", *partition, part.place):
                fragment = fragment_at(body, part.place)
                if fragment is not None:
                    yield fragment

    # Counting

    def stats(self, game: str) -> Stats:
        totals = self._totals(game)
        rejected = sum(count for (count,) in self._keyspace.run("rejected", game)) if self._is_game(game) else 0
        return Stats(totals.fragments, totals.steps, len(totals.players), totals.bytes, rejected)

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        players = self._totals(game).players
        newest = sorted(list(players.items()), key=lambda item: -item[1][2])[:limit]
        return [PlayerStats(name, *counts) for name, counts in newest]

    def versions(self, game: str) -> list[VersionStats]:
        return self._totals(game).versions

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        with self._folding:
            episodes: Episodes = self._view("episodes", game, lambda: Episodes(self._keyspace, game, self._order(game)))
            return episodes.after(after, limit)

    def _is_game(self, game: str) -> bool:
        return bool(self._keyspace.run("game", game))

    def _totals(self, game: str) -> Totals:
        with self._folding:
            totals: Totals = self._view("totals", game, lambda: Totals(self._keyspace, game, self._order(game)))
            totals.advance()
            return totals

    def _order(self, game: str) -> Order:
        order: Order = self._view("order", game, lambda: Order(self._keyspace, game))
        return order

    def _directory(self, game: str) -> Directory:
        directory: Directory = self._view("directory", game, lambda: Directory(self._keyspace, game))
        return directory

    def _view(self, kind: str, game: str, make: Any) -> Any:
        self._keyspace.require_open()
        with self._lock:
            if (kind, game) not in self._views:
                self._views[kind, game] = make()
            return self._views[kind, game]


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


def _part_of(head: Head, share: float) -> tuple[int, int]:
    return max(int(head.fragments * share), 1), int(head.bytes * share)


def _cut(span: Span, steps: int) -> Span:
    """Without its first steps."""
    share = 1 - steps / (span.end - span.begin)
    counts = max(int(span.fragments * share), 1), int(span.bytes * share)
    return Span(span.day, span.bucket, span.begin + steps, span.end, *counts)


def _joined(spans: list[tuple[int, Span]]) -> list[tuple[int, Span]]:
    """Neighbours as one: a reader who follows closely left many short entries behind, all of one bucket."""
    joined: list[tuple[int, Span]] = []
    for at, span in spans:
        if joined:
            first, last = joined[-1]
            if (last.day, last.bucket, last.end) == (span.day, span.bucket, span.begin):
                counts = last.fragments + span.fragments, last.bytes + span.bytes
                joined[-1] = first, Span(last.day, last.bucket, last.begin, span.end, *counts)
                continue
        joined.append((at, span))
    return joined
