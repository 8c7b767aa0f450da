"""The tables of complete and of unfinished episodes."""

import sqlite3
from typing import Any

import msgspec

from sparring.experience import Fragment
from sparring.store.arrival import Unfinished
from sparring.store.sqlite.statements import insert_rows, marks, portions

__all__ = ["EpisodeTable"]

_Part = tuple[tuple[int, str], Fragment, float, int]  # player and episode, the fragment, its sum of rewards, its seq


class EpisodeTable:
    """The episodes that this transaction begins, continues and completes."""

    def __init__(self, db: sqlite3.Connection, now: float) -> None:
        self.db = db
        self.now = now
        self.complete: list[tuple[Any, ...]] = []
        self.unfinished: dict[tuple[int, str], Unfinished | None] = {}  # none: not any more
        self.parts: list[_Part] = []
        self.begun: dict[tuple[int, str], list[_Part]] = {}  # from the first step on, without a gap so far

    def add(self, f: Fragment, ret: float, player: int, seq: int) -> None:
        """An episode that comes whole, as most do, needs neither to be looked up nor remembered."""
        name = (player, f.episode)
        whole = self.begun.get(name)
        if whole and whole[-1][1].start + whole[-1][1].steps != f.start:
            self.parts += self.begun.pop(name)
            whole = None
        if whole is None and f.start:
            self.parts.append((name, f, ret, seq))
            return
        if whole is None:
            self.begun[name] = whole = []
        whole.append((name, f, ret, seq))
        if f.ended:
            del self.begun[name]
            total = sum([part[2] for part in whole])
            self.complete.append((seq, *name, f.start + f.steps, total, self.now, f.model, f.version))

    def write(self) -> None:
        for parts in self.begun.values():
            self.parts += parts
        stored = self.find(list({name for name, _, _, _ in self.parts}))
        self.unfinished.update(stored)
        for name, f, ret, seq in self.parts:
            episode = self.unfinished.get(name)
            if episode is None:
                self.unfinished[name] = episode = Unfinished()
            if episode.add(f, ret):
                self.complete.append((seq, *name, episode.steps, episode.ret, self.now, episode.model, episode.version))
                self.unfinished[name] = None
        insert_rows(self.db, "episode", self.complete)
        gone = [name for name in stored if self.unfinished[name] is None]
        self.db.executemany("DELETE FROM unfinished WHERE player = ? AND name = ?", gone)
        rows = [(*name, *msgspec.structs.astuple(e)) for name, e in self.unfinished.items() if e is not None]
        insert_rows(self.db, "unfinished", rows)

    def find(self, names: list[tuple[int, str]]) -> dict[tuple[int, str], Unfinished]:
        found = {}
        for some in portions(names):
            rows = self.db.execute(
                "SELECT player, name, steps, ret, length, model, version"
                f" FROM (VALUES {marks(2, len(some))}) JOIN unfinished ON player = column1 AND name = column2",
                [value for name in some for value in name],
            )
            found.update({(row[0], row[1]): Unfinished(*row[2:]) for row in rows.fetchall()})
        return found
