"""`sparring publish`: a run's policy as the next version of a model."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparring.cli.training import DEFAULT_REGISTRY, RegistryOption, progress
from sparring.errors import InputError

if TYPE_CHECKING:
    from sparring.games import Game
    from sparring.networks.policy import Policy
    from sparring.registry.manifest import Manifest
    from sparring.registry.registry import Registry
    from sparring.store.protocol import Store

__all__ = ["publish", "publish_run"]


def publish(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@WHICH]",
            help="A run directory: its best evaluated policy, or RUN@last, RUN@40, … of those it keeps.",
        ),
    ],
    model: Annotated[str, typer.Option(help="The model's name.")] = "bot",
    registry: RegistryOption = DEFAULT_REGISTRY,
    game: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Publish for this game instead: its name on the platform, or its .json declaration."
        ),
    ] = None,
    also: Annotated[
        str, typer.Option(metavar="FORMAT,…", help="Further files of the version, such as tflite-int8,c: policy.*.")
    ] = "",
) -> None:
    """Publish a run's policy as the next version of a model: the best evaluated one, unless another is named.

    With --game the run's game and the other one must have the same spaces; bounds of observations may differ."""
    from sparring.runs.run import find_run

    if (found := find_run(target)) is None:
        raise InputError(f"{target} is not a run directory: it has no experiment.yaml")
    run, which = found
    best = run.best() if which in (None, "best") else None
    names = [name.strip() for name in also.split(",") if name.strip()]
    manifest = publish_run(run.path, model, registry, which, game, names)
    typer.echo(f"{manifest.game.name}/{manifest.model}/{manifest.version}")
    if manifest.alias != "stable":
        name = manifest.game.name
        typer.echo(
            f"{name} is pinned, so players do not get it: `sparring promote {name} {manifest.version}`", err=True
        )
    if best is not None:
        best_one = f"the best evaluated policy: iteration {best.iteration}, return {best.ret:,.1f}"
        typer.echo(f"{best_one} ({run.path}@last is the last one)", err=True)
    if game is not None or _stored_game(manifest.game.name, registry) is not None:
        _warn_of_people(manifest, registry)


def _warn_of_people(manifest: "Manifest", address: str) -> None:
    """The platform's trainer goes on with the algorithm of what was published, unless one is set; not each learns from
    people."""
    from sparring import algorithms
    from sparring.registry.manifest import DEFAULT_MODEL

    name, game = manifest.algorithm, manifest.game
    ours = manifest.model == DEFAULT_MODEL and name in algorithms.ALGORITHMS
    if not ours or not algorithms.find(name).on_policy:
        return
    with _stored(address) as store:
        profile = None if store is None else store.profiles().get(game.name)
    chosen = None if profile is None else profile.settings.algorithm
    if chosen in algorithms.ALGORITHMS and not algorithms.find(chosen).on_policy:
        return
    other = algorithms.default_for(game)
    typer.echo(
        f"warning: {name} cannot learn from people's play, so the trainer of {game.name} would leave it out. "
        f"{other} can: train with --algorithm {other}, or say `sparring settings {game.name} --set algorithm={other}`",
        err=True,
    )


def publish_run(
    path: Path, model: str, registry: str, which: str | None = None, game: str | None = None, also: Sequence[str] = ()
) -> "Manifest":
    """The manifest of the version that was published; without `which` the best one, where one was evaluated. `game`:
    another one than the run's, to publish it for. `also`: formats of further files."""
    from sparring.registry.manifest import DataSpan, flat
    from sparring.registry.registry import Registry
    from sparring.runs.run import Run

    run = Run(path)
    best = run.best() if which in (None, "best") else None
    if which is None:
        which = "last" if best is None else "best"
    policy = run.policy(which)  # refuses what is none of its policies
    experiment, rows = run.experiment, run.rows()
    until = best.iteration if best is not None else int(which) if which.isdecimal() else None
    rows = [row for row in rows if until is None or row["iteration"] <= until]
    last = {k: v for row in rows for k, v in row.items() if not k.startswith("time/")}  # the newest of each
    where = Registry(registry)
    where.check()
    if game is not None:
        policy = replace(policy, game=_other_game(policy.game, game, where, registry))
    _require_same(policy.game, where)
    return where.publish(
        policy,
        model=model,
        algorithm=experiment.name,
        metrics=last,
        config=flat({**experiment.hyperparameters, "seed": experiment.seed}),
        data=DataSpan(steps=int(last.get("steps", 0))),
        reason=f"published from the run {run.path.name}",
        by="person",
        also=_files(policy, also),
    )


def _files(policy: "Policy", names: Sequence[str]) -> dict[str, bytes]:
    """Of formats, and the page that compares them with the policy."""
    import tempfile

    from sparring.edge.exporter import Wanted
    from sparring.edge.exporter import export as write
    from sparring.export import formats

    for name in names:
        formats.find_format(name)
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as folder, progress("exporting", 100) as show:
        out = Path(folder)
        write(
            policy,
            Wanted(names, "policy", out, episodes=0),
            lambda words, done, total: show(100 * done // max(total, 1), words),
        )
        return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def _require_same(game: "Game", registry: "Registry") -> None:
    """Players of the published versions could not use one with other spaces."""
    from sparring.games import compatible

    latest = registry.latest(game.name)
    if latest is not None and (why := compatible.difference(game, latest.game)) is not None:
        raise InputError(
            f"not published: {game.name} has versions already, and {why}. Give the game a name of its own for training "
            "(--set game.name=NAME), or publish for a game with these spaces (--game NAME): a generation that "
            f"`sparring change` made is one, such as {game.name}.2"
        )


def _other_game(ours: "Game", name: str, registry: "Registry", address: str) -> "Game":
    """The game of that name, if a policy of ours plays it."""
    from sparring.games import compatible

    found = _find_game(name, registry, address)
    if (why := compatible.difference(ours, found)) is not None:
        raise InputError(
            f"a policy of {ours.name} does not play {found.name}: {why}. "
            f"Train on the spaces of {found.name}, or declare it with those of {ours.name}"
        )
    return found


def _find_game(name: str, registry: "Registry", address: str) -> "Game":
    """By its declaration, the registry's newest version of it, or the store beside the registry's directory. A
    declaration means the generation that has its schema."""
    import msgspec

    from sparring.games import catalog
    from sparring.store.family import Family

    if name.endswith(".json"):
        declared = catalog.load(name)
        with _stored(address) as store:
            there = (
                None if store is None else Family(store.games(), store.profiles()).find(declared.name, declared.schema)
            )
        return declared if there is None else msgspec.structs.replace(declared, name=there.name)
    if (latest := registry.latest(name)) is not None:
        return latest.game
    if (found := _stored_game(name, address)) is not None:
        return found
    raise InputError(
        f"{address} has no version of a game {name!r}, and no store beside it has its declaration: "
        f"give the declaration itself, --game {name}.json"
    )


def _stored_game(name: str, address: str) -> "Game | None":
    """As the store beside the registry's directory has it, if there is one."""
    with _stored(address) as store:
        if store is None:
            return None
        if (found := next((game for game in store.games() if game.name == name), None)) is not None:
            return found
        if (why := store.unreadable().get(name)) is not None:
            raise InputError(why)
    return None


@contextmanager
def _stored(address: str) -> "Iterator[Store | None]":
    """The store beside the registry's directory, to read, if there is one."""
    from sparring.store import is_file, open_store

    path = Path(address).parent / "store.db"
    if not (is_file(address) and path.is_file()):
        yield None
        return
    with closing(open_store(str(path), readonly=True)) as store:
        yield store
