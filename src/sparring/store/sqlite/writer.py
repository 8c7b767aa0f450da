"""Group commit: whoever has the turn commits all that waits, with one fsync. The queue is bounded; an answer means that
the work is on disk. Callers who wait take the turn themselves, a thread takes it for those who do not."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from sparring.errors import InputError, SparringError
from sparring.store.arrival import Refusal, Submission
from sparring.store.protocol import Outcome, StoreFull
from sparring.store.queue import Queue, Work
from sparring.store.sqlite import connection, erasing, fragment_table, quarantine_table, scrubbing, tables

__all__ = ["SqliteWriter"]

log = logging.getLogger(__name__)
T = TypeVar("T")

CHECKPOINT = 16 << 20  # bytes of log between two checkpoints
OVERHEAD = 8 * tables.PAGE  # bytes of log that every transaction takes besides its fragments
LOG_LIMIT = 256 << 20  # beyond it a checkpoint is worth a longer wait
CLEANED = 512  # pages of the file that are cleaned in one turn
GIVEN_BACK = 256  # pages that are given back to the disk in one turn
SCRUB_WAIT = 30.0  # seconds that who erased waits for the files to be clean; a larger file takes longer
BLOCKED = 1.0  # seconds until the next try while a reader is in the way


class _Append(Work):
    def __init__(self, submission: Submission) -> None:
        super().__init__(submission.size)
        self.submission = submission


class _Call(Work, Generic[T]):
    """Other work, in a transaction of its own."""

    last = True

    def __init__(self, work: Callable[[sqlite3.Connection], T]) -> None:
        super().__init__()
        self.work = work


class SqliteWriter:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()  # guards the connection and the next three
        self._db = connection.open_writer(path)
        self._ledger = fragment_table.Ledger()
        self._written = 0  # bytes of log since the last checkpoint, about
        self._razing, left = erasing.unfinished(self._db)  # rows of deleted games, from a process that was killed
        self._checkpointer = connection.connect(path)  # the thread's own
        self._queue: Queue[_Append | _Call[Any]] = Queue(path)
        self._lock = self._queue.lock  # guards the rest
        self._scrub = left  # bytes of erased rows may be in the files
        self._wanted = self._razing or left  # there is something for the thread to do
        self._blocked = False  # and a reader keeps us from removing them
        self._scrubbed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="sparring-store", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> "Future[list[Outcome]]":
        """Never waits: StoreBusy when too much is pending."""
        work = _Append(submission)
        self._queue.put(work, wait=False)
        self._want_thread()
        return work.future

    def append(self, submission: Submission) -> list[Outcome]:
        return self._finish(_Append(submission))

    def call(self, work: "Callable[[sqlite3.Connection], T]") -> T:
        return self._finish(_Call(work))

    def scrub(self) -> None:
        """Makes what was erased unreadable in the files, too: in the log, and where rows once were. The thread does it,
        a piece at a time; who erased waits for it, but not for a reader in the way, nor for ever."""
        with self._lock:
            self._scrub, self._blocked = True, False
            self._wanted = True
            self._queue.called.notify()
            self._scrubbed.wait_for(lambda: not self._scrub or self._blocked or self._queue.closed, SCRUB_WAIT)

    def refuse(self, refusal: Refusal) -> None:
        self._queue.refuse(refusal)
        self._want_thread()

    def note_refusals(self) -> None:
        """Writes those there are; afterwards none from before the call is on its way."""
        with self._turn:
            refusals, counts = self._queue.take_refusals()
            if not refusals:
                return
            try:
                with connection.transaction(self._db):
                    quarantine_table.note(self._db, refusals, counts)
            except sqlite3.Error as error:
                log.warning("%d rejected fragments are not noted in %s yet: %s", counts.total(), self.path, error)
                self._queue.put_refusals_back(refusals, counts)  # again with the next work
            except Exception as error:  # noqa: BLE001  # logged; again would fail again
                self._unexpected(f"{counts.total()} rejected fragments are not noted", error)

    def note_from(self, source: str, totals: Mapping[str, int], refusals: Sequence[Refusal]) -> None:
        self.call(lambda db: quarantine_table.note_from(db, source, totals, refusals))

    def close(self) -> None:
        self._queue.close()
        self._thread.join()

    def _finish(self, work: "_Append | _Call[Any]") -> Any:
        self._queue.put(work, wait=True)
        with self._turn:
            while not work.future.done():
                self._work()
        return work.future.result()

    def _want_thread(self) -> None:
        with self._lock:
            self._wanted = True
            self._queue.called.notify()

    # With the turn

    def _work(self) -> None:
        """Whatever goes wrong is the answer to those whose work it was, and raised to nobody else. The turn may be that
        of another caller, or of the thread, which has to live on."""
        works = self._queue.take()
        try:
            if appends := [work for work in works if isinstance(work, _Append)]:
                self._commit(appends)
            for call in [work for work in works if isinstance(work, _Call)]:  # one at most, after the appends
                self._commit_call(call)
        finally:  # also when a caller is interrupted: none of those whose work was taken may wait for ever
            for work in works:
                if not work.future.done():
                    work.future.set_exception(SparringError(f"the store {self.path} was interrupted: try again"))
        if self._written >= CHECKPOINT:
            self._want_thread()

    def _commit(self, appends: list[_Append]) -> None:
        try:
            submissions = [append.submission for append in appends]
            answers = fragment_table.append(self._db, self._ledger, submissions, time.time())
        except Exception as error:  # noqa: BLE001  # the callers' answer, and logged if nobody thought of it
            reason = self._trouble(error)
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
            with connection.transaction(self._db):
                result = call.work(self._db)
        except InputError as error:
            call.future.set_exception(error)
        except Exception as error:  # noqa: BLE001  # the callers' answer, and logged if nobody thought of it
            call.future.set_exception(self._trouble(error))
        else:
            call.future.set_result(result)

    def _trouble(self, error: Exception) -> Exception:
        """What to tell those whose work failed."""
        if isinstance(error, sqlite3.Error | OverflowError):
            return connection.trouble(self.path, error)
        if isinstance(error, msgspec.MsgspecError):
            return SparringError(f"the store {self.path} holds a damaged fragment: {error}")
        return self._unexpected("some work failed", error)

    def _unexpected(self, what: str, error: Exception) -> SparringError:
        log.error("the store %s: %s", self.path, what, exc_info=error)
        return SparringError(f"the store {self.path}: {what}: {type(error).__name__}: {error}; its log has more")

    def _checkpoint(self) -> None:
        """Brings the log into the file and begins it anew, for which readers have to be done with it: their reads are
        short. One that is not must not keep writers waiting each time; the log grows meanwhile."""
        try:
            large = Path(f"{self.path}-wal").stat().st_size > LOG_LIMIT
            mode, patience = ("TRUNCATE", 1.0) if large else ("RESTART", 0.1)
            self._db.execute(f"PRAGMA busy_timeout = {patience * 1000:.0f}")
            self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
            self._db.execute(f"PRAGMA busy_timeout = {connection.PATIENCE * 1000:.0f}")
        except (sqlite3.Error, OSError) as error:
            log.warning("the store %s could not be checkpointed, its log keeps growing: %s", self.path, error)
            return
        self._written = 0

    # The thread

    def _run(self) -> None:
        try:
            while self._await_work():
                try:
                    with self._turn:
                        self._work()
                    self.note_refusals()
                    self._checkpoint_aside()
                    self._clear_up()
                except Exception as error:  # noqa: BLE001  # logged
                    self._unexpected("its thread goes on", error)
        finally:
            self._abandon()

    def _await_work(self) -> bool:
        """False when there will be none any more."""
        with self._lock:
            while not (self._wanted or self._queue.closed):
                if not self._queue.called.wait(BLOCKED if self._scrub else None):
                    return True  # time to look again whether the reader is gone
            wanted, self._wanted = self._wanted, bool(self._queue.pending)
            return wanted or bool(self._queue.pending)

    def _checkpoint_aside(self) -> None:
        """Most of it while others write; only the rest, and with it the log's new beginning, takes the turn."""
        if self._written < CHECKPOINT:
            return
        try:
            self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            log.warning("the store %s could not be checkpointed: %s", self.path, error)
        with self._turn:
            self._checkpoint()

    def _clear_up(self) -> None:
        """One piece of what deletions leave to be done."""
        if self._queue.closed or not (self._razing or self._scrub):
            return  # the next process goes on
        done: bool | None = False
        try:
            self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()  # most of it while others write
            with self._turn:
                if self._razing:
                    self._ledger.forget()
                    with connection.transaction(self._db):
                        self._razing = erasing.raze(self._db)
                elif not self._give_back():
                    done = self._clean()
        except (sqlite3.Error, OSError) as error:
            log.warning("bytes of what was erased may be left in %s: %s; tried again", self.path, error)
            done = None
        with self._lock:
            self._scrub, self._blocked = not done, done is None
            self._wanted = self._wanted or done is False
            self._scrubbed.notify_all()

    def _give_back(self) -> bool:
        """Pages that are not used any more, to the disk; some are kept for what comes. Older files only use them again:
        they were made without this."""
        (mode,), (free,), (count,) = [
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("auto_vacuum", "freelist_count", "page_count")
        ]
        if mode != 2 or free <= max(count // 8, GIVEN_BACK):
            return False
        try:
            # A script: `execute` would stop after one page. Pages change places, so cleaning them begins again.
            self._db.executescript(
                f"BEGIN IMMEDIATE; PRAGMA incremental_vacuum({GIVEN_BACK}); UPDATE scrub SET pages = 0; COMMIT"
            )
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        return True

    def _clean(self) -> bool | None:
        """Some pages of the file, with an empty log: whether all are clean now. None: a reader needs the log."""
        db = self._checkpointer
        db.execute("PRAGMA busy_timeout = 100")
        if db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            return None
        with connection.transaction(db):
            row = db.execute("SELECT pages FROM scrub").fetchone()
            if row is None:
                return True
            if Path(f"{self.path}-wal").stat().st_size:
                return False  # another process was quicker: again
            (size,), (count,), (mode,) = [
                db.execute(f"PRAGMA {name}").fetchone() for name in ("page_size", "page_count", "auto_vacuum")
            ]
            last = min(row[0] + CLEANED, count)
            scrubbing.clean(self.path, size, row[0] + 1, last, mapped=mode != 0)
            # Whatever is written here has other connections forget the pages that they remember.
            db.execute("UPDATE scrub SET pages = ?", (last,)) if last < count else db.execute("DELETE FROM scrub")
        return False  # the log has what was just written: once more to empty it

    def _abandon(self) -> None:
        self._queue.abandon()
        with self._lock:
            self._scrubbed.notify_all()
        with self._turn:
            self._checkpointer.close()
            self._db.close()
