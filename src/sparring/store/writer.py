"""Group commit: whoever has the turn commits all that waits, with one fsync. The queue is bounded; an answer means that
the work is on disk. Callers who wait take the turn themselves, a thread takes it for those who do not."""

import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparring.errors import InputError, SparringError
from sparring.store import tables
from sparring.store.arrival import Submission
from sparring.store.protocol import Outcome, StoreBusy, StoreFull
from sparring.store.tables import Refusal

__all__ = ["Writer"]

log = logging.getLogger(__name__)
T = TypeVar("T")

GROUP = 4 << 20  # bytes in one transaction: with more, fsync's share is small and latency grows
PENDING = 64 << 20  # bytes waiting for one
CHECKPOINT = 16 << 20  # bytes of log between two checkpoints
OVERHEAD = 8 * tables.PAGE  # bytes of log that every transaction takes besides its fragments
LOG_LIMIT = 256 << 20  # beyond it a checkpoint is worth a longer wait
COMPACT = 1 << 30  # a file up to this size is rewritten after an erasure


class _Work(Generic[T]):
    def __init__(self) -> None:
        self.future: Future[T] = Future()


class _Append(_Work[list[Outcome]]):
    def __init__(self, submission: Submission) -> None:
        super().__init__()
        self.submission = submission
        self.size = submission.size


class _Call(_Work[T]):
    """Other work, in a transaction of its own."""

    size = 0

    def __init__(self, work: Callable[[sqlite3.Connection], T]) -> None:
        super().__init__()
        self.work = work


class Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()  # guards the connection and the next four
        self._db = tables.open_writer(path)
        self._ledger = tables.Ledger()
        self._checkpointer = tables.connect(path)  # the thread's own
        self._written = 0  # bytes of log since the last checkpoint, about
        self._scrub = False  # erased bytes may still be in the log
        self._lock = threading.Lock()  # guards the rest
        self._room = threading.Condition(self._lock)
        self._call_thread = threading.Condition(self._lock)  # not the same: a thread woken for nothing takes the GIL
        self._closed = False
        self._pending: deque[_Append | _Call[Any]] = deque()
        self._pending_bytes = 0
        self._refusals: deque[Refusal] = deque(maxlen=tables.QUARANTINE)
        self._refused: Counter[str] = Counter()
        self._wanted = False  # there is something for the thread to do
        self._thread = threading.Thread(target=self._run, name="sparring-store", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> "Future[list[Outcome]]":
        """Never waits: StoreBusy when too much is pending."""
        work = _Append(submission)
        self._put(work, wait=False)
        self._want_thread()
        return work.future

    def append(self, submission: Submission) -> list[Outcome]:
        return self._finish(_Append(submission))

    def call(self, work: "Callable[[sqlite3.Connection], T]") -> T:
        return self._finish(_Call(work))

    def scrub(self) -> None:
        """Makes what was erased unreadable in the files too.

        SQLite overwrites what it deletes, but it leaves copies behind when it moves rows between pages, and old pages
        in the log. A new file has none of them; one so large that nobody could write for minutes is not rewritten, and
        keeps what few copies there are until their places are used again.
        """
        with self._turn:
            self._scrub = True
            try:
                if self.path.stat().st_size <= COMPACT:
                    self._db.execute("VACUUM")
            except sqlite3.Error as error:
                log.warning("the store %s could not be compacted after an erasure: %s", self.path, error)
            self._checkpoint()

    def refuse(self, refusal: Refusal) -> None:
        """Never waits: of a flood only the newest are kept, like on disk; all are counted."""
        with self._lock:
            self._require_open()
            self._refusals.append(refusal)
            self._refused[refusal[1]] += 1
        self._want_thread()

    def note_refusals(self) -> None:
        """Writes those there are; afterwards none from before the call is on its way."""
        with self._turn:
            with self._lock:
                refusals, self._refusals = self._refusals, deque(maxlen=tables.QUARANTINE)
                counts, self._refused = self._refused, Counter()
            if not refusals:
                return
            try:
                with tables.transaction(self._db):
                    tables.note(self._db, refusals, counts)
            except sqlite3.Error as error:
                log.warning("%d refused fragments are not noted in %s yet: %s", counts.total(), self.path, error)
                with self._lock:  # again with the next work
                    refusals.extend(self._refusals)
                    self._refusals = refusals
                    self._refused.update(counts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._call_thread.notify()
        self._thread.join()

    def _finish(self, work: "_Append | _Call[Any]") -> Any:
        self._put(work, wait=True)
        with self._turn:
            while not work.future.done():
                self._work()
        return work.future.result()

    def _put(self, work: "_Append | _Call[Any]", *, wait: bool) -> None:
        with self._lock:
            self._require_open()
            while self._pending and self._pending_bytes + work.size > PENDING:
                if not wait:
                    raise StoreBusy(f"{self._pending_bytes >> 20} MiB are waiting to be written: try again in a second")
                self._room.wait()
                self._require_open()
            self._pending.append(work)
            self._pending_bytes += work.size

    def _want_thread(self) -> None:
        with self._lock:
            self._wanted = True
            self._call_thread.notify()

    def _require_open(self) -> None:
        if self._closed:
            raise SparringError(f"the store {self.path} is closed")

    # With the turn

    def _work(self) -> None:
        appends, call = self._take()
        try:
            if appends:
                self._commit(appends)
            if call is not None:
                self._commit_call(call)
        finally:  # also after an error nobody thought of: none of those whose work was taken may wait for ever
            for work in (*appends, call) if call else appends:
                if not work.future.done():
                    work.future.set_exception(SparringError(f"the store {self.path} failed: see its log"))
        if self._written >= CHECKPOINT or self._scrub:
            self._want_thread()

    def _take(self) -> "tuple[list[_Append], _Call[Any] | None]":
        """The appends of the next transaction, and the call that comes after them, if one does."""
        appends: list[_Append] = []
        size = 0
        with self._lock:
            self._room.notify_all()
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
            answers = tables.append(self._db, self._ledger, [append.submission for append in appends], time.time())
        except (sqlite3.Error, OverflowError) as error:
            reason = tables.trouble(self.path, error)
            if len(appends) > 1 and not isinstance(reason, StoreFull):  # one may be to blame: it shall fail alone
                for append in appends:
                    self._commit([append])
                return
            for append in appends:
                append.future.set_exception(reason)
            return
        self._written += OVERHEAD
        for append, answer in zip(appends, answers, strict=True):
            self._written += append.size
            if isinstance(answer, InputError):
                append.future.set_exception(answer)
            else:
                append.future.set_result(answer)

    def _commit_call(self, call: _Call[Any]) -> None:
        self._ledger.forget()
        try:
            with tables.transaction(self._db):
                result = call.work(self._db)
        except InputError as error:
            call.future.set_exception(error)
        except (sqlite3.Error, OverflowError) as error:
            call.future.set_exception(tables.trouble(self.path, error))
        else:
            call.future.set_result(result)

    def _checkpoint(self) -> None:
        """Brings the log into the file and begins it anew, for which readers have to be done with it: their reads are
        short. One that is not must not keep writers waiting each time; the log grows meanwhile."""
        try:
            large = Path(f"{self.path}-wal").stat().st_size > LOG_LIMIT
            mode, patience = ("TRUNCATE", 1.0) if self._scrub or large else ("RESTART", 0.1)
            self._db.execute(f"PRAGMA busy_timeout = {patience * 1000:.0f}")
            busy = self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[0]
            self._db.execute(f"PRAGMA busy_timeout = {tables.PATIENCE * 1000:.0f}")
        except (sqlite3.Error, OSError) as error:
            log.warning("the store %s could not be checkpointed, its log keeps growing: %s", self.path, error)
            return
        self._written = 0
        self._scrub = self._scrub and bool(busy)

    # The thread

    def _run(self) -> None:
        try:
            while self._await_work():
                with self._turn:
                    self._work()
                self.note_refusals()
                self._checkpoint_aside()
        finally:
            self._abandon()

    def _await_work(self) -> bool:
        """False when there will be none any more."""
        with self._lock:
            while not (self._wanted or self._closed):
                self._call_thread.wait()
            wanted, self._wanted = self._wanted, bool(self._pending)
            return wanted or bool(self._pending)

    def _checkpoint_aside(self) -> None:
        """Most of it while others write; only the rest, and with it the log's new beginning, takes the turn."""
        if self._written < CHECKPOINT and not self._scrub:
            return
        try:
            self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            log.warning("the store %s could not be checkpointed: %s", self.path, error)
        with self._turn:
            self._checkpoint()

    def _abandon(self) -> None:
        with self._lock:
            self._closed = True
            left, self._pending = self._pending, deque()
            self._room.notify_all()
        for work in left:
            if work.future.set_running_or_notify_cancel():
                work.future.set_exception(SparringError(f"the store {self.path} stopped before this was written"))
        with self._turn:
            self._checkpointer.close()
            self._db.close()
