"""Fragments → stream. A player belongs to a lane, a lane to a place among the stream's hash keys. A lane has one record
on its way at a time, so that what is tried again cannot overtake what came before it. One thread fills requests from
all lanes; a fragment is acknowledged when the stream has its record."""

import contextlib
import logging
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from sparring.aws.kinesis import HASHES, Kinesis, Put, StreamBusy, TooLargeRequest
from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, wire
from sparring.games import Game
from sparring.store.protocol import Outcome
from sparring.stream import record

__all__ = ["Counts", "Producer"]

MAX_RECORDS = 500  # of a request
MAX_REQUEST = 10 << 20  # bytes of a request; a server that takes less says so, and gets half of it
FIRST_DELAY, MAX_DELAY = 0.05, 5.0
FAULT_DELAY = 0.2  # seconds after a fault of our own: it may come again at once
QUEUE = 64 << 20
PATIENCE = 30.0  # seconds until a fragment that the stream does not take is given back to its sender
WORTH = 0.95  # records are compressed while that makes them this much smaller …
SAMPLE = 64  # … which is looked at every so many records
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Of a producer, since it began."""

    fragments: int = 0  # acknowledged
    records: int = 0
    bytes: int = 0  # of the records
    requests: int = 0
    retried: int = 0  # records that the stream did not take at once


class _Ticket:
    """A submission: done when all its fragments are with the stream."""

    def __init__(self, fragments: int, until: float) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.future.set_running_or_notify_cancel()
        self.until = until
        self._outcomes = [Outcome.STORED] * fragments
        self.left = 0

    def landed(self) -> None:
        self.left -= 1
        if self.left == 0:
            with contextlib.suppress(InvalidStateError):  # it has another result already
                self.future.set_result(self._outcomes)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(slots=True)
class _Item:
    """An encoded fragment on its way."""

    data: bytes
    declaration: bytes
    ticket: _Ticket


class _Lane:
    def __init__(self, number: int, lanes: int) -> None:
        self.key = str(number)
        self.hash_key = str((2 * number + 1) * HASHES // (2 * lanes))  # in the middle: a split at a border moves none
        self.queue: deque[_Item] = deque()
        self.flying: list[_Item] = []
        self.not_before = 0.0
        self.delay = FIRST_DELAY


class Producer:
    """`submit` is a store's: it never blocks, and its future is fulfilled when the stream has everything."""

    def __init__(self, stream: Kinesis, *, queue_bytes: int = QUEUE, patience: float = PATIENCE) -> None:
        self.counts = Counts()
        self._stream, self._limit, self._patience = stream, queue_bytes, patience
        self._lanes = [_Lane(i, stream.lanes) for i in range(stream.lanes)]
        self._changed = threading.Condition()  # guards the lanes and the rest
        self._queued = 0  # bytes
        self._busy: dict[_Lane, None] = {}  # lanes with something queued, in the order of their turns
        self._declarations: dict[tuple[str, str], bytes] = {}
        self._max_request = MAX_REQUEST
        self._compress = True
        self._logged = ""  # the newest fault of our own that was logged
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sparring-stream", daemon=True)
        self._thread.start()

    def submit(
        self, game: Game, fragments: Sequence[Fragment], encoded: Sequence[bytes] | None = None
    ) -> "Future[list[Outcome]]":
        """`encoded`: the same as MessagePack, if the caller has it."""
        if encoded is None:
            encoded = [wire.encode_one(f) for f in fragments]
        ticket = _Ticket(len(fragments), time.monotonic() + self._patience)
        try:
            parts = [part for f, data in zip(fragments, encoded, strict=True) for part in self._parts(game, f, data)]
        except InputError as error:
            ticket.fail(error)
            return ticket.future
        size = sum(len(data) for _, data in parts)
        with self._changed:
            if self._closing or (self._queued and self._queued + size > self._limit):
                why = "the stream's producer is closed" if self._closing else f"{self._queued >> 20} MiB wait for it"
                ticket.fail(StreamBusy(f"the stream {self._stream.stream} does not keep up: {why}. Try again later"))
                return ticket.future
            declared = self._declaration(game)
            ticket.left = len(parts)
            self._queued += size
            for player, data in parts:
                lane = self._lanes[zlib.crc32(player.encode()) % len(self._lanes)]
                lane.queue.append(_Item(data, declared, ticket))
                self._busy[lane] = None
            self._changed.notify_all()
        return ticket.future

    def close(self, timeout: float = 10.0) -> None:
        """Sends what it can within `timeout`; the senders of the rest get an error."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            left = [item for lane in self._lanes for item in (*lane.flying, *lane.queue)]
            for lane in self._lanes:
                lane.queue.clear()
            self._busy.clear()
            self._changed.notify_all()
        for item in left:
            item.ticket.fail(StreamBusy(f"the stream {self._stream.stream} did not take it before the end"))

    def _parts(self, game: Game, f: Fragment, data: bytes) -> list[tuple[str, bytes]]:
        """Player and bytes; several when the stream takes no record of its size."""
        if len(data) + len(self._declaration(game)) <= record.MAX_RECORD - 64:
            return [(f.player, data)]
        if f.steps == 1:
            most = record.MAX_RECORD
            raise wire.TooLarge(f"one step of {game.name!r} takes {len(data)} bytes, a stream's record {most}")
        return [part for half in record.halves(game, f) for part in self._parts(game, half, wire.encode_one(half))]

    def _declaration(self, game: Game) -> bytes:
        key = game.name, game.schema
        if key not in self._declarations:
            self._declarations[key] = record.declaration(game)
        return self._declarations[key]

    # From here on: the thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception as error:  # noqa: BLE001  # a thread that dies would leave all senders waiting for ever
                self._fault(error)

    def _turn(self) -> bool:
        """Sends a request, or waits for something to send; false: it is closed, and nothing is left."""
        with self._changed:
            lanes = self._fill(time.monotonic())
            if not lanes:
                if self._closing and not self._busy:
                    return False
                self._changed.wait(self._pause())
                return True
        try:
            self._send(lanes)
        except SparringError as error:  # also InputError: no stream, no credentials; what was sent is not at fault
            self._failed(lanes, error)
        return True

    def _fault(self, error: Exception) -> None:
        """Nothing foresaw this: logged once, and what was on its way is tried again for as long as its senders wait."""
        what = f"{type(error).__name__}: {error}"[:300]
        if what != self._logged:
            self._logged = what
            log.error("%s: a fault in sending, tried again: %s", self._stream.stream, what, exc_info=error)
        self._failed(
            [lane for lane in self._lanes if lane.flying] or list(self._busy),
            StreamBusy(f"the stream {self._stream.stream} does not take it: {what}"),
        )
        time.sleep(FAULT_DELAY)

    def _fill(self, now: float) -> list[_Lane]:
        """Takes a record's worth from each lane whose turn it is, until the request is full."""
        ready, room = [], self._max_request
        for lane in list(self._busy):
            if lane.not_before > now:
                continue
            size = self._take(lane, min(room, record.MAX_RECORD))
            if not lane.flying and lane.queue:
                break  # no room for it any more
            del self._busy[lane]
            if not lane.flying:
                continue
            room -= size
            ready.append(lane)
            if lane.queue:
                self._busy[lane] = None  # behind the others
            if len(ready) == MAX_RECORDS:
                break
        return ready

    def _take(self, lane: _Lane, room: int) -> int:
        """Bytes of the record that `lane.flying` becomes."""
        size, declared = 16 + len(lane.key), set[bytes]()
        while lane.queue:
            item = lane.queue[0]
            if item.ticket.future.done():  # given back to its sender
                self._queued -= len(lane.queue.popleft().data)
                continue
            more = len(item.data) + (0 if item.declaration in declared else len(item.declaration) + 1)
            if size + more > room:
                break
            size += more
            declared.add(item.declaration)
            lane.flying.append(lane.queue.popleft())
        return size

    def _send(self, lanes: list[_Lane]) -> None:
        puts = [Put(self._record(lane.flying), lane.key, lane.hash_key) for lane in lanes]
        try:
            results = self._stream.put(puts)
        except TooLargeRequest as error:
            if len(puts) == 1 or self._max_request < 2 * record.MAX_RECORD:
                raise
            self._max_request //= 2
            log.info("%s: requests have %d bytes at most from now on", error, self._max_request)
            self._put_back(lanes)
            return
        self.counts.requests += 1
        failed: dict[str, list[_Lane]] = {}
        for lane, put, result in zip(lanes, puts, results, strict=True):
            if result.error_code is None:
                self._landed(lane, put)
            else:
                failed.setdefault(f"{result.error_code}: {(result.error_message or '')[:200]}", []).append(lane)
        for why, some in failed.items():
            self._failed(some, StreamBusy(f"the stream {self._stream.stream} does not take it: {why}"))

    def _record(self, items: list[_Item]) -> bytes:
        """Noise is sent as it is: compressing takes more time than its bytes are worth."""
        compress = self._compress or self.counts.records % SAMPLE == 0
        declared = dict.fromkeys(item.declaration for item in items)
        plain = record.encode(declared, [item.data for item in items])
        if not compress:
            return plain
        small = record.encode(declared, [item.data for item in items], compress=True)
        self._compress = len(small) < WORTH * len(plain)
        return min(small, plain, key=len)

    def _landed(self, lane: _Lane, put: Put) -> None:
        with self._changed:
            items, lane.flying, lane.delay = lane.flying, [], FIRST_DELAY
            self._queued -= sum(len(item.data) for item in items)
        self.counts.fragments += len(items)
        self.counts.records += 1
        self.counts.bytes += len(put.data)
        for item in items:
            item.ticket.landed()

    def _failed(self, lanes: list[_Lane], error: SparringError) -> None:
        """To be tried again a little later; senders who have waited too long get an error instead."""
        now = time.monotonic()
        busy = error if isinstance(error, StreamBusy) else StreamBusy(str(error))
        self.counts.retried += len(lanes)
        waiting = [item.ticket for lane in lanes for item in (*lane.flying, *lane.queue)]
        late = [ticket for ticket in waiting if ticket.until < now or self._closing]
        with self._changed:
            for lane in lanes:
                lane.not_before = now + lane.delay * random.uniform(0.5, 1.0)
                lane.delay = min(2 * lane.delay, MAX_DELAY)
        if late:
            log.warning("%s", busy)
        for ticket in late:
            ticket.fail(busy)
        self._put_back(lanes)

    def _put_back(self, lanes: list[_Lane]) -> None:
        """To the heads of their lanes, but for what nobody waits for any more."""
        with self._changed:
            for lane in lanes:
                gone = [item for item in lane.flying if item.ticket.future.done()]
                self._queued -= sum(len(item.data) for item in gone)
                lane.queue.extendleft(item for item in reversed(lane.flying) if not item.ticket.future.done())
                lane.flying = []
                if lane.queue:
                    self._busy[lane] = None

    def _pause(self) -> float | None:
        """Seconds until a lane may try again; none: until there is something to send."""
        now = time.monotonic()
        return max(0.001, min(lane.not_before for lane in self._busy) - now) if self._busy else None
