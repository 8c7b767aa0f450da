"""A run directory: the experiment, its metrics, checkpoints and policy. Reads; only the training loop writes."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sparring.errors import InputError
from sparring.networks.policy import Policy
from sparring.training.experiment import Experiment, read
from sparring.training.metrics import Row, read_rows

__all__ = ["NO_POLICY", "RUNS", "Run", "alone", "is_run", "list_runs", "new_directory"]

RUNS = Path("runs")
NO_POLICY = "no-policy.txt"  # in the place of policy.onnx: why there is none
CHECKPOINT = re.compile(r"\d{8}(\.old)?")


class Run:
    def __init__(self, path: Path) -> None:
        if not is_run(path):
            raise InputError(f"{path} is not a run directory: it has no experiment.yaml")
        self.path = path

    @property
    def experiment(self) -> Experiment:
        return read(self.path / "experiment.yaml")

    def rows(self) -> list[Row]:
        return read_rows(self.path / "metrics.jsonl")

    def policy(self) -> Policy:
        """As of the last checkpoint."""
        from sparring.export import weights

        path = self.path / "policy.safetensors"
        if (self.path / NO_POLICY).exists():
            raise InputError(f"{self.path} has no policy to play with: {(self.path / NO_POLICY).read_text().strip()}")
        if not path.exists():
            raise InputError(f"{self.path} has no policy yet: it is written with the first checkpoint")
        return weights.load(path.read_bytes())

    def video(self, iteration: int) -> Path:
        return self.path / "videos" / f"{iteration:08d}.mp4"

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        found = self.path.glob("checkpoints/*")
        return sorted({path.with_suffix("") for path in found if CHECKPOINT.fullmatch(path.name)})

    def prune(self, keep: int) -> None:
        for path in self.checkpoints()[:-keep]:
            for each in (path, path.with_suffix(".old")):
                shutil.rmtree(each, ignore_errors=True)

    def alone(self) -> AbstractContextManager[None]:
        """Two trainings in one directory would mix their rows."""
        return alone(self.path, "trained")


@contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """Nobody else works in this directory; the lock goes with the process."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(f"{path} is being {what} by another process right now") from error
    try:
        yield
    finally:
        os.close(descriptor)


def is_run(path: Path) -> bool:
    return (path / "experiment.yaml").is_file()


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
