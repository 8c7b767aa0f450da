"""CSV: a row for each step, a column for each number. For spreadsheets; images are too wide for it."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sparring.data.limits import errors_naming, lines_of
from sparring.data.steps import Steps, leaves, need, of_fragments, whole_numbers
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.experience.fragment import REWARD
from sparring.games import Game
from sparring.games.spec import Array, Space
from sparring.games.spec import column as checked

__all__ = ["CsvWriter", "read_csv"]

WIDEST = 4096  # numbers of an observation
ROWS = 4096  # read at once
MOST_COLUMNS, LINE = 20_000, 4 << 20  # of a file of others; characters of a line
FORMULA = "=+-@'"
TOO_MANY = "\0"  # no column of a file has this name


def headers(space: Space, name: str) -> list[str]:
    """A name for each number of a space: obs.0, obs.1 …, or obs.position.0 of a dict."""
    found = []
    for leaf, _, part in leaves(space, name):
        size = int(np.prod(part.element.shape))
        found += [leaf] if not part.element.shape else [f"{leaf}.{i}" for i in range(size)]
    return found


def _numbers(space: Space, column: Array) -> list[list[Any]]:
    parts = [column if field is None else column[field] for _, field, _ in leaves(space, "")]
    flat = [(part.astype("u1") if part.dtype == bool else part).reshape(len(column), -1).tolist() for part in parts]
    return [[value for part in row for value in part] for row in zip(*flat, strict=True)]


class CsvWriter:
    suffix = ".csv"

    def __init__(self, game: Game) -> None:
        self._obs, self._action = headers(game.observation, "obs"), headers(game.action, "action")
        if len(self._obs) > WIDEST:
            raise InputError(f"an observation of {game.name} has {len(self._obs)} numbers: use --format parquet or npz")
        self._game = game

    def write(self, path: Path, fragments: Sequence[Fragment]) -> None:
        rows = of_fragments(self._game, fragments)
        obs, action = _numbers(self._game.observation, rows.obs), _numbers(self._game.action, rows.action)
        after = _numbers(self._game.observation, rows.next_obs)
        blank = [""] * len(self._obs)
        with path.open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            begin, end = ["player", "episode", "step"], ["log_prob", "model", "version", "time", "fragment"]
            later = headers(self._game.observation, "next_obs")
            out.writerow([*begin, *self._obs, *self._action, "reward", "terminated", "truncated", *later, *end])
            for i in range(len(rows)):
                log_prob, version = float(rows.log_prob[i]), int(rows.version[i])
                labels = "" if np.isnan(log_prob) else log_prob, _safe(rows.model[i]), "" if version < 0 else version
                ended = int(rows.terminated[i]), int(rows.truncated[i]), *(after[i] if rows.has_next[i] else blank)
                place = _safe(rows.player[i]), _safe(rows.episode[i]), int(rows.step[i])
                when = repr(float(rows.time[i])), _safe(rows.fragment[i])
                out.writerow([*place, *obs[i], *action[i], float(rows.reward[i]), *ended, *labels, *when])


def read_csv(game: Game, path: Path) -> Iterator[Steps]:
    """The rows of a file, some at a time."""
    wanted = [*headers(game.observation, "obs"), *headers(game.action, "action"), "reward"]
    with errors_naming(path), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(lines_of(file, path, LINE), restkey=TOO_MANY, restval=None)
        names = list(lines.fieldnames or ())
        if len(names) > MOST_COLUMNS:
            raise InputError(f"{path} has {len(names)} columns, at most {MOST_COLUMNS} are read")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise InputError(f"{path} has the column {twice[0]!r} twice")
        need(names, wanted, path)
        while some := list(islice(lines, ROWS)):
            with errors_naming(f"{path}, around line {lines.line_num}"):
                for row in some:
                    if TOO_MANY in row or row[names[-1]] is None:
                        raise ValueError(f"a row has more or fewer values than the {len(names)} columns")
                yield _steps(game, some)


def _column(space: Space, name: str, rows: Sequence[dict[str, str]]) -> Array:
    out = np.empty(len(rows), space.element)
    for leaf, field, part in leaves(space, name):
        named = headers(part, leaf)
        read = _whole if part.element.base.kind in "iub" else float
        values: Array = np.array([[read(row[key]) for key in named] for row in rows])
        values = checked(part, values.reshape(len(rows), *part.element.shape))
        if field is None:
            return values
        out[field] = values
    return out


def _whole(text: str) -> int:
    """Not by way of a float, which has 53 bits. What spreadsheets make of numbers (1.0, 1e3, TRUE) is read, too."""
    try:
        return int(text)
    except ValueError:
        if text.strip().lower() in ("true", "false"):
            return int(text.strip().lower() == "true")
        if not (number := float(text)).is_integer():
            raise ValueError(f"expected a whole number, got {text[:50]!r}") from None
        return int(number)


def _safe(text: str | None) -> str | None:
    """A text that a spreadsheet takes for a formula gets an apostrophe before it, which reading takes away."""
    return f"'{text}" if text and text[0] in FORMULA else text


def _plain(text: str | None) -> str | None:
    return text[1:] if text and text[0] == "'" and text[1:2] and text[1] in FORMULA else text


def _steps(game: Game, rows: list[dict[str, str]]) -> Steps:
    def each(name: str, nothing: float) -> Array:
        return np.array([float(row.get(name) or nothing) for row in rows])

    def text(name: str) -> list[str | None]:
        return [_plain(row.get(name)) or None for row in rows]

    obs = _column(game.observation, "obs", rows)
    later = headers(game.observation, "next_obs")
    has_next = np.array([bool(row.get(later[0])) for row in rows])
    next_obs = np.zeros_like(obs)
    if has_next.any():
        some = [row for row, has in zip(rows, has_next, strict=True) if has]
        next_obs[has_next] = _column(game.observation, "next_obs", some)
    flags = {name: each(name, 0).astype(bool) for name in ("terminated", "truncated")}
    whole = {name: whole_numbers(name, each(name, -1)) for name in ("step", "version")}
    return Steps(
        obs=obs,
        action=_column(game.action, "action", rows),
        reward=each("reward", np.nan).astype(REWARD),
        next_obs=next_obs,
        has_next=has_next,
        time=each("time", np.nan),
        log_prob=each("log_prob", np.nan).astype(REWARD),
        fragment=text("fragment"),
        player=text("player"),
        episode=text("episode"),
        model=text("model"),
        **flags,
        **whole,
    )
