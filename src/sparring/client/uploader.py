"""Sends fragments through a transport from one background thread: batches, retries, and keeps on disk what cannot be
taken now. Nothing is forgotten before the server acknowledged or refused it, or a bound was reached (counted)."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sparring.api import Rejected, Uploaded
from sparring.client.notices import Notices, attempt, describe, log
from sparring.client.recorder import PendingFragment
from sparring.client.spool import Spool
from sparring.client.transports.base import (
    Refused,
    SchemaMismatch,
    Transport,
    Unavailable,
    UnknownGame,
    Upload,
    UploadTooLarge,
)
from sparring.games import Game
from sparring.store.profile import MAX_PACE

__all__ = ["UploadStats", "Uploader"]

TICK = 0.2  # a fragment waits at most this long for others to share its request
MAX_FRAGMENTS = 50
MAX_BYTES = 2 << 20  # of a request before compression; a single larger fragment goes alone
SPOOL_AFTER = 5.0  # while the server is away: seconds that a kill of the process may cost
FIRST_DELAY, MAX_DELAY = 0.5, 60.0
TRIES = 3  # so often a file may fail before others go first
ASIDE, MAX_ASIDE = 30.0, 600.0  # seconds that it then waits
RESCAN = 10.0


@dataclass(frozen=True, slots=True)
class UploadStats:
    """Counts of fragments since the client began, and what waits now.

    :param uploaded: Acknowledged: on the server's disk.
    :param duplicates: Acknowledged: were there already.
    :param rejected: Refused by the server for good.
    :param dropped: Given up: the bounds of memory or disk were reached.
    :param queued: Waiting in memory.
    :param queued_bytes: Their bytes.
    :param spooled: Waiting on disk, also from earlier processes.
    """

    uploaded: int = 0
    duplicates: int = 0
    rejected: int = 0
    dropped: int = 0
    queued: int = 0
    queued_bytes: int = 0
    spooled: int = 0


class Unforeseen(Unavailable):
    """Not the server's answer, but an error of ours on the way to it."""


class Uploader:
    """`declared`: the client brought the game, so it may teach it to a server that does not know it; `registered`: the
    server knows it. `tick` is called often, in the background thread."""

    def __init__(
        self,
        transport: Transport,
        game: Game,
        spool: Spool,
        *,
        declared: bool,
        registered: bool,
        queue_bytes: int,
        notices: Notices,
        tick: Callable[[], None],
    ) -> None:
        self._transport, self._game, self._spool, self._notices, self._tick = transport, game, spool, notices, tick
        self._declared, self._registered = declared, registered
        self._limit = queue_bytes
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[PendingFragment] = deque()
        self._queued_bytes = 0  # of both, the queue and what is in flight
        self._in_flight: list[PendingFragment] = []
        self._stats = UploadStats()
        self._failures = 0 if registered else 1
        self._retry_at = 0.0  # our own patience; `flush` and `close` have less
        self._not_before = 0.0  # what the server asked for
        self._next_scan = time.monotonic() + RESCAN
        self._most = MAX_FRAGMENTS  # of a request: a proxy may take less than the server
        self._doubt = False  # whether the server is there: the newest upload failed
        self._next_wake = 0.0
        self.pace = 0.0  # seconds between uploads at least: what the server asks for
        self._sent_at = float("-inf")
        self._hurry = False
        self._wake = False  # files that were set aside are to be tried now
        self._deadline: float | None = None  # of a close
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="sparring-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, pending: PendingFragment) -> None:
        """Never waits for the network or the disk."""
        with self._changed:
            self._queue.append(pending)
            self._queued_bytes += pending.size
            lost = 0
            while self._queued_bytes > self._limit and self._queue:
                self._queued_bytes -= self._queue.popleft().size
                lost += 1
            if self._full():
                self._changed.notify_all()
        if lost:
            self._drop(lost, f"{self._limit} bytes of play wait in memory already")

    @property
    def stats(self) -> UploadStats:
        with self._changed:
            return replace(
                self._stats,
                queued=len(self._queue) + len(self._in_flight),
                queued_bytes=self._queued_bytes,
                spooled=len(self._spool),
            )

    @property
    def away(self) -> bool:
        """The last try failed, and the next one is not due or not done."""
        return self._failures > 0

    def flush(self, timeout: float) -> bool:
        """Waits until everything is with the server; False when that did not happen in time."""
        with self._changed:
            self._hurry, self._wake, self._retry_at = True, True, 0.0
            self._changed.notify_all()
            return self._changed.wait_for(self._idle, timeout)

    def wait_for_room(self, limit: int, timeout: float) -> bool:
        """Waits while the server is away or more than `limit` bytes are queued."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.away and self._queued_bytes <= limit, timeout)

    def close(self, timeout: float) -> None:
        """Sends what it can within `timeout` and leaves the rest on disk."""
        with self._changed:
            self._deadline, self._retry_at = time.monotonic() + timeout, 0.0
            self._changed.notify_all()
        self._thread.join(timeout + TICK)
        with self._changed:
            self._abandoned = True  # a thread that still hangs in a request must not touch the rest
            left = [*self._in_flight, *self._queue]
            self._in_flight = []
            self._queue.clear()
            self._queued_bytes = 0
        while left:
            batch, left = left[:MAX_FRAGMENTS], left[MAX_FRAGMENTS:]
            if upload := self._upload_of(batch):
                self._keep(upload, batch)

    # From here on: the background thread.

    def _run(self) -> None:
        again = False
        while not self._abandoned:
            with self._changed:
                if not (again or self._hurry or self._deadline):
                    self._changed.wait(TICK)
            self._notices.guard("the client's work in the background", self._tick)
            sent = bool(self._notices.guard("sending play", self._send))
            with self._changed:
                # One request per turn, so that the tick gets its turn however fast the game is.
                again = sent and (self._full() or bool(self._spool))
                self._hurry = self._hurry and sent
                self._changed.notify_all()
                if self._deadline is not None and not sent:
                    return

    def _send(self) -> bool:
        """One request. False: there is nothing to send, or nobody to take it."""
        if self._must_wait():
            self._spill()
            return False
        try:
            with _foreseen():
                return self._send_one()
        except Unavailable as error:
            self._failed(error)
            self._spill()
            return False

    def _must_wait(self) -> bool:
        now = time.monotonic()
        return now < max(self._retry_at, self._not_before) or (self._deadline is not None and now >= self._deadline)

    def _send_one(self) -> bool:
        """The oldest file on disk, else what is oldest in memory, else a file that failed. False: there is none."""
        if self._queued_bytes > self._limit // 2:
            self._spill()  # the server is slower than the game: better on disk than over the bound
        if time.monotonic() > self._next_scan:
            self._spool.scan()
            self._next_scan = time.monotonic() + RESCAN
        if self._wake:
            self._wake = False
            self._spool.wake()
        if self._send_file() or self._send_queued() or self._send_file(aside=True):
            return True
        self._probe()
        return False

    def _send_queued(self) -> bool:
        if self._too_soon():
            return False
        batch = self._take(self._most)
        if not (upload := self._upload_of(batch)):
            return False
        try:
            self._deliver(upload, len(batch))
        except Unavailable as error:
            if self._abandoned:
                raise
            too_large = isinstance(error, UploadTooLarge)
            if too_large and len(batch) > 1:
                self._most = len(batch) // 2
                self._put_back(batch)
                return True
            if self._keep(upload, batch):
                self._landed()
                if too_large:
                    return True
            elif _own_fault(error):
                with self._changed:
                    self._queue.rotate(-len(batch))  # there is no disk: others go first
            raise
        self._landed()
        self._most = min(self._most + 1, MAX_FRAGMENTS)
        return True

    def _too_soon(self) -> bool:
        """The server asked for fewer uploads: what is recorded waits for others, unless it is enough for a request."""
        with self._changed:
            hurry = self._hurry or self._deadline is not None or self._full()
        return not hurry and time.monotonic() < self._sent_at + self.pace

    def _send_file(self, aside: bool = False) -> bool:
        """False: there is none, or another process is sending what is there."""
        if self._spool.next(aside) is None:
            return False
        try:
            with self._spool.sending() as mine:
                found = self._spool.next(aside) if mine else None
                if found is None:
                    return False
                path, count = found
                try:
                    self._deliver_file(path, count)
                except FileNotFoundError:
                    self._spool.remove(path)  # another process was quicker
                except Unavailable as error:
                    self._stuck(path, error)
                except OSError as error:
                    self._stuck(path, Unforeseen(f"cannot work with {path}: {error}"))
                return True
        except OSError as error:
            self._notices.warn(f"cannot read {self._spool.directory}: {error}")
            return False

    def _deliver_file(self, path: Path, count: int) -> None:
        """Sends it and removes it. One that is too large is divided instead, and its halves have their turns next."""
        upload = Upload.from_body(path.read_bytes())
        try:
            self._deliver(upload, count)
        except UploadTooLarge as error:
            try:
                several = len(upload.fragments) > 1
            except Refused:
                several = False  # damaged on disk
            if not several:
                raise error
            self._spool.divide(path, [(half.body, len(half.fragments)) for half in upload.halves()])
        else:
            self._spool.remove(path)

    def _stuck(self, path: Path, error: Unavailable) -> None:
        """A file that could not be sent. It does not block the others for ever: after a few tries, or at once when it
        seems to be its own fault, they go first. Raises the error when the server may be away."""
        tries = self._spool.failed(path)
        if tries < TRIES and not _own_fault(error):
            raise error
        self._spool.set_aside(path, min(MAX_ASIDE, ASIDE * 2 ** min(max(tries - TRIES, 0), 20)))
        if not isinstance(error, UploadTooLarge):
            doubt, self._doubt = self._doubt, True
            if doubt:
                raise error
        self._tell(error)
        if error.retry_after is not None:
            self._not_before = time.monotonic() + error.retry_after

    def _take(self, most: int = MAX_FRAGMENTS) -> list[PendingFragment]:
        """Moves up to a request's worth of fragments from the queue to `_in_flight`."""
        with self._changed:
            size = 0
            while self._queue and len(self._in_flight) < most:
                size += self._queue[0].size
                if self._in_flight and size > MAX_BYTES:
                    break
                self._in_flight.append(self._queue.popleft())
            return list(self._in_flight)

    def _put_back(self, batch: list[PendingFragment]) -> None:
        with self._changed:
            self._queue.extendleft(reversed(batch))
            self._in_flight = []

    def _upload_of(self, batch: list[PendingFragment]) -> Upload | None:
        """An upload. Fragments that cannot be made leave the batch, logged and counted; none: no others are left."""
        upload, bad = Upload(), set[str]()
        for pending in batch:
            done = attempt(lambda pending=pending: upload.add(pending.fragment()))  # type: ignore[misc]
            if isinstance(done, Exception):
                bad.add(pending.id)
                self._notices.warn(f"a fragment of play is dropped, it cannot be packed: {describe(done)}")
        if bad:
            with self._changed:
                self._queued_bytes -= sum(pending.size for pending in self._in_flight if pending.id in bad)
                self._in_flight = [pending for pending in self._in_flight if pending.id not in bad]
                self._stats = replace(self._stats, dropped=self._stats.dropped + len(bad))
            batch[:] = [pending for pending in batch if pending.id not in bad]
        return upload if batch else None

    def _landed(self) -> None:
        """What was in flight is safe: with the server or on disk."""
        with self._changed:
            self._queued_bytes -= sum(pending.size for pending in self._in_flight)
            self._in_flight = []
            self._changed.notify_all()

    def _deliver(self, upload: Upload, count: int) -> None:
        """Returns when each fragment is acknowledged or refused; raises Unavailable when neither is certain."""
        with _foreseen():
            try:
                done = self._upload(upload)
            except Refused as error:
                reasons = {refused.reason: refused for refused in error.problem.rejected}
                done = Uploaded(0, 0, list(reasons.values()) or [Rejected(0, "", error.status, str(error))])
            self._doubt, self._sent_at = False, time.monotonic()
            self.pace = min(max(done.pace or 0.0, 0.0), MAX_PACE)
            self._succeeded()
            self._account(done, count)

    def _upload(self, upload: Upload, again: bool = True) -> Uploaded:
        if not self._registered:
            self._register()
        try:
            return self._transport.upload(self._game, upload, self._timeout())
        except UnknownGame:
            if not (self._declared and again):
                raise
            self._registered = False  # the server lost its games: teach it again
            return self._upload(upload, again=False)

    def _account(self, done: Uploaded, count: int) -> None:
        for rejected in done.rejected:
            self._notices.warn(f"the server refuses play of {self._game.name!r} for good: {rejected.reason}")
        if done.ignored:
            names = ", ".join(done.ignored)
            self._notices.warn(f"{self._transport.address} is older than this client, and does not store: {names}")
        with self._changed:
            self._stats = replace(
                self._stats,
                uploaded=self._stats.uploaded + done.accepted,
                duplicates=self._stats.duplicates + done.duplicates,
                rejected=self._stats.rejected + max(0, count - done.accepted - done.duplicates),
            )

    def _register(self) -> None:
        try:
            self._transport.register(self._game, self._timeout())
        except (Refused, SchemaMismatch) as error:
            self._notices.warn(f"the server refuses the game {self._game.name!r}: {error}")
        self._registered = True  # refused: the uploads that follow will be too, and are counted then

    def _probe(self) -> None:
        """Nothing to send: asks whether a server that was away is back, for those who wait for it."""
        if not self._failures or self._deadline is not None:
            return
        try:
            if self._registered:
                self._transport.ping(self._game, self._timeout())
            else:
                self._register()
        except Refused as error:
            log.debug("%s is there: %s", self._transport.address, error)
        self._succeeded()

    def _timeout(self) -> float:
        if self._deadline is None:
            return self._transport.timeout
        return min(self._transport.timeout, max(0.1, self._deadline - time.monotonic()))

    def _succeeded(self) -> None:
        if self._failures:
            log.info("%s is back", self._transport.address)
            self._failures = 0
            if time.monotonic() >= self._next_wake:  # what failed meanwhile need not have been at fault
                self._next_wake = time.monotonic() + ASIDE
                self._spool.wake()

    def _failed(self, error: Unavailable) -> None:
        self._failures += 1
        self._doubt = True
        now = time.monotonic()
        if error.retry_after is not None:
            self._not_before = now + error.retry_after * random.uniform(1.0, 1.2)
        else:
            delay = min(MAX_DELAY, FIRST_DELAY * 2 ** min(self._failures - 1, 20))
            self._retry_at = now + delay * random.uniform(0.5, 1.5)
        self._tell(error)

    def _tell(self, error: Unavailable) -> None:
        log.debug("not sent", exc_info=error)
        self._notices.warn(f"{error}. Play goes on; it is kept in {self._spool.directory} and sent later")

    def _spill(self) -> None:
        """Queue → disk: all of it when there is much or time is short, else only what has waited long enough."""
        while not self._abandoned:
            with self._changed:
                closing = self._deadline is not None
                waited = time.time() - self._queue[0].time if self._queue else 0.0
                full = self._full()
            if not (closing or full or waited >= SPOOL_AFTER):
                return
            batch = self._take()
            if not batch:
                return
            upload = self._upload_of(batch)
            if upload and not self._keep(upload, batch):
                return
            self._landed()

    def _keep(self, upload: Upload, batch: list[PendingFragment]) -> bool:
        """Batch → disk; back to the queue's head when the disk will not have it."""
        try:
            dropped = self._spool.put(upload.body, len(batch))
        except OSError as error:
            self._notices.warn(f"cannot keep play in {self._spool.directory} ({error}); it waits in memory")
            with self._changed:
                if self._abandoned:
                    self._stats = replace(self._stats, dropped=self._stats.dropped + len(batch))
                    return False
            self._put_back(batch)
            return False
        if dropped:
            self._drop(dropped, f"{self._spool.directory} has reached its bound of {self._spool.limit} bytes")
        return True

    def _drop(self, count: int, why: str) -> None:
        with self._changed:
            self._stats = replace(self._stats, dropped=self._stats.dropped + count)
        self._notices.warn(
            f"the oldest unsent play was dropped: {why}. The server {self._transport.address} was away too long"
        )

    def _full(self) -> bool:
        """Enough waits for a request."""
        return len(self._queue) >= MAX_FRAGMENTS or self._queued_bytes >= MAX_BYTES

    def _idle(self) -> bool:
        return not (self._queue or self._in_flight or self._spool)


def _own_fault(error: Unavailable) -> bool:
    """Whether it seems to be about what was sent, and not about the server."""
    return error.status == 500 or isinstance(error, UploadTooLarge | Unforeseen)


@contextmanager
def _foreseen() -> Iterator[None]:
    """Whatever goes wrong within is Unavailable: to be logged, and tried again later. The thread goes on."""
    try:
        yield
    except Unavailable:
        raise
    except Exception as error:
        raise Unforeseen(f"sending play failed unexpectedly ({describe(error)})") from error
