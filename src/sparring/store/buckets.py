"""Writing to Cassandra: group commit into buckets that belong to one writer each.

A group goes in four steps, each acknowledged by the replicas before the next: *claim* its ids, *look* who else claimed
them, *put* the fragments and the commit's record, *commit* by raising the bucket's `steps`. Up to the last step nobody
sees anything of it; and what a failed group left behind its bucket's `steps` nobody ever will, because the bucket is
given up. While one group is put, the next one is claimed.

Claims lie in shards that are functions of the id alone, a row for all ids that a group claims in one. A writer keeps
the shards it works with in memory, and a shard tells with one small read whether another writer claimed anything since
the last look. Only an id that was claimed before is looked up by itself.

Two writers with the same fragment: each claims before it looks, so at least one of them sees the other's claim. Who
sees one that is committed answers "duplicate"; who sees one that is not must not store: the other may be about to. The
caller is told to come again (`StoreBusy`), and soon the claim is committed, or withdrawn, by a commit that has nothing
at its place, because the other saw ours. A claim whose writer has failed is neither; but a writer gives a group up
after `DEADLINE`, so one that others see uncommitted for `PATIENCE` is taken over. By the monotonic clock of one
process: what the clock on the wall does is of no consequence.
"""

import hashlib
import logging
import queue
import random
import threading
import time
import uuid
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, wire
from sparring.games import Game
from sparring.store import arrival
from sparring.store.arrival import Submission, encoder
from sparring.store.keyspace import TIMEOUT, Keyspace
from sparring.store.protocol import Outcome, StoreAway, StoreBusy

__all__ = [
    "GROUP",
    "GROUP_FRAGMENTS",
    "Part",
    "Refusal",
    "Writer",
    "decode_block",
    "decode_parts",
    "encode_block",
    "encode_parts",
    "fragment_at",
    "locate",
]

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20  # of fragments in a partition; more arrive at most with the last group
BUCKET_FRAGMENTS = 50_000  # and so few that erasing all of them leaves fewer tombstones than a read may meet
BUCKET_STEPS = 1 << 22
GROUP, GROUP_FRAGMENTS = 4 << 20, 1000  # bytes and fragments in one commit, if one caller does not bring more
BLOCK = 32 << 10  # bytes of a row, unless one fragment has more: a look-up of one fragment reads all of it
REMEMBERED = 1_000_000  # ids of shards in memory, at some 80 bytes
SEEN = 100_000  # uncommitted claims of others that are remembered
PENDING = 64 << 20  # bytes waiting for one
FRAGMENT = 8 << 20  # bytes of one fragment: Cassandra takes up to 16 MiB in one write, with its defaults
WALK = 128  # places that are looked at one after the other
DEADLINE = 2 * TIMEOUT  # seconds from a group's claims to its commit
PATIENCE = DEADLINE + 2 * TIMEOUT
DAY = 86_400
QUARANTINE = 4096  # refused fragments kept of each writer
OVERHEAD = 64  # bytes of a row besides its body
SLOT_BITS = 19  # a shard of ids that carry their time spans 2^19 ms, some nine minutes …
SHARDS = 8  # … and an eighth of the ids: some 50,000 fragments/s fill it to 100 MB
TIMELESS = 4096  # shards of all other ids

Refusal = tuple[float, str, str, str, str]  # time, game, player, fragment's id, reason
Row = tuple[Any, ...]
T = TypeVar("T")
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


class Block(msgspec.Struct, array_like=True, gc=False):
    """A row: neighbours in a bucket, all of one commit. The row's key is the last one's place."""

    places: list[int]
    fragments: list[Fragment]


encode_parts = msgspec.msgpack.Encoder().encode
decode_parts = msgspec.msgpack.Decoder(list[Part]).decode
decode_block = msgspec.msgpack.Decoder(Block).decode
encode_places = encode_claims = msgspec.msgpack.Encoder().encode
decode_claims = msgspec.msgpack.Decoder(tuple[list[bytes], list[int]]).decode


def encode_block(places: Sequence[int], bodies: Sequence[bytes | memoryview]) -> bytes:
    """From fragments that are encoded already, each for itself."""
    return b"\x92" + encode_places(places) + wire.array(bodies)  # 0x92: an array of two


def fragment_at(body: bytes, place: int) -> Fragment | None:
    """None: it was erased, or never stored."""
    block = decode_block(body)
    return block.fragments[block.places.index(place)] if place in block.places else None


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
        self.steps = self.fragments = self.bytes = 0  # of all groups so far, committed or on their way
        self.dead = False  # a group failed: nothing behind the last commit will ever count

    @property
    def full(self) -> bool:
        return (
            self.bytes >= BUCKET_BYTES or self.fragments >= BUCKET_FRAGMENTS or self.steps >= BUCKET_STEPS
        ) or self.day != _today()

    @property
    def partition(self) -> tuple[str, int, int]:
        return self.game, self.day, self.number

    def commit_values(self, *, sealed: bool = False) -> Row:
        """The timestamp grows with what is said: no clock can put an older commit before a newer one."""
        stamp = 2 * self.steps + sealed + 1
        return stamp, self.steps, self.fragments, self.bytes, sealed, self.game, self.number


class _Shard:
    """The ids claimed in one shard, by eight of their bytes each, and how much of each writer's claims was read."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.seen: dict[int, int] = {}


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

    __slots__ = ("body", "fragment", "index", "key", "number", "place", "ret", "shard", "size", "work")

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
        self.number = _short(self.key)
        self.place = 0


class _Group:
    """What is committed together: put, and waiting for the replicas' answers."""

    def __init__(self, works: list[_Append], started: float) -> None:
        self.works, self.started = works, started
        self.futures: list[Any] = []
        self.commits: dict[Bucket, Row] = {}


class _Contested(StoreBusy):
    """Another writer claimed one of the fragments and has not committed it."""


class Writer:
    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._name = uuid.uuid4()
        self._number = self._name.int >> 65  # the same, in 63 bits
        self._schemas: dict[str, str] = {}
        self._open: dict[str, Bucket] = {}  # by game
        self._mine: set[tuple[str, int]] = set()  # all buckets we ever had: what they have uncommitted stays so
        self._shards: OrderedDict[int, _Shard] = OrderedDict()  # the most recently used last
        self._claims = 0  # rows of ours, since the beginning …
        self._fresh: set[tuple[int, int]] = set()  # … and those of the newest group
        self._seen: dict[_Claim, float] = {}  # others' uncommitted claims, and since when we know them
        self._unsettled: dict[Bucket, Row] = {}  # commits that were not answered
        self._counts: Counter[str] = Counter()  # refused, by game
        self._slots: Counter[str] = Counter()
        self._noting = threading.Lock()  # guards the two
        self._lock = threading.Lock()  # guards the rest
        self._room = threading.Condition(self._lock)
        self._call = threading.Condition(self._lock)
        self._closed = False
        self._pending: deque[_Append] = deque()
        self._pending_bytes = 0
        self._refusals: deque[Refusal] = deque(maxlen=QUARANTINE)
        self._refused: Counter[str] = Counter()
        self._put_groups: queue.Queue[_Group | None] = queue.Queue(1)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "sparring-store"), (self._run_commits, "sparring-commit"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, submission: Submission) -> "Future[list[Outcome]]":
        return self._put(submission, wait=False).future

    def append(self, submissions: Iterable[Submission]) -> list[Outcome]:
        works = [self._put(submission, wait=True) for submission in submissions]
        return [outcome for work in works for outcome in self._finish(work)]

    def _finish(self, work: _Append) -> list[Outcome]:
        while True:
            try:
                return work.future.result()
            except _Contested:
                time.sleep(random.uniform(0.02, 0.3))  # not all at the same time again
                work = self._put(work.submission, wait=True)

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
        for thread in self._threads:
            thread.join()

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
        self._put_groups.put(None)

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
        group = _Group(works, time.monotonic())
        try:
            self._begin(group)
        except (SparringError, OSError) as error:
            self._give_up(group)
            _fail(works, error)
        except Exception:  # one nobody thought of: nobody may wait for ever because of it
            log.exception("a group failed")
            self._give_up(group)
            _fail(works, SparringError(f"the store {self._keyspace.address} failed: see its log"))
        else:
            self._put_groups.put(group)

    def _begin(self, group: _Group) -> None:
        arrivals: dict[str, list[_Arrival]] = {}
        for work in group.works:
            if self._belongs(work):
                for index, f in enumerate(work.submission.fragments):
                    arrivals.setdefault(f.id, []).append(_Arrival(work, index))
        if not arrivals:
            return
        buckets = self._place([same[0] for same in arrivals.values()])
        group.commits = dict.fromkeys(buckets.values(), ())
        known, contested = self._claim([same[0] for same in arrivals.values()], buckets)
        self._put_rows(group, _sort(arrivals, known, contested), buckets)
        # Also where nothing is new: places that were claimed in vain are then known not to be used.
        group.commits = {bucket: bucket.commit_values() for bucket in buckets.values()}

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
            bucket.steps += a.fragment.steps
            a.place = bucket.steps
        return buckets

    def _claim(self, firsts: list[_Arrival], buckets: dict[str, Bucket]) -> tuple[dict[str, bytes], set[str]]:
        """Bodies of those that are there already, by id; and the ids that others claim without having committed."""
        shards: dict[int, list[_Arrival]] = {}
        for a in firsts:
            shards.setdefault(a.shard, []).append(a)
        futures = []
        self._fresh.clear()
        for shard, some in shards.items():
            for game, same in groupby(sorted(some, key=_game), _game):
                futures.append(self._write_claim(shard, buckets[game], list(same)))
        with self._keyspace.asking():
            for future in futures:
                future.result()
            looks = [(shard, self._keyspace.start("latest", shard)) for shard in shards]
            for shard, future in looks:
                self._learn(shard, {w: seq for (latest,) in future.result() for w, seq in latest.items()})
        suspects: dict[int, list[_Arrival]] = {}
        for shard, some in shards.items():
            ids = self._shards[shard].ids
            if again := [a for a in some if a.number in ids]:
                suspects[shard] = again
            ids.update([a.number for a in some])
        self._forget_shards()
        return self._judge(suspects, buckets) if suspects else ({}, set())

    def _write_claim(self, shard: int, bucket: Bucket, some: list[_Arrival]) -> Any:
        self._claims = seq = self._claims + 1
        self._fresh.add((self._number, seq))
        claims = encode_claims(([a.key for a in some], [a.place for a in some]))
        values = (seq, self._number, seq, bucket.game, bucket.number, claims, shard, self._number, seq)
        return self._keyspace.start("claim", *values)

    def _learn(self, number: int, latest: dict[int, int]) -> None:
        """Takes in what others claimed in the shard since we looked last."""
        shard = self._shards.get(number) or _Shard()
        if number not in self._shards:
            rows = self._keyspace.run("claims", number)
        else:
            rows = []
            for writer, last in latest.items():
                if writer != self._number and last > shard.seen.get(writer, 0):
                    rows += self._keyspace.run("claims of", number, writer, shard.seen.get(writer, 0))
        self._shards[number] = shard  # only now that it was read: one that is known in part would hide duplicates
        self._shards.move_to_end(number)
        for writer, seq, _, _, claims in rows:
            if (writer, seq) not in self._fresh:
                shard.ids.update([_short(key) for key in decode_claims(claims)[0]])
            shard.seen[writer] = max(seq, shard.seen.get(writer, 0))

    def _judge(
        self, suspects: dict[int, list[_Arrival]], buckets: dict[str, Bucket]
    ) -> tuple[dict[str, bytes], set[str]]:
        """What earlier claims of our ids mean: the fragment is there, somebody may be storing it, or nothing."""
        self._put_groups.join()  # some may be ours, of a group that is about to be committed …
        self._settle()  # … or was, as far as we know
        claims = self._find(suspects, buckets)
        heads: dict[tuple[str, int], tuple[int, int]] = {}
        for game in {claim[0] for _, claim in claims}:
            numbers = list({number for _, (name, number, _) in claims if name == game})
            for number, day, steps, *_ in self._keyspace.run("some buckets", game, numbers):
                heads[game, number] = day, steps or 0
        contested: set[str] = set()
        asked: dict[tuple[str, int, int], list[tuple[int, _Arrival]]] = {}  # by partition
        for a, (game, number, place) in claims:
            day, steps = heads.get((game, number), (0, 0))
            if place <= steps:
                asked.setdefault((game, day, number), []).append((place, a))
            elif (game, number) not in self._mine:
                since = self._seen.setdefault((game, number, place), time.monotonic())
                if time.monotonic() < since + PATIENCE:
                    contested.add(a.fragment.id)
        known = self._stored(asked)
        if len(self._seen) > SEEN:
            self._seen.clear()  # their patience begins anew
        return known, contested - known.keys()

    def _stored(self, asked: dict[tuple[str, int, int], list[tuple[int, _Arrival]]]) -> dict[str, bytes]:
        """Bodies of those that are where they were claimed. What comes again was neighbours the first time, and may
        have come often: so from block to block, each of which answers for all places up to its end; many walks at a
        time."""
        walks = []
        for partition, some in asked.items():
            some.sort(key=_first)
            walks += [(partition, deque(some[i : i + WALK])) for i in range(0, len(some), WALK)]
        known: dict[str, bytes] = {}
        while walks:
            futures = [self._keyspace.start("holding", *partition, places[0][0]) for partition, places in walks]
            with self._keyspace.asking():
                for (_, places), future in zip(walks, futures, strict=True):
                    _search([decode_block(body) for (body,) in future.result()], places, known)
            walks = [walk for walk in walks if walk[1]]
        return known

    def _find(self, suspects: dict[int, list[_Arrival]], buckets: dict[str, Bucket]) -> list[tuple[_Arrival, _Claim]]:
        """Every claim of theirs but the ones just made."""
        found: list[tuple[_Arrival, _Claim]] = []
        for shard, some in suspects.items():
            by_key = {a.key: a for a in some}
            for _, _, game, number, claims in self._keyspace.run("claims", shard):
                for key, place in zip(*decode_claims(claims), strict=True):
                    a = by_key.get(key)
                    if a is not None and (game, number, place) != (_game(a), buckets[_game(a)].number, a.place):
                        found.append((a, (game, number, place)))
        return found

    def _forget_shards(self) -> None:
        total = sum(len(shard.ids) for shard in self._shards.values())
        while total > REMEMBERED and len(self._shards) > 1:
            total -= len(self._shards.popitem(last=False)[1].ids)

    def _put_rows(self, group: _Group, new: list[_Arrival], buckets: dict[str, Bucket]) -> None:
        now = time.time()
        for game, same in groupby(sorted(new, key=_game), _game):
            bucket, some = buckets[game], list(same)
            bucket.fragments += len(some)
            bucket.bytes += sum([a.size for a in some])
            parts = encode_parts([_part(a) for a in some])
            group.futures.append(self._keyspace.start("put record", *bucket.partition, bucket.steps, now, parts))
            for batch in _cut(_blocks(some), self._keyspace.batch_bytes - OVERHEAD, _width):
                rows = [(*bucket.partition, place, body) for place, body in batch]
                if len(rows) == 1:  # one may be larger than a batch
                    group.futures.append(self._keyspace.start("put", *rows[0]))
                else:
                    group.futures.append(self._keyspace.start_batch("put", rows))

    # The other thread

    def _run_commits(self) -> None:
        while (group := self._put_groups.get()) is not None:
            try:
                self._commit(group)
            except (SparringError, OSError) as error:
                _fail(group.works, error)
            except Exception:  # one nobody thought of: nobody may wait for ever because of it
                log.exception("a commit failed")
                _fail(group.works, SparringError(f"the store {self._keyspace.address} failed: see its log"))
            finally:
                self._put_groups.task_done()
        self._seal_all()

    def _commit(self, group: _Group) -> None:
        try:
            with self._keyspace.asking():
                for future in group.futures:
                    future.result()
            # One that brings nothing new may take its time: nobody waits for what it claims.
            late = group.futures and time.monotonic() > group.started + DEADLINE
            if late or any(bucket.dead for bucket in group.commits):
                raise StoreAway(f"{self._keyspace.address} takes longer than {DEADLINE:g} s: try again later")
            self._settle()
        except BaseException:  # what it put must not come in with the next group
            self._give_up(group)
            raise
        self._unsettled.update(group.commits)
        self._settle()
        for work in group.works:
            if not work.future.done():
                work.future.set_result(work.outcomes)

    def _settle(self) -> None:
        """A commit that is not answered may have arrived or not: it is made again, before any other."""
        for bucket, values in list(self._unsettled.items()):
            self._keyspace.run("commit", *values)
            del self._unsettled[bucket]

    # Buckets

    def _bucket(self, game: str) -> Bucket:
        bucket = self._open.get(game)
        if bucket is not None and bucket.full and not bucket.dead:
            self._put_groups.join()
            self._settle()
            if not bucket.dead:
                self._keyspace.run("commit", *bucket.commit_values(sealed=True))
            bucket.dead = True
        if bucket is None or bucket.dead:
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

    def _give_up(self, group: _Group) -> None:
        for bucket in group.commits:
            bucket.dead = True

    def _seal_all(self) -> None:
        try:
            self._settle()
            for bucket in self._open.values():
                if not bucket.dead:
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
        self._await(futures)

    def note_from(self, source: str, totals: Mapping[str, int], refusals: Iterable[Refusal]) -> None:
        """A source has rows of its own, whoever writes them: the higher total wins, whatever clocks say; and a
        refusal's slot follows from what it says."""
        writer, futures = uuid.uuid5(uuid.NAMESPACE_URL, source), []
        for when, game, player, name, reason in refusals:
            slot = zlib.crc32(f"{name} {reason}".encode()) % QUARANTINE
            futures.append(self._keyspace.start("quarantine", game, writer, slot, when, player, name, reason))
        for game, total in totals.items():
            futures.append(self._keyspace.start("count rejected from", game, writer, total, total + 1))
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
    return a.fragment.game


def _first(pair: tuple[int, _Arrival]) -> int:
    return pair[0]


def _search(found: list[Block], places: deque[tuple[int, _Arrival]], known: dict[str, bytes]) -> None:
    """Takes off the places that the block answers for, if there is one: else there is nothing at any of them. None at
    a place: it was erased, or the claim was a duplicate's."""
    fragments = {place: f for block in found for place, f in zip(block.places, block.fragments, strict=True)}
    end = max([places[0][0], *fragments]) if found else places[-1][0]
    while places and places[0][0] <= end:
        place, a = places.popleft()
        f = fragments.get(place)
        if f is not None and f.id == a.fragment.id:
            known[f.id] = encoder.encode(f)


def _short(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def _sort(arrivals: dict[str, list[_Arrival]], known: dict[str, bytes], contested: set[str]) -> list[_Arrival]:
    """Those that are new; sets the outcomes of all but the contested, whose callers are told to come again."""
    if not known and not contested and all([len(same) == 1 for same in arrivals.values()]):  # the usual case
        new = [same[0] for same in arrivals.values()]
        for work in {id(a.work): a.work for a in new}.values():
            work.outcomes = [Outcome.STORED] * len(work.outcomes)
        return new
    for name in contested:
        why = "another writer is just storing the same fragments: try again in a second"
        _fail([a.work for a in arrivals[name]], _Contested(why))
    new = []
    for name, same in arrivals.items():
        live = [a for a in same if not a.work.future.done()]
        body: bytes | memoryview | None = known.get(name)
        if body is None and live and live[0] is same[0]:
            new.append(live[0])
            live[0].work.outcomes[live[0].index] = Outcome.STORED
            body, live = live[0].body, live[1:]
        for a in live:
            if body is None:  # its first failed, and with it the place that was claimed
                _fail([a.work], _Contested("the same fragment came with an upload that failed: try again"))
            a.work.outcomes[a.index] = Outcome.DUPLICATE if body == a.body else Outcome.CONFLICT
    return [a for a in new if not a.work.future.done()]


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


def _part(a: _Arrival) -> Part:
    f: Fragment = a.fragment
    return Part(a.place, f.steps, f.player, f.episode, f.start, f.ended, a.ret, a.size, f.model, f.version)
