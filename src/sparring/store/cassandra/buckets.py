"""Writing to Cassandra: group commit into buckets that belong to one writer each.

A group goes in four steps, each acknowledged by the replicas before the next: *claim* its ids in the name of the bucket
they will be in, *look* who else claimed them, *put* the fragments and the commit's record, *commit* by raising the
bucket's head. Up to the last step nobody sees anything of it. While one group is put, the next one is claimed.

Why a fragment is stored once: a claim stands for its fragment if the bucket's head reaches beyond it. Two writers with
the same fragment each claim before they look, so at least one sees the other's claim. If that is committed, it answers
"duplicate". If not, it gives the other a moment, and then closes the other's bucket: now the claim is committed, or
never will be, because a commit is applied only to an open head. The other's commit fails then, and it runs its group
again, in a new bucket, where it sees what happened. The moment is politeness: nothing is wrong if it is too short.
"""

import logging
import random
import threading
import time
import uuid
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from sparring.errors import SparringError
from sparring.store import arrival
from sparring.store.arrival import Submission
from sparring.store.cassandra import heads
from sparring.store.cassandra.heads import Head
from sparring.store.cassandra.keyspace import Games, Keyspace
from sparring.store.cassandra.rows import (
    Part,
    Place,
    checksum,
    decode_place,
    encode_block,
    encode_parts,
    encode_place,
    locate,
)
from sparring.store.protocol import FragmentRefused, NotRegistered, Outcome, StoreBusy

__all__ = ["BLOCK", "GROUP", "GROUP_FRAGMENTS", "Refusal", "Writer"]

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20  # of fragments in a partition; more arrive at most with the last group
BUCKET_FRAGMENTS = 50_000  # and so few that erasing all of them leaves fewer tombstones than a read may meet
BUCKET_STEPS = 1 << 22
GROUP, GROUP_FRAGMENTS = 4 << 20, 1000  # bytes and fragments in one commit, if one caller does not bring more
BLOCK = 32 << 10  # bytes of a row, unless one fragment has more: a look-up of one fragment reads all of it
PENDING = 64 << 20  # bytes waiting to be written
FRAGMENT = 8 << 20  # bytes of one fragment: Cassandra takes up to 16 MiB in one write, with its defaults
PATIENCE = 1.0  # seconds, at most, for another writer to commit what we have, too
ATTEMPTS = 8  # to commit a group whose bucket others close
IDLE = 300.0  # seconds after which a bucket of ours is not used again: readers close those that do not grow
DAY = 86_400
QUARANTINE = 4096  # refused fragments kept of each writer
OVERHEAD = 64  # bytes of a row besides its body
CLAIM_BYTES = 120  # of a claim, about, in a batch

Refusal = tuple[float, str, str, str, str]  # time, game, player, fragment's id, reason
T = TypeVar("T")


class Bucket:
    """One partition of fragments, which only this writer writes."""

    def __init__(self, game: str, day: int, number: int) -> None:
        self.game, self.number = game, number
        self.head = Head(day)  # with all groups so far, committed or on their way
        self.used = time.monotonic()
        self.dead = False  # a group failed, or others closed it

    @property
    def full(self) -> bool:
        head = self.head
        return (head.bytes >= BUCKET_BYTES or head.fragments >= BUCKET_FRAGMENTS or head.steps >= BUCKET_STEPS) or (
            head.day != _today() or time.monotonic() > self.used + IDLE
        )

    @property
    def partition(self) -> tuple[str, int, int]:
        return self.game, self.head.day, self.number


def _today() -> int:
    return int(time.time() // DAY)


class _Append:
    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.size = submission.size
        self.checksums = [checksum(f) for f in submission.fragments]
        self.future: Future[list[Outcome]] = Future()
        self.outcomes: list[Outcome] = [Outcome.DUPLICATE] * len(submission.fragments)
        self.number = self.attempts = 0


class _Arrival:
    """A fragment of a submission, and where it goes if it is new."""

    __slots__ = ("bucket", "fragment", "id", "index", "place", "shard", "work")

    def __init__(self, work: _Append, index: int, bucket: Bucket) -> None:
        self.work, self.index, self.bucket, self.place = work, index, bucket, 0
        self.fragment = work.submission.fragments[index]
        self.shard, self.id = locate(self.fragment.id)

    @property
    def checksum(self) -> int:
        return self.work.checksums[self.index]

    @property
    def body(self) -> memoryview:
        return self.work.submission.bodies[self.index]

    @property
    def part(self) -> Part:
        f, s, i = self.fragment, self.work.submission, self.index
        ret, size = s.returns[i], s.sizes[i]
        return Part(self.place, f.steps, f.player, f.episode, f.start, f.ended, ret, size, f.model, f.version)


class _Group:
    """What is committed together."""

    def __init__(self, works: list[_Append]) -> None:
        self.works = works
        self.buckets: dict[str, Bucket] = {}  # by game's key
        self.futures: list[Any] = []
        self.commits: list[tuple[Bucket, Head, Head]] = []  # from which head to which


class Writer:
    def __init__(self, keyspace: Keyspace, games: Games) -> None:
        self._keyspace, self._games = keyspace, games
        self._name = uuid.uuid4()
        self._open: dict[str, Bucket] = {}  # by game's key
        self._flying: _Group | None = None  # put, and not committed yet
        self._groups = 0
        self._counts: Counter[str] = Counter()  # refused, by game's key
        self._slots: Counter[str] = Counter()
        self._noting = threading.Lock()  # guards the two
        self._lock = threading.Lock()  # guards the rest
        self._room = threading.Condition(self._lock)
        self._call = threading.Condition(self._lock)
        self._closed = False
        self._pending: deque[_Append] = deque()
        self._pending_bytes = self._taken = 0
        self._refusals: deque[Refusal] = deque(maxlen=QUARANTINE)
        self._refused: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="sparring-store", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> "Future[list[Outcome]]":
        return self._put(submission, wait=False).future

    def append(self, submissions: Iterable[Submission]) -> list[Outcome]:
        works = [self._put(submission, wait=True) for submission in submissions]
        return [outcome for work in works for outcome in work.future.result()]

    def refuse(self, refusal: Refusal) -> None:
        with self._lock:
            self._require_open()
            self._refusals.append(refusal)
            self._refused[refusal[1]] += 1
            self._call.notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._call.notify()
        self._thread.join()

    def _put(self, submission: Submission, *, wait: bool) -> _Append:
        work = _Append(submission)
        for f, body in zip(submission.fragments, submission.bodies, strict=True):
            if len(body) > FRAGMENT:
                raise FragmentRefused(
                    f"fragment {f.id!r} has {len(body) >> 20} MiB, at most {FRAGMENT >> 20} fit: cut shorter"
                )
        with self._lock:
            self._require_open()
            while self._pending and self._pending_bytes + work.size > PENDING:
                if not wait:
                    raise StoreBusy(f"{self._pending_bytes >> 20} MiB are waiting to be written: try again in a second")
                self._room.wait()
                self._require_open()
            work.number = self._taken = self._taken + 1
            self._pending.append(work)
            self._pending_bytes += work.size
            self._call.notify()
        return work

    def _require_open(self) -> None:
        if self._closed:
            raise SparringError(f"the store {self._keyspace.address} is closed")

    # The thread

    def _run(self) -> None:
        while (works := self._take()) is not None:
            if works:
                self._guard(self._begin, _Group(works))
            else:
                self._land()
            self.note_refusals()
        self._close_buckets()
        self.note_refusals()

    def _take(self) -> list[_Append] | None:
        """What is next; nothing: finish what is on its way first; none: that was all."""
        with self._lock:
            while not (self._pending or self._refusals or self._closed or self._flying):
                self._call.wait()
            if self._closed and not self._pending and not self._flying:
                return None
            works: list[_Append] = []
            size = count = 0
            while self._pending and (not works or (size + self._pending[0].size <= GROUP and count < GROUP_FRAGMENTS)):
                work = self._pending.popleft()
                self._pending_bytes -= work.size
                size += work.size
                count += len(work.outcomes)
                if work.attempts or work.future.set_running_or_notify_cancel():
                    works.append(work)
            self._room.notify_all()
            return works

    def _guard(self, step: Callable[[_Group], None], group: _Group) -> None:
        """Whatever goes wrong, its callers are told and its buckets are not used again: others close them."""
        try:
            step(group)
        except Exception as error:
            if not isinstance(error, SparringError | OSError):  # one nobody thought of
                log.exception("a group failed")
                error = SparringError(f"the store {self._keyspace.address} failed: see its log")
            for bucket in group.buckets.values():
                bucket.dead = True
            _fail(group.works, error)

    def _begin(self, group: _Group) -> None:
        """Claims, looks and puts; commits the group before."""
        arrivals: dict[str, list[_Arrival]] = {}
        for work in group.works:
            for index, (f, bucket) in enumerate(self._buckets(work, group)):
                arrivals.setdefault(f.id, []).append(_Arrival(work, index, bucket))
        firsts = [same[0] for same in arrivals.values()]
        known = self._known(firsts, group)
        self._put_rows(group, _sort(arrivals, known))
        self._land()
        self._flying = group

    def _buckets(self, work: _Append, group: _Group) -> list[tuple[Any, Bucket]]:
        """Each fragment with its game's bucket; none, if one's game is not registered."""
        keys = {}
        for name, schema in work.submission.games:
            found = self._games.find(name, schema)
            if found is None or found[1] != schema:
                work.future.set_exception(NotRegistered(f"no game {name!r} with schema {schema!r} is registered here"))
                return []
            keys[name] = found[0]
        for key in keys.values():
            if key not in group.buckets:
                group.buckets[key] = self._bucket(key)
        return [(f, group.buckets[keys[f.game]]) for f in work.submission.fragments]

    def _known(self, firsts: list[_Arrival], group: _Group) -> dict[bytes, int | None]:
        """Claims all; of those that are there already, their contents' checksums by id; none: it was erased."""
        self._groups += 1
        places = {
            key: encode_place(Place(key, bucket.number, bucket.head.steps, self._groups))
            for key, bucket in group.buckets.items()
        }
        self._write("claim", [(a.shard, a.id, places[a.bucket.game], a.checksum) for a in firsts])
        shards: dict[int, list[bytes]] = {}
        for a in firsts:
            shards.setdefault(a.shard, []).append(a.id)
        looks = [self._keyspace.start("claims", shard, ids) for shard, ids in shards.items()]
        mine = set(places.values())
        with self._keyspace.asking():
            others = [row for future in looks for row in future.result() if row[1] not in mine]
        if not others:
            return {}
        self._land()  # some may be ours, of the group that is about to be committed
        known = self._judge([(name, decode_place(place), content) for name, place, content in others])
        # Before anything else is committed in their buckets: a claim below a head stands for a stored fragment.
        again = [a for a in firsts if a.id in known]
        self._write("withdraw", [(a.shard, a.id, places[a.bucket.game]) for a in again])
        return known

    def _judge(self, claims: list[tuple[bytes, Place, int | None]]) -> dict[bytes, int | None]:
        """Which of them are committed. Of those that may still be, it waits a moment; then they may not any more."""
        deadline = time.monotonic() + random.uniform(0.25, 1) * PATIENCE
        closed: dict[tuple[str, int], Head] = {}
        while True:
            found: dict[tuple[str, int], Head] = {}
            for game in {place.game for _, place, _ in claims}:
                numbers = {place.bucket: 0 for _, place, _ in claims if place.game == game}
                for number, head in heads.read(self._keyspace, game, numbers).items():
                    found[game, number] = closed.get((game, number), head)
            known = {name: content for name, p, content in claims if found[p.game, p.bucket].steps > p.after}
            growing = {(p.game, p.bucket) for name, p, _ in claims if name not in known} - closed.keys()
            growing = {bucket for bucket in growing if not found[bucket].closed}
            if not growing:
                return known
            if time.monotonic() < deadline:
                time.sleep(random.uniform(0.02, 0.05))
            else:
                closed |= {bucket: heads.close(self._keyspace, *bucket, found[bucket]) for bucket in growing}

    def _write(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """A batch for each partition, whose key is first in a row; waits for all."""
        futures = []
        for _, same in groupby(sorted(rows, key=itemgetter(0)), itemgetter(0)):
            for batch in _cut(same, self._keyspace.batch_bytes, lambda _: CLAIM_BYTES):
                futures.append(self._keyspace.start_batch(statement, batch))
        self._await(futures)

    def _put_rows(self, group: _Group, new: list[_Arrival]) -> None:
        now = time.time()
        for _, same in groupby(sorted(new, key=_game), _game):
            some = list(same)
            bucket, old = some[0].bucket, some[0].bucket.head
            place = old.steps
            for a in some:
                a.place = place = place + a.fragment.steps
            parts = [a.part for a in some]
            size = old.bytes + sum([part.size for part in parts])
            bucket.head = Head(old.day, place, old.fragments + len(some), size)
            bucket.used = time.monotonic()
            group.commits.append((bucket, old, bucket.head))
            group.futures.append(self._keyspace.start("put record", *bucket.partition, place, now, encode_parts(parts)))
            for batch in _cut(_blocks(some), self._keyspace.batch_bytes - OVERHEAD, _width):
                rows = [(*bucket.partition, place, body) for place, body in batch]
                if len(rows) == 1:  # one may be larger than a batch
                    group.futures.append(self._keyspace.start("put", *rows[0]))
                else:
                    group.futures.append(self._keyspace.start_batch("put", rows))

    def _land(self) -> None:
        group, self._flying = self._flying, None
        if group is not None:
            self._guard(self._commit, group)

    def _commit(self, group: _Group) -> None:
        self._await(group.futures)
        closed = [
            bucket
            for bucket, old, new in group.commits
            if not heads.advance(self._keyspace, bucket.game, bucket.number, old, new)
        ]
        if closed:
            for bucket in closed:
                bucket.dead = True
            self._again(group.works)
            return
        for work in group.works:
            if not work.future.done():
                work.future.set_result(work.outcomes)

    def _again(self, works: list[_Append]) -> None:
        """Others closed the bucket, to know whether what they have, too, would be committed."""
        works = [work for work in works if not work.future.done()]
        for work in works:
            work.attempts += 1
        if any(work.attempts == ATTEMPTS for work in works):
            raise StoreBusy("other writers are storing the same fragments: try again in a second")
        with self._lock:
            self._pending = deque(sorted([*works, *self._pending], key=lambda work: work.number))
            self._pending_bytes += sum(work.size for work in works)

    # Buckets

    def _bucket(self, game: str) -> Bucket:
        bucket = self._open.get(game)
        if bucket is not None and bucket.full and not bucket.dead:
            self._land()
            self._close_bucket(bucket)
        if bucket is None or bucket.dead:
            bucket = self._open[game] = self._new_bucket(game)
        return bucket

    def _new_bucket(self, game: str) -> Bucket:
        """The next number, by agreement with all writers; the day is a name on it, and of no other consequence."""
        rows = self._keyspace.run("newest bucket", game)
        number, day = (rows[0][0] if rows else 0) + 1, _today()
        while not self._keyspace.applied("open bucket", game, number, day, self._name)[0]:
            number += 1
        return Bucket(game, day, number)

    def _close_bucket(self, bucket: Bucket) -> None:
        if not bucket.dead:
            heads.close(self._keyspace, bucket.game, bucket.number, bucket.head)
            bucket.dead = True

    def _close_buckets(self) -> None:
        try:
            for bucket in self._open.values():
                self._close_bucket(bucket)
        except SparringError as error:  # readers close it when it has not grown for a while
            log.warning("a bucket stays open: %s", error)

    # Refused fragments

    def note_refusals(self) -> None:
        """Writes those there are; afterwards none from before the call is on its way."""
        with self._noting:
            with self._lock:
                refusals, self._refusals = self._refusals, deque(maxlen=QUARANTINE)
                counts, self._refused = self._refused, Counter()
            if not refusals:
                return
            try:
                self._note(refusals, counts)
            except SparringError as error:
                log.warning("%d refused fragments are not noted: %s", counts.total(), error)

    def _note(self, refusals: Iterable[Refusal], counts: Mapping[str, int]) -> None:
        """A ring of slots: the newest take the oldest ones' place."""
        futures, keys = [], {name: self._games.key(name) for name in counts}
        for when, name, *rest in refusals:
            slot = self._slots[name] % QUARANTINE
            self._slots[name] += 1
            futures.append(self._keyspace.start("quarantine", keys[name], self._name, slot, when, *rest))
        for name, key in keys.items():
            self._counts[key] += counts[name]
            futures.append(self._keyspace.start("count rejected", key, self._name, self._counts[key]))
        self._await(futures)

    def note_from(self, source: str, totals: Mapping[str, int], refusals: Iterable[Refusal]) -> None:
        """A source has rows of its own, whoever writes them: the higher total wins, whatever clocks say; and a
        refusal's slot follows from what it says."""
        writer, futures = uuid.uuid5(uuid.NAMESPACE_URL, source), []
        for when, name, player, fragment, reason in refusals:
            slot, key = zlib.crc32(f"{fragment} {reason}".encode()) % QUARANTINE, self._games.key(name)
            futures.append(self._keyspace.start("quarantine", key, writer, slot, when, player, fragment, reason))
        for name, total in totals.items():
            key = self._games.key(name)
            futures.append(self._keyspace.start("count rejected from", key, writer, total, total + 1))
        self._await(futures)

    def _await(self, futures: Iterable[Any]) -> None:
        with self._keyspace.asking():
            for future in futures:
                future.result()


def _fail(works: Iterable[_Append], error: Exception) -> None:
    for work in works:
        if not work.future.done():
            work.future.set_exception(error)


def _game(a: _Arrival) -> str:
    return a.bucket.game


def _sort(arrivals: Mapping[str, list[_Arrival]], known: Mapping[bytes, int | None]) -> list[_Arrival]:
    """Those that are new; sets the outcomes of all."""
    new = []
    for same in arrivals.values():
        first = same[0]
        content = known.get(first.id, first.checksum)
        for a in same:
            outcome = Outcome.DUPLICATE if content == a.checksum else Outcome.CONFLICT
            a.work.outcomes[a.index] = Outcome.ERASED if content is None else outcome
        if first.id not in known:
            new.append(first)
            first.work.outcomes[first.index] = Outcome.STORED
    return new


def _blocks(arrivals: Iterable[_Arrival]) -> Iterator[tuple[int, bytes]]:
    """Rows: place and body. Each lies in one stripe, so that shares of a scan are as fair as with a row for each."""
    for _, same in groupby(arrivals, lambda a: arrival.stripe(a.place)):
        for some in _cut(same, BLOCK, lambda a: len(a.body)):
            yield some[-1].place, encode_block([a.place for a in some], [a.body for a in some])


def _width(row: tuple[int, bytes]) -> int:
    return len(row[1]) + OVERHEAD


def _cut(items: Iterable[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Pieces of at most so much, or of one item that is larger."""
    piece: list[T] = []
    total = 0
    for item in items:
        more = size(item)
        if piece and total + more > limit:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += more
    if piece:
        yield piece
