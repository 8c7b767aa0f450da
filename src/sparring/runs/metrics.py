"""What a run reports about itself: a row per iteration, and the clock that knows where the time went. `sinks.py` has
where it goes. Names are stable; docs/training.md has them all."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sparring.errors import InputError

__all__ = ["INFOS", "PHASES", "Episodes", "Phases", "PlayedEpisode", "Row", "info_means", "read_rows"]

log = logging.getLogger("sparring.training")
INFOS = 20  # names of numbers in a game's `info` that become metrics
PHASES = ("sample", "load", "learn", "update")
Row = dict[str, float]


class Phases:
    """Seconds of the current iteration by phase; always on, it costs two clock readings each."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        since = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - since

    def take(self) -> Row:
        row = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return row


class PlayedEpisode(NamedTuple):
    """One that ended."""

    ret: float
    length: int
    info: dict[str, float] = {}  # noqa: RUF012  # never changed; the numbers in its last `info`: is_success, …
    cut: bool = False  # by us: the game would have gone on


def info_means(episodes: Sequence[PlayedEpisode], names: Sequence[str], group: str) -> Row:
    """`group/is_success` and the like: means over the episodes that report it."""
    row: Row = {}
    for name in names:
        if values := [episode.info[name] for episode in episodes if name in episode.info]:
            row[f"{group}/{name}"] = sum(values) / len(values)
    return row


class Episodes:
    """Returns and lengths: of this iteration for its row, and the last hundred for everybody who asks how it goes."""

    WINDOW = 100
    OWN = ("count", "return_min", "return_mean", "return_max", "return_recent", "length_mean")

    def __init__(self) -> None:
        self.recent: list[tuple[float, int]] = []
        self.count = 0
        self.infos: list[str] = []  # names of the numbers in `info` that are reported, in the order of their arrival
        self._warned = False
        self._new: list[PlayedEpisode] = []

    def add(self, ended: Sequence[tuple[float, int] | PlayedEpisode]) -> None:
        new = [PlayedEpisode(*episode) for episode in ended]
        self._new += new
        for name in sorted({name for episode in new for name in episode.info} - {*self.infos, *self.OWN}):
            if len(self.infos) < INFOS:
                self.infos.append(name)
            elif not self._warned:
                self._warned = True
                log.warning("the game's info has more than %d numbers: %r and others are no metrics", INFOS, name)

    def take(self) -> Row:
        """Of the episodes that ended since; without any, only their number: a return that did not happen is none."""
        new, self._new = self._new, []
        self.count += len(new)
        self.recent = (self.recent + [(episode.ret, episode.length) for episode in new])[-self.WINDOW :]
        row: Row = {"episode/count": len(new)}
        if new:
            returns = [episode.ret for episode in new]
            row |= {
                "episode/return_min": min(returns),
                "episode/return_mean": sum(returns) / len(new),
                "episode/return_max": max(returns),
                "episode/length_mean": sum(episode.length for episode in new) / len(new),
            }
            row |= info_means(new, self.infos, "episode")
        if self.recent:
            row["episode/return_recent"] = sum(ret for ret, _ in self.recent) / len(self.recent)
        return row


def read_rows(path: Path) -> list[Row]:
    """A last line that a kill cut short is left out."""
    if not path.exists():
        return []
    *lines, _cut_short = path.read_text().split("\n")
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
