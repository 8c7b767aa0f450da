"""In which order fragments were stored, although many writers store them: decided by those who read.

Writers know nothing of each other and of no order; each only raises its own buckets' committed `steps`. A reader who
wants more than is ordered so far proposes the next entry of the game's *merge log*: which stretches of which buckets
come next. The entry's key is where it begins, the number of steps ordered before it, and it is inserted only if there
is none with that key yet (Paxos): of several readers one wins, and all go on from its entry. So:

- nothing is missed: an entry starts each bucket where the entry before ended it, and a bucket is left out only when it
  is closed and all of it is in. A commit that becomes visible late is in a later entry;
- nothing is repeated: stretches of one bucket follow each other without overlap;
- a cursor is the number of steps before it, valid for ever and for all readers, and needs no clock.

A reader is as fresh as its last look at the buckets: `tail` looks whenever it runs out of ordered fragments.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import msgspec

from sparring.store.arrival import Unfinished
from sparring.store.cassandra import heads
from sparring.store.cassandra.heads import Head
from sparring.store.cassandra.keyspace import Keyspace
from sparring.store.cassandra.rows import Part, decode_parts
from sparring.store.protocol import Episode, VersionStats

__all__ = ["Directory", "Entry", "Episodes", "Order", "Span", "Totals"]

EPOCH = 24  # bits: a partition of the merge log spans 2^24 steps, more than four entries do
EPOCHS = 1 << 20  # at most: some 10^13 steps
ENTRY = 1 << 22  # steps in an entry, if one bucket does not have more
PAGE = 64  # entries read at once
KEPT = 1024  # entries in memory
NEW = 1000  # buckets taken into the log at once
ALL = (1 << 31) - 1
JOINED = 1 << 16  # steps of stretches that are read as one
IDLE = 600.0  # seconds after which a bucket that does not grow is closed, whoever has it
UNFINISHED = 100_000  # episodes in memory of which more may come; those without news for the longest are let go


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
    open: dict[int, Head]  # buckets of which more may come, and how far they are ordered after this entry
    known: int  # the newest bucket looked at

    @property
    def end(self) -> int:
        return self.at + sum([span.steps for span in self.spans])


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


class Directory:
    """A game's buckets as they are now. Kept: of those not closed and of new ones it asks again each time."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self._game = keyspace, game
        self._lock = threading.Lock()
        self._heads: dict[int, Head] = {}

    def refresh(self) -> dict[int, Head]:
        with self._lock:
            growing = {bucket: head for bucket, head in self._heads.items() if not head.closed}
            self._heads |= look(self._keyspace, self._game, max(self._heads, default=0), growing, ALL)
            return dict(self._heads)


def look(keyspace: Keyspace, game: str, known: int, growing: dict[int, Head], most: int) -> dict[int, Head]:
    """Buckets after `known`, and those that were growing when we last looked; by number."""
    days = {bucket: head.day for bucket, head in growing.items()}
    return heads.read(keyspace, game, days | dict(keyspace.run("buckets", game, known, most)))


class Order:
    """A game's merge log."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self._game = keyspace, game
        self._lock = threading.Lock()
        self._kept: dict[int, Entry] = {}  # by where they begin
        self._grown: dict[int, tuple[int, float]] = {}  # open buckets: their steps, and since when

    def entries(self, after: int) -> Iterator[Entry]:
        """From the one that holds the step after the cursor on. If there are none, the log is extended: no entry means
        that no more is committed."""
        entry, found = self._holding(after), False
        if entry is not None and entry.end > after:
            yield entry
            found = True
        while (entry := self._next(entry, extend=not found)) is not None:
            yield entry
            found = True

    def spans(self, after: int) -> Iterator[tuple[int, Span]]:
        """The same as stretches, each with the cursor where it begins. Neighbours are joined: a reader who follows
        closely left many short entries behind, all of one bucket."""
        last: tuple[int, Span] | None = None
        for entry in self.entries(after):
            at = entry.at
            for span in entry.spans:
                skipped = min(max(after - at, 0), span.steps)
                begin, at = at + skipped, at + span.steps
                span = Span(span.day, span.bucket, span.begin + skipped, span.end)
                if last and last[1].steps < JOINED and (last[1].bucket, last[1].end) == (span.bucket, span.begin):
                    last = last[0], Span(span.day, span.bucket, last[1].begin, span.end)
                    continue
                if last and last[1].steps:
                    yield last
                last = begin, span
        if last and last[1].steps:
            yield last

    def tip(self) -> int:
        """The cursor behind all that is stored."""
        entry = self._newest()
        while (following := self._next(entry)) is not None:
            entry = following
        return entry.end if entry else 0

    def _holding(self, after: int) -> Entry | None:
        for entry in reversed(list(self._kept.values())):
            if entry.at <= after <= entry.end:
                return entry
        epoch = after >> EPOCH
        return self._last(epoch, after) or (self._last(epoch - 1, after) if epoch else None)

    def _newest(self) -> Entry | None:
        """The last one there is: epochs follow each other without a gap."""
        epoch = bisect_left(range(EPOCHS), True, key=lambda epoch: self._last(epoch, ALL << EPOCH) is None)
        return self._last(epoch - 1, ALL << EPOCH) if epoch else None

    def _last(self, epoch: int, at: int) -> Entry | None:
        """The last entry of the epoch that begins at `at` or earlier."""
        for (entry,) in self._keyspace.run("merged before", self._game, epoch, at):
            return self._keep(entry)
        return None

    def _next(self, entry: Entry | None, *, extend: bool = True) -> Entry | None:
        at = entry.end if entry else 0
        if (kept := self._kept.get(at)) is not None:
            return kept
        following = [self._keep(found) for (found,) in self._keyspace.run("merged", self._game, at >> EPOCH, at, PAGE)]
        proposal = self._propose(entry, at) if extend and not following else None
        if proposal is not None:
            new = _encode(proposal)
            applied, row = self._keyspace.applied("merge", self._game, at >> EPOCH, at, new)
            following = [self._keep(new if applied else row[-1])]
        return following[0] if following else None

    def _propose(self, entry: Entry | None, at: int) -> Entry | None:
        """All that was committed since the entry, or as much of it as fits; none when nothing was."""
        before, known = (entry.open, entry.known) if entry else ({}, 0)
        found = look(self._keyspace, self._game, known, before, NEW)
        self._close_idle(found)
        spans: list[Span] = []
        growing: dict[int, Head] = {}
        room = ENTRY
        for bucket, head in sorted(found.items()):
            read = before.get(bucket) or Head(head.day)
            if head.steps > read.steps and room > 0:
                room -= head.steps - read.steps
                spans.append(Span(head.day, bucket, read.steps, head.steps))
                read = head
            if not (head.closed and read.steps == head.steps):
                growing[bucket] = Head(read.day, read.steps)
        return Entry(at, spans, growing, max(found, default=known)) if spans else None

    def _close_idle(self, found: dict[int, Head]) -> None:
        """Buckets that did not grow for a while: their writers are gone, or open another one when more comes."""
        now = time.monotonic()
        with self._lock:
            before, self._grown = self._grown, {}
            for bucket, head in found.items():
                steps, since = before.get(bucket, (-1, now))
                if not head.closed:
                    self._grown[bucket] = (steps, since) if steps == head.steps else (head.steps, now)
            idle = [bucket for bucket, (_, since) in self._grown.items() if now - since >= IDLE]
        for bucket in idle:
            found[bucket] = heads.close(self._keyspace, self._game, bucket, found[bucket])

    def _keep(self, body: bytes) -> Entry:
        if len(self._kept) >= KEPT:
            self._kept = {}
        entry = _decode(body)
        self._kept[entry.at] = entry
        return entry


class _Fold:
    """What goes through all records in their order; taken on from where it was, and begun anew after an erasure."""

    def __init__(self, keyspace: Keyspace, game: str, order: Order) -> None:
        self._keyspace, self._game, self._order = keyspace, game, order
        self._lock = threading.Lock()
        self._mark: Any = None
        self._reset()

    def _reset(self) -> None:
        self._cursor = 0  # how far records were read

    def _add(self, part: Part, at: int, when: float) -> None:
        """A fragment, with its cursor and when it came."""
        raise NotImplementedError

    def _require_mark(self) -> None:
        mark = self._keyspace.run("erasure", self._game)
        if mark != self._mark:
            self._mark = mark
            self._reset()

    def _fold(self) -> Iterator[None]:
        """An entry at a time, until there is no more."""
        before = -1
        while self._cursor > before:
            before = self._cursor
            for entry in self._order.entries(before):
                asked = [self._keyspace.start("records", self._game, *msgspec.structs.astuple(s)) for s in entry.spans]
                at = entry.at
                for span, rows in zip(entry.spans, self._keyspace.wait(asked), strict=True):
                    for _, when, parts in rows:
                        for part in decode_parts(parts):
                            self._add(part, at + part.place - span.begin, when)
                    at += span.steps
                self._cursor = entry.end
                yield


class Totals(_Fold):
    """What adding up all records gives. In memory: a few hundred bytes a player."""

    def _reset(self) -> None:
        super()._reset()
        self.fragments = self.steps = self.bytes = 0
        self.players: dict[str, list[Any]] = {}  # fragments, steps, last seen
        self._versions: dict[tuple[str, int], list[int]] = {}

    def advance(self) -> "Totals":
        """With all that is stored by now."""
        with self._lock:
            self._require_mark()
            for _ in self._fold():
                pass
        return self

    def _add(self, part: Part, at: int, when: float) -> None:
        self.fragments += 1
        self.steps += part.steps
        self.bytes += part.size
        player = self.players.setdefault(part.player, [0, 0, 0.0])
        player[0] += 1
        player[1] += part.steps
        player[2] = max(player[2], when)
        version = self._versions.setdefault((part.model or "", -1 if part.version is None else part.version), [0, 0])
        version[0] += 1
        version[1] += part.steps

    @property
    def versions(self) -> list[VersionStats]:
        return [
            VersionStats(model or None, None if version < 0 else version, *counts)
            for (model, version), counts in sorted(self._versions.items())
        ]


class Episodes(_Fold):
    """Complete episodes in order, for a reader who goes on from where it was; one who goes back starts over."""

    def _reset(self) -> None:
        super()._reset()
        self._given = 0  # the newest cursor that was asked for
        self._ready: list[Episode] = []
        self._unfinished: dict[tuple[str, str], Unfinished] = {}

    def after(self, cursor: int, limit: int) -> list[Episode]:
        with self._lock:
            self._require_mark()
            if cursor < self._given:
                self._reset()
            self._given = cursor
            self._ready = [e for e in self._ready if e.cursor > cursor]
            for _ in self._fold() if len(self._ready) < limit else ():
                if len(self._ready) >= limit:
                    break
            return self._ready[:limit]

    def _add(self, part: Part, at: int, when: float) -> None:
        name = (part.player, part.episode)
        whole = part.start == 0 and part.ended
        episode = Unfinished() if whole else self._unfinished.pop(name, Unfinished())
        if not episode.add(part, part.ret):
            self._unfinished[name] = episode  # the newest news last
            if len(self._unfinished) > UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
        elif at > self._given:
            self._ready.append(Episode(*name, episode.steps, episode.ret, when, episode.model, episode.version, at))
