"""A learner: an algorithm with its state. Here are what all have in common, and those fed from the store, which make as
many updates as the experience allows. They know the algorithm, not where fragments come from."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparring.experience import Fragment
from sparring.experience.replay import Replay
from sparring.experience.trajectories import pack
from sparring.games.spec import Array
from sparring.networks.functions import Normaliser
from sparring.networks.policy import Policy
from sparring.networks.spec import feature_shape
from sparring.training.checkpoint import flatten, unflatten

__all__ = ["Learner", "ReplayLearner", "StoreLearner", "StreamLearner", "create"]

FUSED = 32  # updates per call: large enough to hide the dispatch, small enough to stay responsive
DEBT_LIMIT = 20_000  # updates owed at most: when players outrun the learner, the newest experience matters


def create(algorithm: Any, seed: int = 0) -> "StoreLearner":
    return (StreamLearner if algorithm.on_policy else ReplayLearner)(algorithm, seed)


class Learner:
    """An algorithm's state, normaliser and counters: what every way to learn has, and a checkpoint holds."""

    def __init__(self, algorithm: Any, seed: int = 0) -> None:
        self.algorithm, self.config, self.game = algorithm, algorithm.config, algorithm.game
        self.state = algorithm.init(jax.random.key(seed))
        self.rng = np.random.default_rng(seed)
        shape = feature_shape(self.game.observation)
        self.normaliser = Normaliser(shape) if self.config.normalise and len(shape) == 1 else None
        self.steps = self.updates = 0  # since the beginning, across restarts
        self.metrics: dict[str, float] = {}

    @property
    def exploration(self) -> float:
        return float(self.algorithm.exploration(self.steps))

    def policy(self) -> Policy:
        policy: Policy = self.algorithm.policy(self.state, self.normaliser_params, self.exploration)
        return policy

    @property
    def normaliser_params(self) -> dict[str, Array]:
        return {} if self.normaliser is None else self.normaliser.params

    def apply(self, data: Any) -> dict[str, Any]:
        """One call of the algorithm's update. Its metrics are computed in the background: `note` waits for them."""
        self.state, metrics = self.algorithm.update(self.state, self.normaliser_params, data)
        return dict(metrics)

    def note(self, metrics: dict[str, Any]) -> None:
        self.metrics = {name: float(value) for name, value in metrics.items()}

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays = flatten(self.state, "state")
        if self.normaliser is not None:
            arrays |= {"normaliser.mean": self.normaliser.mean, "normaliser.var": self.normaliser.var}
        meta = {
            "steps": self.steps,
            "updates": self.updates,
            "rng": self.rng.bit_generator.state,
            "metrics": self.metrics,
            "normaliser_count": self.normaliser.count if self.normaliser else 0.0,
        }
        return arrays, meta

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        self.state = jax.tree.map(jnp.asarray, unflatten(self.state, arrays, "state"))
        if self.normaliser is not None:
            self.normaliser.mean, self.normaliser.var = arrays["normaliser.mean"], arrays["normaliser.var"]
            self.normaliser.count = meta["normaliser_count"]
        self.steps, self.updates, self.metrics = meta["steps"], meta["updates"], meta.get("metrics", {})
        self.rng.bit_generator.state = meta["rng"]


class StoreLearner(Learner):
    """Learns from what players sent, fragment by fragment."""

    def __init__(self, algorithm: Any, seed: int = 0) -> None:
        super().__init__(algorithm, seed)
        self.fragments = 0

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        """Fragments that lie behind the store's cursor `before`."""
        self._fill(fragments, before)
        self.steps += sum(f.steps for f in fragments)
        self.fragments += len(fragments)

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        """After a restart: what was in memory again, already counted."""
        raise NotImplementedError

    def learn(self, seconds: float) -> int:
        """Updates for about so long, or until the experience allows no more; how many."""
        made, until = 0, time.monotonic() + seconds
        while self.ready and (not made or time.monotonic() < until):
            made += self._update()
        self.updates += made
        return made

    @property
    def ready(self) -> bool:
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Steps in memory to learn from."""
        raise NotImplementedError

    @property
    def window_start(self) -> int:
        """The cursor from which `refill` must read after a restart."""
        raise NotImplementedError

    def _fill(self, fragments: Sequence[Fragment], before: int) -> None:
        raise NotImplementedError

    def _update(self) -> int:
        raise NotImplementedError

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything but the experience, which the store has."""
        arrays, meta = super().save()
        kind = {"algorithm": self.algorithm.name, "schema": self.game.schema}
        return arrays, meta | kind | {"fragments": self.fragments, "window_start": self.window_start}

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        super().restore(arrays, meta)
        self.fragments = meta["fragments"]


class ReplayLearner(StoreLearner):
    """Off-policy: from a window of the newest experience, so many updates per step of it."""

    def __init__(self, algorithm: Any, seed: int = 0) -> None:
        super().__init__(algorithm, seed)
        self.replay = Replay(self.game, self.config.replay)
        self.debt = 0.0  # updates that the experience so far allows and that were not made yet
        self._arrivals: deque[tuple[int, int]] = deque()  # (cursor before, steps) of what fills the window
        self._arrived = 0  # steps among them

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        super().take(fragments, before)
        steps = sum(f.steps for f in fragments)
        self.debt = min(self.debt + steps * self.config.updates_per_step, DEBT_LIMIT)

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        self._fill(fragments, before, known=True)

    def _fill(self, fragments: Sequence[Fragment], before: int, known: bool = False) -> None:
        batch: list[Fragment] = []
        rows = 0
        for fragment in fragments:
            if rows + fragment.steps + 1 > self.replay.capacity:
                self._extend(batch, known)
                batch, rows = [], 0
            batch.append(fragment)
            rows += fragment.steps + 1
        self._extend(batch, known)
        self._arrivals.append((before, sum(f.steps for f in fragments)))
        self._arrived += self._arrivals[-1][1]
        while self._arrived - self._arrivals[0][1] > self.replay.capacity:
            self._arrived -= self._arrivals.popleft()[1]

    def _extend(self, fragments: Sequence[Fragment], known: bool) -> None:
        if not fragments:
            return
        obs = self.replay.extend([f.columns(self.game) for f in fragments], [f.terminated for f in fragments])
        if self.normaliser is not None and not known:
            self.normaliser.observe(obs)

    @property
    def ready(self) -> bool:
        return self.debt >= FUSED and self.steps >= self.config.learning_starts and len(self.replay) > 0

    @property
    def window(self) -> int:
        return len(self.replay)

    @property
    def window_start(self) -> int:
        return self._arrivals[0][0] if self._arrivals else 0

    def _update(self) -> int:
        c = self.config
        self.note(self.apply(self.replay.sample(self.rng, FUSED, c.batch, gamma=c.gamma, n_step=c.n_step)))
        self.debt -= FUSED
        return FUSED

    @property
    def exploration(self) -> float:
        """By what was learned, not only by what arrived: many players must not end exploration early."""
        learned = int(self.updates / self.config.updates_per_step)
        return float(self.algorithm.exploration(min(self.steps, learned)))

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, meta = super().save()
        return arrays, meta | {"debt": self.debt}

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        super().restore(arrays, meta)
        self.debt = meta["debt"]


class StreamLearner(StoreLearner):
    """On-policy: each step of experience once, the newest first to count. The recorded log-probabilities tell the
    algorithm how old the policies were that acted."""

    def __init__(self, algorithm: Any, seed: int = 0) -> None:
        super().__init__(algorithm, seed)
        self._waiting: deque[Fragment] = deque()
        self._cursor = 0

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        """Nothing: what waited at the end had been taken, and is stale by now."""

    def _fill(self, fragments: Sequence[Fragment], before: int) -> None:
        # A person's play has no log-probability: on-policy learning cannot use it.
        self._waiting.extend(f for f in fragments if f.log_prob is not None)
        while self.window - self._waiting[0].steps >= 2 * self.config.steps if self._waiting else False:
            self._waiting.popleft()
        self._cursor = before

    @property
    def ready(self) -> bool:
        return self.window >= self.config.steps

    @property
    def window(self) -> int:
        return sum(f.steps for f in self._waiting)

    @property
    def window_start(self) -> int:
        return self._cursor

    def _update(self) -> int:
        fragments: list[Fragment] = []
        while sum(f.steps for f in fragments) < self.config.steps:
            fragments.append(self._waiting.popleft())
        columns = [f.columns(self.game) for f in fragments]
        data = pack(self.game, columns, [f.terminated for f in fragments], steps=self.config.steps)
        self.note(self.apply(data))
        if self.normaliser is not None:
            self.normaliser.observe(data.obs[:, :-1][data.mask])
        return 1
