"""Who learns in a run: the one place that decides. Everything behind it asks the `Trainee`."""

import importlib
from typing import Any

from sparring import algorithms, plugins
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.training.offline import Offline
from sparring.training.protocol import Trainee
from sparring.training.trainee import OffPolicy, OnPolicy

__all__ = ["trainee_class"]

RLLIB = "rllib/"  # what the names of RLlib's algorithms begin with


def trainee_class(experiment: Experiment) -> type[Trainee]:
    """`module:Class` is an algorithm, or a trainee itself: whatever learns in a way that is none of ours.

    :raises InputError: there is no such algorithm, or RLlib is not installed.
    """
    if experiment.name.startswith(RLLIB):
        try:
            bridge: type[Trainee] = importlib.import_module("sparring.rllib.bridge").Bridge  # it knows us, too
        except ImportError as error:
            raise InputError(f"rllib/… needs RLlib ({error}): pip install 'sparring[rllib]'") from error
        return bridge
    if plugins.is_outside(experiment.name):
        found = plugins.find("algorithm", experiment.name, {})
        if Trainee in getattr(found, "__mro__", ()):
            return _whole(experiment.name, found)
    algorithm = algorithms.find(experiment.name)
    if experiment.source == "store":
        return Offline
    return OnPolicy if algorithm.on_policy else OffPolicy


def _whole(name: str, found: Any) -> type[Trainee]:
    if missing := sorted(found.__abstractmethods__):
        raise InputError(f"{name!r} has no {', '.join(missing)}: see sparring.training.protocol.Trainee")
    trainee: type[Trainee] = found
    return trainee
