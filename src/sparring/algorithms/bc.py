"""BC: behavioural cloning (Pomerleau 1989), for every action space: the policy under which recorded actions are most
likely. Rewards are not looked at, so it is only as good as the players it imitates."""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from sparring.algorithms.protocol import Algorithm, Metrics, NonNegativeFloat, PositiveFloat, PositiveInt, Transitions
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.actor_critic import bound_deviation
from sparring.networks.defaults import is_image
from sparring.networks.distributions import log_prob_and_entropy
from sparring.networks.functions import Params, dense, init_params, mean_gradients, normalise, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Gaussian, Head, Layer, param_shapes

__all__ = ["BC", "Config", "State"]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 1e-3  # Adam's step size
    batch: PositiveInt = 256  # steps of play per update
    weight_decay: NonNegativeFloat = 1e-4  # pull of the weights towards 0, per unit of lr: less is learned by heart
    replay: PositiveInt = 1_000_000  # rows of the replay window
    learning_starts: PositiveInt = 500  # steps of play before the first update
    updates_per_step: PositiveFloat = 0.25  # gradient steps per step of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the policy's
    # What the replay window asks every algorithm for; no reward is used here.
    gamma: ClassVar[float] = 0.0
    n_step: ClassVar[int] = 1


class State(NamedTuple):
    params: Params
    optimiser: Any
    updates: jax.Array


class BC(Algorithm):
    config_class = Config
    offline = True  # it has no way to explore

    def __init__(self, game: Game, config: Config = Config()) -> None:
        self.game, self.config = game, config
        self.head: Head = Gaussian() if isinstance(game.action, Box) else Categorical()
        self.shapes = param_shapes(game, config.layers, self.head)
        self.optimiser = optax.adamw(config.lr, weight_decay=config.weight_decay, mask=_decays)

    def init(self, key: jax.Array) -> State:
        params = init_params(key, self.shapes)
        return State(params, self.optimiser.init(params), jnp.zeros((), jnp.int32))

    def policy(self, state: State, normaliser: dict[str, Array], exploration: float) -> Policy:
        params = {name: np.asarray(p) for name, p in state.params.items()}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def warm_start(self, state: State, policy: Policy) -> State:
        params = {name: jnp.asarray(policy.params[name]) for name in state.params}
        return State(params, self.optimiser.init(params), jnp.zeros((), jnp.int32))

    def update(self, state: State, normaliser: dict[str, Array], batches: Transitions) -> tuple[State, Metrics]:
        """One gradient step per leading row of `batches`, fused into one call; metrics are means over them."""
        return _update(self, state, normaliser, batches)

    def loss(self, params: Params, batch: Transitions) -> tuple[jax.Array, Metrics]:
        """−log π(a|s)."""
        out = dense(params, "head", torso(self.config.layers, params, batch.obs))
        log_prob, entropy = log_prob_and_entropy(self.game, params, out, batch.action)
        loss = -log_prob.mean()
        return loss, {"loss/policy": loss, "policy/entropy": entropy.mean()}


def _decays(params: Params) -> dict[str, bool]:
    """Weights, not biases or deviations."""
    return {name: name.endswith(".w") for name in params}


@partial(jax.jit, static_argnums=0)
def _update(bc: BC, state: State, normaliser: Params, batches: Transitions) -> tuple[State, Metrics]:
    def step(state: State, batch: Transitions) -> tuple[State, Metrics]:
        batch = batch._replace(obs=normalise(normaliser, batch.obs))
        grads, metrics = mean_gradients(bc.loss, state.params, batch, is_image(bc.game.observation))
        change, optimiser = bc.optimiser.update(grads, state.optimiser, state.params)
        params = bound_deviation(optax.apply_updates(state.params, change))
        return State(params, optimiser, state.updates + 1), metrics

    state, metrics = jax.lax.scan(step, state, batches)
    return state, {name: values.mean() for name, values in metrics.items()}
