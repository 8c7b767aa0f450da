"""Metrics to Weights & Biases: `metrics: [jsonl, wandb]`. WANDB_PROJECT says under which project ("sparring" if unset),
WANDB_MODE=offline keeps all of it in the run's `wandb/`, for `wandb sync` later."""

import os
import secrets

import wandb

from sparring.runs.metrics import Row
from sparring.runs.sinks import Opening, Remembered

__all__ = ["Wandb"]


class Wandb:
    """One W&B run for the run; a new one where rows were lost, since W&B takes nothing back."""

    def __init__(self, opening: Opening) -> None:
        self._axis = opening.experiment.axis
        self._path = opening.directory / "wandb.json"
        known = Remembered.of(self._path, opening)
        self._known = known or Remembered(secrets.token_hex(4), opening.iteration)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "sparring"),
            id=self._known.id,
            name=opening.directory.name,
            dir=str(opening.directory),
            config=opening.experiment.to_builtins(),
            resume="allow",
            reinit="create_new",  # another training of this process has a run of its own
        )
        self._run.define_metric("*", step_metric=self._axis)
        if known is None:
            for row in opening.rows:
                self._log(row)
            self._known.write(self._path)

    def _log(self, row: Row) -> None:
        self._run.log(row, step=int(row["iteration"]))

    def write(self, row: Row) -> None:
        self._known.iteration = int(row["iteration"])
        self._known.write(self._path)  # before: whoever is killed in between has sent one row less, not one twice
        self._log(row)

    def close(self) -> None:
        self._run.finish()
