"""Files that survive a crash: written whole or not at all, on disk when asked for, locked against others. Light: the
standard library only."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

__all__ = [
    "append",
    "create",
    "locked",
    "replace_directory",
    "replacing",
    "save_figure",
    "sync",
    "try_lock",
    "unlock",
    "write_new",
    "write_whole",
]


def write_whole(path: Path, data: bytes, *, sync: bool = False, parents: bool = False, shared: bool = False) -> None:
    """Writes a file: a reader sees the whole of it, or the one before, also after a crash.

    :param path: The file.
    :param data: Its content.
    :param sync: It, and its name, are on disk when this returns.
    :param parents: Make missing directories.
    :param shared: Several may write it at once: the last one's is there. What a killed one leaves has a name of its
        own then, `<name>.….part`; else it is `<name>.new`, which the next write replaces.
    """
    folders = [path.parent]
    if parents:
        made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()] if sync else []
        path.parent.mkdir(parents=True, exist_ok=True)
        folders += [folder.parent for folder in made]
    part = _own(path) if shared else path.with_name(f"{path.name}.new")
    try:
        part.unlink(missing_ok=True)  # what a killed process left, or a link that somebody planted: never followed
        with open(part, "xb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.filename is None:  # a full disk does not say of which file
            error.filename = str(path)
        raise
    if sync:
        for folder in folders:
            _sync_names(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file piece by piece: `<name>.….part`, which takes the file's place when the block ends. If the
    block fails, the file stays what it was. Several may write it at once.

    :param path: The file.
    """
    part = _own(path)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Writes one of Matplotlib's figures whole, which follows links itself.

    :param path: Its ending is the format.
    """
    out = BytesIO()
    figure.savefig(out, dpi=dpi, format=path.suffix[1:].lower())
    write_whole(path, out.getvalue(), shared=True)


def _own(path: Path) -> Path:
    """Beside a file, a name that nobody else writes to: process numbers are not enough, containers share them."""
    return path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet; its content is on disk when this returns, its name after `sync` of its
    directory.

    :raises FileExistsError: it is there.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def create(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Makes a file unless it is there; whether it was made.

    :param path: The file.
    :param data: Its content.
    :param mode: Who may read and write it, from the beginning.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return True


def append(path: Path, data: bytes) -> None:
    """Adds to the end of a file; on disk when it returns."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_directory(path: Path, new: Path, old: Path) -> None:
    """Puts `new` in the place of `path`, and what was there in the place of `old`. A process that is killed between
    the two steps leaves no `path`: whoever reads takes `old` then."""
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)


def sync(*paths: Path) -> None:
    """Brings files, and the names in directories, onto the disk."""
    for path in paths:
        if path.is_dir():
            _sync_names(path)
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync_names(directory: Path) -> None:
    """A file's name is its directory's, which has to reach the disk as well."""
    if sys.platform == "win32":
        return  # it cannot open directories; NTFS keeps names in a journal
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems do not know it
            raise
    finally:
        os.close(fd)


@contextmanager
def locked(directory: Path, *, wait: bool) -> Iterator[bool]:
    """Holds the lock of a directory, which ends with the process however it ends. (Not on Windows.)

    :param directory: An existing directory.
    :param wait: Wait for whoever holds it; else False is given where somebody does.
    """
    fd = os.open(directory, os.O_RDONLY)
    try:
        yield try_lock(fd, wait=wait)
    finally:
        os.close(fd)


if sys.platform == "win32":
    import msvcrt

    def try_lock(fd: int, *, wait: bool = False) -> bool:
        """Locks an open file; False where somebody else has it."""
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def unlock(fd: int) -> None:
        """Gives the lock back, which closing the file does as well."""
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def try_lock(fd: int, *, wait: bool = False) -> bool:
        """Locks an open file; False where somebody else has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(fd: int) -> None:
        """Gives the lock back, which closing the file does as well."""
        fcntl.flock(fd, fcntl.LOCK_UN)
