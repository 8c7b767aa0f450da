"""A store in a SQLite file, for every test here that has no other one."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_samples import POLE

from sparring.store.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path)) as store:
        store.register(POLE)
        yield store
