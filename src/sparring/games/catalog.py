"""Where games come from: a Gymnasium id, or a JSON file that declares a game we cannot simulate."""

import ctypes
import difflib
import importlib
import inspect
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.errors import GameError, InputError, SparringError
from sparring.games.atari_settings import AtariSettings
from sparring.games.spec import Box, Dict, Discrete, Game, Keyword, MultiDiscrete, Space, is_finite

__all__ = [
    "Unregistered",
    "declare",
    "fault",
    "load",
    "make",
    "own_fault",
    "register",
    "registered_here_alone",
    "require_elsewhere",
    "silent",
]

PACKAGES = {
    r".*BulletEnv-v\d+$": ("pybullet_envs_gymnasium", "sparring[bullet]"),
    r"ALE/": ("ale_py", "sparring[atari]"),
}


ELSEWHERE = 60.0  # seconds for another process to say whether it knows a game


class Unregistered(InputError):
    """Gymnasium knows no such game in this process."""


@contextmanager
def own_fault(name: str, where: str, *but: type[Exception]) -> Iterator[None]:
    """Whatever the game's own code raises is reported as its `fault`, an exit, too; `but` goes through."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (SparringError, *but)):
            raise
        raise fault(name, where, error) from error


def fault(name: str, where: str, error: BaseException) -> GameError:
    """An error of the game's own code, as people read it: the last line of its traceback, and whose it is."""
    what = traceback.format_exception_only(error)[-1].strip()
    place = traceback.extract_tb(error.__traceback__)[-1]
    fault = GameError(f"the game {name} failed in {where}: {what} ({place.filename}, line {place.lineno})")
    fault.details = "".join(traceback.format_exception(error))
    return fault


def load(name: str | Mapping[str, Any]) -> Game:
    """A game by name.

    :param name: A Gymnasium id, `module:Id` of a game of your own, or the path of a declaration (.json). Or a mapping
        with it as `id`, what the game is set to, and what it is called then, if not as ever:
        `{"id": "LunarLander-v3", "gravity": -5, "name": "moon"}`.
    :raises InputError: there is no such game, it has no such setting, or its spaces are of a kind that is not
        supported.
    """
    kwargs: dict[str, Keyword] = {}
    called = None
    if not isinstance(name, str):
        kwargs, called = _kwargs(name), name.get("name")
        name = str(name["id"])
    if name.endswith(".json"):
        if kwargs or called:
            raise InputError(f"{name} is a declaration: its name, and its settings as `env_kwargs`, stand there")
        path = Path(name)
        if not path.is_file():
            raise InputError(f"no game declaration at {name}: write one with `sparring init NAME`")
        try:
            return Game.declared(path.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror}") from error
    try:
        env = _make_known(name, kwargs, {})
    except GameError as error:
        code = f"import gymnasium; gymnasium.make('{name}')"
        raise GameError(f'{error}. Its traceback: python -c "{code}"') from error
    try:
        observation, action = _unbounded(space_of(env.observation_space)), space_of(env.action_space)
        if isinstance(action, Dict):
            raise ValueError("Dict actions are not supported")
        usual = name.rpartition(":")[2].replace("/", "-")
        game = Game(name=str(called or usual), observation=observation, action=action, env=name)
        return msgspec.structs.replace(game, env_kwargs=kwargs) if kwargs else game
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error
    finally:
        env.close()


def _kwargs(written: Mapping[str, Any]) -> dict[str, Keyword]:
    """A game's settings, of a mapping with its id."""
    if not isinstance(written.get("id"), str):
        raise InputError("game.id is missing: say which game, such as {id: LunarLander-v3, gravity: -5}")
    kwargs = {}
    for name, value in written.items():
        if name in ("id", "name"):
            continue
        try:
            kwargs[name] = msgspec.convert(value, Keyword)
        except msgspec.ValidationError as error:
            what = "a setting is a number, a text, true, false, null or a list of them"
            raise InputError(f"game.{name} is {value!r:.100}: {what}") from error
        if not is_finite(kwargs[name]):
            raise InputError(f"game.{name} is {value!r:.100}: a setting is finite, as JSON has no NaN and no infinity")
    return kwargs


def make(game: Game | str, **options: Any) -> Any:
    """The Gymnasium environment, or an InputError that says what to do.

    :param game: One that has a simulator, or an id.
    """
    if isinstance(game, str):
        return _make_known(game, {}, options)
    assert game.env is not None
    return _make_known(game.env, game.env_kwargs or {}, options)


def _make_known(env_id: str, kwargs: Mapping[str, Keyword], options: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise InputError("playing a Gymnasium game needs gymnasium: pip install 'sparring[play]'") from error
    register(env_id)
    if kwargs:
        _require_settings(env_id, kwargs)
    try:
        refused = (AssertionError, TypeError, ValueError) if kwargs else ()
        with own_fault(env_id, "its constructor", gymnasium.error.Error, ImportError, *refused):
            return _make(env_id, options | dict(kwargs))
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in kwargs.items())
        raise InputError(f"{env_id} does not take {given}: {type(error).__name__}: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        own = "" if ":" in env_id else f". A game of your own needs its module's name: module:{env_id}"
        raise Unregistered(f"cannot make the game {env_id!r}: {str(error).rstrip('.')}{own}") from error
    except (gymnasium.error.Error, ImportError) as error:  # ImportError: a game whose own needs are not installed
        raise InputError(f"cannot make the game {env_id!r}: {error}") from error


SHOWN = ("render_mode",)  # is asked for where a game is drawn
ANY = ("max_episode_steps",)  # Gymnasium's own, for every game


def _require_settings(env_id: str, kwargs: Mapping[str, Keyword]) -> None:
    """Refuses names that the game's constructor does not know, as far as that can be known beforehand."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    if env_id.startswith("ALE/"):
        AtariSettings.parse(kwargs)
        return
    try:
        entry = gymnasium.spec(env_id.rpartition(":")[2]).entry_point
    except gymnasium.error.Error:  # `make` says what to do
        return
    with own_fault(env_id, "its module", ImportError):
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
    known, more = accepted(creator)
    names = [*(name for name in known if name not in SHOWN), *ANY]
    for name in kwargs:
        if name in names or (more and name not in SHOWN):
            continue
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean game.{near[0]}?" if near else f"there are {', '.join(names)}"
        raise InputError(f"{env_id} has no setting game.{name}: {hint}")


def accepted(creator: Any) -> tuple[list[str], bool]:
    """The keywords of a constructor, and whether it takes others, too."""
    parameters = inspect.signature(creator).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _make(env_id: str, options: dict[str, Any]) -> Any:
    import gymnasium

    if env_id.startswith("ALE/"):
        from sparring.games.atari import Atari

        return Atari(env_id, **options)
    if "pybullet_envs_gymnasium" not in sys.modules:
        return gymnasium.make(env_id, **options)
    with silent():
        from sparring.games.bullet import quicken

        return quicken(gymnasium.make(env_id, **options))


def register(env_id: str) -> None:
    """Loads the package that brings the game, named before a colon or known by the id: Gymnasium knows only what was
    imported."""
    named, colon, name = env_id.rpartition(":")
    if colon and not all(part.isidentifier() for part in named.split(".")):
        raise InputError(
            f"{env_id!r} is not a game: write a Gymnasium id, MODULE:ID, or the path of a .json declaration"
        )
    known = [where for pattern, where in PACKAGES.items() if re.match(pattern, name)]
    module, package = (named, "") if named else known[0] if known else ("", "")
    if not module:
        return
    if named and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module of one's own lies where one works
    try:
        with own_fault(env_id, f"its module {module}", ImportError):
            importlib.import_module(module)
    except ImportError as error:
        what = f"pip install '{package}'" if package else f"{error}"
        raise InputError(f"{env_id} needs {module}: {what}") from error


def require_elsewhere(game: Game) -> None:
    """Refuses a game that only this process knows, as its own script registered it. Gymnasium's own games and those
    that name their module need no look; of others a process that has only Gymnasium is asked."""
    import gymnasium

    name = game.env
    if name is None or ":" in name or any(re.match(pattern, name) for pattern in PACKAGES):
        return
    found = gymnasium.registry.get(name)
    if found is not None and isinstance(found.entry_point, str) and found.entry_point.startswith("gymnasium."):
        return
    code = "import sys, gymnasium; sys.exit(3 if sys.argv[1] not in gymnasium.registry else 0)"
    try:
        asked = subprocess.run([sys.executable, "-c", code, name], capture_output=True, timeout=ELSEWHERE, check=False)
    except (OSError, subprocess.TimeoutExpired):  # the workers will report it
        return
    if asked.returncode == 3:
        raise registered_here_alone(game)


def registered_here_alone(game: Game) -> InputError:
    return InputError(
        f"{game.env} is registered in the process that trains alone, and rollout workers are processes of their "
        f"own: put it in a module that they can import, and name the game with it: module:{game.name}"
    )


@contextmanager
def silent() -> Iterator[None]:
    """What simulators' C code prints goes nowhere. PyBullet tells of its build at import and prints a line for every
    connection, in the middle of whatever is on the screen."""
    sys.stdout.flush()
    sys.stderr.flush()
    null, saved = os.open(os.devnull, os.O_WRONLY), {number: os.dup(number) for number in (1, 2)}
    try:
        for number in saved:
            os.dup2(null, number)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(null)


def declare(name: str) -> Game:
    """A template of a declared game, for people to fill in."""
    return Game(
        name=name,
        observation=Dict(
            {
                "position": Box((2,), low=-1.0, high=1.0),
                "health": Box((1,), low=0.0, high=1.0),
                "weapon": Discrete(4),
            }
        ),
        action=Discrete(5),
    )


def space_of(space: Any) -> Space:
    """Gymnasium's space → ours."""
    import gymnasium.spaces as gym

    if isinstance(space, gym.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, gym.MultiBinary):
        return MultiDiscrete((2,) * int(np.prod(space.shape)))
    if isinstance(space, gym.MultiDiscrete):
        if np.any(space.start):
            raise ValueError("MultiDiscrete spaces must start at 0")
        return MultiDiscrete(tuple(int(n) for n in space.nvec.ravel()))
    if isinstance(space, gym.Box):
        return Box(tuple(space.shape), space.dtype.name, _bound(space.low), _bound(space.high))
    if isinstance(space, gym.Dict):
        fields = {name: space_of(part) for name, part in space.spaces.items()}
        if any(isinstance(part, Dict) for part in fields.values()):
            raise ValueError("nested Dict spaces are not supported: flatten them to one level")
        return Dict(fields)  # type: ignore[arg-type]  # no Dict among them: checked above
    raise ValueError(
        f"{type(space).__name__} spaces are not supported: use Box, Discrete, MultiDiscrete or a flat Dict"
    )


def _unbounded(space: Space) -> Space:
    """Without the bounds of float observations: simulators treat theirs as advice (LunarLander leaves its own), and
    refusing true data for it would help nobody. A declared game's bounds are its developer's word and are kept."""
    if isinstance(space, Dict):
        return Dict({name: _unbounded(part) for name, part in space.fields.items()})  # type: ignore[misc]
    if isinstance(space, Box) and space.dtype.startswith("float"):
        return Box(space.shape, space.dtype)
    return space


def _bound(values: Any) -> float | tuple[float, ...] | None:
    """One number when all are equal; none without any bound. A Box bounded in part keeps ±1e308 for 'none'."""
    flat = [float(v) for v in np.ravel(values)]
    # 3.4e38 is Gymnasium's habit for "unbounded" in float32; data a rounding error beyond it must not be refused.
    flat = [math.copysign(math.inf, v) if abs(v) > 3e38 else v for v in flat]
    if all(math.isinf(v) for v in flat):
        return None
    flat = [math.copysign(1e308, v) if math.isinf(v) else v for v in flat]
    return flat[0] if len(set(flat)) == 1 else tuple(flat)
