"""The formats `keras` and `h5`: for Keras and what is built on it (`export/keras_model.py` writes them)."""

from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.plain import Plain, Value, decide, pixels
from sparring.networks.policy import Policy

__all__ = ["H5", "Keras"]


class Keras:
    suffix = ".keras"
    takes = ("value",)

    def render(self, policy: Policy, value: Value | None = None) -> bytes:
        from sparring.export import keras_model

        return keras_model.render(Plain.of(policy, value), self.suffix)

    def load(self, path: Path, game: Game, *, threads: int = 1) -> "KerasRunner":
        """Keras's number of threads is its backend's."""
        from sparring.export import keras_model

        keras = keras_model.load_keras()
        try:
            model = keras.models.load_model(path, compile=False, safe_mode=True)
        except Exception as error:  # Keras's own, and those of zip, JSON and HDF5
            raise InputError(f"Keras cannot load {path}: {error}") from error
        return KerasRunner(model, game, path)


class H5(Keras):
    suffix = ".h5"


class KerasRunner:
    def __init__(self, model: Any, game: Game, path: Path) -> None:
        from sparring.export import keras_model

        expected = pixels(game, np.zeros(1, game.observation.element)).shape
        bound = model.name.removeprefix("policy_")
        if bound not in ("argmax", "tanh", "clip") or tuple(model.input.shape[1:]) != expected[1:]:
            raise InputError(f"{path} is no policy of {game.name}, which has observations of {expected[1:]}")
        self._call, self._game, self._bound = keras_model.compiled(model), game, bound

    def prepare(self, obs: Array) -> Array:
        return pixels(self._game, obs)

    def run(self, ready: Array) -> dict[str, Any]:
        return self._call(ready)

    def action(self, found: dict[str, Any]) -> Array:
        if "action" not in found:
            return decide(self._game, np.asarray(found["outputs"]), self._bound)
        return np.asarray(found["action"]).astype(self._game.action.element.base)

    def outputs(self, found: dict[str, Any]) -> Array:
        return np.asarray(found["outputs"])

    def value(self, found: dict[str, Any]) -> float | None:
        return float(np.asarray(found["value"])[0, 0]) if "value" in found else None
