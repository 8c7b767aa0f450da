"""The table of counters: of games, players and models' versions, and what a transaction adds to them."""

import sqlite3
from collections import defaultdict

from sparring.experience import Fragment
from sparring.store.sqlite.game_table import find_game
from sparring.store.sqlite.tables import GAME, MODEL, PLAYER

__all__ = ["Arrival", "Sum", "Tally", "find_player", "open_tally", "sums", "tallies"]

Arrival = tuple[Fragment, memoryview, float, int]  # its body, sum of rewards, bytes of columns
Tally = tuple[str, str, str, int]  # game, kind, name, version


def find_player(db: sqlite3.Connection, game: str, name: str) -> tuple[int, int]:
    """Its key and its newest fragment's seq; zeros for one that is not there."""
    row: tuple[int, int] | None = db.execute(
        "SELECT key, newest FROM tally WHERE game = ? AND kind = ? AND name = ?",
        (find_game(db, game).key, PLAYER, name),
    ).fetchone()
    return row or (0, 0)


class Sum:
    """What one transaction adds to a tally, then also the tally's key and newest fragment."""

    __slots__ = ("bot_steps", "bytes", "fragments", "key", "newest", "steps")

    def __init__(self) -> None:
        self.fragments = self.steps = self.bot_steps = self.bytes = self.key = self.newest = 0


def open_tally(db: sqlite3.Connection, game: int, tally: Tally) -> tuple[int, int]:
    """Its key and newest fragment; made if it is not there."""
    row: tuple[int, int] | None = db.execute(
        "SELECT key, newest FROM tally WHERE game = ? AND kind = ? AND name = ? AND version = ?", (game, *tally[1:])
    ).fetchone()
    if row is not None:
        return row
    if tally[1] == PLAYER:
        db.execute("UPDATE game SET players = players + 1 WHERE key = ?", (game,))
    made = db.execute("INSERT INTO tally (game, kind, name, version) VALUES (?, ?, ?, ?)", (game, *tally[1:]))
    return made.lastrowid or 0, 0


def sums(new: list[Arrival]) -> dict[Tally, Sum]:
    groups: defaultdict[tuple[str, str, str | None, int | None], Sum] = defaultdict(Sum)
    whose = {(f.game, f.player, f.model, f.version) for f, _, _, _ in new}
    if len(whose) == 1:  # an upload is one player's, mostly: then no loop but these
        group = groups[whose.pop()]
        group.fragments = len(new)
        group.steps, group.bytes = sum([f.steps for f, _, _, _ in new]), sum([size for _, _, _, size in new])
        new = []
    for f, _, _, size in new:
        group = groups[f.game, f.player, f.model, f.version]
        group.fragments += 1
        group.steps += f.steps
        group.bytes += size
    sums: defaultdict[Tally, Sum] = defaultdict(Sum)
    for (game, player, model, version), group in groups.items():
        for tally in tallies(player, model, version):
            total = sums[game, *tally]
            total.fragments += group.fragments
            total.steps += group.steps
            total.bot_steps += 0 if model is None else group.steps
            total.bytes += group.bytes
    return sums


def tallies(player: str, model: str | None, version: int | None) -> tuple[tuple[str, str, int], ...]:
    """Where a fragment counts: kind, name and version of the tallies."""
    return (GAME, "", -1), (PLAYER, player, -1), (MODEL, model or "", -1 if version is None else version)
