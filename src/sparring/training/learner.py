"""A learner: an algorithm with its state. Here are what all have in common, and those fed from the store, which make as
many updates as the experience allows. They know the algorithm, not where fragments come from."""

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparring.algorithms.protocol import Algorithm
from sparring.algorithms.replay import Replay, row_bytes
from sparring.algorithms.trajectories import from_fragments
from sparring.errors import InputError
from sparring.experience import Columns, Fragment
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.functions import Normaliser
from sparring.networks.policy import CLIP, Policy
from sparring.networks.spec import action_size, feature_shape
from sparring.runs.checkpoint import flatten, unflatten

__all__ = ["Learner", "OnPolicyLearner", "ReplayLearner", "StoreLearner", "create"]

FUSED = 32  # updates per call: large enough to hide the dispatch, small enough to stay responsive
FUSED_BYTES = 64 << 20  # of batches at most for one call, and of rows that are taken in at once
DEBT_LIMIT = 20_000  # updates owed at most: when players outrun the learner, the newest experience matters
WINDOW_BYTES = 1 << 30  # of a replay window: a hundred thousand images of 84 × 84 × 4 would take 2.8 GB
# Of one update's observations or outputs: a game of a million actions takes 5 GB and ten seconds for each update.
BATCH_BYTES = 256 << 20
SETTLED = 1000  # observations after which the normaliser knows what is far away


def create(algorithm: Algorithm, seed: int = 0, window_bytes: int = WINDOW_BYTES) -> "StoreLearner":
    """InputError for a game too large to learn: anybody may declare one."""
    require_small(algorithm)
    if algorithm.on_policy:
        return OnPolicyLearner(algorithm, seed)
    return ReplayLearner(algorithm, seed, window_bytes)


def require_small(algorithm: Algorithm) -> None:
    """Before anything is allocated: a field of a million values is four bytes on the wire, and four megabytes to
    learn from."""
    game, config = algorithm.game, algorithm.config
    rows = config.steps if algorithm.on_policy else 2 * config.batch
    key = "steps" if algorithm.on_policy else "batch"
    for what, size in (
        ("observation", math.prod(feature_shape(game.observation))),
        ("action", action_size(game.action)),
    ):
        if rows * size * 4 > BATCH_BYTES:
            raise InputError(
                f"one {what} is {size:,} numbers to a network, and {rows:,} of them are learned from at once: that is "
                f"more than {BATCH_BYTES >> 20} MiB. Make the {what} space smaller, or lower the hyperparameter {key!r}"
            )


class Learner:
    """An algorithm's state, normaliser and counters: what every way to learn has, and a checkpoint holds."""

    def __init__(self, algorithm: Algorithm, seed: int = 0) -> None:
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
        return self.algorithm.policy(self.state, self.normaliser_params, self.exploration)

    @property
    def normaliser_params(self) -> dict[str, Array]:
        return {} if self.normaliser is None else self.normaliser.params

    def apply(self, data: Any) -> dict[str, Any]:
        """One call of the algorithm's update. Its metrics are computed in the background: `note` waits for them."""
        self.state, metrics = self.algorithm.update(self.state, self.normaliser_params, data)
        return dict(metrics)

    def note(self, metrics: dict[str, Any]) -> None:
        self.metrics = {name: float(value) for name, value in metrics.items()}

    def problem(self) -> str | None:
        """Why nobody should act with this state, nor keep it; none when all of it is finite."""
        if bool(_finite(self.state)) and all(np.isfinite(x).all() for x in self.normaliser_params.values()):
            return None
        arrays = flatten(self.state, "") | self.normaliser_params
        name = next(name for name, array in arrays.items() if not np.isfinite(array).all())
        return f"{name.lstrip('.')} has NaN or infinite values"

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


@jax.jit
def _finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


class StoreLearner(Learner):
    """Learns from what players sent, fragment by fragment."""

    def __init__(self, algorithm: Algorithm, seed: int = 0) -> None:
        super().__init__(algorithm, seed)
        self.fragments = 0
        self._overflow = ""  # a loss that was not finite
        self._early: Array | None = None  # the first observations, until the normaliser is settled

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        """Fragments that lie behind the store's cursor `before`."""
        self._fill(fragments, before)
        self.steps += sum(f.steps for f in fragments)
        self.fragments += len(fragments)

    def forget(self, renew: bool = False) -> None:
        """Drops the experience in memory: `refill` brings back what the store still has of it. `renew`: the normaliser
        forgets, too, where that is enough to see what is usual."""
        raise NotImplementedError

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        """After a restart, or `forget`: what was in memory again, already counted."""
        raise NotImplementedError

    def learn(self, seconds: float) -> int:
        """Updates for about so long, or until the experience allows no more; how many."""
        made, until = 0, time.monotonic() + seconds
        while self.ready and (not made or time.monotonic() < until):
            made += self._update()
        self.updates += made
        return made

    def breaks(self, fragments: Sequence[Fragment]) -> str | None:
        """What would not be finite after learning from these alone; none if all would be. Changes nothing."""
        state, normaliser, metrics, overflow = self.state, self.normaliser, self.metrics, self._overflow
        early = self._early
        try:
            for some in self._portions(fragments):
                # The normaliser replaces its arrays and never writes into them.
                self.state, self.normaliser = state, copy.copy(normaliser)
                self._try(some)
                if (why := self.problem()) is not None:
                    return why
            return None
        finally:
            self.state, self.normaliser, self.metrics, self._overflow = state, normaliser, metrics, overflow
            self._early = early

    def note(self, metrics: dict[str, Any]) -> None:
        super().note(metrics)
        wrong = [name for name, value in self.metrics.items() if name.startswith("loss/") and not math.isfinite(value)]
        self._overflow = self._overflow or next(iter(wrong), "")

    def problem(self) -> str | None:
        """Also a loss that overflowed: where gradients are clipped such an update leaves no trace but is lost."""
        return super().problem() or (f"{self._overflow} is NaN or infinite" if self._overflow else None)

    def _observe(self, obs: Array) -> None:
        """What the normaliser sees. Like the policy, it does not see farther than `CLIP` deviations: else one player's
        enormous number would make everybody else's the same for good. Of the first observations the middle half says
        what is far away."""
        if self.normaliser is None:
            return
        if self._early is not None or self.normaliser.count == 0:
            room = SETTLED - (0 if self._early is None else len(self._early))
            some, obs = obs[:room], obs[room:]
            self._early = np.array(some, np.float64) if self._early is None else np.concatenate([self._early, some])
            low, middle, high = np.percentile(self._early, (25, 50, 75), axis=0)
            reach = CLIP * np.maximum(high - low, 1.0)
            self.normaliser = Normaliser(self.normaliser.mean.shape)
            self.normaliser.observe(np.clip(self._early, middle - reach, middle + reach))
            if len(self._early) >= SETTLED:
                self._early = None
        if len(obs):
            p = self.normaliser.params
            reach = CLIP * p["normaliser.std"]
            self.normaliser.observe(np.clip(obs, p["normaliser.mean"] - reach, p["normaliser.mean"] + reach))

    @property
    def ready(self) -> bool:
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Steps in memory to learn from."""
        raise NotImplementedError

    @property
    def window_bytes(self) -> int:
        """The memory that they take."""
        raise NotImplementedError

    @property
    def window_start(self) -> int:
        """The cursor from which `refill` must read."""
        raise NotImplementedError

    def _fill(self, fragments: Sequence[Fragment], before: int) -> None:
        raise NotImplementedError

    def _update(self) -> int:
        raise NotImplementedError

    def _portions(self, fragments: Sequence[Fragment]) -> Iterator[Sequence[Fragment]]:
        """As many as are learned from at once."""
        raise NotImplementedError

    def _try(self, fragments: Sequence[Fragment]) -> None:
        """Learns from a portion alone."""
        raise NotImplementedError

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything but the experience, which the store has."""
        arrays, meta = super().save()
        return arrays, meta | {"fragments": self.fragments, "window_start": self.window_start}

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        super().restore(arrays, meta)
        self.fragments, self._overflow = meta["fragments"], ""


class ReplayLearner(StoreLearner):
    """Off-policy: from a window of the newest experience, so many updates per step of it."""

    def __init__(self, algorithm: Algorithm, seed: int = 0, window_bytes: int = WINDOW_BYTES) -> None:
        super().__init__(algorithm, seed)
        row = row_bytes(self.game)
        self.capacity = max(min(self.config.replay, window_bytes // row), 2)
        numbers = math.prod(feature_shape(self.game.observation)) + action_size(self.game.action)
        self.fused = max(1, min(FUSED, FUSED_BYTES // (2 * self.config.batch * numbers)))
        self.debt = 0.0  # updates that the experience so far allows and that were not made yet
        self._start = 0
        self._renew = False  # what comes again is new to the normaliser
        self.replay = Replay(self.game, 2)
        self._arrivals: deque[tuple[int, int]] = deque()  # (cursor before, rows) of what fills the window
        self.forget()

    def forget(self, renew: bool = False) -> None:
        self._renew = renew and self.normaliser is not None and self.window >= SETTLED
        if self._renew:
            self.normaliser, self._early = Normaliser(feature_shape(self.game.observation)), None
        self._start = self.window_start
        self.replay = Replay(self.game, self.capacity)
        self._arrivals.clear()
        self._arrived = 0  # rows among them

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        super().take(fragments, before)
        steps = sum(f.steps for f in fragments)
        self.debt = min(self.debt + steps * self.config.updates_per_step, DEBT_LIMIT)

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        self._fill(fragments, before, known=not self._renew)

    def _fill(self, fragments: Sequence[Fragment], before: int, known: bool = False) -> None:
        for obs in self._extend(self.replay, fragments):
            if not known:
                self._observe(obs)
        self._arrivals.append((before, sum(f.steps + 1 for f in fragments)))
        self._arrived += self._arrivals[-1][1]
        while self._arrived - self._arrivals[0][1] >= self.capacity:
            self._arrived -= self._arrivals.popleft()[1]

    def _extend(self, replay: Replay, fragments: Sequence[Fragment]) -> Iterator[Array]:
        """Puts them into the window, so many at once as the memory for it allows; gives their observations."""
        most = max(2, min(replay.capacity, FUSED_BYTES // (4 * math.prod(feature_shape(self.game.observation)))))
        batch: list[tuple[Columns, bool]] = []
        rows = 0
        for columns, terminated in (piece for f in fragments for piece in _pieces(self.game, f, most)):
            if rows + len(columns.obs) > most:
                yield replay.extend(*zip(*batch, strict=True))
                batch, rows = [], 0
            batch.append((columns, terminated))
            rows += len(columns.obs)
        if batch:
            yield replay.extend(*zip(*batch, strict=True))

    @property
    def ready(self) -> bool:
        return self.debt >= self.fused and self.steps >= self.config.learning_starts and len(self.replay) > 0

    @property
    def window(self) -> int:
        return len(self.replay)

    @property
    def window_bytes(self) -> int:
        return self.replay.rows * row_bytes(self.game)

    @property
    def window_start(self) -> int:
        return self._arrivals[0][0] if self._arrivals else self._start

    def _update(self) -> int:
        c = self.config
        self.note(self.apply(self.replay.sample(self.rng, self.fused, c.batch, gamma=c.gamma, n_step=c.n_step)))
        self.debt -= self.fused
        return self.fused

    def _portions(self, fragments: Sequence[Fragment]) -> Iterator[Sequence[Fragment]]:
        yield fragments

    def _try(self, fragments: Sequence[Fragment]) -> None:
        c = self.config
        replay = Replay(self.game, min(sum(f.steps + 1 for f in fragments), self.capacity))
        for obs in self._extend(replay, fragments):
            self._observe(obs)
        at = replay.extremes(self.fused * c.batch)
        self.note(self.apply(replay.gather(at, self.fused, c.batch, gamma=c.gamma, n_step=c.n_step)))

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


def _pieces(game: Game, fragment: Fragment, most: int) -> Iterator[tuple[Columns, bool]]:
    """A fragment's columns, and whether they end in a terminal state; in pieces where it has more than `most` rows."""
    columns = fragment.columns(game)
    for first in range(0, fragment.steps, most - 1):
        last = min(first + most - 1, fragment.steps)
        some = slice(first, last)
        piece = Columns(columns.obs[first : last + 1], columns.action[some], columns.reward[some])
        yield piece, fragment.terminated and last == fragment.steps


class OnPolicyLearner(StoreLearner):
    """On-policy: each step of experience once, the newest first to count. The recorded log-probabilities tell the
    algorithm how old the policies were that acted."""

    def __init__(self, algorithm: Algorithm, seed: int = 0) -> None:
        super().__init__(algorithm, seed)
        self._waiting: deque[tuple[int, Fragment]] = deque()  # with the cursor before the page that it came with
        self._cursor = 0
        self._forgotten: set[str] = set()  # ids of what waited when it was forgotten

    def forget(self, renew: bool = False) -> None:
        self._forgotten = {f.id for _, f in self._waiting}
        self._waiting.clear()

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        """Only what waited until `forget`. After a restart, nothing: what waited at the end is stale by now."""
        self._waiting.extend((before, f) for f in fragments if f.id in self._forgotten)

    def _fill(self, fragments: Sequence[Fragment], before: int) -> None:
        # A person's play has no log-probability: on-policy learning cannot use it.
        self._waiting.extend((before, f) for f in fragments if f.log_prob is not None)
        while self._waiting and self.window - self._waiting[0][1].steps >= 2 * self.config.steps:
            self._waiting.popleft()
        self._cursor = before

    @property
    def ready(self) -> bool:
        return self.window >= self.config.steps

    @property
    def window(self) -> int:
        return sum(f.steps for _, f in self._waiting)

    @property
    def window_bytes(self) -> int:
        return sum(len(f.obs) + len(f.action) + 2 * len(f.reward) for _, f in self._waiting)

    @property
    def window_start(self) -> int:
        return self._waiting[0][0] if self._waiting else self._cursor

    def _update(self) -> int:
        self.note(self._learn_from(self._next(self._waiting)))
        return 1

    def _next(self, waiting: "deque[tuple[int, Fragment]]") -> list[Fragment]:
        fragments: list[Fragment] = []
        while waiting and sum(f.steps for f in fragments) < self.config.steps:
            fragments.append(waiting.popleft()[1])
        return fragments

    def _learn_from(self, fragments: Sequence[Fragment]) -> dict[str, Any]:
        columns = [f.columns(self.game) for f in fragments]
        data = from_fragments(self.game, columns, [f.terminated for f in fragments], steps=self.config.steps)
        metrics = self.apply(data)
        self._observe(data.obs[:, :-1][data.mask])
        return metrics

    def _portions(self, fragments: Sequence[Fragment]) -> Iterator[Sequence[Fragment]]:
        waiting = deque((0, f) for f in fragments if f.log_prob is not None)
        while waiting:
            yield self._next(waiting)

    def _try(self, fragments: Sequence[Fragment]) -> None:
        self.note(self._learn_from(fragments))
