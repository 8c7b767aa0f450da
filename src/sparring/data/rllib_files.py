"""RLlib's offline files, without RLlib: rows of steps or whole episodes in Parquet (its new API), and JSON lines of
sample batches (its old one). Columns that RLlib compressed are pickled; nothing is unpickled here, and it is said."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.data.limits import errors_naming, lines_of
from sparring.data.parquet_files import batches, cast, from_arrow, numbers, opened_parquet, texts
from sparring.data.steps import Steps, cut_steps, longest, need, renamed
from sparring.errors import InputError
from sparring.experience import Columns, Fragment
from sparring.experience.fragment import REWARD, pack
from sparring.games import Game
from sparring.games.spec import Array, Dict, Space
from sparring.games.spec import column as checked

__all__ = ["read_rllib"]

UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
PICKLED = "its columns are compressed by pickling, which may run anything: write them with output_compress_columns=[]"


def read_rllib(game: Game, path: Path, player: str, source: str, now: float) -> Iterator[Fragment | str]:
    """Fragments of one file."""
    if path.suffix == ".parquet":
        with opened_parquet(path) as file:
            if file.schema_arrow.names == ["item"]:
                yield from _episodes(game, file, path, player, now)
                return
            need(file.schema_arrow.names, ("obs", "actions", "rewards", "eps_id"), path)
            yield from cut_steps(game, _columns(game, file, path), player, source, now)
    else:
        yield from cut_steps(game, _batches(game, path), player, source, now)


def _columns(game: Game, file: Any, path: Path) -> Iterator[Steps]:
    import pyarrow as pa

    for batch in batches(game, file, path):
        if pa.types.is_string(batch["obs"].type) or pa.types.is_binary(batch["obs"].type):
            raise InputError(f"{path}: {PICKLED}")
        with errors_naming(f"{path} does not fit the game {game.name}"):
            has = "new_obs" in batch.schema.names
            obs = from_arrow(game.observation, _storage(batch["obs"]))
            made = _steps(
                obs,
                from_arrow(game.action, _storage(batch["actions"])),
                from_arrow(game.observation, _storage(batch["new_obs"])) if has else None,
                {
                    name: numbers(batch, name, np.nan)
                    for name in ("rewards", "terminateds", "truncateds", "action_logp")
                },
                texts(batch, "eps_id"),
            )
        yield made


def _storage(column: Any) -> Any:
    """Of Ray's tensor columns the lists in them."""
    return getattr(column, "storage", column)


def _batches(game: Game, path: Path) -> Iterator[Steps]:
    with errors_naming(path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(lines_of(file, path), 1):
            if not line.strip():
                continue
            with errors_naming(f"{path}, line {number}"):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("expected an object with columns, as RLlib writes sample batches")
                need(list(row), ("obs", "actions", "rewards"), f"{path}, line {number}")
                if isinstance(row["obs"], str) or isinstance(row["actions"], str):
                    raise InputError(f"{path}: {PICKLED}")
                obs = checked(game.observation, row["obs"])
                nothing = [None] * len(obs)
                ends = {"terminateds": row.get("terminateds", row.get("dones", nothing))}
                fields = {name: row.get(name, nothing) for name in ("rewards", "truncateds", "action_logp")} | ends
                made = _steps(
                    obs,
                    checked(game.action, row["actions"]),
                    checked(game.observation, row["new_obs"]) if "new_obs" in row else None,
                    {name: np.array([np.nan if v is None else v for v in vs], float) for name, vs in fields.items()},
                    [None if v is None else str(v) for v in row.get("eps_id", nothing)],
                )
                if len({len(getattr(made, name)) for name in made.__dataclass_fields__}) > 1:
                    raise ValueError("its columns have different lengths")
            yield made


def _steps(
    obs: Array, action: Array, after: Array | None, fields: dict[str, Array], episode: list[str | None]
) -> Steps:
    count = len(obs)
    nothing: list[str | None] = [None] * count
    return Steps(
        obs=obs,
        action=action,
        reward=fields["rewards"].astype(REWARD),
        next_obs=np.zeros_like(obs) if after is None else after,
        has_next=np.full(count, after is not None),
        terminated=np.nan_to_num(fields["terminateds"]).astype(bool),
        truncated=np.nan_to_num(fields["truncateds"]).astype(bool),
        step=np.full(count, -1),
        time=np.full(count, np.nan),
        log_prob=fields["action_logp"].astype(REWARD),
        version=np.full(count, -1),
        fragment=list(nothing),
        player=list(nothing),
        episode=episode,
        model=list(nothing),
    )


def _episodes(game: Game, file: Any, path: Path, player: str, now: float) -> Iterator[Fragment | str]:
    """Whole episodes: their state in msgpack, with arrays as msgpack-numpy writes them."""
    for batch in file.iter_batches(batch_size=1):
        for item in batch["item"].to_pylist():
            try:
                state = msgspec.msgpack.decode(item)
                yield from _of_state(game, state, player, now)
            except UNREADABLE as error:
                yield f"{path.name}: an episode cannot be read ({type(error).__name__}: {error})"


def _of_state(game: Game, state: dict[str, Any], player: str, now: float) -> Iterator[Fragment]:
    def buffer(name: str) -> Any:
        return state[name]["data"], int(state[name].get("lookback") or 0)

    data, back = buffer("observations")
    obs = _tree(game.observation, data)[back:]
    action = _tree(game.action, buffer("actions")[0])[buffer("actions")[1] :]
    reward = np.asarray(_array(buffer("rewards")[0]), float)[buffer("rewards")[1] :]
    chance = (state.get("extra_model_outputs") or {}).get("action_logp")
    log_prob = None if not chance else np.asarray(_array(chance["data"]), REWARD)[int(chance.get("lookback") or 0) :]
    most, first = longest(game), int(state.get("t_started") or 0)
    for at in range(0, len(reward), most):
        last = min(at + most, len(reward))
        ends = last == len(reward)
        part = None if log_prob is None else log_prob[at:last]
        yield renamed(
            pack(
                game,
                Columns(obs[at : last + 1], action[at:last], reward[at:last], part),
                id="?",
                player=player,
                episode=str(state["id_"]),
                start=first + at,
                time=now,
                terminated=ends and bool(state["is_terminated"]),
                truncated=ends and bool(state["is_truncated"]),
            )
        )


def _tree(space: Space, data: Any) -> Array:
    if isinstance(space, Dict):
        out: Array | None = None
        for name, part in space.fields.items():
            values = _tree(part, [row[name] for row in data] if isinstance(data, list) else data[name])
            out = np.empty(len(values), space.element) if out is None else out
            out[name] = values
        assert out is not None
        return out
    values = _array(data)
    return cast(space, values.reshape(len(values), *space.element.shape))


def _array(data: Any) -> Array:
    if isinstance(data, list):
        return np.stack([_array(one) if isinstance(one, dict) else np.asarray(one) for one in data])
    fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in data.items()}
    kind = fields.get("kind", b"")
    if not fields.get("nd") and "data" in fields:  # one number
        return np.frombuffer(fields["data"], np.dtype(fields["type"]))[0]
    if kind in (b"O", "O"):
        raise ValueError(PICKLED)
    return np.frombuffer(fields["data"], np.dtype(fields["type"])).reshape(fields["shape"])
