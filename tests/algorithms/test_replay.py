"""The replay window against a model of it that keeps whole fragments: what is in it, what a sample must be."""

from collections import Counter, deque
from typing import Any

import numpy as np
import pytest

from sparring.algorithms.replay import END, STEP, Replay, encode_action, encode_obs
from sparring.errors import InputError
from sparring.experience.fragment import Columns
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.games.spec import Array

GAME = Game("numbered", Box((2,)), Discrete(1000, start=-3))  # an observation says whose it is: (fragment, step)


class Model:
    """Fragments as they came, and which (fragment, step) each row of the ring holds."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.fragments: list[Columns] = []
        self.terminated: list[bool] = []
        self.rows: deque[tuple[int, int]] = deque(maxlen=capacity)

    def make(self, steps: int) -> tuple[Columns, bool]:
        number = len(self.fragments)
        obs = np.stack([np.full(steps + 1, number), np.arange(steps + 1)], -1).astype("<f4")
        action = self.rng.integers(-3, 997, steps).astype("<i4")
        columns = Columns(obs, action, self.rng.standard_normal(steps).astype("<f4"))
        self.fragments.append(columns)
        self.terminated.append(bool(self.rng.random() < 0.5))
        self.rows.extend((number, t) for t in range(steps + 1))
        return columns, self.terminated[-1]

    @property
    def transitions(self) -> set[tuple[int, int]]:
        return {(f, t) for f, t in self.rows if t < len(self.fragments[f].reward)}

    def expect(self, f: int, t: int, gamma: float, n_step: int) -> tuple[int, float, tuple[int, int], float]:
        rewards = self.fragments[f].reward[t : t + n_step]
        total = sum(gamma**k * float(r) for k, r in enumerate(rewards))
        last = t + len(rewards)
        over = self.terminated[f] and last == len(self.fragments[f].reward)
        return int(self.fragments[f].action[t]) + 3, total, (f, last), 0.0 if over else gamma ** len(rewards)


def check(replay: Replay, model: Model, gamma: float, n_step: int, count: int = 300) -> set[tuple[int, int]]:
    alive = model.transitions
    assert len(replay) == len(alive)
    batch = replay.sample(model.rng, 3, count // 3, gamma=gamma, n_step=n_step)
    seen = set()
    for i in np.ndindex(batch.reward.shape):
        f, t = (int(x) for x in batch.obs[i])
        assert (f, t) in alive
        action, reward, following, discount = model.expect(f, t, gamma, n_step)
        assert batch.action[i] == action
        assert batch.reward[i] == pytest.approx(reward, abs=1e-4)
        assert tuple(batch.next_obs[i]) == following
        assert batch.discount[i] == pytest.approx(discount, abs=1e-6)
        seen.add((f, t))
    return seen


@pytest.mark.parametrize("n_step", [1, 2, 5, 40, 10**12])
def test_samples_are_what_was_put_in(n_step: int) -> None:
    model = Model(200, seed=n_step)
    replay = Replay(GAME, 200)
    for steps in (1, 30, 2, 60):
        replay.add(*model.make(steps))
    check(replay, model, 0.9, n_step, 2000)


@pytest.mark.parametrize("seed", range(12))
def test_no_sample_crosses_a_seam(seed: int) -> None:
    """Random fragments, one by one and many at once, around the ring many times."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(5, 60))
    model, replay = Model(capacity, seed), Replay(GAME, capacity)
    for _ in range(60):
        free, batch = capacity, []
        while free >= 2 and rng.random() < 0.7:
            steps = int(rng.integers(1, min(free, 20)))
            batch.append(model.make(steps))
            free -= steps + 1
        if batch:
            replay.extend([b[0] for b in batch], [b[1] for b in batch])
        if model.transitions:
            check(replay, model, float(rng.uniform(0.5, 1)), int(rng.integers(1, 8)), 30)


def test_a_fragment_as_large_as_the_window() -> None:
    model, replay = Model(10, 0), Replay(GAME, 10)
    for steps in (3, 9, 9, 4):
        replay.add(*model.make(steps))
        check(replay, model, 0.9, 3)
    with pytest.raises(InputError, match="11 rows at once do not fit a replay window of 10"):
        replay.add(*Model(10, 1).make(10))
    check(replay, model, 0.9, 3)  # nothing of it went in


def test_every_transition_is_as_likely() -> None:
    model, replay = Model(300, 3), Replay(GAME, 300)
    for _ in range(60):
        replay.add(*model.make(int(model.rng.integers(1, 30))))
    batch = replay.sample(np.random.default_rng(0), 40, 5000)
    counts = Counter(map(tuple, batch.obs.reshape(-1, 2).astype(int)))
    assert set(counts) == model.transitions
    mean = batch.reward.size / len(counts)
    assert all(abs(n - mean) < 5 * mean**0.5 for n in counts.values())
    spread = sum((n - mean) ** 2 / mean for n in counts.values()) / len(counts)
    assert 0.7 < spread < 1.3  # χ² per degree of freedom


def test_the_same_seed_draws_the_same() -> None:
    model, replay = Model(100, 0), Replay(GAME, 100)
    replay.add(*model.make(50))
    a, b = (replay.sample(np.random.default_rng(5), 2, 8, n_step=3) for _ in range(2))
    assert all((x == y).all() for x, y in zip(a[:5], b[:5], strict=True))


def test_memory_is_little_more_than_the_data() -> None:
    game = Game("humanoid", Box((44,)), Box((17,), low=-1.0, high=1.0))
    steps = 32  # as workers write it: the largest part of rows without a transition
    replay = Replay(game, (steps + 1) * 300)
    columns = Columns(np.zeros((steps + 1, 44), "<f4"), np.zeros((steps, 17), "<f4"), np.zeros(steps, "<f4"))
    replay.extend([columns] * 300, [False] * 300)
    raw = len(replay) * (44 + 17 + 1) * 4
    assert len(replay) == steps * 300
    assert sum(a.nbytes for a in (replay.obs, replay.action, replay.reward, replay.kind)) <= 1.1 * raw


SPACES: dict[str, tuple[Any, int]] = {  # space → bytes of an observation in the window
    "floats": (Box((3,)), 12),
    "doubles": (Box((3,), "float64"), 12),
    "bytes": (Box((128,), "uint8", low=0, high=255), 128),
    "switches": (Box((7,), "bool"), 7),
    "numbers": (Box((2, 2), "int64"), 16),
    "choice": (Discrete(500, start=-7), 4),
    "choices": (MultiDiscrete((3, 40)), 8),
    "image": (Box((8, 8, 3), "uint8", low=0, high=255), 192),
    "frames": (Box((4, 8, 8), "uint8", low=0, high=255), 256),
    "dict": (Dict({"a": Box((2,)), "b": Discrete(3)}), 20),
}


def some(space: Any, rng: np.random.Generator, n: int) -> Array:
    if isinstance(space, Dict):
        out = np.empty(n, space.element)
        for name, part in space.fields.items():
            out[name] = some(part, rng, n)
        return out
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, n).astype("<i4")
    if isinstance(space, MultiDiscrete):
        return rng.integers(0, space.nvec, (n, len(space.nvec))).astype("<i4")
    return rng.integers(0, 2 if space.dtype == "bool" else 200, (n, *space.shape)).astype(space.element.base)


@pytest.mark.parametrize("name", SPACES)
def test_observations_come_back_encoded_and_are_kept_small(name: str) -> None:
    space, size = SPACES[name]
    rng, game = np.random.default_rng(0), Game("g", space, Discrete(50))
    replay = Replay(game, 64)
    obs = some(space, rng, 51)
    encoded = replay.add(Columns(obs, np.arange(50, dtype="<i4"), np.zeros(50, "<f4")), False)
    expected = encode_obs(game, obs)
    assert encoded.dtype == expected.dtype
    assert (encoded == expected).all()
    assert replay.obs[0].nbytes == size
    batch = replay.sample(rng, 2, 20)
    assert batch.obs.shape == (2, 20, *expected.shape[1:])
    assert batch.obs.dtype == expected.dtype
    assert (batch.obs == expected[batch.action]).all()  # the action is the number of the step
    assert (batch.next_obs == expected[batch.action + 1]).all()


def test_rows_that_have_the_windows_form() -> None:
    model, replay, other = Model(20, 0), Replay(GAME, 20), Replay(GAME, 20)
    for _ in range(5):
        columns, terminated = model.make(6)
        replay.add(columns, terminated)
        kind = np.full(7, STEP, np.uint8)
        kind[-2:] = int(terminated), END
        rows = np.append(columns.action, 0).astype("<i4"), np.append(columns.reward, 0).astype("<f4")
        other.extend_rows(columns.obs, *rows, kind)
        check(other, model, 0.9, 3)
    a, b = (r.sample(np.random.default_rng(1), 2, 9) for r in (replay, other))
    assert all((x == y).all() for x, y in zip(a[:5], b[:5], strict=True))


def test_a_transition_without_what_it_led_to_is_refused() -> None:
    replay = Replay(GAME, 20)
    with pytest.raises(ValueError, match="no observation behind it"):
        replay.extend_rows(np.zeros((2, 2), "f4"), np.zeros(2, "i4"), np.zeros(2, "f4"), np.zeros(2, np.uint8))


def test_a_fragment_without_steps_is_refused() -> None:
    """It would end the fragment before it."""
    model, replay = Model(20, 0), Replay(GAME, 20)
    replay.add(*model.make(5))
    with pytest.raises(InputError, match="without steps"):
        replay.add(Columns(np.zeros((1, 2), "<f4"), np.zeros(0, "<i4"), np.zeros(0, "<f4")), True)
    check(replay, model, 0.9, 2)


def test_nothing_to_sample() -> None:
    with pytest.raises(InputError, match="empty"):
        Replay(GAME, 10).sample(np.random.default_rng(0), 1, 1)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(InputError, match="too small"):
        Replay(GAME, 1)
    with pytest.raises(InputError, match="lower `replay`"):
        Replay(Game("huge", Box((512, 512, 3), "uint8"), Discrete(2)), 1 << 40)


def test_actions_are_scaled_to_their_bounds() -> None:
    game = Game("g", Box((1,)), Box((2,), low=(-2.0, 0.0), high=(2.0, 10.0)))
    actions = np.array([[-2, 0], [0, 5], [2, 10], [1, 2.5]], "<f4")
    assert encode_action(game, actions) == pytest.approx(np.array([[-1, -1], [0, 0], [1, 1], [0.5, -0.5]]))
    unbounded = Game("g", Box((1,)), Box((2, 1)))
    assert (encode_action(unbounded, actions[..., None]) == actions).all()
    partly = Game("g", Box((1,)), Box((2,), low=(-1e308, -10.0), high=(1e308, 10.0)))
    assert encode_action(partly, actions) == pytest.approx(actions / [1, 10])
