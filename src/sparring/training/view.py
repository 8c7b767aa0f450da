"""What a person sees of a run while it runs: a live view on a terminal, quiet lines elsewhere."""

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparring.training.experiment import Experiment
from sparring.training.metrics import PHASES, Row
from sparring.training.run import Run

__all__ = ["Lines", "Silent", "Terminal", "View", "sparkline", "view_for"]

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = {"sample": "cyan", "load": "blue", "learn": "magenta", "update": "yellow"}


class View(Protocol):
    def show(self, experiment: Experiment, run: Run) -> AbstractContextManager[None]: ...

    def row(self, row: Row) -> None: ...


def view_for(console: Console) -> View:
    return Terminal(console) if console.is_terminal else Lines(console)


class Silent:
    """For programs: the run directory has it all."""

    def show(self, experiment: Experiment, run: Run) -> AbstractContextManager[None]:
        return nullcontext()

    def row(self, row: Row) -> None:
        pass


class Lines:
    """A line now and then: logs of clusters should say that it goes on, not more."""

    EVERY = 10.0

    def __init__(self, console: Console) -> None:
        self.console, self.next, self.last = console, 0.0, ""

    @contextmanager
    def show(self, experiment: Experiment, run: Run) -> Iterator[None]:
        self._say(f"{experiment.name} on {experiment.game}, {run.path}")
        try:
            yield
        finally:
            if self.last:
                self._say(self.last)

    def row(self, row: Row) -> None:
        self.last = describe(row)
        if time.monotonic() >= self.next:
            self._say(self.last)
            self.last, self.next = "", time.monotonic() + self.EVERY

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Terminal:
    """Progress, the return's curve and where the time goes, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.returns: list[float] = []

    @contextmanager
    def show(self, experiment: Experiment, run: Run) -> Iterator[None]:
        self.experiment, self.path = experiment, run.path
        self.returns = [r for row in run.rows() if (r := shown_return(row)) is not None]
        handler = RichHandler(console=self.console, show_path=False)  # or warnings would tear the picture
        root = logging.getLogger("sparring")
        root.addHandler(handler)
        root.propagate = False
        try:
            with Live(console=self.console, auto_refresh=False) as self.live:
                self.live.update(self._draw({}), refresh=True)
                yield
        finally:
            root.removeHandler(handler)
            root.propagate = True

    def row(self, row: Row) -> None:
        if (value := shown_return(row)) is not None:
            self.returns.append(value)
        self.live.update(self._draw(row), refresh=True)

    def _draw(self, row: Row) -> RenderableType:
        width = max(self.console.width - 24, 20)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row("progress", ProgressBar(total=1.0, completed=progress(self.experiment, row), width=width))
        table.add_row("return", sparkline(self.returns, width))
        table.add_row("time", phase_bar(row, width))
        table.add_row("", describe(row) if row else "starting: imports, games, compilation …")
        title = f"{self.experiment.name} on {self.experiment.game}"
        return Panel(Group(table), title=title, subtitle=str(self.path), title_align="left", subtitle_align="right")


def describe(row: Row) -> str:
    parts = [f"iteration {row['iteration']:.0f}", f"{row['steps']:,.0f} steps", f"{row['rate/steps_per_s']:,.0f}/s"]
    if "episode/return_recent" in row:
        parts.append(f"return {row['episode/return_recent']:.1f}")
    if "evaluation/return_mean" in row:
        parts.append(f"evaluation {row['evaluation/return_mean']:.1f}")
    spent = sum(row[f"time/{phase}_s"] for phase in PHASES) or 1.0
    parts.append(" ".join(f"{phase} {row[f'time/{phase}_s'] / spent:.0%}" for phase in PHASES))
    return "  ".join(parts)


def shown_return(row: Row) -> float | None:
    return row.get("evaluation/return_mean", row.get("episode/return_mean"))


def progress(experiment: Experiment, row: Row) -> float:
    """The stop condition that is nearest, from 0 to 1; a return is reached when it is reached."""
    stop = experiment.stop
    pairs = (("steps", stop.steps), ("iteration", stop.iterations), ("time/total_s", stop.seconds))
    return max((min(row.get(name, 0.0) / limit, 1.0) for name, limit in pairs if limit), default=0.0)


def sparkline(values: list[float], width: int) -> str:
    """The curve in one line; many values are averaged into `width` columns."""
    if not values:
        return "no episode ended yet"
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values) + f"  {values[-1]:.1f}"


def phase_bar(row: Row, width: int) -> Text:
    seconds = {phase: row.get(f"time/{phase}_s", 0.0) for phase in PHASES}
    total = sum(seconds.values())
    bar = Text()
    for phase, spent in seconds.items():
        cells = round(width * spent / total) if total else 0
        label = phase if cells > len(phase) else ""
        bar.append(label.ljust(cells)[:cells], style=f"black on {COLOURS[phase]}")
    return bar
