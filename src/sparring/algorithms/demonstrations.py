"""People's play as demonstrations: which of it is worth imitating, and until when.

An algorithm with the trait `demonstrations` gets `Transitions.demo`: how much each transition is to be imitated. That
is 0 for bots' steps and 1 for people's while bots make less than people do. Of people's episodes the better half
counts: who plays badly is learned from like a bot. Why so: docs/decisions/0022-people-first.md.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from sparring.experience.fragment import Fragment
from sparring.games.spec import Array

__all__ = ["Demonstrations"]

EPISODES = 1 << 16  # of people that are kept apart at a time; the oldest give way
OPEN = 4096  # of bots that are followed to their end at a time
RECENT = 20  # finished episodes of bots in the mean that people are compared with
FEW = 4  # finished episodes of people that have no better half yet


class _Open(NamedTuple):
    steps: int  # seen so far; -1: some are missing, so its return is not known
    ret: float
    slot: int


class Demonstrations:
    """Follows episodes by their fragments. Every episode of a person has a slot (from 1; 0 is a bot's), which rows of
    the replay window carry."""

    def __init__(self) -> None:
        self.bots: deque[float] = deque(maxlen=RECENT)  # returns of finished episodes
        self._open: OrderedDict[tuple[str, str], _Open] = OrderedDict()
        self._returns = np.full(EPISODES + 1, np.nan)  # by slot; of unfinished ones not known
        self._used = np.zeros(EPISODES + 1, bool)
        self._next = 0

    def slot(self, fragment: Fragment) -> int:
        """Takes a fragment in."""
        key = (fragment.player, fragment.episode)
        person = fragment.model is None
        at = self._open.pop(key, None) or _Open(0, 0.0, self._new_slot() if person else 0)
        whole = at.steps == fragment.start
        reward = float(np.frombuffer(fragment.reward, "<f4").sum(dtype=np.float64))
        at = _Open(fragment.start + fragment.steps if whole else -1, at.ret + reward, at.slot)
        if not fragment.ended:
            self._open[key] = at
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        elif whole and person:
            self._returns[at.slot] = at.ret
        elif whole:
            self.bots.append(at.ret)
        return at.slot if person else 0

    def _new_slot(self) -> int:
        slot = 1 + self._next % EPISODES
        self._next += 1
        self._returns[slot], self._used[slot] = np.nan, True
        return slot

    @property
    def people(self) -> Array:
        """Returns of people's finished episodes."""
        return self._returns[~np.isnan(self._returns)]

    def weights(self) -> Array:
        """How much the steps of each slot are to be imitated."""
        people, weights = self.people, self._used.astype(np.float32)
        bots = float(np.mean(self.bots)) if self.bots else -np.inf
        if len(people) < FEW:
            return weights * np.float32(not len(people) or people.mean() > bots)
        bar = float(np.median(people))
        if people[people >= bar].mean() <= bots:
            return np.zeros_like(weights)  # bots have surpassed people
        known = ~np.isnan(self._returns)
        weights[known] = self._returns[known] >= bar
        return weights
