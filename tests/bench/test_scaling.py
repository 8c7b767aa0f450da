"""`sparring bench scaling`: it measures what it says on either runner, and refuses at once what cannot be measured."""

import csv
import subprocess
import sys

import pytest

from sparring.bench import report
from sparring.bench.scaling import Layout, MeasuredLayout, Round, configurations
from sparring.errors import InputError
from sparring.experiment import Experiment

EXPERIMENT = """
game: CartPole-v1
algorithm: {name: ppo, steps: 256, minibatch: 64, epochs: 2, layers: [{layer: dense, units: 16}]}
stop: {steps: 1000}
resources: {actor_cpus: 0.25}
"""


RLLIB = """
game: CartPole-v1
algorithm: {name: rllib/PPO, train_batch_size_per_learner: 256, minibatch_size: 64, num_epochs: 1}
"""


def bench(tmp_path, *words, experiment=EXPERIMENT, target=None):
    (tmp_path / "e.yaml").write_text(experiment)
    command = [sys.executable, "-m", "sparring.cli", "bench", "scaling", target or str(tmp_path / "e.yaml")]
    return subprocess.run(
        [*command, "--out", str(tmp_path / "out"), *words], capture_output=True, text=True, timeout=240
    )


@pytest.mark.real
@pytest.mark.parametrize(("runner", "workers"), [("local", "1,2"), ("ray", "2")])
def test_what_is_measured(tmp_path, runner, workers):
    done = bench(tmp_path, "--workers", workers, "--runner", runner, "--iterations", "2", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "scaling.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["workers"] for line in lines] == workers.split(",")
    for line in lines:
        spent = sum(float(line[f"{phase}_s"]) for phase in ("sample", "load", "learn", "update"))
        assert 0 < spent <= float(line["iteration_s"])
        assert float(line["steps_per_s"]) == pytest.approx(256 / float(line["iteration_s"]), rel=0.1)
        assert 0 < float(line["utilisation"]) <= 1
        assert 1 < float(line["memory_mb"]) < 100
        assert float(line["start_s"]) > float(line["iteration_s"])
    assert float(lines[0]["speed_up"]) == float(lines[0]["efficiency"]) == 1
    page = (tmp_path / "out" / "scaling.md").read_text()
    assert "sparring bench scaling" in page
    assert "reference study" not in page  # it has no CartPole
    for name in ("time_by_workers.png", "time_by_task.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.real
@pytest.mark.slow
def test_rllibs_algorithms_are_measured_as_well(tmp_path):
    pytest.importorskip("torch")
    done = bench(tmp_path, "--workers", "1", "--iterations", "1", "--rounds", "1", experiment=RLLIB)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out" / "scaling.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["steps_per_s"]) > 0
    assert float(line["sampled_per_s"]) > float(line["steps_per_s"])
    assert float(line["memory_mb"]) > 20
    assert line["utilisation"] == ""  # RLlib does not tell


@pytest.mark.real
def test_a_games_id_is_measured_as_train_takes_it(tmp_path):
    words = ["--algorithm", "ppo", "--set", "algorithm.steps=128", "--workers", "1", "--iterations", "1"]
    done = bench(tmp_path, *words, "--rounds", "1", target="CartPole-v1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ppo on CartPole-v1" in done.stdout
    refused = bench(tmp_path, "--workers", "1", target="CartPole-v9")
    assert refused.returncode == 2
    assert "cannot make the game 'CartPole-v9'" in " ".join(refused.stderr.split())


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "1", "--gpus", "0,2"], "--gpus 2: JAX finds 0 GPUs on this machine (cpu)"),
        (["--workers", "1,3"], "algorithm.steps (256) is not a multiple of the 3 environments"),
        (["--workers", "1", "--runner", "slurm"], "runner"),
        (["--workers", "64", "--runner", "ray", "--set", "resources.actor_cpus=2"], "64 rollout workers with 2 CPUs"),
    ],
    ids=["gpus", "steps", "runner", "room"],
)
def test_what_cannot_be_measured(tmp_path, words, says):
    done = bench(tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("workers", "gpus"), [("0,1", None), ("two", None), ("", None), ("1", "-1"), ("1", "x")])
def test_numbers_that_are_none(workers, gpus):
    with pytest.raises(InputError, match="write numbers from"):
        configurations(workers, gpus)


def test_configurations_are_all_pairs():
    assert configurations("4,1", "1,0") == [
        Layout(1, 0),
        Layout(4, 0),
        Layout(1, 1),
        Layout(4, 1),
    ]


def measured(workers, gpus, seconds):
    phases = {"sample": 0.5, "load": 0.0, "learn": 0.25, "update": 0.0}
    rounds = [Round(s, 4000 / s, {k: v * s for k, v in phases.items()}, 8000 / s, 0.5, 5e6, 9.0) for s in seconds]
    return MeasuredLayout(Layout(workers, gpus), rounds)


def test_the_page_compares_with_the_reference_study(tmp_path):
    experiment = Experiment(game="HumanoidBulletEnv-v0", algorithm={"name": "ppo"})
    found = [measured(1, 0, [40, 80, 40]), measured(64, 0, [1, 2, 1]), measured(1, 1, [20]), measured(64, 1, [1])]
    lines = report.table(found)
    assert [line["speed_up"] for line in lines] == [1, 40, 1, 20]
    assert lines[1]["efficiency"] == lines[1]["sampling_efficiency"] == 40 / 64
    report.write(tmp_path, experiment, found, "sparring bench scaling …")
    page = (tmp_path / "scaling.md").read_text()
    assert "| workers | ours, 0 GPUs | ours, 1 GPUs | study, CPU | study, GPU |" in page
    assert "| 64 | 1 s (×40.0) | 1 s (×20.0) | 4.13 s (×10.3) | 2.78 s (×15.3) |" in page
    assert "| 4 | – | – | 23.5 s (×1.8) | 15.5 s (×2.7) |" in page


def test_who_reads_the_page_while_it_is_written_reads_a_whole_one(tmp_path):
    experiment, found = Experiment(game="CartPole-v1", algorithm={"name": "ppo"}), [measured(1, 0, [40])]
    report.write(tmp_path, experiment, found, "sparring bench scaling …")
    with (tmp_path / "scaling.csv").open() as table, (tmp_path / "scaling.md").open() as page:
        before = [(tmp_path / name).read_text() for name in ("scaling.csv", "scaling.md")]
        report.write(tmp_path, experiment, [*found, measured(2, 0, [20])], "sparring bench scaling …")
        assert [table.read(), page.read()] == before
    assert "speed_up" in (tmp_path / "scaling.csv").read_text()


def test_the_speed_up_is_that_of_the_rates_beside_it(tmp_path):
    """Rounds that differ much: the median of their ratios, 1.02, is not what the two rates say."""
    found = [measured(1, None, [4000 / 52_657, 4000 / 65_000, 4000 / 40_000])]
    found.append(measured(2, None, [4000 / 53_710, 4000 / 66_300, 4000 / 67_167]))
    one, two = report.table(found)
    assert round(one["steps_per_s"]) == 52_657
    assert two["speed_up"] == two["steps_per_s"] / one["steps_per_s"]
    assert two["efficiency"] == two["speed_up"] / 2
    assert two["sampling_efficiency"] == two["sampled_per_s"] / one["sampled_per_s"] / 2
    report.write(tmp_path, Experiment(game="CartPole-v1", algorithm={"name": "ppo"}), found, "sparring bench scaling …")
    page = (tmp_path / "scaling.md").read_text()
    assert "| 66,300 | 1.26 | 63% |" in page


def test_everything_that_trains_is_one_kind_of_trainee():
    """A method that one of them lacks is noticed when it is made, not at the end of a measurement."""
    from sparring.training.offline import Offline
    from sparring.training.protocol import Trainee
    from sparring.training.trainee import OffPolicy, OnPolicy

    pytest.importorskip("torch")
    from sparring.rllib.bridge import Bridge

    class Half(Bridge):
        memory = Trainee.memory

    for kind in (OffPolicy, OnPolicy, Offline, Bridge):
        assert Trainee in kind.__mro__
        assert not getattr(kind, "__abstractmethods__", None)
    assert "memory" in Half.__abstractmethods__
