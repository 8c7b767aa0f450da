"""Sinks of metrics: ours, those of tracking services, anybody's; after a kill none of them has a row twice."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.errors import InputError
from sparring.experiment import Checkpoint, Experiment, Rollout, Stop
from sparring.runs import sinks
from sparring.runs.run import Run
from sparring.training import loop

DQN = {"name": "dqn", "layers": [{"layer": "dense", "units": 8}], "learning_starts": 64, "batch": 16, "replay": 3000}


def experiment(out: Path, *metrics: str, **changes) -> Experiment:
    fields = {
        "game": "CartPole-v1",
        "algorithm": DQN,
        "rollout": Rollout(envs=4, steps=8),
        "iteration": 64,
        "stop": Stop(iterations=3),
        "checkpoint": Checkpoint(every=2),
        "out": str(out),
        "metrics": metrics,
    }
    return Experiment(**(fields | changes))


def lose(run: Run) -> None:
    """As after kill -9: a row was written after the checkpoint."""
    held = loop.reopen(run.path, ["stop.iterations=9"])
    try:
        held.open()
        held.step()
    finally:
        held.close()


def test_only_the_sinks_that_are_named(tmp_path):
    run = loop.train(experiment(tmp_path / "run", "jsonl"))
    assert len(run.rows()) == 3
    assert not (run.path / "metrics.csv").exists()
    assert not (run.path / "tensorboard").exists()
    loop.resume(run.path, ["stop.iterations=4", "metrics=[jsonl, csv]"])
    table = (run.path / "metrics.csv").read_text().splitlines()
    assert len(table) == 5, "a sink that comes later gets the rows before it"
    assert run.experiment.metrics == ("jsonl", "csv")


def test_the_default_is_three_files(tmp_path):
    assert Experiment("CartPole-v1", {"name": "dqn"}).metrics == ("csv", "jsonl", "tensorboard")


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (["csv"], "metrics lacks jsonl"),
        (["jsonl", "csv", "csv"], "names a sink twice"),
        (["jsonl", "tensorbord"], "did you mean 'tensorboard'"),
        (["jsonl", "own_sink:Missing"], "has no 'Missing'"),
        (["jsonl", "own_sink:half"], r"needs write\(row\) and close\(\)"),
    ],
)
def test_wrong_sinks_are_refused_before_anything_is_written(own, tmp_path, metrics, why):
    data = experiment(tmp_path / "run", "jsonl").to_builtins()
    with pytest.raises(InputError, match=why):
        loop.train(data | {"metrics": metrics})
    assert not (tmp_path / "run").exists()


OWN = """
import json

class Mine:
    def __init__(self, opening):
        self.path = opening.directory / "mine.json"
        self.rows = list(opening.rows)
        assert opening.experiment.game == "CartPole-v1"

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.path.write_text(json.dumps(self.rows))

class Fails(Mine):
    def write(self, row):
        if row["iteration"] == 2:
            raise ConnectionError("nobody there")

class Closed(Mine):
    def __init__(self, opening):
        raise ConnectionError("nobody there")

def half():
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_sink", raising=False)
    (tmp_path / "own_sink.py").write_text(OWN)


def test_a_sink_from_outside(own, tmp_path):
    run = loop.train(experiment(tmp_path / "run", "jsonl", "own_sink:Mine"))
    assert json.loads((run.path / "mine.json").read_text()) == run.rows()
    lose(run)
    assert len(run.rows()) == 4
    run = loop.resume(run.path, ["stop.iterations=5"])
    assert [row["iteration"] for row in run.rows()] == [1, 2, 3, 4, 5]
    assert json.loads((run.path / "mine.json").read_text()) == run.rows()


def test_a_sink_that_fails_ends_the_run_saved(own, tmp_path):
    why = r"the metrics sink own_sink:Fails failed in write: ConnectionError: nobody there"
    with pytest.raises(sinks.SinkError, match=why):
        loop.train(experiment(tmp_path / "run", "jsonl", "own_sink:Fails"))
    run = Run(tmp_path / "run")
    assert int(run.checkpoints()[-1].name) == len(run.rows()) == 2
    assert len(loop.resume(run.path, ["metrics=[jsonl]"]).rows()) == 3
    with pytest.raises(sinks.SinkError, match="own_sink:Closed failed in opening"):
        loop.resume(run.path, ["metrics=[jsonl, 'own_sink:Closed']"])


def test_mlflow_has_every_row_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = loop.train(experiment(tmp_path / "run", "jsonl", "mlflow"))
    loop.resume(run.path, ["stop.iterations=4"])  # nothing was lost: MLflow's run goes on
    client = mlflow.MlflowClient()
    place = client.get_experiment_by_name("sparring").experiment_id
    (found,) = client.search_runs([place])
    check_mlflow(client, found, run)
    assert found.data.params["algorithm.batch"] == "16"
    assert found.info.status == "FINISHED"
    lose(run)
    loop.resume(run.path, ["stop.iterations=6"])
    runs = client.search_runs([place])
    assert len(runs) == 2, "what was lost stays in the old one"
    check_mlflow(client, max(runs, key=lambda each: each.info.start_time), run)


def check_mlflow(client, found, run: Run) -> None:
    history = client.get_metric_history(found.info.run_id, "loss/q")
    wanted = [(row["steps"], row["loss/q"]) for row in run.rows() if "loss/q" in row]
    assert [(each.step, each.value) for each in history] == wanted
    iterations = [each.value for each in client.get_metric_history(found.info.run_id, "iteration")]
    assert iterations == [row["iteration"] for row in run.rows()]


def test_wandb_has_every_row_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = loop.train(experiment(tmp_path / "run", "jsonl", "wandb"))
    first = json.loads((run.path / "wandb.json").read_text())["id"]
    loop.resume(run.path, ["stop.iterations=4"])
    assert json.loads((run.path / "wandb.json").read_text())["id"] == first
    assert wandb_rows(run, first) == wanted(run)
    lose(run)
    loop.resume(run.path, ["stop.iterations=5"])
    second = json.loads((run.path / "wandb.json").read_text())["id"]
    assert second != first
    assert wandb_rows(run, second) == wanted(run)


def wanted(run: Run) -> list[dict[str, float]]:
    return [{"iteration": row["iteration"], "steps": row["steps"]} for row in run.rows()]


def wandb_rows(run: Run, name: str) -> list[dict[str, float]]:
    """Of all parts of a W&B run; its service writes the last ones after the run was finished."""
    until = time.monotonic() + 20
    while True:
        # W&B names a part by the second in which it begins; of another one in that second it adds -1.
        parts = sorted(run.path.glob(f"wandb/offline-run-*-{name}*/run-{name}.wandb"))
        rows = [row for path in parts for row in scan(path)]
        if len(rows) >= len(run.rows()) or time.monotonic() > until:
            return rows
        time.sleep(0.1)


def scan(path: Path) -> list[dict[str, float]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "iteration" in items:
            rows.append({name: json.loads(items[name]) for name in ("iteration", "steps")})
    return rows


def records(log: bytes) -> Iterator[bytes]:
    """LevelDB's log format, behind seven bytes of W&B's own: records in blocks of 32 KiB, cut where a block ends. W&B
    has no public reader of it."""
    at, parts = 7, b""
    while at + 7 <= len(log):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        if at + 7 + size > len(log):
            return  # the service has not written the rest yet
        parts += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
