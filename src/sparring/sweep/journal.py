"""What a sweep knows beyond its trials' own directories: which trials there are, with which values, and how they ended.
Lines of JSON, appended as it happens, so that a sweep can be killed at any moment and resumed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sparring import files
from sparring.errors import InputError
from sparring.runs.run import Run, is_run
from sparring.search_space import Values

__all__ = ["ENDED", "Begun", "Copied", "Ended", "Journal", "TrialStatus", "directory", "trial_name"]

ENDED = ("done", "stopped", "failed")


class Begun(msgspec.Struct, frozen=True, tag_field="event", tag="trial"):
    number: int
    values: Values


class Copied(msgspec.Struct, frozen=True, tag_field="event", tag="copied"):
    """PBT: a trial took another one's learner over and goes on with new values."""

    number: int
    source: int
    iteration: int
    values: Values


class Ended(msgspec.Struct, frozen=True, tag_field="event", tag="ended"):
    number: int
    state: str  # one of ENDED
    cause: str = ""
    metric: float | None = None
    iterations: int = 0
    steps: int = 0
    seconds: float = 0.0


class TrialStatus(msgspec.Struct):
    """How it stands with one trial."""

    number: int
    values: Values
    state: str = "waiting"  # running, one of ENDED; or unfinished, when the sweep was interrupted
    metric: float | None = None  # the last one it had
    iterations: int = 0
    steps: int = 0
    seconds: float = 0.0
    source: int | None = None  # whom it copied last
    copies: int = 0
    cause: str = ""

    def note(self, row: dict[str, Any], metric: str) -> None:
        self.iterations, self.steps, self.seconds = int(row["iteration"]), int(row["steps"]), row["time/total_s"]
        self.metric = row.get(metric, self.metric)

    def apply(self, event: Copied | Ended) -> None:
        if isinstance(event, Copied):
            self.source, self.values, self.copies = event.source, event.values, self.copies + 1
        else:
            self.state, self.cause, self.metric = event.state, event.cause, event.metric
            self.iterations, self.steps, self.seconds = event.iterations, event.steps, event.seconds

    def ended(self, state: str, cause: str = "") -> Ended:
        return Ended(self.number, state, cause, self.metric, self.iterations, self.steps, self.seconds)


class Journal:
    def __init__(self, root: Path, metric: str) -> None:
        """Reads what is there; a line that a kill cut short is removed."""
        self.root, self.path = root, root / "journal.jsonl"
        self.trials: dict[int, TrialStatus] = {}
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        if lines[-1]:
            self.path.write_bytes(b"\n".join([*lines[:-1], b""]))
        for line in lines[:-1]:
            try:
                self._apply(msgspec.json.decode(line, type=Begun | Copied | Ended))
            except (msgspec.DecodeError, KeyError) as error:
                raise InputError(f"{self.path} is damaged: {error}") from error
        for trial in self.trials.values():
            if trial.state not in ENDED and is_run(self._run(trial.number)):
                trial.state = "unfinished"
                for row in Run(self._run(trial.number)).rows():
                    trial.note(row, metric)

    def add(self, *events: Begun | Copied | Ended) -> None:
        files.append(self.path, b"".join(msgspec.json.encode(event) + b"\n" for event in events))
        for event in events:
            self._apply(event)

    def _apply(self, event: Begun | Copied | Ended) -> None:
        if isinstance(event, Begun):
            self.trials[event.number] = TrialStatus(event.number, event.values)
        else:
            self.trials[event.number].apply(event)

    def _run(self, number: int) -> Path:
        return directory(self.root, number)

    def left(self) -> Iterable[TrialStatus]:
        return [trial for trial in self.trials.values() if trial.state not in ENDED]


def trial_name(number: int) -> str:
    return f"{number:03d}"


def directory(root: Path, number: int) -> Path:
    return root / "trials" / trial_name(number)
