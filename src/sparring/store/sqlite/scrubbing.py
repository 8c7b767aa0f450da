"""What is left of erased rows in a SQLite file, and how it is removed without rewriting the file.

SQLite overwrites the rows and pages that it frees (`secure_delete`). But when it moves rows between pages, it leaves
their old bytes in the page's unallocated middle: between the cell pointers and the cells, where nothing is ever read
(https://www.sqlite.org/fileformat2.html, section 1.6). Only a VACUUM removes them, and nobody can write while it lasts.
So we overwrite these middles in the file ourselves, some pages at a time. It is safe while the caller holds SQLite's
lock for writing and the log is empty. Then the file is all there is and nobody else writes to it. Readers do not look
there. Whoever has such a page in its cache must not write it back: a commit by another connection, which the caller
makes in the end, empties caches.
"""

import os
import struct
from pathlib import Path

__all__ = ["clean", "close", "is_table_of_pages"]

BTREE = {0x02: 12, 0x05: 12, 0x0A: 8, 0x0D: 8}  # kind of page → bytes of its header
MAX_PAGES = 1 << 25  # a higher page number at the beginning of an overflow page would look like a kind of page
PENDING = 1 << 30  # the byte that SQLite locks; its page holds nothing

_files: dict[Path, int] = {}


def clean(path: Path, page_size: int, first: int, last: int, *, mapped: bool) -> int:
    """Pages first..last (counted from 1) of a database; how many had something to remove. `mapped`: it has
    auto_vacuum, and so some pages that are tables of pages. On disk when it returns."""
    file = _open(path)
    data = os.pread(file, (last - first + 1) * page_size, (first - 1) * page_size)
    found = 0
    for number in range(first, last + 1):
        at = (number - first) * page_size
        if number == 1 or (mapped and is_table_of_pages(number, page_size)):  # the first has the tables' names only
            continue
        page = data[at : at + page_size]
        if page and (gap := _gap(page)) and page.count(0, *gap) < gap[1] - gap[0]:
            os.pwrite(file, bytes(gap[1] - gap[0]), (number - 1) * page_size + gap[0])
            found += 1
    if found:
        os.fsync(file)
    return found


def _gap(page: bytes) -> tuple[int, int] | None:
    """Where its unallocated middle is; none of what is not a B-tree's page."""
    if (header := BTREE.get(page[0])) is None or len(page) < header:
        return None
    cells, content = struct.unpack_from(">HH", page, 3)
    content = content or 65536
    begin = header + 2 * cells
    if not begin <= content <= len(page):
        return None
    pointers = struct.unpack_from(f">{cells}H", page, header)
    if any(not content <= pointer < len(page) for pointer in pointers):
        return None
    return begin, content


def is_table_of_pages(number: int, page_size: int) -> bool:
    """Whether it is a pointer map (section 1.8 of the format): of databases with auto_vacuum, the second page and then
    one for as many as it has entries of five bytes."""
    span = page_size // 5 + 1
    start = 2 + (number - 2) // span * span
    if start == PENDING // page_size + 1:
        start += 1
    return number == start


def close(path: Path) -> None:
    """After this process's last connection: POSIX drops all locks of a process on a file, SQLite's too, when it closes
    the file anywhere."""
    if (file := _files.pop(path, None)) is not None:
        os.close(file)


def _open(path: Path) -> int:
    path = path.absolute()
    now, file = path.stat(), _files.get(path)
    if file is None or not os.path.samestat(now, os.fstat(file)):  # another file of that name by now
        file = _files[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return file
