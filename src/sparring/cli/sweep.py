"""`sparring sweep`, as a function that typer reads. It parses and prints; the rest is loaded when it is asked for."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from sparring.errors import InputError

__all__ = ["sweep"]


def sweep(
    target: Annotated[
        Path, typer.Argument(metavar="SWEEP.yaml|DIRECTORY", help="An experiment with searched values, or a sweep.")
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a key, such as tune.samples=20; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's directory; default: the next under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted sweep left.")] = False,
) -> None:
    """Train an experiment with many values and find the best, by Ray Tune.

    In the file any value may be searched: {choice: [a, b]}, {grid: [a, b]}, {uniform: [low, high]}, {loguniform: …},
    {randint: …}. `tune:` says how: samples, scheduler (asha, pbt, none), search (random, optuna), parallel, metric.

    Exit codes: 0 done, 2 wrong input, 75 interrupted by SIGTERM or Ctrl-C (--resume goes on), 1 anything else.
    """
    from rich.console import Console

    from sparring.sweep import sweeping
    from sparring.sweep.progress import SweepProgress, results
    from sparring.sweep.results import best_of
    from sparring.training.loop import INTERRUPTED

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    console = Console()
    if resume and out is not None:
        raise InputError("--resume takes a sweep's directory and --set only")
    with console.status("checking, starting Ray …"):
        if resume:
            plan, root = sweeping.reopen(target, changes or [])
        else:
            plan, root = sweeping.begin(target, changes or [], out)
    gpus, of = sweeping.load_tuning().gpus_of(plan)
    if of:
        typer.echo(f"each trial's learner has {gpus:g} of the cluster's {of:g} GPUs (resources.learner_gpus)")
    progress = SweepProgress(console, plan)
    title = f"sweep of {plan.first.name} on {plan.first.game_words}: {plan.total} trials, {root}"
    trials, complete = sweeping.carry_out(plan, root, lambda: progress.show(title))
    results(console, plan, trials)
    if not complete:
        typer.echo(f"interrupted: continue with sparring sweep {root} --resume")
        raise typer.Exit(INTERRUPTED)
    best = best_of(plan, trials)
    assert best is not None  # or all had failed
    typer.echo(f"best: sparring train {root / 'best.yaml'}  ({plan.describe(best.values)})")
    typer.echo(f"done: {root} (results.csv, results.md, sweep.png, trials/)")
