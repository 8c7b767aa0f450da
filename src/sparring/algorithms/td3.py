"""TD3: twin delayed deterministic policy gradient (Fujimoto et al. 2018), for Box actions with bounds. It is DDPG with
the smaller of two critics, a smoothed target policy and an actor that waits for its critics."""

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

__all__ = ["TD3", "Config", "State"]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 1e-3  # Adam's step size for the actor
    critic_lr: PositiveFloat = 1e-3  # … and for the critics
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    batch: PositiveInt = 256  # transitions per update
    n_step: PositiveInt = 1  # rewards summed before bootstrapping: faster credit, slightly off-policy
    tau: Fraction = 0.005  # how fast the targets follow, per update of the actor
    policy_delay: PositiveInt = 2  # updates of the critics per update of the actor and the targets
    target_noise: NonNegativeFloat = 0.2  # deviation of the noise on target actions (scaled to ±1) …
    target_noise_clip: NonNegativeFloat = 0.5  # … which is clipped to ± this: similar actions, similar values
    exploration_initial: NonNegativeFloat = 1.0  # deviation of the noise on actions (scaled to ±1) at the start …
    exploration_final: NonNegativeFloat = 0.1  # … and after
    exploration_steps: PositiveInt = 2_000  # this many steps of experience
    replay: PositiveInt = 1_000_000  # rows of the replay window
    learning_starts: PositiveInt = 1_000  # steps before the first update
    updates_per_step: PositiveFloat = 1.0  # gradient steps per step of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the actor's
    critic_layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the critics'


class State(NamedTuple):
    actor: Params
    critic: Params
    target_actor: Params
    target_critic: Params
    actor_optimiser: Any
    critic_optimiser: Any
    actor_loss: jax.Array  # of the actor's latest update, which not every update has
    key: jax.Array
    updates: jax.Array


class TD3(DeterministicActor):
    config_class = Config
    count = 2

    def __init__(self, game: Game, config: Config = Config()) -> None:
        super().__init__(game, config)

    def init(self, key: jax.Array) -> State:
        key, *keys = jax.random.split(key, 3)
        begun = self.begin(*keys)
        return State(*begun, jnp.zeros(()), jax.random.key_data(key), jnp.zeros((), jnp.int32))

    def update(self, state: State, normaliser: dict[str, Array], batches: Transitions) -> tuple[State, Metrics]:
        """One gradient step per leading row of `batches`, fused into one call; metrics are means over them."""
        return _update(self, state, normaliser, batches)

    def critic_loss(
        self, critic: Params, state: State, batch: Transitions, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Algorithm 1: (Qᵢ(s,a) − y)², y = r + γ minᵢ Q′ᵢ(s′, clip(μ′(s′) + ε)), ε ~ clip(N(0, σ̃), ±c)."""
        c = self.config
        action = self.act(state.target_actor, batch.next_obs)
        noise = jnp.clip(
            c.target_noise * jax.random.normal(key, action.shape), -c.target_noise_clip, c.target_noise_clip
        )
        value = self.q(state.target_critic, batch.next_obs, jnp.clip(action + noise, -1, 1)).min(0)
        y = jax.lax.stop_gradient(batch.reward + batch.discount * value)
        q = self.q(critic, batch.obs, batch.action)
        loss = jnp.square(q - y).mean(1).sum()
        return loss, {"loss/critic": loss, "q/mean": q.mean()}

    def actor_loss(self, actor: Params, state: State, batch: Transitions) -> jax.Array:
        """−Q₁(s, μ(s)): the deterministic policy gradient (Silver et al. 2014)."""
        return -self.q(state.critic, batch.obs, self.act(actor, batch.obs), count=1).mean()


@partial(jax.jit, static_argnums=0)
def _update(td3: TD3, state: State, normaliser: Params, batches: Transitions) -> tuple[State, Metrics]:
    def step(state: State, batch: Transitions) -> tuple[State, Metrics]:
        batch = batch._replace(obs=normalise(normaliser, batch.obs), next_obs=normalise(normaliser, batch.next_obs))
        key, critic_key = jax.random.split(jax.random.wrap_key_data(state.key))
        state = state._replace(key=jax.random.key_data(key), updates=state.updates + 1)
        state, metrics = _learn_critic(td3, state, batch, critic_key)
        due = (state.updates % td3.config.policy_delay == 0) & (state.updates >= 0)
        state = jax.lax.cond(due, lambda: _learn_actor(td3, state, batch), lambda: state)
        return state, metrics | {"loss/actor": state.actor_loss}

    state, metrics = jax.lax.scan(step, state, batches)
    return state, {name: values.mean() for name, values in metrics.items()}


def _learn_critic(td3: TD3, state: State, batch: Transitions, key: jax.Array) -> tuple[State, Metrics]:
    grads, metrics = jax.grad(td3.critic_loss, has_aux=True)(state.critic, state, batch, key)
    change, optimiser = td3.critic_optimiser.update(grads, state.critic_optimiser)
    return state._replace(critic=optax.apply_updates(state.critic, change), critic_optimiser=optimiser), metrics


def _learn_actor(td3: TD3, state: State, batch: Transitions) -> State:
    """One step of the actor, and the targets follow."""
    loss, grads = jax.value_and_grad(td3.actor_loss)(state.actor, state, batch)
    change, optimiser = td3.optimiser.update(grads, state.actor_optimiser)
    actor, tau = optax.apply_updates(state.actor, change), td3.config.tau
    return state._replace(
        actor=actor,
        target_actor=optax.incremental_update(actor, state.target_actor, tau),
        target_critic=optax.incremental_update(state.critic, state.target_critic, tau),
        actor_optimiser=optimiser,
        actor_loss=loss,
    )
