"""Sparring trains game bots from play: play → record → store → train → publish → play.

    import sparring

    run = sparring.train(sparring.Experiment("CartPole-v1", {"name": "ppo"}, stop=sparring.Stop(steps=50_000)))
    policy = sparring.load_policy(run.path)

Importing this package is free: each name below loads its module when it is first used. A game that ships the client
alone never loads the learning stack.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see; `_PLACES` says the same to Python
    from sparring.callbacks import Callback, CallbackError, Progress
    from sparring.client import Acted, Actions, Bot, Client, Player
    from sparring.errors import GameError, InputError, SparringError
    from sparring.experiment import Checkpoint, Evaluation, Experiment, Metering, Resources, Rollout, Stop
    from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
    from sparring.games.catalog import load as load_game
    from sparring.networks.policy import Policy
    from sparring.policies import evaluate, load_policy
    from sparring.registry.registry import Registry
    from sparring.runs.run import Run
    from sparring.store import Store, open_store
    from sparring.training.loop import Interrupted, resume, train

__version__ = "0.1.0"

__all__ = [
    "Acted",
    "Actions",
    "Bot",
    "Box",
    "Callback",
    "CallbackError",
    "Checkpoint",
    "Client",
    "Dict",
    "Discrete",
    "Evaluation",
    "Experiment",
    "Game",
    "GameError",
    "InputError",
    "Interrupted",
    "Metering",
    "MultiDiscrete",
    "Player",
    "Policy",
    "Progress",
    "Registry",
    "Resources",
    "Rollout",
    "Run",
    "SparringError",
    "Stop",
    "Store",
    "__version__",
    "evaluate",
    "load_game",
    "load_policy",
    "open_store",
    "resume",
    "train",
]

_PLACES = {
    "sparring.callbacks": ("Callback", "CallbackError", "Progress"),
    "sparring.client": ("Acted", "Actions", "Bot", "Client", "Player"),
    "sparring.errors": ("GameError", "InputError", "SparringError"),
    "sparring.experiment": ("Checkpoint", "Evaluation", "Experiment", "Metering", "Resources", "Rollout", "Stop"),
    "sparring.games": ("Box", "Dict", "Discrete", "Game", "MultiDiscrete"),
    "sparring.games.catalog": ("load as load_game",),
    "sparring.networks.policy": ("Policy",),
    "sparring.policies": ("evaluate", "load_policy"),
    "sparring.registry.registry": ("Registry",),
    "sparring.runs.run": ("Run",),
    "sparring.store": ("Store", "open_store"),
    "sparring.training.loop": ("Interrupted", "resume", "train"),
}
_MODULES = {name.rpartition(" ")[2]: (module, name.split()[0]) for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}")
    module, attribute = _MODULES[name]
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ImportError(f"sparring.{name} needs more than the client: {error}. {_EXTRA}") from error
    globals()[name] = found  # the next look finds it without us
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_EXTRA = "pip install 'sparring[platform]' has training, stores and registries"
