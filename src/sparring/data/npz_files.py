"""NumPy's .npz: columns of many fragments one after the other, and an entry for each fragment beside them."""

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from sparring.data.limits import errors_naming, require_size
from sparring.data.steps import leaves, need, renamed
from sparring.errors import InputError
from sparring.experience import Columns, Fragment
from sparring.experience.fragment import REWARD, pack
from sparring.games import Game
from sparring.games.spec import Array, Space
from sparring.games.spec import column as checked

__all__ = ["NpzWriter", "read_arrays", "read_npz"]

NEEDED = ("action", "reward", "steps")
TEXTS = {"id", "player", "episode", "model"}
EACH = TEXTS | {"start", "time", "terminated", "truncated", "version"}  # an entry for each fragment


def _store(into: dict[str, Any], space: Space, name: str, column: Array) -> None:
    for leaf, field, _ in leaves(space, name):
        into[leaf] = column if field is None else column[field]


class NpzWriter:
    suffix = ".npz"

    def __init__(self, game: Game) -> None:
        self._game = game

    def write(self, path: Path, fragments: Sequence[Fragment]) -> None:
        game, columns = self._game, [f.columns(self._game) for f in fragments]
        arrays: dict[str, Any] = {}
        _store(arrays, game.observation, "obs", np.concatenate([c.obs for c in columns]))
        _store(arrays, game.action, "action", np.concatenate([c.action for c in columns]))
        arrays["reward"] = np.concatenate([c.reward for c in columns])
        nothing = [np.full(f.steps, np.nan, REWARD) for f in fragments]
        log_prob = [n if c.log_prob is None else c.log_prob for c, n in zip(columns, nothing, strict=True)]
        arrays["log_prob"] = np.concatenate(log_prob)
        for name in ("id", "player", "episode", "start", "steps", "time", "terminated", "truncated"):
            arrays[name] = np.array([getattr(f, name) for f in fragments])
        arrays["model"] = np.array([f.model or "" for f in fragments])
        arrays["version"] = np.array([-1 if f.version is None else f.version for f in fragments])
        np.savez_compressed(path, **arrays)


def read_npz(game: Game, path: Path, player: str, source: str, now: float) -> Iterator[Fragment | str]:
    """Fragments of a file. `id`, `player` and the like may be missing: see docs/data.md."""
    with errors_naming(path):
        arrays = read_arrays(path)
    need(list(arrays), [leaf for leaf, *_ in leaves(game.observation, "obs")] + list(NEEDED), path)
    with errors_naming(f"{path} does not fit the game {game.name}"):
        obs, action = _load(arrays, game.observation, "obs"), _load(arrays, game.action, "action")
        steps = _lengths(arrays)
        reward, log_prob = (_numbers(arrays, name, sum(steps)) for name in ("reward", "log_prob"))
    if len(obs) != sum(steps) + len(steps) or len(action) != sum(steps):
        raise InputError(f"{path}: {sum(steps)} steps in {len(steps)} fragments need as many actions, and "
                         f"{sum(steps) + len(steps)} observations; it has {len(action)} and {len(obs)}")  # fmt: skip
    at = 0
    for i, count in enumerate(steps):
        last, chance = at + count, log_prob[at : at + count]
        made = pack(
            game,
            Columns(
                obs[at + i : last + i + 1],
                action[at:last],
                reward[at:last],
                None if np.isnan(chance).any() else chance,
            ),
            **_labels(arrays, i, player, source, now),
        )
        yield made if made.id != "?" else renamed(made)
        at = last


def read_arrays(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Array]:
    """Of a file, those with names that are wanted. Each says its size twice, in the archive and in its own header:
    neither is believed."""
    found: dict[str, Array] = {}
    with zipfile.ZipFile(path) as archive:
        names = {member: member.filename.removesuffix(".npy") for member in archive.infolist()}
        members = {member: name for member, name in names.items() if wanted(name)}
        require_size(sum(member.file_size for member in members), path)
        for member, name in members.items():
            with archive.open(member) as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, kind = read(file)
            size = math.prod(shape) * kind.itemsize
            if kind.hasobject:
                raise ValueError(f"`{name}` holds Python objects, which are pickled: nothing is unpickled here")
            if size > member.file_size or min(shape, default=0) < 0:
                raise ValueError(f"`{name}` says {shape} × {kind}, and has {member.file_size} bytes")
            with archive.open(member) as file:
                found[name] = npy.read_array(file, allow_pickle=False)
    return found


def _lengths(arrays: dict[str, Array]) -> list[int]:
    steps = arrays["steps"]
    if steps.ndim != 1 or steps.dtype.kind not in "iu" or (steps.size and steps.min() < 1):
        raise ValueError("`steps` must be a list of whole numbers from 1 on: how many steps each fragment has")
    for name in EACH & arrays.keys():
        kinds = "U" if name in TEXTS else "fiub"
        if arrays[name].shape != steps.shape or arrays[name].dtype.kind not in kinds:
            what = "texts" if name in TEXTS else "numbers"
            raise ValueError(f"`{name}` must be {what}, one for each of {len(steps)} fragments")
    lengths: list[int] = steps.tolist()
    return lengths


def _numbers(arrays: dict[str, Array], name: str, count: int) -> Array:
    values = arrays.get(name)
    if values is None:
        return np.full(count, np.nan, REWARD)
    if values.shape != (count,) or values.dtype.kind not in "fiub":
        raise ValueError(f"`{name}` has the shape {values.shape}: {count} steps need as many numbers")
    with np.errstate(over="ignore"):  # what becomes infinite is rejected later
        return values.astype(REWARD)


def _labels(arrays: dict[str, Array], i: int, player: str, source: str, now: float) -> dict[str, Any]:
    def of(name: str, nothing: Any) -> Any:
        return arrays[name][i].item() if name in arrays else nothing

    version = int(of("version", -1))
    return {
        "id": of("id", "?"),
        "player": of("player", player),
        "episode": of("episode", f"{source}/{i}"),
        "start": int(of("start", 0)),
        "time": float(of("time", now)),
        "terminated": bool(of("terminated", False)),
        "truncated": bool(of("truncated", False)),
        "model": of("model", "") or None,
        "version": None if version < 0 else version,
    }


def _load(arrays: dict[str, Array], space: Space, name: str) -> Array:
    out: Array | None = None
    for leaf, field, part in leaves(space, name):
        values = checked(part, arrays[leaf])
        if field is None:
            return values
        if out is None:
            out = np.empty(len(values), space.element)
        out[field] = values
    assert out is not None
    return out
