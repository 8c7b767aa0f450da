"""outside_trainee.py, a way to learn that the package does not know: trained, resumed, swept, measured and played.
Nothing of Sparring is edited."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from outside_trainee import CrossEntropy

from sparring import algorithms, json_schemas
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.runs import checkpoint
from sparring.sweep.plan import Sweep
from sparring.training import loop
from sparring.training.choose import trainee_class
from sparring.training.protocol import Trainee

NAME = "outside_trainee:CrossEntropy"
RANDOM = 22.0  # mean return of random play


def experiment(out: Path, iterations: int, **changes: object) -> Experiment:
    data = {"game": "CartPole-v1", "algorithm": {"name": NAME}, "stop": {"iterations": iterations}, "out": str(out)}
    return Experiment.parse(data | {"evaluation": {"every": 4, "episodes": 4}, "checkpoint": {"every": 0}} | changes)


def test_it_is_short_enough_to_be_read() -> None:
    assert len(Path(__file__).with_name("outside_trainee.py").read_text().splitlines()) <= 80


def test_it_learns_and_is_played(tmp_path: Path) -> None:
    run = loop.train(experiment(tmp_path / "run", 12))
    rows = run.rows()
    assert rows[0]["episode/return_mean"] < 4 * RANDOM
    best = run.best()
    assert best is not None
    assert best.ret > 8 * RANDOM
    assert rows[-1]["updates"] == 12
    assert run.experiment.algorithm == {"name": NAME, "population": 16, "elite": 4, "noise": 0.1}
    assert run.policy("best").probabilities(np.zeros(4)).sum() == pytest.approx(1)
    assert (run.path / "policy.onnx").stat().st_size > 0


def test_resuming_is_bit_identical(tmp_path: Path) -> None:
    whole = loop.train(experiment(tmp_path / "whole", 4))
    loop.train(experiment(tmp_path / "parts", 3))
    parts = loop.resume(tmp_path / "parts", ["stop.iterations=4"])
    one, two = (checkpoint.load(run.checkpoints()[-1]) for run in (whole, parts))
    assert one[1]["trainee"] == two[1]["trainee"]
    assert one[0].keys() == two[0].keys()
    assert all(np.array_equal(array, two[0][name]) for name, array in one[0].items())
    assert (whole.path / "policy.onnx").read_bytes() == (parts.path / "policy.onnx").read_bytes()


def test_a_sweep_is_checked_before_it_begins() -> None:
    searched = {"game": "CartPole-v1", "stop": {"iterations": 1}, "tune": {"samples": 2}}
    good, typo = ({"algorithm": {"name": NAME, key: {"choice": [2, 4]}}} for key in ("elite", "elites"))
    Sweep.parse(searched | good).check()
    Sweep.parse(searched | good | {"tune": {"samples": 2, "scheduler": "pbt"}}).check()
    with pytest.raises(InputError, match=r"unknown key algorithm\.elites: did you mean algorithm\.elite\?"):
        Sweep.parse(searched | typo).check()
    with pytest.raises(InputError, match=r"CrossEntropy chooses one of several actions, Pendulum-v1 has others"):
        Sweep.parse(searched | good | {"game": "Pendulum-v1"}).check()


def test_its_scaling_is_measured(tmp_path: Path) -> None:
    """In processes of their own, as a user calls it."""
    (tmp_path / "e.yaml").write_text(f"game: CartPole-v1\nalgorithm: {{name: {NAME}, population: 4, elite: 2}}\n")
    words = ["bench", "scaling", "e.yaml", "--workers", "1", "--iterations", "1", "--rounds", "1", "--out", "out"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "sparring.cli", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "scaling.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["steps_per_s"]) > 0
    assert 0 < float(line["sample_s"]) <= float(line["iteration_s"])


def test_editors_take_its_name() -> None:
    algorithm = json_schemas.experiment()["$defs"]["Experiment"]["properties"]["algorithm"]
    patterns = [each["pattern"] for each in algorithm["properties"]["name"]["anyOf"] if "pattern" in each]
    assert any(re.search(pattern, NAME) for pattern in patterns)


class Half(CrossEntropy):
    memory = Trainee.memory


def test_one_that_lacks_a_method_is_refused_before_it_begins(tmp_path: Path) -> None:
    half = msgspec.structs.replace(experiment(tmp_path / "run", 1), algorithm={"name": f"{__name__}:Half"})
    with pytest.raises(InputError, match=r"'test_own_trainee:Half' has no memory: see sparring\.training\.protocol"):
        loop.train(half)
    assert not (tmp_path / "run").exists()
    assert trainee_class(experiment(tmp_path, 1)) is CrossEntropy


class Short(CrossEntropy):
    def iterate(self):
        row = super().iterate()
        return {key: row[key] for key in row if key not in ("steps", "time/load_s")}


def test_a_row_that_lacks_something_is_refused_in_one_line(tmp_path: Path) -> None:
    short = msgspec.structs.replace(experiment(tmp_path / "run", 1), algorithm={"name": f"{__name__}:Short"})
    with pytest.raises(
        InputError, match=r"the row of test_own_trainee:Short has no steps, time/load_s: see sparring\."
    ):
        loop.train(short)


def test_a_live_trainer_learns_with_algorithms_alone(tmp_path: Path) -> None:
    """It has stored play to learn from, not a game to play."""
    with pytest.raises(InputError, match=r"'outside_trainee:CrossEntropy' is no algorithm"):
        algorithms.find(NAME)
