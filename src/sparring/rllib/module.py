"""What RLlib learned as our policy: the default modules' layers, read out of PyTorch and checked to be equal. The check
runs the published ONNX graph against RLlib's own module and distribution; a difference is an error."""

from typing import Any

import numpy as np
import onnxruntime
import torch
from ray.rllib.algorithms.bc.torch.default_bc_torch_rl_module import DefaultBCTorchRLModule
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.torch.encoder import TorchActorCriticEncoder, TorchMLPEncoder
from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead, TorchMLPHead

from sparring.errors import SparringError, Unrenderable
from sparring.export import onnx
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.policy import OBSERVED_LOG_STD_RANGE, Policy, features
from sparring.networks.spec import Categorical, Dense, Gaussian, Head, QValues, Squashed
from sparring.rllib.game import game_actions

__all__ = ["check_equal", "render"]

ACTIVATIONS = {torch.nn.ReLU: "relu", torch.nn.Tanh: "tanh", torch.nn.SiLU: "silu"}
SAMPLES = 64  # observations that are compared
LayerWeights = tuple[Array, Array]  # (in, out) and (out,)


def render(module: Any, game: Game, exploration: float = 0.0) -> Policy:
    """Raises Unrenderable, or SparringError where ours differs from RLlib's."""
    if not type(module).__module__.startswith("ray.rllib."):
        raise _not_default(module)  # though it may be a subclass of one
    if isinstance(module, DefaultDQNTorchRLModule):
        policy = _q_network(module, game, exploration)
    else:
        policy = _actor(module, game)
    if policy.problem() is None:  # else learning diverged, which is for the loop to report
        check_equal(policy, module)
    return policy


def _not_default(module: Any) -> Unrenderable:
    return Unrenderable(f"{type(module).__name__} is not one of RLlib's default modules: it cannot be rendered as ONNX")


def _actor(module: Any, game: Game) -> Policy:
    encoder, pi = _parts(module)
    layers, weights = _mlp(encoder)
    more, outer = _mlp(pi)
    params = _named([*weights, *outer])
    head = _head(module, pi, game)
    if head == Gaussian():
        params["head.log_std"] = np.clip(_array(pi.log_std), -_limit(pi), _limit(pi))
    return Policy(game, (*layers, *more), head, params)


def _parts(module: Any) -> tuple[Any, Any]:
    """The network that acts: what encodes observations, and its head."""
    if isinstance(module, DefaultSACTorchRLModule):  # CQL's and IQL's too
        return module.pi_encoder, module.pi
    if isinstance(module, DefaultBCTorchRLModule):
        return module._encoder, module._pi_head
    if isinstance(module, DefaultPPOTorchRLModule):  # IMPALA's, APPO's, MARWIL's too
        encoder = module.encoder
        if isinstance(encoder, TorchActorCriticEncoder):
            return (encoder.encoder if encoder.config.shared else encoder.actor_encoder), module.pi
        return encoder, module.pi
    raise _not_default(module)


def _head(module: Any, pi: Any, game: Game) -> Head:
    if not isinstance(game.action, Box):
        return Categorical()
    if isinstance(module, DefaultSACTorchRLModule):
        return Squashed()
    if isinstance(pi, TorchFreeLogStdMLPHead):
        return Gaussian()
    if (-_limit(pi), _limit(pi)) != OBSERVED_LOG_STD_RANGE:
        raise Unrenderable(
            f"algorithm.model_config.log_std_clip_param is {_limit(pi):g}: only {OBSERVED_LOG_STD_RANGE[1]:g} "
            "can be rendered as ONNX"
        )
    return Gaussian(observed=True)


def _limit(pi: Any) -> float:
    return float(pi.log_std_clip_param_const) if pi.clip_log_std else float("inf")


def _q_network(module: Any, game: Game, exploration: float) -> Policy:
    if module.num_atoms > 1:
        raise Unrenderable(f"algorithm.num_atoms is {module.num_atoms}: a distribution of values cannot be rendered")
    layers, weights = _mlp(module.encoder)
    more, advantage = _mlp(module.af)
    if not module.uses_dueling:
        return Policy(game, (*layers, *more), QValues(), _named([*weights, *advantage]), exploration)
    _, value = _mlp(module.vf)
    # Two heads with hidden layers of their own are one of twice the width, whose halves do not see each other.
    hidden = [_beside(a, v, first=i == 0) for i, (a, v) in enumerate(zip(advantage[:-1], value[:-1], strict=True))]
    (a, b), (v, c) = advantage[-1], value[-1]
    if hidden:
        a, v = np.concatenate([a, np.zeros_like(a)]), np.concatenate([np.zeros_like(v), v])
    params = _named([*weights, *hidden, (a, b)]) | {"head.value.w": v, "head.value.b": c}
    more = tuple(Dense(2 * layer.units, layer.activation) for layer in more)
    return Policy(game, (*layers, *more), QValues(duelling=True), params, exploration)


def _beside(one: LayerWeights, other: LayerWeights, *, first: bool) -> LayerWeights:
    (a, b), (v, c) = one, other
    if first:  # both see all of the encoder
        return np.concatenate([a, v], 1), np.concatenate([b, c])
    return np.block([[a, np.zeros_like(v)], [np.zeros_like(a), v]]), np.concatenate([b, c])


def _mlp(model: Any) -> tuple[tuple[Dense, ...], list[LayerWeights]]:
    """Dense layers with their activations, and the weights of all; a last one without activation is a head's."""
    if not isinstance(model, TorchMLPEncoder | TorchMLPHead | TorchFreeLogStdMLPHead):
        raise Unrenderable(
            f"a {type(model).__name__} cannot be rendered as ONNX: only fully connected layers can (no use_lstm, "
            "no convolutions)"
        )
    layers: list[Dense] = []
    weights: list[LayerWeights] = []
    for part in model.net.mlp:
        if isinstance(part, torch.nn.Linear):
            bias = np.zeros(part.out_features, np.float32) if part.bias is None else _array(part.bias)
            weights.append((_array(part.weight).T, bias))
            layers.append(Dense(part.out_features, "linear"))
        elif type(part) in ACTIVATIONS:
            layers[-1] = Dense(layers[-1].units, ACTIVATIONS[type(part)])
        else:
            raise Unrenderable(f"a {type(part).__name__} layer cannot be rendered as ONNX")
    if not isinstance(model, TorchMLPEncoder):
        layers.pop()
    return tuple(layers), weights


def _named(weights: list[LayerWeights]) -> dict[str, Array]:
    *torso, (w, b) = weights
    named = {"head.w": w, "head.b": b}
    for i, (w, b) in enumerate(torso):
        named |= {f"torso.{i}.w": w, f"torso.{i}.b": b}
    return named


def _array(tensor: Any) -> Array:
    return tensor.detach().cpu().numpy().copy()  # what RLlib learns on must not change what was rendered


def check_equal(policy: Policy, module: Any) -> None:
    """The ONNX graph and RLlib's module and distribution, greedy and exploring, on observations of the game's space."""
    rng = np.random.default_rng(0)
    obs = _observations(policy.game.observation, rng)
    noise = policy.noise(rng, SAMPLES)
    with torch.no_grad():
        seen = {Columns.OBS: torch.from_numpy(features(policy.game.observation, obs))}
        if isinstance(policy.head, QValues):
            _compare_q_values(policy, obs, module.compute_q_values(seen)["qf_preds"].numpy())
            return
        out = module.forward_inference(seen)[Columns.ACTION_DIST_INPUTS]
        _compare_distributions(policy, obs, noise, out, module)


def _compare_q_values(policy: Policy, obs: Array, expected: Array) -> None:
    _require("Q-values", policy.outputs(obs), expected)
    action, _, _ = _run(policy, obs, policy.noise(np.random.default_rng(0), SAMPLES))
    assert isinstance(policy.game.action, Discrete)
    chosen = np.take_along_axis(expected, (action - policy.game.action.start)[:, None], 1)[:, 0]
    _require("value of the greedy action", chosen, expected.max(1))


def _compare_distributions(policy: Policy, obs: Array, noise: Array, out: Any, module: Any) -> None:
    action, sampled, log_prob = _run(policy, obs, noise)
    distribution = module.get_inference_action_dist_cls().from_logits(out)
    if isinstance(policy.head, Categorical):
        index = sampled - policy.game.action.start if isinstance(policy.game.action, Discrete) else sampled
        _require("log-probability", log_prob, distribution.logp(torch.from_numpy(index.astype(np.int64))).numpy())
        greedy = action - policy.game.action.start if isinstance(policy.game.action, Discrete) else action
        best = distribution.to_deterministic().sample()
        of_ours, of_theirs = (distribution.logp(a) for a in (torch.from_numpy(greedy.astype(np.int64)), best))
        _require("log-probability of the greedy action", of_ours.numpy(), of_theirs.numpy())
        return
    mean, log_std = (part.numpy() for part in out.chunk(2, dim=-1))
    if isinstance(policy.head, Squashed):
        # RLlib's greedy action is the mean before it is squashed, clipped; ours is squashed, as it was learned.
        scale = distribution._dist.scale.numpy()
        _require("greedy action", action, game_actions(policy.game, np.tanh(mean)))
        u = torch.from_numpy(mean + scale * noise)
        _require("exploring action", sampled, game_actions(policy.game, distribution._squash(u).numpy()))
        _require("log-probability", log_prob, distribution._squashed_logp(u).numpy())
        return
    s, u = policy.scaling, mean + np.exp(log_std) * noise
    _require("greedy action", action, game_actions(policy.game, mean))
    _require("exploring action", sampled, game_actions(policy.game, u))
    inside = ((u > s.unit_low) & (u < s.unit_high)).all(1)  # ours tells the mass on a bound, RLlib no bound at all
    _require("log-probability", log_prob[inside], distribution.logp(torch.from_numpy(u)).numpy()[inside])


def _run(policy: Policy, obs: Array, noise: Array) -> tuple[Array, Array, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that `noise` can be overridden, which is meant
    session = onnxruntime.InferenceSession(onnx.render(policy), options, providers=["CPUExecutionProvider"])
    names = obs.dtype.names
    feeds = {"obs": obs} if names is None else {f"obs.{name}": np.ascontiguousarray(obs[name]) for name in names}
    action, sampled, log_prob = session.run(["action", "sampled", "log_prob"], feeds | {"noise": noise})
    return action, sampled, log_prob


def _require(what: str, ours: Array, theirs: Array) -> None:
    if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        worst = float(np.nanmax(np.abs(ours - theirs), initial=0.0))
        raise SparringError(f"the rendered policy differs from RLlib's module: its {what} by up to {worst:.3g}")


def _observations(space: Space, rng: np.random.Generator) -> Array:
    """Any of the space's; of an unbounded one the middle."""
    column = np.zeros(SAMPLES, space.element)
    if isinstance(space, Dict):
        for name, part in space.fields.items():
            column[name] = _observations(part, rng)
    elif isinstance(space, Discrete):
        column[:] = rng.integers(space.start, space.start + space.n, SAMPLES)
    elif isinstance(space, MultiDiscrete):
        column[:] = rng.integers(0, space.nvec, (SAMPLES, len(space.nvec)))
    elif space.dtype.startswith("float"):
        column[:] = rng.standard_normal((SAMPLES, *space.shape))
    else:
        column[:] = rng.integers(0, 2 if space.dtype == "bool" else 100, (SAMPLES, *space.shape))
    return column
