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
from collections import OrderedDict
from collections.abc import Callable, Iterator
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
ENTRY = 1 << 22  # steps in an entry, if one bucket does not have more
PAGE = 64  # entries read at once
KEPT = 1024  # entries in memory
NEW = 1000  # buckets taken into the log at once
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
            found = look(self._keyspace, self._game, max(self._heads, default=0), growing)
            self._heads.update(found)
            while len(found) >= NEW:
                found = look(self._keyspace, self._game, max(self._heads), {})
                self._heads.update(found)
            return dict(self._heads)


def look(keyspace: Keyspace, game: str, known: int, growing: dict[int, Head]) -> dict[int, Head]:
    """Buckets after `known`, and those that were growing when we last looked; by number."""
    new = keyspace.start("buckets", game, known, NEW)
    found = heads.read(keyspace, game, {bucket: head.day for bucket, head in growing.items()})
    with keyspace.asking():
        return found | heads.read(keyspace, game, dict(new.result().all()))


class Order:
    """A game's merge log."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self._game = keyspace, game
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Entry] = OrderedDict()  # by where they begin
        self._grown: dict[int, tuple[int, float]] = {}  # open buckets: their steps, and since when

    def entries(self, after: int, enough: Callable[[], bool] = lambda: False) -> Iterator[Entry]:
        """From the one that holds the step after the cursor on; the log is extended when it is at its end, unless the
        caller has `enough` by then."""
        entry = self._holding(after)
        if entry is not None and entry.end > after:
            yield entry
        while (entry := self._next(entry, enough)) is not None:
            yield entry

    def tip(self) -> int:
        """The cursor behind all that is stored."""
        entry = self._newest()
        while (following := self._next(entry)) is not None:
            entry = following
        return entry.end if entry else 0

    def _holding(self, after: int) -> Entry | None:
        with self._lock:
            for entry in reversed(self._kept.values()):
                if entry.at <= after <= entry.end:
                    return entry
        return self._before(after >> EPOCH, after)

    def _newest(self) -> Entry | None:
        """Some entry near the end: epochs follow each other without a gap."""
        epoch, step = 0, 1
        while self._before(epoch + step, (epoch + step + 1) << EPOCH, back=False) is not None:
            epoch, step = epoch + step, step * 2
        while step > 1:
            step //= 2
            if self._before(epoch + step, (epoch + step + 1) << EPOCH, back=False) is not None:
                epoch += step
        return self._before(epoch, (epoch + 1) << EPOCH)

    def _before(self, epoch: int, at: int, *, back: bool = True) -> Entry | None:
        """The last entry of the epoch, or of the one before, that begins at `at` or earlier."""
        for candidate in (epoch, epoch - 1) if back and epoch else (epoch,):
            for (entry,) in self._keyspace.run("merged before", self._game, candidate, at):
                return self._keep(_decode(entry))
        return None

    def _next(self, entry: Entry | None, enough: Callable[[], bool] = lambda: False) -> Entry | None:
        at = entry.end if entry else 0
        with self._lock:
            kept = self._kept.get(at)
        if kept is not None:
            return kept
        if (following := self._read(at)) is not None:
            return following
        proposal = None if enough() else self._propose(entry, at)
        if proposal is None:
            return None
        applied, row = self._keyspace.applied("merge", self._game, at >> EPOCH, at, _encode(proposal))
        return self._keep(proposal if applied else _decode(row[-1]))

    def _read(self, at: int) -> Entry | None:
        found = [_decode(entry) for (entry,) in self._keyspace.run("merged", self._game, at >> EPOCH, at, PAGE)]
        for entry in found:
            self._keep(entry)
        return found[0] if found else None

    def _propose(self, entry: Entry | None, at: int) -> Entry | None:
        """All that was committed since the entry, or as much of it as fits; none when nothing was."""
        before, known = (entry.open, entry.known) if entry else ({}, 0)
        found = before | look(self._keyspace, self._game, known, before)
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

    def _keep(self, entry: Entry) -> Entry:
        with self._lock:
            self._kept[entry.at] = entry
            self._kept.move_to_end(entry.at)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return entry


def _parts(keyspace: Keyspace, game: str, entry: Entry) -> Iterator[tuple[int, float, Part]]:
    """Each fragment of an entry, with its cursor and when it came."""
    asked = [keyspace.start("records", game, s.day, s.bucket, s.begin, s.end) for s in entry.spans]
    at = entry.at
    for span, future in zip(entry.spans, asked, strict=True):
        with keyspace.asking():
            rows = future.result().all()
        for _, when, parts in rows:
            for part in decode_parts(parts):
                yield at + part.place - span.begin, when, part
        at += span.steps


class Totals:
    """What adding up all records gives; taken on from where it was. In memory: a few hundred bytes a player."""

    def __init__(self, keyspace: Keyspace, game: str, order: Order) -> None:
        self._keyspace, self._game, self._order = keyspace, game, order
        self._mark: Any = None
        self._reset()

    def _reset(self) -> None:
        self._cursor = 0
        self.fragments = self.steps = self.bytes = 0
        self.players: dict[str, list[Any]] = {}  # fragments, steps, last seen
        self._versions: dict[tuple[str, int], list[int]] = {}

    def advance(self) -> None:
        rows = self._keyspace.run("erasure", self._game)
        if rows and rows[0][0] != self._mark:
            self._mark = rows[0][0]
            self._reset()
        for entry in self._order.entries(self._cursor):
            for _, when, part in _parts(self._keyspace, self._game, entry):
                self._add(part, when)
            self._cursor = entry.end

    def _add(self, part: Part, when: float) -> None:
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


class Episodes:
    """Complete episodes in order, for a reader who goes on from where it was; one who goes back starts over."""

    def __init__(self, keyspace: Keyspace, game: str, order: Order) -> None:
        self._keyspace, self._game, self._order = keyspace, game, order
        self._mark: Any = None
        self._reset()

    def _reset(self) -> None:
        self._cursor = 0  # how far records were read
        self._given = 0  # the newest cursor that was asked for
        self._ready: list[Episode] = []
        self._unfinished: dict[tuple[str, str], Unfinished] = {}

    def after(self, cursor: int, limit: int) -> list[Episode]:
        rows = self._keyspace.run("erasure", self._game)
        if cursor < self._given or (rows and rows[0][0] != self._mark):
            self._mark = rows[0][0] if rows else None
            self._reset()
        self._given = cursor
        self._ready = [e for e in self._ready if e.cursor > cursor]
        if len(self._ready) < limit:
            for entry in self._order.entries(self._cursor):
                for at, when, part in _parts(self._keyspace, self._game, entry):
                    self._add(at, when, part, cursor)
                self._cursor = entry.end
                if len(self._ready) >= limit:
                    break
        return self._ready[:limit]

    def _add(self, at: int, when: float, part: Part, cursor: int) -> None:
        name = (part.player, part.episode)
        whole = part.start == 0 and part.ended
        episode = Unfinished() if whole else self._unfinished.pop(name, Unfinished())
        if not episode.add(part, part.ret):
            self._unfinished[name] = episode  # the newest news last
            if len(self._unfinished) > UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
            return
        if at > cursor:
            self._ready.append(Episode(*name, episode.steps, episode.ret, when, episode.model, episode.version, at))
