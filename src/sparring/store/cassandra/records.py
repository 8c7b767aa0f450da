"""What a game's records say, which have its fragments without their columns, some 70 bytes each: how much there is, and
which episodes are complete.

Forwards they are summed up from the first one on, and the sums are kept. The newest episodes are found backwards. Each
page reads the records of twice REACH steps, or of twice ROWS fragments. The older half is there to complete episodes of
the newer one. So an episode whose fragments arrived further apart than that is not among them.
"""

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from sparring.experience import Fragment
from sparring.store.cassandra.keyspace import Keyspace
from sparring.store.cassandra.order import MergeLog, Span
from sparring.store.cassandra.rows import FragmentPart, decode_block, decode_parts, groups
from sparring.store.counts import Totals, UnfinishedEpisodes, pieces
from sparring.store.protocol import Episode, EpisodePage

__all__ = ["PROBES", "Records", "probe"]

READERS = 4  # who follow a game's episodes at the same time, each from where it is
UNFINISHED = 100_000  # episodes in memory of which more may come; those without news for the longest are let go
REACH, ROWS = 1 << 22, 50_000
WINDOW = REACH // 4  # steps whose places are looked up at once
PROBES = 64  # look-ups of single fragments on their way at once


class StoredRow(NamedTuple):
    part: FragmentPart
    when: float
    cursor: int
    span: Span


class EpisodeReader:
    """Of episodes: how far it is."""

    def __init__(self, mark: Any) -> None:
        self.mark = mark  # of erasures: after another one it is not to be used any more
        self.cursor = 0  # how far records were read
        self.given = 0  # the newest cursor that was asked for
        self.episodes = UnfinishedEpisodes(UNFINISHED)
        self.ready: list[Episode] = []

    def add(self, row: StoredRow) -> None:
        episode = self.episodes.add(row.part, row.part.ret, row.when, row.cursor)
        if episode is not None and row.cursor > self.given:
            self.ready.append(episode)


class Records:
    """Of one game, by its key."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self.game, self.order = keyspace, game, MergeLog(keyspace, game)
        self._lock = threading.Lock()  # guards the readers that nobody uses now
        self._readers: list[EpisodeReader] = []  # who was used longest ago comes first
        self._counting = threading.Lock()  # guards the rest
        self._mark: Any = None
        self._cursor, self._totals = 0, Totals()

    def totals(self) -> Totals:
        """Of all that is stored by now; begun anew after an erasure."""
        with self._counting:
            if (mark := self._keyspace.run("erasure", self.game)) != self._mark:
                self._mark, self._cursor, self._totals = mark, 0, Totals()
            for end, rows in self._forwards(self._cursor):
                self._cursor = end
                for row in rows:
                    self._totals.add(row.part, row.part.size, row.when)
            return self._totals

    def episodes(self, cursor: int, limit: int) -> list[Episode]:
        """For several who go on from where they were, such as a game's curves and its A/B test. Who asks goes on with
        the reader that is nearest behind; only who goes back behind all of them starts over."""
        mark = self._keyspace.run("erasure", self.game)
        with self._lock:
            self._readers = [reader for reader in self._readers if reader.mark == mark]
            behind = [reader for reader in self._readers if reader.given <= cursor]
            reader = max(behind, key=lambda reader: reader.given, default=EpisodeReader(mark))
            self._readers = [other for other in self._readers if other is not reader]
        reader.given = cursor
        reader.ready = [e for e in reader.ready if e.cursor > cursor]
        try:
            for end, rows in self._forwards(reader.cursor) if len(reader.ready) < limit else ():
                reader.cursor = end
                for row in rows:
                    reader.add(row)
                if len(reader.ready) >= limit:
                    break
            return reader.ready[:limit]
        finally:  # whatever happened: nothing that it read is lost
            with self._lock:
                self._readers = [*self._readers, reader][-READERS:]

    def newest(self, before: int | None, limit: int) -> EpisodePage:
        end = self.order.tip() if before is None else min(before - 1, self.order.tip())
        rows: list[StoredRow] = []
        known = 0
        for reached, some in self._backwards(end):
            rows += some
            if reached and (end - reached >= 2 * REACH or len(rows) >= 2 * ROWS):
                known = min(reached + REACH, rows[-ROWS].cursor if len(rows) >= ROWS else end)
                break
        found = [e for e in _episodes(rows) if e.cursor > known][::-1]
        if len(found) > limit:
            return EpisodePage(found[:limit], found[limit - 1].cursor)
        return EpisodePage(found, known + 1 if known else None)

    def episode(self, cursor: int, first: int, last: int | None) -> tuple[Episode, list[Fragment]] | None:
        rows: list[StoredRow] = []
        for reached, some in self._backwards(min(cursor, self.order.tip())):
            rows += some
            if not rows or rows[0].cursor != cursor:
                return None
            name = (rows[0].part.player, rows[0].part.episode)
            mine = [row for row in rows if (row.part.player, row.part.episode) == name]
            for episode in [e for e in _episodes(mine) if e.cursor == cursor]:
                places = pieces(episode, ((row.part, (row.span, row.part.place)) for row in mine), first, last)
                if places is None:
                    return None
                wanted = [msgspec.structs.replace(span, begin=place - 1) for span, place in places]
                found = probe(self._keyspace, self.game, wanted)
                return (episode, found) if len(found) == len(wanted) else None  # else: erased meanwhile
            if reached < cursor - REACH or len(rows) > ROWS:
                break
        return None

    def _forwards(self, after: int) -> Iterator[tuple[int, list[StoredRow]]]:
        """An entry of the order at a time, until there is no more: the cursor behind it, and its rows."""
        before = -1
        while after > before:
            before = after
            for entry in self.order.entries(before):
                asked = [self._keyspace.start("records", self.game, *msgspec.structs.astuple(s)) for s in entry.spans]
                rows, at = [], entry.at
                for span, answer in zip(entry.spans, self._keyspace.wait(asked), strict=True):
                    rows += _rows(at, span, answer)
                    at += span.steps
                yield (after := entry.end), rows

    def _backwards(self, end: int) -> Iterator[tuple[int, list[StoredRow]]]:
        """Rows with cursors up to `end`, the newest first, in stretches; each with where it begins."""
        while end > 0:
            low = max(end - WINDOW, 0)
            spans = list(takewhile(lambda found: found[0] < end, self.order.spans(low)))  # noqa: B023  # at once
            for at, span in reversed(spans):
                last = min(span.end, span.begin + end - at)
                answer = self._keyspace.run("records", self.game, span.day, span.bucket, span.begin, last)
                if last < span.end:  # the commit that goes on beyond it has one record for all of it
                    answer += self._keyspace.run("record", self.game, span.day, span.bucket, last)
                yield at, [row for row in reversed(_rows(at, span, answer)) if row.cursor <= end]
            end = low


def probe(keyspace: Keyspace, game: str, spans: Sequence[Span]) -> list[Fragment]:
    """The fragments that hold the stretches' first steps; an erased one has none."""
    found = []
    for some in groups(spans, PROBES, lambda _: 1):
        asked = [keyspace.start("block", game, *msgspec.structs.astuple(span)) for span in some]
        for span, rows in zip(some, keyspace.wait(asked), strict=True):
            for block in [decode_block(body) for (body,) in rows]:
                index = bisect_right(block.places, span.begin)
                if index < len(block.places) and block.places[index] - block.fragments[index].steps <= span.begin:
                    found.append(block.fragments[index])
    return found


def _rows(at: int, span: Span, answer: Iterable[tuple[Any, ...]]) -> list[StoredRow]:
    """Of a stretch's records, the first of which may have begun before it."""
    return [
        StoredRow(part, when, at + part.place - span.begin, span)
        for _, when, parts in answer
        for part in decode_parts(parts)
        if part.place > span.begin
    ]


def _episodes(newest_first: Sequence[StoredRow]) -> list[Episode]:
    """The complete ones, the oldest first."""
    episodes = UnfinishedEpisodes(sys.maxsize)
    added = [episodes.add(row.part, row.part.ret, row.when, row.cursor) for row in reversed(newest_first)]
    return [e for e in added if e is not None]
