"""`sparring bench scaling`: the same experiment with more and more workers. Every measurement is a process of its own,
so none inherits compiled code, memory or devices from another; configurations take turns, round after round."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.bench.child import open_child, say, serve
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.runs.metrics import PHASES, Row

if TYPE_CHECKING:
    from sparring.training.protocol import Trainee

__all__ = ["Layout", "MeasuredLayout", "Round", "check", "configurations", "measure", "measure_all"]


@dataclass(frozen=True)
class Layout:
    workers: int
    gpus: int | None  # that learn; 0: a CPU learns; none: whatever the experiment says

    def __str__(self) -> str:
        gpus = "" if self.gpus is None else f", {self.gpus} GPUs"
        return f"{self.workers} workers{gpus}"

    def of(self, experiment: Experiment) -> Experiment:
        data = experiment.to_builtins()
        data["rollout"]["workers"] = self.workers
        if self.gpus is not None:
            data["resources"]["devices"] = max(self.gpus, 1)
        return Experiment.parse(data)


@dataclass(frozen=True)
class Round:
    """Means over a measurement's iterations."""

    iteration_s: float
    steps_per_s: float
    phases: dict[str, float]  # seconds of an iteration
    sampled_per_s: float | None  # where play and learning take turns: steps by the time that play took
    utilisation: float | None  # part of the time that workers played
    memory: float | None  # bytes of a worker
    start_s: float  # from the command to the end of the first iteration


@dataclass
class MeasuredLayout:
    configuration: Layout
    rounds: list[Round] = field(default_factory=list)

    def median(self, of: Callable[[Round], float | None]) -> float | None:
        values = [value for each in self.rounds if (value := of(each)) is not None]
        return statistics.median(values) if values else None


def configurations(workers: str, gpus: str | None) -> list[Layout]:
    devices: list[int | None] = [None] if gpus is None else list(_numbers("--gpus", gpus, 0))
    return [Layout(count, device) for device in devices for count in _numbers("--workers", workers, 1)]


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < least:
        raise InputError(f"{option} {text}: write numbers from {least} on with commas between, such as {option} 1,2,4")
    return found


def check(experiment: Experiment, wanted: list[Layout]) -> None:
    """Before anything is measured: all configurations can be made here."""
    if experiment.source != "simulate":
        raise InputError("scaling is about rollout workers, and this experiment has none: its source is a store")
    experiments = [each.of(experiment) for each in wanted]
    order = {"check": experiments, "gpus": max((each.gpus or 0) for each in wanted)}
    with open_child(__name__, order, dict(os.environ)) as child:
        for _ in child.lines:
            pass


def measure_all(
    experiment: Experiment,
    wanted: list[Layout],
    iterations: int,
    rounds: int,
    on_progress: Callable[[int, Layout, int], None],
) -> list[MeasuredLayout]:
    """`on_progress` hears which iteration of which configuration in which round is done."""
    found = [MeasuredLayout(each) for each in wanted]
    for number in range(rounds):
        for each in found:
            environment = dict(os.environ)
            if each.configuration.gpus == 0:
                environment["JAX_PLATFORMS"] = "cpu"

            def progress(done: int, now: Layout = each.configuration, number: int = number) -> None:
                on_progress(number, now, done)

            each.rounds.append(measure(each.configuration.of(experiment), iterations, environment, progress))
    return found


def measure(
    experiment: Experiment,
    iterations: int,
    environment: dict[str, str],
    progress: Callable[[int], None],
    *,
    cores: Collection[int] | None = None,
    on_row: Callable[[bool], None] = lambda counts: None,
) -> Round:
    """`on_row` hears after each iteration whether it counts: the first ones warm up."""
    began, start, done = time.perf_counter(), 0.0, 0
    rows: list[Row] = []
    end: dict[str, Any] = {}
    with open_child(__name__, {"measure": experiment, "iterations": iterations}, environment, cores) as child:
        for line in child.lines:
            if "row" not in line:
                end = line
                continue
            start = start or time.perf_counter() - began
            if line["counts"]:
                rows.append(line["row"])
            on_row(line["counts"])
            done += 1
            progress(done)
    seconds, steps = (sum(row[name] for row in rows) for name in ("seconds", "steps"))
    sampling = sum(row["time/sample_s"] for row in rows)
    used = [row["rollout/utilisation_mean"] for row in rows if "rollout/utilisation_mean" in row]
    return Round(
        iteration_s=seconds / len(rows),
        steps_per_s=steps / seconds,
        phases={phase: sum(row[f"time/{phase}_s"] for row in rows) / len(rows) for phase in PHASES},
        sampled_per_s=steps / sampling if end["takes_turns"] and sampling else None,
        utilisation=statistics.mean(used) if used else None,
        memory=statistics.mean(end["memory"]) if end["memory"] else None,
        start_s=start,
    )


# In the child


def check_here(experiments: list[Experiment], gpus: int) -> None:
    if gpus:
        import jax

        try:
            found = len(jax.devices("gpu"))
        except RuntimeError:  # JAX's way to say none
            found = 0
        if found < gpus:
            raise InputError(f"--gpus {gpus}: JAX finds {found} GPUs on this machine ({jax.devices()[0].platform})")
    for experiment in experiments:
        trainee = create(experiment, Path())
    try:
        trainee.prepare()  # of the largest
    finally:
        trainee.close()


def create(experiment: Experiment, logs: Path) -> "Trainee":
    from sparring.games import catalog
    from sparring.training import loop

    return loop.create_trainee(experiment, catalog.load(experiment.game), logs)


def measure_here(experiment: Experiment, iterations: int) -> None:
    """Iterations until the first with updates are warm-up: they wait for experience, and compile."""
    with tempfile.TemporaryDirectory() as logs:
        trainee = create(experiment, Path(logs))
        trainee.prepare()
        trainee.open()
        try:
            counted = 0
            while counted < iterations:
                warm, steps, began = trainee.updates > 0, trainee.steps, time.perf_counter()
                row: Row = trainee.iterate()
                row |= {"seconds": time.perf_counter() - began, "steps": trainee.steps - steps}
                say(row=row, counts=warm)
                counted += warm
            say(memory=trainee.memory(), takes_turns=trainee.takes_turns)
        finally:
            trainee.close()


def do(order: dict[str, Any]) -> None:
    if "check" in order:
        check_here([Experiment.parse(each) for each in order["check"]], order["gpus"])
    else:
        measure_here(Experiment.parse(order["measure"]), order["iterations"])


if __name__ == "__main__":
    serve(do)
