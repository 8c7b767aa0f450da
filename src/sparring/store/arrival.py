"""What every store does with fragments that arrive: refuses what was never checked, sums rewards, and tells when an
episode is complete. One rule for all stores, so that they cannot disagree."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Game

__all__ = ["Unfinished", "require_checked", "require_same", "returns"]

REWARD = np.dtype("<f4")


class Unfinished(msgspec.Struct):
    """What is stored of an episode that is not complete yet.

    It is complete once a fragment that ends it is there and the stored steps add up to that fragment's last step:
    fragments may arrive in any order, and the one that arrives last completes it. So an episode's cursor is that of its
    latest arrival, and a reader that moves its cursor on misses no episode, however late an early fragment comes.
    A player who uses an episode's name again after it was complete starts another episode.
    """

    steps: int = 0
    ret: float = 0.0
    length: int | None = None  # known from the fragment that ends the episode …
    model: str | None = None  # … and so is who played it
    version: int | None = None

    def add(self, fragment: Fragment, ret: float) -> bool:
        """Whether the episode is complete now."""
        self.steps += fragment.steps
        self.ret += ret
        if fragment.terminated or fragment.truncated:
            self.length = fragment.start + fragment.steps
            self.model, self.version = fragment.model, fragment.version
        return self.steps == self.length


def returns(fragments: Sequence[Fragment]) -> list[float]:
    """The sum of rewards of each; of all at once, because NumPy costs more per call than per number here."""
    if not fragments:
        return []
    rewards = np.frombuffer(b"".join([f.reward for f in fragments]), REWARD)
    steps = fragments[0].steps
    if all([f.steps == steps for f in fragments]):  # as most are: fragments are cut at a fixed length
        equal: list[float] = rewards.reshape(-1, steps).sum(1, dtype=np.float64).tolist()
        return equal
    starts = list(accumulate([f.steps for f in fragments[:-1]], initial=0))
    sums: list[float] = np.add.reduceat(rewards, starts, dtype=np.float64).tolist()
    return sums


def require_checked(fragments: Sequence[Fragment]) -> None:
    """The least that a store relies on; doors run `validate.check`, which asks for more."""
    for f in fragments:
        if f.steps < 1 or len(f.reward) != 4 * f.steps:
            raise InputError(
                f"fragment {f.id!r} has {f.steps} steps and {len(f.reward)} bytes of reward: "
                f"a store takes only fragments that passed experience.validate.check"
            )


def require_same(known: Game, game: Game) -> None:
    if known.schema != game.schema:
        raise InputError(
            f"the game {game.name!r} is registered with schema {known.schema}, yours has {game.schema}: "
            f"its spaces differ; use another name, or the spaces it was registered with"
        )
