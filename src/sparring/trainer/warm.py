"""How a trainer that begins anew goes on from the version that players have: with its algorithm and its network, where
nobody chose others."""

import json
import logging
from pathlib import Path

import msgspec

from sparring import algorithms, files
from sparring.errors import InputError, SparringError
from sparring.games import Game
from sparring.networks.grow import grow
from sparring.networks.policy import Policy
from sparring.registry.manifest import DEFAULT_MODEL, Manifest
from sparring.registry.registry import Registry, RegistryError
from sparring.runs import checkpoint
from sparring.trainer.settings import Settings, algorithm_name
from sparring.training.learner import Learner, another

__all__ = ["inherited", "prepare", "published"]

log = logging.getLogger("sparring.trainer")


def published(registry: Registry, game: Game) -> tuple[Manifest, Policy] | None:
    """What players have; none where nothing is published, or cannot be read now."""
    try:
        manifest = registry.latest(game.name, DEFAULT_MODEL)
        if manifest is not None:
            return manifest, registry.policy(game.name, DEFAULT_MODEL, manifest.version)
    except RegistryError as error:
        log.warning("%s: cannot look for a version to continue from: %s", game.name, error)
    except SparringError as error:
        log.warning("%s: cannot continue from the published version: %s", game.name, error)
    return None


def inherited(registry: Registry, game: Game, before: Game) -> tuple[Manifest, Policy | str] | None:
    """What players of the generation before have, grown for this one, or why that cannot be; none where they have
    nothing, or nothing that can be read now."""
    found = published(registry, before)
    if found is None or found[1].game.schema != before.schema:
        return None
    return found[0], grow(found[1], game)


def prepare(directory: Path, registry: Registry, game: Game, settings: Settings, before: Game | None = None) -> str:
    """The name of the algorithm. Without a checkpoint of the chosen one, and as far as nobody chose them, it and its
    layers are those of the published version; `algorithm.json` keeps them (see `checkpoint.hyperparameters`)."""
    usual, noted = algorithm_name(game, settings), directory / "algorithm.json"
    if checkpoint.exists(directory / "checkpoint"):
        known = _noted(noted, game) or usual
        if settings.algorithm in (None, known):
            return known
    found: tuple[Manifest, Policy | str] | None = published(registry, game)
    if found is None and before is not None:
        found = inherited(registry, game, before)
    if found is None or isinstance(found[1], str) or found[1].game.schema != game.schema:
        return usual
    manifest, policy = found[0], found[1]
    theirs = manifest.algorithm if manifest.algorithm in algorithms.ALGORITHMS else usual
    for name in (usual,) if settings.algorithm else dict.fromkeys((theirs, usual)):
        able = name == usual or not algorithms.find(name).offline  # offline algorithms have no way to explore
        given = _fitting(name, game, settings, policy) if able else None
        if given is not None:
            kind = {"name": name, "schema": game.schema, "hyperparameters": given}
            files.write_whole(noted, json.dumps(kind, indent=1).encode())
            return name
    return usual


def _noted(path: Path, game: Game) -> str | None:
    try:
        page = json.loads(path.read_bytes())
        return str(page["name"]) if page["schema"] == game.schema and page["name"] in algorithms.ALGORITHMS else None
    except (OSError, ValueError, KeyError, TypeError):  # an older checkpoint's, or `checkpoint.hyperparameters` says it
        return None


def _fitting(name: str, game: Game, settings: Settings, policy: Policy) -> dict[str, object] | None:
    """Hyperparameters besides those that are given, with which the algorithm can go on from the policy."""
    chosen: dict[str, object] = {
        "layers": msgspec.to_builtins(policy.layers),
        "normalise": "normaliser.mean" in policy.params,
    }
    given = settings.hyperparameters
    followed = algorithms.defaults(name, game, given) | {k: v for k, v in chosen.items() if k not in given}
    try:
        ours = Learner(algorithms.create(name, game, followed | given)).policy()
    except InputError:  # not for these actions, or it has no such hyperparameters
        return None
    return followed if another(ours, policy) is None else None
