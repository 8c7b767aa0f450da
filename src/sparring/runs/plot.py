"""Figures of runs: return by steps and by time, with a confidence band over the seeds of one experiment; where the time
went; what it cost (CPU, memory, GPUs, power)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.files import save_figure
from sparring.games.spec import Array
from sparring.metering.energy import SOURCES
from sparring.runs.metrics import PHASES, Row
from sparring.runs.run import Run

__all__ = ["Curve", "curve", "drawn_return", "groups", "plot"]

POINTS = 200
EVALUATED, PLAYED = "evaluation/return_mean", "episode/return_mean"
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided 95 %, for 1 … 9 degrees


class Curve(NamedTuple):
    x: Array
    mean: Array
    low: Array
    high: Array


def plot(runs: Sequence[Run], out: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("figures need matplotlib: pip install 'sparring[train]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    if out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"{out}: figures are written as .png, .svg or .pdf")
    grouped, key = groups(runs), drawn_return(runs)
    for run in runs:
        if not any(key in row for row in run.rows()):
            raise InputError(f"{run.path} has no returns to draw yet ({key}): set evaluation.every, or let it run on")
    metered = any("usage/cpu" in row for run in runs for row in run.rows())
    size = {"figsize": (15, 7.6 if metered else 4.2), "width_ratios": (2, 2, 1.2), "squeeze": False}
    figure, ((by_steps, by_time, phases), *more) = pyplot.subplots(1 + metered, 3, **size)
    unit, seconds = _unit_of_time(max(run.rows()[-1]["time/total_s"] for run in runs))
    for label, members in grouped.items():
        for axes, x, scale in ((by_steps, members[0].experiment.axis, 1), (by_time, "time/total_s", seconds)):
            line = curve([run.rows() for run in members], x, key)
            _draw(axes, line._replace(x=line.x / scale), f"{label} ({len(members)})")
    for axes, name in ((by_steps, " or ".join(sorted({run.experiment.axis for run in runs}))), (by_time, unit)):
        axes.set(xlabel=name, ylabel="return of evaluations" if key == EVALUATED else "return while training")
        axes.grid(alpha=0.3)
    by_steps.xaxis.set_major_formatter(EngFormatter(sep=""))
    by_steps.legend(fontsize=8)
    _draw_phases(phases, grouped)
    if metered:
        _draw_usage(more[0], grouped, unit, seconds)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_figure(figure, out, dpi=130)
    except ValueError as error:
        raise InputError(f"{out}: {error}") from error
    finally:
        pyplot.close(figure)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed only are one curve."""
    found: dict[bytes, list[Run]] = {}
    for run in {run.path.resolve(): run for run in runs}.values():
        if not run.rows():
            raise InputError(f"{run.path} has no metrics yet")
        same = msgspec.structs.replace(run.experiment, seed=0, out=None)
        found.setdefault(msgspec.json.encode(same, order="sorted"), []).append(run)
    return dict(zip(_labels([members[0] for members in found.values()]), found.values(), strict=True))


def _labels(runs: Sequence[Run]) -> list[str]:
    """As short as they differ: algorithm and game; with the game's settings, the directory's name or its whole path."""
    short = [f"{run.experiment.name} {run.experiment.game_id}" for run in runs]
    longer = (
        short,
        [f"{run.experiment.name} {run.experiment.game_words}" for run in runs],
        [f"{name}, {run.path.name}" for name, run in zip(short, runs, strict=True)],
        [f"{name}, {run.path}" for name, run in zip(short, runs, strict=True)],
    )
    return next((names for names in longer if len(set(names)) == len(runs)), longer[-1])


def drawn_return(runs: Sequence[Run]) -> str:
    """One kind for all curves of a figure: evaluations where every run has several, else the episodes of training."""
    evaluated = all(sum(EVALUATED in row for row in run.rows()) > 1 for run in runs)
    return EVALUATED if evaluated else PLAYED


def curve(seeds: Sequence[list[Row]], x: str, key: str = PLAYED) -> Curve:
    """Mean over seeds and its 95 % confidence interval (Student's t), as far as every seed went. It does not leave what
    single episodes returned: few seeds make it wide, and nobody knows whether more than the most is possible."""
    lines, extremes = [], []
    group = key.rpartition("_")[0]
    for rows in seeds:
        reported = [row for row in rows if key in row]
        if reported:
            lines.append(np.array([(row[x], row[key]) for row in reported]).T)
            extremes += [row.get(f"{group}_{end}", row[key]) for row in reported for end in ("min", "max")]
    if not lines:
        return Curve(*(np.empty(0) for _ in range(4)))
    first, last = max(line[0, 0] for line in lines), min(line[0, -1] for line in lines)
    if first > last:  # one seed had ended before another had anything to tell
        return Curve(*(np.empty(0) for _ in range(4)))
    at = np.linspace(first, last, POINTS)
    values = np.array([np.interp(at, *line) for line in lines])
    mean, n = values.mean(0), len(values)
    t = T_95[n - 2] if 2 <= n <= len(T_95) + 1 else 1.96
    half = t * values.std(0, ddof=1) / np.sqrt(n) if n > 1 else np.zeros_like(mean)
    return Curve(at, mean, np.maximum(mean - half, min(extremes)), np.minimum(mean + half, max(extremes)))


def _unit_of_time(longest: float) -> tuple[str, int]:
    """Name and seconds of the unit in which an axis that long has few digits."""
    if longest < 300:
        return "seconds", 1
    return ("minutes", 60) if longest < 3 * 3600 else ("hours", 3600)


def _draw(axes: Any, line: Curve, label: str) -> None:
    alone = len(set(line.x)) == 1  # a line of no length would not be seen
    (drawn,) = axes.plot(line.x, line.mean, label=label, marker="o" if alone else None)
    axes.fill_between(line.x, line.low, line.high, alpha=0.2, color=drawn.get_color(), linewidth=0)


def _draw_usage(panels: Any, grouped: dict[str, list[Run]], unit: str, seconds: int) -> None:
    """Utilisation, memory and power by time, of the first run of each curve; GPUs are dashed."""
    used, memory, power = panels
    for number, members in enumerate(grouped.values()):
        rows, colour = members[0].rows(), f"C{number}"
        for axes, scale, names in (
            (used, 100, {"usage/cpu": ("CPU", "-"), "usage/gpu": ("GPU", "--")}),
            (memory, 1e-3, {"usage/memory_mb": ("memory", "-"), "usage/vram_mb": ("VRAM", "--")}),
        ):
            for name, (label, style) in names.items():
                seen = [(row["time/total_s"] / seconds, row[name] * scale) for row in rows if name in row]
                if seen:
                    axes.plot(*zip(*seen, strict=True), style, color=colour, label=label if number == 0 else None)
        for name, source in SOURCES.items():
            if watts := _watts(rows, f"energy/{name}_j"):
                at, values = zip(*watts, strict=True)
                power.plot([each / seconds for each in at], values, color=colour, label=source if number == 0 else None)
    if not power.lines:
        power.text(0.5, 0.5, "energy was not measured", ha="center", transform=power.transAxes, color="grey")
    labels = ("utilisation of the machine, %", "memory, GB", "power, W")
    for axes, label in zip((used, memory, power), labels, strict=True):
        axes.set(xlabel=unit, ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)


def _watts(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Seconds of the run, and the power since the point before; of short iterations several make a point. A row's
    joules are counted after its evaluation, its time before."""
    measured = [(row["time/total_s"] + row.get("time/evaluate_s", 0.0), row[name]) for row in rows if name in row]
    found: list[tuple[float, float]] = []
    if not measured:
        return found
    before, gathered = measured[0][0], 0.0
    least = (measured[-1][0] - before) / POINTS
    for at, joules in measured[1:]:
        gathered += joules
        if at > before and at - before >= least:
            found.append((at, gathered / (at - before)))
            before, gathered = at, 0.0
    return found


def _draw_phases(axes: Any, grouped: dict[str, list[Run]]) -> None:
    """Seconds per iteration by phase; medians, since an early iteration compiles."""
    bottom = np.zeros(len(grouped))
    rows = [[row for run in members for row in run.rows()] for members in grouped.values()]
    for phase in PHASES:
        seconds = np.array([np.median([row.get(f"time/{phase}_s", 0.0) for row in group]) for group in rows])
        axes.bar(range(len(grouped)), seconds, bottom=bottom, label=phase)
        bottom += seconds
    axes.set_xticks(range(len(grouped)), list(grouped), rotation=20, ha="right", fontsize=7)
    axes.set(ylabel="seconds per iteration")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PHASES), frameon=False)
