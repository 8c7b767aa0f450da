"""The figure of a sweep: every trial as a line through its values (parallel coordinates), and the metric over each
value."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparring.files import save_figure
from sparring.games.spec import Array
from sparring.search_space import Axis, show
from sparring.sweep.journal import TrialStatus, trial_name
from sparring.sweep.plan import Sweep
from sparring.sweep.results import best_of

__all__ = ["draw"]

ACROSS = 4  # small pictures in a row
BEST = "#d62728"


def draw(sweep: Sweep, trials: Sequence[TrialStatus], out: Path) -> None:
    """Of the trials that have a metric; there must be one at least."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [trial for trial in trials if trial.metric is not None and trial.state != "failed"]
    best = best_of(sweep, shown)
    assert best is not None
    count = len(sweep.axes)
    across = min(ACROSS, count)
    rows = math.ceil(count / across)
    width = max(2.6 * (count + 1), 3.2 * across, 7.5)
    figure = pyplot.figure(figsize=(min(width, 16), 4 + 2.8 * rows), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3.6, 2.8 * rows))
    colours = _colours(sweep, shown)
    _parallel(top.subplots(), sweep, shown, best, colours)
    small = bottom.subplots(rows, across, squeeze=False, sharey=True).ravel()
    for axes, axis, name in zip(small, sweep.axes, sweep.labels, strict=False):
        _scatter(axes, axis, name, shown, best, colours)
    for axes in small[::across]:
        axes.set_ylabel(sweep.tune.metric, fontsize=8)
    for axes in small[count:]:
        axes.set_visible(False)
    first, stopped = sweep.first, sum(trial.state == "stopped" for trial in shown)
    title = f"{first.name} on {first.game_words}: {len(shown)} trials" + (
        f", {stopped} stopped early (dotted, hollow)" if stopped else ""
    )
    figure.suptitle(f"{title}. Best: {trial_name(best.number)}", fontsize=11)
    save_figure(figure, out, dpi=130)
    pyplot.close(figure)


def _colours(sweep: Sweep, trials: Sequence[TrialStatus]) -> list[Any]:
    """By rank, so that one outlier does not make the others look alike; the better, the darker."""
    from matplotlib import colormaps

    order = {trial.number: place for place, trial in enumerate(trials)}  # they come ranked
    last = max(len(trials) - 1, 1)
    return [colormaps["viridis"](0.9 * order[trial.number] / last) for trial in trials]


def _places(axis: Axis, values: Sequence[Any]) -> Array:
    """Where values lie on an axis: options side by side, logarithms where they were drawn so."""
    if axis.listed:
        return np.array([float(axis.values.index(value)) for value in values])
    return np.log10(np.array(values, float)) if axis.log else np.array(values, float)


def _ticks(axis: Axis) -> list[Any]:
    if axis.listed:
        return list(axis.values)
    low, high = axis.values
    if axis.log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers] if len(powers) > 1 else [low, high]
    inner = np.linspace(low, high, 5)
    return sorted({round(value) for value in inner}) if axis.kind == "randint" else [float(f"{v:.3g}") for v in inner]


def _parallel(
    axes: Any, sweep: Sweep, trials: Sequence[TrialStatus], best: TrialStatus, colours: Sequence[Any]
) -> None:
    metrics = np.array([trial.metric for trial in trials], float)
    lines, jitter = [], np.random.default_rng(0)
    for x, axis in enumerate(sweep.axes):
        values = [trial.values[axis.name] for trial in trials]
        ends = _places(axis, [axis.values[0], axis.values[-1]])
        low, span = ends[0], (ends[1] - ends[0]) or 1.0
        y = (_places(axis, values) - low) / span
        if axis.listed:  # or all lines through one option would be one
            y = y + jitter.uniform(-0.25, 0.25, len(y)) * min(0.1, 1.0 / len(axis.values))
        lines.append(y)
        ticks = _ticks(axis)
        _ruler(axes, x, (_places(axis, ticks) - low) / span, [_label(tick) for tick in ticks])
    low, span = metrics.min(), (metrics.max() - metrics.min()) or 1.0
    lines.append((metrics - low) / span)
    marks = np.linspace(low, low + span, 5)
    _ruler(axes, len(sweep.axes), (marks - low) / span, [f"{mark:,.4g}" for mark in marks])
    points = np.array(lines).T
    for trial, line, colour in reversed(list(zip(trials, points, colours, strict=True))):
        chosen = trial.number == best.number
        style = {"color": BEST, "lw": 2.4, "zorder": 5} if chosen else {"color": colour, "lw": 1.2, "alpha": 0.75}
        axes.plot(range(len(line)), line, ls=":" if trial.state == "stopped" else "-", **style)
    names = [*sweep.labels, str(sweep.tune.metric)]
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set(yticks=[], xlim=(-0.15, len(names) - 0.75), ylim=(-0.06, 1.06))
    axes.spines[:].set_visible(False)


def _ruler(axes: Any, x: int, y: Array, labels: Sequence[str]) -> None:
    axes.plot([x, x], [-0.02, 1.02], color="#888", lw=1, zorder=3)
    for place, label in zip(y, labels, strict=True):
        axes.annotate(
            label, (x, place), xytext=(5, 0), textcoords="offset points", fontsize=7.5, va="center", zorder=6,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
        )  # fmt: skip


def _scatter(
    axes: Any, axis: Axis, name: str, trials: Sequence[TrialStatus], best: TrialStatus, colours: Sequence[Any]
) -> None:
    x = _places(axis, [trial.values[axis.name] for trial in trials])
    if axis.log:
        x = 10.0**x
        axes.set_xscale("log")
    for trial, place, colour in zip(trials, x, colours, strict=True):
        chosen, stopped = trial.number == best.number, trial.state == "stopped"
        edge = BEST if chosen else colour
        face = "none" if stopped else edge
        axes.scatter(place, trial.metric, s=70 if chosen else 28, marker="*" if chosen else "o", fc=face, ec=edge)
    if axis.listed:
        axes.set_xticks(range(len(axis.values)), [_label(value) for value in axis.values])
        axes.set_xlim(-0.5, len(axis.values) - 0.5)
    axes.set_title(name, fontsize=9)
    axes.tick_params(labelsize=7.5)
    axes.grid(alpha=0.3)


def _label(value: Any) -> str:
    text = show(value)
    return text if len(text) <= 30 else text[:29] + "…"
