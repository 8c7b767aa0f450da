"""Callbacks: code of one's own at certain moments of a training. `train(…, callbacks=[…])` takes them, and so does an
experiment's file as `callbacks: [my_module:MyCallback]`. Light: no learning stack is loaded here."""

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring import plugins
from sparring.errors import InputError, SparringError

if TYPE_CHECKING:
    from sparring.experiment import Experiment
    from sparring.runs.metrics import Row
    from sparring.runs.run import Run

__all__ = ["Callback", "CallbackError", "Progress", "Registered", "find"]

log = logging.getLogger("sparring.training")
LOG = "callback.log"  # in the run's directory: tracebacks of callbacks that failed


class CallbackError(SparringError):
    """A callback's own code failed. The run has a checkpoint; its `__cause__` is what the callback raised."""


@dataclass(frozen=True)
class Progress:
    """How far a training is, as callbacks see it.

    :param run: The run: its directory, rows, policies.
    :param experiment: What is trained, with all hyperparameters.
    :param iteration: Iterations so far, across resumes.
    :param steps: Steps of play so far.
    :param updates: Updates of the parameters so far.
    :param seconds: Seconds of training so far, across resumes.
    :param row: Metrics of the newest iteration; empty before the first.
    :param checkpoint: The newest checkpoint's directory; none before the first.
    """

    run: "Run"
    experiment: "Experiment"
    iteration: int
    steps: int
    updates: int
    seconds: float
    row: "Row" = field(default_factory=dict)
    checkpoint: Path | None = None


class Callback:
    """Override what you need. All hooks are called in the training's thread, between iterations, with the `progress` so
    far.

        class Patience(sparring.Callback):
            def on_evaluation(self, progress):
                return progress.row["evaluation/return_mean"] < 475  # False ends the training

    A hook that returns False ends the training after the current iteration; None or anything else goes on. `stop` does
    the same from any thread. The run is saved then, as at its stop condition, and can be resumed. An exception ends it
    as well, saved, as a CallbackError.
    """

    _stopping = False

    def on_start(self, progress: Progress) -> bool | None:
        """Before the first iteration of a new or resumed run."""

    def on_iteration(self, progress: Progress) -> bool | None:
        """After each iteration: its row is written, its checkpoint (where one is due) is not yet."""

    def on_evaluation(self, progress: Progress) -> bool | None:
        """After an iteration with an evaluation, before `on_iteration`: the row has `evaluation/…`."""

    def on_checkpoint(self, progress: Progress) -> bool | None:
        """After a checkpoint and its policy were written, to `progress.checkpoint`."""

    def on_end(self, progress: Progress) -> bool | None:
        """When training ends: at its stop condition, stopped, interrupted or failed. The last checkpoint is written,
        unless writing it failed."""

    def stop(self) -> None:
        """Ends the training after its current iteration. Works from any thread, also before it began."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end the training."""
        return self._stopping


class Registered:
    """The callbacks of one training, called in turn."""

    def __init__(self, callbacks: Iterable[Callback], experiment: "Experiment", directory: Path) -> None:
        self._all: Sequence[Callback] = [*callbacks, *(find(name) for name in experiment.callbacks)]
        self._directory = directory
        self._ended = True  # until the first on_start
        self._failed = False
        for callback in self._all:
            if not isinstance(callback, Callback):
                raise InputError(f"{callback!r} is not a callback: it must be an instance of sparring.Callback")

    @property
    def stopping(self) -> bool:
        """Whether one of them asked to end the training."""
        return any(callback.stopping for callback in self._all)

    def start(self, progress: Progress) -> None:
        self._ended = False
        self.call("on_start", progress)

    def call(self, hook: str, progress: Progress) -> None:
        """CallbackError for the first that fails; from then on nothing but `end` is called."""
        for callback in self._all if not self._failed else ():
            self._call(callback, hook, progress)

    def end(self, progress: Callable[[], Progress]) -> None:
        """Once, for everyone who was started, whatever another one does; the first failure is raised."""
        if self._ended:
            return
        self._ended = True
        failed: list[CallbackError] = []
        for callback in self._all:
            try:
                self._call(callback, "on_end", progress())
            except CallbackError as error:
                failed.append(error)
            callback._stopping = False  # it may serve another training
        for more in failed[1:]:
            log.warning("%s", more)
        if failed:
            raise failed[0]

    def _call(self, callback: Callback, hook: str, progress: Progress) -> None:
        try:
            if getattr(callback, hook)(progress) is False:
                callback.stop()
        except (Exception, SystemExit) as error:  # it is somebody else's code
            raise self._fault(callback, hook, error) from error

    def _fault(self, callback: Callback, hook: str, error: BaseException) -> CallbackError:
        self._failed, path = True, self._directory / LOG
        with path.open("a") as file:
            file.write("".join(traceback.format_exception(error)))
        what = traceback.format_exception_only(error)[-1].strip()
        place = traceback.extract_tb(error.__traceback__)[-1]
        name = f"{type(callback).__module__}:{type(callback).__qualname__}"
        return CallbackError(
            f"the callback {name} failed in {hook}: {what} ({place.filename}, line {place.lineno}). "
            f"The run is saved in {self._directory}; the traceback is in {path}"
        )


def find(name: str) -> Callback:
    """The callback that an experiment names.

    :param name: `module:Attribute`: a class that takes no arguments, a function that makes one, or an instance.
    :raises InputError: there is none, or it cannot be made.
    """
    if not plugins.is_outside(name):
        raise InputError(f"callback {name!r}: write where it is, as module:Name")
    found: Any = plugins.find("callback", name, {})
    if isinstance(found, Callback):
        return found
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise InputError(f"callback {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Callback):
        raise InputError(f"callback {name!r} is a {type(made).__name__}: it must be a sparring.Callback")
    return made
