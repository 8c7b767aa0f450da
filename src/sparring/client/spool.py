"""What could not be sent yet, on disk: one file per request body, written whole or not at all, sent oldest first.

Files are only ever added, read and removed, so several processes may share a directory; a lock lets one of them send.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Spool", "write_whole"]

BLOCK = 4096  # a small file takes this much all the same
STALE = 3600.0


class Spool:
    """`limit` bounds the bytes on disk: the oldest files make room for the newest."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._files: deque[Path] = deque()  # oldest first; what this process knows of
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
        write_whole(path, body, sync=True)
        self._files.append(path)
        self._bytes += _blocks(len(body))
        self._fragments += fragments
        return dropped

    def oldest(self) -> tuple[Path, bytes, int] | None:
        """Path, body and number of fragments of the file to send next."""
        while self._files:
            path = self._files[0]
            try:
                return path, path.read_bytes(), _count(path)
            except FileNotFoundError:
                self.remove(path)  # another process was quicker
        return None

    def postpone(self, path: Path) -> None:
        """To the end of the row."""
        body = path.read_bytes()
        self.put(body, _count(path))
        self.remove(path)

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

    def scan(self) -> None:
        """Looks at the directory again: other processes leave files there too."""
        found, total, now = [], 0, time.time()
        try:
            entries = sorted(os.scandir(self.directory), key=lambda entry: entry.name)
        except OSError:
            entries = []  # none yet; if nothing can be put there either, `put` says so
        for entry in entries:
            try:
                status = entry.stat()
                if entry.name.endswith(".batch"):
                    found.append(Path(entry.path))
                    total += _blocks(status.st_size)
                elif entry.name.endswith(".part") and now - status.st_mtime > STALE:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue  # sent by another process meanwhile
        self._files, self._bytes = deque(found), total
        self._fragments = sum(map(_count, found))

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Holds the right to send, which ends with the process however it ends; False when another has it."""
        with open(self.directory / "lock", "a+b") as file:
            if not _lock(file.fileno()):
                yield False
                return
            try:
                yield True
            finally:
                _unlock(file.fileno())


def write_whole(path: Path, data: bytes, sync: bool = False) -> None:
    """A reader sees the whole file or none, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _count(path: Path) -> int:
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdecimal() else 1


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


if sys.platform == "win32":
    import msvcrt

    def _lock(fd: int) -> bool:
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
