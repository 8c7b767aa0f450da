"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016), for Box actions with bounds. Learns from replayed
transitions. TD3 is the same with three cures for over-estimated values: prefer it unless you compare."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import optax

from sparring.algorithms.deterministic import DeterministicActor
from sparring.algorithms.protocol import (
    Fraction,
    Metrics,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Transitions,
)
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.functions import Params, normalise
from sparring.networks.spec import Dense, Layer

__all__ = ["DDPG", "Config", "State"]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 1e-3  # Adam's step size for the actor
    critic_lr: PositiveFloat = 1e-3  # … and for the critic
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    batch: PositiveInt = 256  # transitions per update
    n_step: PositiveInt = 1  # rewards summed before bootstrapping: faster credit, slightly off-policy
    tau: Fraction = 0.005  # how fast the targets follow, per update
    exploration_initial: NonNegativeFloat = 1.0  # deviation of the noise on actions (scaled to ±1) at the start …
    exploration_final: NonNegativeFloat = 0.1  # … and after
    exploration_steps: PositiveInt = 2_000  # this many steps of experience
    replay: PositiveInt = 1_000_000  # rows of the replay window
    learning_starts: PositiveInt = 1_000  # steps before the first update
    updates_per_step: PositiveFloat = 1.0  # gradient steps per step of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the actor's
    critic_layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the critic's


class State(NamedTuple):
    actor: Params
    critic: Params
    target_actor: Params
    target_critic: Params
    actor_optimiser: Any
    critic_optimiser: Any
    updates: jax.Array


class DDPG(DeterministicActor):
    config_class = Config
    count = 1

    def __init__(self, game: Game, config: Config = Config()) -> None:
        super().__init__(game, config)

    def init(self, key: jax.Array) -> State:
        return State(*self.begin(*jax.random.split(key)), jnp.zeros((), jnp.int32))

    def update(self, state: State, normaliser: dict[str, Array], batches: Transitions) -> tuple[State, Metrics]:
        """One gradient step per leading row of `batches`, fused into one call; metrics are means over them."""
        return _update(self, state, normaliser, batches)

    def critic_loss(self, critic: Params, state: State, batch: Transitions) -> tuple[jax.Array, Metrics]:
        """Eq. 4–5: (Q(s,a) − y)², y = r + γ Q′(s′, μ′(s′))."""
        value = self.q(state.target_critic, batch.next_obs, self.act(state.target_actor, batch.next_obs))[0]
        y = jax.lax.stop_gradient(batch.reward + batch.discount * value)
        q = self.q(critic, batch.obs, batch.action)[0]
        loss = jnp.square(q - y).mean()
        return loss, {"loss/critic": loss, "q/mean": q.mean()}

    def actor_loss(self, actor: Params, state: State, batch: Transitions) -> jax.Array:
        """Eq. 6: −Q(s, μ(s)), whose gradient is the deterministic policy gradient (Silver et al. 2014)."""
        return -self.q(state.critic, batch.obs, self.act(actor, batch.obs))[0].mean()


@partial(jax.jit, static_argnums=0)
def _update(ddpg: DDPG, state: State, normaliser: Params, batches: Transitions) -> tuple[State, Metrics]:
    def step(state: State, batch: Transitions) -> tuple[State, Metrics]:
        batch = batch._replace(obs=normalise(normaliser, batch.obs), next_obs=normalise(normaliser, batch.next_obs))
        grads, metrics = jax.grad(ddpg.critic_loss, has_aux=True)(state.critic, state, batch)
        change, critic_optimiser = ddpg.critic_optimiser.update(grads, state.critic_optimiser)
        state = state._replace(critic=optax.apply_updates(state.critic, change), critic_optimiser=critic_optimiser)
        loss, grads = jax.value_and_grad(ddpg.actor_loss)(state.actor, state, batch)
        change, actor_optimiser = ddpg.optimiser.update(grads, state.actor_optimiser)
        learned = optax.apply_updates(state.actor, change), actor_optimiser
        held = state.actor, state.actor_optimiser
        held = jax.tree.map(lambda old, new: jnp.where(state.updates < 0, old, new), held, learned)
        state = state._replace(actor=held[0], actor_optimiser=held[1])
        return _follow(ddpg, state), metrics | {"loss/actor": loss}

    state, metrics = jax.lax.scan(step, state, batches)
    return state, {name: values.mean() for name, values in metrics.items()}


def _follow(ddpg: DDPG, state: State) -> State:
    """The targets move towards what was learned."""
    return state._replace(
        target_actor=optax.incremental_update(state.actor, state.target_actor, ddpg.config.tau),
        target_critic=optax.incremental_update(state.critic, state.target_critic, ddpg.config.tau),
        updates=state.updates + 1,
    )
