"""What could not be sent yet, on disk: one file per request body, written whole or not at all, sent oldest first.

Files are only ever added, read and removed, so several processes may share a directory; a lock lets one of them send.
"""

import math
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparring import files
from sparring.client.notices import Notices

__all__ = ["Spool"]

BLOCK = 4096  # a small file takes this much all the same
STALE = 3600.0


class Spool:
    """`limit` bounds the bytes on disk: the oldest files make room for the newest."""

    def __init__(self, directory: Path, limit: int, notices: Notices | None = None) -> None:
        self.directory = directory
        self.limit = limit
        self._notices = notices or Notices()
        self._files: deque[Path] = deque()  # oldest first; what this process knows of
        self._failures: dict[Path, int] = {}  # of files that could not be sent
        self._aside: dict[Path, float] = {}  # until when
        self._bytes = 0
        self._fragments = 0
        self._last_name = 0
        self.scan()

    def __len__(self) -> int:
        """Fragments waiting here."""
        return self._fragments

    def __bool__(self) -> bool:
        return bool(self._files)

    def put(self, body: bytes, fragments: int) -> int:
        """On disk when it returns. Returns how many older fragments were dropped to make room; raises OSError."""
        dropped = 0
        if self._bytes + _blocks(len(body)) > self.limit:
            self.scan()  # others may have sent or added some
        while self._files and self._bytes + _blocks(len(body)) > self.limit:
            dropped += _count(self._files[0])
            self.remove(self._files[0])
        if _blocks(len(body)) > self.limit:
            return dropped + fragments
        # In this process the names rise even when the clock does not.
        self._last_name = max(time.time_ns(), self._last_name + 1)
        path = self.directory / f"{self._last_name:020d}-{os.getpid()}-{fragments}.batch"
        files.write_whole(path, body, sync=True, parents=True, shared=True)
        self._files.append(path)
        self._bytes += _blocks(len(body))
        self._fragments += fragments
        return dropped

    def next(self, aside: bool = False) -> tuple[Path, int] | None:
        """The oldest file and its number of fragments, of those that were set aside (and are due again) or of the
        others."""
        now = time.monotonic()
        due = (p for p in self._files if (self._aside.get(p, math.inf) <= now if aside else p not in self._aside))
        return next(((path, _count(path)) for path in due), None)

    def failed(self, path: Path) -> int:
        """Notes that it could not be sent; how often that was so."""
        self._failures[path] = self._failures.get(path, 0) + 1
        return self._failures[path]

    def set_aside(self, path: Path, seconds: float) -> None:
        """The others go first, and it waits for so long. Its place in the row stays."""
        self._aside[path] = time.monotonic() + seconds

    def wake(self) -> None:
        """Nothing is set aside any more."""
        self._aside.clear()

    def divide(self, path: Path, halves: Sequence[tuple[bytes, int]]) -> None:
        """Puts two files, with their numbers of fragments, into the place of one; raises OSError."""
        stamp = path.stem.rpartition("-")[0] or path.stem
        for letter, (body, fragments) in zip("ab", halves, strict=True):
            name = f"{stamp}{letter}-{fragments}.batch"
            files.write_whole(path.with_name(name), body, sync=True, parents=True, shared=True)
        path.unlink()
        self.scan()

    def remove(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            size = 0
        if path in self._files:
            self._files.remove(path)
            self._bytes = max(0, self._bytes - _blocks(size))
            self._fragments -= _count(path)
        self._failures.pop(path, None)
        self._aside.pop(path, None)

    def scan(self) -> None:
        """Looks at the directory again: other processes leave files there too."""
        found, total, now = [], 0, time.time()
        try:
            entries = sorted(os.scandir(self.directory), key=lambda entry: entry.name)
        except OSError:
            entries = []  # none yet; if nothing can be put there either, `put` says so
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".batch"):
                    if not stat.S_ISREG(status.st_mode):
                        self._notices.warn(f"{entry.path} is not a file: it is no play of ours, and is left alone")
                        continue
                    found.append(Path(entry.path))
                    total += _blocks(status.st_size)
                elif entry.name.endswith(".part") and now - status.st_mtime > STALE:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue  # sent by another process meanwhile
            except OSError as error:
                self._notices.warn(f"cannot look at {entry.path}: {error}")
        self._files, self._bytes = deque(found), total
        self._fragments = sum(map(_count, found))
        self._failures = {path: self._failures[path] for path in found if path in self._failures}
        self._aside = {path: self._aside[path] for path in found if path in self._aside}

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Holds the right to send, which ends with the process however it ends; False when another has it."""
        with open(self.directory / "lock", "a+b") as file:
            if not _try_lock(file.fileno()):
                yield False
                return
            try:
                yield True
            finally:
                files.unlock(file.fileno())


def _count(path: Path) -> int:
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdecimal() else 1


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _try_lock(fd: int) -> bool:
    """A filesystem without locks never gives one: what is spooled there waits."""
    try:
        return files.try_lock(fd)
    except OSError:
        return False
