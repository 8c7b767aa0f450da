"""Writing to Cassandra: group commit into buckets that belong to one writer each.

A group goes in four steps, each acknowledged by the replicas before the next:
1. *claim* its ids in the name of the bucket they will be in;
2. *look* who else claimed them;
3. *put* the fragments and the commit's record;
4. *commit* by raising the bucket's head.

Up to the last step nobody sees anything of it. Why a fragment is stored once: docs/cassandra.md.
"""

import logging
import random
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby

from sparring.errors import SparringError
from sparring.store import arrival
from sparring.store.arrival import Refusal, Submission
from sparring.store.cassandra import heads, rows
from sparring.store.cassandra.heads import BucketHead
from sparring.store.cassandra.keyspace import Keyspace, KnownGames
from sparring.store.cassandra.rows import FragmentPart, Place, decode_place, encode, encode_block, groups
from sparring.store.protocol import FragmentRefused, NotRegistered, Outcome, StoreBusy
from sparring.store.queue import QUARANTINE, Queue, Work

__all__ = ["BLOCK", "GROUP_FRAGMENTS", "CassandraWriter"]

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20  # of fragments in a partition; more arrive at most with the last group
BUCKET_FRAGMENTS = 50_000  # an eraser has all of a bucket's records in memory
BUCKET_STEPS = 1 << 22
GROUP_FRAGMENTS = 1000  # in one commit, if one caller does not bring more
BLOCK = 32 << 10  # bytes of a row, unless one fragment has more: a look-up of one fragment reads all of it
FRAGMENT = 8 << 20  # bytes of one fragment: Cassandra takes up to 16 MiB in one write, with its defaults
PATIENCE = 1.0  # seconds, at most, for another writer to commit what we have, too
ATTEMPTS = 8  # to commit a group whose bucket others close
DAY = 86_400


class Bucket:
    """One partition of fragments, which only this writer writes."""

    def __init__(self, game: str, number: int, head: BucketHead) -> None:
        self.game, self.number = game, number
        self.head = head  # as we left it


def _today() -> int:
    return int(time.time() // DAY)


class _Arrival:
    """A fragment of a submission, and where it goes if it is new."""

    bucket: Bucket
    claim: bytes  # the place that its claim says
    place: int
    outcome: Outcome

    def __init__(self, submission: Submission, index: int) -> None:
        self.fragment, self.body = submission.fragments[index], submission.bodies[index]
        self.ret, self.size = submission.returns[index], submission.sizes[index]
        self.shard, self.id = rows.locate(self.fragment.id)
        self.player, self.checksum = rows.digest(self.fragment), rows.checksum(self.fragment)

    @property
    def part(self) -> FragmentPart:
        f = self.fragment
        return FragmentPart(
            self.place, f.steps, f.player, f.episode, f.start, f.ended, self.ret, self.size, f.model, f.version
        )

    @property
    def play(self) -> tuple[bytes, str, bytes]:
        """Of an id, each player of each game has one."""
        return self.id, self.bucket.game, self.player


class _Append(Work):
    def __init__(self, submission: Submission) -> None:
        super().__init__(submission.size, len(submission.fragments))
        self.games = submission.games
        self.arrivals = [_Arrival(submission, index) for index in range(len(submission.fragments))]


class CassandraWriter:
    def __init__(self, keyspace: Keyspace, games: KnownGames) -> None:
        self._keyspace, self._games = keyspace, games
        self._name = uuid.uuid4()
        self._open: dict[str, Bucket] = {}  # by game's key
        self._groups = 0
        self._counts: Counter[str] = Counter()  # refused, by game's key
        self._noting = threading.Lock()  # guards these
        self._queue: Queue[_Append] = Queue(keyspace.address)
        self._thread = threading.Thread(target=self._run, name="sparring-store", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> "Future[list[Outcome]]":
        return self._add(submission, wait=False).future

    def append(self, submissions: Iterable[Submission]) -> list[Outcome]:
        works = [self._add(submission, wait=True) for submission in submissions]
        return [outcome for work in works for outcome in work.future.result()]

    def refuse(self, refusal: Refusal) -> None:
        self._queue.refuse(refusal)
        self._queue.call()

    def close(self) -> None:
        self._queue.close()
        self._thread.join()

    def _add(self, submission: Submission, *, wait: bool) -> _Append:
        for f, body in zip(submission.fragments, submission.bodies, strict=True):
            if len(body) > FRAGMENT:
                raise FragmentRefused(
                    f"fragment {f.id!r} has {len(body) >> 20} MiB, at most {FRAGMENT >> 20} fit: cut shorter"
                )
        work = _Append(submission)
        self._queue.put(work, wait=wait)
        self._queue.call()
        return work

    # The thread

    def _run(self) -> None:
        try:
            while self._await_work():
                self._store(self._queue.take(GROUP_FRAGMENTS))
                try:
                    self.note_refusals()
                except Exception:  # whatever it is, play is stored on
                    log.exception("rejected fragments are not noted")
            self._close_buckets()
        finally:
            self._queue.abandon()

    def _await_work(self) -> bool:
        """False when there will be none any more."""
        queue = self._queue
        with queue.lock:
            queue.called.wait_for(lambda: queue.pending or queue.refusals or queue.closed)
            return bool(queue.pending or queue.refusals)

    def _store(self, works: list[_Append]) -> None:
        """If others closed its bucket, to know whether what they have, too, would be committed, a group goes again, in
        another one. After any error, which callers get, open buckets are not used again: others close them."""
        try:
            for _ in range(ATTEMPTS):
                works = [work for work in works if self._find_buckets(work)]
                if self._commit(self._claim([a for work in works for a in work.arrivals])):
                    break
            else:
                raise StoreBusy("other writers are storing the same fragments: try again in a second")
        except Exception as error:
            if not isinstance(error, SparringError | OSError):  # one nobody thought of
                log.exception("a group failed")
                error = SparringError(f"the store {self._keyspace.address} failed: see its log")
            self._open.clear()
            for work in works:
                if not work.future.done():
                    work.future.set_exception(error)
        else:
            for work in works:
                work.future.set_result([a.outcome for a in work.arrivals])

    def _find_buckets(self, work: _Append) -> bool:
        """Each fragment's is that of its game; whether all of their games are registered."""
        buckets = {}
        for name, schema in work.games:
            key, found = self._games.find(name, schema)
            if found != schema:
                work.future.set_exception(NotRegistered(f"no game {name!r} with schema {schema!r} is registered here"))
                return False
            buckets[name] = self._open.get(key) or self._new_bucket(key)
        for a in work.arrivals:
            a.bucket = buckets[a.fragment.game]
        return True

    def _claim(self, arrivals: list[_Arrival]) -> list[_Arrival]:
        """Claims all, looks who else did, and says how each turned out. Those that are new."""
        self._groups += 1
        places = {
            bucket: encode(Place(bucket.game, bucket.number, bucket.head.steps, self._groups))
            for bucket in {a.bucket for a in arrivals}
        }
        claimed: dict[tuple[bytes, str, bytes], _Arrival] = {}
        shards: dict[int, list[bytes]] = {}
        for a in arrivals:
            a.claim = places[a.bucket]
            if claimed.setdefault(a.play, a) is a:
                shards.setdefault(a.shard, []).append(a.id)
        claims = claimed.values()
        self._keyspace.write("claim", [(a.shard, a.id, a.claim, a.player, a.checksum) for a in claims])
        looks = [self._keyspace.start("claims", shard, ids) for shard, ids in shards.items()]
        others, erased, own = [], set(), set(places.values())
        for name, where, player, content in (row for found in self._keyspace.wait(looks) for row in found):
            if content is None:  # it was committed, or nobody could have erased it
                erased.add((name, decode_place(where).game, player))
            elif where not in own:
                others.append((name, decode_place(where), content))
        new = _sort(arrivals, self._committed(others), erased)
        # Before anything else is committed in their buckets: a claim below a head stands for a stored fragment.
        vain = [(a.shard, a.id, a.claim, a.player) for a in claims if a.outcome is not Outcome.STORED]
        self._keyspace.write("withdraw", vain)
        return new

    def _committed(self, claims: list[tuple[bytes, Place, int]]) -> dict[bytes, int]:
        """Which of them are: checksums by id. For those that may still be it waits a moment; then they may not any
        more."""
        deadline = time.monotonic() + random.uniform(0.25, 1) * PATIENCE
        while True:
            found: dict[tuple[str, int], BucketHead] = {}
            for game in {place.game for _, place, _ in claims}:
                numbers = {place.bucket: 0 for _, place, _ in claims if place.game == game}
                for number, head in heads.read(self._keyspace, game, numbers).items():
                    found[game, number] = head
            known = {name: content for name, p, content in claims if found[p.game, p.bucket].steps > p.after}
            growing = {(p.game, p.bucket) for name, p, _ in claims if name not in known}
            growing = {bucket for bucket in growing if not found[bucket].closed}
            if not growing:
                return known
            if time.monotonic() < deadline:
                time.sleep(random.uniform(0.02, 0.05))
            else:
                for bucket in growing:
                    heads.close(self._keyspace, *bucket, found[bucket])

    def _commit(self, new: list[_Arrival]) -> bool:
        """Puts what is new into its buckets and commits it; whether none of them was closed by others."""
        now, futures, raised = time.time(), [], {}
        for bucket in {a.bucket for a in new}:
            some, old = [a for a in new if a.bucket is bucket], bucket.head
            place = old.steps
            for a in some:
                a.place = place = place + a.fragment.steps
            fragments, size = old.fragments + len(some), old.bytes + sum([a.size for a in some])
            full = size >= BUCKET_BYTES or fragments >= BUCKET_FRAGMENTS or place >= BUCKET_STEPS
            raised[bucket] = BucketHead(old.day, place, fragments, size, closed=full)
            partition = (bucket.game, old.day, bucket.number)
            parts = encode([a.part for a in some])
            futures.append(self._keyspace.start("put record", *partition, place, now, parts))
            futures += self._keyspace.start_all("put", [(*partition, *block) for block in _blocks(some)])
        self._keyspace.wait(futures)
        lost = False
        for bucket, head in raised.items():
            applied = heads.advance(self._keyspace, bucket.game, bucket.number, bucket.head, head)
            bucket.head, lost = head, lost or not applied
            if head.closed or not applied:
                del self._open[bucket.game]
        return not lost

    # Buckets

    def _new_bucket(self, game: str) -> Bucket:
        """The next number, by agreement with all writers; the day is a name on it, and of no other consequence."""
        newest = self._keyspace.run("newest bucket", game)
        number, day = (newest[0][0] if newest else 0) + 1, _today()
        while not self._keyspace.applied("open bucket", game, number, day)[0]:
            number += 1
        self._open[game] = Bucket(game, number, BucketHead(day))
        return self._open[game]

    def _close_buckets(self) -> None:
        try:
            for bucket in self._open.values():
                heads.close(self._keyspace, bucket.game, bucket.number, bucket.head)
        except SparringError as error:  # readers close it when it has not grown for a while
            log.warning("a bucket stays open: %s", error)

    # Refused fragments

    def note_refusals(self) -> None:
        """Writes those there are; afterwards none from before the call is on its way."""
        with self._noting:
            refusals, counts = self._queue.take_refusals()
            if not refusals:
                return
            try:
                keys = {self._games.key(name): count for name, count in counts.items()}
                self._counts.update(keys)
                self._note(self._name, {key: self._counts[key] for key in keys}, refusals)
            except SparringError as error:
                log.warning("%d rejected fragments are not noted: %s", counts.total(), error)

    def note_from(self, source: str, totals: Mapping[str, int], refusals: Sequence[Refusal]) -> None:
        """A source has rows of its own, whoever writes them."""
        writer = uuid.uuid5(uuid.NAMESPACE_URL, source)
        self._note(writer, {self._games.key(name): total for name, total in totals.items()}, refusals)

    def _note(self, writer: uuid.UUID, totals: Mapping[str, int], refusals: Iterable[Refusal]) -> None:
        """A refusal's slot follows from what it says: newer ones take older ones' place, and the same one its own.
        The higher total wins, whatever clocks say."""
        futures = []
        for when, name, player, fragment, reason in refusals:
            slot, key = zlib.crc32(f"{fragment} {reason}".encode()) % QUARANTINE, self._games.key(name)
            futures.append(self._keyspace.start("quarantine", key, writer, slot, when, player, fragment, reason))
        for key, total in totals.items():
            futures.append(self._keyspace.start("count rejected", key, writer, total, total + 1))
        self._keyspace.wait(futures)


def _sort(arrivals: list[_Arrival], known: dict[bytes, int], erased: set[tuple[bytes, str, bytes]]) -> list[_Arrival]:
    """Those that are new, of each id the first; sets the outcomes of all."""
    new = []
    for a in arrivals:
        if erased and a.play in erased:
            a.outcome = Outcome.ERASED
        elif a.id in known:
            a.outcome = Outcome.DUPLICATE if known[a.id] == a.checksum else Outcome.CONFLICT
        else:
            a.outcome, known[a.id] = Outcome.STORED, a.checksum
            new.append(a)
    return new


def _blocks(arrivals: Iterable[_Arrival]) -> Iterator[tuple[int, bytes]]:
    """Rows: place and body. Each lies in one stripe, so that shares of a scan are as fair as with a row for each."""
    for _, same in groupby(arrivals, lambda a: arrival.stripe(a.place)):
        for some in groups(same, BLOCK, lambda a: len(a.body)):
            yield some[-1].place, encode_block([a.place for a in some], [a.body for a in some], some[0].claim)
