"""From a store to files, some at a time: memory does not grow with the play."""

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sparring.data.csv_files import CsvWriter
from sparring.data.minari_files import MinariWriter
from sparring.data.npz_files import NpzWriter
from sparring.data.parquet_files import ParquetWriter
from sparring.data.selection import Selection
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.family import Family
from sparring.store.protocol import Store

__all__ = ["FORMATS", "ExportedPlay", "export", "find_game", "unfinished"]

FORMATS = ("parquet", "npz", "csv", "minari")
UNFINISHED = ".unfinished-"
PART_STEPS, PART_BYTES = 65_536, 64 << 20  # of a file, before compression


class ExportedPlay(msgspec.Struct):
    fragments: int = 0
    steps: int = 0
    files: int = 0


class FileWriter(Protocol):
    suffix: str

    def write(self, path: Path, fragments: list[Fragment]) -> None: ...


class _Parts:
    """`part-00000.parquet` and so on, whole or not there."""

    def __init__(self, writer: Any, out: Path) -> None:
        self._writer: FileWriter = writer
        self._out, self.files = out, 0
        self._waiting: list[Fragment] = []
        self._steps = self._bytes = 0

    def add(self, fragments: list[Fragment]) -> None:
        for f in fragments:
            self._waiting.append(f)
            self._steps, self._bytes = self._steps + f.steps, self._bytes + len(f.obs)
            if self._steps >= PART_STEPS or self._bytes >= PART_BYTES:
                self.close()

    def close(self) -> None:
        if not self._waiting:
            return
        name = f"part-{self.files:05}{self._writer.suffix}"
        new = self._out / f".new{self._writer.suffix}"
        self._writer.write(new, self._waiting)
        new.replace(self._out / name)
        self.files += 1
        self._waiting, self._steps, self._bytes = [], 0, 0


def find_game(store: Store, name: str) -> Game:
    """By its name, or a further one that it was given."""
    games = Family(store.games(), store.profiles())
    if (found := games.find(name)) is not None:
        return found
    if name in (unreadable := store.unreadable()):
        raise InputError(unreadable[name])
    known = ", ".join(sorted(game.name for game in games.games)[:20])
    raise InputError(f"no game {name!r} in this store: it has {known or 'none'}")


def export(
    store: Store,
    name: str,
    out: Path,
    form: str,
    selection: Selection | None = None,
    on_progress: Callable[[int], object] = lambda steps: None,
) -> ExportedPlay:
    """Writes what a selection names of a game into a new directory, with the game's declaration: all of it, or nothing.

    :param form: One of FORMATS.
    :param on_progress: Is called with the steps read so far, of those that the store has.
    :raises InputError: there is no such game or format, or the directory has something in it.
    """
    if form not in FORMATS:
        raise InputError(f"no format {form!r}: choose one of {', '.join(FORMATS)}")
    game = find_game(store, name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} has something in it: name a new directory")
    writers: dict[str, Any] = {"parquet": ParquetWriter, "npz": NpzWriter, "csv": CsvWriter}
    made = None if form == "minari" else writers[form](game)
    out.parent.mkdir(parents=True, exist_ok=True)
    # What is not whole has another name: nobody takes it for an export.
    new = Path(tempfile.mkdtemp(prefix=f"{out.name}{UNFINISHED}", dir=out.parent))
    try:
        done = _write(store, game, new, form, made, selection, on_progress)
        new.chmod(0o777 & ~_umask())
        new.replace(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return done


def unfinished(out: Path) -> list[Path]:
    """What exports to this directory left behind that were killed."""
    return sorted(path for path in out.parent.glob(f"{glob.escape(out.name)}{UNFINISHED}*") if path.is_dir())


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _write(
    store: Store,
    game: Game,
    out: Path,
    form: str,
    made: Any,
    selection: Selection | None,
    on_progress: Callable[[int], object],
) -> ExportedPlay:
    writer: Any = MinariWriter(game, out) if made is None else _Parts(made, out)
    (out / "game.json").write_bytes(game.to_json())
    done, seen = ExportedPlay(), 0
    for piece in store.scan(game.name):
        some = [f for f in piece if selection is None or f in selection]
        writer.add(some)
        seen += sum(f.steps for f in piece)
        done.fragments += len(some)
        done.steps += sum(f.steps for f in some)
        on_progress(seen)
    writer.close()
    done.files = sum(1 for path in out.rglob("*") if path.is_file())
    summary: dict[str, object] = {"format": form, "game": game.name, "schema": game.schema}
    summary |= {"fragments": done.fragments, "steps": done.steps}
    (out / "export.json").write_text(json.dumps(summary))
    return done
