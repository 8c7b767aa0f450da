"""Algorithms turn batches into better parameters. One file each; they know nothing of files, processes or clusters."""

import difflib
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from sparring.errors import InputError
from sparring.games import Box, Discrete, Game
from sparring.networks.defaults import is_image, layers_for
from sparring.networks.layers import decode
from sparring.networks.spec import scaling

__all__ = ["NAMES", "check_name", "config_of", "create", "default_for", "defaults"]

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

REPLAY_BYTES = 1 << 30  # of images in a replay window that nobody chose


def create(name: str, game: Game, config: dict[str, Any] | None = None) -> Any:
    """The algorithm, with hyperparameters checked; InputError names what is wrong and the nearest right key."""
    import msgspec

    config = config or {}
    module = _module(name)
    fields = [f.name for f in msgspec.structs.fields(module.Config)]
    for key in config:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f", did you mean {near[0]!r}?" if near else f"; it has {', '.join(fields)}"
            raise InputError(f"{name} has no hyperparameter {key!r}{hint}")
    try:
        hyperparameters = msgspec.convert(defaults(name, game, config) | config, module.Config, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise InputError(f"algorithm {name}: {error}") from error
    return _instance(name, game.to_json(), hyperparameters)


def defaults(name: str, game: Game, given: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Hyperparameters that follow from the kind of the game's observations, where they are not `given`; written as in
    an experiment. Those of `Config` are for vectors."""
    import msgspec

    module, observation = _module(name), game.observation
    usual = {field.name: field.default for field in msgspec.structs.fields(module.Config)}
    found: dict[str, Any] = {}
    if isinstance(observation, Discrete) and "layers" not in given:
        found |= getattr(module, "TABLE", {})
    if is_image(observation):
        found |= getattr(module, "IMAGES", {})
        if "replay" in usual:
            found["replay"] = min(usual["replay"], REPLAY_BYTES // observation.element.itemsize)
        if given.get("critic_layers") is not None:
            found.pop("shared", None)
    for key in ("layers", "critic_layers"):
        if isinstance(usual.get(key), tuple) and key not in found:
            found[key] = layers_for(observation, usual[key])
    return {key: msgspec.to_builtins(value) for key, value in found.items() if key not in given}


@functools.lru_cache(maxsize=16)
def _instance(name: str, game: bytes, hyperparameters: Any) -> Any:
    """An algorithm has no state of its own, and its updates are compiled per instance: so equal ones are one."""
    return getattr(_module(name), NAMES[name])(Game.from_json(game), hyperparameters)


def config_of(name: str) -> Any:
    """The msgspec.Struct of an algorithm's hyperparameters."""
    return _module(name).Config


def _module(name: str) -> Any:
    check_name(name)
    return importlib.import_module(f"sparring.algorithms.{name}")


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
