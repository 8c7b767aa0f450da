"""What recorded play says of a policy that did not play it: a witness beside the trial in play, never the judge.

Per-decision weighted importance sampling (Precup et al. 2000): each reward counts by how much likelier the policy makes
the actions before it than who played them did. Where the two differ much, a few episodes carry all the weight; then it
says nothing. Discrete actions only: of continuous ones a policy tells the density of its own draws alone.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparring.experience import Fragment
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.policy import Policy

__all__ = ["MeanReturn", "Witness"]

EPISODES, BYTES = 200, 16 << 20  # that are remembered at most
OPEN = 256  # episodes under way that are followed
LEAST = 5.0  # episodes' worth of weight, without which it says nothing
FAR = 20.0  # logarithm of a weight at most


class MeanReturn(NamedTuple):
    """Of a policy's mean return."""

    ret: float
    episodes: float  # that it is worth: as sure as a mean of so many


class Witness:
    """Remembers the newest episodes that bots finished."""

    def __init__(self, game: Game) -> None:
        self.game, self.usable = game, not isinstance(game.action, Box)
        self._open: OrderedDict[tuple[str, str], list[Fragment]] = OrderedDict()
        self._played: deque[list[Fragment]] = deque()
        self._bytes = 0

    def take(self, fragments: Sequence[Fragment]) -> None:
        if not self.usable:
            return
        for f in fragments:
            if f.log_prob is None:
                continue
            key = f.player, f.episode
            begun = self._open.pop(key, [])
            if f.start != sum(each.steps for each in begun):  # some are missing
                continue
            if f.ended:
                self._keep([*begun, f])
            else:
                self._open[key] = [*begun, f]
                if len(self._open) > OPEN:
                    self._open.popitem(last=False)

    def _keep(self, episode: list[Fragment]) -> None:
        self._played.append(episode)
        self._bytes += _size(episode)
        while self._bytes > BYTES or len(self._played) > EPISODES:
            self._bytes -= _size(self._played.popleft())

    def forget(self) -> None:
        """Play was erased."""
        self._open.clear()
        self._played.clear()
        self._bytes = 0

    def estimate(self, policy: Policy) -> MeanReturn | None:
        """None: recorded play does not say."""
        if not self.usable or len(self._played) < LEAST:
            return None
        ratios, rewards = zip(*(self._weigh(policy, episode) for episode in self._played), strict=True)
        longest = max(map(len, ratios))
        weight, reward = np.zeros((len(ratios), longest)), np.zeros((len(ratios), longest))
        for i, (ratio, earned) in enumerate(zip(ratios, rewards, strict=True)):
            weight[i, : len(ratio)], weight[i, len(ratio) :] = ratio, ratio[-1]  # an episode that is over earns nothing
            reward[i, : len(earned)] = earned
        total = weight.sum(0)
        worth = float((total**2 / (weight**2).sum(0)).min())
        return MeanReturn(float(((weight * reward).sum(0) / total).sum()), worth) if worth >= LEAST else None

    def _weigh(self, policy: Policy, episode: list[Fragment]) -> tuple[Array, Array]:
        columns = [f.columns(self.game) for f in episode]
        obs = np.concatenate([c.obs[:-1] for c in columns])
        action, reward = (np.concatenate([getattr(c, name) for c in columns]) for name in ("action", "reward"))
        recorded = np.concatenate([c.log_prob for c in columns if c.log_prob is not None])
        ours = policy.log_prob(policy.outputs(obs), np.empty(0), action)
        assert ours is not None
        return np.exp(np.clip(np.cumsum(ours.astype(float) - recorded), -FAR, FAR)), reward


def _size(episode: list[Fragment]) -> int:
    return sum([len(f.obs) for f in episode])
