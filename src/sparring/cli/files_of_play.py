"""`sparring data export|import`: play to files and back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparring.cli.options import DataOption
from sparring.errors import InputError

__all__ = ["app"]

app = typer.Typer(help="Export a game's play to files, or import it from files.", no_args_is_help=True)
StoreGame = Annotated[str, typer.Argument(help="A game of the store.")]
StoreOption = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="The store: cassandra://… or a file; default: that of --data.")
]


@contextmanager
def _progress(total: float | None) -> Iterator[Callable[[float], None]]:
    """A line on the terminal; nothing in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("steps", total=total)
        yield lambda done: progress.update(task, completed=done)


@app.command("export")
def export_play(
    game: StoreGame,
    out: Annotated[Path, typer.Argument(help="A new directory.")],
    form: Annotated[str, typer.Option("--format", help="parquet, npz, csv or minari.")] = "parquet",
    player: Annotated[str | None, typer.Option(help="Only this player's.")] = None,
    model: Annotated[str | None, typer.Option(help="Only what this model played.")] = None,
    version: Annotated[int | None, typer.Option(help="Only what this version played.")] = None,
    since: Annotated[str | None, typer.Option(help="Only newer play: 7d, 12h, or a date as 2026-11-18.")] = None,
    people: Annotated[bool, typer.Option("--people", help="Only people's.")] = False,
    bots: Annotated[bool, typer.Option("--bots", help="Only bots'.")] = False,
    store: StoreOption = None,
    data: DataOption = Path(".sparring"),
) -> None:
    """Write a game's play to files, a part at a time, also while the platform runs."""
    from sparring.data.exporting import export, find_game, unfinished
    from sparring.data.selection import Selection
    from sparring.store import open_store

    selection = Selection.of(player, model, version, since, people, bots)
    for left in unfinished(out):
        _note(f"{left} is left of an export that was killed: delete it, unless another one is running")
    opened = open_store(store or str(data), readonly=True)
    try:
        with _progress(opened.stats(find_game(opened, game).name).steps) as on_progress:
            done = export(opened, game, out, form, selection, on_progress)
    finally:
        opened.close()
    print(f"{done.steps} steps in {done.fragments} fragments of {game} are in {out} ({form})")


@app.command("import")
def import_play(
    game: StoreGame,
    source: Annotated[str, typer.Argument(metavar="IN", help="A directory or file; with --format store an address.")],
    form: Annotated[str, typer.Option("--format", help="parquet, npz, csv, minari, rllib or store.")] = "parquet",
    player: Annotated[str | None, typer.Option(help="Whose play it is, where files do not say.")] = None,
    other: Annotated[
        bool, typer.Option("--other-game", help="Take an export of a game with another name and the same spaces.")
    ] = False,
    store: StoreOption = None,
    data: DataOption = Path(".sparring"),
) -> None:
    """Read play from files, or from another store. Reading the same again changes nothing."""
    from sparring.data.exporting import find_game
    from sparring.data.importing import declaration, read, require_same_game, store_fragments
    from sparring.store import open_store

    opened = open_store(store or str(data))
    try:
        declared = declaration(source) if form != "store" else None
        if declared is not None and declared.name == game:
            opened.register(declared)
        try:
            spec = find_game(opened, game)
        except InputError as error:
            if declared is None:
                raise
            command = f"sparring data import {declared.name} {source} --format {form}"
            raise InputError(f"{error}. {source} holds play of {declared.name!r}: {command}") from error
        if form != "store":
            require_same_game(spec, source, other=other)
        with _progress(None) as on_progress:
            done = store_fragments(
                opened,
                spec,
                read(spec, source, form, player),
                lambda done: on_progress(done.steps),
            )
    finally:
        opened.close()
    print(f"{done.steps} steps in {done.fragments} fragments are new in {game}, {done.duplicates} were there already")
    for reason, count in done.reasons.items():
        print(f"{count} rejected: {reason}")


def _note(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
