"""The formats `c` and `c-int8`: one C99 file for microcontrollers and engines without a runtime (`export/c.py` writes
it). Here it is compiled with the machine's own compiler, and loaded."""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import InputError, NotInstalled
from sparring.export.given import Given
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.plain import Plain, Value, pixels
from sparring.networks.policy import Policy
from sparring.networks.spec import action_size

__all__ = ["C", "CInt8", "compiler"]

FLAGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-O3", "-march=native", "-fPIC", "-shared")
FAST = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")  # sums in any order


class C:
    suffix = ".c"
    takes: tuple[str, ...] = ("value",)

    def render(self, policy: Policy, value: Value | None = None) -> bytes:
        from sparring.export import c

        return c.render(Plain.of(policy, value))

    def load(self, path: Path, game: Game, *, threads: int = 1) -> "CRunner":
        """Its code runs here: a file from a stranger is read before."""
        return CRunner(path, game)


class CInt8(C):
    suffix = ".int8.c"
    takes = ("given",)
    calibrated = tunes = True

    def render(self, policy: Policy, given: Given) -> bytes:  # type: ignore[override]
        from sparring.export import c, whole_numbers

        return c.render_whole(whole_numbers.of(policy, given))


class CRunner:
    """Arrays are the runner's own, and are written anew by each call."""

    def __init__(self, path: Path, game: Game) -> None:
        self._game, text = game, path.read_text(encoding="utf-8", errors="replace")
        if "void policy_act(" not in text:
            raise InputError(f"{path} is no policy in C: it has no function policy_act")
        self._function = _compiled(path).policy_act
        self._function.restype = None
        self._has_value = "float *value)" in text
        action = game.action
        self._action = np.zeros(action.element.shape or (1,), action.element.base)
        self._outputs = np.zeros((1, action_size(action)), np.float32)
        self._value = np.zeros(1, np.float32)
        arrays = [self._action, self._outputs] + [self._value] * self._has_value
        self._pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]

    def prepare(self, obs: Array) -> Any:
        x = pixels(self._game, obs)
        return x, x.ctypes.data_as(ctypes.c_void_p)

    def run(self, ready: Any) -> "CRunner":
        self._function(ready[1], *self._pointers)
        return self

    def action(self, found: Any) -> Array:
        return self._action.reshape(1, *self._game.action.element.shape).copy()

    def outputs(self, found: Any) -> Array:
        return self._outputs.copy()

    def value(self, found: Any) -> float | None:
        return float(self._value[0]) if self._has_value else None


def compiler() -> str:
    """:raises NotInstalled: there is none."""
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NotInstalled("there is no C compiler here to try the file with: install gcc")
    return found


def _compiled(path: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:  # a library stays loaded when its file is gone
        library = Path(folder) / "policy.so"
        done = subprocess.run(
            [compiler(), *FLAGS, *FAST, "-o", str(library), str(path), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise InputError(f"{path} does not compile: {done.stderr.strip()[-1000:]}")
        return ctypes.CDLL(str(library))
