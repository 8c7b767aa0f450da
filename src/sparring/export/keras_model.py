"""A policy as a Keras model: `obs` → `action`, `outputs` and, where there is one, `value`. It is made with Keras on
JAX, and of layers that every backend has. The older form, .h5, has layers alone, so no action: its `outputs` are what
`networks.plain.decide` makes one of, in the way that the model's name says."""

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import InputError
from sparring.games import Box, Discrete
from sparring.games.spec import Array
from sparring.networks.plain import Plain
from sparring.networks.plain_steps import Activate, Affine, Convolve, Normalise, Step
from sparring.networks.spec import choices, scaling

__all__ = ["MISSING", "compiled", "load_keras", "render"]

MISSING = "Keras files need Keras and h5py: pip install 'sparring[edge]'"


def load_keras() -> Any:
    """:raises InputError: it is not installed."""
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras asks for TensorFlow otherwise
    try:
        import h5py  # noqa: F401
        import keras
    except ImportError as error:
        raise InputError(MISSING) from error
    return keras


def render(plain: Plain, suffix: str) -> bytes:
    keras = load_keras()
    model = _model(keras, plain, act=suffix != ".h5")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # .h5 is its older form, which is meant
        path = Path(folder) / f"policy{suffix}"
        model.save(path)
        return path.read_bytes()


def _model(keras: Any, plain: Plain, *, act: bool) -> Any:
    weights: dict[str, list[Array]] = {}
    obs = keras.Input(plain.shape, name="obs", dtype="uint8" if plain.image else "float32")
    x = _affine(keras, obs, plain.scale, plain.offset, "scaled")
    if plain.clip is not None:
        x = _clipped(keras, x, plain.clip)
    hidden = _steps(keras, plain.steps, x, weights, "hidden")
    out = _steps(keras, (plain.head,), hidden, weights, "outputs")
    outputs = {"outputs": out} | ({"action": _action(keras, plain, out)} if act else {})
    if plain.value:
        value = _steps(keras, plain.value, hidden if plain.shares else x, weights, "value")
        outputs["value"] = value
    model = keras.Model(obs, outputs, name=f"policy_{plain.bound}")
    for name, arrays in weights.items():
        model.get_layer(name).set_weights(arrays)
    return model


def _affine(keras: Any, x: Any, scale: Array, offset: Array, name: str) -> Any:
    def few(array: Array) -> Any:
        flat = np.asarray(array, np.float64).reshape(-1)
        return float(flat[0]) if (flat == flat[0]).all() else np.asarray(array, np.float64).tolist()

    return keras.layers.Rescaling(few(scale), few(offset), name=name)(x)


def _clipped(keras: Any, x: Any, bound: float) -> Any:
    """To ±bound, of layers alone."""
    layers = keras.layers
    above = layers.ReLU(max_value=2 * bound, name="clipped")(layers.Rescaling(1.0, bound, name="above")(x))
    return layers.Rescaling(1.0, -bound, name="back")(above)


def _between(keras: Any, x: Any, low: Any, high: Any) -> Any:
    for bound, ops in ((low, keras.ops.maximum), (high, keras.ops.minimum)):
        bound = np.asarray(bound, np.float32)
        if np.isfinite(bound).any():
            x = ops(x, np.nan_to_num(bound, posinf=3.4e38, neginf=-3.4e38))
    return x


def _steps(keras: Any, steps: tuple[Step, ...], x: Any, weights: dict[str, list[Array]], name: str) -> Any:
    layers = keras.layers
    for i, step in enumerate(steps):
        label = f"{name}_{i}"
        match step:
            case Affine(w, b):
                if len(x.shape) > 2:
                    x = layers.Flatten(name=f"{label}_flat")(x)
                x, weights[label] = layers.Dense(len(b), name=label)(x), [w, b]
            case Convolve(w, b, stride, pads):
                if any(map(any, pads)):
                    x = layers.ZeroPadding2D(pads, name=f"{label}_pad")(x)
                x = layers.Conv2D(len(b), w.shape[:2], stride, name=label)(x)
                weights[label] = [w, b]
            case Normalise(epsilon):
                x = layers.LayerNormalization(epsilon=epsilon, center=False, scale=False, name=label)(x)
            case Activate(function):
                x = layers.Activation(function, name=label)(x)
    return layers.Flatten(name=f"{name}_flat")(x) if len(x.shape) > 2 else x


def _action(keras: Any, plain: Plain, out: Any) -> Any:
    action, ops = plain.game.action, keras.ops
    if isinstance(action, Box):
        s = scaling(action)
        unit = ops.tanh(out) if plain.bound == "tanh" else _between(keras, out, s.unit_low, s.unit_high)
        scaled = keras.layers.Rescaling(s.half.tolist(), s.centre.tolist(), name="in_range")(unit)
        return ops.reshape(_between(keras, scaled, s.low, s.high), (-1, *action.shape))
    start, picks = 0, []
    for n in choices(action):
        picks.append(ops.argmax(out[:, start : start + n], axis=-1))
        start += n
    if isinstance(action, Discrete):
        return ops.add(picks[0], action.start)
    return ops.stack(picks, axis=-1)


def compiled(model: Any) -> Callable[[Array], dict[str, Any]]:
    """The model's call as one program. (By itself Keras calls layer after layer, a hundred times as slowly.)"""
    if load_keras().backend.backend() != "jax":
        return lambda x: model(x, training=False)
    import jax

    learned, others = ([v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables))
    call = jax.jit(lambda x: model.stateless_call(learned, others, x, training=False)[0])

    def run(x: Array) -> dict[str, Any]:
        found: dict[str, Any] = jax.block_until_ready(call(x))  # type: ignore[no-untyped-call]
        return found

    return run
