"""`sparring export` and `sparring dataset`: policies as files for other programs and machines, and what calibrates
them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparring.cli.options import GameOption, set_game, show_whole
from sparring.cli.training import DEFAULT_REGISTRY, RegistryOption, TargetArgument, changed, progress
from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.edge.dataset import Sample
    from sparring.edge.exporter import Exported
    from sparring.games import Game
    from sparring.networks.policy import Policy

__all__ = ["dataset", "export"]


def export(
    target: TargetArgument,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT,…",
            help="onnx, onnx-int8, keras, h5, tflite, tflite-int8, c, c-int8, safetensors; yours as module:Class.",
        ),
    ] = "onnx",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go; default: here.")] = Path(),
    value: Annotated[
        bool, typer.Option("--value", help="The value of a state as one more output, of a run of PPO, IQL, ….")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="N|FILE.npz",
            help="For int8: observations of the policy's own play (default 4,000, of images 500), or a data set.",
        ),
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="Compare returns over so many episodes of both; 0: leave that out.")
    ] = 20,
    registry: RegistryOption = DEFAULT_REGISTRY,
) -> None:
    """Write a run's or a published policy as files for other programs, named after the run or the model.

    Each file is loaded again and compared with the policy, on observations that it was not made with; `export.json`
    beside the files keeps the figures.
    """
    from sparring.edge.exporter import Wanted
    from sparring.edge.exporter import export as write
    from sparring.export import formats
    from sparring.policies import load_policy

    names = [name.strip() for name in to.split(",") if name.strip()]
    if not names:
        raise InputError(f"--to is empty: name one of {', '.join(formats.FORMATS)}")
    for name in names:
        formats.find_format(name)  # before anything is read
    policy = load_policy(target, registry)
    wanted = Wanted(names, _stem(target), out, _value(target) if value else None, _calibration(calibrate), episodes)
    with _words("exporting") as show:
        found = write(policy, wanted, show)
    for name in found:
        typer.echo(str(out / name))
    if any(row.comparison is not None or row.not_compared for row in found.values()):
        _show(found)


def _value(target: str) -> Any:
    from sparring.runs.run import find_run

    if (found := find_run(target)) is None:
        raise InputError(f"{target} is published, without its value network: --value takes a run")
    run, which = found
    return run.value("last" if which is None else which)


def _calibration(text: str | None) -> int | Path | None:
    if text is None:
        return None
    if text.isdecimal():
        from sparring.export.whole_numbers import LEAST

        if not LEAST <= int(text) <= 1_000_000:
            raise InputError(f"--calibrate {text}: give {LEAST} to 1,000,000 observations, or an npz")
        return int(text)
    if not Path(text).is_file():
        raise InputError(f"--calibrate {text}: there is no such file; `sparring dataset` writes one")
    return Path(text)


def _show(found: "Mapping[str, Exported]") -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("format", "bytes", "s", "largest difference", "same actions", "action error", "return", "policy's"):
        table.add_column(name, justify="left" if name == "format" else "right")
    for row in found.values():
        c, r = row.comparison, row.returns
        table.add_row(
            row.format, f"{row.bytes:,}", f"{row.seconds:.1f}",
            "" if c is None or c.float_difference is None else f"{c.float_difference:.1e}",
            "not compared" if c is None else "" if c.agreement is None else f"{c.agreement:.2%}",
            "" if c is None or c.action_error is None else f"{c.action_error:.3%}",
            "" if r is None else f"{r.file:,.1f}", "" if r is None else f"{r.policy:,.1f}",
        )  # fmt: skip
    show_whole(table)
    for name, row in found.items():
        if row.not_compared is not None:
            typer.echo(f"{name} was not compared: {row.not_compared}")
        if row.edge_tpu is not None:
            typer.echo(f"{name}: {row.edge_tpu.tpu} operators run on the Edge TPU, {row.edge_tpu.cpu} on the CPU")


def _stem(target: str) -> str:
    """`runs/CartPole-v1-ppo-1@best` → `CartPole-v1-ppo-1-best`, `CartPole-v1/bot/3` → `CartPole-v1-bot-3`."""
    from sparring.runs.run import find_run

    if (found := find_run(target)) is None:
        return Path(target).stem if Path(target).is_file() else target.replace("/", "-")
    run, which = found
    return run.path.resolve().name + (f"-{which}" if which is not None else "")


@contextmanager
def _words(what: str) -> Iterator[Any]:
    """Progress of steps that have names."""
    with progress(what, 100) as show:
        yield lambda words, done, total: show(int(100 * done / total) if total else 0, words)


def dataset(
    source: Annotated[
        str,
        typer.Argument(metavar="GAME|RUN|STORE", help="A game's id, a run, or a store with play."),
    ],
    out: Annotated[Path, typer.Argument(help="The .npz to write.")],
    samples: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many observations.")] = 500,
    policy: Annotated[
        str | None,
        typer.Option(metavar="random|MODEL", help="Who plays; default: the run's policy, at random in a game."),
    ] = None,
    game: Annotated[str | None, typer.Option(metavar="NAME", help="Of a store: whose play.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is played, or drawn from a store.")] = 0,
    changes: GameOption = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
) -> None:
    """Write observations and actions of play, to calibrate or to compare with (`sparring export --calibrate`)."""
    from sparring.edge import dataset as data
    from sparring.runs.run import find_run

    if out.suffix != ".npz" or out.is_dir():
        raise InputError(f"{out}{' is a directory' if out.is_dir() else ''}: name a file that ends in .npz")
    data.check_place(out.parent)
    if find_run(source) is None and _is_store(source):
        if policy is not None or changes:
            raise InputError("--policy and --set are for play here; a store has play already")
        sample = _recorded(source, game, samples, seed)
    else:
        if game is not None:
            raise InputError(f"--game {game} is for stores: {source} is none")
        spec, actor = _played(source, policy, changes, registry)
        with _words("playing") as show:
            sample = data.played(spec, actor, samples, seed, lambda done, total: show("", done, total))
    data.save(sample, out)
    typer.echo(f"{out}: {len(sample.obs)} observations of {sample.game.name}")


def _played(source: str, player: str | None, changes: list[str] | None, registry: str) -> "tuple[Game, Policy | None]":
    """The game of an id or a run, and who plays; None: at random."""
    from sparring.games import compatible
    from sparring.policies import load_policy
    from sparring.runs.run import find_run

    if find_run(source) is None:
        game = set_game(source, changes)
        player = player or "random"
    else:
        game = changed(load_policy(source, registry).game, changes)
        player = player or source
    if player == "random":
        return game, None
    actor = load_policy(player, registry)
    if (why := compatible.difference(actor.game, game)) is not None:
        raise InputError(f"{player} does not play {game.name}: {why}")
    return game, actor


def _is_store(source: str) -> bool:
    return "://" in source or Path(source).is_file() or (Path(source) / "store.db").is_file()


def _recorded(source: str, name: str | None, samples: int, seed: int) -> "Sample":
    from sparring.data.exporting import find_game
    from sparring.edge import dataset as data
    from sparring.store import open_store

    store = open_store(source, readonly=True)
    try:
        if name is None:
            names = [game.name for game in store.games()]
            if len(names) != 1:
                raise InputError(f"{source} has {', '.join(names[:20]) or 'no games'}: say whose play, with --game")
            name = names[0]
        return data.recorded(store, find_game(store, name), samples, seed)
    finally:
        store.close()
