"""The commands about runs, as functions that typer reads: train, evaluate, record, plot, publish, export, runs. They
parse and print; what they do is elsewhere, and is loaded when it is asked for."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.experiment import Experiment
    from sparring.games import Game
    from sparring.registry.registry import Registry as Models

__all__ = ["evaluate", "export", "plot", "publish", "record", "runs", "schema", "train"]

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@WHICH]|MODEL",
        help="A run directory (its last policy; RUN@best, RUN@40: another that it keeps), or a published "
        "GAME[/MODEL[/VERSION]].",
    ),
]
Registry = Annotated[str, typer.Option(help="Where models are published: a directory or a bucket's URL.")]
DEFAULT_REGISTRY = ".sparring/registry"


def train(
    target: Annotated[
        str, typer.Argument(metavar="EXPERIMENT.yaml|GAME|RUN", help="An experiment, a game's id, or a run to resume.")
    ],
    algorithm: Annotated[str | None, typer.Option(help="dqn, ppo, …, or module:Class of your own.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a key, such as algorithm.lr=1e-3; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory; default: the next under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
) -> None:
    """Train by simulation (or from a store) until the experiment's stop condition.

    A game's id alone stops after 100,000 steps and is evaluated every 10 iterations, unless --set says otherwise.

    Exit codes: 0 done, 2 wrong input, 75 interrupted by SIGTERM or Ctrl-C after a checkpoint was written (--resume
    goes on), 1 anything else.
    """
    from rich.console import Console

    from sparring.runs.live_view import view_for
    from sparring.training import loop

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    console = Console()
    changes = list(changes or [])
    try:
        if resume:
            if algorithm is not None or out is not None:
                raise InputError("--resume takes a run directory and --set only: everything else is in the run")
            run = loop.resume(target, changes, view_for(console))
        else:
            run = loop.train(experiment_of(target, algorithm, changes, out), view_for(console))
    except loop.Interrupted as error:
        console.print(str(error), markup=False)
        raise typer.Exit(loop.INTERRUPTED) from error
    console.print(f"done: {run.path}", markup=False, highlight=False, soft_wrap=True)


def experiment_of(target: str, algorithm: str | None, changes: list[str], out: Path | None = None) -> "Experiment":
    """Of an experiment's file or a game's id, as every command that trains takes it."""
    from sparring import algorithms
    from sparring.experiment import Experiment, override, read
    from sparring.games import catalog
    from sparring.runs.run import is_run

    if is_run(Path(target)):
        raise InputError(f"{target} is a run: continue it with --resume (sparring train {target} --resume)")
    if Path(target).suffix.lower() in (".yaml", ".yml"):
        if algorithm is not None:
            changes = [f"algorithm.name={algorithm}", *changes]
        experiment = read(Path(target), changes)
    else:
        name = algorithm or algorithms.default_for(catalog.load(target))
        data = override({"game": target, "algorithm": {"name": name}}, changes)
        if data.get("source") != "store":
            data = {"stop": {"steps": 100_000}, "evaluation": {"every": 10}} | data
        experiment = Experiment.parse(data)
    return experiment if out is None else msgspec.structs.replace(experiment, out=str(out))


def evaluate(
    target: Target,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes to play.")] = 20,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    explore: Annotated[bool, typer.Option(help="Play as while learning, not greedily.")] = False,
    registry: Registry = DEFAULT_REGISTRY,
) -> None:
    """Play whole episodes with a run's or a published policy and print the returns."""
    from sparring.policies import load_policy
    from sparring.training.evaluate import play, summary

    policy = load_policy(target, registry)
    with _progress("playing", episodes) as progress:
        played = play(
            policy, episodes, seed, explore=explore, on_episode=lambda ended: progress(ended, f"{ended} episodes")
        )
    for name, value in summary(played).items():
        typer.echo(f"{name.partition('/')[2]:12} {value:,.2f}".rstrip("0").rstrip("."))


def record(
    target: Target,
    out: Annotated[Path | None, typer.Argument(help="The .mp4 to write; default: the next to a run's others.")] = None,
    episodes: Annotated[int, typer.Option(min=1)] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    registry: Registry = DEFAULT_REGISTRY,
) -> None:
    """Write a video of a run's or a published policy; needs no display."""
    from sparring.policies import load_policy
    from sparring.runs import video

    policy = load_policy(target, registry)
    out = out or _video(target)
    with _progress("recording", episodes) as progress:
        returns = video.record(
            policy, out, episodes, seed, on_frame=lambda episode, frames: progress(episode, f"{frames:,} frames")
        )
    typer.echo(f"{out}: returns {', '.join(f'{ret:.1f}' for ret in returns)}")


def _video(target: str) -> Path:
    """Each iteration of a run has its place; a model's video goes here."""
    from sparring.runs.run import find_run

    if (found := find_run(target)) is None:
        return Path(target.replace("/", "-") + ".mp4")
    run, which = found
    if which == "best" and (best := run.best()) is not None:
        return run.video(best.iteration)
    newest = max((int(path.name) for path in run.checkpoints()), default=0)
    return run.video(newest if which in (None, "last") else int(which))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """On a terminal only, gone when it is done; called with how many of `total` are done, and words."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, words="")
        yield lambda done, words: progress.update(task, completed=done, words=words)


def plot(
    targets: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Runs; same experiment, other seed: one curve.")
    ],
    out: Annotated[Path, typer.Option(help="The figure to write: .png, .svg or .pdf.")],
) -> None:
    """Draw return by steps and by time, with 95 % confidence over seeds, and where the time went."""
    from sparring.runs import plot as figures
    from sparring.runs.run import Run, find_run

    for path in targets:
        if (found := find_run(str(path))) is not None and found[1] is not None:
            raise InputError(f"plot draws whole runs: leave out @{found[1]}")
    figures.plot([Run(path) for path in targets], out)
    typer.echo(str(out))


def publish(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@WHICH]",
            help="A run directory: its best evaluated policy, or RUN@last, RUN@40, … of those it keeps.",
        ),
    ],
    model: Annotated[str, typer.Option(help="The model's name.")] = "bot",
    registry: Registry = DEFAULT_REGISTRY,
    game: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Publish for this game instead: its name on the platform, or its .json declaration."
        ),
    ] = None,
) -> None:
    """Publish a run's policy as the next version of a model: the best evaluated one, unless another is named.

    With --game the run's game and the other one must have the same spaces (the same schema)."""
    from sparring.runs.run import find_run

    if (found := find_run(target)) is None:
        raise InputError(f"{target} is not a run directory: it has no experiment.yaml")
    run, which = found
    best = run.best() if which in (None, "best") else None
    manifest = publish_run(run.path, model, registry, which, game)
    typer.echo(f"{manifest.game.name}/{manifest.model}/{manifest.version}")
    if best is not None:
        best_one = f"the best evaluated policy: iteration {best.iteration}, return {best.ret:,.1f}"
        typer.echo(f"{best_one} ({run.path}@last is the last one)", err=True)


def publish_run(path: Path, model: str, registry: str, which: str | None = None, game: str | None = None) -> Any:
    """The manifest of the version that was published; without `which` the best one, where one was evaluated. `game`:
    another one than the run's, to publish it for."""
    from sparring.registry.manifest import DataSpan
    from sparring.registry.registry import Registry
    from sparring.runs.run import Run

    run = Run(path)
    best = run.best() if which in (None, "best") else None
    if which is None:
        which = "last" if best is None else "best"
    experiment, rows = run.experiment, run.rows()
    until = best.iteration if best is not None else int(which) if which.isdecimal() else None
    rows = [row for row in rows if until is None or row["iteration"] <= until]
    last = {k: v for row in rows for k, v in row.items() if not k.startswith("time/")}  # the newest of each
    config = {k: v for k, v in experiment.hyperparameters.items() if not isinstance(v, list | dict)}
    where = Registry(registry)
    where.check()
    policy = run.policy(which)
    if game is not None:
        policy = replace(policy, game=_other_game(policy.game, game, where, registry))
    return where.publish(
        policy,
        model=model,
        algorithm=experiment.name,
        metrics=last,
        config={**config, "seed": experiment.seed},
        data=DataSpan(steps=int(last.get("steps", 0))),
    )


def export(
    target: Target,
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="onnx, safetensors, or module:Class for a format of your own.")
    ] = "onnx",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the file goes; default: here.")] = Path(),
    registry: Registry = DEFAULT_REGISTRY,
) -> None:
    """Write a run's or a published policy as a file for other programs, named after the run or the model."""
    from sparring.export import formats
    from sparring.policies import load_policy

    formats.find_format(to)  # before anything is read
    policy = load_policy(target, registry)
    for path in formats.write(formats.render(to, policy, _stem(target)), out):
        typer.echo(str(path))


def _stem(target: str) -> str:
    """`runs/CartPole-v1-ppo-1@best` → `CartPole-v1-ppo-1-best`, `CartPole-v1/bot/3` → `CartPole-v1-bot-3`."""
    from sparring.runs.run import find_run

    if (found := find_run(target)) is None:
        return target.replace("/", "-")
    run, which = found
    return run.path.resolve().name + (f"-{which}" if which is not None else "")


def _other_game(ours: "Game", name: str, registry: "Models", address: str) -> "Game":
    """The game of that name, if a policy of ours plays it."""
    found = _find_game(name, registry, address)
    if found.schema != ours.schema:
        parts = [
            f"{part} ({getattr(ours, part)!r:.200}, there {getattr(found, part)!r:.200})"
            for part in ("observation", "action", "players")
            if getattr(ours, part) != getattr(found, part)
        ]
        raise InputError(
            f"a policy of {ours.name} does not play {found.name}: they differ in {' and '.join(parts)}. "
            f"Train on the spaces of {found.name}, or declare it with those of {ours.name}"
        )
    return found


def _find_game(name: str, registry: "Models", address: str) -> "Game":
    """By its declaration, the registry's newest version of it, or the store beside the registry's directory."""
    from sparring.games import catalog
    from sparring.store import is_file, open_store

    if name.endswith(".json"):
        return catalog.load(name)
    if (latest := registry.latest(name)) is not None:
        return latest.game
    store = Path(address).parent / "store.db"
    if is_file(address) and store.is_file():
        with closing(open_store(str(store), readonly=True)) as opened:
            if (found := next((game for game in opened.games() if game.name == name), None)) is not None:
                return found
            if (why := opened.unreadable().get(name)) is not None:
                raise InputError(why)
    raise InputError(
        f"{address} has no version of a game {name!r}, and no store beside it has its declaration: "
        f"give the declaration itself, --game {name}.json"
    )


def runs(
    root: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
) -> None:
    """List runs under a directory with their returns, steps and speed; `best` is the best evaluation and its iteration.

    Of runs that learn from a store, updates stand in the place of steps."""
    from rich.console import Console
    from rich.table import Table

    from sparring.runs.run import list_runs

    table = Table(box=None)
    for column in ("run", "game", "algorithm", "seed", "steps", "steps/s", "return", "evaluation", "best", "time"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("run", "game", "algorithm") else "right")
    bad: list[InputError] = []
    for run in list_runs(root):
        try:
            e, rows = run.experiment, run.rows()
        except InputError as error:
            bad.append(error)
            continue
        last = {key: value for row in rows for key, value in row.items()}
        number = {key: f"{value:,.1f}" for key, value in last.items()}
        seconds = last.get("time/total_s", 0.0)
        table.add_row(
            str(run.path), e.game, e.name, str(e.seed),
            f"{last.get(e.axis, 0):,.0f}", f"{last.get(e.axis, 0) / seconds:,.0f}" if seconds else "",
            number.get("episode/return_recent", ""), number.get("evaluation/return_mean", ""),
            f"{number['evaluation/return_best']} @{last['evaluation/iteration_best']:.0f}"
            if "evaluation/return_best" in last else "",
            f"{seconds:,.0f} s",
        )  # fmt: skip
    if not table.rows and not bad:
        raise InputError(f"there are no runs below {root}")
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=500)).maximum)
    console.print(table)  # as wide as it is: half a number helps nobody
    for problem in bad:
        typer.echo(f"not listed: {problem}", err=True)


def schema(
    kind: Annotated[str, typer.Argument(metavar="experiment|game|sweep", help="Of which file.")] = "experiment",
    out: Annotated[Path | None, typer.Option(help="The file to write; default: print it.")] = None,
) -> None:
    """Write the JSON Schema of experiment, game or sweep files, for editors that complete and check them."""
    import difflib

    from sparring.files import write_whole
    from sparring.json_schemas import KINDS_OF_FILES

    if kind not in KINDS_OF_FILES:
        near = difflib.get_close_matches(kind, KINDS_OF_FILES, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(KINDS_OF_FILES)}"
        raise InputError(f"no schema of {kind!r}: {hint}")
    text = msgspec.json.format(msgspec.json.encode(KINDS_OF_FILES[kind]())) + b"\n"
    if out is None:
        typer.echo(text.decode(), nl=False)
        return
    write_whole(out, text, parents=True)
    typer.echo(str(out))
