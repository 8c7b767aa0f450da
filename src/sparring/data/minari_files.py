"""Minari datasets, as minari 0.5 reads them: an episode each, written in its Arrow form, without minari itself.

A dataset of Minari's has no place for some of it: player, model, version, log-probabilities, where fragments were cut.
This is in each episode's metadata and `infos`, so that what we exported comes back as it was. Datasets of others are
read in both of Minari's forms, Arrow or Parquet files and HDF5.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.data.limits import errors_naming, require_size
from sparring.data.parquet_files import arrow, cast, from_arrow, require_pyarrow
from sparring.data.steps import longest, renamed
from sparring.errors import InputError
from sparring.experience import Columns, Fragment
from sparring.experience.fragment import REWARD, pack
from sparring.games import Game
from sparring.games.spec import Array, Box, Dict, Discrete, MultiDiscrete, Space

__all__ = ["MinariWriter", "read_minari"]

OPEN, OVERHEAD = 256 << 20, 1000  # bytes of episodes that wait for their end; what a fragment takes besides
VERSION = "0.5.0"  # of the format
UNREADABLE = (OSError, IndexError, ValueError, KeyError, TypeError, AttributeError, OverflowError, msgspec.MsgspecError)
OURS = "sparring"  # the key of our own metadata


def describe(space: Space) -> dict[str, Any]:
    """A space as Minari writes Gymnasium's."""
    if isinstance(space, Dict):
        return {"type": "Dict", "subspaces": {name: describe(part) for name, part in sorted(space.fields.items())}}
    if isinstance(space, Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": space.start, "n": space.n}
    if isinstance(space, MultiDiscrete):
        nothing = [0] * len(space.nvec)
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": list(space.nvec), "start": nothing}
    whole = np.dtype(space.dtype).kind in "iu"
    limits = np.iinfo(space.dtype) if whole else None
    low, high = space.bounds
    least = np.full(space.shape, limits.min if limits else -np.inf) if low is None else low
    most = np.full(space.shape, limits.max if limits else np.inf) if high is None else high
    bounds = {"low": least.astype(space.dtype).tolist(), "high": most.astype(space.dtype).tolist()}
    return {"type": "Box", "dtype": space.dtype, "shape": list(space.shape), **bounds}


def _wide(space: Space, column: Array) -> Any:
    """As Minari's readers expect it: whole numbers in 64 bits."""
    import pyarrow as pa

    if isinstance(space, Dict):
        names = sorted(space.fields)
        return pa.StructArray.from_arrays([_wide(space.fields[n], column[n]) for n in names], names=names)
    if isinstance(space, Discrete):
        return pa.array(column.astype(np.int64))
    if isinstance(space, MultiDiscrete):
        return pa.FixedSizeListArray.from_arrays(pa.array(column.astype(np.int64).reshape(-1)), len(space.nvec))
    if isinstance(space, Box) and not space.shape:
        return pa.FixedSizeListArray.from_arrays(pa.array(column), 1)
    return arrow(space, column)


class MinariWriter:
    """Fragments are put together to episodes; one that is not complete, or too long for memory, is several."""

    def __init__(self, game: Game, out: Path) -> None:
        require_pyarrow()
        self._game, self._out = game, out / "data"
        self._waiting: dict[tuple[str, str], list[Fragment]] = {}
        self._bytes = self._episodes = self._steps = 0
        self._out.mkdir(parents=True)

    def add(self, fragments: Sequence[Fragment]) -> None:
        for f in fragments:
            key = f.player, f.episode
            self._waiting.setdefault(key, []).append(f)
            self._bytes += len(f.obs) + OVERHEAD
            if f.ended and self._is_whole(self._waiting[key]):
                self._flush(key)
        while self._bytes > OPEN:
            self._flush(next(iter(self._waiting)))

    def close(self) -> None:
        for key in list(self._waiting):
            self._flush(key)
        meta = {
            "total_episodes": self._episodes,
            "total_steps": self._steps,
            "data_format": "arrow",
            "jpeg_encoding": False,
            "observation_space": json.dumps(describe(self._game.observation)),
            "action_space": json.dumps(describe(self._game.action)),
            "dataset_id": f"sparring/{self._game.name.replace('.', '_')}-v0",
            "minari_version": VERSION,
            "dataset_size": round(sum(p.stat().st_size for p in self._out.rglob("*.arrow")) / 1e6, 1),
        }
        (self._out / "metadata.json").write_text(json.dumps(meta))

    def _is_whole(self, fragments: list[Fragment]) -> bool:
        return sum(f.steps for f in fragments) == max(f.start + f.steps for f in fragments)

    def _flush(self, key: tuple[str, str]) -> None:
        fragments = sorted(self._waiting.pop(key), key=lambda f: f.start)
        self._bytes -= sum(len(f.obs) + OVERHEAD for f in fragments)
        first = 0
        for i, f in enumerate(fragments):
            after = fragments[i + 1] if i + 1 < len(fragments) else None
            if (
                f.ended
                or after is None
                or after.start != f.start + f.steps
                or after.obs[: self._size] != f.obs[-self._size :]
            ):
                self._write(fragments[first : i + 1])
                first = i + 1

    @property
    def _size(self) -> int:
        return self._game.observation.element.itemsize

    def _write(self, fragments: list[Fragment]) -> None:
        import pyarrow as pa

        game, columns = self._game, [f.columns(self._game) for f in fragments]
        last = fragments[-1]
        obs = np.concatenate([*[c.obs[:-1] for c in columns], columns[-1].obs[-1:]])
        action = np.concatenate([*[c.action for c in columns], np.zeros(1, game.action.element)])
        count = len(obs) - 1
        flags = {name: np.zeros(count + 1, bool) for name in ("terminations", "truncations")}
        flags["terminations"][count - 1] = last.terminated
        flags["truncations"][count - 1] = last.truncated or not last.ended  # Minari's episodes have an end
        nothing = [np.full(f.steps, np.nan, REWARD) for f in fragments]
        chance = [n if c.log_prob is None else c.log_prob for c, n in zip(columns, nothing, strict=True)]
        reward = [c.reward.astype(np.float64) for c in columns]
        infos = {"log_prob": pa.array(np.concatenate([*chance, [np.nan]]).astype(REWARD))}
        batch = pa.RecordBatch.from_pydict(
            {
                "observations": _wide(game.observation, obs),
                "actions": _wide(game.action, action),
                "rewards": pa.array(np.concatenate([*reward, [0.0]])),
                **{name: pa.array(values) for name, values in flags.items()},
                "infos": pa.StructArray.from_arrays(list(infos.values()), names=list(infos)),
            }
        )
        folder = self._out / str(self._episodes)
        folder.mkdir()
        with pa.OSFile(str(folder / "part-0.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        names = ("id", "start", "steps", "time", "terminated", "truncated", "model", "version")
        ours = {"player": last.player, "episode": last.episode}
        parts = [{name: getattr(f, name) for name in names} | {"chance": f.log_prob is not None} for f in fragments]
        meta = {"id": self._episodes, "total_steps": count, OURS: ours | {"fragments": parts}}
        (folder / "metadata.json").write_text(json.dumps(meta))
        self._episodes, self._steps = self._episodes + 1, self._steps + count


def read_minari(game: Game, path: Path, player: str, source: str, now: float) -> Iterator[Fragment | str]:
    """The episodes of a dataset, as fragments."""
    home = path / "data" if (path / "data" / "metadata.json").is_file() else path
    try:
        meta = json.loads((home / "metadata.json").read_text())
        count, form = int(meta["total_episodes"]), meta.get("data_format", "hdf5")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no Minari dataset (metadata.json: {error})") from error
    jpeg = bool(meta.get("jpeg_encoding", True))
    read = _hdf5(game, home, count, jpeg) if form == "hdf5" else _arrow(game, home, count, jpeg)
    for number, found in read:
        if isinstance(found, str):
            yield f"episode {number}: {found}"
            continue
        columns, ended, ours = found
        try:
            if ours is not None:
                made = list(_as_it_was(game, columns, ours))
            else:
                made = list(_cut(game, columns, ended, player, f"{source}/{number}", now))
        except UNREADABLE as error:
            yield f"episode {number}: {type(error).__name__}: {error}"
            continue
        yield from made


_Found = tuple[Columns, tuple[bool, bool], dict[str, Any] | None]


def _arrow(game: Game, home: Path, count: int, jpeg: bool) -> Iterator[tuple[int, _Found | str]]:
    pa = require_pyarrow()
    for number in range(count):
        folder = home / str(number)
        if not folder.is_dir():
            raise InputError(f"{home} says that it has {count} episodes, and number {number} is not there")
        try:
            yield number, _episode(game, folder, jpeg)
        except (*UNREADABLE, pa.ArrowException, MemoryError) as error:
            yield number, f"{type(error).__name__}: {error}"


def _episode(game: Game, folder: Path, jpeg: bool) -> _Found:
    from pyarrow.dataset import dataset

    files = [str(p) for p in sorted(folder.iterdir()) if p.suffix in (".arrow", ".parquet")]
    if not files:
        raise ValueError("it has no .arrow and no .parquet file")
    found = dataset(files, format="parquet" if files[0].endswith(".parquet") else "arrow")
    require_size(found.count_rows() * (game.observation.element.itemsize + game.action.element.itemsize), folder)
    rows = found.to_table().combine_chunks()
    if rows.num_rows < 2:
        raise ValueError(f"it has {rows.num_rows} rows: an episode of one step has two")
    meta = json.loads((folder / "metadata.json").read_text())
    obs = _frames(game.observation, rows["observations"], jpeg)
    action = from_arrow(game.action, rows["actions"].slice(0, rows.num_rows - 1))
    ends = [bool(rows[name][rows.num_rows - 2].as_py()) for name in ("terminations", "truncations")]
    reward, chance = _rewards(rows["rewards"].to_pylist()[:-1]), None
    if OURS in meta:
        chance = rows["infos"].combine_chunks().field("log_prob").to_numpy(zero_copy_only=False)[:-1]
    return Columns(obs, action, reward, chance), (ends[0], ends[1]), meta.get(OURS)


def _rewards(found: Any) -> Array:
    """A number each; some write a list of one."""
    rewards = np.asarray(found, np.float64)
    if rewards.size != len(rewards):
        raise ValueError(f"rewards have the shape {rewards.shape}: there is one for each step")
    return rewards.reshape(-1)


def _hdf5(game: Game, home: Path, count: int, jpeg: bool) -> Iterator[tuple[int, _Found | str]]:
    try:
        import h5py
    except ImportError as error:
        raise InputError("Minari's HDF5 datasets need h5py: pip install 'sparring[data]'") from error
    with errors_naming(home / "main_data.hdf5"), h5py.File(home / "main_data.hdf5", "r") as file:
        for number in range(count):
            if f"episode_{number}" not in file:
                raise InputError(f"{home} says that it has {count} episodes, and number {number} is not there")
            try:
                group = file[f"episode_{number}"]
                obs = _of_hdf5(game.observation, group["observations"], jpeg)
                action = _of_hdf5(game.action, group["actions"], jpeg)
                ends = bool(group["terminations"][-1]), bool(group["truncations"][-1])
                require_size(group["rewards"].nbytes, "rewards")
                columns = Columns(obs, action, _rewards(group["rewards"][:]))
                _require_lengths(columns)
                found: _Found | str = (columns, ends, None)
            except (*UNREADABLE, MemoryError) as error:
                found = f"{type(error).__name__}: {error}"
            yield number, found


def _require_lengths(columns: Columns) -> None:
    obs, actions, rewards = len(columns.obs), len(columns.action), len(columns.reward)
    if not obs - 1 == actions == rewards:
        raise ValueError(f"{rewards} rewards, {actions} actions, {obs} observations: there is one more of these")


def _of_hdf5(space: Space, found: Any, jpeg: bool) -> Array:
    if isinstance(space, Dict):
        parts = {name: _of_hdf5(part, found[name], jpeg) for name, part in space.fields.items()}
        out = np.empty(len(next(iter(parts.values()))), space.element)
        for name, values in parts.items():
            out[name] = values
        return out
    require_size(max(found.nbytes, len(found) * space.element.itemsize), found.name)
    if jpeg and _is_jpeg(space) and found.shape[1:] != space.element.shape:
        return cast(space, np.stack([_picture(space, bytes(found[i])) for i in range(len(found))]))
    values = np.asarray(found[()])
    return cast(space, values.reshape(len(values), *space.element.shape))


def _frames(space: Space, found: Any, jpeg: bool) -> Array:
    import pyarrow as pa

    if jpeg and _is_jpeg(space) and not pa.types.is_fixed_size_list(found.type):
        return cast(space, np.stack([_picture(space, one) for one in found.to_pylist()]))
    return from_arrow(space, found)


def _is_jpeg(space: Space) -> bool:
    """What Minari takes for a picture. Those of versions before it had JPEG are arrays, and no metadata say so: callers
    look at the column, too."""
    if not isinstance(space, Box) or space.dtype != "uint8" or len(space.shape) not in (2, 3):
        return False
    low, high = space.bounds
    full = (low is None or not low.any()) and (high is None or bool((high == 255).all()))
    return full and space.shape[0] >= 32 and space.shape[1] >= 32


def _picture(space: Space, data: bytes) -> Array:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("this dataset has JPEG pictures, which need Pillow: pip install pillow") from error
    picture, (height, width) = Image.open(io.BytesIO(data)), space.element.shape[:2]
    if picture.size != (width, height):  # before it is unpacked
        raise ValueError(f"a picture has {picture.size} pixels, the game's have {(width, height)}")
    return np.asarray(picture).reshape(space.element.shape)


class _Part(msgspec.Struct):
    """What our own metadata say of a fragment."""

    id: str
    start: int
    steps: int
    time: float
    terminated: bool
    truncated: bool
    model: str | None
    version: int | None
    chance: bool  # whether it has log-probabilities


class _Ours(msgspec.Struct):
    player: str
    episode: str
    fragments: list[_Part]


def _as_it_was(game: Game, columns: Columns, meta: dict[str, Any]) -> Iterator[Fragment]:
    ours, at = msgspec.convert(meta, _Ours), 0
    if sum(part.steps for part in ours.fragments) != len(columns.reward) or min(p.steps for p in ours.fragments) < 1:
        raise ValueError("its metadata do not say how its rows were cut")
    for part in ours.fragments:
        last = at + part.steps
        log_prob = columns.log_prob[at:last] if part.chance and columns.log_prob is not None else None
        cut = Columns(columns.obs[at : last + 1], columns.action[at:last], columns.reward[at:last], log_prob)
        yield pack(
            game,
            cut,
            player=ours.player,
            episode=ours.episode,
            id=part.id,
            start=part.start,
            time=part.time,
            terminated=part.terminated,
            truncated=part.truncated,
            model=part.model,
            version=part.version,
        )
        at = last


def _cut(
    game: Game, columns: Columns, ended: tuple[bool, bool], player: str, episode: str, now: float
) -> Iterator[Fragment]:
    total, most = len(columns.reward), longest(game)
    for at in range(0, total, most):
        last = min(at + most, total)
        part = Columns(columns.obs[at : last + 1], columns.action[at:last], columns.reward[at:last])
        ends = ended if last == total else (False, False)
        meta: dict[str, Any] = {"player": player, "episode": episode, "start": at, "time": now, "id": "?"}
        yield renamed(pack(game, part, terminated=ends[0], truncated=ends[1], **meta))
