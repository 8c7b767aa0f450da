"""The embedded store: one SQLite file. `sqlite_store` is what callers see, `writer` commits, `connection` opens the
file, `tables` says what is in it; each `…_table` is what a transaction does to one of them."""

from sparring.store.sqlite.sqlite_store import SqliteStore

__all__ = ["SqliteStore"]
