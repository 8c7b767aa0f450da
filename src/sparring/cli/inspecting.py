"""Commands that ask a platform about its games, or change them."""

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sparring.cli.options import DEFAULT_SERVER, JsonOption, ServerOption, change, examples, get, show
from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=examples("sparring games", "sparring games CartPole-v1"))
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
        rows = get(server, list[GameInfo], "games")
        if as_json:
            print(msgspec.json.encode(rows).decode())
            return
        columns = ("game", "schema", "simulated as", ">seats", ">records", ">version", ">mean return")
        show(
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
    spec = get(server, Game, "games", game)
    snapshot = get(server, Snapshot, "games", game, "stats")
    if as_json:
        print(msgspec.json.encode({"game": spec, "stats": snapshot}).decode())
        return
    console = Console()
    console.print(view(snapshot, server, width=console.width))
    console.print(
        f"observation: {spec.observation}\naction: {spec.action}\nschema: {spec.schema}", highlight=False, markup=False
    )


@app.command(epilog=examples("sparring pause my-game", "sparring pause my-game --server http://10.0.0.7:8400"))
def pause(
    game: Annotated[str, typer.Argument(help="A game of the platform.")], server: ServerOption = DEFAULT_SERVER
) -> None:
    """Stop training a game. Its play is still stored, its bots still served."""
    change(server, "POST", "games", game, "pause")
    Console().print(f"{game} is paused: `sparring resume {game}` goes on", highlight=False, markup=False)


@app.command(epilog=examples("sparring resume my-game"))
def resume(
    game: Annotated[str, typer.Argument(help="A paused game of the platform.")], server: ServerOption = DEFAULT_SERVER
) -> None:
    """Train a paused game again."""
    change(server, "POST", "games", game, "resume")
    Console().print(f"{game} is trained again", highlight=False, markup=False)


@app.command(epilog=examples("sparring delete my-game", "sparring delete my-game --yes"))
def delete(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Delete a game for good: its declaration, its play, its bots and what was learned."""
    if not yes:
        typer.confirm(f"Delete {game} at {server}, with all its play and all its bots?", abort=True)
    answer = change(server, "DELETE", "games", game).decode(dict[str, Any])
    versions = answer["versions"]
    Console().print(
        f"{game} is deleted, with {versions} published version{'' if versions == 1 else 's'}",
        highlight=False,
        markup=False,
    )


@app.command(epilog=examples("sparring models CartPole-v1", "sparring models CartPole-v1 --version 3"))
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
        m = get(server, Manifest, "games", game, "models", model, str(version), "manifest")
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
        show(table(f"{model} v{version}", ("", ""), rows))
        return
    infos = get(server, list[ModelInfo], "games", game, "models")
    if as_json:
        print(msgspec.json.encode(infos).decode())
        return
    for info in infos:
        if info.model != "bot":
            show(table(info.model, ("version",), [(f"v{n}",) for n in info.versions]))
    snapshot = get(server, Snapshot, "games", game, "stats")
    columns = ("version", ">published", ">steps seen", ">evaluation", ">played", ">return in play")
    show(
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


@app.command(epilog=examples("sparring players CartPole-v1", "sparring players CartPole-v1 player-001"))
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
        answer = change(server, "DELETE", "games", game, "players", erase).decode(dict[str, int])
        Console().print(f"{answer['erased']} fragments erased")
        return
    rows = get(server, list[PlayerStats], "games", game, "players", query=f"?limit={1000 if player else limit}")
    if player is not None and not (rows := [row for row in rows if row.player == player]):
        raise InputError(f"no player {player!r} among the newest 1000 of {game}: `sparring players {game}` lists them")
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    show(
        table(
            f"players of {game}",
            ("player", ">records", ">fragments", ">seen"),
            [(p.player, number(p.steps), number(p.fragments), ago(p.last_seen)) for p in rows],
        )
    )
