"""What a sweep leaves behind: a table of its trials (CSV and Markdown), the best one's experiment, and a figure."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sparring.experiment import write
from sparring.files import replacing, write_whole
from sparring.search_space import show
from sparring.sweep.journal import TrialStatus, trial_name
from sparring.sweep.plan import Sweep
from sparring.terminal import number

__all__ = ["best_of", "columns", "ranked", "row", "write_all"]


def ranked(sweep: Sweep, trials: Iterable[TrialStatus]) -> list[TrialStatus]:
    """The best first; those that failed or have no metric yet at the end."""
    sign = -1.0 if sweep.tune.mode == "max" else 1.0

    def place(trial: TrialStatus) -> tuple[bool, float, int]:
        out = trial.metric is None or trial.state == "failed"
        return out, 0.0 if trial.metric is None else sign * trial.metric, trial.number

    return sorted(trials, key=place)


def best_of(sweep: Sweep, trials: Iterable[TrialStatus]) -> TrialStatus | None:
    first = next(iter(ranked(sweep, trials)), None)
    return None if first is None or first.metric is None or first.state == "failed" else first


def columns(sweep: Sweep) -> list[str]:
    """Names that begin with '>' are of numbers."""
    values = [
        ("" if any(isinstance(value, str | list | dict) for value in axis.values) else ">") + name
        for axis, name in zip(sweep.axes, sweep.labels, strict=True)
    ]
    copied = [">copied from"] if sweep.tune.scheduler == "pbt" else []
    return [">trial", "state", f">{sweep.tune.metric}", *values, ">iterations", ">steps", ">seconds", *copied]


def row(sweep: Sweep, trial: TrialStatus) -> list[str]:
    copied = "" if trial.source is None else f"{trial_name(trial.source)} (of {trial.copies})"
    return [
        trial_name(trial.number),
        trial.state,
        "–" if trial.metric is None else f"{trial.metric:,.4g}" if abs(trial.metric) < 1 else f"{trial.metric:,.1f}",
        *(show(trial.values[axis.name]) for axis in sweep.axes),
        str(trial.iterations),
        number(trial.steps),
        f"{trial.seconds:,.0f}",
        *([copied] if sweep.tune.scheduler == "pbt" else []),
    ]


def write_all(sweep: Sweep, root: Path, trials: Sequence[TrialStatus]) -> None:
    from sparring.sweep.figure import draw

    order = ranked(sweep, trials)
    _write_csv(sweep, root / "results.csv", order)
    _write_markdown(sweep, root / "results.md", order)
    if (best := best_of(sweep, trials)) is not None:
        write(root / "best.yaml", msgspec.structs.replace(sweep.experiment(best.values), out=None))
        draw(sweep, order, root / "sweep.png")


def _write_csv(sweep: Sweep, path: Path, trials: Sequence[TrialStatus]) -> None:
    names = [axis.name for axis in sweep.axes]
    head = ["trial", "state", sweep.tune.metric, *names, "iterations", "steps", "seconds", "copied_from", "cause"]
    with replacing(path) as new, new.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for t in trials:
            values = [v if isinstance(v, str) else msgspec.json.encode(v).decode() for v in map(t.values.get, names)]
            copied = "" if t.source is None else trial_name(t.source)
            metric = "" if t.metric is None else repr(float(t.metric))
            made = [t.iterations, t.steps, f"{t.seconds:.1f}"]
            writer.writerow([trial_name(t.number), t.state, metric, *values, *made, copied, t.cause])


def _write_markdown(sweep: Sweep, path: Path, trials: Sequence[TrialStatus]) -> None:
    tune, first = sweep.tune, sweep.first
    head = columns(sweep)
    lines = [
        f"# {first.name} on {first.game_words}: {len(trials)} trials",
        "",
        f"By `{tune.metric}` ({tune.mode}), scheduler {tune.scheduler}, search {tune.search}, seed {sweep.seed}.",
        "",
        "| " + " | ".join(name.lstrip(">") for name in head) + " |",
        "|" + "|".join("--:" if name.startswith(">") else "---" for name in head) + "|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row(sweep, trial)) + " |" for trial in trials),
    ]
    failed = [trial for trial in trials if trial.state == "failed"]
    for trial in failed:
        lines += ["", f"Trial {trial_name(trial.number)} failed:", "", "```", trial.cause, "```"]
    if (best := best_of(sweep, trials)) is not None:
        lines += ["", f"Best: trial {trial_name(best.number)} (`best.yaml`; `trials/{trial_name(best.number)}`).", ""]
        lines += ["![The searched values and what came of them](sweep.png)"]
    write_whole(path, ("\n".join(lines) + "\n").encode())
