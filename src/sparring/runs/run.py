"""A run directory: the experiment, its metrics, checkpoints and policies. Reads; only the training loop writes."""

import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sparring import files
from sparring.errors import InputError
from sparring.experiment import Experiment, read
from sparring.networks.plain import Value
from sparring.networks.policy import Policy
from sparring.runs.metrics import Row, read_rows

__all__ = ["BEST", "NO_POLICY", "RUNS", "Best", "Run", "alone", "find_run", "is_run", "list_runs", "new_directory"]

RUNS = Path("runs")
NO_POLICY = "no-policy.txt"  # in the place of policy.onnx: why there is none
CHECKPOINT = re.compile(r"\d{8}(\.old)?")
MAX_DIGITS = 8  # of an iteration: its directory's name
BEST = "checkpoint.best"  # a checkpoint of the policy alone: to play with, not to train on from


class Best(NamedTuple):
    """The best evaluation of a run; of equal ones the latest."""

    iteration: int
    ret: float
    cut: bool = False  # episodes were cut, and not at a fixed length

    def beats(self, other: "Best | None") -> bool:
        """Returns of episodes that were cut depend on where: they lose to whole ones, and of two the later counts."""
        if other is None or self.cut != other.cut:
            return other is None or other.cut
        return self.cut or self.ret >= other.ret


class Run:
    """A run's directory, to read: its experiment, metrics, checkpoints and policies.

    :param path: The directory.
    :raises InputError: it has no experiment.yaml, so it is no run.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if not is_run(path):
            raise InputError(f"{path} is not a run directory: it has no experiment.yaml")
        self.path = path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def experiment(self) -> Experiment:
        """What is trained, with all hyperparameters."""
        return read(self.path / "experiment.yaml")

    def rows(self) -> list[Row]:
        """The metrics: a row for each iteration."""
        return read_rows(self.path / "metrics.jsonl")

    def policy(self, which: str = "last") -> Policy:
        """A policy of the run.

        :param which: `last`, `best` (evaluated), or the number of an iteration whose checkpoint is kept.
        :raises InputError: it is not kept; the message says what is.
        """
        from sparring.export import weights

        if (self.path / NO_POLICY).exists():
            why = (self.path / NO_POLICY).read_text(errors="replace").strip()
            raise InputError(f"{self.path} has no policy to play with: {why}")
        if not self.kept():
            raise InputError(f"{self.path} has no policy yet: it is written with the first checkpoint")
        try:
            if which == "last":
                return weights.load((self.path / "policy.safetensors").read_bytes(), trusted=True)
            data = self._load(which)[0].get("policy")
            if data is None:
                raise InputError(f"the checkpoint {which} was written by an older version, without its policy")
            return weights.load(data.tobytes(), trusted=True)
        except (InputError, OSError) as error:
            raise self._refusal(which, error) from error

    def value(self, which: str = "last") -> Value:
        """What the run's value network makes of a state, in units of the rewards that it learned from: PPO scales them.

        :param which: As of `policy`, but for `best`, which is a policy alone.
        :raises InputError: there is none: its algorithm has none, or only whole checkpoints keep it.
        """
        import jax

        from sparring import algorithms
        from sparring.algorithms.protocol import Algorithm
        from sparring.runs import checkpoint

        name = self.experiment.name
        none = InputError(f"{self.path} was trained with {name}, which does not learn the value of a state")
        if name.startswith("rllib/"):
            raise InputError(f"{self.path} was trained with {name}: values of RLlib's networks cannot be had")
        if getattr(algorithms.find(name), "value", Algorithm.value) is Algorithm.value:
            raise none  # before much is loaded
        if which == "best":
            kept = ", ".join(f"@{int(each.name)}" for each in self.checkpoints())
            has = f"values are in its checkpoints {kept}" if kept else "no checkpoint is kept that has a value"
            raise InputError(f"{self.path}@best is a policy alone: {has}")
        number = self._number(which)
        try:
            arrays = self._load(number)[0]
        except InputError as error:
            raise self._refusal(which, error) from error
        algorithm = algorithms.create(name, self.policy(number).game, self.experiment.hyperparameters)
        state = checkpoint.unflatten(algorithm.init(jax.random.key(0)), arrays, "state")
        if (found := algorithm.value(state)) is None:
            raise none
        return found

    def state(self, which: str = "last") -> tuple[dict[str, Any], dict[str, Any]]:
        """What a training would go on from: arrays, and what else there is.

        :param which: As of `policy`, but for `best`, which is a policy alone.
        :raises InputError: it is not kept.
        """
        return self._load(self._number(which))

    def _number(self, which: str) -> str:
        """Of `last` the newest checkpoint's, where there is one."""
        saved = self.checkpoints() if which == "last" else []
        return str(int(saved[-1].name)) if saved else which

    def _refusal(self, which: str, error: Exception) -> InputError:
        kept = ", ".join(each for each in self.kept() if each != which) or "nothing else"
        return InputError(f"{self.path}@{which[:100]}: {error}; kept: {kept}")

    def _load(self, which: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The checkpoint of `best` or of an iteration."""
        from sparring.runs import checkpoint

        if which == "best":
            if not checkpoint.exists(self.path / BEST):
                raise InputError("there is no best one, as none was evaluated (evaluation.every, checkpoint.best)")
            return checkpoint.load(self.path / BEST)
        if not which.isdecimal() or len(which) > MAX_DIGITS:
            raise InputError("say last, best or the number of an iteration")
        path = self.path / "checkpoints" / f"{int(which):08d}"
        if path not in self.checkpoints():
            raise InputError(f"there is no checkpoint of iteration {int(which)}")
        return checkpoint.load(path)

    def best(self) -> Best | None:
        """None: there was no evaluation yet. InputError where it is damaged."""
        from sparring.runs import checkpoint

        if not checkpoint.exists(self.path / BEST):
            return None
        try:
            meta = self._load("best")[1]
        except InputError as error:
            raise self._refusal("best", error) from error
        return Best(int(meta["iteration"]), float(meta["evaluation"]), bool(meta.get("cut", False)))

    def kept(self) -> list[str]:
        """What can be asked for: last, best, iterations."""
        from sparring.runs import checkpoint

        found = ["last"] if (self.path / "policy.safetensors").exists() else []
        found += ["best"] if checkpoint.exists(self.path / BEST) else []
        return found + [str(int(path.name)) for path in self.checkpoints()]

    def video(self, iteration: int) -> Path:
        """Where an iteration's video is, or would be.

        :param iteration: Its number.
        """
        return self.path / "videos" / f"{iteration:08d}.mp4"

    def checkpoints(self) -> list[Path]:
        """Directories of the checkpoints that are kept, oldest first."""
        found = self.path.glob("checkpoints/*")
        return sorted({path.with_suffix("") for path in found if CHECKPOINT.fullmatch(path.name)})

    def prune(self, keep: int) -> None:
        """Removes all checkpoints but the newest `keep`.

        :param keep: How many stay.
        """
        for path in self.checkpoints()[:-keep]:
            for each in (path, path.with_suffix(".old")):
                shutil.rmtree(each, ignore_errors=True)

    def alone(self) -> AbstractContextManager[None]:
        """Two trainings in one directory would mix their rows."""
        return alone(self.path, "trained")


@contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """Nobody else works in this directory; the lock goes with the process."""
    with files.locked(path, wait=False) as ours:
        if not ours:
            raise InputError(f"{path} is being {what} by another process right now")
        yield


def is_run(path: Path) -> bool:
    try:
        return (path / "experiment.yaml").is_file()
    except OSError:  # such as a name that is too long for one
        return False


def find_run(target: str) -> tuple[Run, str | None] | None:
    """`RUN`, or `RUN@last`, `RUN@best`, `RUN@40`: the run, and which of its policies was asked for. None where it is
    no run at all."""
    if is_run(Path(target)):
        return Run(Path(target)), None
    path, at, which = target.rpartition("@")
    if not at or not is_run(Path(path)):
        return None
    return Run(Path(path)), which


def new_directory(experiment: Experiment, game: str) -> Path:
    """Where a new run goes: the next free directory, made at once so that nobody else takes it, or the one asked for.
    Never one that has something in it."""
    if experiment.out is None:
        name = re.sub(r"[/:]", "-", experiment.name)  # rllib/PPO
        number = 1
        RUNS.mkdir(parents=True, exist_ok=True)
        while True:
            path = RUNS / f"{game}-{name}-{number}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
    path = Path(experiment.out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "has a run already: continue it with --resume, or" if is_run(path) else "exists and is not empty:"
        what = what if path.is_dir() else "is a file:"
        raise InputError(f"{path} {what} choose another directory (out)")
    return path


def list_runs(root: Path) -> list[Run]:
    """Every run below a directory."""
    return [Run(path.parent) for path in sorted(root.glob("**/experiment.yaml"))]
