"""Whether a game's `env` is a simulator of it. `python -m sparring.games.env_check GAME` (as JSON) says so, too, since
simulators run code of their own: exit code 2 and the reason if it is none."""

import subprocess
import sys

from sparring.errors import InputError
from sparring.games import compatible
from sparring.games.catalog import Unregistered, load, make
from sparring.games.spec import Game, Space, written

__all__ = ["line", "problem", "require"]

LOADING = 60.0  # seconds for a simulator to be made and to play a step
INSTALLED = (
    "a platform simulates only Gymnasium's own games, Atari's and PyBullet's. "
    "Train in a game of your own with `sparring train my_module:Id`, and publish the run"
)
MARK = "\0"  # before the reason


def problem(game: Game) -> str | None:
    """Why the game's `env` is not the game that was declared. Runs the simulator's code, which may raise anything."""
    env = str(game.env)
    if ":" in env or env.endswith(".json"):  # Gymnasium would import that module
        return f"{env} names a module or file, and none is read for a client: {INSTALLED}"
    kwargs = game.env_kwargs or {}
    texts = [str(text) for value in kwargs.values() for text in (value if isinstance(value, tuple) else (value,))]
    if place := next((text for text in texts if "/" in text or "\\" in text or text.startswith((".", "~"))), None):
        return f"env_kwargs has {place[:100]!r}: a file is never read for a client"
    try:
        found = load({**kwargs, "id": env, "name": game.name})
    except Unregistered:
        return f"Gymnasium knows no {env} on the platform: {INSTALLED}"
    except Exception as error:  # noqa: BLE001 - whatever a game raises
        return f"{env} cannot be made: {line(error)}"
    for part, ours, theirs in compatible.differences(game, found)[:1]:
        return (
            f"{env} has the {part}s {_words(theirs)}, the game was declared with {_words(ours)}: "
            "declare it as its `env` is, or without `env`"
        )
    return None


def _unplayable(game: Game) -> str | None:
    """Why the game's `env` does not play one step: some settings are wrong only then."""
    try:
        env = make(game, disable_env_checker=True)
        env.action_space.seed(0)
        env.reset(seed=0)
        env.step(env.action_space.sample())
        env.close()
    except Exception as error:  # noqa: BLE001 - whatever a game raises
        return f"{game.env} fails in its first step: {line(error)}"
    return None


def _words(space: Space | None) -> str:
    return "no such" if space is None else written(space, 200)


def require(game: Game) -> None:
    """Refuses an `env` that is not the game, or does not play a step, in a process of its own.

    :raises InputError: see `problem`.
    """
    command = [sys.executable, "-m", "sparring.games.env_check", game.to_json().decode()]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOADING)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{game.env} was not made, or did not play a step, within {LOADING:g} s") from error
    if done.returncode:
        why = done.stdout.rpartition(MARK)[2] if MARK in done.stdout else f"its process ended with {done.returncode}"
        raise InputError(why)


def line(error: BaseException) -> str:
    """The last line of what it says, and what it is."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[-1][:200] if lines else ''}"


if __name__ == "__main__":
    asked = Game.from_json(sys.argv[1])
    if (why := problem(asked) or _unplayable(asked)) is not None:
        sys.stdout.write(f"{MARK}{why}")
        sys.exit(2)
