"""Learners that are fed from the store, and make as many updates as the experience allows. They know the algorithm,
not where fragments come from."""

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sparring.algorithms.demonstrations import Demonstrations
from sparring.algorithms.large import require_small
from sparring.algorithms.protocol import Algorithm
from sparring.algorithms.replay import WINDOW_BYTES, Replay, row_bytes
from sparring.algorithms.trajectories import from_fragments
from sparring.experience import Columns, Fragment
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.functions import Normaliser
from sparring.networks.policy import CLIP, Policy
from sparring.networks.spec import action_size, feature_shape
from sparring.training.learner import Learner

__all__ = ["PEOPLES", "OnPolicyLearner", "ReplayLearner", "StoreLearner", "create"]

FUSED = 32  # updates per call: large enough to hide the dispatch, small enough to stay responsive
FUSED_BYTES = 64 << 20  # of batches at most for one call, and of rows that are taken in at once
DEBT_LIMIT = 20_000  # updates owed at most: when players outrun the learner, the newest experience matters
SETTLED = 1000  # observations after which the normaliser knows what is far away
PEOPLES = "people's, without log_prob"  # why steps are left out


def create(algorithm: Algorithm, seed: int = 0, window_bytes: int = WINDOW_BYTES) -> "StoreLearner":
    """InputError for a game too large to learn: anybody may declare one."""
    require_small(algorithm)
    if algorithm.on_policy:
        return OnPolicyLearner(algorithm, seed)
    return ReplayLearner(algorithm, seed, window_bytes)


class StoreLearner(Learner):
    """Learns from what players sent, fragment by fragment."""

    def __init__(self, algorithm: Algorithm, seed: int = 0) -> None:
        super().__init__(algorithm, seed)
        self.fragments = 0
        self.people_steps = self.bot_steps = 0  # of experience that is learned from, by who acted …
        self.left_out: dict[str, int] = {}  # … and steps that are not, by why
        self._overflow = ""  # a loss that was not finite
        self._early: Array | None = None  # the first observations, until the normaliser is settled

    def warm_start(self, policy: Policy, steps: int) -> str | None:
        why = super().warm_start(policy, steps)
        if why is None:
            self._early, self._overflow = None, ""
        return why

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        """Fragments that lie behind the store's cursor `before`."""
        self._fill(fragments, before)
        self.steps += sum(f.steps for f in fragments)
        self.fragments += len(fragments)
        for f in fragments:
            if (why := self._unusable(f)) is not None:
                self.leave_out(why, f.steps)
            else:
                self._count(f, f.steps)

    def _unusable(self, fragment: Fragment) -> str | None:
        """Why a fragment is not learned from, for people."""
        return None

    def _count(self, fragment: Fragment, steps: int) -> None:
        if fragment.model is None:
            self.people_steps += steps
        else:
            self.bot_steps += steps

    def leave_out(self, why: str, steps: int) -> None:
        """Counts steps that are not learned from."""
        self.left_out[why] = self.left_out.get(why, 0) + steps

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
    def progress(self) -> tuple[int, int]:
        """Steps that are there for the first update, and how many it needs."""
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

    @property
    def window_limit(self) -> int:
        """Bytes that the window may come to."""
        return 0

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
        counts = {"people_steps": self.people_steps, "bot_steps": self.bot_steps, "left_out": dict(self.left_out)}
        return arrays, meta | counts | {"fragments": self.fragments, "window_start": self.window_start}

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        super().restore(arrays, meta)
        self.fragments, self._overflow = meta["fragments"], ""
        self.people_steps, self.bot_steps = meta.get("people_steps", 0), meta.get("bot_steps", 0)
        self.left_out = dict(meta.get("left_out", {}))


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

    @property
    def window_limit(self) -> int:
        return self.capacity * row_bytes(self.game)

    def forget(self, renew: bool = False) -> None:
        self._renew = renew and self.normaliser is not None and self.window >= SETTLED
        if self._renew:
            self.normaliser, self._early = Normaliser(feature_shape(self.game.observation)), None
        self._start = self.window_start
        self.replay = Replay(self.game, self.capacity)
        self.demonstrations = Demonstrations()
        self._arrivals.clear()
        self._arrived = 0  # rows among them

    def take(self, fragments: Sequence[Fragment], before: int) -> None:
        super().take(fragments, before)
        steps = sum(f.steps for f in fragments)
        self.debt = min(self.debt + steps * self.config.updates_per_step, DEBT_LIMIT)

    def refill(self, fragments: Sequence[Fragment], before: int) -> None:
        self._fill(fragments, before, known=not self._renew)

    def _fill(self, fragments: Sequence[Fragment], before: int, known: bool = False) -> None:
        slots = [self.demonstrations.slot(f) for f in fragments]
        for obs in self._extend(self.replay, fragments, slots):
            if not known:
                self._observe(obs)
        self._arrivals.append((before, sum(f.steps + 1 for f in fragments)))
        self._arrived += self._arrivals[-1][1]
        while self._arrived - self._arrivals[0][1] >= self.capacity:
            self._arrived -= self._arrivals.popleft()[1]

    def _extend(
        self, replay: Replay, fragments: Sequence[Fragment], slots: Sequence[int] | None = None
    ) -> Iterator[Array]:
        """Puts them into the window, so many at once as the memory for it allows; gives their observations."""
        most = max(2, min(replay.capacity, FUSED_BYTES // (4 * math.prod(feature_shape(self.game.observation)))))
        batch: list[tuple[Columns, bool, int]] = []
        rows = 0
        whose = zip(fragments, slots or [0] * len(fragments), strict=True)
        for (columns, terminated), slot in ((p, slot) for f, slot in whose for p in _pieces(self.game, f, most)):
            if rows + len(columns.obs) > most:
                yield replay.extend(*zip(*batch, strict=True))
                batch, rows = [], 0
            batch.append((columns, terminated, slot))
            rows += len(columns.obs)
        if batch:
            yield replay.extend(*zip(*batch, strict=True))

    @property
    def ready(self) -> bool:
        return self.debt >= self.fused and self.steps >= self.config.learning_starts and len(self.replay) > 0

    @property
    def progress(self) -> tuple[int, int]:
        c = self.config
        return self.steps, int(max(c.learning_starts, math.ceil(self.fused / c.updates_per_step)))

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
        c, imitates = self.config, getattr(self.algorithm, "demonstrations", False)
        weights = self.demonstrations.weights() if imitates else None
        drawn = self.replay.sample(self.rng, self.fused, c.batch, gamma=c.gamma, n_step=c.n_step, weights=weights)
        self.note(self.apply(drawn))
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
        return float(self.algorithm.exploration(min(self.steps, learned) + self.explored))

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
        self._waiting.extend((before, f) for f in fragments if self._unusable(f) is None)
        while self._waiting and self.window - self._waiting[0][1].steps >= 2 * self.config.steps:
            old = self._waiting.popleft()[1]
            self.leave_out("players were quicker than learning", old.steps)
            self._count(old, -old.steps)
        self._cursor = before

    def _unusable(self, fragment: Fragment) -> str | None:
        if fragment.log_prob is not None:
            return None
        return PEOPLES if fragment.model is None else "bots', without log_prob"

    @property
    def ready(self) -> bool:
        return self.window >= self.config.steps

    @property
    def progress(self) -> tuple[int, int]:
        return self.window, int(self.config.steps)

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
        waiting = deque((0, f) for f in fragments if self._unusable(f) is None)
        while waiting:
            yield self._next(waiting)

    def _try(self, fragments: Sequence[Fragment]) -> None:
        self.note(self._learn_from(fragments))
