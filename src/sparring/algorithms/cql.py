"""CQL: conservative Q-learning (Kumar et al. 2020), offline. DQN for Discrete actions and SAC for Box ones, with values
pushed down where no player went and up where they did. So what was never tried does not look better than it is."""

from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from sparring.algorithms import dqn, sac
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
from sparring.games import Box, Discrete, Game
from sparring.networks.functions import Params
from sparring.networks.policy import LOG_2
from sparring.networks.spec import Dense, Layer

__all__ = ["CQL", "Config", "ContinuousCQL", "DiscreteCQL"]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    penalty: NonNegativeFloat = 1.0  # α: how far values of actions that nobody took are pushed down; 0: plain DQN, SAC
    lr: PositiveFloat = 3e-4  # Adam's step size for the actor and the temperature (Box)
    critic_lr: PositiveFloat = 1e-3  # … and for the critics
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    batch: PositiveInt = 256  # transitions per update
    n_step: PositiveInt = 1  # rewards summed before bootstrapping: faster credit, but for how the players play on
    tau: Fraction = 0.005  # how fast the target critics follow, per update
    samples: PositiveInt = 4  # actions of each kind (any, now, next) that stand for all of them (Box)
    temperature: PositiveFloat = 1.0  # α of SAC at the start (Box)
    target_entropy: float | None = None  # of actions scaled to ±1; none: −1 per dimension (Box)
    replay: PositiveInt = 1_000_000  # rows of the replay window
    learning_starts: PositiveInt = 1_000  # steps before the first update
    updates_per_step: PositiveFloat = 0.25  # gradient steps per step of experience
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # of the policy: for Discrete, that is the critic
    critic_layers: tuple[Layer, ...] = (Dense(256), Dense(256))  # the critics' (Box)


class CQL(Algorithm):
    """`CQL(game)` is the one of the two below that the game's actions ask for."""

    config_class = Config
    offline = True
    demonstrations = False  # all play is recorded play

    def __new__(cls, game: Game, config: Config = Config()) -> "CQL":
        if cls is not CQL:
            return object.__new__(cls)
        if isinstance(game.action, Discrete):
            return object.__new__(DiscreteCQL)
        if isinstance(game.action, Box):
            return object.__new__(ContinuousCQL)
        raise InputError(
            f"CQL takes Discrete or Box actions, {game.name} has {type(game.action).__name__}: use iql or bc"
        )


class DiscreteCQL(CQL, dqn.DQN):  # type: ignore[misc]  # config_class is CQL's
    def __init__(self, game: Game, config: Config = Config()) -> None:
        changes = {"lr": config.critic_lr, "exploration_initial": 0.0, "exploration_final": 0.0}
        super().__init__(game, dqn.Config(**_shared(config, dqn.Config) | changes))
        self.penalty = config.penalty

    def loss(self, params: Params, target: Params, batch: Transitions) -> tuple[jax.Array, Metrics]:
        """Eq. 4: α (log Σₐ exp Q(s,a) − Q(s,a_data)) + DQN's loss."""
        loss, metrics = super().loss(params, target, batch)
        q = self.q(params, batch.obs)
        gap = (jax.nn.logsumexp(q, -1) - jnp.take_along_axis(q, batch.action[:, None], -1)[:, 0]).mean()
        return loss + self.penalty * gap, metrics | {"loss/conservative": gap}


class ContinuousCQL(CQL, sac.ContinuousSAC):  # type: ignore[misc]  # config_class is CQL's
    def __init__(self, game: Game, config: Config = Config()) -> None:
        super().__init__(game, sac.Config(**_shared(config, sac.Config)))
        self.penalty, self.samples = config.penalty, config.samples

    def critic_loss(
        self, critic: Params, state: sac.State, batch: Transitions, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Eq. 4 and appendix F: α (log ∫ exp Qᵢ(s,a) da − Qᵢ(s,a_data)) + SAC's loss. The integral is estimated with
        actions from all over the space and from the policy, here and at s′, each over its density."""
        key, sample_key = jax.random.split(key)
        loss, metrics = super().critic_loss(critic, state, batch, key)
        action, log_density = self.anywhere(state, batch, sample_key)
        # One long batch: a product of matrices, where vmap makes many.
        obs = jnp.repeat(batch.obs[None], len(action), 0)
        q = self.q(critic, *(x.reshape(-1, *x.shape[2:]) for x in (obs, action))).reshape(-1, *log_density.shape)
        gap = (jax.nn.logsumexp(q - log_density, 1) - jnp.log(len(action))).mean(1)
        gap = (gap - self.q(critic, batch.obs, batch.action).mean(1)).sum()
        return loss + self.penalty * gap, metrics | {"loss/conservative": gap}

    def anywhere(self, state: sac.State, batch: Transitions, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Actions (samples, batch, …) and the logarithms of the densities they were drawn with."""
        uniform_key, here_key, next_key = jax.random.split(key, 3)
        uniform = jax.random.uniform(uniform_key, (self.samples, *batch.action.shape), minval=-1.0, maxval=1.0)
        flat = jnp.full(uniform.shape[:2], -LOG_2 * batch.action.shape[-1])
        draws = [(uniform, flat)]
        for k, obs in ((here_key, batch.obs), (next_key, batch.next_obs)):
            draws.append(jax.vmap(lambda k, obs=obs: self.act(state.actor, obs, k))(jax.random.split(k, self.samples)))
        return jnp.concatenate([d[0] for d in draws]), jnp.concatenate([d[1] for d in draws])


def _shared(config: Config, other: type[msgspec.Struct]) -> dict[str, Any]:
    """The hyperparameters that the other algorithm knows too."""
    known = {field.name for field in msgspec.structs.fields(other)}
    return {name: value for name, value in msgspec.structs.asdict(config).items() if name in known}
