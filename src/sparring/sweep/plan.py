"""What a sweep is to do: an experiment with searched values and `tune`. Everything that can be wrong with it is found
here, before Ray is started."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from sparring.errors import InputError
from sparring.experiment import Experiment, override, parse_yaml
from sparring.fields import PositiveInt, convert
from sparring.runs.metrics import PHASES
from sparring.search_space import Axis, Values, corners, draw, fill, find, points, show

__all__ = ["Sweep", "Tune", "read"]

SAMPLES = 10
SAME = {
    "out": "every trial has a directory of its own in the sweep's",
    "stop": "trials are compared at the same budget",
    "resources": "the sweep runs on one cluster",
    "runner": "the sweep runs on one cluster",
}
EPISODE = [f"episode/{name}" for name in ("return_recent", "return_mean", "return_min", "return_max", "length_mean")]
EVALUATION = [f"evaluation/return_{name}" for name in ("mean", "min", "max", "std")]
SPEED = ["rate/steps_per_s", *(f"time/{name}_s" for name in ("total", "iteration", "evaluate", *PHASES))]
OWN = ("loss/", "q/", "value/", "policy/", "rollout/", "replay/")  # the algorithm's, known when it has learned
FIXED = ("name", "normalise", "replay")  # of an algorithm: a checkpoint does not fit another of these


class Tune(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    samples: PositiveInt | None = None  # trials, for each point of the grid; none: 10, and 1 where all is a grid
    scheduler: Literal["asha", "pbt", "none"] = "asha"  # which trials end early, or take over from better ones
    search: Literal["random", "optuna"] = "random"  # how values are suggested
    parallel: PositiveInt | None = None  # trials at a time; none: as many as there is room for
    metric: str | None = None  # none: the evaluation's mean return, without evaluation that of recent episodes
    mode: Literal["max", "min"] = "max"  # whether more of the metric is better, or less
    grace: PositiveInt | None = None  # of the budget (stop) until asha may stop a trial, or between pbt's copies


def read(path: Path, overrides: Iterable[str] = ()) -> "Sweep":
    try:
        data = parse_yaml(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the sweep {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} is not a sweep: it needs at least `game:` and `algorithm:`")
    try:
        return Sweep.parse(override(data, overrides))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Sweep:
    data: dict[str, Any]  # the experiment, with its searched values
    axes: tuple[Axis, ...]
    tune: Tune  # `samples` and `metric` are resolved

    @classmethod
    def parse(cls, data: dict[str, Any]) -> "Sweep":
        """Checked, but for what only the algorithm knows: see `check`."""
        rest = {key: value for key, value in data.items() if key != "tune"}
        tune = _tune(data.get("tune") or {})
        axes = tuple(find(rest))
        if not axes:
            raise InputError("nothing is searched: give a value as a range, such as lr: {loguniform: [1e-5, 1e-3]}")
        for axis in axes:
            if (why := SAME.get(str(axis.path[0]))) is not None:
                raise InputError(f"{axis.name} cannot be searched: {why}")
        sweep = cls(rest, axes, tune)
        for values in corners(axes):
            sweep.experiment(values)
        sweep = cls(rest, axes, msgspec.structs.replace(tune, samples=sweep._samples(), metric=sweep._metric()))
        sweep._check_scheduler()
        return sweep

    def to_builtins(self) -> dict[str, Any]:
        return {**self.data, "tune": msgspec.to_builtins(self.tune)}

    def experiment(self, values: Values) -> Experiment:
        with self._naming(values):
            return Experiment.parse(fill(self.data, self.axes, values))

    @cached_property
    def labels(self) -> list[str]:
        """The searched values' names without what most of them begin with, unless that makes two the same."""
        names = [axis.name.removeprefix("algorithm.") for axis in self.axes]
        return names if len(set(names)) == len(names) else [axis.name for axis in self.axes]

    def describe(self, values: Values) -> str:
        pairs = zip(self.labels, self.axes, strict=True)
        return ", ".join(f"{label} = {show(values[axis.name])}" for label, axis in pairs)

    @cached_property
    def first(self) -> Experiment:
        """For what is the same in all trials."""
        return self.experiment(next(corners(self.axes)))

    @property
    def total(self) -> int:
        assert self.tune.samples is not None
        return self.tune.samples * len(points(self.axes))

    @property
    def seed(self) -> int:
        """Of the search; the trials have the experiment's."""
        seed = self.data.get("seed", 0)
        return seed if isinstance(seed, int) else 0

    def draw(self, number: int) -> Values:
        return draw(self.axes, self.seed, number)

    @property
    def budget(self) -> tuple[str, float] | None:
        """What trials are compared at: the name in their rows, and how much of it one may have."""
        stop = self.first.stop
        pairs = (("steps", stop.steps), ("iteration", stop.iterations), ("time/total_s", stop.seconds))
        return next(((name, amount) for name, amount in pairs if amount is not None), None)

    def grace(self, part: int) -> float:
        assert self.budget is not None
        return self.tune.grace or max(self.budget[1] / part, 1.0)

    def _samples(self) -> int:
        gridded = all(axis.kind == "grid" for axis in self.axes)
        samples = self.tune.samples or (1 if gridded else SAMPLES)
        if gridded and samples > 1:
            raise InputError(
                f"tune.samples is {samples}, but all searched values are grids: every trial would be made {samples} "
                "times. To repeat them, search the seed: seed: {grid: [1, 2, 3]}"
            )
        return samples

    def _metric(self) -> str:
        name, evaluated = self.tune.metric, self.first.evaluation.every > 0
        known = SPEED + (EVALUATION if evaluated else []) + (EPISODE if self.first.source == "simulate" else [])
        if name is None:
            name = next((good for good in (EVALUATION[0], EPISODE[0]) if good in known), None)
            if name is None:
                raise InputError("learning from a store plays nothing to compare trials by: set evaluation.every")
        elif name in EVALUATION and not evaluated:
            raise InputError(f"tune.metric is {name}, but nothing is evaluated: set evaluation.every")
        elif name not in known and not name.startswith(OWN):
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)} and the algorithm's own"
            raise InputError(f"tune.metric: no row has {name!r}, {hint}")
        return name

    def _check_scheduler(self) -> None:
        tune, grids = self.tune, [axis.name for axis in self.axes if axis.kind == "grid"]
        if msgspec.to_builtins(self.first.stop) == dict.fromkeys(msgspec.to_builtins(self.first.stop)):
            raise InputError("trials would never end: say when with stop, such as stop: {steps: 100_000}")
        if tune.search == "optuna" and tune.scheduler == "pbt":
            raise InputError("tune.search: pbt changes values by itself, so optuna has nothing to do: use random")
        for what in ("optuna",) * (tune.search == "optuna") + ("pbt",) * (tune.scheduler == "pbt"):
            if grids:
                raise InputError(f"{grids[0]}: {what} does not go through a grid: write choice")
        if tune.scheduler == "none":
            return
        if self.budget is None:
            raise InputError(
                f"tune.scheduler is {tune.scheduler}, which compares trials at equal parts of their budget: give one "
                "with stop.steps, stop.iterations or stop.seconds (or tune.scheduler: none)"
            )
        if tune.grace is not None and tune.grace >= self.budget[1]:
            raise InputError(f"tune.grace is {tune.grace}, but trials end at {self.budget[1]:g} (stop): lower it")
        if tune.scheduler == "pbt":
            self._check_population()

    def _check_population(self) -> None:
        if self.total < 2:
            raise InputError("tune.samples: pbt copies the better trials of a population, so it needs 2 at least")
        if self.tune.parallel is not None:
            raise InputError("tune.parallel: pbt lets all trials take turns, as many at a time as there is room for")
        for axis in self.axes:
            if axis.path[0] != "algorithm" or axis.path[1] in FIXED:
                raise InputError(_pbt(axis, "which a trial that has begun cannot change"))

    def check(self) -> None:
        """What only the algorithm knows: names and ranges of hyperparameters, and which combinations it refuses. Loads
        the learning stack."""
        from sparring.games import catalog
        from sparring.training.choose import trainee_class

        for values in corners(self.axes):
            experiment = self.experiment(values)
            with self._naming(values):
                trainee_class(experiment).hyperparameters(experiment)
        for number in range(self.total) if self.tune.search == "random" else ():
            experiment = self.experiment(values := self.draw(number))
            with self._naming(values):
                trainee_class(experiment).check(experiment, catalog.load(experiment.game))
        if self.tune.scheduler == "pbt":
            self._check_shapes()

    def _check_shapes(self) -> None:
        """PBT copies one trial's state into another, which must be of the same form."""
        from sparring.games import catalog
        from sparring.training.choose import trainee_class

        def shapes(values: Values) -> dict[str, tuple[int, ...]]:
            experiment = self.experiment(values)
            with self._naming(values):
                return trainee_class(experiment).state_shapes(experiment, catalog.load(experiment.game))

        first, *others = corners(self.axes)
        expected = shapes(first)
        for values in others:
            if shapes(values) != expected:
                axis = next(axis for axis in self.axes if values[axis.name] != first[axis.name])
                raise InputError(_pbt(axis, "which changes the network, so that nothing can be copied"))

    @contextmanager
    def _naming(self, values: Values) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            raise InputError(f"{error} (with {self.describe(values)})") from error


def _tune(data: Any) -> Tune:
    if not isinstance(data, dict):
        raise InputError(f"tune is {data!r}, but a group of keys: {', '.join(Tune.__struct_fields__)}")
    return convert(data, Tune, "tune.")


def _pbt(axis: Axis, why: str) -> str:
    return (
        f"{axis.name}: pbt copies one trial's learner into another and goes on with other values, {why}. "
        "Search what leaves it as it is (lr, gamma, clip, entropy_coefficient, …), or use tune.scheduler: asha"
    )
