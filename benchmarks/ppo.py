"""PPO's update beside a bare handwritten `lax.scan` of the same losses, interleaved: what everything around them costs
(V-trace, clipped Gaussians, masks, metrics, KL).

    python benchmarks/ppo.py --rounds 9

The bare one has the plain Gaussian density, GAE, and data of exactly one shape. With `--pong` instead: an epoch of
the Nature network on Atari's frames, beside the same with `lax.conv` for every convolution.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparring.algorithms.ppo import PPO, Config
from sparring.algorithms.trajectories import Trajectories
from sparring.games import Box, Discrete, Game
from sparring.networks.spec import Conv, Dense


class Case(NamedTuple):
    name: str
    game: Game
    segments: int
    config: Config


CASES = (
    Case(
        "HumanoidBullet: 4000 steps, minibatch 250, 44 → 256-256 → 17",
        Game("humanoid", Box((44,)), Box((17,), low=-1.0, high=1.0)),
        2,
        Config(steps=4000, minibatch=250, layers=(Dense(256, "tanh"), Dense(256, "tanh"))),
    ),
    Case("CartPole: 2048 steps, minibatch 64, 4 → 64-64 → 2", Game("cartpole", Box((4,)), Discrete(2)), 8, Config()),
)

NATURE = Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3), Dense(512)
PONG = Case(
    "Pong: 1024 steps, minibatch 256, one epoch, 84×84×4 → Nature network → 6",
    Game("pong", Box((84, 84, 4), "uint8"), Discrete(6)),
    8,
    Config(steps=1024, minibatch=256, epochs=1, lr=2.5e-4, clip=0.1, layers=NATURE, shared=True),
)


def experience(case: Case) -> Trajectories:
    rng = np.random.default_rng(0)
    shape = case.segments, case.config.steps // case.segments
    action = case.game.action
    taken = (
        rng.uniform(-1, 1, (*shape, *action.shape)).astype("f4")
        if isinstance(action, Box)
        else rng.integers(0, 2, shape).astype("i4")
    )
    ended = np.zeros(shape, bool)
    ended[:, 49::50] = ended[:, -1] = True
    seen = shape[0], shape[1] + 1, *case.game.observation.element.shape
    image = case.game.observation.element.base == "u1"
    obs = rng.integers(0, 256, seen, "u1") if image else rng.standard_normal(seen).astype("f4")
    reward = rng.standard_normal(shape).astype("f4")
    return Trajectories(obs, taken, reward, ended, ended, np.full(shape, -1, "f4"), np.ones(shape, bool))


def bare_network(params: Any, prefix: str, x: jax.Array) -> jax.Array:
    for i in range(2):
        x = jnp.tanh(x @ params[f"{prefix}torso.{i}.w"] + params[f"{prefix}torso.{i}.b"])
    return x @ params[f"{prefix}head.w"] + params[f"{prefix}head.b"]


def bare_advantages(case: Case, data: Trajectories, value: jax.Array) -> jax.Array:
    c, going = case.config, 1.0 - data.ended
    delta = data.reward + c.gamma * going * value[:, 1:] - value[:, :-1]

    def back(later: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
        total = step[0] + c.gamma * c.lam * step[1] * later
        return total, total

    return jax.lax.scan(back, jnp.zeros(case.segments), (delta.T, going.T), reverse=True)[1].T


def bare(case: Case) -> Callable[[Any, Trajectories, jax.Array], Any]:
    """What one would write for exactly this case."""
    c, continuous = case.config, isinstance(case.game.action, Box)
    optimiser = optax.chain(optax.clip_by_global_norm(c.max_grad_norm), optax.adam(c.lr, eps=1e-5))
    entropy_weight = 0.0 if continuous else 0.01

    def density(params: Any, obs: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = bare_network(params, "", obs)
        if continuous:
            log_std = params["head.log_std"]
            z = (action - out) * jnp.exp(-log_std)
            return (-0.5 * z * z - log_std - 0.919).sum(-1), log_std.sum()
        log_probs = jax.nn.log_softmax(out)
        return (log_probs * jax.nn.one_hot(action, 2)).sum(-1), -(jnp.exp(log_probs) * log_probs).sum(-1).mean()

    def loss(params: Any, batch: Any) -> jax.Array:
        obs, action, before, advantage, target = batch
        log_prob, entropy = density(params, obs, action)
        ratio = jnp.exp(log_prob - before)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - c.clip, 1 + c.clip) * advantage).mean()
        error = jnp.square(bare_network(params, "critic.", obs)[:, 0] - target).mean()
        return -gain + 0.25 * error - entropy_weight * entropy

    def learn(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        change, state = optimiser.update(jax.grad(loss)(params, batch), state)
        return (optax.apply_updates(params, change), state), None

    @jax.jit
    def update(params: Any, data: Trajectories, key: jax.Array) -> Any:
        value = bare_network(params, "critic.", data.obs)[..., 0]
        before, _ = density(params, data.obs[:, :-1], data.action)
        advantage = bare_advantages(case, data, value)
        target = advantage + value[:, :-1]
        advantage = (advantage - advantage.mean()) / advantage.std()
        rows = [x.reshape(-1, *x.shape[2:]) for x in (data.obs[:, :-1], data.action, before, advantage, target)]

        def epoch(carry: Any, key: jax.Array) -> tuple[Any, None]:
            order = jax.random.permutation(key, c.steps)
            size = c.steps // c.minibatch
            return jax.lax.scan(learn, carry, [x[order].reshape(size, -1, *x.shape[1:]) for x in rows])[0], None

        return jax.lax.scan(epoch, (params, optimiser.init(params)), jax.random.split(key, c.epochs))[0]

    return update


def with_lax_conv(ppo: PPO, *args: Any) -> Any:
    """An update whose network is traced, at the first call, with `lax.conv` alone."""
    with mock.patch.object(jax, "default_backend", return_value="not a CPU"):
        return ppo.update(*args)


def compare(case: Case, runs: dict[str, Callable[[], Any]], rounds: int) -> None:
    first, wall, cpu = {}, {name: [] for name in runs}, {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            if number == 0:
                first[name] = time.perf_counter() - start
                continue
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    reference = np.array(next(iter(wall.values())))
    for name in runs:
        ratio = np.median(reference / np.array(wall[name]))
        times = f"{1e3 * np.median(wall[name]):.0f} | {1e3 * np.median(cpu[name]):.0f}"
        print(f"| {case.name} | {name} | {times} | {ratio:.2f} | {first[name]:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pong", action="store_true")
    args = parser.parse_args()
    print("| update | what | ms | ms of CPU | speed, of the first | first call, s |\n|---|---|---|---|---|---|")
    for case in (PONG,) if args.pong else CASES:
        ppo, data = PPO(case.game, case.config), experience(case)
        state = ppo.init(jax.random.key(0))
        if args.pong:
            other = partial(with_lax_conv, PPO(case.game, case.config), state, {}, data)
        else:
            other = partial(bare(case), state.params, data, jax.random.key(1))
        runs = {"lax.conv" if args.pong else "bare scan": other, "sparring": partial(ppo.update, state, {}, data)}
        compare(case, runs, args.rounds)


if __name__ == "__main__":
    main()
