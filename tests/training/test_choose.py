"""Who learns in a run is decided in one place, and loop, sweeps and measurements ask for nothing but a `Trainee`."""

import inspect
import sys
from typing import Any

import pytest

from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.sweep.plan import Sweep
from sparring.training.choose import trainee_class
from sparring.training.offline import Offline
from sparring.training.protocol import Trainee
from sparring.training.trainee import OffPolicy, OnPolicy

RLLIB: dict[str, Any] = {"name": "rllib/PPO", "train_batch_size_per_learner": 256, "minibatch_size": 64}


def experiment(name: str, **changes: Any) -> Experiment:
    return Experiment(game="CartPole-v1", algorithm={"name": name}, **changes)


def test_ours() -> None:
    assert trainee_class(experiment("ppo")) is OnPolicy
    assert trainee_class(experiment("dqn")) is OffPolicy
    assert trainee_class(experiment("dqn", source="store", store="x")) is Offline
    with pytest.raises(InputError, match="no algorithm 'dqm', did you mean 'dqn'"):
        trainee_class(experiment("dqm"))


def test_rllibs_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparring.rllib.bridge", None)
    with pytest.raises(InputError, match=r"rllib/… needs RLlib .*pip install 'sparring\[rllib\]'"):
        trainee_class(experiment("rllib/PPO"))


@pytest.mark.parametrize("name", ["ppo", "dqn", "bc", "rllib/PPO"])
def test_each_has_all_that_is_asked_for(name: str) -> None:
    """As mypy sees it, and once more when it runs: a parameter that one of them has not would be noticed late."""
    if name.startswith("rllib/"):
        pytest.importorskip("torch")
    source: Any = {"source": "store", "store": "x"} if name == "bc" else {}
    kind = trainee_class(experiment(name, **source))
    assert Trainee in kind.__mro__
    assert not getattr(kind, "__abstractmethods__", None)
    for member, asked in vars(Trainee).items():
        if inspect.isfunction(asked) and (member == "__init__" or not member.startswith("_")):
            assert list(inspect.signature(getattr(kind, member)).parameters) == list(
                inspect.signature(asked).parameters
            ), member


def test_a_sweep_of_rllibs_algorithms_is_checked_as_any() -> None:
    pytest.importorskip("torch")
    data = {"game": "CartPole-v1", "stop": {"iterations": 1}, "tune": {"samples": 2}}
    Sweep.parse(data | {"algorithm": RLLIB | {"lr": {"loguniform": [1e-5, 1e-3]}}}).check()
    with pytest.raises(InputError, match=r"unknown key algorithm\.gama: did you mean algorithm\.gamma.*with gama = "):
        Sweep.parse(data | {"algorithm": RLLIB | {"gama": {"choice": [0.9, 0.99]}}}).check()
    pbt = {"tune": {"samples": 2, "scheduler": "pbt"}}
    with pytest.raises(InputError, match=r"cannot be put into another, as pbt does: use tune\.scheduler: asha"):
        Sweep.parse(data | pbt | {"algorithm": RLLIB | {"lr": {"loguniform": [1e-5, 1e-3]}}}).check()
