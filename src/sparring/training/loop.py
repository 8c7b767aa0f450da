"""The training loop: iterations of playing and learning until something says stop, with evaluation, checkpoints and
metrics on the way. `train` begins a run, `resume` continues one."""

import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.callbacks import Callback, CallbackError, Progress, Registered
from sparring.errors import GameError, InputError, SparringError, Unrenderable
from sparring.experiment import CHANGEABLE, Experiment, changed_key, override, read, unchangeable, write
from sparring.export import onnx, weights
from sparring.files import write_whole
from sparring.games import Game, catalog
from sparring.games.spec import Array
from sparring.metering.sampler import Sampler
from sparring.networks.policy import Policy
from sparring.runs import checkpoint, sinks, video
from sparring.runs.live_view import Silent, View
from sparring.runs.metrics import Row
from sparring.runs.run import BEST, NO_POLICY, Best, Run, find_run, is_run, new_directory
from sparring.training.choose import trainee_class
from sparring.training.devices import use_affinity
from sparring.training.evaluate import LONGEST, play, summary
from sparring.training.protocol import Trainee, require_row
from sparring.training.stopping import asked_to_stop

__all__ = ["INTERRUPTED", "Interrupted", "Loop", "begin", "reopen", "restore", "resume", "train"]

log = logging.getLogger("sparring.training")
INTERRUPTED = 75  # exit code after SIGTERM or Ctrl-C: a checkpoint was written, --resume goes on (EX_TEMPFAIL)
ESTIMATE_AFTER = 10.0  # seconds of training before energy is estimated: getting ready for it takes some
ENDLESS = 4.0  # see `Loop._endless`
SHORTEST = 100  # steps that an evaluation's episode has in any case
RECENT = 20  # episodes that must have ended before their mean return can stop a run without evaluation


class Interrupted(SparringError):
    """The run was asked to end early. Its checkpoint is written."""


def train(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    view: View | None = None,
    callbacks: Iterable[Callback] = (),
) -> Run:
    """Trains a new run, until one of its stop conditions holds.

    :param experiment: What to train: an Experiment, the same as plain data, or the path of an experiment's file.
    :param view: What shows it while it runs. None: nothing; the run's directory has it all.
    :param callbacks: Code of one's own between iterations, in addition to the experiment's.
    :returns: The run, with its metrics, checkpoints and policies.
    :raises InputError: the experiment is wrong; nothing was written.
    :raises Interrupted: SIGTERM or Ctrl-C; a checkpoint is written, `resume` goes on.
    :raises CallbackError: a callback failed; a checkpoint is written.
    """
    if isinstance(experiment, str | Path):
        experiment = read(Path(experiment))
    elif not isinstance(experiment, Experiment):
        experiment = Experiment.parse(dict(experiment))
    return begin(experiment, view, callbacks).run()


def resume(
    run: Run | str | Path,
    changes: Iterable[str] = (),
    view: View | None = None,
    callbacks: Iterable[Callback] = (),
) -> Run:
    """Trains a run on from its newest checkpoint; without one, from the beginning.

    :param run: The run, or its directory.
    :param changes: Changes of its experiment, written as for `--set`, such as `stop.steps=100_000`.
    :param view: As for `train`.
    :param callbacks: As for `train`: they are not saved with the run, the experiment's are.
    :returns: The run.
    :raises InputError: there is no run, it is being trained, or a change is not possible now.
    :raises Interrupted: As for `train`.
    :raises CallbackError: As for `train`.
    """
    path = run.path if isinstance(run, Run) else Path(run)
    return reopen(path, changes, view, same=True, callbacks=callbacks).run()


def restore(target: str, out: Path | None = None, changes: Iterable[str] = (), view: View | None = None) -> Run:
    """Trains a new run that begins with another run's checkpoint, and its rows until there.

    :param target: `RUN`, whose newest checkpoint it is, or `RUN@ITERATION`.
    :param out: The new directory; None: the next free one under runs/.
    :param changes: As for `resume`.
    :param view: As for `train`.
    :returns: The new run.
    :raises InputError: there is no such run or checkpoint, or a change is not possible; nothing was written.
    """
    path = _copy(target, out)
    try:
        loop = reopen(path, changes, view, same=True)
    except BaseException:
        shutil.rmtree(path)
        raise
    return loop.run()


def _copy(target: str, out: Path | None) -> Path:
    if (found := find_run(target)) is None:
        raise InputError(f"{target} is not a run directory: it has no experiment.yaml")
    run, which = found
    saved = {str(int(path.name)): path for path in run.checkpoints()}
    if not saved or (which not in (None, "last") and which not in saved):
        kept = ", ".join(saved) or "none"
        raise InputError(f"{target}: a training goes on from a checkpoint, and the run keeps these iterations: {kept}")
    chosen = list(saved.values())[-1] if which in (None, "last") else saved[str(which)]
    saved_state = checkpoint.load(chosen)  # it may be damaged
    experiment = msgspec.structs.replace(run.experiment, out=None if out is None else str(out))
    path = new_directory(experiment, catalog.load(experiment.game).name)
    checkpoint.save(path / "checkpoints" / chosen.name, *saved_state)
    rows = [row for row in run.rows() if row["iteration"] <= int(chosen.name)]
    write_whole(path / "metrics.jsonl", b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    write(path / "experiment.yaml", msgspec.structs.replace(experiment, out=str(path)))  # last: now it is a run
    return path


def begin(experiment: Experiment, view: View | None = None, callbacks: Iterable[Callback] = ()) -> "Loop":
    """A new run that has not played yet."""
    experiment = Experiment.parse(experiment.to_builtins())  # Python checks no types
    game = catalog.load(experiment.game)
    if experiment.source == "simulate" and (experiment.rollout.workers or experiment.runner == "ray"):
        catalog.require_elsewhere(game)  # before there is a directory, and not by each worker
    asked, experiment = experiment.out, resolve(experiment, game)
    path = new_directory(experiment, game.name)
    experiment = msgspec.structs.replace(experiment, out=str(path))
    try:
        registered = Registered(callbacks, experiment, path)
        for name in experiment.metrics:
            sinks.find(name)
        sampler = create_sampler(experiment)
        trainee = create_trainee(experiment, game, path / "workers")
        trainee.prepare()  # before anything is written: it may refuse
    except BaseException:
        if asked is None:
            path.rmdir()
        raise
    path.mkdir(parents=True, exist_ok=True)
    try:
        (path / "experiment.yaml").touch(exist_ok=False)
    except FileExistsError as error:
        raise InputError(f"another training began in {path} meanwhile: choose another directory (out)") from error
    write(path / "experiment.yaml", experiment)
    return Loop(Run(path), experiment, trainee, view or Silent(), registered, sampler)


def reopen(
    path: Path,
    changes: Iterable[str] = (),
    view: View | None = None,
    same: bool = False,
    callbacks: Iterable[Callback] = (),
) -> "Loop":
    """A run as its newest checkpoint left it; `same`: only if its experiment is still what it was."""
    if not is_run(path):
        raise InputError(f"{path} has no run to resume: there is no experiment.yaml")
    changes = list(changes)
    for change in changes:
        if change.partition("=")[0].split(".")[0].strip() not in CHANGEABLE:
            raise InputError(f"--set {change}: a run that has begun can only change {', '.join(CHANGEABLE)}")
    run = Run(path)
    experiment = read(path / "experiment.yaml")
    if changes:
        experiment = Experiment.parse(override(experiment.to_builtins(), changes))
    game = catalog.load(experiment.game)
    registered = Registered(callbacks, experiment, path)
    sampler = create_sampler(experiment)
    trainee = create_trainee(experiment, game, path / "workers")
    loop = Loop(run, experiment, trainee, view or Silent(), registered, sampler)
    try:
        if saved := run.checkpoints():
            loop.restore(saved[-1], same)
        else:
            trainee.prepare()
        if changes:
            write(path / "experiment.yaml", experiment)
    except BaseException:
        loop.close()
        raise
    return loop


def resolve(experiment: Experiment, game: Game) -> Experiment:
    """With all hyperparameters, those it leaves out too: they follow from the game."""
    algorithm = {"name": experiment.name, **trainee_class(experiment).hyperparameters(experiment, game)}
    return msgspec.structs.replace(experiment, algorithm=algorithm)


def create_trainee(experiment: Experiment, game: Game, logs: Path) -> Trainee:
    if game.env is None and experiment.source == "simulate":
        raise InputError(
            f"{game.name} is a declared game, which cannot be simulated. Learn it from recorded play: "
            "`source: store`, `store:` the data directory of `sparring up` (--set source=store --set store=DIRECTORY)"
        )
    if game.env is None and experiment.evaluation.every:
        raise InputError(
            f"{game.name} is a declared game, which cannot be simulated, so not evaluated: set evaluation.every to 0"
        )
    if experiment.checkpoint.video:
        video.require(game)
    if experiment.resources.actor_gpus and experiment.runner == "local":
        raise InputError(
            "resources.actor_gpus is for `runner: ray`: workers on this machine play with NumPy, on its CPUs"
        )
    use_affinity(experiment.resources.affinity)  # before there are threads and workers
    return trainee_class(experiment)(experiment, game, logs)


def create_sampler(experiment: Experiment) -> Sampler | None:
    m = experiment.metering
    return Sampler(m.every, m.meter, m.estimate, estimate_after=ESTIMATE_AFTER) if m.every else None


class Loop:
    """One process's part of a run: from where it stands to where it stops. `run` does it all; whoever wants to decide
    between iterations calls `open`, `step`, `save` and `close`. From here to `close` the run's directory is ours."""

    def __init__(
        self,
        run: Run,
        experiment: Experiment,
        trainee: Trainee,
        view: View,
        callbacks: Registered,
        sampler: Sampler | None = None,
    ) -> None:
        self.sampler = sampler
        self.held = ExitStack()
        self.held.enter_context(run.alone())
        self.callbacks, self.row = callbacks, Row()  # the row is the newest
        self.directory, self.experiment, self.trainee, self.view = run, experiment, trainee, view
        self.iteration, self.before = 0, 0.0  # iterations and seconds of this run so far, across resumes
        self.evaluation: float | None = None
        self.best: Best | None = None
        self.warned = False  # that evaluations are cut
        self.opened = False  # there is something to save
        self.states: list[Any] | None = None
        self.saved = self.exported = -1  # iterations of the newest checkpoint and of the policy's files

    def restore(self, path: Path, same: bool = False) -> None:
        try:
            arrays, meta = checkpoint.load(path)
        except InputError as error:
            older = [str(each) for each in self.directory.checkpoints() if each < path]
            raise InputError(f"{error}" + (f". To resume from {older[-1]}, remove it" if older else "")) from error
        if same and (changed := changed_key(meta.get("experiment", {}), unchangeable(self.experiment))) is not None:
            raise InputError(
                f"{self.directory.path / 'experiment.yaml'} was changed: {changed}. "
                f"A run that has begun can only change {', '.join(CHANGEABLE)}"
            )
        game, found = self.trainee.game, (meta.get("algorithm"), meta.get("schema"))
        if found != (self.experiment.name, game.schema):
            raise InputError(
                f"{path} belongs to {found[0]} on a game of schema {found[1]}, "
                f"this is {self.experiment.name} on {game.name} of schema {game.schema}"
            )
        self.states = self.trainee.resume(arrays, meta["trainee"])
        self.iteration, self.before, self.evaluation = meta["iteration"], meta["seconds"], meta["evaluation"]
        self.saved = self.iteration
        self._restore_best()

    def _restore_best(self) -> None:
        try:
            self.best = self.directory.best()
            if self.best is not None:  # whoever was killed between its two files gets the second
                self._write("policy-best.onnx", onnx.render(self.directory.policy("best")))
        except InputError as error:
            self.best = None
            log.warning("the best policy is lost, the next evaluation's takes its place: %s", error)

    def run(self) -> Run:
        try:
            with asked_to_stop() as asked:
                self.open()
                if reached := self.reached():
                    words = " and ".join(reached), " ".join(f"--set {each.partition(' ')[0]}=…" for each in reached)
                    log.warning("%s is at its stop condition %s: raise it with %s", self.directory.path, *words)
                while not self.done() and not asked.is_set():
                    self.step()
                self.save()
        except (CallbackError, sinks.SinkError):
            if self.opened:
                self.save()
            raise
        finally:
            self.close()
        if asked.is_set() and not self.done():
            again = f"continue with --resume: sparring train {self.directory.path} --resume"
            raise Interrupted(f"interrupted after {self.iteration} iterations: {again}")
        return self.directory

    def open(self) -> None:
        self.since = time.monotonic()
        opened = sinks.Sinks(self.directory.path, self.experiment, self.iteration)
        self.sinks = self.held.enter_context(closing(opened))
        self.held.enter_context(self.view.show(self.experiment, self.directory))
        if (network := self.trainee.network()) is not None:
            self.view.say(f"network for {network}")
        if self.sampler is not None:
            self.held.enter_context(self.sampler)
        self.held.callback(self.trainee.close)
        with self.game_log():
            self.trainee.open(self.states)
        self.opened = True
        self.held.callback(self.callbacks.end, self.progress)  # before the rest is closed
        self.callbacks.start(self.progress())

    def progress(self) -> Progress:
        run, trainee, newest = self.directory, self.trainee, self.directory.checkpoints()[-1:]
        return Progress(
            run=run,
            experiment=self.experiment,
            iteration=self.iteration,
            steps=trainee.steps,
            updates=trainee.updates,
            seconds=self.seconds,
            row=self.row,
            checkpoint=newest[0] if newest else None,
        )

    @contextmanager
    def game_log(self) -> Iterator[None]:
        """The traceback of a game that fails goes into the run's log, and its error says so."""
        try:
            yield
        except GameError as error:
            path = self.directory.path / "game.log"
            with path.open("a") as file:
                file.write(f"{error}\n{error.details}\n")
            error.args = (f"{error}. Its traceback is in {path}",)
            raise

    def step(self) -> Row:
        """An iteration: its row is written and shown, and a checkpoint where one is due."""
        with self.game_log():
            row = self.row = self.iterate()
        self.sinks.write(row)
        self.view.row(row)
        if "time/evaluate_s" in row:
            self.callbacks.call("on_evaluation", self.progress())
        self.callbacks.call("on_iteration", self.progress())
        if self.due(self.experiment.checkpoint.every):
            self.save()
        return row

    def close(self) -> None:
        self.held.close()

    def iterate(self) -> Row:
        began = time.perf_counter()
        steps = self.trainee.steps
        row = require_row(self.experiment.name, self.trainee.iterate())
        took = time.perf_counter() - began
        self.iteration += 1
        head: Row = {"iteration": self.iteration, "time/total_s": self.seconds, "time/iteration_s": took}
        row = head | row | {"rate/steps_per_s": (self.trainee.steps - steps) / took}
        if self.due(self.experiment.evaluation.every):
            began = time.perf_counter()
            row |= self._evaluate()
            row["time/evaluate_s"] = time.perf_counter() - began
        return row if self.sampler is None else row | self.sampler.take()

    def _evaluate(self) -> Row:
        evaluation, policy = self.experiment.evaluation, self.trainee.policy()
        longest, endless = evaluation.limit or LONGEST, evaluation.limit or self._endless()
        seed, warn = self.experiment.seed, not self.warned
        row = summary(play(policy, evaluation.episodes, seed, longest=longest, endless=endless, warn=warn))
        self.warned = self.warned or row["evaluation/cut"] > 0
        self.evaluation = row["evaluation/return_mean"]
        if self.experiment.checkpoint.best:
            cut = row["evaluation/cut"] > 0 and evaluation.limit is None  # at another length each time
            self._keep_best(policy, Best(self.iteration, self.evaluation, cut))
        if self.best is not None:
            row |= {"evaluation/return_best": self.best.ret, "evaluation/iteration_best": self.best.iteration}
        return row

    def _endless(self) -> int:
        """Steps of an evaluation's episode in a game without a time limit: its share of what was played since the last
        evaluation. More where episodes of training take long, but no more than a few times that."""
        evaluation, usual = self.experiment.evaluation, 0.0
        played = self.trainee.steps / self.iteration
        if self.experiment.source == "store":  # nobody plays: an update stands for a step
            played = self.experiment.iteration
        share = played * evaluation.every / evaluation.episodes
        if lengths := [length for _, length in self.trainee.episodes.recent]:
            usual = ENDLESS * sum(lengths) / len(lengths)
        return round(max(SHORTEST, min(max(share, usual), ENDLESS * share)))

    def _keep_best(self, policy: Policy, new: Best) -> None:
        if not new.beats(self.best) or not math.isfinite(new.ret) or policy.problem() is not None:
            return
        meta = {"algorithm": self.experiment.name, "iteration": new.iteration, "evaluation": new.ret, "cut": new.cut}
        checkpoint.save(self.directory.path / BEST, {"policy": policy_array(policy)}, meta)
        self._write("policy-best.onnx", onnx.render(policy))
        self.best = new

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.since

    def due(self, every: int) -> bool:
        return every > 0 and self.iteration % every == 0

    def done(self) -> bool:
        return self.callbacks.stopping or bool(self.reached())

    def reached(self) -> list[str]:
        """The stop conditions that hold, in words."""
        stop, trainee = self.experiment.stop, self.trainee
        mean = self.evaluation
        if not self.experiment.evaluation.every:
            recent = [ret for ret, _ in trainee.episodes.recent]
            mean = sum(recent) / len(recent) if len(recent) >= RECENT else None
        limits: dict[str, tuple[float | None, float | None]] = {
            "steps": (trainee.steps, stop.steps),
            "iterations": (self.iteration, stop.iterations),
            "seconds": (self.seconds, stop.seconds),
            "return": (mean, stop.return_),
        }
        both = ((name, is_, to) for name, (is_, to) in limits.items() if is_ is not None and to is not None)
        return [f"stop.{name} ({to:,})" for name, is_, to in both if is_ >= to]

    def save(self) -> None:
        """A checkpoint, and the policy to play with as it is now. Whoever was killed in between and resumes has the
        first already, and gets the second."""
        if self.exported == self.iteration:
            return
        policy = self._policy()
        if self.saved != self.iteration:
            self._checkpoint(policy)
        if policy is not None:
            self._export(policy)
        self.exported = self.iteration
        self.callbacks.call("on_checkpoint", self.progress())

    def _policy(self) -> Policy | None:
        """None where it cannot be exported. One that diverged is refused, before it takes a sound one's place."""
        try:
            policy = self.trainee.policy()
        except Unrenderable as error:
            log.warning("this run has no policy.onnx: %s", error)
            (self.directory.path / NO_POLICY).write_text(f"{error}\n")
            return None
        if (why := policy.problem()) is not None:
            sound = self.directory.checkpoints()
            before = "the newest checkpoint is from before" if sound else "there is no checkpoint yet"
            raise SparringError(f"learning diverged: {why}; {before}. Lower algorithm.lr")
        return policy

    def _checkpoint(self, policy: Policy | None) -> None:
        arrays, inner = self.trainee.save()
        if policy is not None:
            arrays["policy"] = policy_array(policy)
        meta = {
            "algorithm": self.experiment.name,
            "schema": self.trainee.game.schema,
            "experiment": unchangeable(self.experiment),
            "iteration": self.iteration,
            "seconds": self.seconds,
            "evaluation": self.evaluation,
            "trainee": inner,
        }
        checkpoint.save(self.directory.path / "checkpoints" / f"{self.iteration:08d}", arrays, meta)
        self.directory.prune(self.experiment.checkpoint.keep)
        self.saved = self.iteration

    def _export(self, policy: Policy) -> None:
        self._write("policy.onnx", onnx.render(policy))
        self._write("policy.safetensors", weights.save(policy))
        if self.experiment.checkpoint.video:
            video.record(policy, self.directory.video(self.iteration), seed=self.experiment.seed)

    def _write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        write_whole(self.directory.path / name, data)


def policy_array(policy: Policy) -> Array:
    """A policy's file as an array, so that a checkpoint's hash covers it."""
    return np.frombuffer(weights.save(policy), np.uint8)
