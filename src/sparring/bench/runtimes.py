"""What a policy can be played with, each behind `export.formats.Runner`: formats bring their own, JAX, NumPy and
RLlib need no file, a Coral Edge TPU is TensorFlow Lite with a delegate."""

import ctypes
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import InputError
from sparring.export import c_file, formats
from sparring.export.formats import Runner
from sparring.export.safetensors_file import PolicyRunner
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.plain import pixels
from sparring.networks.policy import Policy

__all__ = ["RUNTIMES", "JaxRunner", "check", "coral_delegate", "open_runner"]

# Name → the format of its file; none: it plays the policy itself.
RUNTIMES: dict[str, str | None] = {
    "jax": None,
    "numpy": None,
    "onnx": "onnx",
    "onnx-int8": "onnx-int8",
    "tflite": "tflite",
    "tflite-int8": "tflite-int8",
    "coral": "tflite-int8",
    "c": "c",
    "c-int8": "c-int8",
    "rllib": None,
}
EDGE_TPU = "libedgetpu.so.1"


def check(names: Sequence[str]) -> None:
    """:raises InputError: one is unknown, named twice, or cannot be had."""
    if not names:
        raise InputError(f"--runtime names none: choose some of {', '.join(RUNTIMES)}")
    for name in names:
        if name not in RUNTIMES:
            near = difflib.get_close_matches(name, RUNTIMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose some of {', '.join(RUNTIMES)}"
            raise InputError(f"no runtime {name!r}: {hint}")
        form = RUNTIMES[name]
        if form is not None and form not in formats.FORMATS:
            raise InputError(f"runtime {name!r} plays files of the format {form!r}, which this version does not write")
        if name == "coral":
            coral_delegate()
        if form in ("c", "c-int8"):
            c_file.compiler()
        if name == "rllib":
            _require_rllib()
    if len(set(names)) < len(names):
        raise InputError(f"--runtime names one twice: {','.join(names)}")


def _require_rllib() -> None:
    try:
        import ray.rllib  # noqa: F401
    except ImportError as error:
        raise InputError(f"runtime 'rllib' needs RLlib ({error}): pip install 'sparring[rllib]'") from error


def open_runner(
    name: str, game: Game, policy: Policy | None, file: Path | None, threads: int, run: str | None = None
) -> Runner:
    """Ready to act.

    :param policy: For runtimes without a file.
    :param file: Of the runtime's format, or somebody else's.
    :param run: `RUN@40`, for RLlib.
    """
    if name == "rllib":
        from sparring.rllib.runner import RLlibRunner

        assert run is not None
        return RLlibRunner(run, game, threads)
    if file is None:
        assert policy is not None
        return JaxRunner(policy) if name == "jax" else PolicyRunner(policy)
    if name == "coral":
        form = formats.find_format("tflite-int8")
        found: Runner = form.load(file, game, threads=threads, delegates=[coral_delegate()])
        return found
    return formats.load(file, game, RUNTIMES.get(name), threads=threads)


class JaxRunner:
    """The network as it learns, compiled for the first device of JAX; what is timed ends when its numbers are there."""

    def __init__(self, policy: Policy) -> None:
        from sparring.networks.jax_policy import compile_outputs

        self._policy, self._outputs = policy, compile_outputs(policy)

    def prepare(self, obs: Array) -> Array:
        return pixels(self._policy.game, obs)

    def run(self, ready: Array) -> Array:
        return np.asarray(self._outputs(ready))

    def action(self, found: Array) -> Array:
        return self._policy.choose(found, None)

    def outputs(self, found: Array) -> Array:
        return found

    def value(self, found: Array) -> None:
        return None


def coral_delegate(load: Callable[[str], Any] | None = None) -> Any:
    """What runs a file's operators on an Edge TPU.

    :param load: Instead of LiteRT's `load_delegate`.
    :raises InputError: Google's library is not installed, or no Edge TPU is connected.
    """
    try:
        return (load or _load_delegate)(EDGE_TPU)
    except (OSError, ValueError) as error:
        raise InputError(
            f"runtime 'coral': {EDGE_TPU} cannot be loaded ({error}). Install Google's Edge TPU runtime (Debian "
            "package libedgetpu1-std, https://coral.ai/software) and connect the accelerator; the file has to be "
            "compiled for it (edgetpu_compiler)"
        ) from error


def _load_delegate(library: str) -> Any:
    try:
        from ai_edge_litert.interpreter import load_delegate
    except ImportError as error:
        raise InputError("runtime 'coral' needs LiteRT: pip install 'sparring[edge]'") from error
    ctypes.CDLL(library)  # LiteRT's own attempt leaves half an object behind, which complains when it is collected
    return load_delegate(library)
