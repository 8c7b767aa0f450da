"""Off-policy updates beside bare handwritten `lax.scan`s of the same losses, interleaved: what everything around them
costs (normalisation, metrics, twin critics by name). And what the other algorithms and the replay window cost.

    python benchmarks/off_policy.py --rounds 9

HumanoidBullet's sizes: 44 observations, 17 actions, 256-256, batches of 256, 16 updates per call. CPU time, because
other work on the machine does not count in it; medians.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparring import algorithms
from sparring.algorithms.replay import Replay, Transitions
from sparring.experience.fragment import Columns
from sparring.games import Box, Game

GAME = Game("humanoid", Box((44,)), Box((17,), low=-1.0, high=1.0))
WIDTH, BATCH, FUSED = 256, 256, 16
GAMMA, TAU, LR, CRITIC_LR = 0.99, 0.005, 3e-4, 1e-3
Layers = list[tuple[jax.Array, jax.Array]]


def network(key: jax.Array, sizes: list[int]) -> Layers:
    keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes, sizes[1:], strict=False)
    return [(jax.random.normal(k, (a, b)) * a**-0.5, jnp.zeros(b)) for k, a, b in pairs]


def forward(layers: Layers, x: jax.Array) -> jax.Array:
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ layers[-1][0] + layers[-1][1]


def q_of(critic: list[Layers], obs: jax.Array, action: jax.Array) -> list[jax.Array]:
    x = jnp.concatenate([obs, action], -1)
    return [forward(one, x)[:, 0] for one in critic]


def act(actor: Layers, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, log_std = jnp.split(forward(actor, obs), 2, -1)
    log_std = jnp.clip(log_std, -5, 2)
    noise = jax.random.normal(key, mean.shape)
    u = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.919 - 2 * (0.693 - u - jax.nn.softplus(-2 * u))
    return jnp.tanh(u), log_prob.sum(-1)


def follow(new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: TAU * n + (1 - TAU) * o, new, old)


def bare_sac() -> tuple[Any, Callable[[Any, Transitions], Any]]:
    actor_adam, critic_adam = optax.adam(LR), optax.adam(CRITIC_LR)
    keys = jax.random.split(jax.random.key(0), 3)
    actor = network(keys[0], [44, WIDTH, WIDTH, 34])
    critic = [network(k, [61, WIDTH, WIDTH, 1]) for k in keys[1:]]
    log_alpha = jnp.zeros(())
    optimisers = actor_adam.init(actor), critic_adam.init(critic), actor_adam.init(log_alpha)

    def step(state: Any, b: Transitions) -> tuple[Any, None]:
        actor, critic, target, log_alpha, (a_opt, c_opt, t_opt), key = state
        key, k1, k2 = jax.random.split(key, 3)
        alpha = jnp.exp(log_alpha)
        a2, lp2 = act(actor, b.next_obs, k1)
        y = b.reward + b.discount * (jnp.minimum(*q_of(target, b.next_obs, a2)) - alpha * lp2)
        grads = jax.grad(lambda c: sum(0.5 * jnp.square(q - y).mean() for q in q_of(c, b.obs, b.action)))(critic)
        change, c_opt = critic_adam.update(grads, c_opt)
        critic = optax.apply_updates(critic, change)

        def actor_loss(actor: Layers) -> tuple[jax.Array, jax.Array]:
            a, lp = act(actor, b.obs, k2)
            return (alpha * lp - jnp.minimum(*q_of(critic, b.obs, a))).mean(), lp.mean()

        grads, log_prob = jax.grad(actor_loss, has_aux=True)(actor)
        change, a_opt = actor_adam.update(grads, a_opt)
        actor = optax.apply_updates(actor, change)
        change, t_opt = actor_adam.update(-(log_prob - 17.0), t_opt)
        state = actor, critic, follow(critic, target), log_alpha + change, (a_opt, c_opt, t_opt), key
        return state, None

    update = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches)[0])
    return (actor, critic, critic, log_alpha, optimisers, jax.random.key(1)), update


def bare_td3() -> tuple[Any, Callable[[Any, Transitions], Any]]:
    adam = optax.adam(CRITIC_LR)
    keys = jax.random.split(jax.random.key(0), 3)
    actor = network(keys[0], [44, WIDTH, WIDTH, 17])
    critic = [network(k, [61, WIDTH, WIDTH, 1]) for k in keys[1:]]

    def learn_actor(state: Any, b: Transitions) -> Any:
        actor, critic, target_actor, target, (a_opt, c_opt), key, n = state
        grads = jax.grad(lambda a: -q_of(critic[:1], b.obs, jnp.tanh(forward(a, b.obs)))[0].mean())(actor)
        change, a_opt = adam.update(grads, a_opt)
        actor = optax.apply_updates(actor, change)
        return actor, critic, follow(actor, target_actor), follow(critic, target), (a_opt, c_opt), key, n

    def step(state: Any, b: Transitions) -> tuple[Any, None]:
        actor, critic, target_actor, target, (a_opt, c_opt), key, n = state
        key, k1 = jax.random.split(key)
        a2 = jnp.tanh(forward(target_actor, b.next_obs))
        a2 = jnp.clip(a2 + jnp.clip(0.2 * jax.random.normal(k1, a2.shape), -0.5, 0.5), -1, 1)
        y = b.reward + b.discount * jnp.minimum(*q_of(target, b.next_obs, a2))
        grads = jax.grad(lambda c: sum(jnp.square(q - y).mean() for q in q_of(c, b.obs, b.action)))(critic)
        change, c_opt = adam.update(grads, c_opt)
        state = actor, optax.apply_updates(critic, change), target_actor, target, (a_opt, c_opt), key, n + 1
        return jax.lax.cond(n % 2 == 1, lambda: learn_actor(state, b), lambda: state), None

    update = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches)[0])
    optimisers = adam.init(actor), adam.init(critic)
    return (actor, critic, actor, critic, optimisers, jax.random.key(1), jnp.zeros((), jnp.int32)), update


def ours(name: str, **config: Any) -> Callable[[Transitions], Any]:
    algorithm = algorithms.create(name, GAME, config)
    state = algorithm.init(jax.random.key(0))
    normaliser = {"normaliser.mean": np.zeros(44, "f4"), "normaliser.std": np.ones(44, "f4")}
    return lambda batches: algorithm.update(state, normaliser, batches)[0]


def window(rows: int) -> Replay:
    """Full, of episodes of 1,000 steps."""
    rng, replay = np.random.default_rng(0), Replay(GAME, rows)
    for _ in range(rows // 1001 + 1):
        obs, action = rng.standard_normal((1001, 44), "f4"), rng.uniform(-1, 1, (1000, 17)).astype("f4")
        replay.add(Columns(obs, action, rng.standard_normal(1000, "f4")), False)
    return replay


def cpu_ms(call: Callable[[], Any]) -> float:
    """Per update."""
    began = time.process_time()
    jax.block_until_ready(call())
    return (time.process_time() - began) / FUSED * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--window", type=int, default=1_000_000, help="rows of the replay window")
    args = parser.parse_args()
    replay, rng = window(args.window), np.random.default_rng(0)
    batches = jax.device_put(replay.sample(rng, FUSED, BATCH))
    bare = {"sac": bare_sac(), "td3": bare_td3()}
    calls: dict[str, Callable[[], Any]] = {}
    for name, (state, update) in bare.items():
        calls[f"{name}, bare scan"] = partial(update, state, batches)
        calls[name] = partial(ours(name), batches)
    calls |= {name: partial(ours(name), batches) for name in ("ddpg", "bc", "iql", "cql")}
    calls["cql, samples: 10"] = partial(ours("cql", samples=10), batches)
    calls[f"sampling from {args.window:,} rows"] = lambda: replay.sample(rng, FUSED, BATCH).reward
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(args.rounds):
        for name, call in calls.items():
            times[name].append(cpu_ms(call))
    print("| | ms of CPU per update | bare scan / ours |\n|---|---|---|")
    for name, each in times.items():
        pairs = zip(times[f"{name}, bare scan"], each, strict=True) if name in bare else []
        ratio = f"{np.median([b / o for b, o in pairs]):.2f}" if name in bare else ""
        print(f"| {name} | {np.median(each):.2f} | {ratio} |")


if __name__ == "__main__":
    main()
