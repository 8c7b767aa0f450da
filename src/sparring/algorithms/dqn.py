"""DQN: deep Q-learning from replayed transitions (Mnih et al. 2015), for Discrete and MultiDiscrete actions.

Options: double estimation (van Hasselt et al. 2016), duelling heads (Wang et al. 2016), n-step returns (Sutton 1988).
The parts of a MultiDiscrete have values of their own, whose mean is the action's (Sunehag et al. 2018, for parts in the
place of agents). People's steps are imitated, too, as in Hester et al. 2018, while bots make less than people do.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from sparring.algorithms.protocol import (
    Algorithm,
    Fraction,
    Metrics,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Transitions,
)
from sparring.errors import InputError
from sparring.games import Box, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.functions import Params, init_params, normalise, q_values, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, Layer, QValues, choices, param_shapes

__all__ = ["DQN", "Config", "State"]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 1e-3  # Adam's step size …
    lr_final: PositiveFloat | None = None  # … which falls to this, in a straight line; none: it stays
    schedule_updates: PositiveInt = 100_000  # until lr_final is reached
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    batch: PositiveInt = 128  # transitions per update
    n_step: PositiveInt = 3  # rewards summed before bootstrapping: faster credit, slightly off-policy
    double: bool = True  # choose with the online network, value with the target: less over-estimation
    duelling: bool = False  # separate value and advantage: helps where many actions are alike
    tau: Fraction = 0.01  # how fast the target network follows, per update
    imitation: NonNegativeFloat = 1.0  # weight of people's choices, where live play has some; 0: like any play
    max_grad_norm: PositiveFloat = 10.0  # a longer gradient is scaled down to this
    replay: PositiveInt = 100_000  # rows of the replay window
    learning_starts: PositiveInt = 500  # steps before the first update
    updates_per_step: PositiveFloat = 0.25  # gradient steps per step of experience
    exploration_initial: Fraction = 1.0  # ε at the start …
    exploration_final: Fraction = 0.01  # … and after
    exploration_steps: PositiveInt = 8_000  # this many steps of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(64), Dense(64))  # for vectors; see docs/training.md, "The default network"


# For Discrete observations, of which a network knows nothing but that they differ: a value for each of them and each
# action, which many steps fill, large ones first. Why and how well: docs/algorithms/dqn.md.
TABLE = {"layers": (), "normalise": False, "n_step": 1, "updates_per_step": 1.0, "lr": 0.02, "lr_final": 0.002}


# For MultiDiscrete actions, measured on examples/arena.py (docs/decisions/0022-people-first.md).
PARTS = {"gamma": 0.95, "updates_per_step": 0.5, "imitation": 3.0, "layers": (Dense(128), Dense(128))}
TEMPERATURE = 0.05  # of people's choices, as a part of the values' size


class State(NamedTuple):
    params: Params
    target: Params
    optimiser: Any
    updates: jax.Array


class DQN(Algorithm):
    config_class = Config
    demonstrations = True

    def __init__(self, game: Game, config: Config = Config()) -> None:
        if isinstance(game.action, Box):
            raise InputError(f"DQN takes Discrete and MultiDiscrete actions, {game.name} has Box: use sac, td3 or ppo")
        self.game, self.config, self.sizes = game, config, choices(game.action)
        self.head = QValues(config.duelling)
        self.shapes = param_shapes(game, config.layers, self.head)
        rate: Any = config.lr
        if config.lr_final is not None:
            rate = optax.linear_schedule(config.lr, config.lr_final, config.schedule_updates)
        self.optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(rate))

    @classmethod
    def defaults_for(cls, observation: Space, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return TABLE if isinstance(observation, Discrete) and "layers" not in given else {}

    @classmethod
    def defaults_for_action(cls, action: Space) -> Mapping[str, Any]:
        return PARTS if isinstance(action, MultiDiscrete) else {}

    def init(self, key: jax.Array) -> State:
        params = init_params(key, self.shapes)
        return State(params, params, self.optimiser.init(params), jnp.zeros((), jnp.int32))

    def exploration(self, steps: int) -> float:
        """ε after so many steps of experience: linear from initial to final."""
        c = self.config
        done = min(steps / c.exploration_steps, 1.0)
        return c.exploration_initial + (c.exploration_final - c.exploration_initial) * done

    def policy(self, state: State, normaliser: dict[str, Array], exploration: float) -> Policy:
        params = {name: np.asarray(p) for name, p in state.params.items()}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def warm_start(self, state: State, policy: Policy) -> State:
        params = {name: jnp.asarray(policy.params[name]) for name in state.params}
        return State(params, params, self.optimiser.init(params), jnp.zeros((), jnp.int32))

    def update(self, state: State, normaliser: dict[str, Array], batches: Transitions) -> tuple[State, Metrics]:
        """One gradient step per leading row of `batches`, fused into one call; metrics are means over them."""
        return _update(self, state, normaliser, batches)

    def q(self, params: Params, obs: jax.Array) -> jax.Array:
        """(batch, actions): of all parts of an action, one behind the other."""
        return q_values(self.head, params, torso(self.config.layers, params, obs), self.sizes)

    def best(self, q: jax.Array) -> jax.Array:
        """(batch, parts): the greedy choice of each part."""
        return jnp.stack([part.argmax(-1) for part in self.parts(q)], -1)

    def of(self, q: jax.Array, action: jax.Array) -> jax.Array:
        """Q(s, a) of actions (batch, parts): the mean of their parts'."""
        chosen = [jnp.take_along_axis(part, action[:, i, None], -1) for i, part in enumerate(self.parts(q))]
        return jnp.concatenate(chosen, -1).mean(-1)

    def parts(self, q: jax.Array) -> list[jax.Array]:
        return jnp.split(q, np.cumsum(self.sizes)[:-1], -1)

    def loss(self, params: Params, target: Params, batch: Transitions) -> tuple[jax.Array, Metrics]:
        """½(Q(s,a) − y)², y = Σγᵏr + γⁿ Q′(s′, a′); a′ = argmax Q(s′,·) when double, else argmax Q′(s′,·).

        Squared, not Huber: where values are large (CartPole's reach 100), Huber's clipped errors make this a median
        regression, which does not see rare terminations, and Q grows without bound. The gradient's norm is clipped.
        """
        every = self.q(params, batch.obs)
        action = batch.action.reshape(len(every), -1)
        q = self.of(every, action)
        q_target = self.q(target, batch.next_obs)
        best = self.best(self.q(params, batch.next_obs) if self.config.double else q_target)
        y = jax.lax.stop_gradient(batch.reward + batch.discount * self.of(q_target, best))
        loss = 0.5 * jnp.square(q - y).mean()
        metrics = {"loss/q": loss, "q/mean": q.mean()}
        if batch.demo is None or not self.config.imitation:
            return loss, metrics
        imitation = self.imitation_loss(every, action, batch.demo, y)
        return loss + self.config.imitation * imitation, metrics | {"loss/imitation": imitation}

    def imitation_loss(self, q: jax.Array, action: jax.Array, demo: jax.Array, y: jax.Array) -> jax.Array:
        """−τ² log softmax(Q(s,·)/τ)(a) of people's choices, per part. τ is a part of the values' size. So the loss is
        of the size of DQN's own, whatever the game's rewards are."""
        scale = TEMPERATURE * jnp.sqrt(jnp.square(y).mean()) + 1e-3
        total = jnp.zeros(())
        for i, part in enumerate(self.parts(q)):
            log_probs = jax.nn.log_softmax(part / scale)
            chosen = (log_probs * jax.nn.one_hot(action[:, i], part.shape[-1])).sum(-1)
            total -= (demo * chosen).sum()
        return jnp.square(scale) * total / (demo.sum() + 1.0)


@partial(jax.jit, static_argnums=0)
def _update(dqn: DQN, state: State, normaliser: Params, batches: Transitions) -> tuple[State, Metrics]:
    def step(state: State, batch: Transitions) -> tuple[State, Metrics]:
        batch = batch._replace(obs=normalise(normaliser, batch.obs), next_obs=normalise(normaliser, batch.next_obs))
        grads, metrics = jax.grad(dqn.loss, has_aux=True)(state.params, state.target, batch)
        change, optimiser = dqn.optimiser.update(grads, state.optimiser, state.params)
        params = optax.apply_updates(state.params, change)
        target = optax.incremental_update(params, state.target, dqn.config.tau)
        return State(params, target, optimiser, state.updates + 1), metrics

    state, metrics = jax.lax.scan(step, state, batches)
    return state, {name: values.mean() for name, values in metrics.items()}
