"""From files, or another store, into a store. Ids are carried along or follow from the content, so that once more
changes nothing; the check is that of uploads, but for the age of play."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sparring.data.csv_files import read_csv
from sparring.data.exporting import UNFINISHED, find_game
from sparring.data.minari_files import read_minari
from sparring.data.npz_files import read_npz
from sparring.data.parquet_files import read_parquet
from sparring.data.rllib_files import read_rllib
from sparring.data.steps import cut_steps
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.experience.validate import check
from sparring.games import Game
from sparring.store import open_store
from sparring.store.protocol import Outcome, Store

__all__ = ["FORMATS", "Imported", "declaration", "read", "require_same_game", "store_fragments"]

FORMATS = ("parquet", "npz", "csv", "minari", "rllib", "store")
GROUP, GROUP_BYTES = 500, 16 << 20  # fragments stored at once
REASONS = 20  # different ones that are shown


class Imported(msgspec.Struct):
    fragments: int = 0
    steps: int = 0
    duplicates: int = 0  # were there already, or were erased
    rejected: int = 0
    reasons: dict[str, int] = {}


def declaration(source: str) -> Game | None:
    """The game that an export lies beside, if it says."""
    path = (Path(source) if Path(source).is_dir() else Path(source).parent) / "game.json"
    return Game.from_json(path.read_bytes()) if path.is_file() else None


def require_same_game(game: Game, source: str, *, other: bool = False) -> None:
    """InputError when an export is of another game. `other`: another name may be, other spaces never."""
    theirs = declaration(source)
    if theirs is None:
        return
    if theirs.schema != game.schema:
        differ = [part for part in ("observation", "action", "players") if getattr(theirs, part) != getattr(game, part)]
        raise InputError(
            f"{source} holds play of {theirs.name!r}, whose {' and '.join(differ)} differ from {game.name}'s"
        )
    if theirs.name != game.name and not other:
        raise InputError(
            f"{source} holds play of {theirs.name!r}, not of {game.name!r}: --other-game takes it all the same"
        )


def read(game: Game, source: str, form: str, player: str | None = None) -> Iterator[Fragment | str]:
    """Fragments of files or of another store, or why something is none.

    :param source: A directory or a file; for `store` a store's address.
    :param form: One of FORMATS.
    :param player: Whose play it is where files do not say.
    """
    if form not in FORMATS:
        raise InputError(f"no format {form!r}: choose one of {', '.join(FORMATS)}")
    if form == "store":
        yield from _of_store(game, source)
        return
    path, now, who = Path(source), time.time(), player or form
    if not path.exists():
        raise InputError(f"there is nothing at {source}")
    if UNFINISHED in path.resolve().name:
        raise InputError(f"{source} is what an export left behind that was cut short: export again")
    name = path.resolve().name
    if form == "minari":
        yield from read_minari(game, path, who, name, now)
        return
    suffixes = {"parquet": (".parquet",), "npz": (".npz",), "csv": (".csv",), "rllib": (".parquet", ".json", ".jsonl")}
    own = ("game.json", "export.json")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in suffixes[form])
    files = [p for p in files if p.name not in own and not p.name.startswith(".")]
    if not files:
        raise InputError(f"no {' or '.join(suffixes[form])} file in {source}")
    for file in files:
        at = f"{name}/{file.name}" if path.is_dir() else file.name
        if form == "npz":
            yield from read_npz(game, file, who, at, now)
        elif form == "rllib":
            yield from read_rllib(game, file, who, at, now)
        else:
            yield from cut_steps(game, (read_parquet if form == "parquet" else read_csv)(game, file), who, at, now)


def _of_store(game: Game, address: str) -> Iterator[Fragment]:
    store = open_store(address, readonly=True)
    try:
        theirs = find_game(store, game.name)
        if theirs.schema != game.schema:
            raise InputError(f"{game.name} has schema {theirs.schema} there and {game.schema} here: its spaces differ")
        for piece in store.scan(theirs.name):  # theirs may have got another name, or ours
            yield from (msgspec.structs.replace(f, game=game.name) for f in piece)
    finally:
        store.close()


def store_fragments(
    store: Store,
    game: Game,
    found: Iterator[Fragment | str],
    on_progress: Callable[[Imported], object] = lambda done: None,
) -> Imported:
    """Checks and stores, some at a time. What is rejected is noted in the store's quarantine, too."""
    done, reasons = Imported(), Counter[str]()
    group: list[Fragment] = []
    size = 0

    def reject(reason: str) -> None:
        done.rejected += 1
        reasons[reason if reason in reasons or len(reasons) < REASONS else "other reasons"] += 1

    def flush() -> None:
        for reason in _store(store, game, group, done):
            reject(reason)
        done.reasons = dict(reasons)
        group.clear()
        on_progress(done)

    for one in found:
        if isinstance(one, str):
            reject(one)
            continue
        group.append(one)
        size += len(one.obs)
        if len(group) >= GROUP or size >= GROUP_BYTES:
            flush()
            size = 0
    flush()
    return done


def _store(store: Store, game: Game, group: list[Fragment], done: Imported) -> Iterator[str]:
    now = time.time()
    # Old play may come in this way: its time is what it was, and only one in the future is wrong.
    today = [msgspec.structs.replace(f, time=now) if 0 < f.time < now else f for f in group]
    good = []
    for f, reason in zip(group, check(game, today, now), strict=True):
        if reason is None:
            good.append(f)
        else:
            store.quarantine(game.name, f.player, f.id, f"import: {reason}")
            yield reason
    for f, outcome in zip(good, store.append(good), strict=True):
        if outcome is Outcome.STORED:
            done.fragments += 1
            done.steps += f.steps
        elif outcome is Outcome.CONFLICT:
            yield "its id is stored already, with other content"
        else:
            done.duplicates += 1
