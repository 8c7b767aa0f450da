"""Commands that run something of the platform: demo, up, play; and init, which begins a game of one's own."""

import itertools
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from sparring.cli import streams
from sparring.cli.options import (
    DEFAULT_SERVER,
    AlgorithmOption,
    DataOption,
    GameOption,
    ServerOption,
    SetOption,
    examples,
    set_game,
)
from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.games import Game
    from sparring.store.profile import GameSettings

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=examples("sparring demo", "sparring demo --stay", "sparring demo --players 16 --data .sparring"))
def demo(
    game: Annotated[str, typer.Argument(help="A Gymnasium id.")] = "CartPole-v1",
    algorithm: AlgorithmOption = None,
    players: Annotated[int, typer.Option(min=1, help="Mock players.")] = 8,
    target: Annotated[float | None, typer.Option(help="Mean return to reach; default: the game's own goal.")] = None,
    data: Annotated[Path | None, typer.Option(help="Keep everything here; default: a temporary directory.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0: any free one.")] = 0,
    limit: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 600.0,
    stay: Annotated[bool, typer.Option("--stay", help="Go on after the goal, until Ctrl-C.")] = False,
) -> None:
    """Watch bots get good: platform, players and training on this machine."""
    from sparring import algorithms
    from sparring.demo import demo

    if algorithm is not None:
        algorithms.check(algorithm)
    demo(game, algorithm=algorithm, players=players, target=target, data=data, port=port, limit=limit, stay=stay)


@app.command(
    epilog=examples(
        "sparring up",
        "sparring up --data /srv/sparring --host 0.0.0.0 --port 80 --allowed-host play.example.org",
        "sparring up --set promotion.canary=0.2 --set pace=5",
        "sparring up --registry 's3://my-bucket/bots?region=eu-west-1'",
        "sparring up --store 'cassandra://10.0.0.1,10.0.0.2/play?consistency=LOCAL_QUORUM'",
        "sparring up --stream 'kinesis://play?region=eu-central-1' --store cassandra://10.0.0.1/play",
    )
)
def up(
    data: DataOption = Path(".sparring"),
    store: Annotated[
        str | None,
        typer.Option(
            help="Another store than the directory's: cassandra://HOST[:PORT][,HOST…]/KEYSPACE, or module:Class."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no access control yet: keep it local.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8400,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that players use for this machine, besides its IP; may be repeated."),
    ] = None,
    algorithm: AlgorithmOption = None,
    publish_every: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds between new versions for players, at least; the same as --set promotion.…"),
    ] = None,
    changes: SetOption = None,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="YAML with settings of all games that have none of their own.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="Where models are published: s3://BUCKET/PREFIX?region=…; default: under --data.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Run the trainer.")] = True,
    gateway: Annotated[bool, typer.Option(help="Run the gateway; without it, the trainer alone.")] = True,
    stream: Annotated[
        str | None, typer.Option(help="Uploads go over this stream: kinesis://NAME?region=REGION; see docs/stream.md.")
    ] = None,
    ingest: Annotated[bool, typer.Option(help="With --stream: run the job that brings it into the store.")] = True,
    print_address: Annotated[
        bool, typer.Option("--print-address", help="Print only the address, for scripts.")
    ] = False,
) -> None:
    """Run the platform: gateway, store, trainer, registry, dashboard. Ctrl-C stops it, `up` again goes on."""
    import logging

    from sparring import algorithms, platform
    from sparring.terminal import plain

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every request that is none
    if not train and not gateway:
        raise InputError("--no-train --no-gateway leaves nothing to run: drop one of them")
    defaults, settings = _settings(settings_file, changes, algorithm, publish_every)
    if defaults.algorithm is not None and train:
        algorithms.check(defaults.algorithm)
    if not gateway:
        platform.train(data, store=store, registry=registry, settings=settings)
        return

    def ready(url: str) -> None:
        if print_address:
            print(url, flush=True)
            return
        console = Console()
        console.print(
            f"[bold]Sparring[/] runs at [bold]{url}[/] (dashboard). Data in {escape(str(data))}. Ctrl-C stops it.",
            soft_wrap=True,
        )
        console.print(f"Play against it: [bold]sparring play CartPole-v1 --server {url} --players 4[/]", soft_wrap=True)

    def on_news(line: str) -> None:
        Console().print(plain(f"{time.strftime('%H:%M:%S')} {line}"), highlight=False, soft_wrap=True)

    if stream is not None and ingest:
        streams.require_spark()
    platform.up(
        data,
        host,
        port,
        store=store,
        registry=registry,
        settings=settings if train else None,
        ready=ready,
        stream=stream,
        ingest=ingest,
        allowed_hosts=allowed_host or (),
        defaults=defaults,
        on_news=None if print_address else on_news,
    )
    if not print_address:
        Console().print("Stopped.")


def _settings(
    file: Path | None, changes: list[str] | None, algorithm: str | None, publish_every: float | None
) -> "tuple[GameSettings, bytes]":
    """The settings of all games, as the gateway shows them and as the trainer takes them."""
    from sparring.cli.changing import read_settings
    from sparring.fields import convert
    from sparring.store.profile import GameSettings
    from sparring.trainer.settings import Settings, for_game

    words = [] if algorithm is None else [f"algorithm={algorithm}"]
    words += [] if publish_every is None else [f"promotion.publish_every={publish_every}"]
    defaults = convert(read_settings(file, [*words, *(changes or ())]), GameSettings)
    return defaults, msgspec.json.encode(for_game(Settings(), defaults))


@app.command(
    epilog=examples(
        "sparring play CartPole-v1 --players 4",
        "sparring play CartPole-v1 --server http://10.0.0.5:8400 --episodes 100",
        "sparring play CartPole-v1 --alias stable --no-explore --episodes 20",
    )
)
def play(
    game: Annotated[str, typer.Argument(help="A Gymnasium id.")],
    server: ServerOption = DEFAULT_SERVER,
    players: Annotated[int, typer.Option(min=1, help="Players side by side in this process.")] = 4,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes of each player; default: until Ctrl-C.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Steps per second of each player; default: as fast as it goes.")
    ] = None,
    explore: Annotated[bool, typer.Option(help="Try things out, as training needs it; or play the best known.")] = True,
    model: Annotated[str | None, typer.Option(help="A certain model; default: what each player gets.")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="A certain version of it.")] = None,
    alias: Annotated[str | None, typer.Option(help="The version that this alias names: stable, or your own.")] = None,
    prefix: Annotated[str, typer.Option(help="Players are called PREFIX-001, …")] = "player",
    seed: Annotated[int | None, typer.Option(help="Fixes games and exploration.")] = None,
    changes: GameOption = None,
) -> None:
    """Play as mock players, with the bot that players get or one that you name, and upload what they do."""
    import signal
    import threading

    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from sparring.players import mock
    from sparring.terminal import number

    stop, returns = threading.Event(), deque[float](maxlen=20)

    def interrupted(*_: object) -> None:
        stop.set()  # ends the round and sends what is recorded; a second Ctrl-C does not wait for that
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, interrupted)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("playing…", total=None)
        played = itertools.count(1)

        def on_episode(episode: mock.MockEpisode) -> None:
            returns.append(episode.ret)
            mean = number(sum(returns) / len(returns))
            text = f"{next(played)} episodes, newest version {episode.version}, mean return {mean}"
            progress.update(task, description=text)

        summary = mock.play(
            _simulated(game, changes),
            server,
            players=players,
            episodes=episodes,
            explore=explore,
            model=model,
            version=version,
            alias=alias,
            stop=stop,
            seed=seed,
            prefix=prefix,
            rate=rate,
            on_episode=on_episode,
        )
    mean = "–" if summary.return_mean is None else number(summary.return_mean)
    Console().print(
        f"{summary.episodes} episodes, {number(summary.steps)} steps ({number(summary.steps_per_s)}/s), "
        f"mean return of the newest 20: [bold]{mean}[/]; {summary.stats.uploaded} fragments uploaded"
    )


def _simulated(game: str, changes: list[str] | None) -> "Game":
    from sparring.games.catalog import Unregistered

    try:
        return set_game(game, changes)
    except Unregistered as error:
        why = "Mock players need a simulator: a game that is only declared is played by its own clients"
        raise InputError(f"{error}. {why}") from error


@app.command(epilog=examples("sparring init my-game", "sparring init my-game --out games/my-game.json"))
def init(
    game: Annotated[str, typer.Argument(help="Name of a game of your own: letters, digits, '.', '_', '-'.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default: GAME.json.")] = None,
) -> None:
    """Write a declaration of your game, to fill in: its observations and actions, with an example of each space."""
    from sparring.games.template import template

    path = out or Path(f"{game}.json")
    try:
        declaration = template(game)
    except ValueError as error:
        raise InputError(str(error)) from error
    try:
        with path.open("xb") as file:
            file.write(declaration + b"\n")
    except FileExistsError as error:
        raise InputError(f"{path} exists: choose another name with --out") from error
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    console = Console()
    console.print(f"Wrote [bold]{escape(str(path))}[/]. Put your game's spaces into it, then in your game:")
    console.print(
        f'  from sparring.client import Client\n  with Client("{DEFAULT_SERVER}", "{path}", player="anna") as c: …',
        highlight=False,
        markup=False,
    )
