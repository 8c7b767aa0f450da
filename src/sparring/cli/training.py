"""The commands about runs, as functions that typer reads: train, evaluate, record, plot, runs. They parse and print;
what they do is elsewhere, and is loaded when it is asked for."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from sparring.cli.options import GameOption, set_game
from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.experiment import Experiment
    from sparring.games import Game

__all__ = [
    "DEFAULT_REGISTRY",
    "RegistryOption",
    "TargetArgument",
    "changed",
    "evaluate",
    "plot",
    "progress",
    "record",
    "runs",
    "schema",
    "train",
]

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@WHICH]|MODEL",
        help="A run directory (its last policy; RUN@best, RUN@40: another that it keeps), or a published "
        "GAME[/MODEL[/VERSION]].",
    ),
]
RegistryOption = Annotated[str, typer.Option(help="Where models are published: a directory or a bucket's URL.")]
DEFAULT_REGISTRY = ".sparring/registry"
MACHINE = "The machine"  # a group of options


def train(
    target: Annotated[
        str | None,
        typer.Argument(metavar="EXPERIMENT.yaml|GAME|RUN", help="An experiment, a game's id, or a run to resume."),
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="dqn, ppo, …, or module:Class of your own.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a key, such as algorithm.lr=1e-3; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory; default: the next under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
    restore: Annotated[
        str | None,
        typer.Option(metavar="RUN[@ITERATION]", help="Begin a new run with the checkpoint of this one."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's directory is runs/NAME.")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Stop after so many iterations.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that play.", rich_help_panel=MACHINE)] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of a Ray of our own (runner: ray).", rich_help_panel=MACHINE)
    ] = None,
    cpu_affinity: Annotated[
        str | None, typer.Option(metavar="0,1", help="CPUs that the run may use.", rich_help_panel=MACHINE)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="none|all|0|0,1", help="GPUs that learn.", rich_help_panel=MACHINE),
    ] = None,
    learner_gpus: Annotated[
        float | None,
        typer.Option(min=0, help="Part of a GPU's memory for the learner, such as 0.5.", rich_help_panel=MACHINE),
    ] = None,
    worker_gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs of each worker (runner: ray).", rich_help_panel=MACHINE)
    ] = None,
    meter: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="A power meter: a command that prints watts.")
    ] = None,
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
    given = {
        "rollout.workers": workers, "stop.iterations": iterations, "resources.cpus": cpus, "resources.gpu": gpu,
        "resources.learner_gpus": learner_gpus, "resources.actor_gpus": worker_gpus,
        "metering.meter": None if meter is None else json.dumps(meter),
        "resources.affinity": None if cpu_affinity is None else f"[{cpu_affinity}]",
    }  # fmt: skip
    changes = [*(changes or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    if name is not None:
        if out is not None:
            raise InputError("--name and --out both say where the run goes: leave one out")
        out = Path("runs") / name
    try:
        if restore is not None:
            if resume or algorithm is not None or target is not None:
                raise InputError("--restore takes --name or --out, and --set only: everything else is in the run")
            run = loop.restore(restore, out, changes, view_for(console))
        elif target is None:
            raise InputError("what shall be trained? An experiment, a game's id, or a run (--resume, --restore)")
        elif resume:
            if algorithm is not None or out is not None:
                raise InputError("--resume takes a run directory and --set only: everything else is in the run")
            run = loop.resume(target, changes, view_for(console))
        else:
            experiment = experiment_of(target, algorithm, changes, out)
            if cpus is not None and experiment.runner == "local":
                raise InputError("--cpus is for `runner: ray`: here --workers and --cpu-affinity say what a run uses")
            run = loop.train(experiment, view_for(console))
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
        data = override({"game": target, "algorithm": {"name": algorithm}}, changes)
        chosen, game = data["algorithm"], data["game"]  # `--set` may have made them anything: `parse` says so
        if isinstance(chosen, dict) and chosen.get("name") is None and isinstance(game, str | dict):
            chosen["name"] = algorithms.default_for(catalog.load(game))
        if data.get("source") != "store":
            data = {"stop": {"steps": 100_000}, "evaluation": {"every": 10}} | data
        experiment = Experiment.parse(data)
    return experiment if out is None else msgspec.structs.replace(experiment, out=str(out))


def evaluate(
    target: TargetArgument,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes to play.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the episodes: the same ones for the same seed.")] = 0,
    explore: Annotated[bool, typer.Option(help="Play as while learning, not greedily.")] = False,
    env: Annotated[
        str | None, typer.Option(metavar="ID", help="Play in this Gymnasium game, for a bot of a declared one.")
    ] = None,
    changes: GameOption = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
) -> None:
    """Play whole episodes with a run's or a published policy and print the returns."""
    from sparring.policies import load_policy
    from sparring.training.evaluate import play, summary

    policy = load_policy(target, registry)
    if env is not None:
        policy = replace(policy, game=_simulated(policy.game, env))
    policy = replace(policy, game=changed(policy.game, changes))
    with progress("playing", episodes) as show:
        played = play(
            policy, episodes, seed, explore=explore, on_episode=lambda ended: show(ended, f"{ended} episodes")
        )
    for name, value in summary(played).items():
        typer.echo(f"{name.partition('/')[2]:12} {value:,.2f}".rstrip("0").rstrip("."))


def record(
    target: TargetArgument,
    out: Annotated[Path | None, typer.Argument(help="The .mp4 to write; default: the next to a run's others.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes to show.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the episodes: the same ones for the same seed.")] = 0,
    changes: GameOption = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
) -> None:
    """Write a video of a run's or a published policy; needs no display."""
    from sparring.policies import load_policy
    from sparring.runs import video

    policy = load_policy(target, registry)
    policy = replace(policy, game=changed(policy.game, changes))
    out = out or _video(target)
    with progress("recording", episodes) as show:
        returns = video.record(
            policy, out, episodes, seed, on_frame=lambda episode, frames: show(episode, f"{frames:,} frames")
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
def progress(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """On a terminal only, gone when it is done; called with how many of `total` are done, and words."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, words="")
        yield lambda done, words: bar.update(task, completed=done, words=words)


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


def _simulated(game: "Game", env: str) -> "Game":
    """The game with this simulator, if it is the same game."""
    import msgspec

    from sparring.games import catalog, compatible

    if (why := compatible.difference(game, catalog.load(env))) is not None:
        raise InputError(f"a policy of {game.name} does not play {env}: {why}")
    return msgspec.structs.replace(game, env=env, env_kwargs=msgspec.UNSET)


def changed(game: "Game", changes: list[str] | None) -> "Game":
    """The game with its simulator set to something else, if a policy of it plays that."""
    from sparring.games import compatible

    if not changes:
        return game
    if game.env is None:
        raise InputError(f"{game.name} is a declared game: it has no simulator to set (--env ID names one)")
    found = set_game({**(game.env_kwargs or {}), "id": game.env, "name": game.name}, changes)
    if (why := compatible.difference(game, found)) is not None:
        raise InputError(f"a policy of {game.name} does not play {' '.join(changes)}: {why}")
    return msgspec.structs.replace(game, env_kwargs=found.env_kwargs)


def runs(
    root: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
) -> None:
    """List runs under a directory with their returns, steps and speed; `best` is the best evaluation and its iteration.

    Of runs that learn from a store, updates are shown instead of steps."""
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
            str(run.path), e.game_words, e.name, str(e.seed),
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
    write_whole(out, text, parents=True, shared=True)
    typer.echo(str(out))
