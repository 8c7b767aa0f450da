"""IQL: implicit Q-learning (Kostrikov et al. 2022), offline, for every action space. Only recorded actions are ever
valued, so there is nothing to over-estimate; the policy imitates those that turned out better than usual."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from sparring.algorithms.protocol import (
    FROZEN,
    Algorithm,
    Fraction,
    Metrics,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Transitions,
)
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.actor_critic import action_vector, bound_deviation, critic_shapes, critics
from sparring.networks.distributions import log_prob_and_entropy
from sparring.networks.functions import Params, dense, init_params, normalise, torso
from sparring.networks.policy import Policy, Value
from sparring.networks.spec import Categorical, Dense, Gaussian, Head, Layer, param_shapes, torso_shapes

__all__ = ["IQL", "Config", "State"]

CRITICS = 2


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 3e-4  # Adam's step size for the actor
    critic_lr: PositiveFloat = 1e-3  # … and for the critics and the value
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    batch: PositiveInt = 256  # transitions per update
    n_step: PositiveInt = 1  # rewards summed before bootstrapping: faster credit, but for how the players play on
    tau: Fraction = 0.005  # how fast the target critics follow, per update
    expectile: Fraction = 0.8  # which action a state's value is that of: 0.5 the usual one, towards 1 the best seen
    beta: NonNegativeFloat = 2.0  # preference for better actions, per deviation of advantages; 0: behaviour cloning
    max_weight: PositiveFloat = 100.0  # of one transition in the actor's loss
    replay: PositiveInt = 1_000_000  # rows of the replay window
    learning_starts: PositiveInt = 1_000  # steps before the first update
    updates_per_step: PositiveFloat = 0.25  # gradient steps per step of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the actor's
    critic_layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the critics' and the value's


class State(NamedTuple):
    actor: Params
    critic: Params  # two Q(s, a) and V(s)
    target: Params
    actor_optimiser: Any
    critic_optimiser: Any
    updates: jax.Array


class IQL(Algorithm):
    config_class = Config
    offline = True  # it has no way to explore

    def __init__(self, game: Game, config: Config = Config()) -> None:
        self.game, self.config = game, config
        self.head: Head = Gaussian() if isinstance(game.action, Box) else Categorical()
        self.actor_shapes = param_shapes(game, config.layers, self.head)
        value, width = torso_shapes(game.observation, config.critic_layers)
        value |= {"head.w": (int(np.prod(width)), 1), "head.b": (1,)}
        self.critic_shapes = critic_shapes(game, config.critic_layers, CRITICS)
        self.critic_shapes |= {f"value.{name}": shape for name, shape in value.items()}
        self.optimiser, self.critic_optimiser = optax.adam(config.lr), optax.adam(config.critic_lr)

    def init(self, key: jax.Array) -> State:
        actor_key, critic_key = jax.random.split(key)
        actor, critic = init_params(actor_key, self.actor_shapes), init_params(critic_key, self.critic_shapes)
        optimisers = self.optimiser.init(actor), self.critic_optimiser.init(critic)
        return State(actor, critic, critic, *optimisers, jnp.zeros((), jnp.int32))

    def policy(self, state: State, normaliser: dict[str, Array], exploration: float) -> Policy:
        params = {name: np.asarray(p) for name, p in state.actor.items()}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def value(self, state: State) -> Value:
        found = {name: np.asarray(p) for name, p in state.critic.items() if name.startswith("value.")}
        return Value(self.config.critic_layers, {name.removeprefix("value."): p for name, p in found.items()})

    def warm_start(self, state: State, policy: Policy) -> State:
        """The critics come first: they teach the actor only once `updates` is no longer negative."""
        actor = {name: jnp.asarray(policy.params[name]) for name in state.actor}
        return state._replace(
            actor=actor, actor_optimiser=self.optimiser.init(actor), updates=jnp.full((), -FROZEN, jnp.int32)
        )

    def update(self, state: State, normaliser: dict[str, Array], batches: Transitions) -> tuple[State, Metrics]:
        """One gradient step per leading row of `batches`, fused into one call; metrics are means over them."""
        return _update(self, state, normaliser, batches)

    def q(self, params: Params, batch: Transitions) -> jax.Array:
        return critics(self.config.critic_layers, params, batch.obs, action_vector(self.game, batch.action), CRITICS)

    def v(self, params: Params, obs: jax.Array) -> jax.Array:
        return dense(params, "value.head", torso(self.config.critic_layers, params, obs, "value."))[:, 0]

    def critic_loss(
        self, critic: Params, state: State, batch: Transitions
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """Eq. 5: |τ − 1(u < 0)| u², u = minᵢ Q′ᵢ(s,a) − V(s); eq. 6: (Qᵢ(s,a) − r − γ V(s′))². And the advantages u."""
        value, q = self.v(critic, batch.obs), self.q(critic, batch)
        advantage = jax.lax.stop_gradient(self.q(state.target, batch).min(0)) - value
        side = jnp.abs(self.config.expectile - (advantage < 0))
        value_loss = (side * jnp.square(advantage)).mean()
        y = batch.reward + batch.discount * jax.lax.stop_gradient(self.v(state.critic, batch.next_obs))
        q_loss = jnp.square(q - y).mean(1).sum()
        metrics = {"loss/critic": q_loss, "loss/value": value_loss, "q/mean": q.mean(), "value/mean": value.mean()}
        return value_loss + q_loss, (jax.lax.stop_gradient(advantage), metrics)

    def actor_loss(self, actor: Params, advantage: jax.Array, batch: Transitions) -> tuple[jax.Array, Metrics]:
        """Eq. 7: −exp(β A(s,a)) log π(a|s), with A in units of its deviation, so that β does not depend on the game's
        rewards."""
        c = self.config
        weight = jnp.minimum(jnp.exp(c.beta * advantage / (advantage.std() + 1e-6)), c.max_weight)
        out = dense(actor, "head", torso(c.layers, actor, batch.obs))
        log_prob, entropy = log_prob_and_entropy(self.game, actor, out, batch.action)
        loss = -(weight * log_prob).mean()
        return loss, {"loss/policy": loss, "policy/weight": weight.mean(), "policy/entropy": entropy.mean()}


@partial(jax.jit, static_argnums=0)
def _update(iql: IQL, state: State, normaliser: Params, batches: Transitions) -> tuple[State, Metrics]:
    def step(state: State, batch: Transitions) -> tuple[State, Metrics]:
        batch = batch._replace(obs=normalise(normaliser, batch.obs), next_obs=normalise(normaliser, batch.next_obs))
        grads, (advantage, critic_metrics) = jax.grad(iql.critic_loss, has_aux=True)(state.critic, state, batch)
        change, critic_optimiser = iql.critic_optimiser.update(grads, state.critic_optimiser)
        critic = optax.apply_updates(state.critic, change)
        grads, actor_metrics = jax.grad(iql.actor_loss, has_aux=True)(state.actor, advantage, batch)
        change, actor_optimiser = iql.optimiser.update(grads, state.actor_optimiser)
        actor = bound_deviation(optax.apply_updates(state.actor, change))
        actor = jax.tree.map(lambda old, new: jnp.where(state.updates < 0, old, new), state.actor, actor)
        target = optax.incremental_update(critic, state.target, iql.config.tau)
        metrics = critic_metrics | actor_metrics
        return State(actor, critic, target, actor_optimiser, critic_optimiser, state.updates + 1), metrics

    state, metrics = jax.lax.scan(step, state, batches)
    return state, {name: values.mean() for name, values in metrics.items()}
