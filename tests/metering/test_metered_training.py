"""What a training says about its own costs: columns of its metrics, a panel of its plot."""

import pytest

from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.runs import plot
from sparring.runs.run import Run
from sparring.training import loop

SMALL = {
    "game": "CartPole-v1",
    "algorithm": {
        "name": "ppo",
        "steps": 512,
        "minibatch": 64,
        "epochs": 2,
        "layers": [{"layer": "dense", "units": 8}],
    },
    "stop": {"iterations": 6},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("metered") / "run"
    return loop.train(SMALL | {"out": str(out), "metering": {"every": 0.02, "meter": "echo 30", "estimate": False}})


def test_usage_and_energy_are_columns(run):
    rows = run.rows()
    metered = [row for row in rows if "energy/meter_j" in row]
    assert metered
    for row in metered:
        assert 0 <= row["usage/cpu"] <= 1.5
        assert row["usage/memory_mb"] > 10
    joules, seconds = sum(row["energy/meter_j"] for row in metered), rows[-1]["time/total_s"]
    assert 0 < joules <= 30 * (seconds + 1)
    assert not {name for row in rows for name in row if name.startswith(("usage/gpu", "usage/vram", "energy/estimate"))}


def test_they_are_drawn(run, tmp_path, monkeypatch):
    drawn = []
    inner = plot._draw_usage
    monkeypatch.setattr(plot, "_draw_usage", lambda panels, *more: (inner(panels, *more), drawn.append(panels)))
    plot.plot([run], tmp_path / "figure.png")
    (panels,) = drawn
    used, memory, power = panels
    assert [axes.get_ylabel() for axes in panels] == ["utilisation of the machine, %", "memory, GB", "power, W"]
    assert all(axes.lines for axes in (used, memory))
    rows = [row for row in run.rows() if "energy/meter_j" in row]
    assert len(power.lines) == (len(rows) > 1)
    for line in power.lines:
        assert 0 < max(line.get_ydata()) < 100


def test_a_run_without_them_has_no_panel(run, tmp_path, monkeypatch):
    rows = [{k: v for k, v in row.items() if not k.startswith(("usage/", "energy/"))} for row in run.rows()]
    monkeypatch.setattr(Run, "rows", lambda self: rows)
    monkeypatch.setattr(plot, "_draw_usage", lambda *panels: pytest.fail("there is nothing to draw"))
    plot.plot([run], tmp_path / "figure.png")


def test_a_meter_that_does_not_work_is_refused_before_there_is_a_run(tmp_path):
    with pytest.raises(InputError, match="a number is expected"):
        loop.train(SMALL | {"out": str(tmp_path / "run"), "metering": {"meter": "echo dark"}})
    assert not (tmp_path / "run").exists()


def test_it_can_be_turned_off_and_on_again(tmp_path):
    experiment = Experiment.parse(SMALL | {"out": str(tmp_path / "run"), "stop": {"iterations": 1}})
    loop.train(experiment.to_builtins() | {"metering": {"every": 0}})
    assert not [name for row in Run(tmp_path / "run").rows() for name in row if name.startswith(("usage/", "energy/"))]
    changes = ["metering.every=0.01", "metering.estimate=false", "stop.iterations=4"]
    rows = loop.resume(tmp_path / "run", changes).rows()
    assert [row for row in rows if "usage/cpu" in row]


def test_power_is_of_the_time_in_which_it_was_counted():
    """An evaluation's joules are in the row that it belongs to, whose time is from before it."""
    rows = [{"time/total_s": float(i), "energy/meter_j": 30.0} for i in range(5)]
    rows += [{"time/total_s": 5.0, "time/evaluate_s": 100.0, "energy/meter_j": 3030.0}]
    rows += [{"time/total_s": 106.0, "energy/meter_j": 30.0}]
    found = plot._watts(rows, "energy/meter_j")
    assert found[-1][0] == 106.0
    assert {watts for _, watts in found} == {30.0}
    assert plot._watts([], "energy/meter_j") == []
