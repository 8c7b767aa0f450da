"""Commands that say which version serves whom: promote, rollback, pin, unpin, alias, aliases."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sparring.cli.options import (
    DEFAULT_SERVER,
    ByOption,
    JsonOption,
    PlatformGame,
    ReasonOption,
    ServerOption,
    change,
    examples,
    get,
    show_whole,
)
from sparring.errors import InputError

__all__ = ["MOVES", "app", "move_rows"]

app = typer.Typer()
ModelOption = Annotated[str, typer.Option(help="The model.")]
MOVES = ("when", "alias", "from", "to", "by", "reason", "evidence")


@app.command(
    epilog=examples("sparring promote my-game 3", "sparring promote my-game 3 --reason 'won our own tournament'")
)
def promote(
    game: PlatformGame,
    version: Annotated[int, typer.Argument(min=1, help="The version that players shall get.")],
    model: ModelOption = "bot",
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Make a version the one that players get (the alias `stable`). `sparring rollback` undoes it."""
    body = {"version": version, "reason": reason or "promoted by hand", "by": by}
    move = _send(server, "PUT", game, model, "aliases", "stable", body=body)
    _say(f"{game}: players get version {move.version} of {model} now{_was(move)}{_pinned(game, move)}")


@app.command(epilog=examples("sparring rollback my-game", "sparring rollback my-game --reason 'players complain'"))
def rollback(
    game: PlatformGame,
    model: ModelOption = "bot",
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Give players the version that they had before. Done twice, it is undone."""
    body: dict[str, Any] = {"reason": reason, "by": by}
    stable = next((alias for alias in _aliases(server, game, model) if alias.name == "stable"), None)
    if stable is not None:  # a request that is sent again must not undo the first one
        body["expected"] = stable.version
    move = _send(server, "POST", game, model, "rollback", body=body)
    _say(f"{game}: players get version {move.version} of {model} again{_was(move)}{_pinned(game, move)}")


@app.command(epilog=examples("sparring pin my-game", "sparring pin my-game 3 --reason 'the tournament'"))
def pin(
    game: PlatformGame,
    version: Annotated[int | None, typer.Argument(min=1, help="Default: the one that players have.")] = None,
    model: ModelOption = "bot",
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Hold the version that players get: the trainer goes on learning, and does not move it."""
    move = _send(server, "POST", game, model, "pin", body={"version": version, "reason": reason, "by": by})
    _say(f"{game}: version {move.version} of {model} is pinned{_was(move)}. `sparring unpin {game}` lets it move again")


@app.command(epilog=examples("sparring unpin my-game"))
def unpin(
    game: PlatformGame,
    model: ModelOption = "bot",
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Let the trainer promote versions again."""
    move = _send(server, "POST", game, model, "unpin", body={"reason": reason, "by": by})
    _say(f"{game}: version {move.version} of {model} is not pinned any more")


@app.command(epilog=examples("sparring alias my-game easy 2", "sparring alias my-game easy --remove"))
def alias(
    game: PlatformGame,
    name: Annotated[str, typer.Argument(help="A name of your own: letters, digits, '.', '_', '-'.")],
    version: Annotated[int | None, typer.Argument(min=1, help="The version that it shall name.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it.")] = False,
    model: ModelOption = "bot",
    reason: ReasonOption = "",
    by: ByOption = "person",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Give a version a name that games ask for: c.bot(alias="easy")."""
    if remove == (version is not None):
        raise InputError("give a version, or --remove: `sparring alias GAME NAME VERSION`")
    if remove:
        from urllib.parse import urlencode

        move = _send(
            server, "DELETE", game, model, "aliases", name, query="?" + urlencode({"reason": reason, "by": by})
        )
        _say(f"{game}: {name} of {model} is removed{_was(move)}")
        return
    body = {"version": version, "reason": reason, "by": by}
    move = _send(server, "PUT", game, model, "aliases", name, body=body)
    _say(f"{game}: {name} is version {move.version} of {model} now{_was(move)}")


@app.command(epilog=examples("sparring aliases my-game", "sparring aliases my-game --limit 200 --json"))
def aliases(
    game: PlatformGame,
    model: ModelOption = "bot",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many moves, the newest first.")] = 20,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List the names of a game's versions, and what was moved, when, by whom and why."""
    from sparring.registry.manifest import Move
    from sparring.terminal import ago, table

    names = _aliases(server, game, model)
    moves = get(server, list[Move], "games", game, "models", model, "moves", query=f"?limit={limit}")
    if as_json:
        print(msgspec.json.encode({"aliases": names, "moves": moves}).decode())
        return
    rows = [
        (a.name, f"v{a.version}", ago(a.since) if a.since else "–", a.by, _how(a.pinned, a.share), a.reason)
        for a in names
    ]
    columns = ("alias", "version", "since", "by", "", "reason")
    show_whole(table(f"{game}: names of versions of {model}", columns, rows, "none", whole=True))
    show_whole(table("\nmoves", MOVES, move_rows(moves), "none yet", whole=True))


def move_rows(moves: Sequence[Any]) -> list[tuple[str, ...]]:
    """Of a table with the columns MOVES."""
    from sparring.terminal import ago

    return [
        (
            ago(m.time),
            m.alias + (", pinned" if m.pinned else ""),
            _version(m.previous),
            _version(m.version),
            m.by,
            m.reason,
            ", ".join(f"{name} {value:.4g}" for name, value in m.evidence.items()),
        )
        for m in moves
    ]


def _version(version: int | None) -> str:
    return "–" if version is None else f"v{version}"


def _how(pinned: bool, share: float) -> str:
    return "pinned" if pinned else f"{share:.0%} of play" if share else ""


def _was(move: Any) -> str:
    return "" if move.previous in (None, move.version) else f" (was {move.previous})"


def _pinned(game: str, move: Any) -> str:
    return f". It is pinned: `sparring unpin {game}` lets the trainer move it" if move.pinned else ""


def _aliases(server: str, game: str, model: str) -> Any:
    from sparring.registry.manifest import Alias

    return get(server, list[Alias], "games", game, "models", model, "aliases")


def _send(
    server: str, method: str, game: str, model: str, *path: str, body: dict[str, Any] | None = None, query: str = ""
) -> Any:
    from sparring.registry.manifest import Move

    return change(server, method, "games", game, "models", model, *path, body=body, query=query).decode(Move)


def _say(text: str) -> None:
    from sparring.terminal import plain

    Console().print(plain(text), soft_wrap=True)
