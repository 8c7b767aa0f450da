"""Learning from what players sent: takes fragments in, makes as many updates as the experience allows, and can be
saved and restored. One learner per game; it knows the algorithm, not where fragments come from."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparring.experience import Fragment
from sparring.experience.replay import Replay
from sparring.games.spec import Array
from sparring.networks.functions import Normaliser
from sparring.networks.policy import Policy
from sparring.networks.spec import feature_shape
from sparring.training.checkpoint import flatten, unflatten

__all__ = ["Learner"]

FUSED = 32  # updates per call: large enough to hide the dispatch, small enough to stay responsive
DEBT_LIMIT = 20_000  # updates owed at most: when players outrun the learner, the newest experience matters


class Learner:
    """Off-policy learning from a replay window."""

    def __init__(self, algorithm: Any, seed: int = 0) -> None:
        self.algorithm, self.config, self.game = algorithm, algorithm.config, algorithm.game
        self.state = algorithm.init(jax.random.key(seed))
        self.rng = np.random.default_rng(seed)
        self.replay = Replay(self.game, self.config.replay)
        shape = feature_shape(self.game.observation)
        self.normaliser = Normaliser(shape) if self.config.normalise and len(shape) == 1 else None
        self.steps = self.fragments = self.updates = 0  # since the beginning, across restarts
        self.debt = 0.0  # updates that the experience so far allows and that were not made yet
        self.metrics: dict[str, float] = {}
        self._arrivals: deque[tuple[int, int]] = deque()  # (cursor before, transitions) of what fills the window

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        """Fragments that lie behind the cursor `before`."""
        self._fill(fragments, before)
        steps = sum(f.steps for f in fragments)
        self.steps += steps
        self.fragments += len(fragments)
        self.debt = min(self.debt + steps * self.config.updates_per_step, DEBT_LIMIT)

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        """After a restart: the window's content again, already counted and learned from."""
        self._fill(fragments, before, known=True)

    def _fill(self, fragments: Sequence[Fragment], before: int, known: bool = False) -> None:
        batch: list[Fragment] = []
        rows = 0
        for fragment in fragments:
            if batch and rows + fragment.steps + 1 > self.replay.capacity // 2:
                self._extend(batch, known)
                batch, rows = [], 0
            if fragment.steps + 1 <= self.replay.capacity:
                batch.append(fragment)
                rows += fragment.steps + 1
        if batch:
            self._extend(batch, known)
        self._arrivals.append((before, sum(f.steps for f in fragments)))
        while sum(n for _, n in self._arrivals) - self._arrivals[0][1] > self.replay.capacity:
            self._arrivals.popleft()

    def _extend(self, fragments: Sequence[Fragment], known: bool) -> None:
        obs = self.replay.extend([f.columns(self.game) for f in fragments], [f.terminated for f in fragments])
        if self.normaliser is not None and not known:
            self.normaliser.observe(obs)

    @property
    def window_start(self) -> int:
        """The cursor from which `refill` must read to have the window again."""
        return self._arrivals[0][0] if self._arrivals else 0

    @property
    def ready(self) -> bool:
        return self.debt >= FUSED and len(self.replay) >= self.config.learning_starts

    def learn(self, seconds: float) -> int:
        """Updates for about so long, or until the experience allows no more; how many."""
        c, made, until = self.config, 0, time.monotonic() + seconds
        while self.ready and (not made or time.monotonic() < until):
            batches = self.replay.sample(self.rng, FUSED, c.batch, gamma=c.gamma, n_step=c.n_step)
            self.state, metrics = self.algorithm.update(self.state, self._normaliser_params, batches)
            self.metrics = {name: float(value) for name, value in metrics.items()}
            self.debt -= FUSED
            made += FUSED
        self.updates += made
        return made

    @property
    def exploration(self) -> float:
        """By what was learned, not only by what arrived: many players must not end exploration early."""
        learned = int(self.updates / self.config.updates_per_step)
        return float(self.algorithm.exploration(min(self.steps, learned)))

    def policy(self) -> Policy:
        return self.algorithm.policy(self.state, self._normaliser_params, self.exploration)

    @property
    def _normaliser_params(self) -> dict[str, Array]:
        return {} if self.normaliser is None else self.normaliser.params

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything but the window, which the store has."""
        arrays = flatten(self.state, "state")
        if self.normaliser is not None:
            arrays |= {"normaliser.mean": self.normaliser.mean, "normaliser.var": self.normaliser.var}
        meta = {
            "algorithm": self.algorithm.name,
            "schema": self.game.schema,
            "steps": self.steps,
            "fragments": self.fragments,
            "updates": self.updates,
            "debt": self.debt,
            "normaliser_count": self.normaliser.count if self.normaliser else 0.0,
            "rng": self.rng.bit_generator.state,
            "window_start": self.window_start,
        }
        return arrays, meta

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        self.state = unflatten(self.state, arrays, "state")
        if self.normaliser is not None:
            self.normaliser.mean, self.normaliser.var = arrays["normaliser.mean"], arrays["normaliser.var"]
            self.normaliser.count = meta["normaliser_count"]
        self.steps, self.fragments, self.updates = meta["steps"], meta["fragments"], meta["updates"]
        self.debt = meta["debt"]
        self.rng.bit_generator.state = meta["rng"]
