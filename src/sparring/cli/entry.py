"""The command line's entry: puts the groups of commands together, and turns errors into exit codes. Heavy parts load
inside the commands that need them."""

import sys
import traceback
from typing import Annotated

from sparring.errors import InputError, SparringError

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.exit("The command line needs typer and rich: pip install 'sparring[play]' (or 'sparring[platform]')")

from sparring import __version__
from sparring.cli import (
    ab_testing,
    benchmarks,
    changing,
    cluster,
    episode_commands,
    exports,
    files_of_play,
    inspecting,
    promoting,
    publishing,
    serving,
    stores,
    streams,
    sweep,
    training,
)
from sparring.cli import registry as registries
from sparring.cli.options import examples

__all__ = ["app", "main"]

app = typer.Typer(
    name="sparring",
    help="Train game bots from play: record, store, train, publish, play.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own would read GAME[/MODEL] as a tag
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"sparring {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train game bots from play."""


app.add_typer(serving.app)
app.add_typer(inspecting.app)
app.add_typer(changing.app)
app.add_typer(promoting.app)
app.add_typer(
    ab_testing.app,
    name="ab",
    epilog=examples(
        "sparring ab start my-game bot=0.5 careful=0.5", "sparring ab", "sparring ab stop my-game --keep careful"
    ),
)
app.add_typer(episode_commands.app)
# Commands about runs of the training core.
app.command(
    epilog=examples(
        "sparring train CartPole-v1 --algorithm ppo",
        "sparring train experiments/pendulum-sac.yaml --set algorithm.lr=1e-3 --set seed=2 --out runs/second",
        "sparring train runs/second --resume --set stop.steps=100_000",
        "sparring train LunarLander-v3 --set game.gravity=-5 --iterations 50 --name light",
        "sparring train experiments/pong/model1.yaml --gpu 0 --cpu-affinity 0,1 --workers 2",
        "sparring train --restore runs/second@40 --name third",
    )
)(training.train)
app.command(
    epilog=examples("sparring sweep experiments/sweep-cartpole-ppo.yaml", "sparring sweep runs/my-sweep --resume")
)(sweep.sweep)
RUN = "runs/CartPole-v1-ppo-1"
app.command("eval", epilog=examples(f"sparring eval {RUN} --episodes 50", "sparring eval CartPole-v1/bot/3"))(
    training.evaluate
)
app.command(epilog=examples(f"sparring record {RUN}", f"sparring record {RUN} out.mp4 --episodes 3"))(training.record)
app.command(epilog=examples(f"sparring plot {RUN} runs/CartPole-v1-ppo-2 --out figure.png"))(training.plot)
app.command(epilog=examples(f"sparring publish {RUN}", f"sparring publish {RUN} --model careful --also tflite-int8,c"))(
    publishing.publish
)
app.command(
    epilog=examples(
        f"sparring export {RUN}@best",
        f"sparring export {RUN} --to tflite-int8,c-int8 --calibrate 500 --out out",
        f"sparring export {RUN} --to my_formats:Json --out out",
    )
)(exports.export)
app.command(
    epilog=examples(
        f"sparring dataset {RUN} play.npz",
        "sparring dataset CartPole-v1 play.npz --samples 500 --policy random",
        "sparring dataset .sparring play.npz --game my-game",
    )
)(exports.dataset)
app.command(epilog=examples("sparring runs", "sparring runs experiments/of-monday"))(training.runs)
app.command(epilog=examples("sparring schema", "sparring schema sweep --out sweep.schema.json"))(training.schema)
app.add_typer(
    registries.app,
    name="registry",
    epilog=examples("sparring registry init 's3://my-bucket/bots?region=eu-west-1' --public"),
)
app.command(
    epilog=examples(
        "sparring ingest --stream 'kinesis://play?region=eu-central-1' --store cassandra://10.0.0.7/sparring",
        "sparring ingest --stream 'kinesis://play?region=eu-central-1' --master spark://10.0.0.8:7077",
    )
)(streams.ingest)
app.add_typer(
    streams.app, name="stream", epilog=examples("sparring stream create 'kinesis://play?region=eu-central-1'")
)
app.add_typer(
    stores.app,
    name="store",
    epilog=examples("sparring store init cassandra://10.0.0.1,10.0.0.2/play", "sparring store stats .sparring"),
)
app.add_typer(
    files_of_play.app,
    name="data",
    epilog=examples(
        "sparring data export my-game out/ --format parquet --people --since 7d",
        "sparring data import my-game out/ --format parquet",
    ),
)
app.add_typer(cluster.app, name="cluster", epilog=examples("sparring cluster up --head", "sparring cluster status"))
app.add_typer(
    benchmarks.app,
    name="bench",
    epilog=examples("sparring bench scaling experiments/humanoidbullet-ppo.yaml --workers 1,2,4"),
)


def main() -> None:
    try:
        app(prog_name="sparring")  # also as `python -m sparring.cli`
    except InputError as error:
        _fail(error, 2)
    except (SparringError, OSError) as error:  # OSError: a full disk, a directory that is not ours
        _fail(error, 1)
    except SystemExit as end:
        if not end.code and (place := _foreign(end)):
            _fail(SparringError(f"not done: code in {place} ended the process (SystemExit)"), 1)
        raise


def _foreign(end: SystemExit) -> str | None:
    """Where code from outside, such as an algorithm or a game, ended the process; none where the command line did."""
    frame, line = list(traceback.walk_tb(end.__traceback__))[-1]
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return None if package in ("click", "typer", "sparring") else f"{frame.f_code.co_filename}, line {line}"


def _fail(error: Exception, code: int) -> None:
    from rich.text import Text

    from sparring.terminal import plain

    text = Text.assemble(("error", "bold red"), " ", plain(str(error)))  # errors quote what users and servers wrote
    Console(stderr=True).print(text, soft_wrap=True)
    sys.exit(code)
