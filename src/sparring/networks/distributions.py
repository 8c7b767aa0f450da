"""The distributions behind Categorical and Gaussian heads, as learners need them: log-probabilities and entropies of
recorded actions, differentiable, and the same numbers as `policy.Policy` records when it acts."""

import jax
import jax.numpy as jnp
import numpy as np

from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.networks.functions import Params
from sparring.networks.policy import ERFC, FAR, HALF_LOG_2PI, LOG_2
from sparring.networks.spec import scaling

__all__ = ["log_normal_cdf", "log_prob_and_entropy"]


def log_prob_and_entropy(game: Game, params: Params, out: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of encoded actions (`replay.encode_action`) and of the whole distribution, per row of a head's numbers `out`."""
    if isinstance(game.action, Box):
        return _gaussian(game.action, out, params["head.log_std"], action)
    if isinstance(game.action, Discrete):
        return _categorical(out, action)
    assert isinstance(game.action, MultiDiscrete)
    parts = jnp.split(out, np.cumsum(game.action.nvec)[:-1], -1)
    terms = [_categorical(part, action[:, i]) for i, part in enumerate(parts)]
    return sum(t[0] for t in terms), sum(t[1] for t in terms)  # type: ignore[return-value]  # nvec is not empty


def _categorical(logits: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_probs = jax.nn.log_softmax(logits)
    # A product with one-hot rows, not a gather: its gradient is a product too, where a gather's is a slow scatter.
    chosen = (log_probs * jax.nn.one_hot(index, logits.shape[-1])).sum(-1)
    return chosen, -(jnp.exp(log_probs) * log_probs).sum(-1)


def _gaussian(space: Box, mean: jax.Array, log_std: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Gaussian whose mass beyond a bound lies on the bound (Fujita & Maeda 2018): what the game really saw.
    The entropy is that of the Gaussian before it is clipped."""
    s = scaling(space)
    low, high = (np.where(np.isfinite(edge), edge, 0) for edge in (s.unit_low, s.unit_high))  # inf would make NaN
    at_low, at_high = action <= s.unit_low, action >= s.unit_high
    deviations = jnp.exp(-log_std)
    beyond = jnp.where(at_high, mean - high, low - mean) * deviations
    density = -0.5 * jnp.square((action - mean) * deviations) - log_std - HALF_LOG_2PI
    log_prob = jnp.where(at_low | at_high, log_normal_cdf(beyond), density).sum(-1)
    return log_prob, jnp.broadcast_to((log_std + HALF_LOG_2PI + 0.5).sum(), log_prob.shape)


def log_normal_cdf(x: jax.Array) -> jax.Array:
    """log Φ(x), far into the tail and with a slope that is right there too (`jax.scipy`'s loses its digits); of sums,
    products, exp and log alone, which ONNX has."""
    a = jnp.minimum(jnp.abs(x), FAR) * 0.5**0.5
    t = 1 / (1 + a * 0.5)
    fit = jnp.full_like(t, ERFC[0])
    for c in ERFC[1:]:
        fit = fit * t + c
    tail = jnp.log(t) - a * a + fit - LOG_2  # log Φ(−|x|)
    return jnp.where(x < 0, tail, jnp.log(1 - jnp.exp(tail)))
