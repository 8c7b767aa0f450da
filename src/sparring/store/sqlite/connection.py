"""Connections to the SQLite store's file: opening, transactions, and what to tell people when SQLite fails."""

import errno
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparring.errors import InputError, SparringError
from sparring.store.protocol import StoreFull
from sparring.store.sqlite import scrubbing
from sparring.store.sqlite.tables import PAGE, upgrade, version_of

__all__ = ["connect", "open_reader", "open_writer", "transaction", "trouble"]

MAGIC = b"SQLite format 3\0"  # SQLite itself takes a shorter file for an empty one, and overwrites it
PATIENCE = 5.0  # seconds to wait for a lock, or for a file that is just being made


def open_writer(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = connect(path, "rwc")
        with _closing_on_error(db):
            if version_of(db, path) == 0:
                db.execute(f"PRAGMA page_size = {PAGE}")
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            for pragma in ("synchronous = FULL", "wal_autocheckpoint = 0", "secure_delete = ON", "cache_size = -16384"):
                db.execute(f"PRAGMA {pragma}")
            with transaction(db):
                upgrade(db, version_of(db, path))
    except (sqlite3.Error, OSError) as error:
        raise trouble(path, error) from error
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """Not SQLite's own read-only mode: that cannot make the files a log needs when the writer is away."""
    if not path.is_file():
        raise InputError(f"there is no store at {path}: `sparring up` makes one, or give the directory that has it")
    try:
        db = connect(path)
        with _closing_on_error(db):
            deadline = time.monotonic() + PATIENCE
            while version_of(db, path) == 0:  # its writer is just making it
                if time.monotonic() > deadline:
                    raise InputError(f"{path} is empty: `sparring up` has not made a store of it")
                time.sleep(0.02)
            db.execute("PRAGMA query_only = ON")
    except sqlite3.Error as error:
        raise trouble(path, error) from error
    return db


_looked_at: set[Path] = set()
_open: Counter[Path] = Counter()  # connections of this process
_looking = threading.Lock()


class _Counted(sqlite3.Connection):
    """One that is counted, because `scrubbing` may only close its file after the last of them."""

    path: Path | None = None

    def close(self) -> None:
        super().close()
        with _looking:
            if self.path is not None:
                _open[self.path] -= 1
                if not _open[self.path]:
                    del _open[self.path]
                    scrubbing.close(self.path)
                self.path = None


def connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    path = path.absolute()
    with _looking:
        # Once per process, before it has a connection: POSIX drops all locks of a process on a file when it closes the
        # file anywhere, and SQLite's among them. Another process that closed the store then deleted the log under us.
        if path not in _looked_at and path.is_file() and _beginning(path) not in (b"", MAGIC):
            raise _no_store(path)
        _looked_at.add(path)
    uri = f"{path.as_uri()}?mode={mode}"
    db = sqlite3.connect(
        uri, uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False, factory=_Counted
    )
    with _looking:
        db.path = path
        _open[path] += 1
    return db


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


@contextmanager
def _closing_on_error(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        db.close()
        raise


def trouble(path: Path, error: Exception) -> SparringError | StoreFull:
    """What to tell people when SQLite or the disk under it fails."""
    if _is_full(path, error):
        return StoreFull(f"no room left on the disk of the store {path}: free some; nothing stored is lost")
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return _no_store(path)
    return SparringError(f"the store {path} cannot be used: {error}")


def _no_store(path: Path) -> InputError:
    return InputError(f"{path} is not a store (nor any SQLite database): give another path, or move it away")


def _is_full(path: Path, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):  # what a full disk is called when the log's index grows
        disk = os.statvfs(path.parent)
        return disk.f_bavail * disk.f_frsize < 1 << 20
    return code == sqlite3.SQLITE_FULL


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite ends some failed ones by itself
            db.execute("ROLLBACK")
        raise
