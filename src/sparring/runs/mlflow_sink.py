"""Metrics to MLflow: `metrics: [jsonl, mlflow]`. MLFLOW_TRACKING_URI says where, MLFLOW_EXPERIMENT_NAME under which
experiment ("sparring" if unset). Steps are MLflow's steps; hyperparameters are its parameters."""

import os
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from sparring.runs.metrics import Row
from sparring.runs.sinks import Opening, Remembered

__all__ = ["Mlflow"]

AT_ONCE = 900  # of a request; MLflow takes 1000 metrics and 100 parameters
LONGEST = 6000  # characters of a parameter


class Mlflow:
    """One MLflow run for the run; a new one where rows were lost, since MLflow takes nothing back."""

    def __init__(self, opening: Opening) -> None:
        self._client = MlflowClient()
        self._axis = opening.experiment.axis
        self._path = opening.directory / "mlflow.json"
        known = Remembered.of(self._path, opening)
        if known is None:
            known = Remembered(self._begin(opening), 0)
        else:
            self._client.update_run(known.id, status="RUNNING")
        self._run = known

    def _begin(self, opening: Opening) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "sparring")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run = self._client.create_run(experiment, run_name=opening.directory.name).info.run_id
        params = [Param(key, value[:LONGEST]) for key, value in flat(opening.experiment.to_builtins())]
        tags = [RunTag("sparring.run", str(opening.directory))]
        for i in range(0, len(params), 100):
            self._client.log_batch(run, params=params[i : i + 100], tags=tags)
        metrics = [metric for row in opening.rows for metric in self._metrics(row)]
        for i in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(run, metrics=metrics[i : i + AT_ONCE])
        Remembered(run, opening.iteration).write(self._path)
        return run

    def _metrics(self, row: Row) -> list[Metric]:
        now, step = int(time.time() * 1000), int(row[self._axis])
        return [Metric(name, value, now, step) for name, value in row.items() if name != self._axis]

    def write(self, row: Row) -> None:
        self._run.iteration = int(row["iteration"])
        self._run.write(self._path)  # before: whoever is killed in between has sent one row less, not one twice
        self._client.log_batch(self._run.id, metrics=self._metrics(row))

    def close(self) -> None:
        self._client.set_terminated(self._run.id)


def flat(data: object, path: str = "") -> list[tuple[str, str]]:
    """`algorithm.lr` → "0.001", and so on."""
    if isinstance(data, dict) and data:
        return [pair for key, value in data.items() for pair in flat(value, f"{path}.{key}" if path else str(key))]
    return [(path, str(data))]
