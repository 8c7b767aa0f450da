"""What DDPG and TD3 share: an actor that says one action, critics, targets of both, and noise on the actions."""

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparring.algorithms.protocol import FROZEN, Algorithm
from sparring.errors import InputError
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.actor_critic import critic_shapes, critics
from sparring.networks.functions import Params, dense, init_params, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import Deterministic, param_shapes

__all__ = ["DeterministicActor", "DeterministicState"]


class DeterministicState(Protocol):
    """What the states of both have."""

    @property
    def actor(self) -> Params: ...
    def _replace(self, **fields: Any) -> Any: ...


class DeterministicActor(Algorithm):
    """For Box actions.

    :cvar count: of critics.
    """

    count: ClassVar[int]

    def __init__(self, game: Game, config: Any) -> None:
        if not isinstance(game.action, Box):
            name, kind = type(self).__name__, type(game.action).__name__
            raise InputError(f"{name} takes Box actions, {game.name} has {kind}: use ppo")
        self.game, self.config = game, config
        self.head = Deterministic()
        self.actor_shapes = param_shapes(game, config.layers, self.head)
        self.critic_shapes = critic_shapes(game, config.critic_layers, self.count)
        self.optimiser, self.critic_optimiser = optax.adam(config.lr), optax.adam(config.critic_lr)

    def begin(self, actor_key: jax.Array, critic_key: jax.Array) -> tuple[Params, Params, Params, Params, Any, Any]:
        """Actor and critics, the targets, which are the same, and the optimisers: the first six fields of a state."""
        actor, critic = init_params(actor_key, self.actor_shapes), init_params(critic_key, self.critic_shapes)
        return actor, critic, actor, critic, self.optimiser.init(actor), self.critic_optimiser.init(critic)

    def exploration(self, steps: int) -> float:
        """The noise's deviation after so many steps of experience: linear from initial to final."""
        c = self.config
        done = min(steps / c.exploration_steps, 1.0)
        return float(c.exploration_initial + (c.exploration_final - c.exploration_initial) * done)

    def policy(self, state: DeterministicState, normaliser: dict[str, Array], exploration: float) -> Policy:
        params = {name: np.asarray(p) for name, p in state.actor.items()}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def warm_start(self, state: DeterministicState, policy: Policy) -> Any:
        """The critics come first: they teach the actor only once `updates` is no longer negative."""
        actor = {name: jnp.asarray(policy.params[name]) for name in state.actor}
        return state._replace(
            actor=actor,
            target_actor=actor,
            actor_optimiser=self.optimiser.init(actor),
            updates=jnp.full((), -FROZEN, jnp.int32),
        )

    def act(self, actor: Params, obs: jax.Array) -> jax.Array:
        """μ(s), scaled to ±1."""
        return jnp.tanh(dense(actor, "head", torso(self.config.layers, actor, obs)))

    def q(self, params: Params, obs: jax.Array, action: jax.Array, count: int | None = None) -> jax.Array:
        """(critics, batch): of all, or of the first `count`."""
        return critics(self.config.critic_layers, params, obs, action, self.count if count is None else count)
