"""What commands share: options, examples, and asking a platform."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = [
    "DEFAULT_SERVER",
    "AlgorithmOption",
    "DataOption",
    "JsonOption",
    "ServerOption",
    "change",
    "examples",
    "get",
    "show",
]

DEFAULT_SERVER = "http://127.0.0.1:8400"
ServerOption = Annotated[str, typer.Option(envvar="SPARRING_SERVER", help="Address of the platform.")]
AlgorithmOption = Annotated[
    str | None, typer.Option(help="What learns: dqn, ppo, …, or module:Class; default: by the game's actions.")
]
DataOption = Annotated[Path, typer.Option(help="Directory for everything: store, registry, checkpoints.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")]


def examples(*lines: str) -> str:
    """For a command's `epilog`."""
    return "Examples:\n\n" + "\n\n".join(f"  $ {line}" for line in lines)


def get(server: str, kind: Any, *path: str, query: str = "") -> Any:
    from sparring.client.transports.http import HttpConnection

    connection = HttpConnection(server)
    try:
        return connection.request("GET", *path, query=query).decode(kind)
    finally:
        connection.close()


def change(server: str, method: str, *path: str) -> Any:
    """A change may take a while: the store removes much in small pieces."""
    from sparring.client.transports.http import HttpConnection

    connection = HttpConnection(server)
    try:
        return connection.request(method, *path, timeout=600.0)
    finally:
        connection.close()


def show(renderable: Any) -> None:
    Console().print(renderable)
