"""Fragments for the store's tests, and what must hold of every store whatever was done to it."""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sparring.experience import Fragment, new_id
from sparring.games import Box, Discrete, Game
from sparring.store import Store

POLE = Game("pole", Box((4,)), Discrete(2))
MAZE = Game("maze", Box((2,)), Discrete(4))
RNG = np.random.default_rng(7)


def fragment(steps: int = 3, game: Game = POLE, **fields: Any) -> Fragment:
    """Random columns; `ended` is short for terminated."""
    width = game.observation.element.itemsize // 4
    fields["terminated"] = fields.pop("ended", fields.get("terminated", False))
    defaults: dict[str, Any] = {
        "id": new_id(),
        "game": game.name,
        "schema": game.schema,
        "player": "ann",
        "episode": new_id(),
        "start": 0,
        "time": time.time(),
        "steps": steps,
        "obs": RNG.standard_normal((steps + 1, width)).astype("<f4").tobytes(),
        "action": RNG.integers(0, 2, steps).astype("<i4").tobytes(),
        "reward": RNG.integers(0, 8, steps).astype("<f4").tobytes(),
    }
    return Fragment(**{**defaults, **fields})


def cut(lengths: list[int], **fields: Any) -> list[Fragment]:
    """An episode as fragments of these lengths; the last one ends it."""
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    episode = fields.pop("episode", None) or new_id()
    return [
        fragment(steps, start=start, episode=episode, ended=start == starts[-1], **fields)
        for steps, start in zip(lengths, starts, strict=True)
    ]


def rewards(fragments: list[Fragment]) -> float:
    return float(sum(np.frombuffer(f.reward, "<f4").sum() for f in fragments))


def everything(store: Store, game: Game = POLE, limit: int = 7) -> list[Fragment]:
    """By cursor, as a trainer reads it."""
    found: list[Fragment] = []
    cursor = 0
    while (page := store.tail(game.name, cursor, limit)).fragments:
        assert page.cursor > cursor
        found += page.fragments
        cursor = page.cursor
    assert page.cursor == cursor
    return found


def assert_counts(store: Store, game: Game = POLE, *, bots_apart: bool = True) -> None:
    """The counters say what a recount says. `bots_apart`: not in a file that only older writers have opened."""
    fragments = everything(store, game, 1000)
    stats = store.stats(game.name)
    sizes = [len(f.obs) + len(f.action) + len(f.reward) + len(f.log_prob or b"") for f in fragments]
    assert (stats.fragments, stats.steps, stats.bytes) == (len(fragments), sum(f.steps for f in fragments), sum(sizes))
    players: Counter[str] = Counter()
    bots: Counter[str] = Counter()
    models: Counter[tuple[str | None, int | None]] = Counter()
    for f in fragments:
        players[f.player] += f.steps
        bots[f.player] += 0 if f.model is None else f.steps
        models[f.model, f.version] += f.steps
    assert stats.players == len(players)
    assert {p.player: p.steps for p in store.players(game.name, 10**6)} == players
    if bots_apart:
        assert stats.bot_steps == bots.total()
        assert {p.player: p.bot_steps for p in store.players(game.name, 10**6)} == bots
    assert {(v.model, v.version): v.steps for v in store.versions(game.name)} == models


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of the test's own to a store's file."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as db:
        yield db
