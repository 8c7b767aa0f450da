"""A trial in its own process: the training loop of an ordinary run, an iteration at a time, as Ray Tune asks for it."""

import difflib
import logging
import math
import os
import traceback
from pathlib import Path
from typing import Any

import msgspec

import sparring
from sparring.errors import InputError, SparringError
from sparring.experiment import read, write
from sparring.games import catalog
from sparring.launch.ray_cluster import ray  # first: it prepares Ray's authentication
from sparring.runs.run import is_run
from sparring.sweep.home import Home, write_files
from sparring.sweep.plan import Sweep
from sparring.sweep.room import bundles

import pyarrow.fs  # isort: skip
from ray import tune  # isort: skip
from ray.tune.trainable.trainable import _TrainingResult  # isort: skip

__all__ = ["Trial", "TrialTask"]

log = logging.getLogger("sparring.sweep")


class TrialTask(msgspec.Struct, frozen=True):
    """What all trials of a sweep have in common."""

    sweep: dict[str, Any]  # as in its file
    root: str  # the sweep's directory …
    node: str  # … on this node
    gpus: float = 0.0  # of each trial's learner
    version: str = sparring.__version__


class Trial(tune.Trainable):  # type: ignore[misc]  # Ray ships no types
    """`trial_name` says which one it is. Not so the configuration: PBT copies that from another trial."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        task = msgspec.json.decode(config["task"], type=TrialTask)
        experiment = Sweep.parse(task.sweep).experiment(config["trial"]["values"])
        return tune.PlacementGroupFactory(bundles(experiment, task.gpus))

    def setup(self, config: dict[str, Any]) -> None:
        os.environ.setdefault("NPROC", "1")  # the learner's CPU; see xla.use_threads
        self._take(config)
        from sparring.training.devices import use_memory

        use_memory(self.task.gpus)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The process goes on with another trial, or with the same one after PBT changed it."""
        self.cleanup()
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        self.task = msgspec.json.decode(config["task"], type=TrialTask)
        self.values = config["trial"]["values"]
        self.metric = ""
        self.source: str | None = None
        self.loop: Any = None
        self.home: Home | None = None

    def step(self) -> dict[str, Any]:
        try:
            return self._step()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever it is: the other trials go on, and the sweep reports it
            self._give_up()
            cause = str(error) if isinstance(error, SparringError) else traceback.format_exc().strip()
            return {"failed": cause[-1500:], "done": True}

    def _step(self) -> dict[str, Any]:
        opened = self.loop is None
        if opened:
            self._open()
        # One that had come to its end when the sweep was killed has nothing left to do but to say so.
        row = self.loop.directory.rows()[-1] if self.loop.done() else self.loop.step()
        keys = ("iteration", "steps", "time/total_s", self.metric)
        result = {key: row[key] for key in keys if math.isfinite(row.get(key, math.nan))}
        if opened and self.source is not None:
            result["copied"] = self.source
        if self.loop.done():
            result |= {"done": True, "finished": True}  # the scheduler says "done" as well, when it stops one
            self._require_metric()
            self._finish()
        elif self.loop.saved == self.loop.iteration:
            self._home.send()
        return result

    def _open(self) -> None:
        from sparring.training import loop

        task = self.task
        if task.version != sparring.__version__:
            raise InputError(
                f"node {ray.util.get_node_ip_address()} has Sparring {sparring.__version__}, "
                f"the sweep's {task.version}: install the same"
            )
        sweep = Sweep.parse(task.sweep)
        assert sweep.tune.metric is not None
        self.metric = sweep.tune.metric
        path = Path(task.root) / "trials" / self.trial_name  # as `journal.directory`
        self.home = Home(path, task.node)
        work = self.home.work
        experiment = sweep.experiment(self.values)
        if self.source is not None:
            # Its newest checkpoint becomes ours: parameters, optimiser, replay, counters. The values are new.
            name, files = self.home.checkpoint_of(self.source)
            write_files(work / "checkpoints", {f"{name}/{file}": content for file, content in files.items()})
        if self.source is not None or is_run(work):
            # Also our own: whoever was killed between the journal's note of new values and this has the old ones here.
            if is_run(work):  # what the sweep leaves out stays as it was when the trial began
                before = read(work / "experiment.yaml").algorithm
                experiment = msgspec.structs.replace(experiment, algorithm=before | experiment.algorithm)
            resolved = loop.resolve(experiment, catalog.load(experiment.game))
            write(work / "experiment.yaml", msgspec.structs.replace(resolved, out=str(path)))
            self.loop = loop.reopen(work)
        else:
            self.loop = loop.begin(msgspec.structs.replace(experiment, out=str(work)))
            write(work / "experiment.yaml", msgspec.structs.replace(self.loop.experiment, out=str(path)))
        self.loop.open()

    def _require_metric(self) -> None:
        rows = self.loop.directory.rows()
        if not any(self.metric in row for row in rows):
            names = sorted({name for row in rows for name in row})
            near = difflib.get_close_matches(self.metric, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise InputError(f"tune.metric: no row had {self.metric!r}, {hint}")

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Before a pause, and for others to copy. Overridden, as Tune would want a filesystem that all nodes share."""
        if self.loop is not None:
            self.loop.save()
            self._home.send()
        place = tune.Checkpoint(str(Path(self.task.root) / self.trial_name), pyarrow.fs.LocalFileSystem())
        return _TrainingResult(checkpoint=place, metrics=dict(self._last_result or {}))

    def restore(self, checkpoint_path: Any) -> None:
        """Of another trial: to be copied. Our own we find in our directory."""
        name = Path(checkpoint_path.checkpoint.path).name
        self.source = None if name == self.trial_name else name

    def cleanup(self) -> None:
        """Also when the scheduler stopped it."""
        try:
            self._finish()
        except (SparringError, OSError) as error:  # the trial has ended; this must not harm the next one
            log.warning("trial %s: no last checkpoint: %s", self.trial_name, error)

    def _finish(self) -> None:
        loop, self.loop = self.loop, None
        if loop is None:
            return
        try:
            loop.save()
        finally:
            loop.close()
            self._home.send()
            self._home.leave()

    def _give_up(self) -> None:
        loop, self.loop = self.loop, None
        if loop is not None:
            loop.close()
            self._home.send()
            self._home.leave()

    @property
    def _home(self) -> Home:
        assert self.home is not None
        return self.home
