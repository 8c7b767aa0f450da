"""`sparring export`: a policy in several formats, each compared with the policy, and `export.json` beside them. Nothing
is written before all of it is there."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from sparring import __version__
from sparring.edge import dataset
from sparring.edge.comparison import Comparison, Expected, ReturnsOfBoth, compare, expect, returns
from sparring.edge.edge_tpu import Mapping, compiled
from sparring.errors import InputError, NotInstalled
from sparring.export import formats, whole_numbers
from sparring.export.formats import Given
from sparring.export.safetensors_file import PolicyRunner
from sparring.export.whole_numbers import LEAST
from sparring.files import locked
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.plain import Value
from sparring.networks.policy import Policy
from sparring.networks.spec import feature_shape

__all__ = ["EXPORT", "Exported", "Wanted", "export"]

EXPORT = "export.json"
HELD_OUT, HELD_OUT_SEED = 1_000, 1_000_003
CALIBRATION, CALIBRATION_IMAGES = 4_000, 500
Progress = Callable[[str, int, int], object]  # what is done, how much of how much


class Exported(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `export.json` says of a file, by its name."""

    format: str
    bytes: int
    seconds: float  # to render it
    observations: str  # where those came from that it was compared on
    calibration: str | None = None
    tuned: bool | None = None  # weights of whole numbers, as rounding alone cost too much
    comparison: Comparison | None = None
    returns: ReturnsOfBoth | None = None
    edge_tpu: Mapping | None = None
    not_compared: str | None = None  # why


class Page(msgspec.Struct, frozen=True):
    policy: str
    game: str
    sparring: str
    files: dict[str, Exported]


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is asked for.

    :param formats: Names of formats.
    :param calibrate: How many observations of the policy's play, or an npz; None: as many as are usual.
    :param episodes: To compare returns with; 0: none.
    """

    formats: Sequence[str]
    stem: str
    out: Path
    value: Value | None = None
    calibrate: int | Path | None = None
    episodes: int = 20


def export(
    policy: Policy, wanted: Wanted, on_progress: Progress = lambda words, done, total: None
) -> dict[str, Exported]:
    """What was written, by name.

    :raises InputError: a format cannot hold the policy, there is too little to calibrate with, or no place to write.
    """
    dataset.check_place(wanted.out)
    _check_use(policy, wanted)
    if (why := policy.problem()) is not None:
        raise InputError(f"not exported: {why}")
    obs, where = _held_out(policy, wanted, on_progress)
    held = expect(policy, obs)
    files: dict[str, bytes] = {}
    found: dict[str, Exported] = {}
    calibration: tuple[Array | None, str | None] = None, None
    given = Given(wanted.value)
    for name in dict.fromkeys(wanted.formats):
        whole = _is_whole(name)
        if whole and calibration[0] is None:
            calibration = _calibration(policy, wanted, on_progress)
            given = Given(wanted.value, calibration[0], partial(_report_under, on_progress, "whole numbers"))
        on_progress(f"{name}: writing", 0, 1)
        start = time.perf_counter()
        made = formats.render(name, policy, wanted.stem, given)
        seconds = round(time.perf_counter() - start, 3)
        tuned = whole_numbers.of(policy, given).tuned if getattr(formats.find_format(name), "tunes", False) else None
        row = Exported(name, sum(map(len, made.values())), seconds, where, calibration[1] if whole else None, tuned)
        found |= _compared(policy, wanted, name, made, row, held, on_progress)
        files |= made
    _add_compiled(files, found)
    formats.write(files, wanted.out)
    with locked(wanted.out, wait=True):  # others may export to the same place
        formats.write({EXPORT: _page(policy, wanted, found)}, wanted.out)
    return found


def _report_under(on_progress: Progress, name: str, words: str) -> None:
    on_progress(f"{name}: {words}", 0, 1)


def _check_use(policy: Policy, wanted: Wanted) -> None:
    """What is asked for is needed."""
    whole = [name for name in wanted.formats if _is_whole(name)]
    compares = isinstance(wanted.calibrate, Path) and policy.game.env is None  # it has the only play there is
    if wanted.calibrate is not None and not whole and not compares:
        names = ", ".join(name for name in formats.FORMATS if _is_whole(name))
        raise InputError(
            f"--calibrate is for whole numbers ({names}), {', '.join(wanted.formats)} has none: leave it out"
        )


def _is_whole(name: str) -> bool:
    return bool(getattr(formats.find_format(name), "calibrated", False))


def _held_out(policy: Policy, wanted: Wanted, on_progress: Progress) -> tuple[Array, str]:
    """Observations to compare on: of the policy's own play, in other episodes than those for calibration."""
    if policy.game.env is not None:
        sample = dataset.played(
            policy.game, policy, HELD_OUT, HELD_OUT_SEED, lambda done, total: on_progress("playing", done, total)
        )
        return sample.obs, "the policy's play"
    if isinstance(wanted.calibrate, Path):
        held = _split(wanted.calibrate, policy.game)[1]
        return held, f"the last {len(held)} observations of {wanted.calibrate.name}"
    return _made_up(policy), "made up: the game cannot be simulated"


def _made_up(policy: Policy) -> Array:
    """Numbers around what the policy has seen; without a normaliser, small ones."""
    from sparring.edge.made_up import observations

    return observations(policy, HELD_OUT, np.random.default_rng(HELD_OUT_SEED))


def _split(path: Path, game: Game) -> tuple[Array, Array]:
    """Of a game that cannot be simulated: to calibrate with, and the end of the file, to compare on."""
    obs = dataset.read(path, game)
    held = min(max(1, len(obs) // 5), HELD_OUT)
    return obs[:-held], obs[-held:]


def _calibration(policy: Policy, wanted: Wanted, on_progress: Progress) -> tuple[Array, str]:
    space = policy.game.observation
    if isinstance(wanted.calibrate, Path):
        if policy.game.env is None:
            obs, held = _split(wanted.calibrate, policy.game)
            if len(obs) < LEAST:
                raise InputError(
                    f"{wanted.calibrate} has {len(obs) + len(held)} observations: {len(held)} are kept to compare on, "
                    f"and {len(obs)} are too few to calibrate with: give {LEAST * 5 // 4} or more"
                )
        else:
            obs = dataset.read(wanted.calibrate, policy.game)
        return obs, f"{len(obs)} observations of {wanted.calibrate.name}"
    count = wanted.calibrate or (CALIBRATION_IMAGES if len(feature_shape(space)) == 3 else CALIBRATION)
    sample = dataset.played(
        policy.game, policy, count, 0, lambda done, total: on_progress("playing to calibrate", done, total)
    )
    return sample.obs, f"{len(sample.obs)} observations of the policy's play"


def _compared(
    policy: Policy,
    wanted: Wanted,
    name: str,
    made: dict[str, bytes],
    row: Exported,
    held: Expected,
    on_progress: Progress,
) -> dict[str, Exported]:
    """Loaded from files, as whoever gets them does. Formats that cannot be loaded are listed alone."""
    first = next(iter(made))
    if not callable(getattr(formats.find_format(name), "load", None)):
        return {each: msgspec.structs.replace(row, bytes=len(data)) for each, data in made.items()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = formats.write(made, Path(folder))[0]
        except InputError as error:
            raise InputError(f"{error}. It is compared in a temporary folder: TMPDIR names another place") from error
        try:
            runner = formats.load(path, policy.game, name)
        except NotInstalled as error:
            return {first: msgspec.structs.replace(row, not_compared=str(error))}
        on_progress(f"{name}: comparing", 0, 1)
        row = msgspec.structs.replace(row, comparison=compare(policy, runner, held, whole=row.calibration is not None))
        if wanted.episodes and policy.game.env is not None and not isinstance(runner, PolicyRunner):
            total = 2 * wanted.episodes
            played = returns(
                policy, runner, wanted.episodes, lambda done: on_progress(f"{name}: episodes of both", done, total)
            )
            row = msgspec.structs.replace(row, returns=played)
    return {first: row}


def _add_compiled(files: dict[str, bytes], found: dict[str, Exported]) -> None:
    """What the Edge TPU runs, where its compiler is installed."""
    for name in [name for name, row in found.items() if row.format == "tflite-int8"]:
        if (made := compiled(name, files[name])) is not None:
            files |= made[0]
            found[name] = msgspec.structs.replace(found[name], edge_tpu=made[1])


def _page(policy: Policy, wanted: Wanted, found: dict[str, Exported]) -> bytes:
    """With what earlier exports to the same place said of files that are still there."""
    earlier: dict[str, Exported] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        page = msgspec.json.decode((wanted.out / EXPORT).read_bytes(), type=Page)
        earlier = {name: row for name, row in page.files.items() if (wanted.out / name).is_file()}
    page = Page(wanted.stem, policy.game.name, __version__, earlier | found)
    return msgspec.json.format(msgspec.json.encode(page)) + b"\n"
