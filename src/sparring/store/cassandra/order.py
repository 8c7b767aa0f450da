"""In which order fragments were stored, although many writers store them: decided by those who read.

Writers know nothing of each other and of no order; each only raises its own buckets' committed `steps`. A reader who
wants more than is ordered so far proposes the next entry of the game's *merge log*: which stretches of which buckets
come next. The entry's key is where it begins: the number of steps ordered before it. It is inserted only if there is
none with that key yet (Paxos). Of several readers one wins, and all go on from its entry. So:

- nothing is missed: an entry starts each bucket where the entry before ended it. A bucket is left out only when it is
  closed and all of it is in. A commit that becomes visible late is in a later entry;
- nothing is repeated: stretches of one bucket follow each other without overlap;
- a cursor is the number of steps before it, valid for ever and for all readers, and needs no clock.

A reader is as fresh as its last look at the buckets: `tail` looks whenever it runs out of ordered fragments.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator

import msgspec

from sparring.store.cassandra import heads
from sparring.store.cassandra.heads import BucketHead
from sparring.store.cassandra.keyspace import Keyspace
from sparring.store.cassandra.rows import encode

__all__ = ["Entry", "GameBuckets", "MergeLog", "Span"]

EPOCH = 24  # bits: a partition of the merge log spans 2^24 steps, more than four entries do
EPOCHS = 1 << 20  # at most: some 10^13 steps
ENTRY = 1 << 22  # steps in an entry, if one bucket does not have more
PAGE = 64  # entries read at once
NEW = 1000  # buckets taken into the log at once
ALL = (1 << 31) - 1
JOINED = 1 << 16  # steps of stretches that are read as one
IDLE = 600.0  # seconds after which a bucket that does not grow is closed, whoever has it


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A stretch of a bucket: places after `begin` up to `end`."""

    day: int
    bucket: int
    begin: int
    end: int

    @property
    def steps(self) -> int:
        return self.end - self.begin


class Entry(msgspec.Struct, array_like=True):
    at: int
    spans: list[Span]
    open: dict[int, BucketHead]  # buckets of which more may come, and how far they are ordered after this entry
    known: int  # the newest bucket looked at

    @property
    def end(self) -> int:
        return self.at + sum([span.steps for span in self.spans])


_decode = msgspec.msgpack.Decoder(Entry).decode


class GameBuckets:
    """A game's buckets as they are now. Kept: of those not closed and of new ones it asks again each time."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self._game = keyspace, game
        self._lock = threading.Lock()
        self._heads: dict[int, BucketHead] = {}
        self._grown: dict[int, float] = {}  # when we saw them grow

    def refresh(self, *, close_idle: bool = False) -> dict[int, BucketHead]:
        """`close_idle`: closes those that did not grow for a while. Their writers are gone, or open another one when
        more comes."""
        with self._lock:
            days = {bucket: head.day for bucket, head in self._heads.items() if not head.closed}
            days |= dict(self._keyspace.run("buckets", self._game, max(self._heads, default=0)))
            now = time.monotonic()
            for bucket, head in heads.read(self._keyspace, self._game, days).items():
                if head != self._heads.get(bucket):
                    self._heads[bucket], self._grown[bucket] = head, now
                if close_idle and not head.closed and now - self._grown[bucket] >= IDLE:
                    self._heads[bucket] = heads.close(self._keyspace, self._game, bucket, head)
            return dict(self._heads)


class MergeLog:
    """A game's merge log."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self._game, self.directory = keyspace, game, GameBuckets(keyspace, game)

    def entries(self, after: int) -> Iterator[Entry]:
        """From the one that holds the step after the cursor on. If there are none, the log is extended: no entry means
        that no more is committed."""
        epoch = after >> EPOCH
        entry = self._last(epoch, after) or (self._last(epoch - 1, after) if epoch else None)
        page = [entry] if entry is not None and entry.end > after else []
        yield from page
        while found := self._following(entry) or ([] if page else self._extend(entry)):
            yield from found
            entry, page = found[-1], found

    def spans(self, after: int) -> Iterator[tuple[int, Span]]:
        """The same as stretches, each with the cursor where it begins. Neighbours are joined: a reader who follows
        closely left many short entries behind, all of one bucket."""
        last: tuple[int, Span] | None = None
        for entry in self.entries(after):
            at = entry.at
            for span in entry.spans:
                begin, at = max(at, after), at + span.steps
                if begin >= at:
                    continue
                if last and last[1].steps < JOINED and (last[1].bucket, last[1].end) == (span.bucket, span.begin):
                    last = last[0], Span(span.day, span.bucket, last[1].begin, span.end)
                    continue
                if last:
                    yield last
                last = begin, Span(span.day, span.bucket, span.end - (at - begin), span.end)
        if last:
            yield last

    def tip(self) -> int:
        """The cursor behind all that is stored."""
        entry = self._newest()
        while found := self._following(entry) or self._extend(entry):
            entry = found[-1]
        return entry.end if entry else 0

    def _newest(self) -> Entry | None:
        """The last one there is: epochs follow each other without a gap."""
        epoch = bisect_left(range(EPOCHS), True, key=lambda epoch: self._last(epoch, ALL << EPOCH) is None)
        return self._last(epoch - 1, ALL << EPOCH) if epoch else None

    def _last(self, epoch: int, at: int) -> Entry | None:
        """The last entry of the epoch that begins at `at` or earlier."""
        rows = self._keyspace.run("merged before", self._game, epoch, at)
        return _decode(rows[0][0]) if rows else None

    def _following(self, entry: Entry | None) -> list[Entry]:
        """The next ones, some at once."""
        at = entry.end if entry else 0
        return [_decode(found) for (found,) in self._keyspace.run("merged", self._game, at >> EPOCH, at, PAGE)]

    def _extend(self, entry: Entry | None) -> list[Entry]:
        """The log by another entry, ours or that of who was faster; none when nothing was committed."""
        new = self._propose(entry, entry.end if entry else 0)
        if new is None:
            return []
        applied, row = self._keyspace.applied("merge", self._game, new.at >> EPOCH, new.at, encode(new))
        return [new if applied else _decode(row[-1])]

    def _propose(self, entry: Entry | None, at: int) -> Entry | None:
        """All that was committed since the entry, or as much of it as fits; none when nothing was."""
        before, known = (entry.open, entry.known) if entry else ({}, 0)
        buckets = sorted(self.directory.refresh(close_idle=True).items())
        found = dict([item for item in buckets if item[0] in before or item[0] > known][: len(before) + NEW])
        spans: list[Span] = []
        growing: dict[int, BucketHead] = {}
        room = ENTRY
        for bucket, head in found.items():
            read = before.get(bucket) or BucketHead(head.day)
            if head.steps > read.steps and room > 0:
                room -= head.steps - read.steps
                spans.append(Span(head.day, bucket, read.steps, head.steps))
                read = head
            if not (head.closed and read.steps == head.steps):
                growing[bucket] = BucketHead(read.day, read.steps)
        return Entry(at, spans, growing, max(found, default=known)) if spans else None
