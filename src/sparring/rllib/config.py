"""An experiment as RLlib's configuration. Keys of `algorithm` are the parameters of RLlib's own configuration methods
(`training`, `env_runners`, `rl_module`, …); each is checked by name and, as far as its annotation tells, by type. What
an experiment says elsewhere is refused here with the place to say it."""

import builtins
import collections.abc
import dataclasses
import difflib
import inspect
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ray.rllib.algorithms import registry
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.cql import CQL
from ray.rllib.algorithms.dqn import DQN
from ray.rllib.algorithms.iql import IQL
from ray.rllib.algorithms.marwil import MARWIL
from ray.rllib.algorithms.sac import SAC
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.tune.registry import register_env

from sparring import plugins
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.games import Box, Discrete, Game
from sparring.networks.spec import scaling
from sparring.rllib.game import EpisodeNotes, GameEnv, spaces_of
from sparring.training.choose import RLLIB

__all__ = ["configure", "customised", "is_offline"]

SECTIONS = (
    *("training", "environment", "env_runners", "learners", "rl_module", "callbacks", "reporting"),
    *("fault_tolerance", "offline_data", "debugging"),
)
OURS = {  # what the experiment says elsewhere
    "env": "game",
    "env_config": "game",
    "observation_space": "game",
    "action_space": "game",
    "num_env_runners": "rollout.workers",
    "num_envs_per_env_runner": "rollout.envs",
    "rollout_fragment_length": "rollout.steps",
    "sample_timeout_s": "rollout.limit",
    "num_cpus_per_env_runner": "resources.actor_cpus (with runner: ray)",
    "num_gpus_per_env_runner": "resources.actor_gpus (with runner: ray)",
    "seed": "seed",
    "min_sample_timesteps_per_iteration": "iteration",
    "dataset_num_iters_per_learner": "iteration",
    "input_": "store",
    "input_read_method": "store",
    "input_read_episodes": "store",
    "input_read_sample_batches": "store",
    "input_read_schema": "store",
}
OLD = {  # of RLlib's old stack; the new one does not look at them
    "model": "model_config",
    "observation_filter": "env_to_module_connector: ray.rllib.connectors.env_to_module:MeanStdFilter",
    "lr_schedule": "lr, which takes [[step, value], …] too",
    "entropy_coeff_schedule": "entropy_coeff, which takes [[step, value], …] too",
}
CLASSES = (  # given as `module:Name`
    *("callbacks_class", "rl_module_spec", "learner_class"),
    *("env_to_module_connector", "module_to_env_connector", "learner_connector"),
)


def configure(experiment: Experiment, game: Game, data: str = "recorded-play") -> AlgorithmConfig:
    """Checked as far as can be known before anything starts; `data` is where recorded play lies."""
    algorithm = algorithm_class(experiment.name)
    offline = is_offline(algorithm)
    _check_source(experiment, offline)
    _check_space(algorithm, experiment.name, game)
    config: AlgorithmConfig = algorithm.get_default_config()
    if issubclass(algorithm, CQL):
        config.training(lr=None)  # what it begins with, its own validation refuses
        config._is_online = False  # as BC and MARWIL say: it would ask for an environment
    _apply_ours(config, experiment, game, data if offline else None)
    _apply_theirs(config, experiment.hyperparameters)
    try:
        config.copy().validate()
    except (ValueError, TypeError, AssertionError, AttributeError) as error:
        raise InputError(f"{experiment.name} refuses its configuration: {' '.join(str(error).split())}") from error
    return config


def algorithm_class(name: str) -> type[Algorithm]:
    word = name.removeprefix(RLLIB)
    if ":" in word:
        found = load(word, "algorithm.name")
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise InputError(f"algorithm.name: {word} is not a subclass of RLlib's Algorithm")
        return found
    if word not in registry.ALGORITHMS:
        near = difflib.get_close_matches(word.upper(), registry.ALGORITHMS, 1)
        hint = f"did you mean {RLLIB}{near[0]}? " if near else ""
        raise InputError(
            f"RLlib has no algorithm {word!r}: {hint}There are {', '.join(registry.ALGORITHMS)}, "
            f"and {RLLIB}module:Class for one of your own"
        )
    found, _ = registry.ALGORITHMS[word]()
    return found


def is_offline(algorithm: type[Algorithm]) -> bool:
    return issubclass(algorithm, MARWIL | CQL)  # BC and IQL are MARWILs


def customised(config: AlgorithmConfig) -> str | None:
    """Why the module alone does not say how the algorithm acts, or None."""
    for side in ("env_to_module_connector", "module_to_env_connector"):
        if getattr(config, f"_{side}") is not None:
            return f"algorithm.{side} changes what the module sees or does, and is not part of it"
    return None


def _check_source(experiment: Experiment, offline: bool) -> None:
    if offline and experiment.source != "store":
        raise InputError(f"{experiment.name} learns from recorded play: use `source: store` and say which `store`")
    if not offline and experiment.source == "store":
        raise InputError(
            f"{experiment.name} learns from fresh play: use `source: simulate`, "
            "or one that learns from recorded play (rllib/BC, rllib/MARWIL, rllib/CQL, rllib/IQL)"
        )
    if offline and experiment.stop.steps is not None:
        raise InputError("stop.steps counts play, of which `source: store` makes none: use stop.iterations")
    if offline and experiment.resources.address is not None:
        raise InputError(f"{experiment.name} reads recorded play on this machine: leave resources.address out")
    if experiment.rollout.overlap:
        raise InputError("rollout.overlap is not RLlib's: rllib/IMPALA and rllib/APPO play while they learn")
    if experiment.resources.devices > 1:
        raise InputError("resources.devices is not RLlib's: use algorithm.num_learners")
    if experiment.resources.gpu is not None:
        raise InputError("resources.gpu is not RLlib's: use algorithm.num_gpus_per_learner")


def _check_space(algorithm: type[Algorithm], name: str, game: Game) -> None:
    """RLlib reports these late, if at all."""
    kind, bounded = type(game.action), isinstance(game.action, Box) and scaling(game.action).bounded.all()
    squashed = issubclass(algorithm, SAC | IQL)
    if squashed and not (bounded or (kind is Discrete and not issubclass(algorithm, CQL))):
        takes = "bounded Box" if issubclass(algorithm, CQL) else "Discrete and bounded Box"
    elif issubclass(algorithm, DQN) and not squashed and kind is not Discrete:
        takes = "Discrete"
    else:
        return
    what = f"{kind.__name__}{' without bounds' if kind is Box and not bounded else ''}"
    raise InputError(f"{name} takes {takes} actions, {game.name} has {what}: rllib/PPO and rllib/BC take any")


def _apply_ours(config: AlgorithmConfig, experiment: Experiment, game: Game, data: str | None) -> None:
    rollout, resources = experiment.rollout, experiment.resources
    observation, action = spaces_of(game)
    config.environment(observation_space=observation, action_space=action)
    config.debugging(seed=experiment.seed)
    config.callbacks(callbacks_class=EpisodeNotes)
    if data is not None:
        config.offline_data(input_=[data], dataset_num_iters_per_learner=experiment.iteration)
        # An iteration is one call of the learner, which makes so many updates; CQL would go on for a second.
        config.reporting(min_time_s_per_iteration=0, min_train_timesteps_per_iteration=0)
        return
    register_env("sparring", GameEnv)
    config.environment("sparring", env_config={"game": game.to_json().decode()})
    config.env_runners(
        num_env_runners=rollout.workers,
        num_envs_per_env_runner=rollout.envs,
        rollout_fragment_length=rollout.steps or config.rollout_fragment_length,
        sample_timeout_s=rollout.limit,
    )
    if experiment.runner == "ray":
        config.env_runners(num_cpus_per_env_runner=resources.actor_cpus, num_gpus_per_env_runner=resources.actor_gpus)
    if hasattr(config, "replay_buffer_config"):
        config.reporting(min_sample_timesteps_per_iteration=experiment.iteration)


def _apply_theirs(config: AlgorithmConfig, keys: dict[str, Any]) -> None:
    known = parameters(type(config))
    for key, value in keys.items():
        path = f"algorithm.{key}"
        if key in OURS:
            raise InputError(f"{path} is not set here: the experiment says it with {OURS[key]}")
        if key in OLD:
            raise InputError(f"{path} is of RLlib's old stack: use algorithm.{OLD[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, [k for k in known if k not in OURS], 1)
            raise InputError(f"unknown key {path}: " + (f"did you mean algorithm.{near[0]}?" if near else _list(known)))
        section, hint = known[key]
        if key in CLASSES:
            value = _class(key, load(value, path))
        elif not fits(value, hint) and type(value) is not type(getattr(config, key, None)):
            raise InputError(f"{path}: expected {describe(hint)}, got {value!r}")
        if key == "model_config" and "rl_module_spec" not in keys:
            _check_model(value)
            value = {"max_seq_len": DefaultModelConfig.max_seq_len, **value}  # RLlib's, which an LSTM misses otherwise
        getattr(config, section)(**{key: value})


def _list(known: dict[str, Any]) -> str:
    return f"there are {', '.join(sorted(key for key in known if key not in OURS))}"


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        raise InputError(f"algorithm.model_config is {model!r}, but a group of keys, such as fcnet_hiddens")
    hints = get_type_hints(DefaultModelConfig)
    fields = [field.name for field in dataclasses.fields(DefaultModelConfig)]
    for key, value in model.items():
        path = f"algorithm.model_config.{key}"
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean algorithm.model_config.{near[0]}?" if near else f"there are {', '.join(fields)}"
            raise InputError(f"unknown key {path}: {hint}")
        if not fits(value, hints[key]):
            raise InputError(f"{path}: expected {describe(hints[key])}, got {value!r}")


def load(word: Any, path: str) -> Any:
    """`module:Name`, imported."""
    if not isinstance(word, str) or not plugins.is_outside(word):
        raise InputError(f"{path} is {word!r}: write module:Name, such as my_package.modules:MyModule")
    return plugins.find(path, word, {})


def _class(key: str, found: Any) -> Any:
    if key == "callbacks_class":
        return [EpisodeNotes, found]
    if isinstance(found, type) and issubclass(found, RLModule):
        return RLModuleSpec(module_class=found)
    if isinstance(found, type) and issubclass(found, ConnectorV2):
        return lambda *_, **__: found()
    return found


def parameters(config: type[AlgorithmConfig]) -> dict[str, tuple[str, Any]]:
    """Name of every parameter → the method that takes it and its annotation. Deprecated ones have another default."""
    found: dict[str, tuple[str, Any]] = {}
    for section in SECTIONS:
        for owner in reversed(config.__mro__):
            if (method := vars(owner).get(section)) is None:
                continue
            hints = get_type_hints(method, localns=_Names(method.__globals__))
            for name, parameter in inspect.signature(method).parameters.items():
                if parameter.default is NotProvided and not name.startswith("_"):
                    found[name] = (section, hints.get(name, Any))
    return {name: place for name, place in found.items() if name in CLASSES or not name.startswith("on_")}


class _Names(dict[str, Any]):
    """Names in annotations; those that RLlib imports for type checkers only mean anything."""

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(vars(builtins) | known)

    def __missing__(self, name: str) -> Any:
        return Any


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of YAML may be what the annotation says; what it does not say clearly is RLlib's to judge."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar | str):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    kind = origin or hint
    if kind is type(None):
        return value is None
    if kind is float:
        return _is_number(value) or _is_schedule(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind in (list, tuple, collections.abc.Sequence, collections.abc.Collection):
        inner = args[0] if args else Any
        return isinstance(value, list) and (len(set(args) - {...}) > 1 or all(fits(v, inner) for v in value))
    if kind in (dict, collections.abc.Mapping) or dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    return kind not in (type, collections.abc.Callable)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schedule(value: Any) -> bool:
    """[[step, value], …]: RLlib takes one for most numbers, whatever it annotates."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in value
    )


def describe(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg) for arg in get_args(hint)))
    if hint is type(None):
        return "null"
    return str(hint).removeprefix("typing.") if get_origin(hint) else getattr(hint, "__name__", str(hint))
