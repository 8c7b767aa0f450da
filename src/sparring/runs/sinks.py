"""Where a run's metrics go: a row per iteration to each sink of `metrics: [csv, jsonl, tensorboard]`. Others are made
of `module:Class` from anywhere. Whoever was killed after a checkpoint wrote rows that are lost and done again: a sink
that opens gets the rows that count, and drops the rest."""

import csv
import io
import json
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sparring import plugins
from sparring.errors import InputError, SparringError
from sparring.experiment import Experiment
from sparring.files import write_whole
from sparring.runs.metrics import Row, read_rows
from sparring.runs.tensorboard import EventFile

__all__ = ["NAMES", "Csv", "Jsonl", "Opening", "Remembered", "Sink", "SinkError", "Sinks", "TensorBoard", "find"]

NAMES = {
    "csv": "sparring.runs.sinks:Csv",
    "jsonl": "sparring.runs.sinks:Jsonl",
    "study": "sparring.runs.study_sink:Study",
    "tensorboard": "sparring.runs.sinks:TensorBoard",
    "mlflow": "sparring.runs.mlflow_sink:Mlflow",
    "wandb": "sparring.runs.wandb_sink:Wandb",
}
FILES = ("csv", "jsonl", "study", "tensorboard")  # ours, on this disk: what fails there is the disk, and says so itself


class SinkError(SparringError):
    """A sink of metrics that is not a file of ours failed. What was trained until then is saved."""


@dataclass(frozen=True)
class Opening:
    """What a sink gets when a run begins or is resumed.

    :param directory: The run's directory. A sink may keep files of its own in it.
    :param experiment: What is trained, with all hyperparameters.
    :param rows: The rows that count, up to the checkpoint. Later ones may have been written: they are done again.
    """

    directory: Path
    experiment: Experiment
    rows: Sequence[Row] = ()

    @property
    def iteration(self) -> int:
        """Of the last row that counts; 0 for a new run."""
        return int(self.rows[-1]["iteration"]) if self.rows else 0


class Sink(Protocol):
    """A class of this form can be named in `metrics`. It is made with an `Opening`."""

    def write(self, row: Row) -> None:
        """Takes the row of an iteration: finite numbers by name, `iteration` and `steps` among them."""

    def close(self) -> None:
        """The run ends here, or goes on later."""


class Jsonl:
    """`metrics.jsonl`: what `Run.rows`, plots and resuming read."""

    def __init__(self, opening: Opening) -> None:
        self._path = opening.directory / "metrics.jsonl"
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in opening.rows).encode())

    def write(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        pass


class Csv:
    """`metrics.csv`: a column for every name that came so far."""

    def __init__(self, opening: Opening) -> None:
        self._directory = opening.directory
        self._path = opening.directory / "metrics.csv"
        self._columns: list[str] = []
        self._rewrite(opening.rows)

    def write(self, row: Row) -> None:
        if set(row) <= set(self._columns):
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
            return
        # A loss that is there from the first update on, an evaluation: the header changes.
        before = [old for old in read_rows(self._directory / "metrics.jsonl") if old["iteration"] < row["iteration"]]
        self._rewrite([*before, row])

    def _rewrite(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._columns += [name for name in row if name not in self._columns]
        table = io.StringIO()
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self._path, table.getvalue().encode())

    def close(self) -> None:
        pass


class TensorBoard:
    """`tensorboard/`: events by steps, or by updates where nobody plays."""

    def __init__(self, opening: Opening) -> None:
        self._axis = opening.experiment.axis
        begin = int(opening.rows[-1][self._axis]) + 1 if opening.rows else 0
        self._events = EventFile(opening.directory / "tensorboard", begin)

    def write(self, row: Row) -> None:
        values = {name: value for name, value in row.items() if name not in (self._axis, "iteration")}
        self._events.add(int(row[self._axis]), values)

    def close(self) -> None:
        self._events.close()


class Remembered(msgspec.Struct):
    """Of a tracking service, which takes nothing back: which of its runs is ours, and how far it may have come. A run
    that lost rows begins a new one there, and sends it the rows that count.

    :param id: The service's name of the run.
    :param iteration: Rows up to this one may have been sent.
    """

    id: str
    iteration: int

    @classmethod
    def of(cls, path: Path, opening: Opening) -> "Remembered | None":
        """The service's run to go on with; None: begin a new one."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise InputError(f"{path} is damaged: {error}. Remove it to begin a new run there") from error
        return found if found.iteration == opening.iteration else None

    def write(self, path: Path) -> None:
        write_whole(path, msgspec.json.encode(self))


def find(name: str) -> Callable[[Opening], Sink]:
    """The sink that an experiment names, to be made with an `Opening`.

    :param name: One of ours (`NAMES`), or `module:Class`.
    :raises InputError: there is none, or what it needs is not installed.
    """
    try:
        found: Any = plugins.find("metrics sink", name, NAMES)
    except ImportError as error:
        raise InputError(f"metrics: {name} is not installed ({error}): pip install 'sparring[{name}]'") from error
    if not callable(found) or not hasattr(found, "write") or not hasattr(found, "close"):
        raise InputError(f"metrics sink {name!r} needs write(row) and close(): it is {found!r}")
    return found


class Sinks:
    """All sinks of a run."""

    def __init__(self, directory: Path, experiment: Experiment, iteration: int = 0) -> None:
        """Goes on after `iteration`: later rows belong to work that was lost, and will be done again."""
        rows = [row for row in read_rows(directory / "metrics.jsonl") if row["iteration"] <= iteration]
        opening = Opening(directory, experiment, rows)
        self._all: list[tuple[str, Sink]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for name in experiment.metrics:
                self._all.append((name, self._try(name, "opening", partial(find(name), opening))))
            undo.pop_all()

    def write(self, row: Row) -> None:
        row = {name: value for name, value in row.items() if math.isfinite(value)}
        with ExitStack() as stack:  # all of them, whatever one of them does: no row is missing after a resume
            for name, sink in reversed(self._all):
                stack.callback(self._try, name, "write", partial(sink.write, row))

    def close(self) -> None:
        """All of them, whatever one of them does."""
        with ExitStack() as stack:
            for name, sink in self._all:
                stack.callback(self._try, name, "close", sink.close)
            self._all = []

    @staticmethod
    def _try(name: str, where: str, call: Callable[[], Any]) -> Any:
        if name in FILES:
            return call()
        try:
            return call()
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            what = traceback.format_exception_only(error)[-1].strip()
            raise SinkError(f"the metrics sink {name} failed in {where}: {what}") from error
