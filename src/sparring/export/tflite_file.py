"""The formats `tflite` and `tflite-int8`: for LiteRT (TensorFlow Lite) on phones, small computers and the Coral Edge
TPU (`export/tflite.py` writes them). Files of others are played, too."""

from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import InputError
from sparring.export.foreign import ForeignRunner, Tensor, check_game, input_of, output_of
from sparring.export.given import Given
from sparring.export.whole_numbers import into
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.plain import Plain, Value, decide, pixels
from sparring.networks.policy import Policy

__all__ = ["TFLite", "TFLiteInt8"]


class TFLite:
    suffix = ".tflite"
    takes: tuple[str, ...] = ("value",)

    def render(self, policy: Policy, value: Value | None = None) -> bytes:
        from sparring.export import tflite

        return tflite.render(Plain.of(policy, value))

    def load(
        self, path: Path, game: Game, *, threads: int = 1, delegates: list[Any] | None = None
    ) -> "TFLiteRunner | ForeignRunner":
        """:param delegates: The Edge TPU's: the file has to be compiled for it."""
        from sparring.export import tflite_check

        about = tflite_check.check(data := path.read_bytes(), path, edge_tpu=bool(delegates))
        interpreter = _interpreter(data, path, threads, delegates)
        if about is None:
            return _foreign(interpreter, game, path)
        check_game(about["game"], game, path)
        try:
            return TFLiteRunner(interpreter, game, about)
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"{path} is a damaged TFLite file: what it says of itself lacks {error}") from error


class TFLiteInt8(TFLite):
    suffix = ".int8.tflite"
    takes = ("given",)
    calibrated = tunes = True

    def render(self, policy: Policy, given: Given) -> bytes:  # type: ignore[override]
        from sparring.export import tflite, whole_numbers

        return tflite.render_whole(whole_numbers.of(policy, given))


class TFLiteRunner:
    """What `run` gives are the interpreter's own arrays."""

    def __init__(self, interpreter: Any, game: Game, about: dict[str, Any]) -> None:
        self._game, self._bound = game, about["bound"]
        (given,), found = interpreter.get_input_details(), interpreter.get_output_details()
        self._tensors = {_name(each): _tensor(each) for each in found}
        self._invoke, self._set, self._index = interpreter.invoke, interpreter.set_tensor, given["index"]
        self._get, self._places = interpreter.get_tensor, {_name(each): each["index"] for each in found}
        self._first = "action" if "action" in self._places else "outputs"
        self._whole = given["dtype"] == np.int8
        if self._whole:
            shape = tuple(given["shape"][1:])
            self._factor, self._shift = (_of_shape(about[key], shape) for key in ("factor", "shift"))
            self._as_bytes = (self._factor.tolist(), self._shift.tolist()) == ([1.0], [-128.0])

    def prepare(self, obs: Array) -> Array:
        x = pixels(self._game, obs)
        if not self._whole:
            return x
        if self._as_bytes and x.dtype == np.uint8:
            return (x ^ 128).view(np.int8)  # 128 less, without the way through floats: most of a small network's time
        return into(x, self._factor, self._shift)

    def run(self, ready: Array) -> Array:
        self._set(self._index, ready)
        self._invoke()
        return self._get(self._places[self._first])

    def action(self, found: Array) -> Array:
        if self._first == "outputs" and self._bound == "argmax":
            return decide(self._game, found, "argmax")  # the largest is so in whole numbers, too
        if self._first == "outputs":
            return decide(self._game, self._floats("outputs", found), self._bound)
        return found.astype(self._game.action.element.base).reshape(1, *self._game.action.element.shape)

    def outputs(self, found: Array) -> Array:
        return self._floats("outputs", found if self._first == "outputs" else self._get(self._places["outputs"]))

    def value(self, found: Array) -> float | None:
        if "value" not in self._places:
            return None
        return float(self._floats("value", self._get(self._places["value"]))[0, 0])

    def _floats(self, name: str, found: Array) -> Array:
        tensor = self._tensors[name]
        return (found.astype(np.float32) - tensor.zero) * np.float32(tensor.scale) if tensor.scale else found


def _of_shape(numbers: list[float], shape: tuple[int, ...]) -> Array:
    array = np.array(numbers, np.float32)
    return array if array.size == 1 else array.reshape(shape)


def _interpreter(data: bytes, path: Path, threads: int, delegates: list[Any] | None) -> Any:
    from sparring.export.tflite import MISSING

    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise InputError(MISSING) from error
    try:
        made = Interpreter(model_content=data, num_threads=threads, experimental_delegates=delegates)
        made.allocate_tensors()
        made.invoke()
    except (ValueError, RuntimeError) as error:
        raise InputError(f"LiteRT cannot run {path}: {error}") from error
    return made


def _foreign(interpreter: Any, game: Game, path: Path) -> ForeignRunner:
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    into = input_of([_tensor(each) for each in inputs], game, path)
    i, act = output_of([_tensor(each) for each in outputs], game, path)

    def call(x: Array) -> Array:
        interpreter.set_tensor(inputs[0]["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(outputs[i]["index"])

    return ForeignRunner(into, call, act)


def _name(details: dict[str, Any]) -> str:
    return str(details["name"])


def _tensor(details: dict[str, Any]) -> Tensor:
    scale, zero = details["quantization"]
    shape = tuple(int(n) for n in details["shape"])
    return Tensor(_name(details), shape, np.dtype(details["dtype"]), float(scale), int(zero))
