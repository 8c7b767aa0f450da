"""Losses against their papers' equations, written once more with the policy's NumPy and plain loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_games import BOX, DISCRETE, Learning, anything, make, play

from sparring.algorithms.replay import Transitions
from sparring.experience.fragment import Columns
from sparring.games import Box, Discrete, Game
from sparring.games.spec import Array
from sparring.networks.policy import LOG_STD_RANGE, Policy
from sparring.networks.spec import QValues

PLACES = Game("places", Box((2,)), Discrete(3))


def shaken(params: Any, seed: int) -> Any:
    """With numbers that are all different from what they begin with."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + 0.3 * rng.standard_normal(np.shape(p)).astype("f4"), params)


def transitions(game: Game, size: int, seed: int = 0, n_action: int = 0) -> Transitions:
    rng = np.random.default_rng(seed)
    width = 2 if isinstance(game.observation, Box) else 4
    action = rng.integers(0, n_action, size) if n_action else rng.uniform(-1, 1, (size, 2)).astype("f4")
    return Transitions(
        obs=rng.standard_normal((size, width)).astype("f4"),
        action=action,
        reward=rng.standard_normal(size).astype("f4"),
        next_obs=rng.standard_normal((size, width)).astype("f4"),
        discount=np.where(rng.random(size) < 0.3, 0.0, 0.9).astype("f4"),
    )


def network(params: Any, prefix: str, x: Array) -> Array:
    """A hidden layer of relus and a head, in NumPy."""
    p = {name.removeprefix(prefix): np.asarray(array) for name, array in params.items() if name.startswith(prefix)}
    hidden = np.maximum(x @ p["torso.0.w"] + p["torso.0.b"], 0)
    return hidden @ p["head.w"] + p["head.b"]


def q_of(params: Any, batch_obs: Array, action: Array) -> Array:
    """(critics, batch)."""
    count = 1 + max(int(name.split(".")[1]) for name in params if name.startswith("critic."))
    x = np.concatenate([batch_obs, action], -1)
    return np.stack([network(params, f"critic.{i}.", x)[:, 0] for i in range(count)])


# DQN


@pytest.mark.parametrize("duelling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_dqn(double: bool, duelling: bool) -> None:
    dqn = make("dqn", PLACES, double=double, duelling=duelling)
    state = dqn.init(jax.random.key(0))
    params, target = shaken(state.params, 1), shaken(state.params, 2)
    b = transitions(PLACES, 50, n_action=3)

    def q(p: Any, obs: Array) -> Array:
        return Policy(PLACES, dqn.config.layers, QValues(duelling), {k: np.asarray(v) for k, v in p.items()}).outputs(
            obs
        )

    expected = []
    for i in range(50):
        now, after, after_target = (
            q(params, b.obs[[i]])[0],
            q(params, b.next_obs[[i]])[0],
            q(target, b.next_obs[[i]])[0],
        )
        value = after_target[after.argmax()] if double else after_target.max()
        expected.append(0.5 * (now[b.action[i]] - b.reward[i] - b.discount[i] * value) ** 2)
    loss, _ = jax.jit(dqn.loss)(params, target, b)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-4)
    single = dqn.loss(params, target, b._replace(discount=np.zeros(50, "f4")))[0]
    assert float(single) != pytest.approx(float(loss), rel=1e-2)


def test_dqn_learns_only_from_the_difference() -> None:
    """Its gradient is that of ½(Q − y)² with y as a number."""
    dqn = make("dqn", PLACES)
    params, target = (shaken(dqn.init(jax.random.key(0)).params, seed) for seed in (1, 2))
    b = transitions(PLACES, 20, n_action=3)
    following = dqn.q(target, b.next_obs)[jnp.arange(20), dqn.q(params, b.next_obs).argmax(-1)]
    y = np.asarray(b.reward + b.discount * following)

    def simple(params: Any) -> Any:
        return 0.5 * jnp.square(dqn.q(params, b.obs)[jnp.arange(20), b.action] - y).mean()

    ours, theirs = jax.grad(lambda p: dqn.loss(p, target, b)[0])(params), jax.grad(simple)(params)
    for name in params:
        assert np.asarray(ours[name]) == pytest.approx(np.asarray(theirs[name]), rel=1e-3, abs=1e-6)


def test_a_duelling_head_has_one_value_and_advantages_around_it() -> None:
    dqn = make("dqn", PLACES, duelling=True)
    params = shaken(dqn.init(jax.random.key(0)).params, 1)
    obs = transitions(PLACES, 10, n_action=3).obs
    hidden = np.maximum(obs @ np.asarray(params["torso.0.w"]) + np.asarray(params["torso.0.b"]), 0)
    value = hidden @ np.asarray(params["head.value.w"]) + np.asarray(params["head.value.b"])
    assert np.asarray(dqn.q(params, obs)).mean(-1) == pytest.approx(value[:, 0], abs=1e-4)


def test_n_steps_carry_a_far_reward_back_faster() -> None:
    """A corridor of eight places with a reward at its end: how far back its value has come after few updates."""
    game = Game("corridor", Discrete(9), Discrete(2))
    reach = {}
    for n_step in (1, 4):
        learning = Learning(make("dqn", game, n_step=n_step, tau=1.0, gamma=0.9, lr=1e-2))
        walk = Columns(np.arange(9, dtype="<i4"), np.ones(8, "<i4"), (np.arange(8) == 7).astype("<f4"))
        learning.take(([walk] * 20, [True] * 20))
        learning.update(50)
        q = learning.policy().outputs(np.arange(8, dtype="<i4"))[:, 1]
        reach[n_step] = float(q[:4].mean())
        learning.update(500)
        q = learning.policy().outputs(np.arange(8, dtype="<i4"))[:, 1]
        assert q == pytest.approx(0.9 ** np.arange(7, -1, -1), abs=0.1)  # both come to the truth
    assert reach[4] > 2 * reach[1]


# DDPG, TD3


def test_ddpg() -> None:
    ddpg = make("ddpg", BOX)
    state = shaken_state(ddpg)
    b = transitions(BOX, 40)
    action = np.tanh(network(state.target_actor, "", b.next_obs))
    y = b.reward + b.discount * q_of(state.target_critic, b.next_obs, action)[0]
    expected = np.square(q_of(state.critic, b.obs, b.action)[0] - y).mean()
    assert float(jax.jit(ddpg.critic_loss)(state.critic, state, b)[0]) == pytest.approx(expected, rel=1e-3)
    own = np.tanh(network(state.actor, "", b.obs))
    assert float(ddpg.actor_loss(state.actor, state, b)) == pytest.approx(
        -q_of(state.critic, b.obs, own).mean(), rel=1e-3
    )


def shaken_state(algorithm: Any) -> Any:
    state = algorithm.init(jax.random.key(0))
    parts = [k for k in state._fields if k in ("actor", "critic") or k.startswith("target")]
    return state._replace(**{k: shaken(getattr(state, k), i) for i, k in enumerate(parts)})


@pytest.mark.parametrize(("noise", "clip"), [(0.0, 0.5), (0.2, 0.0), (10.0, 0.1)])
def test_td3(noise: float, clip: float) -> None:
    td3 = make("td3", BOX, target_noise=noise, target_noise_clip=clip)
    state, b, key = shaken_state(td3), transitions(BOX, 40), jax.random.key(7)
    state.target_critic["critic.1.head.b"] += 1.2  # so that now the one, now the other critic has the smaller value
    action = np.tanh(network(state.target_actor, "", b.next_obs))
    drawn = np.clip(noise * np.asarray(jax.random.normal(key, action.shape)), -clip, clip)
    assert np.abs(drawn).max() == pytest.approx(clip if noise > 1 else 0.0)
    q = q_of(state.target_critic, b.next_obs, np.clip(action + drawn, -1, 1))
    y = b.reward + b.discount * q.min(0)
    expected = np.square(q_of(state.critic, b.obs, b.action) - y).mean(1).sum()
    assert float(jax.jit(td3.critic_loss)(state.critic, state, b, key)[0]) == pytest.approx(expected, rel=1e-3)
    assert (q[0] < q[1]).any()
    assert (q[0] > q[1]).any()


def test_td3s_actor_waits_for_its_critics() -> None:
    learning = Learning(make("td3", BOX, policy_delay=3))
    learning.take(play(BOX, anything(BOX, learning.rng), learning.rng, 2, 50))
    moved = []
    for _ in range(6):
        before = learning.state
        learning.update(1, fused=1)
        now = learning.state
        assert not (now.critic["critic.0.head.w"] == before.critic["critic.0.head.w"]).all()
        changed = [
            not (getattr(now, part)[name] == getattr(before, part)[name]).all()
            for part, name in (("actor", "head.w"), ("target_actor", "head.w"), ("target_critic", "critic.0.head.w"))
        ]
        assert len(set(changed)) == 1
        moved.append(changed[0])
    assert moved == [False, False, True, False, False, True]


# SAC


def test_sac() -> None:
    sac = make("sac", BOX)
    state, b, key = shaken_state(sac)._replace(log_temperature=jnp.log(0.5)), transitions(BOX, 40), jax.random.key(7)
    noise = np.asarray(jax.random.normal(key, (40, 2)))

    def act(obs: Array) -> tuple[Array, Array]:
        mean, log_std = np.split(network(state.actor, "", obs), 2, -1)
        log_std = np.clip(log_std, *LOG_STD_RANGE)
        u = mean + np.exp(log_std) * noise
        normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
        return np.tanh(u), (normal - np.log(1 - np.tanh(u) ** 2)).sum(-1)

    action, log_prob = act(b.next_obs)
    y = b.reward + b.discount * (q_of(state.target, b.next_obs, action).min(0) - 0.5 * log_prob)
    expected = 0.5 * np.square(q_of(state.critic, b.obs, b.action) - y).mean(1).sum()
    assert float(jax.jit(sac.critic_loss)(state.critic, state, b, key)[0]) == pytest.approx(expected, rel=1e-3)
    action, log_prob = act(b.obs)
    expected = (0.5 * log_prob - q_of(state.critic, b.obs, action).min(0)).mean()
    loss, mean_log_prob = jax.jit(sac.actor_loss)(state.actor, state, b, key)
    assert float(loss) == pytest.approx(expected, rel=1e-3)
    assert float(mean_log_prob) == pytest.approx(log_prob.mean(), rel=1e-3)


def test_sac_for_discrete_actions() -> None:
    sac = make("sac", PLACES)
    state, b, key = shaken_state(sac)._replace(log_temperature=jnp.log(0.5)), transitions(PLACES, 40, 0, 3), None

    def value(critic: Any, obs: Array) -> tuple[Array, Array]:
        """Σ π (min Q − α log π), and Σ π log π: row by row, action by action."""
        q, logits = [network(critic, f"critic.{i}.", obs) for i in range(2)], network(state.actor, "", obs)
        values, log_probs = np.zeros(40), np.zeros(40)
        for i in range(40):
            p = np.exp(logits[i]) / np.exp(logits[i]).sum()
            for a in range(3):
                values[i] += p[a] * (min(q[0][i, a], q[1][i, a]) - 0.5 * np.log(p[a]))
                log_probs[i] += p[a] * np.log(p[a])
        return values, log_probs

    y = b.reward + b.discount * value(state.target, b.next_obs)[0]
    errors = [network(state.critic, f"critic.{i}.", b.obs)[np.arange(40), b.action] - y for i in range(2)]
    loss, _ = sac.critic_loss(state.critic, state, b, key)
    assert float(loss) == pytest.approx(0.5 * np.square(errors).mean(1).sum(), rel=1e-3)
    values, log_probs = value(state.critic, b.obs)
    loss, mean_log_prob = sac.actor_loss(state.actor, state, b, key)
    assert float(loss) == pytest.approx(-values.mean(), rel=1e-3)
    assert float(mean_log_prob) == pytest.approx(log_probs.mean(), rel=1e-3)


def test_the_temperature_moves_towards_the_entropy_asked_for() -> None:
    """An entropy above its target needs no reward: the temperature falls. One below needs more."""
    sac = make("sac", BOX, target_entropy=-3.0)
    for entropy, direction in ((-1.0, -1), (-5.0, 1), (-3.0, 0)):
        step = -jax.grad(sac.temperature_loss)(jnp.log(0.1), jnp.float32(-entropy))
        assert np.sign(float(step)) == direction
    assert float(jax.grad(lambda log_prob: sac.temperature_loss(jnp.log(0.1), log_prob))(jnp.float32(1.0))) == 0


@pytest.mark.real
def test_a_temperature_may_stay() -> None:
    learning = Learning(make("sac", BOX, tune_temperature=False, temperature=0.3))
    learning.take(play(BOX, anything(BOX, learning.rng), learning.rng, 2, 50))
    learning.update(50)
    assert learning.metrics["policy/temperature"] == pytest.approx(0.3)


@pytest.mark.real
def test_the_entropy_comes_to_its_target() -> None:
    learning = Learning(make("sac", BOX))
    learning.take(play(BOX, anything(BOX, learning.rng), learning.rng, 20, 50))
    learning.update(2000)
    assert learning.metrics["policy/entropy"] == pytest.approx(-2.0, abs=0.5)


# Offline


def test_cql_does_not_trust_what_nobody_did() -> None:
    """Players only ever knew one action, and it hurt. Whether others hurt as well nobody knows; DQN is sure not."""
    chosen, gap = {}, {}
    for name in ("dqn", "cql"):
        learning = Learning(make(name, DISCRETE))
        obs = learning.rng.integers(1, 5, 401).astype("<i4")
        learning.take(([Columns(obs, np.full(400, 1, "<i4"), np.full(400, -1, "<f4"))], [True]))
        learning.update(500)
        all_places = np.arange(1, 5, dtype="<i4")
        chosen[name] = set(learning.policy().act(all_places)[0])
        q = learning.policy().outputs(all_places)
        gap[name] = q[:, 3] - q[:, :3].max(-1)
    assert 1 not in chosen["dqn"]
    assert chosen["cql"] == {1}
    assert (gap["cql"] > gap["dqn"] + 1).all()


@pytest.mark.real
def test_cql_values_recorded_actions_more_where_actions_are_numbers() -> None:
    values = {}
    for penalty in (0.0, 2.0):
        learning = Learning(make("cql", BOX, penalty=penalty))
        data, _ = play(BOX, lambda obs: np.full((len(obs), 2), [3.0, 3.0]), learning.rng, 10, 50)
        learning.take(([Columns(f.obs, f.action, np.full(50, -1, "<f4")) for f in data], [False] * 10))
        learning.update(500)
        obs = np.zeros((50, 2), "f4")
        recorded = q_of(learning.state.critic, obs, np.full((50, 2), 0.5, "f4"))
        others = q_of(learning.state.critic, obs, learning.rng.uniform(-1, 0, (50, 2)).astype("f4"))
        values[penalty] = recorded.mean() - others.mean()
    assert values[2.0] > values[0.0] + 1


def test_cqls_penalty_is_what_the_paper_writes() -> None:
    """With many samples the estimate comes to the integral, which is known where Q does not depend on the action."""
    cql = make("cql", BOX, samples=50)
    state, b = cql.init(jax.random.key(0)), transitions(BOX, 30)
    flat = {k: jnp.zeros_like(v) for k, v in state.critic.items()}
    metrics = jax.jit(cql.critic_loss)(flat, state._replace(actor=shaken(state.actor, 0)), b, jax.random.key(0))[1]
    # log ∫ exp 0 da over [−1, 1]² = log 4, for each of two critics.
    assert float(metrics["loss/conservative"]) == pytest.approx(2 * np.log(4), rel=0.05)


def test_iqls_value_is_an_expectile() -> None:
    """Two actions of two (so often is each taken) bring 1 and 0: the τ-expectile of that is τ."""
    game = Game("coin", Discrete(1), Discrete(2))
    learning = Learning(make("iql", game, expectile=0.9))
    action = learning.rng.integers(0, 2, 1000).astype("<i4")
    obs = np.zeros(2, "<i4")
    learning.take(([Columns(obs, action[[i]], action[[i]].astype("<f4")) for i in range(1000)], [True] * 1000))
    learning.update(1000)
    assert learning.metrics["value/mean"] == pytest.approx(0.9, abs=0.05)


@pytest.mark.real
def test_iql_without_preference_is_cloning() -> None:
    game = Game("coin", Discrete(1), Discrete(2))
    learning = Learning(make("iql", game, beta=0.0))
    action = (learning.rng.random(1000) < 0.2).astype("<i4")
    obs = np.zeros(2, "<i4")
    learning.take(([Columns(obs, action[[i]], action[[i]].astype("<f4")) for i in range(1000)], [True] * 1000))
    learning.update(500)
    policy = learning.policy()
    chosen = policy.act(np.zeros(4000, "<i4"), policy.noise(learning.rng, 4000))[0]
    assert chosen.mean() == pytest.approx(action.mean(), abs=0.05)


@pytest.mark.parametrize("name", ["bc", pytest.param("iql", marks=pytest.mark.real)])
def test_players_who_always_do_the_same_leave_a_policy_that_can_be_played(name: str) -> None:
    learning = Learning(make(name, BOX, lr=0.1))
    data, ended = play(BOX, lambda obs: np.full((len(obs), 2), [1.0, 2.0]), learning.rng, 4, 50)
    learning.take((data, ended))
    learning.update(500)
    policy = learning.policy()
    assert policy.problem() is None
    assert (policy.params["head.log_std"] >= LOG_STD_RANGE[0]).all()
    assert policy.act(data[0].obs)[0] == pytest.approx(np.full((51, 2), [1.0, 2.0]), abs=0.3)
