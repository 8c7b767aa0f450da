"""Where versions are published and found: a directory, or a bucket with the same layout.

    games/<game>/models/<model>/<version>/{policy.onnx, policy.safetensors, card.md, manifest.json}
    games/<game>/models/<model>/latest.json

`policy.onnx` is created first and claims the number; the manifest is created last, and a version exists once it does.
Nothing is ever changed but `latest.json`, which only moves forward. Whoever is killed half-way leaves a number unused.
Of a game that was deleted `<version>/deleted` stays, with its highest number.

On a directory every file is on disk (fsync; obstore itself never calls it) before the manifest appears, so a power loss
can take the newest version back but not leave it torn, and its number is not given out again. Should a disk lose bytes
all the same, the manifest's hashes tell, and `latest` is the newest version that is whole.
"""

import hashlib
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import InputError, SparringError
from sparring.export import onnx, onnx_check, weights
from sparring.games.spec import NAME
from sparring.networks.policy import Policy
from sparring.registry.backends import Conflict, Directory, line, open_backend
from sparring.registry.card import card
from sparring.registry.manifest import DEFAULT_MODEL, DataSpan, FileInfo, Manifest, Pointer

__all__ = ["NotPublished", "Registry", "RegistryError"]

log = logging.getLogger(__name__)
VERSION = re.compile(r"[1-9][0-9]{0,14}")
# What a bucket tells those who read it directly. A pointer may be this old before somebody sees the next version.
POINTER = {"Content-Type": "application/json", "Cache-Control": "public, max-age=5"}
FOREVER = "public, max-age=31536000, immutable"
TYPES = {".json": "application/json", ".md": "text/markdown; charset=utf-8"}
OURS = re.compile(r"games/[^/]+/models/([^/]+)/(?:latest\.json|([1-9][0-9]{0,14})/[^/]+)")
MANIFEST = re.compile(r"games/([^/]+)/models/([^/]+)/([1-9][0-9]{0,14})/manifest\.json")


class NotPublished(InputError):
    """There is no such version, or no such file in it."""


class RegistryError(SparringError):
    """The directory or bucket does not answer: no rights, no space, no network."""


class Registry:
    """Published versions of models, each with its policy as ONNX and safetensors, a card and a manifest.

    Safe to share between threads, and its location between processes and machines. (Not across a fork: obstore has
    threads of its own.)

    :param location: A directory, a bucket's URL such as s3://BUCKET/PREFIX?region=…, or `module:Class?option=value`:
        a backend from outside (`sparring.registry.backends.Backend`).
    :raises InputError: there can be no registry at that location.
    """

    def __init__(self, location: str | Path) -> None:
        self._backend = open_backend(str(location))
        self._latest: dict[tuple[str, str], tuple[bytes | None, Manifest | None]] = {}

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

    def publish(
        self,
        policy: Policy,
        *,
        model: str = DEFAULT_MODEL,
        algorithm: str,
        metrics: Mapping[str, float] = {},
        config: Mapping[str, Any] = {},
        parent: int | None = None,
        data: DataSpan = DataSpan(),
        created: float | None = None,
    ) -> Manifest:
        """Publishes a policy as the next version of a model.

        :param policy: What plays.
        :param model: The model's name.
        :param algorithm: What trained it, for the manifest and the card.
        :param metrics: Numbers that tell how good it is.
        :param config: Hyperparameters.
        :param parent: The version that it was trained on from.
        :param data: The experience that it was trained on.
        :param created: When, in seconds since 1970. None: now.
        :returns: The manifest, with the version's number.
        :raises SparringError: the policy has NaN or infinite parameters.
        """
        folder = _folder(policy.game.name, model)
        if (why := policy.problem()) is not None:
            raise SparringError(f"not published: {why}. Learning diverged: lower its rate, or go back to a checkpoint")
        files = {"policy.onnx": onnx.render(policy), "policy.safetensors": weights.save(policy)}
        _check_playable(policy, files["policy.onnx"])
        manifest = Manifest(
            game=policy.game,
            model=model,
            version=0,  # until it is claimed
            created=time.time() if created is None else created,
            algorithm=algorithm,
            files={},
            metrics={name: float(value) for name, value in metrics.items()},
            config=dict(config),
            parent=parent,
            data=data,
        )
        _check_round_trip(manifest)
        version = self._claim(folder, files["policy.onnx"])
        manifest = msgspec.structs.replace(manifest, version=version)
        files["card.md"] = card(manifest, policy).encode()
        for name in ("policy.safetensors", "card.md"):
            self._create(f"{folder}/{version}/{name}", files[name])
        self._backend.sync(f"{folder}/{version}", *files)
        sums = {name: FileInfo(_sha256(content), len(content)) for name, content in files.items()}
        manifest = msgspec.structs.replace(manifest, files=sums)
        text = msgspec.json.format(msgspec.json.encode(manifest))
        self._create(f"{folder}/{version}/manifest.json", text)
        self._backend.sync(f"{folder}/{version}", "manifest.json")
        self._point(folder, Pointer(version, _sha256(text)))
        return manifest

    def latest(self, game: str, model: str = DEFAULT_MODEL) -> Manifest | None:
        """The newest version that is whole. Cheap while `latest.json` says the same: one small read.

        :param game: The game's name.
        :param model: The model's name.
        :returns: Its manifest; None where nothing is published.
        """
        folder = _folder(game, model)
        raw = self._get(f"{folder}/latest.json")
        known_raw, known = self._latest.get((game, model), (None, None))
        if raw is not None and raw == known_raw:
            return known
        pointer = _pointer(raw)
        manifest = None if pointer is None else self._whole(game, model, pointer.version, pointer.sha256)
        if manifest is None:
            numbers = reversed(self.versions(game, model))
            whole = (known if known and known.version == n else self._whole(game, model, n) for n in numbers)
            manifest = next((found for found in whole if found is not None), None)
        elif known is not None and known.version > manifest.version:
            # It was found before the pointer got there; whoever asks must not see it go back, unless it is gone.
            manifest = self._whole(game, model, known.version) or manifest
        if raw is not None or manifest is not None:  # else names that nobody published would fill the memory
            self._latest[game, model] = raw, manifest
        return manifest

    def manifest(self, game: str, model: str, version: int) -> Manifest:
        """What is known of a version. NotPublished where there is none."""
        return self._manifest(game, model, version, None)

    def read(self, game: str, model: str, version: int, name: str) -> bytes:
        """One file of a version, as it was published."""
        return self._file(self.manifest(game, model, version), name)

    def policy(self, game: str, model: str, version: int, *, trusted: bool | None = None) -> Policy:
        """To train on from, or to act with in NumPy. `trusted`: see `weights.load`; if not said, a directory is, and a
        bucket, which may be anybody's, is not."""
        trusted = isinstance(self._backend, Directory) if trusted is None else trusted
        return weights.load(self.read(game, model, version, "policy.safetensors"), trusted=trusted)

    def versions(self, game: str, model: str = DEFAULT_MODEL) -> list[int]:
        """Published versions of a model, oldest first."""
        return sorted(version for _, _, version in self._published(_folder(game, model)))

    def models(self, game: str) -> list[str]:
        """Models of a game that have a version."""
        return sorted({model for _, model, _ in self._published(_folder(game))})

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
        text = self._get(f"{_folder(game, model)}/{_number(version)}/manifest.json")
        if text is None:
            raise NotPublished(f"{game} has no version {version} of the model {model!r}")
        if sha256 is not None and _sha256(text) != sha256:
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
        data = self._get(f"{_folder(manifest.game.name, manifest.model)}/{manifest.version}/{name}")
        if data is None or _sha256(data) != info.sha256:
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

    def _claim(self, folder: str, content: bytes) -> int:
        with self._explained(f"list {folder} in"):
            used = [int(name) for name in self._backend.folders(folder) if VERSION.fullmatch(name)]
        pointer = _pointer(self._get(f"{folder}/latest.json"))
        version = max([*used, pointer.version if pointer else 0]) + 1
        while True:
            try:
                self._put(f"{folder}/{version}/policy.onnx", content, absent=True)
            except Conflict:
                version += 1  # another publisher was quicker
            else:
                return version

    def _point(self, folder: str, pointer: Pointer) -> None:
        """Moves `latest.json` to this version unless it is at a later one already."""
        path, text = f"{folder}/latest.json", msgspec.json.encode(pointer)
        while True:
            with self._backend.alone(folder):
                with self._explained(f"read {path} in"):
                    found = self._backend.get(path)
                current = None if found is None else _pointer(found.data)
                if current is not None and current.version >= pointer.version:
                    return
                try:
                    self._put(path, text, absent=found is None, tag="" if found is None else found.tag)
                except Conflict:
                    continue  # somebody else moved it in between
                self._backend.sync(folder, "latest.json")
                return

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
        told = POINTER if path.endswith("/latest.json") else {"Content-Type": kind, "Cache-Control": FOREVER}
        with self._explained(f"write {path} to"):
            self._backend.put(path, content, told, absent=absent, tag=tag)

    def delete_game(self, game: str) -> int:
        """All that was published of a game: how many versions. Their numbers are not given out again: whoever kept a
        version, which they may for ever, must not take another one for it."""
        found: dict[str, list[tuple[str, int]]] = {}  # by model: paths and versions
        with self._explained(f"list {game} in"):
            for ours in filter(None, map(OURS.fullmatch, self._backend.list(_folder(game)))):
                found.setdefault(ours[1], []).append((ours[0], int(ours[2] or 0)))
        for model, paths in found.items():
            self._retire(_folder(game, model), dict(paths))
            self._latest.pop((game, model), None)
        return sum(MANIFEST.fullmatch(path) is not None for paths in found.values() for path, _ in paths)

    def _retire(self, folder: str, paths: dict[str, int]) -> None:
        """What makes a version exist goes first; the highest number stays claimed."""
        pointer = _pointer(self._get(f"{folder}/latest.json"))
        last = max(*paths.values(), pointer.version if pointer else 0)
        claim = f"{folder}/{last}/deleted"
        gone = sorted(paths.keys() - {claim}, key=lambda path: not path.endswith(".json"))
        if not gone:
            return
        if last:
            self._put(claim, b"")
        with self._explained(f"delete {folder} in"):
            self._backend.delete(gone)
        self._backend.sync(f"{folder}/{last}" if last else folder)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """The store's failures in one line; its own messages are pages of Rust."""
        try:
            yield
        except (Conflict, SparringError):
            raise
        except Exception as error:  # whatever a backend has for it
            raise RegistryError(f"cannot {what} the registry at {self}: {line(error)}") from error


def _folder(game: str, model: str | None = None) -> str:
    for kind, name in (("game", game), ("model", model)):
        if name is not None and not NAME.fullmatch(name):
            raise InputError(
                f"{kind} name {name[:100]!r}: use letters, digits, '.', '_' and '-', at most 100, no slash"
            )
    return f"games/{game}/models" if model is None else f"games/{game}/models/{model}"


def _number(version: int) -> int:
    if not VERSION.fullmatch(str(version)):
        raise InputError(f"version {version!r}: use a whole number from 1 on")
    return version


def _pointer(raw: bytes | None) -> Pointer | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Pointer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # torn; `latest` finds its way without it and the next publisher writes it anew


def _check_playable(policy: Policy, data: bytes) -> None:
    """Before anything is written: clients refuse what layers from outside may put into a graph."""
    try:
        onnx_check.check(data)
    except InputError as error:
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in policy.layers))
        raise InputError(
            f"not published, as no bot would load it: {error.__cause__ or error} (its layers: {kinds}). "
            f"Bots know the operators {', '.join(onnx_check.OPERATORS)}"
        ) from error


def _check_round_trip(manifest: Manifest) -> None:
    """Before anything is written: what is published can be read back as it was meant."""
    for name, value in manifest.metrics.items():
        if not math.isfinite(value):
            raise InputError(f"metric {name} is {value}: leave it out, a manifest has finite numbers only")
    try:
        again = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    except (TypeError, msgspec.DecodeError) as error:
        raise InputError(f"a manifest cannot hold this: {error}") from error
    if again != manifest:
        wrong = [f for f in manifest.__struct_fields__ if getattr(again, f) != getattr(manifest, f)]
        raise InputError(f"a manifest cannot hold this {' and '.join(wrong)}: use finite numbers, text and flat lists")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
