"""Activations: functions of one number, applied to all that leave a layer. Each is one entry with its renderings.

Files name ours by a word (`activation: relu`) and others by where they are (`activation: my_layers:gelu`). An outside
one is a value of the class `Activation`. This module is light: what needs JAX imports it when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sparring import plugins
from sparring.errors import InputError
from sparring.games.spec import Array
from sparring.networks.plain_steps import Activate, Step

if TYPE_CHECKING:
    import jax

    from sparring.networks.onnx_graph import Graph

__all__ = ["ACTIVATIONS", "Activation", "find_activation"]

ACTIVATIONS = {name: f"sparring.networks.activations:{name.upper()}" for name in ("relu", "tanh", "silu", "linear")}


@dataclass(frozen=True)
class Activation:
    """The same function in every form.

    :param apply_jax: differentiable, for learners. Import JAX inside it: rollout workers load this module as well.
    :param apply_numpy: for acting; called at every step. It may write into its argument.
    :param onnx: adds nodes to a graph and gives the name of their result.
    :param plain: the steps that Keras, TFLite and C are written from. None: those formats refuse it.
    """

    apply_jax: Callable[[jax.Array], jax.Array]
    apply_numpy: Callable[[Array], Array]
    onnx: Callable[[Graph, str], str]
    plain: tuple[Step, ...] | None = None


@lru_cache(maxsize=256)
def find_activation(name: str) -> Activation:
    """:raises InputError: there is none of that name, or what is there is something else."""
    found = plugins.find("activation", name, ACTIVATIONS)
    if not isinstance(found, Activation):
        raise InputError(f"activation {name!r} is {found!r}: it has to be a value of the class Activation")
    return found


def _jax_relu(x: jax.Array) -> jax.Array:
    import jax

    return jax.nn.relu(x)


def _jax_tanh(x: jax.Array) -> jax.Array:
    import jax.numpy as jnp

    return jnp.tanh(x)


def _jax_silu(x: jax.Array) -> jax.Array:
    import jax

    return jax.nn.silu(x)


RELU = Activation(
    _jax_relu, lambda x: np.maximum(x, 0), lambda graph, x: graph.op("Relu", x), plain=(Activate("relu"),)
)
TANH = Activation(_jax_tanh, np.tanh, lambda graph, x: graph.op("Tanh", x), plain=(Activate("tanh"),))
SILU = Activation(
    _jax_silu,
    lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),  # x·sigmoid(x) without overflow
    lambda graph, x: graph.op("Mul", x, graph.op("Sigmoid", x)),
    plain=(Activate("silu"),),
)
LINEAR = Activation(lambda x: x, lambda x: x, lambda _, x: x, plain=())
