"""Commands that change a game of a platform: settings, change, rename, archive, unarchive."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sparring.cli.options import (
    DEFAULT_SERVER,
    JsonOption,
    PlatformGame,
    ServerOption,
    SetOption,
    examples,
    game_as_set,
    get,
    show_whole,
)
from sparring.cli.options import change as ask
from sparring.errors import InputError

__all__ = ["app", "read_settings"]

app = typer.Typer()
SimulatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="game.KEY=VALUE", help="Set its simulator, such as game.gravity=-5; checked at once."
    ),
]


def read_settings(file: Path | None, changes: list[str] | None, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings of a file and of `--set`, over those of before; keys are checked, hyperparameters are not."""
    from sparring.experiment import override, parse_yaml
    from sparring.fields import convert
    from sparring.store.profile import GameSettings

    data: Any = before or {}
    if file is not None:
        try:
            data = parse_yaml(file.read_text(), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the settings {file}: {error}") from error
        if not isinstance(data, dict):
            raise InputError(f"{file} holds no settings: write keys, such as `pace: 5`")
    data = override(data, changes or ())
    convert(data, GameSettings)
    return dict(data)


@app.command(
    epilog=examples(
        "sparring settings my-game",
        "sparring settings my-game --set algorithm=ppo --set hyperparameters.lr=1e-3",
        "sparring settings my-game --set promotion.canary=0.2 --set pace=5",
        "sparring settings my-game --file settings.yaml",
        "sparring settings my-game --reset",
    )
)
def settings(
    game: Annotated[str, typer.Argument(help="A game of the platform.")],
    changes: SetOption = None,
    file: Annotated[Path | None, typer.Option(help="YAML that replaces what was set; --set is applied to it.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what was set: the platform's settings count.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show how a game is learned, or set it. A running trainer picks it up within seconds."""
    from sparring.api import SettingsInfo, Snapshot
    from sparring.terminal import table

    if reset and file is not None:
        raise InputError("both --reset and --file: give one of them")
    info = get(server, SettingsInfo, "games", game, "settings")
    if changes or file or reset:
        before = {} if reset else msgspec.to_builtins(info.settings)
        wanted = read_settings(file, changes, before)
        info = ask(server, "PUT", "games", game, "settings", body=wanted).decode(SettingsInfo)
    if as_json:
        print(msgspec.json.encode(info).decode())
        return
    own = dict(_rows(msgspec.to_builtins(info.settings)))
    rows = [
        (key, value, "this game" if key in own else "the platform")
        for key, value in _rows(msgspec.to_builtins(info.effective))
    ]
    empty = "nothing is set: the defaults of docs/games.md#settings count"
    show_whole(table(f"settings of {game}", ("setting", "value", "set for"), rows, empty, whole=True))
    trainer = get(server, Snapshot, "games", game, "stats").trainer
    if trainer is not None:
        print(f"{trainer.algorithm}: {trainer.state}")


@app.command(
    epilog=examples(
        "sparring change my-game my-game.json",
        "sparring change my-game my-game.json --default shield=0.5 --yes",
        "sparring change my-game --env LunarLander-v3",
        "sparring change my-game --set game.gravity=-5",
        "sparring change my-game --no-env",
    )
)
def change(
    game: PlatformGame,
    file: Annotated[
        Path | None, typer.Argument(help="The new declaration (.json): makes a new generation of the game.")
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="What an added field is in old play; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    env: Annotated[str | None, typer.Option(help="The Gymnasium id of its simulator; checked at once.")] = None,
    no_env: Annotated[bool, typer.Option("--no-env", help="It has no simulator any more.")] = False,
    changes: SimulatorOption = None,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Change a game: its spaces, by a new declaration, or its simulator. Old clients go on with old bots."""
    simulated = env is not None or bool(changes)
    if file is not None and (simulated or no_env):
        raise InputError(
            f"{file} makes a new generation, and --env, --set and --no-env change the simulator of one that is there: "
            "these do not go together, call one after the other. What an added field is in old play is --default"
        )
    if (file is not None) + simulated + no_env != 1:
        raise InputError(
            "say what is to change: the file of a new declaration, --env ID, --set game.KEY=VALUE, or --no-env"
        )
    if file is not None:
        _new_generation(server, game, file, default or [], yes)
    elif no_env:
        ask(server, "PATCH", "games", game, body={"env": None})
        print(f"{game} has no simulator any more: candidates are tried in play")
    else:
        _set_simulator(server, game, env, changes)


def _set_simulator(server: str, game: str, env: str | None, changes: list[str] | None) -> None:
    """Another one as it is made with these settings, or other settings of the one it has."""
    from sparring.games import Game

    kwargs: dict[str, Any] = {}
    game_as_set({"id": ""}, changes)  # what is no setting of a simulator is refused before one is looked for
    if env is None:
        known = get(server, Game, "games", game)
        if known.env is None:
            raise InputError(f"{game} has no simulator to set: name one with --env ID")
        env, kwargs = known.env, known.env_kwargs or {}
    wanted = game_as_set({"id": env, **kwargs}, changes)
    if not isinstance(wanted, dict) or wanted.pop("id", None) != env or "name" in wanted:
        raise InputError("--set game.id, game.name: only settings can be set here; --env ID names another simulator")
    made = ask(server, "PATCH", "games", game, body={"env": env, "env_kwargs": wanted}).decode(Game)
    words = ", ".join(f"{key}={value}" for key, value in _rows(msgspec.to_builtins(made.env_kwargs or {})))
    print(f"{game} is simulated as {made.env}{f' with {words}' if words else ''}")


def _new_generation(server: str, game: str, file: Path, given: list[str], yes: bool) -> None:
    from sparring.api import Generation, NewGeneration
    from sparring.experiment import override
    from sparring.games import Game

    try:
        declared = Game.declared(file.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    defaults: dict[str, Any] = {}
    for word in given:
        defaults |= override({}, [word])
    asked = NewGeneration(declared, defaults)
    planned = ask(server, "POST", "games", game, "generations", body=asked).decode(Generation)
    if planned.exists:
        print(f"{planned.name} has these spaces already: nothing is to change")
        return
    print(f"Generation {planned.generation} of {game}, {planned.name}:")
    for change in planned.changes:
        print(f"  {change}")
    if not yes:
        typer.confirm("Make it? Old clients go on with their bots, new ones get their own.", abort=True)
    asked = NewGeneration(declared, defaults, confirmed=True)
    made = ask(server, "POST", "games", game, "generations", body=asked).decode(Generation)
    print(f"{made.name} is there: clients with {file} play it, its bots begin with what {made.continues} learned")


@app.command(epilog=examples("sparring rename my-game arena"))
def rename(
    game: PlatformGame,
    name: Annotated[str, typer.Argument(help="The new name: letters, digits, '.', '_', '-'.")],
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Give a game another name. Clients that know the old one go on."""
    ask(server, "PATCH", "games", game, body={"name": name})
    print(f"{game} is called {name} from now on; the old name goes on working")


@app.command(epilog=examples("sparring archive my-game", "sparring games --archived"))
def archive(game: PlatformGame, server: ServerOption = DEFAULT_SERVER) -> None:
    """Take a game out of lists, and stop training it. Its play is kept, and its bots are served."""
    ask(server, "PATCH", "games", game, body={"archived": True})
    print(f"{game} is archived: `sparring unarchive {game}` brings it back")


@app.command(epilog=examples("sparring unarchive my-game"))
def unarchive(game: PlatformGame, server: ServerOption = DEFAULT_SERVER) -> None:
    """Bring an archived game back: it is listed and trained again."""
    ask(server, "PATCH", "games", game, body={"archived": False})
    print(f"{game} is listed and trained again")


def _rows(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{key}.")
        elif value is not None:
            rows.append((prefix + key, msgspec.json.encode(value).decode().strip('"')))
    return rows
