"""What `sparring bench hardware` found, beside the hardware study's tables."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparring.bench import study
from sparring.bench.document import Document
from sparring.bench.hardware import Machine, Matrix, MeasuredConfiguration, Skipped, grouped
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.runs.metrics import PHASES

__all__ = ["document", "heads", "speed_ups", "write"]

COLOURS = {"sample": "#4c78a8", "load": "#72b7b2", "learn": "#e45756", "update": "#f2cf5b", "other": "#bab0ac"}
heads = (
    "model", "device", "workers", "cores", "precision", "iteration", *PHASES, "steps/s", "learned/s",
    "passes/s", "speed-up",
)  # fmt: skip
DISTURBED = 0.15  # of the machine by others: more is said
COSTS = ("model", "device", "workers", "cores", "precision", "CPU", "machine", "memory", "GPU", "VRAM", "energy", "by")


def write(
    folder: Path,
    matrix: Matrix,
    found: Sequence[MeasuredConfiguration],
    skipped: Sequence[Skipped],
    command: str,
    iterations: int,
) -> list[Path]:
    return document(matrix, found, skipped, command, iterations, inferences(folder)).write(folder, "report")


def inferences(folder: Path) -> list[list[str]]:
    """Of `sparring bench inference --output FOLDER/times.csv`, where it wrote there: model, runtime, milliseconds."""
    path = folder / "times-summary.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [[row.get(name) or "" for name in ("model", "runtime", "p50_ms")] for row in csv.DictReader(file)]
    try:
        return [[model, runtime, f"{float(ms):.3g}"] for model, runtime, ms in rows if ms]
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): measure again, or move it away") from error


def speed_ups(found: Sequence[MeasuredConfiguration]) -> list[float]:
    """Of steps/s, over the first configuration of the same model."""
    first: dict[str, float] = {}
    return [each.steps_per_s / first.setdefault(each.configuration.model, each.steps_per_s) for each in found]


def disturbance(found: Sequence[MeasuredConfiguration]) -> str | None:
    """Words on what others took of the machine meanwhile; None where it was little."""
    by_others = [
        each.usage["usage/machine_cpu"] - each.usage["usage/cpu"]
        for each in found
        if {"usage/machine_cpu", "usage/cpu"} <= each.usage.keys()
    ]
    if not by_others or max(by_others) <= DISTURBED:
        return None
    return (
        f"**The machine was not quiet**: others took {min(by_others):.0%} to {max(by_others):.0%} of it. The seconds "
        "are upper bounds, and ratios between configurations tell little."
    )


def names_of(each: MeasuredConfiguration | Skipped) -> list[str]:
    c = each.configuration
    return [c.model, c.device, str(c.workers), c.affinity, c.precision]


def rows(matrix: Matrix, found: Sequence[MeasuredConfiguration]) -> list[list[str]]:
    return [
        [
            *names_of(each),
            _seconds(each.iteration_s),
            *(_seconds(each.phases[phase]) for phase in PHASES),
            f"{each.steps_per_s:,.0f}",
            "–" if each.learned_per_s is None else f"{each.learned_per_s:,.0f}",
            _passes(matrix.models[each.configuration.model], each),
            f"×{speed_up:.2f}",
        ]
        for each, speed_up in zip(found, speed_ups(found), strict=True)
    ]


def _passes(experiment: Experiment, each: MeasuredConfiguration) -> str:
    """Of algorithms that pass over the same steps several times."""
    epochs = experiment.hyperparameters.get("epochs")
    if each.learned_per_s is None or not isinstance(epochs, int):
        return "–"
    return f"{each.learned_per_s * epochs:,.0f}"


def costs(found: Sequence[MeasuredConfiguration]) -> list[list[str]]:
    forms = {
        "usage/cpu": "{:.0%}", "usage/machine_cpu": "{:.0%}", "usage/memory_mb": "{:,.0f} MB", "usage/gpu": "{:.0%}",
        "usage/vram_mb": "{:,.0f} MB",
    }  # fmt: skip
    return [
        [
            *names_of(each),
            *(form.format(each.usage[name]) if name in each.usage else "–" for name, form in forms.items()),
            "–" if each.joules is None else f"{each.joules:,.3g} J",
            each.energy_source or "–",
        ]
        for each in found
    ]


def document(
    matrix: Matrix,
    found: Sequence[MeasuredConfiguration],
    skipped: Sequence[Skipped],
    command: str,
    iterations: int,
    inferred: Sequence[Sequence[str]] = (),
) -> Document:
    made = Document("Hardware study")
    made.text(f"{Machine.here()}.")
    made.code(command)
    games = ", ".join(sorted({f"{name}: {e.name} on {e.game_words}" for name, e in matrix.models.items()}))
    made.text(
        f"{games}. Means of {iterations} iterations of each configuration, after those that wait for the first update "
        "and compile; each in a process of its own. Figures of so few iterations tell how the parts compare, not the "
        "last percent."
    )
    if found:
        _ours(made, matrix, found)
    if inferred:
        made.heading("Inference")
        made.text(
            "Milliseconds of an action, the median, from the observation to the action that the game takes: by "
            "`sparring bench inference`, a process for each runtime."
        )
        made.table(["model", "by", "ms"], inferred)
    if any(study.is_pong(experiment.game_id) for experiment in matrix.models.values()):
        _studys(made)
    if skipped:
        made.heading("What was not measured")
        names = ("model", "device", "workers", "cores", "precision", "why")
        made.table(names, [[*columns, why[:300]] for columns, why in grouped(skipped)])
    return made


def _ours(made: Document, matrix: Matrix, found: Sequence[MeasuredConfiguration]) -> None:
    made.heading("Time")
    made.text(
        "Seconds of an iteration and of its parts, steps a second of the whole, and steps learned from by the second "
        "of learning; passes count a step once for each epoch. With `rollout.overlap` play goes on while the learner "
        "learns: the parts then hide each other. The speed-up is of steps/s, over the first configuration of the "
        "model."
    )
    if disturbed := disturbance(found):
        made.text(disturbed)
    made.table(heads, rows(matrix, found))
    made.picture("hardware-time.png", "Time of an iteration by task", draw_time(found))
    made.heading("Utilisation and energy")
    made.text(
        "CPU is the part of all cores of the machine that the training used, machine what everybody used: well above, "
        "others disturbed it. Memory is of all its processes, shared pages by their part. Energy is of an iteration, "
        "by whom it says; an estimate is no measurement. Iterations shorter than a quarter of a second are not "
        "seen."
    )
    made.table(COSTS, costs(found))
    if any(each.usage for each in found):
        made.picture("hardware-usage.png", "Utilisation by iteration", draw_usage(found))


def _studys(made: Document) -> None:
    made.heading("Beside the hardware study")
    made.text(
        "The study's own figures, on its machines: PPO by RLlib on Atari Pong, 4,000 steps an iteration (4,800 with "
        "8 workers), 30 epochs. Its networks are `experiments/pong/model1.yaml` and so on. Where the steps or epochs "
        "of an iteration differ, compare passes a second."
    )
    names = [f"model {model}" for model in study.MODELS]
    table = [
        [
            device,
            *(
                f"{i.whole:g} s ({i.learn:g} / {i.sample:g}; {i.learned_per_s:g}; {i.passes_per_s:,.0f})"
                for i in iterations
            ),
        ]
        for device, iterations in study.TRAINING.items()
    ]
    made.table(["iteration (learn / sample; learned/s; passes/s)", *names], table)
    made.text(study.RETURNS)
    made.text("Inference in the study: milliseconds of an action, means, with the value's tower in the files.")
    made.table(["by", *names], [[by, *(f"{ms:g}" for ms in each)] for by, each in study.INFERENCE.items()])


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("figures need matplotlib: pip install 'sparring[train]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _png(figure: Any) -> bytes:
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, dpi=110)
    pyplot().close(figure)
    return out.getvalue()


def draw_time(found: Sequence[MeasuredConfiguration]) -> bytes:
    figure, axes = pyplot().subplots(figsize=(11, 0.42 * len(found) + 1.6))
    labels = [
        ", ".join([*names_of(each)[:2], f"{each.configuration.workers} workers", *names_of(each)[3:]]) for each in found
    ]
    left = [0.0] * len(found)
    parts = {phase: [each.phases[phase] for each in found] for phase in PHASES}
    parts["other"] = [max(each.iteration_s - sum(each.phases.values()), 0.0) for each in found]
    for name, seconds in parts.items():
        axes.barh(range(len(found)), seconds, left=left, label=name, color=COLOURS[name])
        left = [low + more for low, more in zip(left, seconds, strict=True)]
    for y, (each, end) in enumerate(zip(found, left, strict=True)):
        axes.annotate(f" {each.steps_per_s:,.0f} steps/s", (end, y), va="center", fontsize=8)
    axes.set_yticks(range(len(found)), labels, fontsize=8)
    axes.set(xlabel="seconds of an iteration")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1))
    return _png(figure)


def draw_usage(found: Sequence[MeasuredConfiguration]) -> bytes:
    panels = {"usage/cpu": ("CPU, %", 100), "usage/memory_mb": ("memory, GB", 1e-3)}
    if any("usage/gpu" in each.usage for each in found):
        panels |= {"usage/gpu": ("GPU, %", 100), "usage/vram_mb": ("VRAM, GB", 1e-3)}
    figure, axes = pyplot().subplots(1, len(panels), figsize=(5.5 * len(panels), 3.8), squeeze=False)
    for panel, (name, (label, scale)) in zip(axes[0], panels.items(), strict=True):
        for each in found:
            seen = [(number, look[name] * scale) for number, look in enumerate(each.series, 1) if name in look]
            if seen:
                panel.plot(*zip(*seen, strict=True), marker="o", label=str(each.configuration), linewidth=1)
        panel.set(xlabel="iteration", ylabel=label)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    if len(found) <= 10 and axes[0][0].lines:
        axes[0][0].legend(fontsize=6, frameon=False)
    return _png(figure)
