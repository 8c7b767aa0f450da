"""The replay window: a ring of rows in memory, filled by fragments, sampled as n-step transitions.

A row is (observation, action, reward, kind). A fragment of T steps takes T + 1 rows. The last has only an observation,
so a transition's next observation is simply the next row. Nothing is stored twice, and small types stay small until
they are sampled. Sampling is NumPy on the host. One gather for many updates costs a few per cent of the updates
themselves, and needs no copy of the ring on a device.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparring.errors import InputError
from sparring.experience.fragment import Columns
from sparring.games import Box, Dict, Discrete, Game, Space
from sparring.games.spec import Array
from sparring.networks.policy import features
from sparring.networks.spec import action_size, feature_shape, image_layout, scaling

__all__ = ["WINDOW_BYTES", "Replay", "Transitions", "encode_action", "encode_obs", "row_bytes"]

WINDOW_BYTES = 1 << 30  # of a window: a hundred thousand images of 84 × 84 × 4 would take 2.8 GB
DEMONSTRATED = 0.25  # of a batch at least, while there is something to imitate
STEP, TERMINAL, END = 0, 1, 2  # a transition; one whose next state is terminal; an observation without a transition


class Transitions(NamedTuple):
    """Transitions as arrays of one leading shape: (batch,) or (updates, batch). NumPy's outside, JAX's inside a jit."""

    obs: Any
    action: Any
    reward: Any  # discounted sum over n steps
    next_obs: Any
    discount: Any  # γⁿ, or 0 where the episode ended by the game's rules
    demo: Any = None  # how much each is to be imitated (`demonstrations`); none: by nobody who demonstrates


def encode_obs(game: Game, obs: Array) -> Array:
    """A column of raw observations → rows to learn from: uint8 images (height, width, channels), else flat float32."""
    space = game.observation
    if isinstance(space, Box) and space.is_image:
        h, w, c = image_layout(space)
        return obs.transpose(0, h + 1, w + 1, c + 1)
    return features(space, obs)


def encode_action(game: Game, action: Array) -> Array:
    """Game actions → what algorithms learn: indices from 0, or numbers scaled to ±1 where the action has bounds."""
    if not isinstance(game.action, Box):
        return action - game.action.start if isinstance(game.action, Discrete) else action
    s, flat = scaling(game.action), action.reshape(len(action), -1)
    # Exactly ±1 means on the bound, where a clipped Gaussian has its mass: nothing beside it may be rounded onto it.
    unit = np.clip(
        ((flat - s.centre) / s.half).astype(np.float32),
        np.nextafter(s.unit_low, np.float32(np.inf)),
        np.nextafter(s.unit_high, np.float32(-np.inf)),
    )
    return np.where(flat >= s.high, s.unit_high, np.where(flat <= s.low, s.unit_low, unit))


def row_bytes(game: Game) -> int:
    """Memory that one row of a replay window takes."""
    obs = math.prod(_stored_shape(game.observation)) * _stored_type(game.observation).itemsize
    return (
        obs + (action_size(game.action) if isinstance(game.action, Box) else game.action.element.itemsize // 4) * 4 + 9
    )


class Replay:
    def __init__(self, game: Game, capacity: int) -> None:
        if capacity < 2:
            raise InputError(f"a replay window of {capacity} rows is too small")
        self.game, self.capacity = game, capacity
        self.compact = _is_compact(game.observation)
        try:
            self.obs = np.zeros((capacity, *_stored_shape(game.observation)), _stored_type(game.observation))
            self.action = (
                np.zeros((capacity, action_size(game.action)), np.float32)
                if isinstance(game.action, Box)
                else np.zeros((capacity, *game.action.element.shape), np.int32)
            )
            self.reward = np.zeros(capacity, np.float32)
            self.kind = np.full(capacity, END, np.uint8)
            self.slot = np.zeros(capacity, np.int32)  # whose a row is (`demonstrations`)
        except MemoryError as error:
            raise InputError(f"a replay window of {capacity} rows does not fit this machine: lower `replay`") from error
        self.head = 0  # where the next row goes
        self.rows = 0
        self.transitions = 0

    def __len__(self) -> int:
        return self.transitions

    def add(self, columns: Columns, terminated: bool) -> Array:
        """Takes a fragment in; returns its encoded observations (for the normaliser)."""
        return self.extend([columns], [terminated])

    def extend(
        self, fragments: Sequence[Columns], terminated: Sequence[bool], slots: Sequence[int] | None = None
    ) -> Array:
        """Takes fragments in as a few long arrays; returns their encoded observations (for the normaliser). `slots`:
        of `demonstrations`, one for each fragment."""
        lengths = np.array([len(f.reward) + 1 for f in fragments], np.int64)
        if (lengths < 2).any():
            raise InputError("a fragment without steps has nothing to learn from")
        ends = np.cumsum(lengths) - 1
        kind = np.full(int(lengths.sum()), STEP, np.uint8)
        kind[ends] = END
        kind[ends[np.asarray(terminated, bool)] - 1] = TERMINAL
        steps = kind != END
        action = np.zeros((len(kind), *self.game.action.element.shape), self.game.action.element.base)
        action[steps] = np.concatenate([f.action for f in fragments])
        reward = np.zeros(len(kind), np.float32)
        reward[steps] = np.concatenate([f.reward for f in fragments])
        slot = 0 if slots is None else np.repeat(np.asarray(slots, np.int32), lengths)
        return self.extend_rows(np.concatenate([f.obs for f in fragments]), action, reward, kind, slot)

    def extend_rows(self, obs: Array, action: Array, reward: Array, kind: Array, slot: Array | int = 0) -> Array:
        """Takes raw rows in that already have our form; the last is an END. Returns the encoded observations."""
        if len(kind) > self.capacity:
            raise InputError(f"{len(kind)} rows at once do not fit a replay window of {self.capacity}: add fewer")
        if kind[-1] != END:
            raise ValueError("the last row is a transition, but there is no observation behind it")
        encoded = encode_obs(self.game, obs)
        slots = np.broadcast_to(np.asarray(slot, np.int32), kind.shape)
        self._write(obs if self.compact else encoded, encode_action(self.game, action), reward, kind, slots)
        return encoded

    def _write(self, obs: Array, action: Array, reward: Array, kind: Array, slot: Array) -> None:
        total, steps = len(kind), kind != END
        first = min(total, self.capacity - self.head)  # rows before the ring's end; the rest begins anew
        for here, there in (
            (slice(self.head, self.head + first), slice(first)),
            (slice(total - first), slice(first, None)),
        ):
            self.transitions += int(steps[there].sum()) - int((self.kind[here] != END).sum())
            self.obs[here], self.action[here] = obs[there], action[there]
            self.reward[here], self.kind[here], self.slot[here] = reward[there], kind[there], slot[there]
        # Our last row is END, so no sample crosses into the remainder of the fragment that was half overwritten.
        self.head = (self.head + total) % self.capacity
        self.rows = min(self.rows + total, self.capacity)

    def sample(
        self,
        rng: np.random.Generator,
        updates: int,
        batch: int,
        *,
        gamma: float = 0.99,
        n_step: int = 1,
        weights: Array | None = None,
    ) -> Transitions:
        """`updates` batches, uniform over the window's transitions. An n-step sum ends early where its fragment does,
        and then bootstraps from the last observation there is. `weights`: how much each slot is to be imitated; of
        those that are, there is at least a share of `DEMONSTRATED` in each batch."""
        at = self._draw(rng, updates * batch)
        if weights is not None:
            at = self._with_demonstrations(rng, at.reshape(updates, batch), weights).reshape(-1)
        drawn = self.gather(at, updates, batch, gamma=gamma, n_step=n_step)
        return drawn if weights is None else drawn._replace(demo=weights[self.slot[at]].reshape(updates, batch))

    def _with_demonstrations(self, rng: np.random.Generator, at: Array, weights: Array) -> Array:
        shown = np.flatnonzero((weights[self.slot[: self.rows]] > 0) & (self.kind[: self.rows] != END))
        few = int(at.shape[1] * DEMONSTRATED)
        if 0 < len(shown) < DEMONSTRATED * self.transitions and few:
            at[:, :few] = shown[rng.integers(0, len(shown), (len(at), few))]
        return at

    def gather(self, at: Array, updates: int, batch: int, *, gamma: float = 0.99, n_step: int = 1) -> Transitions:
        """The transitions that begin at these rows."""
        reward, discount = np.zeros(len(at), np.float32), np.ones(len(at), np.float32)
        last, going = at, np.ones(len(at), bool)
        for _ in range(n_step):
            row = last % self.capacity
            going &= self.kind[row] != END  # which comes behind every TERMINAL too
            if not going.any():
                break  # however many steps were asked for
            reward += np.where(going, discount * self.reward[row], 0.0)
            discount *= np.where(going, gamma * (self.kind[row] != TERMINAL), 1.0)
            last = last + going
        shape = (updates, batch)
        return Transitions(
            obs=self._take(at, shape),
            action=self.action[at].reshape(*shape, *self.action.shape[1:]),
            reward=reward.reshape(shape),
            next_obs=self._take(last % self.capacity, shape),
            discount=discount.reshape(shape),
        )

    def extremes(self, count: int) -> Array:
        """Rows of the transitions with the largest numbers, by reward, observation and action; cycled to `count`."""
        at = np.flatnonzero(self.kind[: self.rows] != END)
        sizes = [np.abs(self.reward[at])]
        if self.obs.dtype.kind == "f":
            obs = np.abs(self.obs.reshape(self.capacity, -1)).max(1)
            sizes.append(np.maximum(obs[at], obs[(at + 1) % self.capacity]))
        if self.action.dtype.kind == "f":
            sizes.append(np.abs(self.action[at]).max(1))
        share = -(-count // len(sizes))
        return np.concatenate([np.resize(at[np.argsort(-size)[:share]], share) for size in sizes])[:count]

    def _take(self, at: Array, shape: tuple[int, int]) -> Array:
        obs = self.obs[at]
        if self.compact:
            obs = features(self.game.observation, obs)
        return obs.reshape(*shape, *obs.shape[1:])

    def _draw(self, rng: np.random.Generator, count: int) -> Array:
        """Rows that hold a transition, uniform: draw, drop the others, draw again for those."""
        if not self.transitions:
            raise InputError("the replay window is empty")
        found = np.empty(0, np.int64)
        while len(found) < count:
            missing = count - len(found)
            draw = rng.integers(0, self.rows, missing + missing // 8 + 8)
            found = np.concatenate([found, draw[self.kind[draw] != END]])
        return found[:count]


def _is_compact(space: Space) -> bool:
    """Whether rows keep the observation as the game gives it, which is smaller than the floats that networks see."""
    if isinstance(space, Box):
        return not space.is_image and space.element.base.itemsize < 4
    return not isinstance(space, Dict)


def _stored_shape(space: Space) -> tuple[int, ...]:
    return space.element.shape if _is_compact(space) else feature_shape(space)


def _stored_type(space: Space) -> np.dtype[Any]:
    if _is_compact(space):
        return space.element.base
    return np.dtype(np.uint8 if isinstance(space, Box) and space.is_image else np.float32)
