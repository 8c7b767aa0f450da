"""Algorithms by name: `ppo` is one of ours, `my_module:MyAlgorithm` anybody's. What is asked about one is asked of its
class (`protocol.Algorithm`). Light: nothing of JAX is loaded until a class is."""

import functools
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import msgspec

from sparring import plugins
from sparring.errors import InputError
from sparring.fields import check_keys, convert
from sparring.games import Box, Game
from sparring.networks.activations import ACTIVATIONS
from sparring.networks.defaults import is_image, layers_for
from sparring.networks.layers import LAYERS, Layer, decode, find_layer
from sparring.networks.spec import scaling

if TYPE_CHECKING:
    from sparring.algorithms.protocol import Algorithm

__all__ = ["ALGORITHMS", "check", "check_for", "complete", "create", "default_for", "defaults", "find"]

ALGORITHMS = {
    "dqn": "sparring.algorithms.dqn:DQN",
    "ddpg": "sparring.algorithms.ddpg:DDPG",
    "td3": "sparring.algorithms.td3:TD3",
    "sac": "sparring.algorithms.sac:SAC",
    "ppo": "sparring.algorithms.ppo:PPO",
    "bc": "sparring.algorithms.bc:BC",
    "cql": "sparring.algorithms.cql:CQL",
    "iql": "sparring.algorithms.iql:IQL",
}

OF_INSTANCES = ("game", "config")  # what __init__ sets
LATER = ("warm_start", "demonstrations", "defaults_for_action", "value")  # the protocol did not have them at first
LOADING = 120.0  # seconds for the import of somebody's module
UNKNOWN = 3  # its exit code where JAX is not installed
MARK = "\0"  # before the reason, on the standard output of `python -m sparring.algorithms`
REPLAY_BYTES = 1 << 30  # of images in a replay window that nobody chose
NETWORKS = (tuple[Layer, ...], tuple[Layer, ...] | None)  # annotations of hyperparameters that are networks


def find(name: str) -> "type[Algorithm]":
    """The class that a name means.

    :raises InputError: there is none, or what there is does not follow `protocol.Algorithm`.
    """
    found = plugins.find("algorithm", name, ALGORITHMS)
    if plugins.is_outside(name):
        _require_algorithm(name, found)
    return cast("type[Algorithm]", found)


def check(name: str) -> None:
    """Refuses what `find` would refuse, in a process of its own: a gateway does without JAX.

    :raises InputError: see `find`.
    """
    if not plugins.is_outside(name):
        plugins.check_name("algorithm", name, ALGORITHMS)
    else:
        _ask(name)


def check_for(name: str, game: Game, given: Mapping[str, Any]) -> None:
    """Refuses what `create` and `large.require_small` would refuse, in a process of its own, as `check`. Where nothing
    can be learned (no JAX is installed), only the name is looked at.

    :raises InputError: see `create`.
    """
    plugins.check_name("algorithm", name, ALGORITHMS)
    _ask(name, msgspec.json.encode(given).decode(), msgspec.json.encode(game).decode())


def _ask(*words: str) -> None:
    command, name = [sys.executable, "-m", "sparring.algorithms", *words], words[0]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOADING)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"algorithm {name!r}: its module was not imported within {LOADING:g} s") from error
    if done.returncode not in (0, UNKNOWN):
        why = done.stdout.rpartition(MARK)[2] if MARK in done.stdout else f"the import ended with {done.returncode}"
        raise InputError(why)


def create(name: str, game: Game, given: Mapping[str, Any] | None = None) -> "Algorithm":
    """The algorithm for a game.

    :param given: hyperparameters as in an experiment; the others follow from the game.
    :raises InputError: names what is wrong and the nearest right key.
    """
    hyperparameters = complete(name, given or {}, game)
    try:
        hash(hyperparameters)
    except TypeError as error:
        raise InputError(
            f"algorithm {name!r}: {error} in its configuration: make config_class frozen, with tuples for lists"
        ) from error
    return _instance(name, game.to_json(), hyperparameters)


def complete(name: str, given: Mapping[str, Any], game: Game | None = None) -> msgspec.Struct:
    """All hyperparameters, checked; without a game as for vectors.

    :raises InputError: as `create`.
    """
    config = find(name).config_class
    check_keys(given, config, "algorithm.")
    for key in _networks(config):
        layers = given.get(key)
        for i, layer in enumerate(layers if isinstance(layers, list) else ()):
            _check_layer(layer, f"algorithm.{key}[{i}]")
    chosen = dict(given) if game is None else defaults(name, game, given) | dict(given)
    return convert(chosen, config, "algorithm.", decode)


def defaults(name: str, game: Game, given: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Hyperparameters that follow from the kind of the game's observations and actions, where they are not `given`;
    written as in an experiment."""
    algorithm, observation = find(name), game.observation
    fields = {field.name: field.default for field in msgspec.structs.fields(algorithm.config_class)}
    for_action = algorithm.defaults_for_action(game.action) if hasattr(algorithm, "defaults_for_action") else {}
    networks = _networks(algorithm.config_class)
    found = {key: value for key, value in for_action.items() if key not in networks}
    found |= algorithm.defaults_for(observation, given)
    if is_image(observation) and isinstance(fields.get("replay"), int):
        found.setdefault("replay", min(fields["replay"], REPLAY_BYTES // observation.element.itemsize))
    for key in networks:
        layers = for_action.get(key, fields[key])
        if isinstance(layers, tuple) and key not in found:
            found[key] = layers_for(observation, layers)
    return {key: msgspec.to_builtins(value) for key, value in found.items() if key not in given}


def default_for(game: Game) -> str:
    """The name of the algorithm that learns a game when nobody chose one: from whoever played, people or bots."""
    if not isinstance(game.action, Box):
        return "dqn"
    return "sac" if scaling(game.action).bounded.all() else "iql"


@functools.lru_cache(maxsize=16)
def _instance(name: str, game: bytes, hyperparameters: msgspec.Struct) -> "Algorithm":
    """An algorithm has no state of its own, and its updates are compiled per instance: so equal ones are one."""
    algorithm = find(name)(Game.from_json(game), hyperparameters)
    for attribute in OF_INSTANCES:
        if not hasattr(algorithm, attribute):
            raise InputError(f"algorithm {name!r}: its __init__ does not set self.{attribute}")
    return algorithm


def _require_algorithm(name: str, found: Any) -> None:
    from sparring.algorithms.protocol import Algorithm, OffPolicyConfig, OnPolicyConfig

    if not isinstance(found, type):
        raise InputError(f"{name!r} is no algorithm: it is a {type(found).__name__}, not a class")
    members = [key for key in dict.fromkeys(_public(Algorithm)) if key not in (*OF_INSTANCES, *LATER)]
    unwritten = getattr(found, "__abstractmethods__", ())
    missing = [key for key in members if not hasattr(found, key) or key in unwritten]
    if missing:
        subclass = "" if Algorithm in found.__mro__ else ". Subclass sparring.algorithms.protocol.Algorithm"
        raise InputError(f"{name!r} is no algorithm: it has no {', '.join(missing)}{subclass}")
    algorithm = cast(type[Algorithm], found)
    config: Any = algorithm.config_class
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        raise InputError(f"algorithm {name!r}: its config_class is {config!r}, not a msgspec.Struct")
    promised = OnPolicyConfig if algorithm.on_policy else OffPolicyConfig
    if missing := [key for key in _public(promised) if not hasattr(config, key)]:
        raise InputError(
            f"algorithm {name!r}: its config_class has no {', '.join(missing)}, which trainers read "
            f"(sparring.algorithms.protocol.{promised.__name__})"
        )


def _public(kind: type) -> list[str]:
    return [key for key in (*vars(kind).get("__annotations__", ()), *vars(kind)) if not key.startswith("_")]


def _networks(config: type[msgspec.Struct]) -> list[str]:
    """The hyperparameters that are layers."""
    return [name for name, hint in get_type_hints(config).items() if hint in NETWORKS]


def _check_layer(layer: Any, path: str) -> None:
    name = layer.get("layer") if isinstance(layer, dict) else None
    if not isinstance(name, str) or (name not in LAYERS and not plugins.is_outside(name)):
        raise InputError(f"{path} is {layer!r}: say which `layer` it is, {' or '.join(LAYERS)}, or module:Class")
    kind = find_layer(name)
    assert issubclass(kind, msgspec.Struct)
    check_keys({key: value for key, value in layer.items() if key != "layer"}, kind, f"{path}.")
    activation = layer.get("activation")
    if isinstance(activation, str) and activation not in ACTIVATIONS and not plugins.is_outside(activation):
        words = ", ".join(ACTIVATIONS)
        raise InputError(f"{path}.activation is {activation!r}: choose one of {words}, or module:value")
