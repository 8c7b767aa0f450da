"""`sparring bench inference`: the same policies by one runtime after the other, each in a process of its own."""

import csv
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from sparring.bench import placing, runtimes
from sparring.bench.child import Died, open_child
from sparring.bench.timed_play import Order, Result
from sparring.edge import dataset, edge_tpu
from sparring.errors import InputError, Unrenderable
from sparring.experiment import override
from sparring.export import formats, weights
from sparring.export.formats import Given
from sparring.games import Game, catalog, compatible
from sparring.games.spec import Array
from sparring.networks.policy import Policy
from sparring.policies import DEFAULT_REGISTRY, load_policy

__all__ = ["InferenceSettings", "Measured", "Model", "find", "measure_all"]

FOREIGN = (".onnx", ".tflite")


@dataclass(frozen=True)
class Model:
    """What plays: a policy, or a file that somebody else may have made."""

    name: str
    game: Game
    policy: Policy | None = None
    file: Path | None = None

    def runtimes(self, asked: Sequence[str]) -> list[str]:
        """Of those that were asked for: all, or those that play the file."""
        if self.file is None:
            return list(asked)
        form = formats.format_of(self.file)
        on_tpu = form.startswith("tflite")
        return [name for name in asked if runtimes.RUNTIMES[name] == form or (name == "coral" and on_tpu)]


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
    policy = load_policy(target, registry)
    if game is not None or changes:
        policy = _of_game(policy, policy.game if game is None else catalog.load(game), changes)
    if policy.game.env is None:
        raise InputError(
            f"{policy.game.name} is a declared game: it cannot be simulated. Name one that can, with the same spaces: "
            "--game ID"
        )
    return Model(_name(target), policy.game, policy)


def _name(target: str) -> str:
    from sparring.runs.run import find_run

    found = find_run(target)
    if found is None:
        return target
    run, which = found
    return run.path.resolve().name + (f"@{which}" if which else "")


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
    asked: Sequence[str],
    settings: InferenceSettings,
    folder: Path,
    on_progress: Callable[[str], object] = lambda words: None,
) -> list[Measured]:
    """One after the other. What a format cannot hold is skipped, and says why; all else that fails ends it.

    :param folder: For the lines and observations of each.
    """
    if any(model.policy is not None and "coral" in model.runtimes(asked) for model in models):
        edge_tpu.require_compiler()
    found: list[Measured] = []
    for model in models:
        names = model.runtimes(asked)
        if not names:
            raise InputError(f"{model.name}: --runtime {','.join(asked)} has none that plays such a file")
        for name in names:
            each = Measured(model, name)
            number = len(found)
            try:
                with tempfile.TemporaryDirectory() as files:
                    order = _order(each, settings, Path(files), folder / f"{number}", on_progress)
                    on_progress(f"{model.name} by {name}")
                    each.result = _run(order, settings, f"{model.name} by {name}", on_progress)
                each.times = Path(order.times)
                each.info = None if order.info is None else Path(order.info)
                _read(each)
            except Unrenderable as error:
                each.skipped = str(error)
            found.append(each)
    return found


def _order(
    each: Measured, settings: InferenceSettings, files: Path, out: Path, on_progress: Callable[[str], object]
) -> Order:
    """With the files that the runtime loads."""
    import time

    model, policy, file = each.model, None, each.model.file
    form = runtimes.RUNTIMES[each.runtime]
    if model.policy is not None:
        policy = files / "policy.safetensors"
        policy.write_bytes(weights.save(model.policy))
        each.file_bytes = policy.stat().st_size
        if form is not None:
            began = time.perf_counter()
            play = None
            if getattr(formats.find_format(form), "calibrated", False):
                on_progress(f"{model.name}: playing to calibrate {each.runtime}")
                play = dataset.played(model.policy.game, model.policy, settings.calibrate, settings.seed).obs
            given = Given(calibration=play, on_progress=on_progress)
            made = formats.render(form, model.policy, "policy", given)
            if each.runtime == "coral":
                (source,) = made.items()
                made, _ = edge_tpu.compiled(*source) or (made, None)
            (file,) = formats.write(made, files)[:1]
            each.export_s = time.perf_counter() - began
    if file is not None:
        each.file_bytes = file.stat().st_size
    video = None
    if settings.videos is not None:
        video = settings.videos / f"{re.sub(r'[^A-Za-z0-9._@-]', '-', model.name)}-{each.runtime}.mp4"
    return Order(
        runtime=each.runtime,
        game=model.game.to_json().decode(),
        times=f"{out}.csv",
        policy=str(policy) if form is None else None,
        file=None if file is None else str(file),
        episodes=settings.episodes,
        steps=settings.steps,
        seed=settings.seed,
        warmup=settings.warmup,
        threads=settings.threads,
        steady=settings.steady,
        meter=settings.meter,
        estimate=settings.estimate,
        info=f"{out}.npz" if settings.info else None,
        video=None if video is None else str(video),
    )


def _run(order: Order, settings: InferenceSettings, what: str, on_progress: Callable[[str], object]) -> Result:
    gpus = settings.gpus if order.runtime == "jax" else ()
    environment = placing.environment(gpus, settings.threads)
    try:
        with open_child("sparring.bench.timed_play", order, environment, settings.cores) as child:
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
