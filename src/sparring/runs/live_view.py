"""What a person sees of a run while it runs: a live view on a terminal, quiet lines elsewhere."""

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparring.experiment import Experiment, Stop
from sparring.runs.metrics import PHASES, Row
from sparring.runs.run import Run
from sparring.terminal import curve, plain

__all__ = ["Lines", "Silent", "Terminal", "View", "sparkline", "view_for"]

BLOCKS = "▁▂▃▄▅▆▇█"
PLAYED, EVALUATED = "episode/return_mean", "evaluation/return_mean"
OWN = ("loss/", "q/", "value/", "policy/")  # the algorithm's metrics
COLOURS = {"sample": "cyan", "load": "blue", "learn": "magenta", "update": "yellow"}


class View(Protocol):
    def show(self, experiment: Experiment, run: Run) -> AbstractContextManager[None]: ...

    def say(self, line: str) -> None: ...

    def row(self, row: Row) -> None: ...


def view_for(console: Console) -> View:
    return Terminal(console) if console.is_terminal else Lines(console)


class Silent:
    """For programs: the run directory has it all."""

    def show(self, experiment: Experiment, run: Run) -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, line: str) -> None:
        pass

    def row(self, row: Row) -> None:
        pass


class Lines:
    """A line now and then: logs of clusters should say that it goes on, not more."""

    EVERY = 10.0

    def __init__(self, console: Console) -> None:
        self.console, self.next, self.last = console, 0.0, ""

    @contextmanager
    def show(self, experiment: Experiment, run: Run) -> Iterator[None]:
        self.experiment = experiment
        self.say(f"{experiment.name} on {experiment.game_words}, {run.path}")
        try:
            yield
        finally:
            if self.last:
                self.say(self.last)

    def row(self, row: Row) -> None:
        self.last = describe(self.experiment, row)
        if time.monotonic() >= self.next:
            self.say(self.last)
            self.last, self.next = "", time.monotonic() + self.EVERY

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Terminal:
    """Progress, curves, figures and where the time goes, redrawn in place every second."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def show(self, experiment: Experiment, run: Run) -> Iterator[None]:
        self.experiment, self.path = experiment, run.path
        self.curves: dict[str, list[float]] = {PLAYED: [], EVALUATED: []}
        self.last: Row = {}
        self.evaluated: Row = {}  # the last row with an evaluation
        self.since = time.monotonic()
        for row in run.rows():
            self._note(row)
        handler = RichHandler(console=self.console, show_path=False)  # or warnings would tear the picture
        root = logging.getLogger("sparring")
        root.addHandler(handler)
        root.propagate = False
        try:
            with Live(console=self.console, get_renderable=self._draw, refresh_per_second=1) as self.live:
                yield
        finally:
            root.removeHandler(handler)
            root.propagate = True

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)  # above the picture

    def row(self, row: Row) -> None:
        self._note(row)
        self.since = time.monotonic()

    def _note(self, row: Row) -> None:
        self.last = row
        self.evaluated = row if EVALUATED in row else self.evaluated
        for name, values in self.curves.items():
            if name in row:
                values.append(row[name])

    def _draw(self) -> RenderableType:
        width, row, (played, evaluated) = max(self.console.width - 24, 20), self.last, self.curves.values()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row("progress", ProgressBar(total=1.0, completed=progress(self.experiment, row), width=width))
        table.add_row("", remaining(self.experiment, row, time.monotonic() - self.since))
        if played:
            table.add_row("return", Text(curve(played, width - 9, 6), style="cyan"))
        if evaluated:
            table.add_row("evaluation", f"{sparkline(evaluated, width - 30)}{best(self.evaluated)}")
        if row:
            table.add_row("time", phase_bar(row, width))
            table.add_row("", describe(self.experiment, row))
            own = [f"{name} {row[name]:.4g}" for name in row if name.startswith(OWN)]
            table.add_row("", Text("  ".join(own), style="dim"))
        title = f"{self.experiment.name} on {self.experiment.game_words}"
        # A column is left free: what the terminal echoes of Ctrl-C would break a line of full width.
        return Panel(
            table,
            title=plain(title),
            subtitle=plain(str(self.path)),
            title_align="left",
            subtitle_align="right",
            width=self.console.width - 1,
        )


def describe(experiment: Experiment, row: Row) -> str:
    parts = [f"iteration {row['iteration']:.0f}", f"{row[experiment.axis]:,.0f} {experiment.axis}"]
    if experiment.source == "simulate":
        parts.append(f"{row['rate/steps_per_s']:,.0f}/s")
    else:
        parts += [f"{name} {row[name]:.4g}" for name in row if name.startswith("loss/")]
    if "episode/return_recent" in row:
        parts.append(f"return {row['episode/return_recent']:.1f}")
    if "evaluation/return_mean" in row:
        parts.append(f"evaluation {row['evaluation/return_mean']:.1f}{best(row)}")
        if row.get("evaluation/cut"):
            parts.append(f"{row['evaluation/cut']:.0f} of {row['evaluation/episodes']:.0f} episodes cut")
    spent = sum(row[f"time/{phase}_s"] for phase in PHASES) or 1.0
    parts.append(" ".join(f"{phase} {row[f'time/{phase}_s'] / spent:.0%}" for phase in PHASES))
    return "  ".join(parts)


def best(row: Row) -> str:
    """Nothing where it is not kept."""
    if "evaluation/return_best" not in row:
        return ""
    return f" (best {row['evaluation/return_best']:.1f} at {row['evaluation/iteration_best']:.0f})"


def progress(experiment: Experiment, row: Row) -> float:
    """The stop condition that is nearest, from 0 to 1; a return is reached when it is reached."""
    stop = experiment.stop
    pairs = (("steps", stop.steps), ("iteration", stop.iterations), ("time/total_s", stop.seconds))
    return max((min(row.get(name, 0.0) / limit, 1.0) for name, limit in pairs if limit), default=0.0)


def remaining(experiment: Experiment, row: Row, since: float) -> str:
    """Time so far, `since` the last row too, and about how much is left."""
    if not row:
        return f"{clock(since)}: the first iteration, with games to start and code to compile …"
    done, spent = progress(experiment, row), row["time/total_s"] + since
    if experiment.stop == Stop():
        return f"{clock(spent)}, no stop condition: until Ctrl-C"
    left = f", about {clock(row['time/total_s'] / done - spent)} left" if 0 < done < 1 else ""
    goal = "" if experiment.stop.return_ is None else f"; a return of {experiment.stop.return_:g} ends it"
    return f"{done:.0%} in {clock(spent)}{left}{goal}"


def clock(seconds: float) -> str:
    """3:05, 1:02:03."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def sparkline(values: list[float], width: int) -> str:
    """The curve in one line; many values are averaged into `width` columns."""
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
