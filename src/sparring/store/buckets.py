"""Writing to Cassandra: group commit into buckets that belong to one writer each.

A group goes in four steps, each acknowledged by the replicas before the next: *claim* every id, *look* who else
claimed it, *put* the fragments and the commit's record, *commit* by raising the bucket's `steps`. Up to the last step
nobody sees anything of it; and what a failed group left behind its bucket's `steps` nobody ever will, because the
bucket is given up.

Two writers with the same fragment: each claims before it looks, so at least one of them sees the other's claim. Who
sees one that is committed answers "duplicate"; who sees one that is not must not store: the other may be about to. The
caller is told to come again (`StoreBusy`), and soon the claim is committed, or its writer has failed. A writer gives a
group up after `DEADLINE`, so a claim that others see uncommitted for `PATIENCE` is taken over; of two who wait for each
other the one with the lower bucket goes first. All by monotonic clocks of one process: what the clock on the wall does
is of no consequence.
"""

import hashlib
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any

import msgspec

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Submission, decode
from sparring.store.keyspace import TIMEOUT, Keyspace
from sparring.store.protocol import Outcome, StoreAway, StoreBusy

__all__ = ["GROUP", "GROUP_FRAGMENTS", "Part", "Refusal", "Writer", "decode_parts", "encode_parts", "locate"]

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20  # of fragments in a partition; more arrive at most with the last group
BUCKET_FRAGMENTS = 50_000  # and so few that erasing all of them leaves fewer tombstones than a read may meet
BUCKET_STEPS = 1 << 22
GROUP, GROUP_FRAGMENTS = 4 << 20, 1000  # bytes and fragments in one commit, if one caller does not bring more
LOOK = 200  # ids looked up in one question
SEEN = 100_000  # uncommitted claims of others that are remembered
PENDING = 64 << 20  # bytes waiting for one
FRAGMENT = 8 << 20  # bytes of one fragment: Cassandra takes up to 16 MiB in one write, with its defaults
DEADLINE = 2 * TIMEOUT  # seconds from a group's claims to its commit
PATIENCE = DEADLINE + 2 * TIMEOUT
DAY = 86_400
QUARANTINE = 4096  # refused fragments kept of each writer
SLOT_BITS = 19  # a shard of ids that carry their time spans 2^19 ms, some nine minutes …
SHARDS = 8  # … and an eighth of the ids: some 16,000 fragments/s fill it to 100 MB
TIMELESS = 4096  # shards of all other ids

Refusal = tuple[float, str, str, str, str]  # time, game, player, fragment's id, reason
Row = tuple[Any, ...]
_Claim = tuple[str, int, int]  # game, bucket, place


class Part(msgspec.Struct, array_like=True, gc=False):
    """A fragment without its columns, as a commit's record keeps it."""

    place: int
    steps: int
    player: str
    episode: str
    start: int
    ended: bool
    ret: float
    size: int
    model: str | None = None
    version: int | None = None


encode_parts = msgspec.msgpack.Encoder().encode
decode_parts = msgspec.msgpack.Decoder(list[Part]).decode


def locate(name: str) -> tuple[int, bytes]:
    """A fragment id's shard and key: functions of the id alone, so that whoever gets it again looks at the same place.
    An id with its time in it (UUID version 7, in hex) lies beside those of the same minutes."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        key = b""
    if len(key) == 16 and key[6] >> 4 == 7 and key.hex() == name:
        return TIMELESS + (int.from_bytes(key[:6], "big") >> SLOT_BITS) * SHARDS + key[15] % SHARDS, key
    key = hashlib.blake2b(name.encode(), digest_size=24).digest()
    return int.from_bytes(key[:2], "big") % TIMELESS, key


class Bucket:
    """One partition of fragments, which only this writer writes."""

    def __init__(self, game: str, day: int, number: int) -> None:
        self.game, self.day, self.number = game, day, number
        self.steps = self.fragments = self.bytes = 0  # committed, or about to be
        self.begin = 0  # steps before the newest group
        self.settled = True  # the last commit is known to have arrived

    @property
    def full(self) -> bool:
        return (
            self.bytes >= BUCKET_BYTES or self.fragments >= BUCKET_FRAGMENTS or self.steps >= BUCKET_STEPS
        ) or self.day != _today()

    @property
    def partition(self) -> tuple[str, int, int]:
        return self.game, self.day, self.number

    def commit_values(self, sealed: bool) -> Row:
        """The timestamp grows with what is said: no clock can put an older commit before a newer one."""
        stamp = 2 * self.steps + sealed + 1
        return stamp, self.steps, self.fragments, self.bytes, sealed, self.game, self.number


def _today() -> int:
    return int(time.time() // DAY)


class _Append:
    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.size = submission.size
        self.future: Future[list[Outcome]] = Future()
        self.outcomes: list[Outcome] = [Outcome.DUPLICATE] * len(submission.fragments)


class _Arrival:
    """A fragment with what is made of it, and where it goes if it is new."""

    __slots__ = ("body", "fragment", "index", "key", "place", "ret", "shard", "size", "work")

    def __init__(self, work: _Append, index: int) -> None:
        self.work, self.index = work, index
        s = work.submission
        self.fragment, self.body, self.ret, self.size = (
            s.fragments[index],
            s.bodies[index],
            s.returns[index],
            s.sizes[index],
        )
        self.shard, self.key = locate(self.fragment.id)
        self.place = 0


class _Contested(StoreBusy):
    """Another writer claimed one of the fragments and has not committed it."""


class Writer:
    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._name = uuid.uuid4()
        self._schemas: dict[str, str] = {}
        self._open: dict[str, Bucket] = {}  # by game
        self._mine: set[tuple[str, int]] = set()  # all buckets we ever had: what they have uncommitted stays so
        self._seen: dict[tuple[str, int, int], float] = {}  # others' uncommitted claims, and since when we know them
        self._counts: Counter[str] = Counter()  # refused, by game
        self._slots: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the rest
        self._room = threading.Condition(self._lock)
        self._call = threading.Condition(self._lock)
        self._closed = False
        self._pending: deque[_Append] = deque()
        self._pending_bytes = 0
        self._refusals: deque[Refusal] = deque(maxlen=QUARANTINE)
        self._refused: Counter[str] = Counter()
        self._noting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sparring-store", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> "Future[list[Outcome]]":
        return self._put(submission, wait=False).future

    def append(self, submission: Submission) -> list[Outcome]:
        while True:
            work = self._put(submission, wait=True)
            try:
                return work.future.result()
            except _Contested:
                time.sleep(0.5)

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
                raise InputError(
                    f"fragment {f.id!r} has {len(body) >> 20} MiB, at most {FRAGMENT >> 20} fit: cut shorter"
                )
        with self._lock:
            self._require_open()
            while self._pending and self._pending_bytes + work.size > PENDING:
                if not wait:
                    raise StoreBusy(f"{self._pending_bytes >> 20} MiB are waiting to be written: try again in a second")
                self._room.wait()
                self._require_open()
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
                self._work(works)
            self.note_refusals()
        self.note_refusals()
        self._seal_all()

    def _take(self) -> list[_Append] | None:
        with self._lock:
            while not (self._pending or self._refusals or self._closed):
                self._call.wait()
            if self._closed and not self._pending:
                return None
            works: list[_Append] = []
            size = 0
            count = 0
            while self._pending and (not works or (size + self._pending[0].size <= GROUP and count < GROUP_FRAGMENTS)):
                work = self._pending.popleft()
                self._pending_bytes -= work.size
                size += work.size
                count += len(work.outcomes)
                if work.future.set_running_or_notify_cancel():
                    works.append(work)
            self._room.notify_all()
            return works

    def _work(self, works: list[_Append]) -> None:
        try:
            self._commit(works)
        except (SparringError, OSError) as error:
            self._fail(works, error)
        finally:  # also after an error nobody thought of: none of them may wait for ever
            self._fail(works, SparringError(f"the store {self._keyspace.address} failed: see its log"))

    def _fail(self, works: Iterable[_Append], error: Exception) -> None:
        for work in works:
            if not work.future.done():
                work.future.set_exception(error)

    def _commit(self, works: list[_Append]) -> None:
        started = time.monotonic()
        self._settle()
        works = [work for work in works if self._belongs(work)]
        arrivals: dict[str, list[_Arrival]] = {}
        for work in works:
            for index, f in enumerate(work.submission.fragments):
                arrivals.setdefault(f.id, []).append(_Arrival(work, index))
        if arrivals:
            buckets = self._place([same[0] for same in arrivals.values()])
            try:
                changed = self._store(arrivals, buckets, started)
            except BaseException:
                self._give_up(buckets)
                raise
            for game, bucket in buckets.items():
                if game in changed:
                    bucket.settled = False
                else:
                    bucket.steps = bucket.begin
            self._settle()
        for work in works:
            if not work.future.done():
                work.future.set_result(work.outcomes)

    def _belongs(self, work: _Append) -> bool:
        for name, schema in work.submission.games:
            if self._schemas.get(name) != schema:
                rows = self._keyspace.run("game", name)
                if rows:
                    self._schemas[name] = Game.from_json(rows[0][0]).schema
                if self._schemas.get(name) != schema:
                    reason = InputError(f"no game {name!r} with schema {schema!r} is registered here")
                    work.future.set_exception(reason)
                    return False
        return True

    def _place(self, arrivals: list[_Arrival]) -> dict[str, Bucket]:
        """Gives each a place in its game's open bucket; the buckets by game."""
        buckets: dict[str, Bucket] = {}
        for a in arrivals:
            game = a.fragment.game
            bucket = buckets.get(game)
            if bucket is None:
                bucket = buckets[game] = self._bucket(game)
                bucket.begin = bucket.steps
            bucket.steps += a.fragment.steps
            a.place = bucket.steps
        return buckets

    def _store(self, arrivals: dict[str, list[_Arrival]], buckets: dict[str, Bucket], started: float) -> set[str]:
        """Claims, looks and puts; sets the outcomes of all but the contested, whose callers are told to come again.
        The games of which something is new."""
        firsts = [same[0] for same in arrivals.values()]
        known, contested = self._claim(firsts, buckets)
        for same in arrivals.values():
            if same[0].fragment.id in contested:
                why = "another writer is just storing the same fragments: try again in a second"
                self._fail([a.work for a in same], _Contested(why))
        new: list[_Arrival] = []
        for name, same in arrivals.items():
            live = [a for a in same if not a.work.future.done()]
            if not live:
                continue
            body: bytes | memoryview | None = known.get(name)
            if body is None and live[0] is same[0]:
                new.append(live[0])
                live[0].work.outcomes[live[0].index] = Outcome.STORED
                body, live = live[0].body, live[1:]
            for a in live:  # without a body: its first was contested, and with it whoever brought this one too
                a.work.outcomes[a.index] = Outcome.DUPLICATE if body == a.body else Outcome.CONFLICT
        self._put_rows(new, buckets)
        if time.monotonic() > started + DEADLINE:
            raise StoreAway(f"{self._keyspace.address} took longer than {DEADLINE:g} s: nothing of this was stored")
        return {a.fragment.game for a in new}

    def _claim(self, firsts: list[_Arrival], buckets: dict[str, Bucket]) -> tuple[dict[str, bytes], set[str]]:
        """Bodies of those that are there already, by id; and the ids that others claim without having committed."""
        shards: dict[int, list[_Arrival]] = {}
        for a in firsts:
            shards.setdefault(a.shard, []).append(a)
        rows = (
            [(shard, a.key, buckets[a.fragment.game].number, a.place, a.fragment.game) for a in some]
            for shard, some in shards.items()
        )
        self._all("claim", rows, 64)
        asked = [
            self._keyspace.start("claims", shard, [a.key for a in some[at : at + LOOK]])
            for shard, some in shards.items()
            for at in range(0, len(some), LOOK)
        ]
        claims: dict[bytes, list[_Claim]] = {}
        with self._keyspace.asking():
            for future in asked:
                for key, number, place, game in future.result():
                    claims.setdefault(key, []).append((game, number, place))
        others: list[tuple[_Arrival, _Claim]] = []
        for a in firsts:
            mine = (a.fragment.game, buckets[a.fragment.game].number, a.place)
            others += [(a, claim) for claim in claims.get(a.key, ()) if claim != mine]
        return self._judge(others, buckets) if others else ({}, set())

    def _judge(
        self, others: list[tuple[_Arrival, _Claim]], buckets: dict[str, Bucket]
    ) -> tuple[dict[str, bytes], set[str]]:
        """What others' claims of our ids mean: that a fragment is there, that somebody may be storing it, or nothing."""
        heads: dict[tuple[str, int], tuple[int, int]] = {}
        for game in {claim[0] for _, claim in others}:
            numbers = list({number for _, (name, number, _) in others if name == game})
            for number, day, steps, *_ in self._keyspace.run("some buckets", game, numbers):
                heads[game, number] = day, steps or 0
        contested: set[str] = set()
        asked = []
        for a, (game, number, place) in others:
            day, steps = heads.get((game, number), (0, 0))
            if place <= steps:
                asked.append((a, self._keyspace.start("get", game, day, number, place)))
            elif (game, number) not in self._mine:
                since = self._seen.setdefault((game, number, place), time.monotonic())
                first = (a.fragment.game, buckets[a.fragment.game].number) < (game, number)
                if time.monotonic() < since + (PATIENCE if first else 2 * PATIENCE):
                    contested.add(a.fragment.id)
        known: dict[str, bytes] = {}
        with self._keyspace.asking():
            for a, future in asked:
                for (body,) in future.result():  # none: erased, or the claim was a duplicate's, and its place is …
                    if decode(body).id == a.fragment.id:  # … another fragment's
                        known[a.fragment.id] = body
        if len(self._seen) > SEEN:
            self._seen.clear()  # their patience begins anew
        return known, contested - known.keys()

    def _put_rows(self, new: list[_Arrival], buckets: dict[str, Bucket]) -> None:
        now = time.time()
        rows: list[Row] = []
        futures = []
        for game, same in groupby(sorted(new, key=lambda a: a.fragment.game), lambda a: a.fragment.game):
            bucket, some = buckets[game], list(same)
            rows += [(*bucket.partition, a.place, a.body) for a in some]
            bucket.fragments += len(some)
            bucket.bytes += sum([a.size for a in some])
            parts = encode_parts([_part(a) for a in some])
            futures.append(self._keyspace.start("put record", *bucket.partition, bucket.steps, now, parts))
        self._all("put", (list(some) for _, some in groupby(rows, lambda row: row[:3])), 0)
        with self._keyspace.asking():
            for future in futures:
                future.result()

    def _all(self, statement: str, partitions: Iterable[Sequence[Row]], width: int) -> None:
        """Rows, grouped by partition: in batches as large as the server takes, all on their way at once."""
        futures = []
        for rows in partitions:
            batch: list[Row] = []
            size = 0
            for row in rows:
                length = width or len(row[-1]) + 64
                if batch and size + length > self._keyspace.batch_bytes:
                    futures.append(self._keyspace.start_batch(statement, batch))
                    batch, size = [], 0
                batch.append(row)
                size += length
            if len(batch) == 1:  # a batch of one may be larger than a batch
                futures.append(self._keyspace.start(statement, *batch[0]))
            elif batch:
                futures.append(self._keyspace.start_batch(statement, batch))
        with self._keyspace.asking():
            for future in futures:
                future.result()

    # Buckets

    def _bucket(self, game: str) -> Bucket:
        bucket = self._open.get(game)
        if bucket is not None and bucket.full:
            self._keyspace.run("commit", *bucket.commit_values(sealed=True))
            del self._open[game]
            bucket = None
        if bucket is None:
            bucket = self._open[game] = self._new_bucket(game)
            self._mine.add((game, bucket.number))
        return bucket

    def _new_bucket(self, game: str) -> Bucket:
        """The next number, by agreement with all writers; the day is a name on it, and of no other consequence."""
        rows = self._keyspace.run("newest bucket", game)
        number, day = (rows[0][0] if rows else 0) + 1, _today()
        while not self._keyspace.applied("open bucket", game, number, day, self._name)[0]:
            number += 1
        return Bucket(game, day, number)

    def _settle(self) -> None:
        """A commit that is not answered may have arrived or not: it is made again, before anything else."""
        for bucket in self._open.values():
            if not bucket.settled:
                self._keyspace.run("commit", *bucket.commit_values(sealed=False))
                bucket.settled = True

    def _give_up(self, buckets: dict[str, Bucket]) -> None:
        for game in buckets:
            self._open.pop(game, None)

    def _seal_all(self) -> None:
        try:
            for bucket in self._open.values():
                self._keyspace.run("commit", *bucket.commit_values(sealed=True))
        except SparringError as error:  # readers go on looking at it for more, which is all that is lost
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
            self._counts.update(counts)
            try:
                self._note(refusals, counts)
            except SparringError as error:
                log.warning("%d refused fragments are not noted: %s", counts.total(), error)

    def _note(self, refusals: Iterable[Refusal], counts: Iterable[str]) -> None:
        """A ring of slots: the newest take the oldest ones' place."""
        futures = []
        for when, game, player, name, reason in refusals:
            slot = self._slots[game] % QUARANTINE
            self._slots[game] += 1
            futures.append(self._keyspace.start("quarantine", game, self._name, slot, when, player, name, reason))
        for game in counts:
            futures.append(self._keyspace.start("count rejected", game, self._name, self._counts[game]))
        with self._keyspace.asking():
            for future in futures:
                future.result()


def _part(a: _Arrival) -> Part:
    f: Fragment = a.fragment
    return Part(a.place, f.steps, f.player, f.episode, f.start, f.ended, a.ret, a.size, f.model, f.version)
