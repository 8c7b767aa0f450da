"""What actor-critic algorithms share: critics of (observation, action), and the squashed Gaussian that acts exactly as
`policy.Policy` does with the same arrays."""

import jax
import jax.numpy as jnp

from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.networks.functions import Params, dense, torso
from sparring.networks.policy import HALF_LOG_2PI, LOG_2, LOG_STD_RANGE
from sparring.networks.spec import Layer, action_size, torso_shapes

__all__ = ["action_vector", "bound_deviation", "critic_shapes", "critics", "sample_squashed", "squashed"]


def critic_shapes(game: Game, layers: tuple[Layer, ...], count: int) -> dict[str, tuple[int, ...]]:
    """Arrays of `count` critics Q(s, a) of their own layers: "critic.0.torso.0.w" …"""
    torso, width = torso_shapes(game.observation, layers, extra=action_size(game.action))
    size = 1
    for n in width:
        size *= n
    one = torso | {"head.w": (size, 1), "head.b": (1,)}
    return {f"critic.{i}.{name}": shape for i in range(count) for name, shape in one.items()}


def critics(layers: tuple[Layer, ...], params: Params, obs: jax.Array, action: jax.Array, count: int) -> jax.Array:
    """(count, batch). One after the other: on a CPU two products are no slower than a batched one, often faster."""

    def q(prefix: str) -> jax.Array:
        return dense(params, f"{prefix}head", torso(layers, params, obs, prefix, action))[:, 0]

    return jnp.stack([q(f"critic.{i}.") for i in range(count)])


def action_vector(game: Game, action: jax.Array) -> jax.Array:
    """A batch of replayed actions as critics see them: numbers as they are, choices one-hot."""
    if isinstance(game.action, Box):
        return action
    if isinstance(game.action, Discrete):
        return jax.nn.one_hot(action, game.action.n)
    assert isinstance(game.action, MultiDiscrete)
    return jnp.concatenate([jax.nn.one_hot(action[:, i], n) for i, n in enumerate(game.action.nvec)], -1)


def squashed(out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Squashed head's numbers → mean and log-deviation before tanh."""
    mean, log_std = jnp.split(out, 2, -1)
    return mean, jnp.clip(log_std, *LOG_STD_RANGE)


def sample_squashed(key: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Actions in ±1 and their log-densities, differentiable (Haarnoja et al. 2018, eq. 8 and appendix C)."""
    mean, log_std = squashed(out)
    noise = jax.random.normal(key, mean.shape)
    u = mean + jnp.exp(log_std) * noise
    return jnp.tanh(u), (-0.5 * noise**2 - log_std - HALF_LOG_2PI - _log_slope(u)).sum(-1)


def _log_slope(u: jax.Array) -> jax.Array:
    """log(1 − tanh²u) in a form that does not overflow."""
    return 2 * (LOG_2 - u - jax.nn.softplus(-2 * u))


def bound_deviation(params: Params) -> Params:
    """With a Gaussian head's deviation in its range: where all recorded actions are alike, the likeliest one is 0."""
    if "head.log_std" not in params:
        return params
    return params | {"head.log_std": jnp.clip(params["head.log_std"], *LOG_STD_RANGE)}
