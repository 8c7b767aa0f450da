"""Sweeps as they are written: the search space, its draws, and everything that is wrong with one before Ray starts."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from sparring import experiment
from sparring.errors import InputError
from sparring.search_space import Axis, find
from sparring.sweep import plan, results
from sparring.sweep.journal import Begun, Copied, Ended, Journal, TrialStatus
from sparring.sweep.plan import Sweep

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FILE = """
game: CartPole-v1
algorithm:
  name: ppo
  lr: {loguniform: [1e-5, 1e-3]}
  gamma: {uniform: [0.9, 1]}
  epochs: {randint: [2, 4]}
  layers: [{layer: dense, units: {choice: [16, 32]}}]
seed: {grid: [1, 2, 3]}
stop: {iterations: 18}
tune: {samples: 20}
"""


def sweep(text: str = FILE, **changes: object) -> Sweep:
    data = experiment.parse_yaml(text, "file")
    return Sweep.parse(
        experiment.override(data, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])
    )


def test_draws_lie_in_their_ranges_and_go_through_the_grid():
    s = sweep()
    drawn = [s.draw(number) for number in range(s.total)]
    assert s.total == 60
    assert [d["seed"] for d in drawn[:6]] == [1, 2, 3, 1, 2, 3]
    assert all(1e-5 <= d["algorithm.lr"] <= 1e-3 for d in drawn)
    assert {d["algorithm.epochs"] for d in drawn} == {2, 3, 4}  # both ends
    assert {d["algorithm.layers.0.units"] for d in drawn} == {16, 32}
    below = np.mean([d["algorithm.lr"] < 1e-4 for d in drawn])
    assert 0.3 < below < 0.7  # half of a logarithmic range, not a tenth


def test_the_same_seed_draws_the_same_and_more_samples_only_add():
    assert [sweep().draw(i) for i in range(60)] == [sweep(tune__samples=40).draw(i) for i in range(60)]
    other = sweep(seed="5")
    assert other.draw(0) != sweep(seed="6").draw(0)


def test_a_trial_is_an_ordinary_experiment():
    s = sweep()
    values = s.draw(4)
    e = s.experiment(values)
    assert e.seed == 2
    assert e.algorithm["lr"] == values["algorithm.lr"]
    assert e.algorithm["layers"] == [{"layer": "dense", "units": values["algorithm.layers.0.units"]}]
    assert e.to_builtins() == experiment.Experiment.parse(e.to_builtins()).to_builtins()
    assert s.data["algorithm"]["lr"] == {"loguniform": [1e-5, 1e-3]}  # the file is left alone


def test_written_and_read_again(tmp_path):
    import yaml

    s = sweep()
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(s.to_builtins(), sort_keys=False))
    assert plan.read(tmp_path / "sweep.yaml") == s


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algorithm__lr": "{loguniform: [1e-3]}"}, r"algorithm\.lr: .*two numbers, its low and its high end"),
        ({"algorithm__lr": "{loguniform: [1e-3, 1e-5]}"}, "low end must be below"),
        ({"algorithm__lr": "{uniform: [1, 1]}"}, "low end must be below"),
        ({"algorithm__lr": "{uniform: [0, .inf]}"}, "low end must be below"),
        ({"algorithm__lr": "{loguniform: [0, 1]}"}, "logarithmic range begins above 0"),
        ({"algorithm__lr": "{loguniform: [a, b]}"}, "two numbers"),
        ({"algorithm__lr": "{uniform: [false, true]}"}, "two numbers"),
        ({"algorithm__epochs": "{randint: [1.5, 3]}"}, "two whole numbers"),
        ({"algorithm__lr": "{choice: []}"}, "write a list"),
        ({"algorithm__lr": "{choice: 3}"}, "write a list"),
        ({"algorithm__lr": "{uniform: [0, 1], log: true}"}, "has one key"),
        ({"algorithm__lr": "{choice: [1, {uniform: [0, 1]}]}"}, "plain values"),
        (
            {"algorithm__lr": "{logunifrom: [1e-5, 1e-3]}"},
            r"algorithm\.lr: there is no 'logunifrom', did you mean log",
        ),
        ({"algorithm__lr": "{choices: [1e-5, 1e-3]}"}, "did you mean choice"),
        ({"rollout__worker": "{choice: [0, 1]}"}, r"unknown key rollout\.worker: did you mean rollout\.workers"),
        (
            {"rollout__envs": "{choice: [1, many]}"},
            r"rollout\.envs: expected `int`, got `str` \(with .*envs = many",
        ),
        ({"rollout__envs": "{randint: [0, 4]}"}, r"rollout\.envs: expected `int` >= 1"),
        ({"stop__iterations": "{choice: [1, 2]}"}, r"stop\.iterations cannot be searched: trials are compared at"),
        ({"out": "{choice: [a, b]}"}, "out cannot be searched"),
        ({"runner": "{choice: [local, ray]}"}, "runner cannot be searched"),
        ({"stop": "{}"}, "trials would never end"),
        ({"stop": "{return: 475}"}, "asha, which compares trials at equal parts of their budget"),
        ({"tune__sample": 3}, r"unknown key tune\.sample: did you mean tune\.samples"),
        ({"tune__samples": 0}, r"tune\.samples: expected `int` >= 1"),
        ({"tune__scheduler": "hyperband"}, r"tune\.scheduler is 'hyperband': choose one of "),
        ({"tune": 8}, "tune is 8, but a group of keys: samples, scheduler"),
        ({"tune__metric": "episode/return_recnt"}, "did you mean episode/return_recent"),
        ({"tune__metric": "evaluation/return_mean"}, r"nothing is evaluated: set evaluation\.every"),
        ({"tune__metric": "accuracy"}, "no row has 'accuracy'"),
        ({"tune__grace": 18}, r"tune\.grace is 18, but trials end at 18"),
        ({"tune__search": "optuna"}, "seed: optuna does not go through a grid: write choice"),
        ({"tune__scheduler": "pbt"}, "seed: pbt does not go through a grid"),
        ({"tune__scheduler": "pbt", "tune__search": "optuna", "seed": 1}, "optuna has nothing to do"),
        ({"tune__scheduler": "pbt", "seed": "{choice: [1, 2]}"}, "seed: pbt copies .* a trial that has begun cannot"),
        ({"tune__scheduler": "pbt", "seed": 1, "tune__samples": 1}, "needs 2 at least"),
        ({"tune__scheduler": "pbt", "seed": 1, "tune__parallel": 2}, "take turns"),
    ],
)
def test_mistakes_are_named(change, says):
    with pytest.raises(InputError, match=says):
        sweep(**change)


GRIDS = "{game: CartPole-v1, algorithm: {name: dqn}, seed: {grid: [1, 2]}, stop: {steps: 9}, tune: {samples: 2}}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{game: CartPole-v1, algorithm: {name: dqn}, stop: {steps: 9}, tune: {samples: 3}}", "nothing is searched"),
        (GRIDS, r"all searched values are grids: .*seed: \{grid: \[1, 2, 3\]\}"),
        (GRIDS.replace(", tune: {samples: 2}", ", source: store, store: s"), r"set evaluation\.every"),
    ],
)
def test_sweeps_that_make_no_sense(text, says):
    with pytest.raises(InputError, match=says):
        sweep(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algorithm__lrr": "{choice: [1e-4, 1e-3]}"}, r"unknown key algorithm\.lrr: did you mean algorithm\.lr\?"),
        ({"algorithm__gamma": "{uniform: [0.9, 1.5]}"}, r"algorithm\.gamma: expected `float` <= 1.0 .*gamma = 1\.5"),
        ({"algorithm__minibatch": "{choice: [64, 99999]}"}, r"a minibatch of 99999 is larger .*minibatch = 99999"),
        ({"algorithm__name": "{choice: [ppo, pp]}"}, "no algorithm 'pp'"),
        ({"tune__scheduler": "pbt", "seed": 1}, r"layers\.0\.units: pbt copies .* which changes the network"),
    ],
)
def test_what_the_algorithm_refuses_is_named_with_the_values(change, says):
    with pytest.raises(InputError, match=says):
        sweep(**change).check()


def test_pbt_may_change_what_leaves_the_learner_as_it_is():
    sweep(tune__scheduler="pbt", seed=1, algorithm__layers="[{layer: dense, units: 16}]").check()


def test_the_metric_is_the_evaluation_where_there_is_one():
    assert sweep().tune.metric == "episode/return_recent"
    assert sweep(evaluation__every=2).tune.metric == "evaluation/return_mean"
    assert sweep(tune__metric="loss/value", tune__mode="min").tune.metric == "loss/value"


def test_the_budget_is_the_stop_condition():
    assert sweep().budget == ("iteration", 18)
    assert sweep().grace(9) == 2
    assert sweep(stop__steps=9000).budget == ("steps", 9000)
    assert sweep(tune__grace=4).grace(9) == 4


def test_a_sweep_is_not_trained():
    for text in (FILE, "{game: CartPole-v1, algorithm: {name: dqn}, tune: {}}"):
        with pytest.raises(InputError, match=r"this is a sweep .*use `sparring sweep`"):
            experiment.Experiment.parse(experiment.parse_yaml(text, "file"))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("sweep-*.yaml")), ids=lambda path: path.stem)
def test_ready_files(path):
    plan.read(path).check()


def test_values_are_searched_anywhere():
    data = {"a": {"choice": [1]}, "b": [{"c": {"uniform": [0, 1]}}], "d": {"e": {"model": {"sizes": [64, 64]}}}}
    assert list(find(data)) == [Axis(("a",), "choice", (1,)), Axis(("b", 0, "c"), "uniform", (0.0, 1.0))]


def test_the_journal_is_read_as_it_was_written_and_survives_a_cut_line(tmp_path):
    journal = Journal(tmp_path, "m")
    journal.add(Begun(0, {"lr": 1.0}), Begun(1, {"lr": 2.0}), Copied(1, 0, 7, {"lr": 3.0}))
    journal.trials[0].note({"iteration": 3.0, "steps": 30.0, "time/total_s": 1.5, "m": 9.0}, "m")
    journal.add(journal.trials[0].ended("stopped"))
    with journal.path.open("a") as file:
        file.write('{"event":"ended","numb')
    for again in (Journal(tmp_path, "m"), Journal(tmp_path, "m")):
        first, second = again.trials.values()
        assert first == TrialStatus(0, {"lr": 1.0}, "stopped", 9.0, 3, 30, 1.5)
        assert (second.values, second.source, second.copies) == ({"lr": 3.0}, 0, 1)
        assert list(again.left()) == [second]
    journal.add(Ended(1, "failed", "why"))  # the cut line is gone, so this one is whole
    assert Journal(tmp_path, "m").trials[1].cause == "why"
    journal.path.write_text("nonsense\n")
    with pytest.raises(InputError, match=r"journal\.jsonl is damaged"):
        Journal(tmp_path, "m")


def test_the_command_line_loads_no_ray():
    code = (
        "import sys, sparring.cli.entry; print([m for m in ('ray', 'jax', 'optuna', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_who_reads_the_results_while_they_are_written_reads_whole_ones(tmp_path):
    s = sweep()
    trials = [TrialStatus(number, s.draw(number)) for number in range(2)]
    results.write_all(s, tmp_path, trials[:1])
    names = ("results.csv", "results.md")
    with ExitStack() as held:
        reading = {name: held.enter_context((tmp_path / name).open()) for name in names}
        before = {name: (tmp_path / name).read_text() for name in names}
        results.write_all(s, tmp_path, trials)
        assert {name: file.read() for name, file in reading.items()} == before
    assert all((tmp_path / name).read_text() != before[name] for name in names)
