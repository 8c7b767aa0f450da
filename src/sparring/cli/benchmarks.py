"""The commands of `sparring bench`, as functions that typer reads. They parse and print."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparring.cli.options import GameOption, examples, show_whole
from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.bench.inference import Measured

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
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of each measurement, after warm-up.")] = 3,
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
    from sparring.bench.scaling import Layout, check, configurations, measure_all
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

        def on_progress(number: int, now: Layout, iteration: int) -> None:
            status.update(f"round {number + 1} of {rounds}: {now}, iteration {iteration} …")

        found = measure_all(what, wanted, iterations, rounds, on_progress)
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
    Console().print(table(f"{what.name} on {what.game_words}", tuple(f">{name}" for name in columns.values()), rows))
    typer.echo(f"written: {out / 'scaling.md'}")


@app.command(
    epilog=examples(
        "sparring bench inference runs/CartPole-v1-ppo-1@best --steps 2000",
        "sparring bench inference CartPole-v1/bot --runtime numpy,onnx --episodes 10 --output times.csv",
        "sparring bench inference theirs.onnx --game ALE/Pong-v5 --runtime onnx --cpu-affinity 0",
    )
)
def inference(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="Runs (RUN@best, RUN@40), published GAME[/MODEL[/VERSION]], or .onnx and .tflite files of anybody.",
        ),
    ],
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Some of jax, numpy, onnx, onnx-int8, tflite, tflite-int8, coral, c, c-int8, rllib, with commas; "
            "default: jax,numpy,onnx, and a file's own."
        ),
    ] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes of each; --steps is then ignored.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Inferences of each; default: 1000.")] = None,
    output: Annotated[
        Path, typer.Option(help="The .csv of every inference; others with their names after it, and a picture.")
    ] = Path("times.csv"),
    game: Annotated[str | None, typer.Option(metavar="ID", help="The game; needed for files of others.")] = None,
    changes: GameOption = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 1,
    cpu_affinity: Annotated[str | None, typer.Option(metavar="0,1", help="Run on these cores alone.")] = None,
    gpu: Annotated[
        str,
        typer.Option(metavar="none|all|both|0|0,1", help="GPUs that JAX may use; all and both: all that there are."),
    ] = "none",
    warmup: Annotated[int, typer.Option(min=0, help="Inferences before the first that counts.")] = 20,
    calibrate: Annotated[int, typer.Option(min=20, help="Observations of own play that int8 formats see.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the games.")] = 0,
    meter: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="A power meter: a command that prints watts.")
    ] = None,
    save_info: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Keep every observation and action.")
    ] = None,
    video_dir: Annotated[Path | None, typer.Option(help="A video of each, after it was measured.")] = None,
    registry: Annotated[str, typer.Option(help="Where published models are looked up.")] = ".sparring/registry",
) -> None:
    """Time every inference of policies by one runtime after the other, apart from the game.

    Each plays whole episodes in a process of its own; the same seeds for all."""
    import tempfile

    from rich.console import Console

    from sparring.bench import inference as measuring
    from sparring.bench import inference_report, placing, runtimes

    names = None if runtime is None else [name.strip() for name in runtime.split(",") if name.strip()]
    if names is not None:
        runtimes.check(names)
    settings = measuring.InferenceSettings(
        episodes=episodes,
        steps=steps or 1000,
        seed=seed,
        warmup=warmup,
        threads=threads,
        cores=None if cpu_affinity is None else placing.parse_affinity(cpu_affinity),
        gpus=placing.parse_gpus(gpu),
        calibrate=calibrate,
        meter=meter,
        info=save_info is not None,
        videos=video_dir,
    )
    inference_report.check_output(output, save_info, video_dir)
    found = [measuring.find(target, game, registry, changes or []) for target in models]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("getting ready …") as status:
        measured = measuring.measure_all(
            found, names, settings, Path(folder), lambda words: status.update(f"{words} …")
        )
        written = inference_report.write(measured, output, save_info, video_dir)
    _print_inference(measured)
    typer.echo("written: " + ", ".join(str(path) for path in written))
    if any(each.failed or each.no_video is not None for each in measured):
        raise typer.Exit(2)


def _print_inference(measured: "Sequence[Measured]") -> None:
    from sparring.bench.inference_report import SUMMARY, rows, study_rows
    from sparring.terminal import table

    lines = rows(measured)
    shown = [name for name in SUMMARY if name not in ("measured", "skipped", "steps", "episodes")]
    texts = ("model", "runtime", "energy_source", "device")
    columns = [SUMMARY[name] if name in texts else f">{SUMMARY[name]}" for name in shown]
    done = [line for line in lines if "skipped" not in line]
    show_whole(table("inference", columns, [[_cell(line.get(name)) for name in shown] for line in done]))
    for line in lines:
        if "skipped" in line:
            typer.echo(f"skipped: {line['model']} by {line['runtime']}: {line['skipped']}")
    for each in measured:
        if each.no_video is not None:
            typer.echo(f"no video of {each.model.name} by {each.runtime}: {each.no_video}")
    if theirs := study_rows(measured):
        title = "the hardware study's means, on its machines"
        rest = [(line["model"], line["runtime"], _cell(line["p50_ms"])) for line in theirs]
        show_whole(table(title, ("model", "runtime", ">ms"), rest))


@app.command(
    epilog=examples(
        "sparring bench hardware experiments/pong/model1.yaml experiments/pong/model3.yaml",
        "sparring bench hardware e.yaml --devices none,0,both --workers 0,8 --affinity all,0-3 --iterations 5",
    )
)
def hardware(
    experiments: Annotated[list[Path], typer.Argument(metavar="EXPERIMENT.yaml…", help="What to train: the models.")],
    devices: Annotated[
        str | None,
        typer.Option(
            help="GPUs that learn: none, 0, 0+1, both (all there are); default: each, and all, and the study's."
        ),
    ] = None,
    workers: Annotated[str | None, typer.Option(help="Rollout workers; default: 0, 1, 2, 4 … as cores allow.")] = None,
    affinity: Annotated[
        str, typer.Option(help="Cores: all, or numbers such as 0 or 0-3, with commas between.")
    ] = "all",
    precision: Annotated[str, typer.Option(help="float32, bfloat16, or both with a comma between.")] = "float32",
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of each configuration, after warm-up.")] = 3,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a key of all, such as algorithm.steps=4096; repeatable.")
    ] = None,
    meter: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="A power meter: a command that prints watts.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the report, and to go on from.")] = Path("hardware"),
) -> None:
    """Train some iterations of every model on every device, with every number of workers, and report.

    Stopped by Ctrl-C or SIGTERM, it writes what there is and exits with 75: the same command goes on."""
    from rich.console import Console

    from sparring.bench import hardware as measuring
    from sparring.bench import hardware_report
    from sparring.terminal import table

    matrix = measuring.matrix_of(experiments, devices, workers, affinity, precision, changes or [])
    hardware_report.pyplot()  # before an hour of measuring
    console = Console(stderr=True)
    with console.status("getting ready …") as status:

        def on_progress(words: str) -> None:
            status.update(f"{words} …")
            if not console.is_terminal:
                typer.echo(words, err=True)

        found, skipped, whole = measuring.measure_all(matrix, out, iterations, meter=meter, on_progress=on_progress)
    written = hardware_report.write(out, matrix, found, skipped, shlex.join(["sparring", *sys.argv[1:]]), iterations)
    show_whole(table("hardware", hardware_report.heads, hardware_report.rows(matrix, found)))
    if skipped:
        names = ("model", "device", "workers", "cores", "precision", "skipped, since")
        show_whole(table("not measured", names, [(*columns, why) for columns, why in measuring.grouped(skipped)]))
    typer.echo("written: " + ", ".join(str(path) for path in written))
    if not whole:
        typer.echo("interrupted: the same command goes on", err=True)
        raise typer.Exit(75)


def _cell(value: float | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
