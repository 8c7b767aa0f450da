"""What waits to be committed by a store's writer: submissions, bounded by their bytes, and notes of refused fragments,
of which only the newest are kept. One queue for all durable stores; each commits in its own way."""

import threading
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from sparring.errors import SparringError
from sparring.store.arrival import Refusal
from sparring.store.protocol import StoreBusy

__all__ = ["GROUP", "QUARANTINE", "Queue", "Work"]

GROUP = 4 << 20  # bytes in one commit, if one caller does not bring more: with more, latency grows
PENDING = 64 << 20  # bytes waiting for one
QUARANTINE = 4096  # refused fragments kept


class Work:
    """Something to be done in a commit, and the answer to who asked for it."""

    last = False  # of a commit: nothing goes into it after this

    def __init__(self, size: int = 0, fragments: int = 0) -> None:
        self.size, self.fragments = size, fragments
        self.future: Future[Any] = Future()


W = TypeVar("W", bound=Work)


class Queue(Generic[W]):
    """`store` is what messages call the store. Whoever has more to guard uses the lock, too."""

    def __init__(self, store: object) -> None:
        self._store = store
        self.lock = threading.Lock()
        self.called = threading.Condition(self.lock)  # not `_room`: a thread woken for nothing takes the GIL
        self._room = threading.Condition(self.lock)
        self.closed = False
        self.pending: deque[W] = deque()
        self._bytes = 0
        self.refusals: deque[Refusal] = deque(maxlen=QUARANTINE)
        self._refused: Counter[str] = Counter()  # all of them, by game

    def put(self, work: W, *, wait: bool) -> None:
        """Who does not wait for room gets StoreBusy when there is none. One that is alone may be larger than all."""
        with self.lock:
            self._require_open()
            while self.pending and self._bytes + work.size > PENDING:
                if not wait:
                    raise StoreBusy(f"{self._bytes >> 20} MiB are waiting to be written: try again in a second")
                self._room.wait()
                self._require_open()
            self.pending.append(work)
            self._bytes += work.size

    def take(self, fragments: int | None = None) -> list[W]:
        """What the next commit takes: so many fragments, unless one caller brings more. Not what was cancelled."""
        works: list[W] = []
        size = count = 0
        with self.lock:
            self._room.notify_all()
            while self.pending and (not size or size + self.pending[0].size <= GROUP):
                if fragments is not None and count >= fragments:
                    break
                work = self.pending.popleft()
                self._bytes -= work.size
                size, count = size + work.size, count + work.fragments
                if work.future.set_running_or_notify_cancel():
                    works.append(work)
                    if work.last:
                        break
        return works

    def refuse(self, refusal: Refusal) -> None:
        """Never waits: of a flood only the newest are kept; all are counted."""
        with self.lock:
            self._require_open()
            self.refusals.append(refusal)
            self._refused[refusal[1]] += 1

    def take_refusals(self) -> tuple[deque[Refusal], Counter[str]]:
        with self.lock:
            taken = self.refusals, self._refused
            self.refusals, self._refused = deque(maxlen=QUARANTINE), Counter()
            return taken

    def put_refusals_back(self, refusals: deque[Refusal], counts: Counter[str]) -> None:
        with self.lock:
            refusals.extend(self.refusals)
            self.refusals = refusals
            self._refused.update(counts)

    def call(self) -> None:
        """The thread that works."""
        with self.lock:
            self.called.notify()

    def close(self) -> None:
        """Nothing more is taken in."""
        with self.lock:
            self.closed = True
            self.called.notify()
            self._room.notify_all()

    def abandon(self) -> None:
        """Those who still wait hear that nobody will work any more."""
        self.close()
        while works := self.take():
            for work in works:
                work.future.set_exception(SparringError(f"the store {self._store} stopped before this was written"))

    def _require_open(self) -> None:
        if self.closed:
            raise SparringError(f"the store {self._store} is closed")
