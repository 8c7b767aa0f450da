"""Versions that are there, and the files that they are made of: what reading and writing a registry share."""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sparring.errors import InputError, SparringError
from sparring.export import weights
from sparring.games.spec import NAME
from sparring.networks.policy import Policy
from sparring.registry.backends import Conflict, Directory, line, open_backend
from sparring.registry.manifest import DEFAULT_MODEL, Manifest

__all__ = ["NotPublished", "RegistryError", "Versions"]

log = logging.getLogger(__name__)
VERSION = re.compile(r"[1-9][0-9]{0,14}")
# What a bucket tells those who read it directly. A pointer may be this old before somebody sees the next version.
POINTER = {"Content-Type": "application/json", "Cache-Control": "public, max-age=5"}
FOREVER = "public, max-age=31536000, immutable"
TYPES = {".json": "application/json", ".md": "text/markdown; charset=utf-8"}
MANIFEST = re.compile(r"games/([^/]+)/models/([^/]+)/([1-9][0-9]{0,14})/manifest\.json")
CHANGING = re.compile(r".*/(latest|ab|aliases/[^/]+)\.json")


class NotPublished(InputError):
    """There is no such version or alias, or no such file in a version."""


class RegistryError(SparringError):
    """The directory or bucket does not answer: no rights, no space, no network."""


class Versions:
    """Published versions by their numbers. `Registry` adds pointers to them, and publishing."""

    def __init__(self, location: str | Path) -> None:
        self._backend = open_backend(str(location))

    def __str__(self) -> str:
        return str(self._backend)

    def check(self) -> None:
        """Before work that would end here: InputError when the address, the credentials or the rights are wrong,
        RegistryError when the place does not answer."""
        try:
            self._backend.check()
        except InputError:
            raise
        except SparringError as error:
            raise RegistryError(str(error)) from error

    def manifest(self, game: str, model: str, version: int) -> Manifest:
        """What is known of a version. NotPublished where there is none."""
        return self._manifest(game, model, version, None)

    def read(self, game: str, model: str, version: int, name: str) -> bytes:
        """The file `name` of a version, as it was published."""
        return self._file(self.manifest(game, model, version), name)

    def policy(self, game: str, model: str, version: int, *, trusted: bool | None = None) -> Policy:
        """To train on from, or to act with in NumPy. `trusted`: see `weights.load`; if not said, a directory is, and a
        bucket, which may be anybody's, is not."""
        trusted = isinstance(self._backend, Directory) if trusted is None else trusted
        return weights.load(self.read(game, model, version, "policy.safetensors"), trusted=trusted)

    def versions(self, game: str, model: str = DEFAULT_MODEL) -> list[int]:
        """Published versions of a model, oldest first."""
        return sorted(version for _, _, version in self._published(folder_of(game, model)))

    def models(self, game: str) -> list[str]:
        """Models of a game that have a version."""
        return sorted({model for _, model, _ in self._published(folder_of(game))})

    def games(self) -> list[str]:
        """Games that have a version of a model."""
        return sorted({game for game, _, _ in self._published("games")})

    # Reading

    def _published(self, folder: str) -> Iterator[tuple[str, str, int]]:
        with self._explained(f"list {folder} in"):
            for found in map(MANIFEST.fullmatch, self._backend.list(folder)):
                if found:
                    yield found[1], found[2], int(found[3])

    def _manifest(self, game: str, model: str, version: int, sha256: str | None) -> Manifest:
        text = self._get(f"{folder_of(game, model)}/{number_of(version)}/manifest.json")
        if text is None:
            raise NotPublished(f"{game} has no version {version} of the model {model!r}")
        if sha256 is not None and sha256_of(text) != sha256:
            raise SparringError(f"the manifest of {game} {model} {version} is not the one that was published")
        try:
            manifest = msgspec.json.decode(text, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SparringError(f"the manifest of {game} {model} {version} is damaged: {error}") from error
        if (manifest.game.name, manifest.model, manifest.version) != (game, model, version):
            raise SparringError(f"the manifest of {game} {model} {version} is another version's")
        return manifest

    def _file(self, manifest: Manifest, name: str) -> bytes:
        what = f"{manifest.game.name} {manifest.model} {manifest.version}"
        if (info := manifest.files.get(name)) is None:
            raise NotPublished(f"{what} has no file {name!r}; it has {', '.join(sorted(manifest.files))}")
        data = self._get(f"{folder_of(manifest.game.name, manifest.model)}/{manifest.version}/{name}")
        if data is None or sha256_of(data) != info.sha256:
            found = "missing" if data is None else f"damaged ({len(data)} bytes, {info.size} were published)"
            raise SparringError(f"{name} of {what} is {found}: use another version, or restore it from a backup")
        return data

    def _whole(self, game: str, model: str, version: int, sha256: str | None = None) -> Manifest | None:
        """Its manifest, if every file is as it was published."""
        try:
            manifest = self._manifest(game, model, version, sha256)
            for name in manifest.files:
                self._file(manifest, name)
        except RegistryError:
            raise  # says nothing about the version
        except SparringError as error:
            log.warning("passing over version %d: %s", version, error)
            return None
        return manifest

    def _get(self, path: str) -> bytes | None:
        with self._explained(f"read {path} in"):
            found = self._backend.get(path)
        return None if found is None else found.data

    # Writing

    def _create(self, path: str, content: bytes) -> None:
        """A file of a version that is ours. It may be there: a write whose answer was lost is sent again."""
        try:
            self._put(path, content, absent=True)
        except Conflict as error:
            if self._get(path) != content:
                raise SparringError(
                    f"{path} was written by somebody else: nothing but publishers may write there"
                ) from error

    def _put(self, path: str, content: bytes, *, absent: bool = False, tag: str = "") -> None:
        kind = TYPES.get(path[path.rfind(".") :], "application/octet-stream")
        headers = POINTER if CHANGING.fullmatch(path) else {"Content-Type": kind, "Cache-Control": FOREVER}
        with self._explained(f"write {path} to"):
            self._backend.put(path, content, headers, absent=absent, tag=tag)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """The store's failures in one line; its own messages are pages of Rust."""
        try:
            yield
        except (Conflict, SparringError):
            raise
        except Exception as error:  # whatever a backend has for it
            raise RegistryError(f"cannot {what} the registry at {self}: {line(error)}") from error


def folder_of(game: str, model: str | None = None) -> str:
    for kind, name in (("game", game), ("model", model)):
        if name is not None and not NAME.fullmatch(name):
            raise InputError(
                f"{kind} name {name[:100]!r}: use letters, digits, '.', '_' and '-', at most 100, no slash"
            )
    return f"games/{game}/models" if model is None else f"games/{game}/models/{model}"


def number_of(version: int) -> int:
    if not VERSION.fullmatch(str(version)):
        raise InputError(f"version {version!r}: use a whole number from 1 on")
    return version


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
