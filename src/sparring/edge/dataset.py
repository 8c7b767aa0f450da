"""Observations from play: to calibrate whole numbers with, and to compare files of a policy with it. As an npz: `obs`
(or `obs.FIELD` of a Dict), `action`, and the game's declaration."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from sparring.data.limits import errors_naming
from sparring.data.npz_files import read_arrays
from sparring.errors import InputError
from sparring.files import write_whole
from sparring.games import Dict, Game, compatible
from sparring.games.spec import Array
from sparring.games.vector import Separate
from sparring.networks.policy import Policy
from sparring.networks.random_play import RandomPlay
from sparring.store.protocol import Store

__all__ = ["Sample", "check_place", "played", "read", "recorded", "save"]

ABREAST = 8
EXPLORING = 2  # environments of these that explore: what is seen after a slip is in the data as well
THINNING = 4  # steps played for each that is kept …
LEAST_STEPS, MOST_STEPS = 2_000, 20_000  # … within these


@dataclass(frozen=True, eq=False)
class Sample:
    """Observations and what was done, as columns of equal length."""

    game: Game
    obs: Array
    action: Array


def played(
    game: Game,
    policy: Policy | None,
    samples: int,
    seed: int = 0,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Sample:
    """From play here, spread over whole episodes.

    :param policy: Who plays; None: at random.
    :raises InputError: the game cannot be simulated.
    """
    if game.env is None:
        raise InputError(
            f"{game.name} is a declared game, which cannot be played here: take recorded play "
            f"(`sparring dataset .sparring play.npz --game {game.name}`, then --calibrate play.npz)"
        )
    rng, environments = np.random.default_rng(seed), Separate(game, ABREAST)
    steps = min(max(samples * THINNING, LEAST_STEPS), max(MOST_STEPS, samples)) // environments.count + 1
    seen, done = [], []
    try:
        obs = environments.reset(seed)
        for i in range(steps):
            action = _act(game, policy, obs, rng)
            seen.append(obs.copy())
            done.append(action)
            obs = environments.step(action).obs
            on_progress(i + 1, steps)
    finally:
        environments.close()
    return _some(game, np.concatenate(seen), np.concatenate(done), samples, rng)


def _act(game: Game, policy: Policy | None, obs: Array, rng: np.random.Generator) -> Array:
    if policy is None:
        random = RandomPlay(game)
        return random.run({}, random.noise(rng, len(obs)))[0]
    action = policy.act(obs)[0]
    action[-EXPLORING:] = policy.act(obs[-EXPLORING:], policy.noise(rng, len(obs[-EXPLORING:])))[0]
    return action


def recorded(store: Store, game: Game, samples: int, seed: int = 0) -> Sample:
    """From a store, evenly over its steps."""
    rng = np.random.default_rng(seed)
    columns = [
        fragment.columns(game) for fragment in store.sample(game.name, max(samples * THINNING, LEAST_STEPS), rng)
    ]
    if not columns:
        raise InputError(f"there is no play of {game.name} in this store yet")
    obs = np.concatenate([each.obs[: len(each.action)] for each in columns])
    return _some(game, obs, np.concatenate([each.action for each in columns]), samples, rng)


def _some(game: Game, obs: Array, action: Array, samples: int, rng: np.random.Generator) -> Sample:
    kept = np.sort(rng.permutation(len(obs))[:samples])
    return Sample(game, obs[kept], action[kept])


def check_place(out: Path) -> None:
    """Before minutes of work.

    :param out: A directory to write into. It need not be there yet.
    :raises InputError: nothing can be written there.
    """
    place = out
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"cannot write to {out}: {place} is {'not writable' if place.is_dir() else 'a file'}")


def save(sample: Sample, path: Path) -> None:
    """:raises InputError: it cannot be written there."""
    names = sample.obs.dtype.names
    columns = {"obs": sample.obs} if names is None else {f"obs.{name}": sample.obs[name] for name in names}
    out = BytesIO()
    np.savez_compressed(out, **columns, action=sample.action, game=np.array(sample.game.to_json().decode()))
    try:
        write_whole(path, out.getvalue(), parents=True, shared=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path, game: Game) -> Array:
    """The observations of an npz, of ours or of anybody's that has `obs`.

    :raises InputError: it is none, or they are of another game.
    """
    try:
        with errors_naming(path):
            found = read_arrays(path, lambda name: name in ("obs", "game") or name.startswith("obs."))
    except InputError as error:
        raise InputError(f"{path} is not an npz of observations: {error.__cause__ or error}") from error
    declared = found.pop("game", None)
    if declared is not None and declared.dtype.kind == "U":
        try:
            theirs = Game.from_json(str(declared))
        except InputError as error:
            raise InputError(f"{path} does not say well whose play it is: {error}") from error
        why = compatible.difference(theirs, game)
        if why is not None:
            raise InputError(f"{path} is not of {game.name}: {why}")
    return _column(path, game, found)


def _column(path: Path, game: Game, found: dict[str, Array]) -> Array:
    space = game.observation
    names = [f"obs.{name}" for name in sorted(space.fields)] if isinstance(space, Dict) else ["obs"]
    if missing := [name for name in names if name not in found]:
        there = f"has {', '.join(found)}" if found else "has no `obs`"
        raise InputError(f"{path} {there}: an npz of {game.name} has {', '.join(missing)}")
    spaces = [space.fields[name] for name in sorted(space.fields)] if isinstance(space, Dict) else [space]
    for name, part in zip(names, spaces, strict=True):
        array, element = found[name], part.element
        if array.ndim == 0 or array.dtype != element.base or array.shape[1:] != element.shape:
            raise InputError(
                f"{path} has {name} as {array.dtype}{array.shape}, {game.name} has {element.base} of shape "
                f"{('n', *element.shape)}"
            )
        if len(array) == 0:
            raise InputError(f"{path} has no observations: {name} is of length 0")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(f"{path} has NaN or infinity in {name}: leave such observations out")
    if not isinstance(space, Dict):
        return found["obs"]
    if len({len(found[name]) for name in names}) > 1:
        raise InputError(f"{path} has fields with different numbers of rows")
    column = np.empty(len(found[names[0]]), space.element)
    for name in space.fields:
        column[name] = found[f"obs.{name}"]
    return column
