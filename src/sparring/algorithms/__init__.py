"""Algorithms turn batches into better parameters. One file each; they know nothing of files, processes or clusters."""

import difflib
import functools
import importlib
from typing import Any

from sparring.errors import InputError
from sparring.games import Box, Discrete, Game
from sparring.networks.spec import scaling

__all__ = ["NAMES", "check_name", "create", "default_for"]

NAMES = {
    "dqn": "DQN",
    "ddpg": "DDPG",
    "td3": "TD3",
    "sac": "SAC",
    "ppo": "PPO",
    "bc": "BC",
    "cql": "CQL",
    "iql": "IQL",
}  # module → class; modules load when used, so listing names costs nothing


def create(name: str, game: Game, config: dict[str, Any] | None = None) -> Any:
    """The algorithm, with hyperparameters checked; InputError names what is wrong and the nearest right key."""
    import msgspec

    check_name(name)
    module = importlib.import_module(f"sparring.algorithms.{name}")
    fields = [f.name for f in msgspec.structs.fields(module.Config)]
    for key in config or {}:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f", did you mean {near[0]!r}?" if near else f"; it has {', '.join(fields)}"
            raise InputError(f"{name} has no hyperparameter {key!r}{hint}")
    try:
        hyperparameters = msgspec.convert(config or {}, module.Config)
    except msgspec.ValidationError as error:
        raise InputError(f"algorithm {name}: {error}") from error
    return _instance(name, game.to_json(), hyperparameters)


@functools.lru_cache(maxsize=16)
def _instance(name: str, game: bytes, hyperparameters: Any) -> Any:
    """An algorithm has no state of its own, and its updates are compiled per instance: so equal ones are one."""
    module = importlib.import_module(f"sparring.algorithms.{name}")
    return getattr(module, NAMES[name])(Game.from_json(game), hyperparameters)


def check_name(name: str) -> None:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f", did you mean {near[0]!r}?" if near else f": choose one of {', '.join(NAMES)}"
        raise InputError(f"no algorithm {name!r}{hint}")


def default_for(game: Game) -> str | None:
    """The algorithm that learns a game from the store when nobody chose one; none: not learnable yet."""
    if isinstance(game.action, Discrete):
        return "dqn"
    return "sac" if isinstance(game.action, Box) and scaling(game.action).bounded.all() else "ppo"
