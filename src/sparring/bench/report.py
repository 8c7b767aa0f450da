"""What `sparring bench scaling` found: a CSV file, a Markdown page and two pictures. Beside them are the figures of the
reference study (HumanoidBullet with RLlib on 20-core POWER9 nodes with V100 GPUs)."""

import csv
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparring.bench.scaling import MeasuredLayout
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.files import replacing, save_figure, write_whole
from sparring.runs.metrics import PHASES

__all__ = ["COLUMNS", "table", "write"]

REFERENCE_GAME = "HumanoidBulletEnv-v0"
# Seconds of an iteration by workers, the learner on a CPU or on a GPU.
REFERENCE: dict[str, dict[str, dict[int, float]]] = {
    "td3": {
        "CPU": {1: 25.56, 2: 14.38, 4: 13.10, 8: 8.12, 16: 3.63, 32: 2.68, 64: 2.35},
        "GPU": {1: 21.69, 2: 11.58, 4: 10.09, 8: 6.76, 16: 5.20, 32: 2.19, 64: 1.99},
    },
    "sac": {
        "CPU": {1: 92.87, 4: 37.83, 8: 19.48, 16: 15.46, 32: 11.17, 64: 6.37},
        "GPU": {1: 67.49, 4: 28.46, 8: 15.65, 16: 8.04, 32: 4.72, 64: 2.55},
    },
    "ppo": {
        "CPU": {2: 34.54, 4: 23.53, 16: 11.34, 24: 5.57, 64: 4.13},
        "GPU": {1: 42.59, 2: 19.88, 4: 15.53, 8: 8.76, 16: 5.33, 32: 3.91, 64: 2.78},
    },
}
COLUMNS = (
    "workers", "gpus", "iteration_s", "steps_per_s", "speed_up", "efficiency", "sampled_per_s", "sampling_efficiency",
    *(f"{phase}_s" for phase in PHASES), "utilisation", "memory_mb", "start_s", "iteration_s_each_round",
)  # fmt: skip
COLOURS = {"sample": "#4c78a8", "load": "#72b7b2", "learn": "#e45756", "update": "#f2cf5b", "other": "#bab0ac"}
OURS, STUDY = ("#1b6ca8", "#d1495b", "#2e933c"), ("#8d8d8d", "#b9b9b9")
Line = dict[str, Any]


def table(found: Sequence[MeasuredLayout]) -> list[Line]:
    """A line for each configuration: medians over rounds, and what follows from these very numbers. Speed-up is over
    the fewest workers with the same GPUs."""
    lines = []
    for each in found:
        here = each.configuration
        base = min(
            (other for other in found if other.configuration.gpus == here.gpus),
            key=lambda other: other.configuration.workers,
        )
        more = here.workers / base.configuration.workers
        rate, base_rate = (m.median(lambda r: r.steps_per_s) for m in (each, base))
        sampled, base_sampled = (m.median(lambda r: r.sampled_per_s) for m in (each, base))
        speed_up, sampling = _ratio(rate, base_rate), _ratio(sampled, base_sampled)
        memory = each.median(lambda r: r.memory)
        lines.append(
            {
                "workers": here.workers,
                "gpus": here.gpus,
                "iteration_s": each.median(lambda r: r.iteration_s),
                "steps_per_s": rate,
                "speed_up": speed_up,
                "efficiency": None if speed_up is None else speed_up / more,
                "sampled_per_s": sampled,
                "sampling_efficiency": None if sampling is None else sampling / more,
                **{f"{phase}_s": statistics.median(r.phases[phase] for r in each.rounds) for phase in PHASES},
                "utilisation": each.median(lambda r: r.utilisation),
                "memory_mb": None if memory is None else memory / 1e6,
                "start_s": each.median(lambda r: r.start_s),
                "iteration_s_each_round": " ".join(f"{r.iteration_s:.4g}" for r in each.rounds),
            }
        )
    return lines


def _ratio(rate: float | None, base: float | None) -> float | None:
    return rate / base if rate and base else None


def write(out: Path, experiment: Experiment, found: Sequence[MeasuredLayout], command: str) -> None:
    lines = table(found)
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "scaling.csv") as new, new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({k: round(v, 6) if isinstance(v, float) else v for k, v in line.items()} for line in lines)
    write_whole(out / "scaling.md", markdown(experiment, found, lines, command).encode(), shared=True)
    draw(out, experiment, lines)


def reference(experiment: Experiment) -> dict[str, dict[int, float]]:
    return REFERENCE.get(experiment.name, {}) if experiment.game_id == REFERENCE_GAME else {}


def markdown(experiment: Experiment, found: Sequence[MeasuredLayout], lines: Sequence[Line], command: str) -> str:
    rounds, steps = len(found[0].rounds), lines[0]["iteration_s"] * lines[0]["steps_per_s"]
    text = [
        f"# Scaling: {experiment.name} on {experiment.game_words}\n",
        f"`{command}`\n",
        f"Runner `{experiment.runner}`, {experiment.rollout.envs} environments of each worker, {steps:,.0f} steps an "
        f"iteration; {os.cpu_count()} cores ({platform.machine()}, {platform.system()}). Medians of {rounds} rounds in "
        "turns, without warm-up. Speed-up is that of steps/s over the fewest workers with the same GPUs; efficiency is "
        "its part of linear, of the whole iteration and of sampling alone (where play and learning take turns). "
        "Utilisation is the part of the time that a "
        "worker played; memory is what a worker's process takes, shared pages by their part; the start is everything "
        "from the command to the end of the first iteration.\n",
    ]
    heads = ["workers", "GPUs", "iteration", "steps/s", "speed-up", "efficiency", "of sampling", *PHASES]
    heads += ["utilisation", "memory", "start", "each round"]
    text += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for line in lines:
        cells = [str(line["workers"]), _cell(line["gpus"], "{}"), _seconds(line["iteration_s"])]
        cells += [f"{line['steps_per_s']:,.0f}", _cell(line["speed_up"], "{:.2f}"), _cell(line["efficiency"], "{:.0%}")]
        cells += [_cell(line["sampling_efficiency"], "{:.0%}"), *(_seconds(line[f"{phase}_s"]) for phase in PHASES)]
        cells += [_cell(line["utilisation"], "{:.0%}"), _cell(line["memory_mb"], "{:.1f} MB")]
        cells += [_seconds(line["start_s"]), line["iteration_s_each_round"]]
        text.append("| " + " | ".join(cells) + " |")
    text += ["\n![Time by workers](time_by_workers.png)\n", "![Time by task](time_by_task.png)\n"]
    if study := reference(experiment):
        text += _beside(lines, study)
    return "\n".join(text)


def _beside(lines: Sequence[Line], study: dict[str, dict[int, float]]) -> list[str]:
    """Ours and the study's, by workers."""
    text = [
        "## Beside the reference study\n",
        "RLlib on 20-core POWER9 nodes with V100 GPUs: seconds of an iteration, and speed-up over one worker (of PPO "
        "on CPUs, which has none: over one worker with a GPU). Its machines and iterations are not ours: compare the "
        "speed-ups, not the seconds.\n",
    ]
    columns: dict[str, dict[int, tuple[float, float]]] = {}
    for line in lines:
        name = "ours" if line["gpus"] is None else f"ours, {line['gpus']} GPUs"
        columns.setdefault(name, {})[line["workers"]] = line["iteration_s"], line["speed_up"]
    for name, seconds in study.items():
        columns[f"study, {name}"] = {w: (s, _one(study, name) / s) for w, s in seconds.items()}
    text += ["| workers | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for workers in sorted({w for column in columns.values() for w in column}):
        cells = [
            f"{_seconds(column[workers][0])} (×{column[workers][1]:.1f})" if workers in column else "–"
            for column in columns.values()
        ]
        text.append(f"| {workers} | " + " | ".join(cells) + " |")
    return [*text, ""]


def _one(study: dict[str, dict[int, float]], name: str) -> float:
    """The study's seconds with one worker; PPO on CPUs was not measured with one, and is compared with the GPU's."""
    return study[name].get(1, study["GPU"][1])


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def draw(out: Path, experiment: Experiment, lines: Sequence[Line]) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("figures need matplotlib: pip install 'sparring[train]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, picture in (("time_by_workers.png", _by_workers), ("time_by_task.png", _by_task)):
        figure = picture(pyplot, experiment, lines)
        figure.suptitle(f"{experiment.name.upper()} on {experiment.game_words}, {os.cpu_count()} cores", fontsize=12)
        figure.tight_layout()
        save_figure(figure, out / name, dpi=130)
        pyplot.close(figure)


def _by_workers(pyplot: Any, experiment: Experiment, lines: Sequence[Line]) -> Any:
    figure, (time, speed) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    everyone = {line["workers"] for line in lines}
    for gpus, colour in zip(dict.fromkeys(line["gpus"] for line in lines), OURS * len(lines), strict=False):
        ours = [line for line in lines if line["gpus"] == gpus]
        label = "Sparring" if gpus is None else f"Sparring, {gpus} GPUs"
        at = [line["workers"] for line in ours]
        time.plot(at, [line["iteration_s"] for line in ours], "o-", color=colour, label=label, linewidth=2)
        speed.plot(at, [line["speed_up"] * at[0] for line in ours], "o-", color=colour, label=label, linewidth=2)
    study = reference(experiment)
    for (name, seconds), colour in zip(study.items(), STUDY, strict=False):
        label, at = f"reference study, {name}", list(seconds)
        everyone |= set(at)
        time.plot(at, list(seconds.values()), "s--", color=colour, label=label)
        speed.plot(at, [_one(study, name) / s for s in seconds.values()], "s--", color=colour, label=label)
    ticks = sorted(everyone)
    speed.plot(ticks, ticks, ":", color="black", alpha=0.5, label="linear")
    time.set(xlabel="workers", ylabel="seconds of an iteration", title="Time by workers", yscale="log")
    over = "speed-up over one worker" if 1 in everyone else "speed-up, the fewest workers taken as linear"
    speed.set(xlabel="workers", ylabel=over, title="Speed-up", yscale="log")
    for axes in (time, speed):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    return figure


def _by_task(pyplot: Any, experiment: Experiment, lines: Sequence[Line]) -> Any:
    figure, axes = pyplot.subplots(figsize=(max(5.5, 1.2 * len(lines) + 2.5), 4.4))
    labels = [
        str(line["workers"]) if line["gpus"] is None else f"{line['workers']}\n{line['gpus']} GPUs" for line in lines
    ]
    bottom = [0.0] * len(lines)
    parts = {phase: [line[f"{phase}_s"] for line in lines] for phase in PHASES}
    parts["other"] = [max(line["iteration_s"] - sum(line[f"{p}_s"] for p in PHASES), 0.0) for line in lines]
    for name, seconds in parts.items():
        axes.bar(labels, seconds, 0.62, bottom=bottom, label=name, color=COLOURS[name])
        bottom = [low + high for low, high in zip(bottom, seconds, strict=True)]
    for x, top in enumerate(bottom):
        axes.annotate(_seconds(top), (x, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xlabel="workers", ylabel="seconds of an iteration", title="Time by task")
    axes.margins(y=0.12)
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure
