"""The commands of `sparring bench`, as functions that typer reads. They parse and print."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer(
    help="Measure Sparring on this machine or cluster.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.command(
    epilog="Examples:\n\n"
    "  $ sparring bench scaling experiments/humanoidbullet-ppo.yaml --workers 1,2,4\n\n"
    "  $ sparring bench scaling CartPole-v1 --algorithm ppo\n\n"
    "  $ sparring bench scaling e.yaml --workers 16,64 --runner ray --set resources.address=10.0.0.1:6379 --gpus 0,1"
)
def scaling(
    target: Annotated[str, typer.Argument(metavar="EXPERIMENT.yaml|GAME", help="What to train, as `train` takes it.")],
    algorithm: Annotated[str | None, typer.Option(help="dqn, ppo, …, or module:Class of your own.")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of rollout workers, such as 1,2,4.")] = "1,2",
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of GPUs that learn, such as 0,1; default: as the experiment says.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Of each measurement, after warm-up.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often every configuration is measured, in turns.")] = 3,
    runner: Annotated[str | None, typer.Option(help="local or ray; default: as the experiment says.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a key, such as algorithm.steps=4096; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for scaling.csv, scaling.md and the pictures.")] = Path(
        "scaling"
    ),
) -> None:
    """Train a few iterations with more and more workers: time, speed-up, efficiency, and where the time goes."""
    from rich.console import Console

    from sparring.bench import report
    from sparring.bench.scaling import Configuration, check, configurations, measure_all
    from sparring.cli.training import experiment_of
    from sparring.terminal import table

    wanted = configurations(workers, gpus)
    # Any number of workers will do here: every configuration brings its own.
    asked = [
        *(changes or []),
        *([] if runner is None else [f"runner={runner}"]),
        f"rollout.workers={wanted[0].workers}",
    ]
    what = experiment_of(target, algorithm, asked)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is not a directory: choose another with --out")
    console = Console(stderr=True)
    with console.status("looking whether all of it can be measured here …") as status:
        check(what, wanted)

        def tell(number: int, now: Configuration, iteration: int) -> None:
            status.update(f"round {number + 1} of {rounds}: {now}, iteration {iteration} …")

        found = measure_all(what, wanted, iterations, rounds, tell)
    report.write(out, what, found, shlex.join(["sparring", *sys.argv[1:]]))
    columns = {
        "workers": "workers",
        "gpus": "GPUs",
        "iteration_s": "iteration s",
        "steps_per_s": "steps/s",
        "speed_up": "speed-up",
        "efficiency": "efficiency",
        "utilisation": "used",
        "memory_mb": "MB",
    }
    rows = [tuple(_cell(line[key]) for key in columns) for line in report.table(found)]
    Console().print(table(f"{what.name} on {what.game}", tuple(f">{name}" for name in columns.values()), rows))
    typer.echo(f"written: {out / 'scaling.md'}")


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
