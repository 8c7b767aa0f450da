"""Which play made learning diverge. A culprit has far larger numbers than other play, and learning from it alone makes
a sound learner one with NaN or infinite numbers. That is tried, by halves: a few tries find a few among thousands."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sparring.experience import Fragment
from sparring.games import Dict, Game
from sparring.training.store_learner import StoreLearner

__all__ = ["Culprit", "find", "names"]

EXTREME = 1000.0  # times as large as the largest number of a usual fragment: play that differs is not blamed
USUAL = 25  # per cent of players who have at most what is usual, however much each of them sent
MOST = 0.25  # of the players may be culprits, or one: when more would be, the learner is to blame and not they
NAMED = 3  # players in a message


class Culprit(NamedTuple):
    fragment: Fragment
    broken: str  # what it makes of the learner
    largest: str  # its extreme numbers


def find(learner: StoreLearner, pages: Callable[[], Iterable[Sequence[Fragment]]], until: float) -> list[Culprit]:
    """Those among the pages, which are read twice; `learner` is sound and stays as it is. Ends at `until`
    (time.monotonic) with what it found by then: the others are found when they break learning again."""
    sizes: dict[str, dict[str, list[float]]] = {}  # by column and player
    players: set[str] = set()
    for page in pages():
        for fragment in page:
            players.add(fragment.player)
            for name, size in _sizes(learner.game, fragment).items():
                sizes.setdefault(name, {}).setdefault(fragment.player, []).append(size)
    limits = {}
    for name, of in sizes.items():  # of one player alone there is nothing to compare with but the other fragments
        usual = [float(np.median(some)) for some in of.values()] if len(of) > 1 else next(iter(of.values()))
        limits[name] = EXTREME * max(float(np.percentile(usual, USUAL, method="lower")), 1.0)
    found: list[Culprit] = []
    for page in pages():
        suspects = [(f, extreme) for f in page if (extreme := _extreme(learner.game, f, limits))]
        found += _halve(learner, suspects, until)
    return found if len({c.fragment.player for c in found}) <= max(MOST * len(players), 1) else []


def _halve(learner: StoreLearner, suspects: list[tuple[Fragment, str]], until: float) -> list[Culprit]:
    if not suspects or time.monotonic() >= until:
        return []
    if (why := learner.breaks([fragment for fragment, _ in suspects])) is None:
        return []
    if len(suspects) == 1:
        return [Culprit(suspects[0][0], why, suspects[0][1])]
    half = len(suspects) // 2
    return _halve(learner, suspects[:half], until) + _halve(learner, suspects[half:], until)


def _extreme(game: Game, fragment: Fragment, limits: dict[str, float]) -> str:
    """Which of its numbers are, for people; nothing if none is."""
    sizes = _sizes(game, fragment)
    return ", ".join(f"{name} up to {size:.3g}" for name, size in sizes.items() if size > limits[name])


def _sizes(game: Game, fragment: Fragment) -> dict[str, float]:
    """The largest number of each column, without its sign."""
    columns = fragment.columns(game)
    found = {"reward": columns.reward, "action": columns.action}
    if columns.log_prob is not None:
        found["log_prob"] = columns.log_prob
    if isinstance(game.observation, Dict):
        found |= {f"obs {name}": columns.obs[name] for name in game.observation.fields}
    else:
        found["obs"] = columns.obs
    return {name: float(np.abs(values).max()) for name, values in found.items() if values.dtype.kind == "f"}


def names(culprits: Sequence[Culprit]) -> str:
    """For people: whose they are, and what is wrong with them."""
    players = sorted({c.fragment.player for c in culprits})
    shown = ", ".join(repr(player) for player in players[:NAMED])
    more = f" and {len(players) - NAMED} more" if len(players) > NAMED else ""
    return (
        f"{len(culprits)} fragment{'s' * (len(culprits) > 1)} of player{'s' * (len(players) > 1)} {shown}{more} "
        f"made learning diverge ({culprits[0].largest})"
    )
