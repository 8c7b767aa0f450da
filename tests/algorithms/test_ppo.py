"""PPO: its targets against brute force, its probabilities against the policy that acts, tiny games that it solves."""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

from sparring import algorithms
from sparring.algorithms.ppo import PPO, Config, EpochRows, adapt, prepare, scale_rewards, shuffle, vtrace
from sparring.algorithms.replay import encode_obs
from sparring.algorithms.trajectories import Trajectories, from_fragments
from sparring.errors import InputError
from sparring.experience.fragment import Columns
from sparring.export.onnx import render
from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.games.spec import Array
from sparring.networks.distributions import log_normal_cdf, log_prob_and_entropy
from sparring.networks.functions import normalise
from sparring.networks.policy import Policy
from sparring.networks.spec import Conv, Dense
from sparring.runs.checkpoint import flatten

SMALL = (Dense(16, "tanh"),)
NORMALISER = {"normaliser.mean": np.float32([0.1, -0.2, 0.3]), "normaliser.std": np.float32([0.9, 1.1, 1.3])}
ACTIONS: dict[str, Any] = {
    "discrete": Discrete(4, start=-2),
    "multi_discrete": MultiDiscrete((3, 1, 4)),
    "box": Box((3,), low=(-1.0, 0.3, -2.0), high=(2.0, 1 / 3, 1.0)),
    "float64": Box((2, 2), "float64", low=-0.1, high=0.7),
    "half": Box((3,), low=(0.0, -1e308, -1.0), high=(1e308, 0.5, 1.0)),
    "unbounded": Box((2,)),
}


@cache
def algorithm(game_json: bytes, **options: Any) -> PPO:
    """One for all tests that want the same: its update is compiled once."""
    return PPO(Game.from_json(game_json), Config(**options))


def make(game: Game, **options: Any) -> tuple[PPO, Any]:
    options = {"layers": SMALL, "steps": 256, "minibatch": 32, "epochs": 2} | options
    ppo = algorithm(game.to_json(), **options)
    return ppo, ppo.init(jax.random.key(0))


evaluate = jax.jit(PPO.evaluate, static_argnums=0)
prepared = jax.jit(prepare, static_argnums=0)


def shaken(state: Any, seed: int = 0, scale: float = 0.3) -> Any:
    """With a policy that prefers some actions, unlike a fresh one."""
    rng = np.random.default_rng(seed)
    return state._replace(
        params={k: p + scale * rng.standard_normal(p.shape).astype("f4") for k, p in state.params.items()}
    )


def play(policy: Policy, episodes: int, steps: int, seed: int = 0) -> tuple[list[Columns], list[bool]]:
    """Noise as observations, noise as rewards."""
    rng, game = np.random.default_rng(seed), policy.game
    fragments, terminated = [], []
    for _ in range(episodes):
        n = int(rng.integers(1, 2 * steps))
        obs = rng.standard_normal((n + 1, 3)).astype("f4")
        action, log_prob = policy.act(obs[:-1], policy.noise(rng, n))
        fragments.append(Columns(obs, action.astype(game.action.element.base), rng.standard_normal(n, "f4"), log_prob))
        terminated.append(bool(rng.random() < 0.5))
    return fragments, terminated


def trajectories(ppo: PPO, state: Any, seed: int = 0, normaliser: dict[str, Array] = NORMALISER) -> Trajectories:
    return from_fragments(ppo.game, *play(ppo.policy(state, normaliser, 0.0), 20, 12, seed), steps=256, length=32)


def session(policy: Policy) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that `noise` can be overridden, which is meant
    return onnxruntime.InferenceSession(render(policy), options, providers=["CPUExecutionProvider"])


def same(a: Any, b: Any) -> bool:
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


# Learning


class Identity:
    """Name what you see: 1 for each right part, or less the further a number is off. Episodes of two steps."""

    def __init__(self, action: Any) -> None:
        self.size = 3 if isinstance(action, MultiDiscrete) else 1
        self.game = Game("identity", Box((self.size,)), action)

    def reward(self, obs: Array, action: Array) -> Array:
        action = action.reshape(len(action), -1)
        if isinstance(self.game.action, Box):
            return -np.square(action - obs).sum(-1)
        return (action == obs).sum(-1).astype("f4")

    def observe(self, rng: np.random.Generator, n: int) -> Array:
        if isinstance(self.game.action, Box):
            return rng.uniform(-1, 3, (n, 1)).astype("f4")
        return rng.integers(0, 3, (n, self.size)).astype("f4")

    def fragments(self, policy: Policy, rng: np.random.Generator, episodes: int) -> list[Columns]:
        obs = self.observe(rng, 3 * episodes).reshape(episodes, 3, -1)
        flat = obs[:, :2].reshape(2 * episodes, -1)
        action, log_prob = policy.act(flat, policy.noise(rng, len(flat)))
        assert log_prob is not None
        reward = self.reward(flat, action).astype("f4")
        pairs = [slice(2 * i, 2 * i + 2) for i in range(episodes)]
        return [Columns(obs[i], action[at], reward[at], log_prob[at]) for i, at in enumerate(pairs)]

    def score(self, policy: Policy) -> float:
        obs = self.observe(np.random.default_rng(99), 500)
        return float(self.reward(obs, policy.act(obs)[0]).mean())


LEARNING: dict[str, Any] = {"lr": 4e-3, "steps": 512, "minibatch": 64, "epochs": 5, "gamma": 0.5}
IDENTITIES: dict[str, tuple[Any, float]] = {
    "discrete": (Discrete(3), 0.99),
    "multi_discrete": (MultiDiscrete((3, 3, 3)), 2.95),
    "continuous": (Box((1,), low=-1.0, high=3.0), -0.02),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_learns_identity(name: str) -> None:
    action, goal = IDENTITIES[name]
    identity, rng = Identity(action), np.random.default_rng(0)
    ppo, state = make(identity.game, **LEARNING)
    for _ in range(40):
        fragments = identity.fragments(ppo.policy(state, {}, 0.0), rng, 256)
        state, _ = ppo.update(state, {}, from_fragments(identity.game, fragments, [True] * 256, steps=512))
    assert identity.score(ppo.policy(state, {}, 0.0)) >= goal


@pytest.mark.parametrize("name", IDENTITIES)
def test_learns_identity_from_an_older_policy(name: str) -> None:
    """The store's case at its worst: all play is by the first version, which knows nothing."""
    action, _ = IDENTITIES[name]
    identity, rng = Identity(action), np.random.default_rng(1)
    ppo, state = make(identity.game, **LEARNING)
    first = ppo.policy(state, {}, 0.0)
    before = identity.score(first)
    for _ in range(30):
        data = from_fragments(identity.game, identity.fragments(first, rng, 256), [True] * 256, steps=512)
        state, metrics = ppo.update(state, {}, data)
    assert metrics["policy/staleness"] > 0.05
    best = 0.0 if name == "continuous" else float(identity.size)
    assert identity.score(ppo.policy(state, {}, 0.0)) > best - 0.15 * (best - before)


# Targets


def random_segments(seed: int, segments: int = 5, length: int = 9) -> tuple[Trajectories, Array, Array]:
    rng = np.random.default_rng(seed)
    ended = rng.random((segments, length)) < 0.25
    ended[:, -1] = True
    mask = np.ones((segments, length), bool)
    mask[:, 1:] = ~(ended[:, :-1] & (rng.random((segments, length - 1)) < 0.5))  # a row without a step behind some ends
    ended &= mask
    data = Trajectories(
        obs=None,
        action=None,
        reward=rng.standard_normal((segments, length)).astype("f4"),
        terminated=ended & (rng.random(ended.shape) < 0.5),
        ended=ended,
        log_prob=None,
        mask=mask,
    )
    value = rng.standard_normal((segments, length + 1)).astype("f4")
    return data, value, (0.7 * rng.standard_normal((segments, length))).astype("f4")


def brute_force(
    data: Trajectories, value: Array, log_ratio: Array, gamma: float, lam: float, most: float
) -> tuple[Array, Array]:
    """Espeholt et al. 2018, eq. 1, as it is written: a sum over all later steps of products of all traces between."""
    segments, length = data.mask.shape
    ratio = np.minimum(np.exp(log_ratio), most)

    def delta(s: int, t: int) -> float:
        return data.reward[s, t] + gamma * (not data.terminated[s, t]) * value[s, t + 1] - value[s, t]

    def target(s: int, start: int) -> float:
        total, trace = value[s, start], 1.0
        for t in range(start, length):
            total += trace * ratio[s, t] * delta(s, t)
            if data.ended[s, t]:
                break
            trace *= gamma * lam * ratio[s, t]
        return total

    targets, advantages = np.zeros((segments, length)), np.zeros((segments, length))
    for s, t in np.argwhere(data.mask):
        targets[s, t] = target(s, t)
        later = 0.0 if data.ended[s, t] else target(s, t + 1) - value[s, t + 1]
        advantages[s, t] = delta(s, t) + gamma * lam * later
    return targets, advantages


@pytest.mark.parametrize("seed", range(6))
def test_vtrace_is_what_the_paper_writes(seed: int) -> None:
    data, value, log_ratio = random_segments(seed)
    most = (0.8, 1.0, 2.5)[seed % 3]
    found = vtrace(data, jnp.asarray(value), jnp.asarray(log_ratio), 0.9, 0.8, most)
    for mine, reference in zip(found, brute_force(data, value, log_ratio, 0.9, 0.8, most), strict=True):
        np.testing.assert_allclose(np.where(data.mask, mine, 0), np.where(data.mask, reference, 0), atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_it_is_generalised_advantage_estimation(seed: int) -> None:
    data, value, _ = random_segments(seed)
    gamma, lam = 0.97, 0.9
    target, advantage = vtrace(data, jnp.asarray(value), jnp.zeros_like(data.reward), gamma, lam, 1.0)
    for s in range(len(value)):
        gae = 0.0
        for t in reversed(range(data.mask.shape[1])):
            if not data.mask[s, t]:
                continue
            following = 0.0 if data.terminated[s, t] else value[s, t + 1]
            gae = data.reward[s, t] + gamma * following - value[s, t] + gamma * lam * (not data.ended[s, t]) * gae
            assert advantage[s, t] == pytest.approx(gae, abs=1e-5)
            assert target[s, t] == pytest.approx(gae + value[s, t], abs=1e-5)


def test_terminated_is_not_truncated() -> None:
    """Two ways to end after a reward of 1; the state beyond is worth 5 unless it is terminal."""
    no = np.zeros((2, 1), bool)
    data = Trajectories(None, None, np.ones((2, 1), "f4"), no ^ [[True], [False]], ~no, None, ~no)
    target, advantage = vtrace(data, jnp.float32([[2, 5], [2, 5]]), jnp.zeros((2, 1)), 0.9, 0.95, 1.0)
    np.testing.assert_allclose(target, [[1.0], [5.5]])
    np.testing.assert_allclose(advantage, [[-1.0], [3.5]])


# Probabilities


@pytest.mark.parametrize("name", ACTIONS)
def test_fresh_play_has_a_ratio_of_one(name: str) -> None:
    """As NumPy's policy recorded it, and as ONNX Runtime would have; clipped actions among it."""
    game = Game("g", Box((3,)), ACTIONS[name])
    ppo, state = make(game)
    state = shaken(state)
    policy = ppo.policy(state, NORMALISER, 0.0)
    fragments, terminated = play(policy, 20, 12)
    data = from_fragments(game, fragments, terminated, steps=256, length=32)
    if name in ("box", "float64", "half"):
        assert 0.1 < (np.abs(data.action[data.mask]) == 1).mean() < 0.9
    learner, _ = evaluate(ppo, state.params, data._replace(obs=normalise(NORMALISER, data.obs)))
    np.testing.assert_allclose(np.asarray(learner)[data.mask], data.log_prob[data.mask], atol=2e-4)

    obs = np.concatenate([f.obs[:-1] for f in fragments])
    noise = policy.noise(np.random.default_rng(5), len(obs))
    sampled, log_prob = session(policy).run(["sampled", "log_prob"], {"obs": obs, "noise": noise})
    columns = Columns(obs[[*range(len(obs)), 0]], sampled, np.zeros(len(obs), "f4"), log_prob)
    data = from_fragments(game, [columns], [True], steps=256, length=32)
    learner, _ = evaluate(ppo, state.params, data._replace(obs=normalise(NORMALISER, data.obs)))
    np.testing.assert_allclose(np.asarray(learner)[data.mask], log_prob, atol=5e-4)


@pytest.mark.parametrize("name", ACTIONS)
def test_the_policy_is_the_learners_actor(name: str) -> None:
    game = Game("g", Box((3,)), ACTIONS[name])
    ppo, state = make(game)
    state = shaken(state)
    obs = np.random.default_rng(0).standard_normal((50, 3)).astype("f4") * 3
    policy = ppo.policy(state, NORMALISER, 0.0)
    out, _ = ppo.forward(state.params, normalise(NORMALISER, jnp.asarray(encode_obs(game, obs))))
    np.testing.assert_allclose(policy.outputs(obs), out, atol=1e-5)
    np.testing.assert_allclose(
        session(policy).run(["action"], {"obs": obs})[0], policy.act(obs)[0], rtol=1e-4, atol=1e-5
    )


def test_a_clipped_gaussian_is_a_distribution() -> None:
    """Mass on the bounds and density between add up to 1, so its score is 0 on average: the gradient has no bias."""
    game = Game("g", Box((3,)), Box((1,), low=-1.0, high=1.0))
    inside = np.linspace(-1, 1, 20_003, dtype=np.float32)
    action = jnp.asarray(inside)[:, None]

    def total(mean: jax.Array, log_std: jax.Array) -> jax.Array:
        out = jnp.broadcast_to(mean, action.shape)
        prob = jnp.exp(log_prob_and_entropy(game, {"head.log_std": log_std[None]}, out, action)[0])
        return prob[0] + prob[-1] + prob[1:-1].sum() * (inside[1] - inside[0])

    with_slopes = jax.jit(jax.value_and_grad(total, (0, 1)))
    for mean, log_std in ((0.0, 0.0), (0.9, -1.0), (-3.0, 0.5), (0.3, 2.0)):
        one, slopes = with_slopes(jnp.float32(mean), jnp.float32(log_std))
        assert one == pytest.approx(1, abs=1e-3)
        np.testing.assert_allclose(slopes, 0, atol=2e-3)


def test_log_normal_cdf_is_right_far_into_both_tails() -> None:
    x = np.linspace(-35, 12, 2001)
    expected = [
        math.log(0.5 * math.erfc(-v / 2**0.5)) if v < 0 else math.log1p(-0.5 * math.erfc(v / 2**0.5)) for v in x
    ]
    np.testing.assert_allclose(jax.jit(log_normal_cdf)(jnp.float32(x)), expected, rtol=1e-5, atol=1e-6)
    slope = jax.jit(jax.vmap(jax.grad(log_normal_cdf)))(jnp.float32([-1e4, -50, 0.5, 8]))
    np.testing.assert_allclose(slope, [1e4, 50.02, 0.50916, 0], rtol=1e-4, atol=1e-6)
    far = jnp.float32([-3e38, -1e9, 1e9, 3e38])
    assert np.isfinite(log_normal_cdf(far)).all()


def test_entropies() -> None:
    game = Game("g", Box((3,)), MultiDiscrete((2, 4)))
    _, entropy = log_prob_and_entropy(game, {}, jnp.zeros((1, 6)), jnp.zeros((1, 2), jnp.int32))
    assert entropy[0] == pytest.approx(np.log(2) + np.log(4))
    game = Game("g", Box((3,)), Box((2,)))
    _, entropy = log_prob_and_entropy(game, {"head.log_std": jnp.float32([0, 1])}, jnp.zeros((1, 2)), jnp.zeros((1, 2)))
    assert entropy[0] == pytest.approx(np.log(2 * np.pi * np.e) + 1, abs=1e-5)


# Updates


def test_what_is_behind_the_mask_does_not_matter() -> None:
    game = Game("g", Box((3,)), ACTIONS["box"])
    ppo, state = make(game)
    data = trajectories(ppo, state)
    assert 0.2 < data.mask.mean() < 0.95
    expected, metrics = ppo.update(state, NORMALISER, data)
    unseen = ~data.mask
    obs = data.obs.copy()
    after = np.zeros(obs.shape[:2], bool)
    after[:, :-1] |= data.mask
    after[:, 1:] |= data.mask
    obs[~after] = np.nan
    action, reward, log_prob = (np.array(x) for x in (data.action, data.reward, data.log_prob))
    action[unseen], reward[unseen], log_prob[unseen] = np.nan, np.inf, 1e9
    found, again = ppo.update(
        state, NORMALISER, data._replace(obs=obs, action=action, reward=reward, log_prob=log_prob)
    )
    assert same(expected, found)
    assert same(metrics, again)
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_step_that_counts_does_matter() -> None:
    """Else the test above could not fail."""
    ppo, state = make(Game("g", Box((3,)), ACTIONS["box"]))
    data = trajectories(ppo, state)
    reward = data.reward.copy()
    reward[tuple(np.argwhere(data.mask)[3])] += 1
    before, _ = ppo.update(state, NORMALISER, data)
    assert not same(before.params, ppo.update(state, NORMALISER, data._replace(reward=reward))[0].params)


def test_same_seed_same_result() -> None:
    ppo, state = make(Game("g", Box((3,)), Discrete(4)))
    data = trajectories(ppo, state)
    results = []
    for seed in (0, 0, 1):
        found = state._replace(key=jax.random.key_data(jax.random.key(seed)))
        for _ in range(2):
            found, metrics = ppo.update(found, NORMALISER, data)
        results.append(found)
    assert metrics["policy/epochs"] == 2
    assert results[0].updates == 2
    assert same(results[0], results[1])
    assert not same(results[0].params, results[2].params)  # another order of the steps


def test_fresh_play_counts_fully() -> None:
    ppo, state = make(Game("g", Box((3,)), Discrete(4)))
    state = shaken(state)
    data = trajectories(ppo, state)
    _, rows, metrics = prepared(ppo, state, data._replace(obs=normalise(NORMALISER, data.obs)))
    np.testing.assert_allclose(rows.weight, 1, atol=2e-4)
    assert abs(metrics["policy/staleness"]) < 1e-6
    advantage = np.asarray(rows.advantage)[data.mask.ravel()]
    assert advantage.mean() == pytest.approx(0, abs=1e-5)
    assert advantage.std() == pytest.approx(1, abs=1e-3)
    stale = data._replace(log_prob=data.log_prob + 1)  # taken by a policy that liked these actions e times as much
    _, rows, metrics = prepared(ppo, state, stale._replace(obs=normalise(NORMALISER, data.obs)))
    np.testing.assert_allclose(np.asarray(rows.weight)[data.mask.ravel()], np.exp(-1), rtol=1e-3)
    assert metrics["policy/staleness"] == pytest.approx(np.exp(-1), rel=1e-3)


def test_shuffling_is_fair() -> None:
    """Every step once, before all that is none; each in every place about equally often."""
    mask = np.arange(11) % 3 > 0
    orders = jax.jit(jax.vmap(shuffle, (0, None)))(jax.random.split(jax.random.key(0), 3000), mask)
    steps = np.flatnonzero(mask)
    assert (np.sort(orders[:, : len(steps)], -1) == steps).all()
    assert (np.sort(orders, -1) == np.arange(11)).all()
    for place in range(len(steps)):
        share = np.bincount(orders[:, place], minlength=11)[steps] / 3000
        np.testing.assert_allclose(share, 1 / len(steps), atol=0.035)


def test_a_policy_keeps_its_numbers_while_the_learner_goes_on() -> None:
    ppo, state = make(Game("g", Box((3,)), Discrete(4)))
    data = trajectories(ppo, state)
    policy = ppo.policy(state, {}, 0.0)
    before = {name: array.copy() for name, array in policy.params.items()}
    state, _ = ppo.update(state, NORMALISER, data)
    assert all((policy.params[name] == array).all() for name, array in before.items())


CAREFUL: dict[str, Any] = {
    "epochs": 10,
    "target_kl": 0.01,
    **{"lr": 1e-2, "lr_final": 0.0, "clip": 0.3, "clip_final": 0.1, "schedule_steps": 1024},
}


def test_stops_when_the_policy_has_moved_enough() -> None:
    ppo, state = make(Game("g", Box((3,)), Discrete(4)), **CAREFUL)
    _, metrics = ppo.update(state, NORMALISER, trajectories(ppo, state))
    assert 0 < metrics["policy/epochs"] < 5


def test_schedules() -> None:
    ppo, state = make(Game("g", Box((3,)), Discrete(4)), **CAREFUL)
    np.testing.assert_allclose(ppo.scheduled(jnp.int32(0)), (1e-2, 0.3), rtol=1e-5)
    np.testing.assert_allclose(ppo.scheduled(jnp.int32(2)), (5e-3, 0.2), rtol=1e-5)
    np.testing.assert_allclose(ppo.scheduled(jnp.int32(50)), (0, 0.1), atol=1e-7)
    data = trajectories(ppo, state)
    late = state._replace(updates=jnp.int32(4))
    found, metrics = ppo.update(late, NORMALISER, data)
    assert same(found.params, state.params)
    assert metrics["policy/epochs"] == 10
    assert not same(ppo.update(state, NORMALISER, data)[0].params, state.params)


def test_rewards_are_scaled_by_all_of_them_so_far() -> None:
    scale = jax.jit(scale_rewards, static_argnums=2)
    ppo, state = make(Game("g", Box((3,)), Discrete(4)))
    returns, rewards = state.returns, []
    for seed in range(3):
        data = trajectories(ppo, state, seed)
        data = data._replace(reward=data.reward * (seed + 1))
        rewards.append(data.reward[data.mask])
        returns, scaled = scale(returns, data, 0.0)
        everything = np.concatenate(rewards)
        assert returns.steps == len(everything)
        assert returns.mean == pytest.approx(everything.mean(), abs=1e-4)
        assert returns.var == pytest.approx(everything.var(), rel=1e-4)
        np.testing.assert_allclose(np.asarray(scaled)[data.mask], rewards[-1] / everything.std(), rtol=1e-3)


def test_scaled_rewards_do_not_depend_on_their_unit() -> None:
    scale = jax.jit(scale_rewards, static_argnums=2)
    ppo, state = make(Game("g", Box((3,)), Discrete(4)))
    data = trajectories(ppo, state)
    one, thousand = (scale(state.returns, data._replace(reward=data.reward * unit), 0.9)[1] for unit in (1, 1000))
    np.testing.assert_allclose(one, thousand, rtol=1e-4, atol=1e-6)
    assert np.std(one) > 0.1


def test_value_clip_holds_values_back() -> None:
    """They moved by 0.2, 4.8 short of their target; only 0.1 of it counts."""
    game, losses = Game("g", Box((3,)), Discrete(4)), []
    for clip in (None, 0.1):
        ppo, state = make(game, value_clip=clip)
        obs = jnp.ones((2, 3))
        _, value = ppo.forward(state.params, obs)
        zero = jnp.zeros(2)
        rows = EpochRows(obs, jnp.zeros(2, jnp.int32), zero, value - 0.2, zero + 1, zero, value + 4.8)
        losses.append(float(ppo.loss(state.params, rows, jnp.float32(0.2))[1]["loss/value"]))
    assert losses == pytest.approx([0.5 * 4.8**2, 0.5 * 4.9**2], rel=1e-4)


def test_the_penalty_is_the_divergence_and_its_gradient() -> None:
    """Over all actions of an even policy, whose mean is the expectation."""
    ppo, state = make(Game("g", Box((3,)), Discrete(4)), entropy_coefficient=0.0)
    params, zero = shaken(state).params, jnp.zeros(4)
    rows = EpochRows(jnp.ones((4, 3)), jnp.arange(4), jnp.full(4, math.log(0.25)), zero, zero + 1, zero, zero)

    def exact(params: Any) -> jax.Array:
        out, _ = ppo.forward(params, rows.obs[:1])
        return -(math.log(4) + jax.nn.log_softmax(out)).mean()

    def penalty(params: Any) -> jax.Array:
        clip = jnp.float32(0.2)
        return ppo.loss(params, rows, clip, jnp.float32(3.0))[0] - ppo.loss(params, rows, clip)[0]

    assert float(exact(params)) > 0.01
    np.testing.assert_allclose(penalty(params), 3 * exact(params), rtol=1e-3)
    for name, grad in jax.grad(exact)(params).items():
        np.testing.assert_allclose(jax.grad(penalty)(params)[name], 3 * grad, atol=1e-5, err_msg=name)


def test_the_penalty_follows_how_far_the_policy_moves() -> None:
    assert [float(adapt(jnp.float32(0.2), jnp.float32(kl), 0.01)) for kl in (0.004, 0.01, 0.03)] == pytest.approx(
        [0.1, 0.2, 0.3]
    )
    game, moved = Game("g", Box((3,)), Discrete(4)), []
    for coefficient in (None, 0.01, 100.0):
        ppo, state = make(game, kl_coefficient=coefficient, epochs=8, lr=1e-2, clip=10.0)
        data = trajectories(ppo, state)
        found, metrics = ppo.update(state, NORMALISER, data)
        moved.append(float(metrics["policy/kl"]))
        if coefficient is None:  # checkpoints of runs without one are as ever
            assert not any("kl_coefficient" in name for name in flatten(state))
            assert "policy/kl_coefficient" not in metrics
        else:
            assert metrics["policy/kl_coefficient"] == np.float32(coefficient)
            factor = 1.5 if moved[-1] > 0.02 else 0.5 if moved[-1] < 0.005 else 1.0
            assert found.kl_coefficient == pytest.approx(factor * coefficient)
    assert moved[2] < 0.5 * moved[0]
    frozen, _ = ppo.update(state._replace(updates=jnp.int32(-2)), NORMALISER, data)
    assert frozen.kl_coefficient == 100  # nothing moves while the value network learns alone


def test_images_share_their_layers() -> None:
    """And a minibatch larger than what there is to learn from is filled all the same."""
    game = Game("g", Box((2, 9, 8), "uint8"), Discrete(3))
    ppo, state = make(game, layers=(Conv(4, 3, 2), Dense(8)), shared=True, steps=64, minibatch=48)
    assert sorted(k for k in state.params if k.startswith("critic.")) == ["critic.head.b", "critic.head.w"]
    rng, policy = np.random.default_rng(0), ppo.policy(state, {}, 0.0)
    obs = rng.integers(0, 256, (33, 2, 9, 8)).astype("u1")
    action, log_prob = policy.act(obs[:-1], policy.noise(rng, 32))
    data = from_fragments(
        game, [Columns(obs, action, rng.standard_normal(32, "f4"), log_prob)], [True], steps=32, length=36
    )
    assert data.obs.dtype == np.uint8
    found, metrics = ppo.update(state, {}, data)
    assert abs(metrics["policy/staleness"]) < 1e-6
    assert metrics["policy/epochs"] == 2
    assert not same(found.params["torso.0.w"], state.params["torso.0.w"])
    assert all(np.isfinite(p).all() for p in found.params.values())
    with pytest.raises(InputError, match="no step"):
        ppo.update(state, {}, data._replace(mask=np.zeros_like(data.mask)))


def test_own_layers_for_the_value() -> None:
    _, state = make(Game("g", Box((3,)), Discrete(4)), critic_layers=(Dense(5), Dense(6)))
    assert state.params["critic.head.w"].shape == (6, 1)
    assert state.params["head.w"].shape == (16, 4)


def test_wrong_hyperparameters() -> None:
    game = Game("g", Box((3,)), Discrete(4))
    with pytest.raises(InputError, match="minibatch of 512 is larger than the 256 steps"):
        algorithms.create("ppo", game, {"steps": 256, "minibatch": 512})
    with pytest.raises(InputError, match="critic_layers"):
        algorithms.create("ppo", game, {"shared": True, "critic_layers": [{"layer": "dense", "units": 4}]})
    with pytest.raises(InputError, match=r"unknown key algorithm\.clipp: did you mean algorithm\.clip\?"):
        algorithms.create("ppo", game, {"clipp": 0.1})
    with pytest.raises(InputError, match=r"algorithm\.lam: expected"):
        algorithms.create("ppo", game, {"lam": 1.5})
