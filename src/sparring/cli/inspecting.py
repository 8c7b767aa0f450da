"""Commands that ask a platform about its games, or change them."""

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sparring.cli.options import DEFAULT_SERVER, JsonOption, ServerOption, change, examples, get, show_whole
from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=examples("sparring games", "sparring games CartPole-v1"))
def games(
    game: Annotated[str | None, typer.Argument(help="Show this one: its spaces and figures.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Also those that are archived.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List the games of a platform, or show one."""
    from sparring.api import GameInfo, Snapshot
    from sparring.games import Game
    from sparring.games.spec import written
    from sparring.terminal import number, table, view

    if game is None:
        rows = get(server, list[GameInfo], "games", query="?archived=true" if archived else "")
        if as_json:
            print(msgspec.json.encode(rows).decode())
            return
        columns = ("game", "simulated as", ">seats", ">steps", ">version", ">people", ">bots")
        show_whole(
            table(
                "games, with the mean returns of people and of bots",
                columns,
                [
                    (
                        f"{g.name}, {'archived' if g.archived else 'paused'}" if g.paused or g.archived else g.name,
                        _simulated(g.env),
                        str(g.players),
                        number(g.steps),
                        "–" if g.latest is None else f"v{g.latest}",
                        number(g.people_return_mean),
                        number(g.bot_return_mean),
                    )
                    for g in rows
                ],
                f"none at {server}: `sparring play CartPole-v1` brings one",
                whole=True,
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
    spaces = f"observation: {written(spec.observation)}\naction: {written(spec.action)}"
    console.print(f"{spaces}\nschema: {spec.schema}", highlight=False, markup=False, soft_wrap=True)


def _simulated(env: str | None) -> str:
    """What a module registers is never imported for a client: see games/env_check.py."""
    if env is None:
        return "declared only"
    return f"not simulated ({env})" if ":" in env else env


@app.command(epilog=examples("sparring pause my-game", "sparring pause my-game --server http://10.0.0.7:8400"))
def pause(
    game: Annotated[str, typer.Argument(help="A game of the platform.")], server: ServerOption = DEFAULT_SERVER
) -> None:
    """Stop training a game. Its play is still stored, its bots still served."""
    change(server, "POST", "games", game, "pause")
    Console().print(f"{game} is paused: `sparring resume {game}` resumes it", highlight=False, markup=False)


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


@app.command(
    epilog=examples(
        "sparring models CartPole-v1",
        "sparring models CartPole-v1 --version 3",
        "sparring models my-game --model careful",
    )
)
def models(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    model: Annotated[str | None, typer.Option(help="Only this model; with --version, default: bot.")] = None,
    version: Annotated[
        int | None, typer.Option(help="Show this version: files, metrics, data, hyperparameters, moves.")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List a game's published versions and which of them players get, or show one."""
    from sparring.api import ModelInfo

    infos = get(server, list[ModelInfo], "games", game, "models")
    there = [info.model for info in infos]
    if model is not None and model not in there:
        raise InputError(f"{game} has no model {model!r}: it has {', '.join(there) or 'none yet'}")
    if version is not None:
        versions: list[int] = next((info.versions for info in infos if info.model == (model or "bot")), [])
        if version not in versions:
            found = f"from v{versions[0]} to v{versions[-1]}" if versions else "none yet"
            raise InputError(f"{game} has no version {version} of the model {model or 'bot'!r}: it has {found}")
        _show_version(server, game, model or "bot", version, as_json)
        return
    infos = [info for info in infos if model in (None, info.model)]
    if as_json:
        print(msgspec.json.encode(infos).decode())
        return
    for info in sorted(infos, key=lambda info: info.model == "bot"):
        _list_versions(server, game, info)
    if not infos:
        _list_versions(server, game, ModelInfo("bot", [], None))


def _list_versions(server: str, game: str, info: Any) -> None:
    from sparring.api import Snapshot
    from sparring.terminal import ago, number, plain, table

    title, named = f"{game}: {info.model}", {n: _names(info.aliases, n) for n in info.versions}
    if info.model != "bot":
        show_whole(table(title, ("version", "players"), [(f"v{n}", named[n]) for n in info.versions], whole=True))
        return
    played = {row.version: row for row in get(server, Snapshot, "games", game, "stats").versions}
    rows = []
    for n in info.versions[-50:]:
        v = played.get(n)
        figures = ("–", "–", "–", "–", "–")
        if v is not None:
            ret = number(v.return_mean) + (f" ± {number(v.margin)}" if v.margin is not None else "")
            figures = ago(v.created), number(v.steps), number(v.evaluation), str(v.played), ret
        rows.append((f"v{n}", named[n], *figures))
    columns = ("version", "players", ">published", ">steps seen", ">evaluation", ">episodes", ">return")
    show_whole(table(f"{title}, with returns in play", columns, rows, "no version published yet", whole=True))
    for alias in info.aliases:
        if alias.name == "stable" and alias.reason:
            Console().print(plain(f"v{alias.version} is {alias.name}: {alias.reason}"), soft_wrap=True)


def _names(aliases: list[Any], version: int) -> str:
    """Of a version: stable, pinned"""
    names = []
    for alias in aliases:
        if alias.version == version:
            share = f" ({alias.share:.0%} of play)" if alias.share else ""
            names.append(alias.name + share + (", pinned" if alias.pinned else ""))
    return ", ".join(names)


def _show_version(server: str, game: str, model: str, version: int, as_json: bool) -> None:
    from sparring.cli.promoting import MOVES, move_rows
    from sparring.registry.manifest import Manifest, Move
    from sparring.terminal import ago, number, table

    m = get(server, Manifest, "games", game, "models", model, str(version), "manifest")
    if as_json:
        print(msgspec.json.encode(m).decode())
        return
    moves = [
        move
        for move in get(server, list[Move], "games", game, "models", model, "moves", query="?limit=1000")
        if version in (move.version, move.previous)
    ]
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
    show_whole(table(f"{model} v{version}", ("", ""), rows, whole=True))
    show_whole(table("\nmoves", MOVES, move_rows(moves), "none: players never got it", whole=True))


@app.command(epilog=examples("sparring rejected my-game", "sparring rejected my-game --limit 1000 --json"))
def rejected(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest first.")] = 20,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List a game's rejected fragments, each with its reason."""
    from sparring.api import RejectedFragment
    from sparring.terminal import ago, table

    rows = get(server, list[RejectedFragment], "games", game, "rejected", query=f"?limit={limit}")
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    cells = [(ago(r.time), r.player, r.id, r.reason) for r in rows]
    show_whole(table(f"rejected play of {game}", ("when", "player", "fragment", "reason"), cells, "none", whole=True))


@app.command(epilog=examples("sparring players CartPole-v1", "sparring players CartPole-v1 player-001"))
def players(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    player: Annotated[str | None, typer.Argument(help="Show only this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the most recently seen first.")] = 20,
    erase: Annotated[str | None, typer.Option(help="Delete all of this player's steps, for good.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List a game's players with their returns, show one, or erase one's play."""
    from sparring.api import PlayerRow
    from sparring.terminal import ago, number, returns, table

    if erase is not None:
        if not yes:
            typer.confirm(f"Delete every step of {erase!r} in {game}?", abort=True)
        answer = change(server, "DELETE", "games", game, "players", erase).decode(dict[str, int])
        Console().print(f"{answer['erased']} fragments erased")
        return
    rows = get(server, list[PlayerRow], "games", game, "players", query=f"?limit={1000 if player else limit}")
    if player is not None and not (rows := [row for row in rows if row.player == player]):
        raise InputError(f"no player {player!r} among the newest 1000 of {game}: `sparring players {game}` lists them")
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    columns = ("player", "plays as", ">steps", ">episodes", ">return", ">seen")
    cells = [
        (
            p.player,
            p.kind,
            number(p.steps),
            str(p.all.episodes),
            returns(p),
            ago(p.last_seen),
        )
        for p in rows
    ]
    show_whole(table(f"players of {game}", columns, cells, whole=True))
