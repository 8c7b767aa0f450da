"""What a person sees while a sweep runs: how many trials are where and the best so far."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel

from sparring.sweep.journal import TrialStatus, trial_name
from sparring.sweep.plan import Sweep
from sparring.sweep.results import best_of, columns, ranked, row
from sparring.terminal import plain, table

__all__ = ["SweepProgress", "results"]

STATES = ("done", "stopped", "failed", "running", "waiting", "unfinished")


class SweepProgress:
    """Redrawn in place on a terminal, a line now and then elsewhere. A failure is reported once."""

    LINE, PICTURE = 10.0, 0.5  # seconds between two

    def __init__(self, console: Console, sweep: Sweep) -> None:
        self.console, self.sweep = console, sweep
        self.next, self.line, self.last = 0.0, "", ""
        self.reported: set[int] = set()
        self.live: Live | None = None

    @contextmanager
    def show(self, title: str) -> Iterator["SweepProgress"]:
        self.title = title
        if not self.console.is_terminal:
            self._say(title)
            try:
                yield self
            finally:
                if self.line != self.last:
                    self._say(self.line)
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as self.live:
            self.live.update(Panel("starting the first trials …", title=plain(title), title_align="left"), refresh=True)
            yield self

    def __call__(self, trials: Iterable[TrialStatus]) -> None:
        trials = list(trials)
        for trial in trials:
            if trial.state == "failed" and trial.number not in self.reported:
                self.reported.add(trial.number)
                self._say(
                    f"trial {trial_name(trial.number)} failed ({self.sweep.describe(trial.values)}): {trial.cause}"
                )
        self.line = self.describe(trials)
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + (self.LINE if self.live is None else self.PICTURE)
        if self.live is not None:
            body = Group(plain(self.line), "", self._table(trials))
            self.live.update(Panel(body, title=plain(self.title), title_align="left"), refresh=True)
        elif self.line != self.last:
            self._say(self.line)
            self.last = self.line

    def _table(self, trials: list[TrialStatus]) -> RenderableType:
        head, rows = columns(self.sweep), [row(self.sweep, trial) for trial in ranked(self.sweep, trials)[:10]]
        shown = table("the best so far", head, rows)
        if self.console.measure(shown, options=self.console.options.update(width=500)).maximum > self.console.width - 4:
            # Not the values then: half a number helps nobody, and the line above has those of the best.
            keep = [place for place, name in enumerate(head) if name.lstrip(">") not in self.sweep.labels]
            shown = table("the best so far", [head[i] for i in keep], [[each[i] for i in keep] for each in rows])
        return shown

    def describe(self, trials: list[TrialStatus]) -> str:
        counts = Counter(trial.state for trial in trials)
        counts["waiting"] += self.sweep.total - len(trials)  # a search does not know them yet
        line = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        if (best := best_of(self.sweep, trials)) is not None:
            line += f"; best {best.metric:,.4g} by {trial_name(best.number)}: {self.sweep.describe(best.values)}"
        return line

    def _say(self, text: str) -> None:
        self.console.print(plain(text), soft_wrap=True, highlight=False)


def results(console: Console, sweep: Sweep, trials: Iterable[TrialStatus]) -> None:
    rows = [row(sweep, trial) for trial in ranked(sweep, trials)]
    shown = table(f"{len(rows)} trials by {sweep.tune.metric}", columns(sweep), rows)
    console.width = max(console.width, console.measure(shown, options=console.options.update(width=500)).maximum)
    console.print(shown)  # as wide as it is: half a number helps nobody
