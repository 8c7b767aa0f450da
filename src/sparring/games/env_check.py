"""Whether a game's `env` is a simulator of it. `python -m sparring.games.env_check GAME` (as JSON) says so, too, since
simulators run code of their own: it prints the reason if it is none, `null` if it is one, both as JSON."""

import asyncio
import contextlib
import os
import signal
import sys

import msgspec

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


def problem(game: Game) -> str | None:
    """Why the game's `env` is not the game that was declared. Runs the simulator's code, which may raise anything."""
    env = str(game.env)
    if ":" in env or env.endswith(".json"):  # Gymnasium would import that module
        return f"{env} names a module or file, and none is read for a client: {INSTALLED}"
    kwargs = game.env_kwargs or {}
    if key := next((key for key in ("id", "name") if key in kwargs), None):
        return f"env_kwargs has the key {key!r}, which is a game's own: no simulator can be set to it"
    texts = [str(text) for value in kwargs.values() for text in (value if isinstance(value, tuple) else (value,))]
    if place := next((text for text in texts if "/" in text or "\\" in text or text.startswith((".", "~"))), None):
        return f"env_kwargs has {place[:100]!r}: a file is never read for a client"
    try:
        found = load({**kwargs, "id": env, "name": game.name})
    except Unregistered:
        return f"{env} cannot be made: Gymnasium knows no such game on the platform, since {INSTALLED}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a game raises
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a game raises
        return f"{game.env} fails in its first step: {line(error)}"
    return None


def _words(space: Space | None) -> str:
    return "no such" if space is None else written(space, 200)


async def require(game: Game) -> None:
    """Refuses an `env` that is not the game, or does not play a step, in a process of its own. The process is killed,
    and what it started, when it takes too long or nobody waits any more.

    :raises InputError: see `problem`.
    """
    command = [sys.executable, "-m", "sparring.games.env_check", game.to_json().decode()]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    try:
        answer, _ = await asyncio.wait_for(process.communicate(), LOADING)
    except TimeoutError as error:
        raise InputError(f"{game.env} was not made, or did not play a step, within {LOADING:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    try:
        why = msgspec.json.decode(answer, type=str | None)
    except msgspec.DecodeError as error:  # a simulator may end the process at any moment, with code 0, too
        raise InputError(f"{game.env} cannot be made: its process ended with {process.returncode}") from error
    if why is not None:
        raise InputError(why)


def line(error: BaseException) -> str:
    """The last line of what it says, and what it is, without control characters."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}{': ' + lines[-1][:200] if lines else ''}"
    return "".join(c if c.isprintable() else "�" for c in said)


if __name__ == "__main__":
    answer = os.dup(1)  # not passed on to what a simulator starts, and whatever it prints is no answer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    asked = Game.from_json(sys.argv[1])
    os.write(answer, msgspec.json.encode(problem(asked) or _unplayable(asked)))
