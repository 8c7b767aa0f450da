"""The embedded store: one SQLite file. `sqlite_store` is what callers see, `writer` commits, `tables` is the file."""

from sparring.store.sqlite.sqlite_store import SqliteStore

__all__ = ["SqliteStore"]
