"""PPO: proximal policy optimisation with a clipped objective (Schulman et al. 2017), for every action space.

Learns from trajectories of its own policy, and of older ones: V-trace (Espeholt et al. 2018) corrects for those. On
fresh data that correction is nothing, and generalised advantage estimation (Schulman et al. 2016) remains.
"""

import math
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
    Trajectories,
)
from sparring.errors import InputError
from sparring.games import Box, Game, Space
from sparring.games.spec import Array
from sparring.networks.defaults import is_image
from sparring.networks.distributions import log_prob_and_entropy
from sparring.networks.functions import Params, dense, init_params, mean_gradients, normalise, torso
from sparring.networks.policy import LOG_STD_RANGE, Policy, Value
from sparring.networks.spec import Categorical, Dense, Gaussian, Head, Layer, param_shapes, torso_shapes

__all__ = ["PPO", "Config", "State", "vtrace"]

REWARD_CLIP = 10.0  # scaled rewards are clipped to ±this
FROZEN = 5  # updates of the value network alone, beside a policy that was taken in
AT_ONCE = 2048  # steps whose values are computed together before the epochs …
IMAGES_AT_ONCE = 128  # … and of images: what is between the layers then stays in the processor's caches
AT_ONCE_NUMBERS = 1 << 26  # of their observations
FARTHEST = 20.0  # log-ratio: far beyond any clipping. exp(89) overflows, and 0 × inf in a weighted mean is NaN


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: PositiveInt = 2048  # of experience per update: more is steadier, less learns more often
    epochs: PositiveInt = 10  # passes over each update's experience
    minibatch: PositiveInt = 64  # transitions per gradient step
    lr: PositiveFloat = 3e-4  # Adam's step size …
    lr_final: NonNegativeFloat | None = None  # … which falls to this, in a straight line; none: it stays
    gamma: Fraction = 0.99  # how much the future counts: ~1/(1−γ) steps ahead
    lam: Fraction = 0.95  # λ: 1 trusts the rewards that came, 0 the value network's word for them
    clip: PositiveFloat = 0.2  # ε: how far an update may move an action's probability, as a ratio …
    clip_final: PositiveFloat | None = None  # … which falls to this; none: it stays
    schedule_steps: PositiveInt = 1_000_000  # of experience until lr_final and clip_final are reached
    value_clip: PositiveFloat | None = None  # how far an update may move a value; none: as far as it learns
    value_coefficient: NonNegativeFloat = 0.5  # weight of the value's loss: matters with shared layers or clipping
    entropy_coefficient: NonNegativeFloat | None = None  # reward for staying random; none: 0.01, and 0 for Box actions
    target_kl: PositiveFloat | None = None  # stop an update once it moved the policy this far (nats); none: all epochs
    kl_coefficient: PositiveFloat | None = None  # penalty per nat that an update moves the policy, at first; none: none
    kl_target: PositiveFloat = 0.01  # nats; the penalty grows beyond twice this, and shrinks below half of it
    max_grad_norm: PositiveFloat = 0.5  # a longer gradient is scaled down to this
    max_ratio: PositiveFloat = 1.0  # V-trace's ρ̄ and c̄: how much a step of an older policy may count
    normalise: bool = True  # observations to mean 0, deviation 1, inside the policy
    scale_reward: bool = True  # rewards over the running deviation of their discounted sums
    initial_std: PositiveFloat = 0.6  # of a Box action at the start, whose bounds are ±1
    layers: tuple[Layer, ...] = (Dense(64, "tanh"), Dense(64, "tanh"))  # the policy's
    critic_layers: tuple[Layer, ...] | None = None  # of the value network; none: as many and as large as the policy's
    shared: bool = False  # the value is a second head on the policy's layers: half the work, for images


# For images: one network for both heads, and fewer passes over what is dear to compute (as is usual for Atari).
IMAGES = {"shared": True, "epochs": 4}


class ReturnMoments(NamedTuple):
    """Running moments of discounted sums of rewards."""

    steps: jax.Array
    mean: jax.Array
    var: jax.Array


class State(NamedTuple):
    params: Params  # the policy's, and the value network's as "critic.…"
    optimiser: Any
    returns: ReturnMoments
    key: jax.Array
    updates: jax.Array
    kl_coefficient: jax.Array | None = None  # none: there is no penalty


class EpochRows(NamedTuple):
    """What the epochs go through: one row per step."""

    obs: Any
    action: Any
    log_prob: Any  # under the policy before the update
    value: Any  # by the value network before the update
    weight: Any  # how much the step counts: 1, or less where an older policy took it
    advantage: Any
    target: Any


class PPO(Algorithm):
    config_class = Config
    on_policy = True

    def __init__(self, game: Game, config: Config = Config()) -> None:
        if config.minibatch > config.steps:
            raise InputError(f"PPO: a minibatch of {config.minibatch} is larger than the {config.steps} steps it is of")
        if config.shared and config.critic_layers is not None:
            raise InputError("PPO: critic_layers are for a value network of its own: leave them out, or shared")
        self.game, self.config = game, config
        self.images = is_image(game.observation)
        self.head: Head = Gaussian() if isinstance(game.action, Box) else Categorical()
        self.shapes = param_shapes(game, config.layers, self.head)
        self.critic_layers = config.layers if config.critic_layers is None else config.critic_layers
        critic, width = torso_shapes(game.observation, self.critic_layers)
        self.critic_shapes = {f"critic.{k}": s for k, s in critic.items()} if not config.shared else {}
        self.critic_shapes |= {"critic.head.w": (math.prod(width), 1), "critic.head.b": (1,)}
        usual = 0.0 if isinstance(game.action, Box) else 0.01
        self.entropy_coefficient = usual if config.entropy_coefficient is None else config.entropy_coefficient
        adam = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
        self.optimiser = optax.flatten(adam)  # one long array: a small network's many take longer to go through

    @classmethod
    def defaults_for(cls, observation: Space, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if not is_image(observation):
            return {}
        own_critic = given.get("critic_layers") is not None  # then nothing is shared
        return {key: value for key, value in IMAGES.items() if not (own_critic and key == "shared")}

    @property
    def batch(self) -> int:
        return self.config.minibatch

    def init(self, key: jax.Array) -> State:
        key, actor_key, critic_key = jax.random.split(key, 3)
        params = init_params(actor_key, self.shapes) | init_params(critic_key, self.critic_shapes, head_scale=1.0)
        if "head.log_std" in params:
            params["head.log_std"] += math.log(self.config.initial_std)
        returns = ReturnMoments(jnp.zeros(()), jnp.zeros(()), jnp.ones(()))
        penalty = None if self.config.kl_coefficient is None else jnp.float32(self.config.kl_coefficient)
        data, updates = jax.random.key_data(key), jnp.zeros((), jnp.int32)
        return State(params, self.optimiser.init(params), returns, data, updates, penalty)

    def policy(self, state: State, normaliser: dict[str, Array], exploration: float) -> Policy:
        params = {name: np.asarray(state.params[name]) for name in self.shapes}
        return Policy(self.game, self.config.layers, self.head, params | normaliser, exploration)

    def value(self, state: State) -> Value:
        """In units of the scaled reward, where rewards are scaled."""
        params = {name.removeprefix("critic."): np.asarray(state.params[name]) for name in self.critic_shapes}
        return Value(None if self.config.shared else self.critic_layers, params)

    def warm_start(self, state: State, policy: Policy) -> State:
        """The value network comes first: while `updates` is negative, the policy stays as it is."""
        params = state.params | {name: jnp.asarray(policy.params[name]) for name in self.shapes}
        return state._replace(
            params=params, optimiser=self.optimiser.init(params), updates=jnp.full((), -FROZEN, jnp.int32)
        )

    def update(self, state: State, normaliser: dict[str, Array], data: Trajectories) -> tuple[State, Metrics]:
        """All epochs over these trajectories in one call; losses are means over the gradient steps made."""
        if not np.any(data.mask):
            raise InputError("PPO: there is no step in these trajectories")
        return _update(self, state, normaliser, data)

    def forward(self, params: Params, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The policy head's numbers, and values."""
        hidden = torso(self.config.layers, params, obs)
        seen = hidden if self.config.shared else torso(self.critic_layers, params, obs, "critic.")
        return dense(params, "head", hidden), dense(params, "critic.head", seen)[:, 0]

    def evaluate(self, params: Params, data: Trajectories) -> tuple[jax.Array, jax.Array]:
        """log π(aₜ|xₜ) and V(xₜ), (segments, T) and (segments, T + 1): some segments at a time, which bounds memory."""

        def segment(one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            obs, action = one
            out, value = self.forward(params, obs)
            return log_prob_and_entropy(self.game, params, out[:-1], action)[0], value

        most = IMAGES_AT_ONCE if self.images else AT_ONCE
        abreast = min(most, AT_ONCE_NUMBERS // math.prod(data.obs.shape[2:])) // data.obs.shape[1]
        return jax.lax.map(segment, (data.obs, data.action), batch_size=abreast if abreast > 1 else None)

    def loss(
        self, params: Params, rows: EpochRows, clip: jax.Array, penalty: jax.Array | None = None
    ) -> tuple[jax.Array, Metrics]:
        """Eq. 7 and 9: −min(r A, clip(r, 1 ± ε) A) + c₁ ½(V − v)² − c₂ H, r = π(a|x) / π_old(a|x).

        `penalty`, β of eq. 8: + β KL(π_old, π), estimated by r − 1 − log r, whose gradient is right in the mean too.

        A step of an older policy μ counts min(ρ̄, π_old/μ): V-trace's policy gradient. The clipping is around the
        policy that the update began with, not around one of the past (Hilton et al. 2022).
        """
        c = self.config
        out, value = self.forward(params, rows.obs)
        log_prob, entropy = log_prob_and_entropy(self.game, params, out, rows.action)
        log_ratio = jnp.clip(log_prob - rows.log_prob, -FARTHEST, FARTHEST)
        ratio = jnp.exp(log_ratio)
        gain = jnp.minimum(ratio * rows.advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * rows.advantage)
        policy_loss = -(rows.weight * gain).mean()
        error = jnp.square(value - rows.target)
        if c.value_clip is not None:
            near = rows.value + jnp.clip(value - rows.value, -c.value_clip, c.value_clip)
            error = jnp.maximum(error, jnp.square(near - rows.target))
        value_loss = 0.5 * error.mean()
        kl = (ratio - 1 - log_ratio).mean()  # never negative, little variance (Schulman 2020)
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy.mean(),
            "policy/kl": kl,
            "policy/clipped": (jnp.abs(ratio - 1) > clip).mean(),
        }
        total = policy_loss + c.value_coefficient * value_loss - self.entropy_coefficient * entropy.mean()
        return (total if penalty is None else total + penalty * kl), metrics

    def scheduled(self, updates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The step size and ε for this update."""
        c = self.config
        done = jnp.clip(updates * (c.steps / c.schedule_steps), 0.0, 1.0)
        pairs = ((c.lr, c.lr_final), (c.clip, c.clip_final))
        lr, clip = (jnp.float32(a) if b is None else a + (b - a) * done for a, b in pairs)
        return lr, clip


def adapt(penalty: jax.Array, kl: jax.Array, target: float) -> jax.Array:
    """The penalty for the next update: more where this one moved the policy too far, less where not far enough. By 1.5
    and 0.5, as the reference study's library does it; Schulman et al. 2017, section 4, have 2 and ½."""
    return penalty * jnp.where(kl > 2 * target, 1.5, jnp.where(kl < target / 2, 0.5, 1.0))


def vtrace(
    data: Trajectories, value: jax.Array, log_ratio: jax.Array, gamma: float, lam: float, max_ratio: float
) -> tuple[jax.Array, jax.Array]:
    """Value targets v and advantages A (Espeholt et al. 2018, eq. 1, remark 2 with λ), from V(xₜ), t = 0 … T, and
    log π/μ, t = 0 … T − 1; ρₜ = min(ρ̄, π/μ), cₜ = λ min(c̄, π/μ):

        vₜ − V(xₜ) = ρₜ δₜ + γ cₜ (vₜ₊₁ − V(xₜ₊₁)),  δₜ = rₜ + γ V(xₜ₊₁) − V(xₜ)
        Aₜ = δₜ + γ λ (vₜ₊₁ − V(xₜ₊₁))

    With π = μ these are λ-returns and generalised advantage estimates. V of a terminal state is 0, that of a state at
    which play was only cut counts; beyond either nothing is added.
    """
    mask = data.mask
    ratio = jnp.minimum(jnp.exp(jnp.where(mask, log_ratio, 0.0)), max_ratio)
    now = jnp.where(mask, value[:, :-1], 0.0)
    following = jnp.where(mask & ~data.terminated, value[:, 1:], 0.0)
    delta = jnp.where(mask, data.reward, 0.0) + gamma * following - now
    carry = jnp.where(mask & ~data.ended, gamma * lam, 0.0)

    def back(later: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        delta, carry, ratio = step
        excess = ratio * (delta + carry * later)
        return excess, (excess, delta + carry * later)

    steps = (delta.T, carry.T, ratio.T)
    _, (excess, advantage) = jax.lax.scan(back, jnp.zeros_like(delta[:, 0]), steps, reverse=True)
    return now + excess.T, advantage.T


def scale_rewards(returns: ReturnMoments, data: Trajectories, gamma: float) -> tuple[ReturnMoments, jax.Array]:
    """Rewards over the deviation of discounted sums so far: the customary scaling (Engstrom et al. 2020)."""

    def forth(total: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, ended = step
        total = gamma * total + reward
        return jnp.where(ended, 0.0, total), total

    reward = jnp.where(data.mask, data.reward, 0.0)
    _, sums = jax.lax.scan(forth, jnp.zeros_like(reward[:, 0]), (reward.T, data.ended.T))
    n, mean, var = data.mask.sum(), jnp.mean(sums.T, where=data.mask), jnp.var(sums.T, where=data.mask)
    steps, delta = returns.steps + n, mean - returns.mean
    var = (returns.var * returns.steps + var * n + delta**2 * returns.steps * n / steps) / steps
    returns = ReturnMoments(steps, returns.mean + delta * n / steps, var)
    return returns, jnp.clip(reward * jax.lax.rsqrt(var + 1e-8), -REWARD_CLIP, REWARD_CLIP)


def prepare(ppo: PPO, state: State, data: Trajectories) -> tuple[ReturnMoments, EpochRows, Metrics]:
    """Everything that stays as it is during the epochs."""
    c, returns, mask = ppo.config, state.returns, data.mask
    if c.scale_reward:
        returns, reward = scale_rewards(returns, data, c.gamma)
        data = data._replace(reward=reward)
    log_prob, value = ppo.evaluate(state.params, data)
    log_ratio = jnp.where(mask, log_prob - data.log_prob, 0.0)
    target, advantage = vtrace(data, value, log_ratio, c.gamma, c.lam, c.max_ratio)
    centred = advantage - jnp.mean(advantage, where=mask)
    advantage = centred / (jnp.std(advantage, where=mask) + 1e-8)
    weight = jnp.minimum(jnp.exp(log_ratio), c.max_ratio)
    unexplained = jnp.var(target - value[:, :-1], where=mask) / (jnp.var(target, where=mask) + 1e-8)
    metrics = {
        "value/mean": jnp.mean(value[:, :-1], where=mask),
        "value/explained": 1 - unexplained,
        "policy/staleness": jnp.mean(jnp.exp(log_ratio) - 1 - log_ratio, where=mask),
    }
    rows = EpochRows(data.obs[:, :-1], data.action, log_prob, value[:, :-1], weight, advantage, target)
    return returns, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), metrics


@partial(jax.jit, static_argnums=0)
def _update(ppo: PPO, state: State, normaliser: Params, data: Trajectories) -> tuple[State, Metrics]:
    c = ppo.config
    data = data._replace(obs=normalise(normaliser, data.obs))
    returns, rows, metrics = prepare(ppo, state, data)
    lr, clip = ppo.scheduled(state.updates)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.updates)
    mask = data.mask.reshape(-1)
    count = mask.sum()
    minibatches = jnp.maximum(count // c.minibatch, 1)  # what does not fill another is left out, by chance

    def learn(at: jax.Array, loop: "_Loop", shuffled: EpochRows) -> "_Loop":
        batch = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at * c.minibatch, c.minibatch), shuffled)
        grads, figures = mean_gradients(
            lambda params, rows: ppo.loss(params, rows, clip, state.kl_coefficient), loop.params, batch, ppo.images
        )
        change, optimiser = ppo.optimiser.update(grads, loop.optimiser)
        params = jax.tree.map(lambda p, d: p - lr * d, loop.params, change)
        if "head.log_std" in params:
            params["head.log_std"] = jnp.clip(params["head.log_std"], *LOG_STD_RANGE)
        for name in ppo.shapes:
            params[name] = jnp.where(state.updates < 0, loop.params[name], params[name])
        stop = loop.stop if c.target_kl is None else figures["policy/kl"] > c.target_kl
        return _Loop(params, optimiser, loop.made + 1, jax.tree.map(jnp.add, loop.sums, figures), stop)

    def epoch(number: jax.Array, loop: "_Loop") -> "_Loop":
        # Arrays are put in order once per epoch: slices of them are cheap, gathers are not.
        order = shuffle(jax.random.fold_in(key, number), mask)
        order = order[jnp.arange(max(len(mask), c.minibatch)) % count]  # full minibatches, however few steps
        shuffled = jax.tree.map(lambda x: x[order], rows)
        return _while(minibatches, lambda at, loop: learn(at, loop, shuffled), loop)

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(ppo.loss, state.params, rows, clip)[1])
    loop = _Loop(state.params, state.optimiser, jnp.zeros(()), zeros, jnp.zeros((), bool))
    loop = _while(c.epochs, epoch, loop)
    metrics |= {name: total / loop.made for name, total in loop.sums.items()}
    metrics |= {"policy/epochs": loop.made / minibatches}
    penalty = state.kl_coefficient
    if penalty is not None:
        metrics["policy/kl_coefficient"] = penalty
        penalty = jnp.where(state.updates < 0, penalty, adapt(penalty, metrics["policy/kl"], c.kl_target))
    return State(loop.params, loop.optimiser, returns, state.key, state.updates + 1, penalty), metrics


def shuffle(key: jax.Array, mask: jax.Array) -> jax.Array:
    """The numbers of the rows that are steps, in random order, before all others. A row's number is in the lower bits
    of what is sorted: sorting single numbers takes a fifth of `random.permutation`'s time."""
    bits = (len(mask) - 1).bit_length()
    draw = jnp.where(mask, jax.random.bits(key, mask.shape) >> 1, jnp.uint32(2**32 - 1))
    return jnp.sort(draw >> bits << bits | jnp.arange(len(mask), dtype=jnp.uint32)) & (2**bits - 1)


class _Loop(NamedTuple):
    params: Params
    optimiser: Any
    made: jax.Array  # gradient steps
    sums: Metrics
    stop: jax.Array


def _while(times: Any, body: Any, loop: _Loop) -> _Loop:
    """`body(number, loop)` so many times, or until it says stop."""

    def going(carry: tuple[jax.Array, _Loop]) -> jax.Array:
        return (carry[0] < times) & ~carry[1].stop

    def step(carry: tuple[jax.Array, _Loop]) -> tuple[jax.Array, _Loop]:
        return carry[0] + 1, body(*carry)

    return jax.lax.while_loop(going, step, (jnp.zeros((), jnp.int32), loop))[1]
