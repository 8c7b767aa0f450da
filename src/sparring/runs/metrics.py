"""What a run tells about itself: a row per iteration as CSV, JSON lines and TensorBoard events, and the clock that
knows where the time went. Names are stable; docs/training.md has them all."""

import csv
import io
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sparring.errors import InputError
from sparring.files import write_whole
from sparring.runs.tensorboard import EventFile

__all__ = ["INFOS", "PHASES", "Episode", "Episodes", "MetricsFiles", "Phases", "Row", "info_means", "read_rows"]

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


class Episode(NamedTuple):
    """One that ended."""

    ret: float
    length: int
    info: dict[str, float] = {}  # noqa: RUF012  # never changed; the numbers in its last `info`: is_success, …
    cut: bool = False  # by us: the game would have gone on


def info_means(episodes: Sequence[Episode], names: Sequence[str], group: str) -> Row:
    """`group/is_success` and the like: means over the episodes that told it."""
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
        self.infos: list[str] = []  # names of the numbers in `info` that are told, in the order of their arrival
        self._told = False
        self._new: list[Episode] = []

    def add(self, ended: Sequence[tuple[float, int] | Episode]) -> None:
        new = [Episode(*episode) for episode in ended]
        self._new += new
        for name in sorted({name for episode in new for name in episode.info} - {*self.infos, *self.OWN}):
            if len(self.infos) < INFOS:
                self.infos.append(name)
            elif not self._told:
                self._told = True
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


class MetricsFiles:
    """`metrics.jsonl`, `metrics.csv` and TensorBoard events of a run directory."""

    def __init__(self, directory: Path, iteration: int = 0, axis: str = "steps") -> None:
        """Goes on after `iteration`: later rows belong to work that was lost, and will be done again. `axis`: by what
        TensorBoard draws."""
        self._jsonl, self._csv = directory / "metrics.jsonl", directory / "metrics.csv"
        rows = [row for row in read_rows(self._jsonl) if row["iteration"] <= iteration]
        self._columns: list[str] = []
        write_whole(self._jsonl, "".join(json.dumps(row) + "\n" for row in rows).encode())  # the run's only rows
        self._rewrite(rows)
        self._axis = axis
        self._events = EventFile(directory / "tensorboard", int(rows[-1][axis]) + 1 if rows else 0)

    def add(self, row: Row) -> None:
        row = {name: value for name, value in row.items() if math.isfinite(value)}
        with self._jsonl.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not set(row) <= set(self._columns):  # a loss that is there from the first update on, an evaluation
            self._rewrite(read_rows(self._jsonl))
        else:
            with self._csv.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        self._events.add(int(row[self._axis]), {k: v for k, v in row.items() if k not in (self._axis, "iteration")})

    def _rewrite(self, rows: list[Row]) -> None:
        for row in rows:
            self._columns += [name for name in row if name not in self._columns]
        table = io.StringIO()
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self._csv, table.getvalue().encode())

    def close(self) -> None:
        self._events.close()


def read_rows(path: Path) -> list[Row]:
    """A last line that a kill cut short is left out."""
    if not path.exists():
        return []
    *lines, _cut_short = path.read_text().split("\n")
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
