"""Whether a game's `env` is a simulator of it. `python -m sparring.games.env_check GAME` (as JSON) says so, too, since
simulators run code of their own: exit code 2 and the reason if it is none."""

import subprocess
import sys

from sparring.errors import InputError
from sparring.games import compatible
from sparring.games.catalog import load
from sparring.games.spec import Game, Space, written

__all__ = ["line", "problem", "require"]

LOADING = 60.0  # seconds for a simulator to be made
MARK = "\0"  # before the reason


def problem(game: Game) -> str | None:
    """Why the game's `env` is not the game that was declared. Runs the simulator's code, which may raise anything."""
    env = str(game.env)
    if ":" in env or env.endswith(".json"):  # Gymnasium would import that module
        return f"{env} names a module or file, never to be read for a client"
    kwargs = game.env_kwargs or {}
    texts = [str(text) for value in kwargs.values() for text in (value if isinstance(value, tuple) else (value,))]
    if place := next((text for text in texts if "/" in text or "\\" in text or text.startswith((".", "~"))), None):
        return f"env_kwargs has {place[:100]!r}: a file is never read for a client"
    try:
        found = load({**kwargs, "id": env, "name": game.name})
    except Exception as error:  # noqa: BLE001 - whatever a game raises
        return f"{env} cannot be made: {line(error)}"
    for part, ours, theirs in compatible.differences(game, found)[:1]:
        return (
            f"{env} has the {part}s {_words(theirs)}, the game was declared with {_words(ours)}: "
            "declare it as its `env` is, or without `env`"
        )
    return None


def _words(space: Space | None) -> str:
    return "no such" if space is None else written(space, 200)


def require(game: Game) -> None:
    """Refuses an `env` that is not the game, in a process of its own.

    :raises InputError: see `problem`.
    """
    command = [sys.executable, "-m", "sparring.games.env_check", game.to_json().decode()]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOADING)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{game.env} was not made within {LOADING:g} s") from error
    if done.returncode:
        why = done.stdout.rpartition(MARK)[2] if MARK in done.stdout else f"its process ended with {done.returncode}"
        raise InputError(why)


def line(error: BaseException) -> str:
    """The last line of what it says, and what it is."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[-1][:200] if lines else ''}"


if __name__ == "__main__":
    if (why := problem(Game.from_json(sys.argv[1]))) is not None:
        sys.stdout.write(f"{MARK}{why}")
        sys.exit(2)
