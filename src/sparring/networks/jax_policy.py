"""A whole policy in JAX, as it learns: from pixels or numbers to the head's numbers, compiled."""

from collections.abc import Callable
from typing import Any

import jax

from sparring.games import MultiDiscrete
from sparring.networks.functions import dense, normalise, q_values, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import QValues, choices

__all__ = ["compile_outputs"]


def compile_outputs(policy: Policy) -> Callable[[Any], jax.Array]:
    """Of a batch of `networks.plain.pixels`. Compiled once for each length of a batch.

    :param policy: Whose network it is.
    """
    head = policy.head
    sizes = choices(policy.game.action) if isinstance(policy.game.action, MultiDiscrete) else None
    params: dict[str, Any] = dict(jax.device_put(policy.params))

    @jax.jit
    def outputs(x: jax.Array) -> jax.Array:
        x = x.astype("float32") * (1 / 255) if x.dtype == "uint8" else x
        hidden = torso(policy.layers, params, normalise(params, x))
        return q_values(head, params, hidden, sizes) if isinstance(head, QValues) else dense(params, "head", hidden)

    return outputs
