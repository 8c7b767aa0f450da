"""The command line. Thin: parses, calls, prints. Heavy parts load inside the commands that need them."""

import itertools
import sys
from collections import deque
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from sparring.errors import InputError, SparringError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError:
    sys.exit("The command line needs typer and rich: pip install 'sparring[play]' (or 'sparring[platform]')")

from sparring import __version__
from sparring.cli import benchmarks as bench
from sparring.cli import cluster as nodes
from sparring.cli import registry as registry_commands
from sparring.cli import stores, streams
from sparring.cli import sweep as sweeps
from sparring.cli import training as commands

__all__ = ["app", "main"]

T = TypeVar("T")
DEFAULT_SERVER = "http://127.0.0.1:8400"

app = typer.Typer(
    name="sparring",
    help="Train game bots from play: record, store, train, publish, play.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own would read GAME[/MODEL] as a tag
    context_settings={"help_option_names": ["-h", "--help"]},
)

ServerOption = Annotated[str, typer.Option(envvar="SPARRING_SERVER", help="Address of the platform.")]
AlgorithmOption = Annotated[str | None, typer.Option(help="What learns; default: by the game's actions.")]
DataOption = Annotated[Path, typer.Option(help="Directory for everything: store, registry, checkpoints.")]


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  $ {line}" for line in lines)


@app.command(epilog=_examples("sparring demo", "sparring demo --stay", "sparring demo --players 16 --data .sparring"))
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
        algorithms.check_name(algorithm)
    demo(game, algorithm=algorithm, players=players, target=target, data=data, port=port, limit=limit, stay=stay)


@app.command(
    epilog=_examples(
        "sparring up",
        "sparring up --data /srv/sparring --host 0.0.0.0 --port 80 --allowed-host play.example.org",
        "sparring up --registry 's3://my-bucket/bots?region=eu-west-1'",
        "sparring up --store 'cassandra://10.0.0.1,10.0.0.2/play?consistency=LOCAL_QUORUM'",
        "sparring up --stream 'kinesis://play?region=eu-central-1' --store cassandra://10.0.0.1/play",
    )
)
def up(
    data: DataOption = Path(".sparring"),
    store: Annotated[
        str | None, typer.Option(help="Another store than the directory's: cassandra://HOST[:PORT][,HOST…]/KEYSPACE.")
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
    publish_every: Annotated[float, typer.Option(min=0.1, help="Seconds between versions.")] = 10.0,
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

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if algorithm is not None:
        algorithms.check_name(algorithm)
    if not train and not gateway:
        raise InputError("--no-train --no-gateway leaves nothing to run: drop one of them")
    settings = msgspec.json.encode({"algorithm": algorithm, "publish_every": publish_every})
    if not gateway:
        platform.train(data, store=store, registry=registry, settings=settings)
        return

    def ready(url: str) -> None:
        if print_address:
            print(url, flush=True)
            return
        console = Console()
        console.print(
            f"[bold]Sparring[/] runs at [bold]{url}[/] (dashboard). Data in {escape(str(data))}. Ctrl-C stops it."
        )
        console.print(f"Play against it: [bold]sparring play CartPole-v1 --server {url} --players 4[/]")

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
    )
    if not print_address:
        Console().print("Stopped.")


@app.command(
    epilog=_examples(
        "sparring play CartPole-v1 --players 4",
        "sparring play CartPole-v1 --server http://10.0.0.5:8400 --episodes 100",
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
    prefix: Annotated[str, typer.Option(help="Players are called PREFIX-001, …")] = "player",
    seed: Annotated[int | None, typer.Option(help="Fixes games and exploration.")] = None,
) -> None:
    """Mock players: play the newest bot and upload what they see, from any machine."""
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

        def on_episode(episode: mock.Episode) -> None:
            returns.append(episode.ret)
            mean = number(sum(returns) / len(returns))
            text = f"{next(played)} episodes, newest version {episode.version}, mean return {mean}"
            progress.update(task, description=text)

        summary = mock.play(
            game,
            server,
            players=players,
            episodes=episodes,
            explore=explore,
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


def _get(server: str, kind: Any, *path: str, query: str = "") -> Any:
    from sparring.client.transports.http import HttpConnection

    connection = HttpConnection(server)
    try:
        return connection.request("GET", *path, query=query).decode(kind)
    finally:
        connection.close()


def _change(server: str, method: str, *path: str) -> Any:
    """A change may take a while: the store removes much in small pieces."""
    from sparring.client.transports.http import HttpConnection

    connection = HttpConnection(server)
    try:
        return connection.request(method, *path, timeout=600.0)
    finally:
        connection.close()


def _print(renderable: Any) -> None:
    Console().print(renderable)


JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]


@app.command(epilog=_examples("sparring games", "sparring games CartPole-v1"))
def games(
    game: Annotated[str | None, typer.Argument(help="Show this one: its spaces and figures.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List the games of a platform, or show one."""
    from sparring.api import GameInfo, Snapshot
    from sparring.games import Game
    from sparring.terminal import number, table, view

    if game is None:
        rows = _get(server, list[GameInfo], "games")
        if as_json:
            print(msgspec.json.encode(rows).decode())
            return
        columns = ("game", "schema", "simulated as", ">seats", ">records", ">version", ">mean return")
        _print(
            table(
                "games",
                columns,
                [
                    (
                        f"{g.name}, paused" if g.paused else g.name,
                        g.schema,
                        g.env or "declared only",
                        str(g.players),
                        number(g.steps),
                        "–" if g.latest is None else f"v{g.latest}",
                        number(g.return_mean),
                    )
                    for g in rows
                ],
                f"none at {server}: `sparring play CartPole-v1` brings one",
            )
        )
        return
    spec = _get(server, Game, "games", game)
    snapshot = _get(server, Snapshot, "games", game, "stats")
    if as_json:
        print(msgspec.json.encode({"game": spec, "stats": snapshot}).decode())
        return
    console = Console()
    console.print(view(snapshot, server, width=console.width))
    console.print(
        f"observation: {spec.observation}\naction: {spec.action}\nschema: {spec.schema}", highlight=False, markup=False
    )


@app.command(epilog=_examples("sparring pause my-game", "sparring pause my-game --server http://10.0.0.7:8400"))
def pause(
    game: Annotated[str, typer.Argument(help="A game of the platform.")], server: ServerOption = DEFAULT_SERVER
) -> None:
    """Stop training a game. Its play is still stored, its bots still served."""
    _change(server, "POST", "games", game, "pause")
    Console().print(f"{game} is paused: `sparring resume {game}` goes on", highlight=False, markup=False)


@app.command(epilog=_examples("sparring resume my-game"))
def resume(
    game: Annotated[str, typer.Argument(help="A paused game of the platform.")], server: ServerOption = DEFAULT_SERVER
) -> None:
    """Train a paused game again."""
    _change(server, "POST", "games", game, "resume")
    Console().print(f"{game} is trained again", highlight=False, markup=False)


@app.command(epilog=_examples("sparring delete my-game", "sparring delete my-game --yes"))
def delete(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Delete a game for good: its declaration, its play, its bots and what was learned."""
    if not yes:
        typer.confirm(f"Delete {game} at {server}, with all its play and all its bots?", abort=True)
    answer = _change(server, "DELETE", "games", game).decode(dict[str, Any])
    versions = answer["versions"]
    Console().print(
        f"{game} is deleted, with {versions} published version{'' if versions == 1 else 's'}",
        highlight=False,
        markup=False,
    )


@app.command(epilog=_examples("sparring models CartPole-v1", "sparring models CartPole-v1 --version 3"))
def models(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    model: Annotated[str, typer.Option(help="The model.")] = "bot",
    version: Annotated[
        int | None, typer.Option(help="Show this version: files, metrics, data, hyperparameters.")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List a game's published versions, or show one."""
    from sparring.api import ModelInfo, Snapshot
    from sparring.registry.manifest import Manifest
    from sparring.terminal import ago, number, table

    if version is not None:
        m = _get(server, Manifest, "games", game, "models", model, str(version), "manifest")
        if as_json:
            print(msgspec.json.encode(m).decode())
            return
        rows = [
            ("game", m.game.name),
            ("algorithm", m.algorithm),
            ("published", ago(m.created)),
            ("parent", str(m.parent or "–")),
        ]
        rows += [("trained on", f"{number(m.data.steps)} steps in {m.data.fragments} fragments")]
        rows += [(name, f"{value:g}") for name, value in m.metrics.items()]
        rows += [(name, str(value)) for name, value in m.config.items()]
        rows += [(name, f"{number(info.size, 'B')}, sha256 {info.sha256[:16]}…") for name, info in m.files.items()]
        _print(table(f"{model} v{version}", ("", ""), rows))
        return
    infos = _get(server, list[ModelInfo], "games", game, "models")
    if as_json:
        print(msgspec.json.encode(infos).decode())
        return
    for info in infos:
        if info.model != "bot":
            _print(table(info.model, ("version",), [(f"v{n}",) for n in info.versions]))
    snapshot = _get(server, Snapshot, "games", game, "stats")
    columns = ("version", ">published", ">steps seen", ">evaluation", ">played", ">return in play")
    _print(
        table(
            f"{game}: bot",
            columns,
            [
                (
                    f"v{v.version}",
                    ago(v.created),
                    number(v.steps),
                    number(v.evaluation),
                    str(v.played),
                    number(v.return_mean),
                )
                for v in snapshot.versions
            ],
            "no version published yet",
        )
    )


@app.command(epilog=_examples("sparring players CartPole-v1", "sparring players CartPole-v1 player-001"))
def players(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    player: Annotated[str | None, typer.Argument(help="Show only this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the most recently seen first.")] = 20,
    erase: Annotated[str | None, typer.Option(help="Delete all of this player's records, for good.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List a game's players, show one, or erase one's records."""
    from sparring.store.protocol import PlayerStats
    from sparring.terminal import ago, number, table

    if erase is not None:
        if not yes:
            typer.confirm(f"Delete every record of {erase!r} in {game}?", abort=True)
        answer = _change(server, "DELETE", "games", game, "players", erase).decode(dict[str, int])
        Console().print(f"{answer['erased']} fragments erased")
        return
    rows = _get(server, list[PlayerStats], "games", game, "players", query=f"?limit={1000 if player else limit}")
    if player is not None and not (rows := [row for row in rows if row.player == player]):
        raise InputError(f"no player {player!r} among the newest 1000 of {game}: `sparring players {game}` lists them")
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    _print(
        table(
            f"players of {game}",
            ("player", ">records", ">fragments", ">seen"),
            [(p.player, number(p.steps), number(p.fragments), ago(p.last_seen)) for p in rows],
        )
    )


@app.command(epilog=_examples("sparring init my-game", "sparring init my-game --out games/my-game.json"))
def init(
    game: Annotated[str, typer.Argument(help="Name of a game of your own: letters, digits, '.', '_', '-'.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default: GAME.json.")] = None,
) -> None:
    """Write a declaration of your game, to fill in: its observations and actions."""
    from sparring.games.catalog import declare

    path = out or Path(f"{game}.json")
    try:
        declaration = declare(game).to_json()
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


# Commands about runs of the training core.
app.command(
    epilog=_examples(
        "sparring train CartPole-v1 --algorithm ppo",
        "sparring train experiments/pendulum-sac.yaml --set algorithm.lr=1e-3 --set seed=2 --out runs/second",
        "sparring train runs/second --resume --set stop.steps=100_000",
    )
)(commands.train)
app.command(
    epilog=_examples("sparring sweep experiments/sweep-cartpole-ppo.yaml", "sparring sweep runs/my-sweep --resume")
)(sweeps.sweep)
RUN = "runs/CartPole-v1-ppo-1"
app.command("eval", epilog=_examples(f"sparring eval {RUN} --episodes 50", "sparring eval CartPole-v1/bot/3"))(
    commands.evaluate
)
app.command(epilog=_examples(f"sparring record {RUN}", f"sparring record {RUN} out.mp4 --episodes 3"))(commands.record)
app.command(epilog=_examples(f"sparring plot {RUN} runs/CartPole-v1-ppo-2 --out figure.png"))(commands.plot)
app.command(epilog=_examples(f"sparring publish {RUN}", f"sparring publish {RUN} --model careful"))(commands.publish)
app.command(epilog=_examples("sparring runs", "sparring runs experiments/of-monday"))(commands.runs)
app.add_typer(
    registry_commands.app,
    name="registry",
    epilog=_examples("sparring registry init 's3://my-bucket/bots?region=eu-west-1' --public"),
)
app.command(
    epilog=_examples(
        "sparring ingest --stream 'kinesis://play?region=eu-central-1' --store cassandra://10.0.0.7/sparring",
        "sparring ingest --stream 'kinesis://play?region=eu-central-1' --master spark://10.0.0.8:7077",
    )
)(streams.ingest)
app.add_typer(
    streams.app, name="stream", epilog=_examples("sparring stream create 'kinesis://play?region=eu-central-1'")
)
app.add_typer(
    stores.app,
    name="store",
    epilog=_examples("sparring store init cassandra://10.0.0.1,10.0.0.2/play", "sparring store stats .sparring"),
)
app.add_typer(nodes.app, name="cluster", epilog=_examples("sparring cluster up --head", "sparring cluster status"))
app.add_typer(
    bench.app,
    name="bench",
    epilog=_examples("sparring bench scaling experiments/humanoidbullet-ppo.yaml --workers 1,2,4"),
)


def main() -> None:
    try:
        app()
    except InputError as error:
        _fail(error, 2)
    except (SparringError, OSError) as error:  # OSError: a full disk, a directory that is not ours
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    from rich.text import Text

    from sparring.terminal import plain

    text = Text.assemble(("error", "bold red"), " ", plain(str(error)))  # errors quote what users and servers wrote
    Console(stderr=True).print(text, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
