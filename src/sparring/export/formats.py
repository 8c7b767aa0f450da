"""The forms in which a policy leaves: one entry each. `sparring export RUN --to FORMAT` finds ours by name and others
as `module:Class`; the registry publishes and clients download by the same table.

A new format is a class with a `suffix` and a `render`; it is made without arguments. What it cannot express it refuses
with `Unrenderable`. With a `load` its files can be compared with the policy, and timed. Formats that need nothing but
rows of numbers are written from `networks.plain`.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from sparring import plugins
from sparring.errors import InputError
from sparring.export.given import Given
from sparring.files import write_whole
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.policy import Policy

__all__ = ["FORMATS", "Format", "Given", "Runner", "find_format", "format_of", "load", "render", "write"]

FORMATS = {
    "onnx": "sparring.export.onnx_file:Onnx",
    "onnx-int8": "sparring.export.onnx_file:OnnxInt8",
    "tflite": "sparring.export.tflite_file:TFLite",
    "tflite-int8": "sparring.export.tflite_file:TFLiteInt8",
    "c": "sparring.export.c_file:C",
    "c-int8": "sparring.export.c_file:CInt8",
    "keras": "sparring.export.keras_file:Keras",
    "h5": "sparring.export.keras_file:H5",
    "safetensors": "sparring.export.safetensors_file:Safetensors",
}


class Format(Protocol):
    """A `render(policy)` alone is enough. One that takes more says in `takes` which fields of `Given`, or "given" for
    all of it. It gets these as keyword arguments. `calibrated = True` says that it needs observations."""

    suffix: str  # of the file, such as ".onnx"

    def render(self, policy: Policy) -> bytes | Mapping[str, bytes]:
        """The file, or several by name. Names may have folders: `model/weights.bin`."""


class Runner(Protocol):
    """A file of a policy, loaded to act, one observation at a time. What is to be timed is `run` alone."""

    def prepare(self, obs: Array) -> Any:
        """A column of one observation → what `run` takes."""

    def run(self, ready: Any) -> Any:
        """The runtime's call and nothing else. What it gives may be overwritten by the next call."""

    def action(self, found: Any) -> Array:
        """What `run` gave → a column of one greedy action, as the game takes it."""

    def outputs(self, found: Any) -> Array | None:
        """What `run` gave → the head's numbers, (1, n), as `networks.plain` has them; None: the file does not tell."""

    def value(self, found: Any) -> float | None:
        """What `run` gave → the state's value, where the file has one."""


def find_format(name: str) -> Any:
    """The format, made.

    :raises InputError: there is no such format, or it is not what one has to be.
    """
    found = plugins.find("format", name, FORMATS)
    suffix = getattr(found, "suffix", None)
    if not (isinstance(found, type) and isinstance(suffix, str) and callable(getattr(found, "render", None))):
        raise InputError(f"format {name!r} is {found!r}: it has to be a class with a `suffix` and a `render(policy)`")
    return found()


def render(name: str, policy: Policy, stem: str, given: Given = Given()) -> dict[str, bytes]:
    """A policy's files in a format, by name: `stem` and the format's suffix, or the names that it gives.

    :raises InputError: there is no such format, it gives something else than files, or lacks what it needs.
    """
    form = find_format(name)
    takes = getattr(form, "takes", ())
    if given.value is not None and not {"value", "given"} & {*takes}:
        raise InputError(f"format {name!r} has no place for a value: leave it out")
    found = form.render(policy, **{key: given if key == "given" else getattr(given, key) for key in takes})
    if not isinstance(found, bytes | Mapping):
        raise InputError(
            f"format {name!r} gives {type(found).__name__}: render(policy) gives bytes, or names and bytes"
        )
    files = {f"{stem}{form.suffix}": found} if isinstance(found, bytes) else dict(found)
    for path, content in files.items():
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or not isinstance(content, bytes):
            raise InputError(f"format {name!r} gives {path!r}: files have a name within their folder, and bytes")
    return files


def format_of(path: Path) -> str:
    """Of our formats the one that a file's name ends like.

    :raises InputError: none.
    """
    ends = {name: find_format(name).suffix for name in FORMATS}
    fitting = [name for name, suffix in ends.items() if path.name.endswith(suffix)]
    if not fitting:
        raise InputError(f"{path} is of no format that we know: files end in {', '.join(sorted(set(ends.values())))}")
    return max(fitting, key=lambda name: len(ends[name]))


def load(path: str | Path, game: Game, name: str | None = None, *, threads: int = 1) -> Runner:
    """A file, ready to act. Files of others are taken as well where they have the inputs and outputs of the game.

    :param game: What it shall play.
    :param name: The format's; None: by the file's name.
    :raises InputError: it cannot be loaded, or does not fit the game.
    """
    path = Path(path)
    name = format_of(path) if name is None else name
    form = find_format(name)
    if not callable(getattr(form, "load", None)):
        raise InputError(f"format {name!r} has no `load`: its files cannot be played here")
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    found: Runner = form.load(path, game, threads=threads)
    return found


def write(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Into a folder, which is made. Each file is there whole or not at all; one of the same name is replaced.

    :raises InputError: it cannot be written there.
    """
    paths = [folder / name for name in files]
    try:
        for path, content in zip(paths, files.values(), strict=True):
            write_whole(path, content, parents=True, shared=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return paths
