"""Whether a policy of one game plays another: the Gymnasium form and the declared form of one game, above all."""

from typing import NamedTuple

import numpy as np

from sparring.games.spec import Box, Dict, Game, Space, written

__all__ = ["Difference", "difference", "differences"]


class Difference(NamedTuple):
    """A part of a game that is another one in the other; None where it is missing."""

    part: str  # observation, observation.FIELD or action
    ours: Space | None
    theirs: Space | None

    def __str__(self) -> str:
        ours, theirs = ("missing" if space is None else written(space, 200) for space in (self.ours, self.theirs))
        return f"{self.part} ({ours}, there {theirs})"


def differences(ours: Game, theirs: Game) -> list[Difference]:
    """Why a policy of the one game does not play the other; none where it does. Bounds of observations do not matter:
    they say what an upload may hold, and simulators do not keep to theirs. Those of actions do: a policy keeps to them.
    How many play does not matter either: a policy sees for one.

    :param ours: The policy's game, or either: it is the same both ways.
    :param theirs: The game to play.
    """
    found = _of_spaces("observation", ours.observation, theirs.observation, bounded=False)
    return found + _of_spaces("action", ours.action, theirs.action, bounded=True)


def difference(ours: Game, theirs: Game) -> str | None:
    """`differences`, for people; None where there are none."""
    found = differences(ours, theirs)
    return f"they differ in {' and '.join(map(str, found))[:1000]}" if found else None


def _of_spaces(part: str, ours: Space, theirs: Space, bounded: bool) -> list[Difference]:
    if isinstance(ours, Dict) and isinstance(theirs, Dict):
        found = []
        for name in sorted(ours.fields.keys() | theirs.fields.keys()):
            one, other = ours.fields.get(name), theirs.fields.get(name)
            if one is None or other is None:
                found.append(Difference(f"{part}.{name}", one, other))
            else:
                found += _of_spaces(f"{part}.{name}", one, other, bounded)
        return found
    if isinstance(ours, Box) and isinstance(theirs, Box):
        same = ours.element == theirs.element and (not bounded or _same_bounds(ours, theirs))
    else:
        same = ours == theirs
    return [] if same else [Difference(part, ours, theirs)]


def _same_bounds(ours: Box, theirs: Box) -> bool:
    """However they are written: one number for all, or a list of equal ones."""
    pairs = zip(ours.bounds, theirs.bounds, strict=True)
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)
