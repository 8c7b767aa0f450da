"""What commands share: options, examples, and asking a platform."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.client.transports.http import HttpConnection
    from sparring.games import Game

__all__ = [
    "DEFAULT_SERVER",
    "AlgorithmOption",
    "ByOption",
    "DataOption",
    "GameOption",
    "JsonOption",
    "PlatformGame",
    "ReasonOption",
    "ServerOption",
    "SetOption",
    "change",
    "examples",
    "game_as_set",
    "get",
    "set_game",
    "show",
    "show_whole",
]

DEFAULT_SERVER = "http://127.0.0.1:8400"
ServerOption = Annotated[str, typer.Option(envvar="SPARRING_SERVER", help="Address of the platform.")]
AlgorithmOption = Annotated[
    str | None, typer.Option(help="What learns: dqn, ppo, …, or module:Class; default: by the game's actions.")
]
DataOption = Annotated[Path, typer.Option(help="Directory for everything: store, registry, checkpoints.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; may be repeated.")
]
GameOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="game.KEY=VALUE", help="Set the game, such as game.gravity=-5.")
]
PlatformGame = Annotated[str, typer.Argument(help="A game of the platform.")]
ReasonOption = Annotated[str, typer.Option(help="Why, in a sentence. It is kept with the change.")]
ByOption = Annotated[str, typer.Option(help="Who you are. It is kept with the change.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]


def examples(*lines: str) -> str:
    """For a command's `epilog`."""
    return "Examples:\n\n" + "\n\n".join(f"  $ {line}" for line in lines)


def set_game(game: str | dict[str, Any], changes: list[str] | None) -> "Game":
    """A game by its id, or as an experiment has it, with changes such as `game.gravity=-5`."""
    from sparring.games import catalog

    return catalog.load(game_as_set(game, changes))


def game_as_set(game: str | dict[str, Any], changes: list[str] | None) -> Any:
    """As an experiment has it."""
    from sparring.experiment import override

    data = override({"game": game}, changes or [])
    if other := next((key for key in data if key != "game"), None):
        raise InputError(f"--set {other}: only the game can be set here, such as --set game.gravity=-5")
    return data["game"]


def get(server: str, kind: Any, *path: str, query: str = "") -> Any:
    with _asking(server) as connection:
        return connection.request("GET", *path, query=query).decode(kind)


def change(server: str, method: str, *path: str, body: Any = None, query: str = "") -> Any:
    """A change may take a while: the store removes much in small pieces. `body`: a message, sent as JSON."""
    if (wrong := _not_finite(msgspec.to_builtins(body))) is not None:
        raise InputError(f"{wrong}: only finite numbers can be sent, JSON has no NaN and no infinity")
    text, headers = (None, None) if body is None else (msgspec.json.encode(body), {"Content-Type": "application/json"})
    with _asking(server) as connection:
        return connection.request(method, *path, body=text, headers=headers, timeout=600.0, query=query)


def _not_finite(body: Any, where: str = "") -> str | None:
    """Where a message has NaN or an infinity, which JSON would make null of."""
    if isinstance(body, float) and not math.isfinite(body):
        return f"{where} is {body}"
    parts = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, (list, tuple)) else ()
    found = (_not_finite(part, f"{where}.{key}".lstrip(".")) for key, part in parts)
    return next((wrong for wrong in found if wrong), None)


@contextmanager
def _asking(server: str) -> "Iterator[HttpConnection]":
    from sparring.client.transports.base import Refused
    from sparring.client.transports.http import HttpConnection

    with closing(HttpConnection(server)) as connection:
        try:
            yield connection
        except Refused as error:  # it names the request that helps: here a command does
            said, asks, rest = str(error).partition(": see GET /v1/games")
            if not asks:
                raise
            lists = f"models {rest.split('/')[1]}" if rest.startswith("/") else "games"
            raise InputError(f"{said}: `sparring {lists}` lists those of {server}") from error


def show(renderable: Any) -> None:
    Console().print(renderable)


def show_whole(renderable: Any) -> None:
    """Nothing is cut: long cells go on in the next line on a terminal, and are one line each in a file or a pipe."""
    console = Console() if Console().is_terminal else Console(width=4000)
    console.print(renderable)
