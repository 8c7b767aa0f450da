"""The forms in which a policy leaves: one entry each. `sparring export RUN --to FORMAT` finds ours by name and others
as `module:Class`.

A new format is a class with a `suffix` and a `render`; it is made without arguments. What it cannot express it refuses
with `Unrenderable`. See `networks.layers.Layer` for layers in a form that has code of its own for each.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

from sparring import plugins
from sparring.errors import InputError
from sparring.networks.policy import Policy

__all__ = ["FORMATS", "Format", "Onnx", "Safetensors", "find_format", "render", "write"]

FORMATS = {"onnx": "sparring.export.formats:Onnx", "safetensors": "sparring.export.formats:Safetensors"}


class Format(Protocol):
    suffix: str  # of the file, such as ".onnx"

    def render(self, policy: Policy) -> bytes | Mapping[str, bytes]:
        """The file, or several by name. Names may have folders: `model/weights.bin`."""


class Onnx:
    """To play, with any ONNX runtime (`export/onnx.py`)."""

    suffix = ".onnx"

    def render(self, policy: Policy) -> bytes:
        from sparring.export import onnx  # it takes a while to load

        return onnx.render(policy)


class Safetensors:
    """To train on from (`export/weights.py`)."""

    suffix = ".safetensors"

    def render(self, policy: Policy) -> bytes:
        from sparring.export import weights

        return weights.save(policy)


def find_format(name: str) -> Format:
    """:raises InputError: there is no such format, or it is not what one has to be."""
    found = plugins.find("format", name, FORMATS)
    suffix = getattr(found, "suffix", None)
    if not (isinstance(found, type) and isinstance(suffix, str) and callable(getattr(found, "render", None))):
        raise InputError(f"format {name!r} is {found!r}: it has to be a class with a `suffix` and a `render(policy)`")
    made: Format = found()
    return made


def render(name: str, policy: Policy, stem: str) -> dict[str, bytes]:
    """A policy's files in a format, by name: `stem` and the format's suffix, or the names that it gives.

    :raises InputError: there is no such format, or it gives something else than files.
    """
    form = find_format(name)
    found = form.render(policy)
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


def write(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Into a folder, which is made. Each file is there whole or not at all; one of the same name is replaced."""
    paths = [folder / name for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_bytes(content)
        new.replace(path)
    return paths
