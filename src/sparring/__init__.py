"""Sparring trains game bots from play: play → record → store → train → publish → play.

Importing this package is free: the client is `sparring.client`, the training core loads only when it is used.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Experiment":
        from sparring.experiment import Experiment

        return Experiment
    if name == "train":
        from sparring.training.loop import train

        return train
    raise AttributeError(f"module 'sparring' has no attribute {name!r}")
