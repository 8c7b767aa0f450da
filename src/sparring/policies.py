"""Policies by name: of a run, a checkpoint, a file or a published model, to act with in NumPy and to evaluate."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.errors import InputError
from sparring.networks.policy import Policy
from sparring.registry.manifest import DEFAULT_MODEL
from sparring.runs.metrics import Row
from sparring.runs.run import BEST, Run, find_run, is_run

if TYPE_CHECKING:
    from sparring.registry.registry import Registry

__all__ = ["DEFAULT_REGISTRY", "evaluate", "load_policy"]

DEFAULT_REGISTRY = ".sparring/registry"
MODEL = re.compile(r"([^/]+)(?:/([^/]+)(?:/(\d+))?)?")


def load_policy(target: "str | Path | Run", registry: "str | Path | Registry" = DEFAULT_REGISTRY) -> Policy:
    """A trained policy, ready to act. It runs in NumPy: neither JAX nor ONNX Runtime is loaded.

        policy = sparring.load_policy("runs/CartPole-v1-ppo-1@best")
        action, _ = policy.act(obs)
        policy.probabilities(obs)  # of each action, where actions are discrete
        policy.values(obs)  # of each action, of algorithms that learn Q-values
        policy.state_value(obs)  # of a run of PPO or IQL

    :param target: A run (its last policy), `RUN@best` or `RUN@40`, a checkpoint's directory, a `policy.safetensors`,
        a published version's directory, or a published model by name: `GAME[/MODEL[/VERSION]]`.
    :param registry: Where a model's name is looked up: a directory, a bucket's URL, or an open Registry.
    :raises InputError: there is no such policy; the message says what there is.
    """
    if isinstance(target, Run):
        return _of_run(target, "last")
    if (at := find_run(str(target))) is not None:
        run, which = at
        return _of_run(run, "last" if which is None else which)
    if (found := _from_path(Path(target))) is not None:
        return found
    return _published(str(target), registry)


def evaluate(
    policy: "Policy | Run | str | Path",
    episodes: int = 20,
    *,
    seed: int = 0,
    explore: bool = False,
    registry: "str | Path | Registry" = DEFAULT_REGISTRY,
) -> Row:
    """Plays whole episodes of the policy's game and sums them up.

    :param policy: A policy, or what `load_policy` takes.
    :param episodes: How many episodes to play.
    :param seed: Of the games, and of exploration.
    :param explore: Play as while learning, not greedily.
    :param registry: See `load_policy`.
    :returns: `evaluation/return_mean`, `evaluation/return_std`, `evaluation/length_mean`, … as in a run's metrics.
    :raises InputError: there is no such policy, or its game cannot be simulated.
    """
    from sparring.training.evaluate import play, summary

    found = policy if isinstance(policy, Policy) else load_policy(policy, registry)
    return summary(play(found, episodes, seed, explore=explore))


def _of_run(run: Run, which: str) -> Policy:
    """With its value network, which a run's checkpoint has: read when it is first asked for, as that takes JAX."""
    saved = run.checkpoints()
    number = str(int(saved[-1].name)) if which == "last" and saved else which
    return replace(run.policy(which), critic=partial(run.value, number))


def _from_path(path: Path) -> Policy | None:
    """Of a file, a checkpoint or a published version's directory; None where the path is none of these."""
    from sparring.export import weights

    if (path / "checkpoint.json").is_file():
        root = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        name = path.name.removesuffix(".old")
        if is_run(root) and (name == BEST or name.isdecimal()):
            return _of_run(Run(root), "best" if name == BEST else str(int(name)))
        raise InputError(f"{path} is a checkpoint of no run: a policy is loaded from a run's checkpoint")
    file = path / "policy.safetensors" if path.is_dir() else path
    if file.suffix != ".safetensors" or not file.is_file():
        return None
    try:
        return weights.load(file.read_bytes())
    except (InputError, OSError) as error:
        raise InputError(f"{file}: {error}") from error


def _no_run(target: str) -> str:
    path = Path(target) if Path(target).exists() else Path(target.rpartition("@")[0] or target)
    if path.is_file():
        return f"{path} is a file, but none of a policy (.safetensors)"
    return f"{path} is not a run directory" if path.exists() else f"there is no run directory {path}"


def _published(target: str, registry: "str | Path | Registry") -> Policy:
    found = MODEL.fullmatch(target)
    if found is None:
        raise InputError(
            f"{target} is neither a run directory nor a model (GAME[/MODEL[/VERSION]]), nor a policy's file"
        )
    if isinstance(registry, str | Path):
        where = str(registry)
        if ":" not in where and not Path(where).is_dir():
            raise InputError(f"{_no_run(target)}, and there is no registry at {where} to look it up in")
        from sparring.registry.registry import Registry

        registry = Registry(where)
        registry.check()
    game, model = found[1], found[2] or DEFAULT_MODEL
    if found[3] is not None:
        return registry.policy(game, model, int(found[3]))
    latest = registry.latest(game, model)
    if latest is None:
        raise InputError(f"{_no_run(target)}, and {registry} has no model {model!r} of {game}")
    return registry.policy(game, model, latest.version)
