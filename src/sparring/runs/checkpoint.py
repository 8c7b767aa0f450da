"""Checkpoints: a directory with the arrays (safetensors) and a JSON page that knows their hash. Written beside its
place and renamed into it, so there is the old one or the new one; a flipped bit is noticed. No pickle."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from sparring import algorithms, files
from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import Array

__all__ = ["exists", "flatten", "hyperparameters", "load", "remove", "save", "set_aside", "unflatten"]

log = logging.getLogger("sparring.training")
FORMAT = 1


def save(path: Path, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
    """Atomic and on disk when it returns; the checkpoint before is kept as `<path>.old` until the next."""
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    # A contiguous copy where needed: safetensors would write the bytes under a view, not the view. (Not
    # `ascontiguousarray`, which gives scalars a dimension.)
    data = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    page = {"format": FORMAT, "state_sha256": hashlib.sha256(data).hexdigest(), "meta": meta}
    page["sha256"] = _digest(page)
    files.write_new(new / "state.safetensors", data)
    files.write_new(new / "checkpoint.json", json.dumps(page, indent=1).encode())
    files.sync(new)
    files.replace_directory(path, new, old)
    files.sync(path.parent)


def exists(path: Path) -> bool:
    return path.exists() or path.with_name(path.name + ".old").exists()


def remove(path: Path) -> None:
    """Both it and the one before."""
    for one in (path, path.with_name(path.name + ".old")):
        if one.exists():
            shutil.rmtree(one)


def set_aside(path: Path) -> None:
    """It becomes `<path>.before`, for people; one that was there goes."""
    before = path.with_name(path.name + ".before")
    shutil.rmtree(before, ignore_errors=True)
    (path if path.exists() else path.with_name(path.name + ".old")).rename(before)
    remove(path)


def load(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays and meta. Between the two renames of `save` only `<path>.old` exists: then it is taken."""
    where = path if path.exists() else path.with_name(path.name + ".old")
    try:
        page = json.loads((where / "checkpoint.json").read_bytes())
        data = (where / "state.safetensors").read_bytes()
        sound = page["sha256"] == _digest(page) and page["state_sha256"] == hashlib.sha256(data).hexdigest()
    except FileNotFoundError as error:
        raise InputError(f"no checkpoint at {path}: {Path(error.filename).name} is missing") from error
    except OSError as error:
        raise InputError(f"the checkpoint {where} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"the checkpoint {where} is damaged (checkpoint.json cannot be read)") from error
    if not sound:
        raise InputError(f"the checkpoint {where} is damaged: its content does not match its hash")
    if (found := page.get("format")) != FORMAT:
        raise InputError(f"the checkpoint {where} has format {found}, this version of Sparring reads {FORMAT}")
    if not isinstance(meta := page.get("meta"), dict):
        raise InputError(f"the checkpoint {where} is damaged: checkpoint.json has no meta")
    try:
        return safetensors.numpy.load(data), meta
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"the checkpoint {where} is damaged (state.safetensors): {error}") from error


def hyperparameters(directory: Path, name: str, game: Game, given: dict[str, Any]) -> dict[str, Any]:
    """Of a trainer whose checkpoint is `directory/checkpoint`: the given ones, and those that followed from the game
    when it began (`algorithm.json`). A checkpoint without that file is older: nothing followed from the game then."""
    path, kind = directory / "algorithm.json", {"name": name, "schema": game.schema}
    followed = algorithms.defaults(name, game, given)
    try:
        noted = json.loads(path.read_bytes()) if path.exists() else {}
        same = {key: noted.get(key) for key in kind} == kind
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged: move {directory} away to start afresh") from error
    if same:
        followed = noted["hyperparameters"]
    else:
        if exists(directory / "checkpoint") and not path.exists():
            usual = msgspec.to_builtins(algorithms.complete(name, given))
            followed = {key: usual[key] for key in followed}
        files.write_whole(path, json.dumps(kind | {"hyperparameters": followed}, indent=1).encode())
    return followed | given


def flatten(tree: Any, prefix: str = "") -> dict[str, Array]:
    """A pytree of arrays → names and arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {prefix + jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def unflatten(template: Any, arrays: dict[str, Array], prefix: str = "") -> Any:
    """The pytree of `template`'s form with the arrays of `flatten`; InputError where they are of another form."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(template)
    found = []
    for path, leaf in leaves:
        name = prefix + jax.tree_util.keystr(path)
        array = arrays.get(name)
        if array is None or array.shape != np.shape(leaf) or array.dtype != np.asarray(leaf).dtype:
            have = "missing" if array is None else f"{array.dtype}{array.shape}"
            raise InputError(f"the checkpoint is of another network or algorithm: {name} is {have}")
        found.append(array)
    names = {prefix + jax.tree_util.keystr(path) for path, _ in leaves}
    if more := [name for name in arrays if name.startswith((prefix + "[", prefix + ".")) and name not in names]:
        raise InputError(f"the checkpoint is of another network or algorithm: it has {more[0]} as well")
    return jax.tree_util.tree_unflatten(treedef, found)


def _digest(page: dict[str, Any]) -> str:
    body = {key: value for key, value in page.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
