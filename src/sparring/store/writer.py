"""Group commit: one thread owns the SQLite store's writing connection and commits what many callers hand it, with one
fsync for all that waits. The queue is bounded; an answer means that the work is on disk."""

import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparring.errors import InputError, SparringError
from sparring.store.protocol import Outcome, StoreBusy, StoreFull
from sparring.store.tables import QUARANTINE, Arrival, Refusal, insert, note, open_writer, transaction, trouble

__all__ = ["Writer"]

log = logging.getLogger(__name__)
T = TypeVar("T")

GROUP = 32 << 20  # bytes in one transaction
PENDING = 64 << 20  # bytes waiting for one
CHECKPOINT = 16 << 20  # bytes written between two checkpoints
WAL_LIMIT = 256 << 20  # beyond it a checkpoint waits for readers to let go of the log


class _Work(Generic[T]):
    def __init__(self) -> None:
        self.future: Future[T] = Future()


class _Append(_Work[list[Outcome]]):
    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        super().__init__()
        self.arrivals = arrivals
        self.size = sum(len(arrival.body) for arrival in arrivals)


class _Call(_Work[T]):
    """Other work, in a transaction of its own. After one that must leave no trace the log is emptied (`scrub`)."""

    size = 0

    def __init__(self, work: Callable[[sqlite3.Connection], T], scrub: bool) -> None:
        super().__init__()
        self.work = work
        self.scrub = scrub


class Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = open_writer(path)
        self._lock = threading.Condition()  # guards the next six
        self._closed = False
        self._pending: deque[_Append | _Call[Any]] = deque()
        self._pending_bytes = 0
        self._refusals: deque[Refusal] = deque(maxlen=QUARANTINE)
        self._refused: Counter[str] = Counter()
        self._noting = False  # there are refusals that were not tried to be written yet
        self._written = 0  # bytes since the last checkpoint; the thread's own, like the next
        self._scrub = False  # erased bytes may still be in the log
        self._thread = threading.Thread(target=self._run, name="sparring-store", daemon=True)
        self._thread.start()

    def append(self, arrivals: Sequence[Arrival], *, wait: bool) -> "Future[list[Outcome]]":
        """`wait` for room when too much is pending, or raise StoreBusy."""
        append = _Append(arrivals)
        self._put(append, wait)
        return append.future

    def call(self, work: "Callable[[sqlite3.Connection], T]", *, scrub: bool = False) -> T:
        call = _Call(work, scrub)
        self._put(call, wait=True)
        return call.future.result()

    def refuse(self, refusal: Refusal) -> None:
        """Never waits: of a flood only the newest are kept, like on disk; all are counted."""
        with self._lock:
            self._require_open()
            self._refusals.append(refusal)
            self._refused[refusal[1]] += 1
            self._noting = True
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def _put(self, work: "_Append | _Call[Any]", wait: bool) -> None:
        with self._lock:
            self._require_open()
            while self._pending and self._pending_bytes + work.size > PENDING:
                if not wait:
                    raise StoreBusy(f"{self._pending_bytes >> 20} MiB are waiting to be written: try again in a second")
                self._lock.wait()
                self._require_open()
            self._pending.append(work)
            self._pending_bytes += work.size
            self._lock.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise SparringError(f"the store {self.path} is closed")

    # The thread

    def _run(self) -> None:
        try:
            while self._await_work():
                appends, call = self._take()
                if appends:
                    self._commit(appends)
                if call is not None:
                    self._commit_call(call)
                self._note_refusals()
                self._checkpoint()
        finally:  # also when something nobody thought of ends this thread: no caller may wait for ever
            self._abandon()
            self._db.close()

    def _await_work(self) -> bool:
        """False when there will be none any more."""
        with self._lock:
            while not (self._pending or self._noting or self._closed):
                self._lock.wait()
            return bool(self._pending) or self._noting

    def _take(self) -> "tuple[list[_Append], _Call[Any] | None]":
        """The appends of the next transaction, and the call that comes after them, if one does."""
        appends: list[_Append] = []
        size = 0
        with self._lock:
            self._lock.notify_all()
            while self._pending and size + self._pending[0].size <= max(GROUP, self._pending[0].size):
                work = self._pending.popleft()
                self._pending_bytes -= work.size
                size += work.size
                if not work.future.set_running_or_notify_cancel():
                    continue
                if isinstance(work, _Call):
                    return appends, work
                appends.append(work)
        return appends, None

    def _commit(self, appends: list[_Append]) -> None:
        try:
            with transaction(self._db):
                answers = insert(self._db, [append.arrivals for append in appends], time.time())
        except (sqlite3.Error, OverflowError) as error:
            reason = trouble(self.path, error)
            if len(appends) > 1 and not isinstance(
                reason, StoreFull
            ):  # one of them may be to blame: it shall fail alone
                for append in appends:
                    self._commit([append])
                return
            for append in appends:
                append.future.set_exception(reason)
            return
        for append, answer in zip(appends, answers, strict=True):
            self._written += append.size
            if isinstance(answer, InputError):
                append.future.set_exception(answer)
            else:
                append.future.set_result(answer)

    def _commit_call(self, call: _Call[Any]) -> None:
        try:
            with transaction(self._db):
                result = call.work(self._db)
        except InputError as error:
            call.future.set_exception(error)
        except (sqlite3.Error, OverflowError) as error:
            call.future.set_exception(trouble(self.path, error))
        else:
            if call.scrub:
                self._scrub = True
                self._checkpoint()
            call.future.set_result(result)

    def _note_refusals(self) -> None:
        with self._lock:
            refusals, self._refusals = self._refusals, deque(maxlen=QUARANTINE)
            counts, self._refused = self._refused, Counter()
            self._noting = False
        if not refusals:
            return
        try:
            with transaction(self._db):
                note(self._db, refusals, counts)
        except sqlite3.Error as error:
            log.warning("%d refused fragments are not noted in %s yet: %s", counts.total(), self.path, error)
            with self._lock:  # again with the next work
                refusals.extend(self._refusals)
                self._refusals = refusals
                self._refused.update(counts)

    def _checkpoint(self) -> None:
        """After the answers, so that nobody waits for it. SQLite begins the log anew once all of it is in the file and
        no reader needs it; readers that take turns could keep it growing, so at some size they are waited for."""
        if self._written < CHECKPOINT and not self._scrub:
            return
        try:
            large = Path(f"{self.path}-wal").stat().st_size > WAL_LIMIT
            mode = "TRUNCATE" if self._scrub or large else "PASSIVE"
            busy = self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[0]
        except (sqlite3.Error, OSError) as error:
            log.warning("the store %s could not be checkpointed, its log keeps growing: %s", self.path, error)
            return
        self._written = 0
        self._scrub = self._scrub and bool(busy)

    def _abandon(self) -> None:
        with self._lock:
            self._closed = True
            left, self._pending = self._pending, deque()
            self._lock.notify_all()
        for work in left:
            if work.future.set_running_or_notify_cancel():
                work.future.set_exception(SparringError(f"the store {self.path} stopped before this was written"))
