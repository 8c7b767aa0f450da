"""A2C: advantage actor-critic (Mnih et al. 2016), an algorithm from outside Sparring's package.

    sparring train CartPole-v1 --algorithm a2c:A2C          # in the directory of this file
    sparring up --algorithm a2c:A2C

The tutorial docs/tutorials/your-own-algorithm.md goes through it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from sparring.algorithms.protocol import Algorithm, Metrics, Trajectories
from sparring.fields import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from sparring.games import Box, Game
from sparring.networks.distributions import log_prob_and_entropy
from sparring.networks.functions import Params, dense, init_params, normalise, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Gaussian, Layer, param_shapes

# Config


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: PositiveInt = 256  # of experience per update
    lr: PositiveFloat = 2e-3  # Adam's step size
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    value_coefficient: NonNegativeFloat = 0.5  # weight of the value's loss
    entropy_coefficient: NonNegativeFloat = 0.01  # reward for staying random
    max_grad_norm: PositiveFloat = 10.0
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(64, "tanh"), Dense(64, "tanh"))  # of each network


class State(NamedTuple):
    params: Params
    optimiser: Any


# Network: one for the policy, one of the same size for the value


class A2C(Algorithm):
    config_class = Config
    on_policy = True

    def __init__(self, game: Game, config: Config = Config()) -> None:
        self.game, self.config = game, config
        self.head = Gaussian() if isinstance(game.action, Box) else Categorical()
        self.shapes = param_shapes(game, config.layers, self.head)
        layers = {name: shape for name, shape in self.shapes.items() if name.startswith("torso.")}
        value = layers | {"head.w": (self.shapes["head.w"][0], 1), "head.b": (1,)}
        self.value_shapes = {f"value.{name}": shape for name, shape in value.items()}
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        self.optimiser = optax.chain(clip, optax.adam(config.lr))

    def init(self, key: jax.Array) -> State:
        params = init_params(key, self.shapes | self.value_shapes)
        return State(params, self.optimiser.init(params))

    def policy(self, state: State, normaliser: dict[str, Any], exploration: float) -> Policy:
        params = {name: np.asarray(state.params[name]) for name in self.shapes}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def forward(self, params: Params, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, seen = (torso(self.config.layers, params, obs, prefix) for prefix in ("", "value."))
        return dense(params, "head", hidden), dense(params, "value.head", seen)[:, 0]

    def update(self, state: State, normaliser: dict[str, Any], data: Any) -> tuple[State, Metrics]:
        return _update(self, state, normaliser, data)


# Loss


def loss(params: Params, a2c: A2C, data: Trajectories) -> tuple[jax.Array, Metrics]:
    """−ρ log π(a|s) (R − V(s)) + c₁ ½ (R − V(s))² − c₂ H, mean over the steps (`mask`).

    ρ = min(1, π/μ): a step of an older policy μ counts less. Bots that play are older.
    """
    c = a2c.config
    out, value = jax.vmap(partial(a2c.forward, params))(data.obs)  # of T + 1 observations
    distribution = jax.vmap(partial(log_prob_and_entropy, a2c.game, params))
    log_prob, entropy = distribution(out[:, :-1], data.action)
    advantage = discounted_returns(data, jax.lax.stop_gradient(value), c.gamma) - value[:, :-1]
    ratio = jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_prob) - data.log_prob, 0.0))
    gain = ratio * log_prob * jax.lax.stop_gradient(advantage)
    mean = partial(jnp.mean, where=data.mask)
    policy, values, random = -mean(gain), 0.5 * mean(jnp.square(advantage)), mean(entropy)
    total = policy + c.value_coefficient * values - c.entropy_coefficient * random
    return total, {"loss/policy": policy, "loss/value": values, "policy/entropy": random}


def discounted_returns(data: Trajectories, value: jax.Array, gamma: float) -> jax.Array:
    """R = r + γ R′. Where play was only cut V(s′) stands for R′; a terminal state is worth 0."""

    def back(later: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, following, terminated, ended = step
        found = reward + gamma * jnp.where(terminated, 0.0, jnp.where(ended, following, later))
        return found, found

    steps = (data.reward.T, value[:, 1:].T, data.terminated.T, data.ended.T)
    return jax.lax.scan(back, jnp.zeros(len(value)), steps, reverse=True)[1].T


# Update


@partial(jax.jit, static_argnums=0)
def _update(a2c: A2C, state: State, normaliser: Params, data: Trajectories) -> Any:
    data = data._replace(obs=normalise(normaliser, data.obs))
    grads, metrics = jax.grad(loss, has_aux=True)(state.params, a2c, data)
    change, optimiser = a2c.optimiser.update(grads, state.optimiser)
    return State(optax.apply_updates(state.params, change), optimiser), metrics
