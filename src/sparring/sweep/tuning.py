"""Runs a sweep's trials with Ray Tune: its schedulers and searches decide, our journal remembers. Nothing that Tune
writes is kept or read again: a resumed sweep is reported to Tune from the journal and the trials' rows."""

import functools
import logging
import math
import operator
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import numpy as np

from sparring.launch.ray_cluster import cause, connect, ray
from sparring.runs.run import Run, is_run
from sparring.search_space import Axis, Values
from sparring.sweep.journal import ENDED, Begun, Copied, Journal, TrialStatus, directory, trial_name
from sparring.sweep.plan import Sweep
from sparring.sweep.room import Node, learner_gpus, require_room
from sparring.sweep.trial import Trial, TrialTask
from sparring.training.stopping import asked_to_stop

# Tune reads these when it starts.
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # a run writes its metrics itself
os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # not every row has an evaluation
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # we stop it as we stop a run
os.environ["TUNE_WARN_THRESHOLD_S"] = "30"
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the new one speaks even when asked to be silent

from optuna import distributions
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

__all__ = ["OnTrials", "gpus_of", "prepare", "run"]

log = logging.getLogger("sparring.sweep")
REDUCTION = 3  # ASHA: of three trials at a rung, one goes on
RETRIES = 2  # of a trial whose process or node is lost; what it raises itself would happen again
ENDING = 60.0  # seconds that running trials get to end their iteration when the sweep is interrupted


class OnTrials(Protocol):
    """Hears how the trials stand, again and again."""

    def __call__(self, trials: Iterable[TrialStatus]) -> None: ...


def prepare(sweep: Sweep) -> None:
    """Connects to the cluster, or starts a Ray of our own; says at once when a trial can never fit."""
    connect(sweep.first.resources)
    require_room(sweep, nodes())


def nodes() -> list[Node]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def gpus_of(sweep: Sweep) -> tuple[float, float]:
    """Each trial's learner has so many, of so many in the cluster."""
    return learner_gpus(sweep, nodes()), sum(node.get("GPU", 0.0) for node in nodes())


def run(sweep: Sweep, root: Path, journal: Journal, watcher: OnTrials) -> bool:
    """Until every trial has ended. False: it was asked to stop before."""
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what a person needs of it, we say
    random.seed(sweep.seed)  # PBT draws from it
    task = TrialTask(located(sweep), str(root.resolve()), ray.get_runtime_context().get_node_id(), gpus_of(sweep)[0])
    task_json = msgspec.json.encode(task).decode()
    scheduler = create_scheduler(sweep)
    with asked_to_stop() as asked, tempfile.TemporaryDirectory(prefix="sparring-sweep-") as scratch:
        watch = _Watch(sweep, root, journal, scheduler, watcher, asked)
        space: dict[str, Any] = {}
        search = None
        if sweep.tune.search == "optuna":
            search = _Suggest(sweep, journal, task_json)
            count = search.count
        else:
            count = 1
            space = {"task": task_json, "trial": tune.grid_search(_waiting(sweep, root, journal))}
        tune.Tuner(
            Trial,
            param_space=space,
            tune_config=tune.TuneConfig(
                num_samples=count,
                scheduler=scheduler,
                search_alg=search,
                max_concurrent_trials=sweep.tune.parallel,
                reuse_actors=True,  # a process takes seconds to start, and another one to compile
                trial_name_creator=lambda trial: trial_name(trial.config["trial"]["number"]),
                trial_dirname_creator=lambda trial: trial_name(trial.config["trial"]["number"]),
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=scratch,
                stop=_Stop(watch),
                callbacks=[watch],
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                verbose=0,
            ),
        ).fit()
    for trial in journal.left():
        if trial.state == "running":  # it began while the others ended
            trial.state = "unfinished"
    return not journal.left() and len(journal.trials) >= sweep.total  # a search makes them up as it goes


def _waiting(sweep: Sweep, root: Path, journal: Journal) -> list[dict[str, Any]]:
    """The trials that are not made yet, all of them known before the first begins."""
    known = len(journal.trials)
    journal.add(*(Begun(number, sweep.draw(number)) for number in range(known, sweep.total)))
    found = []
    for trial in journal.left():
        path = directory(root, trial.number)
        if is_run(path):  # its values are those in its directory, where PBT changed them
            trial.values = values_in(sweep, Run(path).experiment.to_builtins())
        found.append({"number": trial.number, "values": trial.values})
    return found


def values_in(sweep: Sweep, data: Any) -> Values:
    return {axis.name: functools.reduce(operator.getitem, axis.path, data) for axis in sweep.axes}


def located(sweep: Sweep) -> dict[str, Any]:
    """The sweep with the paths in it made absolute: a trial's process is elsewhere."""
    data = sweep.to_builtins()
    for key in ("game", "store"):
        if isinstance(data.get(key), str) and Path(data[key]).exists():
            data[key] = str(Path(data[key]).resolve())
    return data


def create_scheduler(sweep: Sweep) -> Any:
    if sweep.tune.scheduler == "none":
        return FIFOScheduler()
    assert sweep.budget is not None
    attribute, budget = sweep.budget
    common = {"time_attr": attribute, "metric": sweep.tune.metric, "mode": sweep.tune.mode}
    if sweep.tune.scheduler == "asha":
        return ASHAScheduler(
            **common,
            max_t=budget,
            grace_period=sweep.grace(REDUCTION**2),
            reduction_factor=REDUCTION,
            stop_last_trials=False,  # they end by themselves
        )
    rng = np.random.default_rng(sweep.seed)
    axes = {axis.name: axis for axis in sweep.axes}

    def explore(config: dict[str, Any]) -> dict[str, Any]:
        """Tune multiplies by 0.8 or 1.2, whatever the range."""
        values = config["trial"]["values"]
        config["trial"]["values"] = {name: axes[name].tidy(value) for name, value in values.items()}
        return config

    draws = {
        name: list(axis.values) if axis.listed else functools.partial(axis.draw, rng) for name, axis in axes.items()
    }
    return PopulationBasedTraining(
        **common,
        perturbation_interval=sweep.grace(10),
        hyperparam_mutations={"trial": {"values": draws}},
        custom_explore_fn=explore,
        log_config=False,
        require_attrs=False,
    )


class _Unkept:
    """Tune keeps pickles of what it is given. Nobody reads these: the journal has it all."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Suggest(_Unkept, Searcher):  # type: ignore[misc]  # Ray ships no types
    """Optuna's suggestions; first the trials that an interrupted sweep left. It gets the results of ended trials."""

    def __init__(self, sweep: Sweep, journal: Journal, task: str) -> None:
        super().__init__(metric=sweep.tune.metric, mode=sweep.tune.mode)
        self.sweep, self.journal, self.task = sweep, journal, task
        self.inner = OptunaSearch(
            {axis.name: _distribution(axis) for axis in sweep.axes},
            metric=sweep.tune.metric,
            mode=sweep.tune.mode,
            seed=sweep.seed + len(journal.trials),  # resumed: not the same draws again
        )
        for trial in journal.trials.values():
            if trial.state in ENDED and trial.metric is not None:
                self.inner.add_evaluated_point(self._encode(trial.values), trial.metric)
        self.left = list(journal.left())
        self.count = len(self.left) + sweep.total - len(journal.trials)
        self.suggested: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any]:
        if self.left:
            trial = self.left.pop(0)
            return self._config(trial.number, trial.values)
        self.suggested.add(trial_id)
        suggestion = self.inner.suggest(trial_id)
        values = {axis.name: self._decode(axis, suggestion[axis.name]) for axis in self.sweep.axes}
        number = len(self.journal.trials)
        self.journal.add(Begun(number, values))
        return self._config(number, values)

    def _config(self, number: int, values: Values) -> dict[str, Any]:
        return {"task": self.task, "trial": {"number": number, "values": values}}

    def _encode(self, values: Values) -> Values:
        """Options are anything, layers too; Optuna knows them by their place."""
        return {a.name: a.values.index(values[a.name]) if a.listed else values[a.name] for a in self.sweep.axes}

    def _decode(self, axis: Axis, value: Any) -> Any:
        return axis.values[value] if axis.listed else axis.tidy(value)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id in self.suggested:
            failed = error or "failed" in (result or {})
            self.inner.on_trial_complete(trial_id, None if failed else result, failed)

    def save(self, checkpoint_path: str) -> None:
        """Tune's copy of our state, which nobody reads: the journal has it."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError


def _distribution(axis: Axis) -> Any:
    if axis.listed:
        return distributions.CategoricalDistribution(range(len(axis.values)))
    low, high = axis.values
    if axis.kind == "randint":
        return distributions.IntDistribution(low, high)
    return distributions.FloatDistribution(low, high, log=axis.log)


class _Watch(_Unkept, tune.Callback):  # type: ignore[misc]  # Ray ships no types
    """What Tune does, into the journal."""

    def __init__(
        self, sweep: Sweep, root: Path, journal: Journal, scheduler: Any, watcher: OnTrials, asked: threading.Event
    ) -> None:
        self.root, self.journal, self.scheduler, self.watcher, self.asked = root, journal, scheduler, watcher, asked
        assert sweep.tune.metric is not None
        self.metric = sweep.tune.metric
        self.finished: set[int] = set()  # by their own word
        for trial in journal.trials.values():
            if trial.state in ENDED:
                self._remind(SimpleNamespace(trial_id=f"ended-{trial.number}"), trial.number)

    def _remind(self, trial: Any, number: int) -> None:
        """Tells ASHA the rows that a trial had before the sweep was resumed."""
        path = directory(self.root, number)
        if not isinstance(self.scheduler, ASHAScheduler) or not is_run(path):
            return
        if isinstance(trial, SimpleNamespace):
            self.scheduler.on_trial_add(None, trial)
        for row in Run(path).rows():
            self.scheduler.on_trial_result(None, trial, row)

    def _status_of(self, trial: Any) -> TrialStatus:
        return self.journal.trials[int(str(trial))]

    def running(self) -> set[int]:
        return {trial.number for trial in self.journal.trials.values() if trial.state == "running"}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._remind(trial, self._status_of(trial).number)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        status = self._status_of(trial)
        if "failed" in result:
            self.journal.add(status.ended("failed", result["failed"]))
            return
        if "copied" in result:
            values = trial.config["trial"]["values"]
            self.journal.add(Copied(status.number, int(result["copied"]), int(result["iteration"]), values))
        status.note(result, self.metric)
        if "finished" in result:
            self.finished.add(status.number)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        status = self._status_of(trial)
        if status.state in ENDED:
            return
        if status.number in self.finished:
            self.journal.add(status.ended("done"))
        elif self.asked.is_set():
            status.state = "unfinished"
        else:
            self.journal.add(status.ended("stopped"))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        log.warning("the process of trial %s is lost: it goes on from its last checkpoint", trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        status = self._status_of(trial)
        self.journal.add(status.ended("failed", cause(trial.get_error())))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial in trials:
            if (status := self._status_of(trial)).state not in ENDED and not trial.is_finished():
                status.state = "running" if trial.status == "RUNNING" else "waiting"
        self.watcher(self.journal.trials.values())


class _Stop(_Unkept, tune.Stopper):  # type: ignore[misc]  # Ray ships no types
    """Ends all trials when the sweep is interrupted: each after its iteration, with a checkpoint. Tune itself would
    give them five seconds."""

    def __init__(self, watch: _Watch) -> None:
        self.watch, self.ending, self.until = watch, set[int](), math.inf

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self.watch.asked.is_set()

    def stop_all(self) -> bool:
        if not self.watch.asked.is_set():
            return False
        if self.until == math.inf:
            self.ending, self.until = self.watch.running(), time.monotonic() + ENDING
        self.ending &= self.watch.running()
        return not self.ending or time.monotonic() > self.until
