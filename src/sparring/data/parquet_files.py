"""Parquet: a row for each step. Lists hold the numbers of a space, structs the fields of a dict."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sparring.data.limits import errors_naming
from sparring.data.steps import Steps, need, of_fragments, whole_numbers
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.experience.fragment import REWARD
from sparring.games import Game
from sparring.games.spec import Array, Dict, Space

__all__ = ["ParquetWriter", "arrow", "batches", "cast", "from_arrow", "numbers", "opened_parquet", "read_parquet"]
__all__ += ["require_pyarrow", "texts"]

BATCH = 32 << 20  # bytes of observations read at once


def require_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError("Parquet and Minari need pyarrow: pip install 'sparring[data]'") from error
    return pyarrow


def arrow(space: Space, column: Array) -> Any:
    """A column as Arrow's: numbers, lists of them, or a struct."""
    import pyarrow as pa

    if isinstance(space, Dict):
        names = sorted(space.fields)
        parts = [arrow(space.fields[name], np.ascontiguousarray(column[name])) for name in names]
        return pa.StructArray.from_arrays(parts, names=names)
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    if not space.element.shape:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(space.element.shape)))


def from_arrow(space: Space, column: Any) -> Array:
    """The opposite, from lists of any kind. Raises ValueError where it does not fit."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(space, Dict):
        if not pa.types.is_struct(column.type):
            raise ValueError(f"expected a struct of {', '.join(sorted(space.fields))}, got {column.type}")
        parts = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
        out = np.empty(len(column), space.element)
        for name, part in space.fields.items():
            if name not in parts:
                raise ValueError(f"expected a struct of {', '.join(sorted(space.fields))}, it has {', '.join(parts)}")
            out[name] = from_arrow(part, parts[name])
        return out
    count = len(column)
    while pa.types.is_nested(column.type) and hasattr(column, "flatten") and not pa.types.is_struct(column.type):
        column = column.flatten()
    if column.null_count or not (pa.types.is_primitive(column.type)):
        raise ValueError(f"expected numbers of shape {space.element.shape}, got {column.type}")
    values = column.to_numpy(zero_copy_only=False)
    if values.size != count * int(np.prod(space.element.shape)):
        raise ValueError(f"expected {space.element.shape} for each of {count} rows, got {values.size} numbers")
    return cast(space, values.reshape(count, *space.element.shape))


def cast(space: Space, values: Array) -> Array:
    base = space.element.base
    with np.errstate(invalid="ignore", over="ignore"):
        out: Array = values.astype(base, copy=False)
    if base.kind in "iub" and values.dtype.kind == "f" and not (out == values).all():
        raise ValueError("expected whole numbers")
    if base.kind in "iub" and not (out == values).all():
        raise ValueError(f"values do not fit {base}")
    return out


class ParquetWriter:
    """`part-00000.parquet` and so on."""

    suffix = ".parquet"

    def __init__(self, game: Game) -> None:
        require_pyarrow()
        self._game = game

    def write(self, path: Path, fragments: Sequence[Fragment]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = of_fragments(self._game, fragments)
        ends = np.flatnonzero(rows.has_next)
        indices = np.full(len(rows), -1)
        indices[ends] = np.arange(len(ends))
        last = arrow(self._game.observation, rows.next_obs[ends])
        table = pa.table(
            {
                "player": pa.array(rows.player),
                "episode": pa.array(rows.episode),
                "step": pa.array(rows.step),
                "obs": arrow(self._game.observation, rows.obs),
                "action": arrow(self._game.action, rows.action),
                "reward": pa.array(rows.reward),
                "terminated": pa.array(rows.terminated),
                "truncated": pa.array(rows.truncated),
                "next_obs": last.take(pa.array(indices, mask=indices < 0)),
                "log_prob": pa.array(rows.log_prob, mask=np.isnan(rows.log_prob)),
                "model": pa.array(rows.model, pa.string()),
                "version": pa.array(rows.version, pa.int64(), mask=rows.version < 0),
                "time": pa.array(rows.time),
                "fragment": pa.array(rows.fragment),
            }
        )
        pq.write_table(table, path, compression="zstd")


def read_parquet(game: Game, path: Path) -> Iterator[Steps]:
    """The rows of a file, some at a time."""
    with opened_parquet(path) as file:
        need(file.schema_arrow.names, ("obs", "action", "reward"), path)
        for batch in batches(game, file, path):
            with errors_naming(f"{path} does not fit the game {game.name}"):
                made = _steps(game, batch)
            yield made


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    require_pyarrow()
    import pyarrow.parquet as pq

    with errors_naming(path):
        file = pq.ParquetFile(path)
    with file:
        yield file


def batches(game: Game, file: Any, path: Path) -> Iterator[Any]:
    """Of about as many bytes as fit. Lists may be of any length, so what a row has on average is looked at first."""
    known = file.metadata
    for group in range(known.num_row_groups):
        sizes = known.row_group(group)
        values = sum(sizes.column(i).num_values for i in range(sizes.num_columns))
        numbers = 2 * _size(game.observation) + _size(game.action) + 64
        if values > max(sizes.num_rows, 1) * numbers * 4:
            raise InputError(
                f"{path} does not fit the game {game.name}: {values} values in {sizes.num_rows} rows, "
                f"where about {numbers} belong into one"
            )
    rows = max(min(BATCH // game.observation.element.itemsize, 65_536), 1)
    with errors_naming(path):
        yield from file.iter_batches(batch_size=rows)


def _size(space: Space) -> int:
    parts = space.fields.values() if isinstance(space, Dict) else (space,)
    return sum(int(np.prod(part.element.shape)) for part in parts)


def _steps(game: Game, batch: Any) -> Steps:
    count, names = batch.num_rows, batch.schema.names
    obs = from_arrow(game.observation, batch["obs"])
    next_obs, has_next = np.zeros_like(obs), np.zeros(count, bool)
    if "next_obs" in names:
        has_next = batch["next_obs"].is_valid().to_numpy(zero_copy_only=False)
        if has_next.any():
            next_obs[has_next] = from_arrow(game.observation, batch["next_obs"].drop_null())
    return Steps(
        obs=obs,
        action=from_arrow(game.action, batch["action"]),
        reward=numbers(batch, "reward", np.nan).astype(REWARD),
        next_obs=next_obs,
        has_next=has_next,
        terminated=numbers(batch, "terminated", 0).astype(bool),
        truncated=numbers(batch, "truncated", 0).astype(bool),
        step=whole_numbers("step", numbers(batch, "step", -1)),
        time=numbers(batch, "time", np.nan),
        log_prob=numbers(batch, "log_prob", np.nan).astype(REWARD),
        version=whole_numbers("version", numbers(batch, "version", -1)),
        fragment=texts(batch, "fragment"),
        player=texts(batch, "player"),
        episode=texts(batch, "episode"),
        model=texts(batch, "model"),
    )


def numbers(batch: Any, name: str, nothing: float) -> Array:
    """A column as float64, which holds every step number there may be."""
    if name not in batch.schema.names:
        return np.full(batch.num_rows, nothing)
    values = [nothing if value is None else value for value in batch[name].to_pylist()]
    return np.array(values, np.float64)


def texts(batch: Any, name: str) -> list[str | None]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    return [None if value is None else str(value) for value in batch[name].to_pylist()]
