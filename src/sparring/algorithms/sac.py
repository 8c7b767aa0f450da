"""SAC: soft actor-critic with twin critics and an automatic temperature (Haarnoja et al. 2018, "Soft Actor-Critic
Algorithms and Applications"), for Box actions with bounds. For Discrete ones it has expectations in the place of
samples (Christodoulou 2019). Learns from replayed transitions."""

import math
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
from sparring.errors import InputError
from sparring.games import Box, Discrete, Game
from sparring.games.spec import Array
from sparring.networks.actor_critic import critic_shapes, critics, sample_squashed, squashed
from sparring.networks.functions import Params, dense, init_params, normalise, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Head, Layer, Squashed, action_size, param_shapes

__all__ = ["SAC", "Config", "ContinuousSAC", "DiscreteSAC", "State"]

CRITICS = 2
WARM_TEMPERATURE = 0.1  # at most, beside a policy that plays already
ENTROPY = 0.5  # of log n: the target for Discrete actions; the paper's 0.98 leaves the policy all but random


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 3e-4  # Adam's step size for the actor and the temperature
    critic_lr: PositiveFloat = 1e-3  # … and for the critics, which may run ahead of the actor
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    batch: PositiveInt = 256  # transitions per update
    n_step: PositiveInt = 1  # rewards summed before bootstrapping; beyond 1 the entropy between is left out
    tau: Fraction = 0.005  # how fast the target critics follow, per update
    temperature: PositiveFloat = 1.0  # α at the start: what a nat of entropy is worth in reward
    tune_temperature: bool = True  # move α so that the entropy stays near its target; false: α is a constant
    target_entropy: float | None = None  # nats; none: −1 per dimension (paper, app. D), half of log n for Discrete
    imitation: NonNegativeFloat = 1.0  # weight of people's actions, where live play has some; 0: like any play
    replay: PositiveInt = 1_000_000  # rows of the replay window
    learning_starts: PositiveInt = 1_000  # steps before the first update
    updates_per_step: PositiveFloat = 1.0  # gradient steps per step of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the actor's
    critic_layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the critics'


class State(NamedTuple):
    actor: Params
    critic: Params
    target: Params
    log_temperature: jax.Array
    actor_optimiser: Any
    critic_optimiser: Any
    temperature_optimiser: Any
    key: jax.Array
    updates: jax.Array


class SAC(Algorithm):
    """`SAC(game)` is the one of the two below that the game's actions ask for."""

    config_class = Config

    def __new__(cls, game: Game, config: Config = Config()) -> "SAC":
        if cls is not SAC:
            return super().__new__(cls)
        if isinstance(game.action, Box):
            return super().__new__(ContinuousSAC)
        if isinstance(game.action, Discrete):
            return super().__new__(DiscreteSAC)
        raise InputError(f"SAC takes Box or Discrete actions, {game.name} has {type(game.action).__name__}: use ppo")


class ContinuousSAC(SAC):
    demonstrations = True
    head: Head = Squashed()

    def __init__(self, game: Game, config: Config = Config()) -> None:
        self.game, self.config = game, config
        self.actor_shapes = param_shapes(game, config.layers, self.head)
        self.critic_shapes = self.shapes_of_critics()
        self.optimiser, self.critic_optimiser = optax.adam(config.lr), optax.adam(config.critic_lr)
        given = config.target_entropy
        self.target_entropy = self.usual_entropy() if given is None else given

    def shapes_of_critics(self) -> dict[str, tuple[int, ...]]:
        return critic_shapes(self.game, self.config.critic_layers, CRITICS)

    def usual_entropy(self) -> float:
        return -float(action_size(self.game.action))

    def init(self, key: jax.Array) -> State:
        key, actor_key, critic_key = jax.random.split(key, 3)
        actor, critic = init_params(actor_key, self.actor_shapes), init_params(critic_key, self.critic_shapes)
        log_temperature = jnp.log(jnp.float32(self.config.temperature))
        return State(
            actor,
            critic,
            critic,
            log_temperature,
            self.optimiser.init(actor),
            self.critic_optimiser.init(critic),
            self.optimiser.init(log_temperature),
            jax.random.key_data(key),
            jnp.zeros((), jnp.int32),
        )

    def policy(self, state: State, normaliser: dict[str, Array], exploration: float) -> Policy:
        params = {name: np.asarray(p) for name, p in state.actor.items()}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def warm_start(self, state: State, policy: Policy) -> State:
        """The critics come first: they teach the actor only once `updates` is no longer negative. The temperature is
        low: at its start it would make any policy random again."""
        actor = {name: jnp.asarray(policy.params[name]) for name in state.actor}
        return state._replace(
            actor=actor,
            actor_optimiser=self.optimiser.init(actor),
            log_temperature=jnp.log(jnp.float32(min(self.config.temperature, WARM_TEMPERATURE))),
            updates=jnp.full((), -FROZEN, jnp.int32),
        )

    def update(self, state: State, normaliser: dict[str, Array], batches: Transitions) -> tuple[State, Metrics]:
        """One gradient step per leading row of `batches`, fused into one call; metrics are means over them."""
        return _update(self, state, normaliser, batches)

    def act(self, actor: Params, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """a ~ π(·|s) scaled to ±1, and log π(a|s)."""
        return sample_squashed(key, dense(actor, "head", torso(self.config.layers, actor, obs)))

    def q(self, params: Params, obs: jax.Array, action: jax.Array) -> jax.Array:
        """(critics, batch)."""
        return critics(self.config.critic_layers, params, obs, action, CRITICS)

    def soft_value(
        self, actor: Params, critic: Params, obs: jax.Array, temperature: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Eq. 3: V(s) = minᵢ Qᵢ(s,a) − α log π(a|s) for one a ~ π(·|s), reparameterised; and log π(a|s)."""
        action, log_prob = self.act(actor, obs, key)
        return self.q(critic, obs, action).min(0) - temperature * log_prob, log_prob

    def critic_loss(
        self, critic: Params, state: State, batch: Transitions, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Eq. 5–6: ½(Qᵢ(s,a) − y)², y = r + γ V′(s′), where V′ is that of the target critics."""
        value, _ = self.soft_value(state.actor, state.target, batch.next_obs, jnp.exp(state.log_temperature), key)
        y = jax.lax.stop_gradient(batch.reward + batch.discount * value)
        q = self.q(critic, batch.obs, batch.action)
        loss = 0.5 * jnp.square(q - y).mean(1).sum()
        return loss, {"loss/critic": loss, "q/mean": q.mean()}

    def actor_loss(
        self, actor: Params, state: State, batch: Transitions, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Eq. 9: −V(s) = α log π(a|s) − minᵢ Qᵢ(s,a), a ~ π(·|s); and the mean log-probability."""
        value, log_prob = self.soft_value(actor, state.critic, batch.obs, jnp.exp(state.log_temperature), key)
        loss = -value.mean()
        if batch.demo is not None and self.config.imitation:
            loss += self.config.imitation * self.imitation_loss(actor, batch, value)
        return loss, log_prob.mean()

    def imitation_loss(self, actor: Params, batch: Transitions, value: jax.Array) -> jax.Array:
        """(tanh μ(s) − a)² of people's actions, as in TD3+BC (Fujimoto & Gu 2021), times the size of the values, so
        that neither rules whatever the game's rewards are."""
        mean, _ = squashed(dense(actor, "head", torso(self.config.layers, actor, batch.obs)))
        error = (batch.demo * jnp.square(jnp.tanh(mean) - batch.action).sum(-1)).sum() / (batch.demo.sum() + 1.0)
        return jax.lax.stop_gradient(jnp.abs(value).mean()) * error

    def temperature_loss(self, log_temperature: jax.Array, log_prob: jax.Array) -> jax.Array:
        """Eq. 18 with log α in the place of α: the same sign, but a step does not shrink with α itself."""
        return -log_temperature * (jax.lax.stop_gradient(log_prob) + self.target_entropy)


class DiscreteSAC(ContinuousSAC):
    """Critics give a value for every action, so what is expected under π is a sum and not a sample (Christodoulou
    2019)."""

    head = Categorical()
    demonstrations = False

    def shapes_of_critics(self) -> dict[str, tuple[int, ...]]:
        one = param_shapes(self.game, self.config.critic_layers, self.head)
        return {f"critic.{i}.{name}": shape for i in range(CRITICS) for name, shape in one.items()}

    def usual_entropy(self) -> float:
        return ENTROPY * math.log(action_size(self.game.action))

    def every_q(self, params: Params, obs: jax.Array) -> jax.Array:
        """(critics, batch, actions)."""
        prefixes = [f"critic.{i}." for i in range(CRITICS)]
        return jnp.stack(
            [dense(params, f"{p}head", torso(self.config.critic_layers, params, obs, p)) for p in prefixes]
        )

    def q(self, params: Params, obs: jax.Array, action: jax.Array) -> jax.Array:
        return (self.every_q(params, obs) * jax.nn.one_hot(action, action_size(self.game.action))).sum(-1)

    def soft_value(
        self, actor: Params, critic: Params, obs: jax.Array, temperature: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Eq. 10 there: V(s) = Σₐ π(a|s) (minᵢ Qᵢ(s,a) − α log π(a|s)); and Σₐ π(a|s) log π(a|s)."""
        log_probs = jax.nn.log_softmax(dense(actor, "head", torso(self.config.layers, actor, obs)))
        probs = jnp.exp(log_probs)
        log_prob = (probs * log_probs).sum(-1)
        return (probs * self.every_q(critic, obs).min(0)).sum(-1) - temperature * log_prob, log_prob


@partial(jax.jit, static_argnums=0)
def _update(sac: ContinuousSAC, state: State, normaliser: Params, batches: Transitions) -> tuple[State, Metrics]:
    def step(state: State, batch: Transitions) -> tuple[State, Metrics]:
        batch = batch._replace(obs=normalise(normaliser, batch.obs), next_obs=normalise(normaliser, batch.next_obs))
        key, critic_key, actor_key = jax.random.split(jax.random.wrap_key_data(state.key), 3)
        state = state._replace(key=jax.random.key_data(key), updates=state.updates + 1)
        state, critic_metrics = _learn_critic(sac, state, batch, critic_key)
        learned, actor_metrics = _learn_actor(sac, state, batch, actor_key)
        state = jax.tree.map(lambda old, new: jnp.where(state.updates < 0, old, new), state, learned)
        return state, critic_metrics | actor_metrics

    state, metrics = jax.lax.scan(step, state, batches)
    return state, {name: values.mean() for name, values in metrics.items()}


def _learn_critic(sac: ContinuousSAC, state: State, batch: Transitions, key: jax.Array) -> tuple[State, Metrics]:
    grads, metrics = jax.grad(sac.critic_loss, has_aux=True)(state.critic, state, batch, key)
    change, optimiser = sac.critic_optimiser.update(grads, state.critic_optimiser)
    critic = optax.apply_updates(state.critic, change)
    target = optax.incremental_update(critic, state.target, sac.config.tau)
    return state._replace(critic=critic, target=target, critic_optimiser=optimiser), metrics


def _learn_actor(sac: ContinuousSAC, state: State, batch: Transitions, key: jax.Array) -> tuple[State, Metrics]:
    (loss, log_prob), grads = jax.value_and_grad(sac.actor_loss, has_aux=True)(state.actor, state, batch, key)
    change, optimiser = sac.optimiser.update(grads, state.actor_optimiser)
    state = state._replace(actor=optax.apply_updates(state.actor, change), actor_optimiser=optimiser)
    if sac.config.tune_temperature:
        grad = jax.grad(sac.temperature_loss)(state.log_temperature, log_prob)
        step, optimiser = sac.optimiser.update(grad, state.temperature_optimiser)
        state = state._replace(log_temperature=state.log_temperature + step, temperature_optimiser=optimiser)
    return state, {
        "loss/actor": loss,
        "policy/temperature": jnp.exp(state.log_temperature),
        "policy/entropy": -log_prob,
    }
