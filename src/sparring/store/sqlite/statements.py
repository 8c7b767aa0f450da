"""Statements for many rows at once: SQLite takes some 20 µs for a row of 3 kB, and each call into it several more."""

import sqlite3
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

__all__ = ["insert_rows", "marks", "portions"]

T = TypeVar("T")


def insert_rows(db: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    """Many to a statement: each statement lets go of Python's lock and has to win it back from busy threads."""
    verb = "REPLACE" if table == "unfinished" else "INSERT"
    for some in portions(rows):
        db.execute(
            f"{verb} INTO {table} VALUES {marks(len(some[0]), len(some))}", [value for row in some for value in row]
        )


def portions(rows: list[T]) -> Iterator[list[T]]:
    """Of 1, 2, 4, … 128: few different statements, which SQLite then has ready, and few of them."""
    first = 0
    while left := len(rows) - first:
        size = min(128, 1 << (left.bit_length() - 1))
        yield rows[first : first + size]
        first += size


@cache
def marks(width: int, count: int) -> str:
    return ",".join(["(" + ",".join("?" * width) + ")"] * count)
