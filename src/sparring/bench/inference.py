"""`sparring bench inference`: the same policies by one runtime after the other, each in a process of its own."""

import csv
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.bench import placing, runtimes
from sparring.bench.child import Died, open_child
from sparring.bench.timed_play import Order, Result
from sparring.edge import dataset, edge_tpu
from sparring.errors import InputError, SparringError, Unrenderable
from sparring.experiment import override
from sparring.export import formats, weights
from sparring.export.formats import Given
from sparring.games import Game, catalog, compatible
from sparring.games.spec import Array
from sparring.metering.energy import Meter
from sparring.networks.policy import Policy
from sparring.policies import DEFAULT_REGISTRY, load_policy

__all__ = ["InferenceSettings", "Measured", "Model", "find", "measure_all", "video_name"]

FOREIGN = (".onnx", ".tflite")
TRIAL_S = 120.0  # for a file of others: to load, and for its first inferences
USUAL = ("jax", "numpy", "onnx")


@dataclass(frozen=True, eq=False)
class Model:
    """What plays: a policy, or a file that somebody else may have made.

    :param run: The run that it is of, as `RUN@40`, where one of RLlib's algorithms learned it.
    """

    name: str
    game: Game
    policy: Policy | None = None
    file: Path | None = None
    run: str | None = None

    def runtimes(self, asked: Sequence[str] | None) -> list[str]:
        """What was asked for; else what is usual, and of a file the one that it is for."""
        if asked is not None:
            return list(asked)
        return list(USUAL) if self.file is None else [formats.format_of(self.file)]

    def refusal(self, name: str, asked: Sequence[str] | None) -> str | None:
        """Why a runtime does not play this; None: it does."""
        if name == "rllib" and self.run is None:
            return f"rllib plays whole checkpoints of runs of rllib/…, such as RUN or RUN@40: {self.name} is none"
        if self.file is None:
            return None
        form, own = runtimes.RUNTIMES[name], formats.format_of(self.file)
        if form is None or Path(f"x{formats.find_format(form).suffix}").suffix != self.file.suffix:
            return f"{name} does not play files that end in {self.file.suffix}"
        if own in (asked or ()) and name not in (own, "coral"):
            return f"by {own} it is the same"
        return None


@dataclass(frozen=True)
class InferenceSettings:
    """How all of them play. See `Order`."""

    episodes: int | None = None
    steps: int | None = None
    seed: int = 0
    warmup: int = 20
    threads: int = 1
    cores: tuple[int, ...] | None = None
    gpus: tuple[int, ...] = ()
    steady: float = 2.0
    calibrate: int = 100
    meter: str | None = None
    estimate: bool = True
    info: bool = False
    videos: Path | None = None


@dataclass
class Measured:
    """One model by one runtime, or why not."""

    model: Model
    runtime: str
    file_bytes: int | None = None
    export_s: float | None = None
    result: Result | None = None
    skipped: str | None = None
    failed: bool = False  # when it was measured: `skipped` says why
    video: Path | None = None
    no_video: str | None = None  # why, where one was asked for
    times: Path | None = None  # lines of STEP_COLUMNS
    info: Path | None = None
    ms: Array = field(default_factory=lambda: np.empty(0))
    call_ms: Array = field(default_factory=lambda: np.empty(0))


def find(target: str, game: str | None, registry: str = DEFAULT_REGISTRY, changes: Sequence[str] = ()) -> Model:
    """:param changes: Of the game, such as `game.pixels=168`.
    :raises InputError: there is no such model, a file without a game, or the model does not play the game.
    """
    path = Path(target)
    if path.suffix in FOREIGN and path.is_file():
        if game is None:
            raise InputError(
                f"{target} does not say what it plays: name a game with --game, such as --game CartPole-v1"
            )
        formats.format_of(path)
        return Model(path.name, _changed(catalog.load(game), changes), file=path)
    if path.suffix in FOREIGN:
        raise InputError(f"there is no file {target}")
    if path.is_file() and path.suffix != ".safetensors":
        raise InputError(f"{target} cannot be played here: of files only .onnx, .tflite and .safetensors are")
    policy = load_policy(target, registry)
    if game is not None or changes:
        policy = _of_game(policy, policy.game if game is None else catalog.load(game), changes)
    if policy.game.env is None:
        raise InputError(
            f"{policy.game.name} is a declared game: it cannot be simulated. Name one that can, with the same spaces: "
            "--game ID"
        )
    return Model(_name(target), policy.game, policy, run=_rllib_run(target))


def _name(target: str) -> str:
    from sparring.runs.run import find_run

    found = find_run(target)
    if found is None:
        return target
    run, which = found
    return run.path.resolve().name + (f"@{which}" if which else "")


def _rllib_run(target: str) -> str | None:
    from sparring.runs.run import find_run
    from sparring.training.choose import RLLIB

    found = find_run(target)
    if found is None or not found[0].experiment.name.startswith(RLLIB):
        return None
    return target if found[1] != "best" and found[0].checkpoints() else None


def _of_game(policy: Policy, game: Game, changes: Sequence[str]) -> Policy:
    game = _changed(game, changes)
    if (why := compatible.difference(policy.game, game)) is not None:
        raise InputError(f"a policy of {policy.game.name} does not play {game.name}: {why}")
    return replace(policy, game=msgspec.structs.replace(policy.game, env=game.env, env_kwargs=game.env_kwargs))


def _changed(game: Game, changes: Sequence[str]) -> Game:
    if not changes:
        return game
    data = override({"game": {"id": game.env, **(game.env_kwargs or {})}}, changes)
    if other := next((key for key in data if key != "game"), None):
        raise InputError(f"--set {other}: only the game can be set here, such as --set game.pixels=168")
    return catalog.load(data["game"])


def measure_all(
    models: Sequence[Model],
    asked: Sequence[str] | None,
    settings: InferenceSettings,
    folder: Path,
    on_progress: Callable[[str], object] = lambda words: None,
) -> list[Measured]:
    """All is looked at, exported and, where others made it, tried before the first measurement. What a runtime does
    not play is skipped, and says why; so does what fails later.

    :param asked: Names of runtimes; None: what is usual for each model.
    :param folder: For all files of the measurements.
    :raises InputError: something is wrong with what was asked, or nothing of it can be measured.
    """
    if any(model.policy is not None and "coral" in model.runtimes(asked) for model in models):
        edge_tpu.require_compiler()
    if settings.meter is not None:
        Meter(settings.meter).close()
    found: list[Measured] = []
    orders: list[tuple[Measured, Order]] = []
    for model in models:
        given = Given(on_progress=on_progress)
        for name in model.runtimes(asked):
            found.append(each := Measured(model, name, skipped=model.refusal(name, asked)))
            if each.skipped is not None:
                continue
            out = folder / f"{len(found)}"
            out.mkdir()
            try:
                given = _calibrated(model, name, given, settings)
                orders.append((each, _order(each, given, settings, out)))
            except Unrenderable as error:
                each.skipped = str(error)
    if not orders:
        raise InputError("nothing to measure: " + "; ".join(str(each.skipped) for each in found))
    for each, order in orders:
        _try_out(each, order, settings)
    for each, order in orders:
        _measure(each, order, settings, on_progress)
    return found


def _calibrated(model: Model, runtime: str, given: Given, settings: InferenceSettings) -> Given:
    """With observations where the runtime's format asks for some: the same for all formats of a model."""
    form = runtimes.RUNTIMES[runtime]
    if model.policy is None or form is None or given.calibration is not None:
        return given
    if not getattr(formats.find_format(form), "calibrated", False):
        return given
    given.on_progress(f"{model.name}: playing to calibrate {runtime}")
    play = dataset.played(model.policy.game, model.policy, settings.calibrate, settings.seed).obs
    return replace(given, calibration=play)


def _order(each: Measured, given: Given, settings: InferenceSettings, out: Path) -> Order:
    """With the files that the runtime loads."""
    model, policy, file = each.model, None, each.model.file
    form = runtimes.RUNTIMES[each.runtime]
    if model.policy is not None:
        policy = out / "policy.safetensors"
        policy.write_bytes(weights.save(model.policy))
        each.file_bytes = policy.stat().st_size
        if form is not None:
            given.on_progress(f"{model.name}: writing {form}")
            began = time.perf_counter()
            made = formats.render(form, model.policy, "policy", given)
            if each.runtime == "coral":
                (source,) = made.items()
                made, _ = edge_tpu.compiled(*source) or (made, None)
            (file,) = formats.write(made, out)[:1]
            each.export_s = time.perf_counter() - began
    if file is not None:
        each.file_bytes = file.stat().st_size
    if settings.videos is not None:
        from sparring.runs import video

        video.require(model.game)
    return Order(
        runtime=each.runtime,
        game=model.game.to_json().decode(),
        times=str(out / "times.csv"),
        policy=str(policy) if form is None else None,
        run=model.run if each.runtime == "rllib" else None,
        file=None if file is None else str(file),
        episodes=settings.episodes,
        steps=settings.steps,
        seed=settings.seed,
        warmup=settings.warmup,
        threads=settings.threads,
        steady=settings.steady,
        meter=settings.meter,
        estimate=settings.estimate,
        info=str(out / "info.npz") if settings.info else None,
        video=None if settings.videos is None else str(out / video_name(each)),
    )


def video_name(each: Measured) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._@-]', '-', each.model.name)}-{each.runtime}.mp4"


def _try_out(each: Measured, order: Order, settings: InferenceSettings) -> None:
    """An inference by what only its own process may load, since it may end it: files of others."""
    if each.model.file is not None:
        few: dict[str, Any] = {"episodes": None, "steps": 1, "warmup": 0, "steady": 0.0, "info": None, "video": None}
        trial = msgspec.structs.replace(order, **few, meter=None, estimate=False)
        _run(trial, settings, f"{each.model.name} by {each.runtime}", lambda words: None, TRIAL_S)


def _measure(each: Measured, order: Order, settings: InferenceSettings, on_progress: Callable[[str], object]) -> None:
    words = f"{each.model.name} by {each.runtime}"
    on_progress(words)
    try:
        each.result = _run(order, settings, words, on_progress)
    except SparringError as error:  # what else was measured is kept
        each.skipped, each.failed = f"failed: {error}", True
        return
    each.times = Path(order.times)
    each.no_video = each.result.no_video
    film = order.video if each.no_video is None else None
    each.info, each.video = (None if path is None else Path(path) for path in (order.info, film))
    _read(each)


def _run(
    order: Order,
    settings: InferenceSettings,
    what: str,
    on_progress: Callable[[str], object],
    limit: float | None = None,
) -> Result:
    gpus = settings.gpus if order.runtime == "jax" else ()
    environment = placing.environment(gpus, settings.threads)
    try:
        with open_child("sparring.bench.timed_play", order, environment, settings.cores, limit) as child:
            for line in child.lines:
                if "result" in line:
                    return msgspec.convert(line["result"], Result)
                on_progress(f"{what}: {line['steps']:,} inferences, {line['episodes']} episodes")
    except Died as error:
        if order.policy is None:
            raise InputError(f"{what}: the runtime cannot play this file, {error}") from error
        raise
    raise Died(f"{what}: the measuring process ended without a result")


def _read(each: Measured) -> None:
    assert each.times is not None
    with each.times.open(newline="") as file:
        rows = [(float(row[1]), float(row[4])) for row in csv.reader(file)]
    each.ms, each.call_ms = np.array(rows, np.float64).T
