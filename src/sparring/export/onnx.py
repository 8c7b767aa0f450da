"""A policy as one ONNX file: raw observation in, game action out, so that any ONNX runtime plays the game. The graph is
written from the declarative layers, node by node; no framework's exporter is in between.

Inputs: `obs` (or `obs.<field>` per field of a Dict) and `noise`, an initializer that a runtime may leave out. Outputs:
`action` (greedy), `sampled` (exploring, from the noise), `log_prob` (of `sampled`) and `outputs` (the head's numbers);
with a value, `value`. See `Policy.act`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from onnx import TensorProto, checker, helper

from sparring.games import Box, Dict, Discrete, MultiDiscrete, Space
from sparring.games.spec import Array
from sparring.networks.layers import Layer, own
from sparring.networks.onnx_graph import Graph
from sparring.networks.plain import Value
from sparring.networks.policy import (
    CLIP,
    ERFC,
    FAR,
    GUMBEL_CLIP,
    HALF_LOG_2PI,
    LOG_2,
    LOG_STD_RANGE,
    MIN_PROB,
    OBSERVED_LOG_STD_RANGE,
    Policy,
)
from sparring.networks.spec import (
    Categorical,
    Gaussian,
    QValues,
    Squashed,
    action_size,
    choices,
    feature_shape,
    image_layout,
)

__all__ = ["render"]

OPSET, IR_VERSION = 17, 8  # old enough for every runtime we meet, phones and browsers included


def render(policy: Policy, value: Value | None = None) -> bytes:
    """The same bytes for the same policy."""
    g, game = Graph(), policy.game
    inputs = [_input(name, space) for name, space in _parts(game.observation)]
    inputs.append(helper.make_tensor_value_info("noise", TensorProto.FLOAT, ["noise_rows", policy.noise_size]))
    default = 0.5 if policy.noise_kind == "uniform" else 0.0
    g.constant(np.full((1, policy.noise_size), default, np.float32), "noise")
    features = _normalised(g, policy)
    x = _torso(g, policy.game.observation, policy.layers, policy.params, features)
    out = _head(g, policy, x)
    act = _q_values if isinstance(policy.head, QValues) else _categorical
    action, sampled, log_prob = (act if policy.noise_kind == "uniform" else _continuous)(g, policy, out)
    names = {action: "action", sampled: "sampled", log_prob: "log_prob", out: "outputs"}
    if value is not None:
        names[_value(g, policy, value, features, x)] = "value"
    g.rename(names)
    element = game.action.element
    kind = helper.np_dtype_to_tensor_dtype(element.base)
    outputs = [helper.make_tensor_value_info(name, kind, ["N", *element.shape]) for name in ("action", "sampled")]
    outputs.append(helper.make_tensor_value_info("log_prob", TensorProto.FLOAT, ["N"]))
    outputs.append(helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["N", len(policy.params["head.b"])]))
    if value is not None:
        outputs.append(helper.make_tensor_value_info("value", TensorProto.FLOAT, ["N"]))
    graph = helper.make_graph(g.nodes, "policy", inputs, outputs, list(g.constants.values()))
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="sparring"
    )
    helper.set_model_props(model, _metadata(policy))
    checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def _metadata(policy: Policy) -> dict[str, str]:
    density = "probability" if policy.noise_kind == "uniform" else "density"
    return {
        "sparring.game": msgspec.json.encode(policy.game, order="sorted").decode(),
        "sparring.schema": policy.game.schema,
        "sparring.noise": policy.noise_kind,
        # "none": the head has no density and log_prob is always 0
        "sparring.log_prob": density
        if isinstance(policy.head, QValues | Categorical | Gaussian | Squashed)
        else "none",
    }


def _parts(observation: Space) -> list[tuple[str, Box | Discrete | MultiDiscrete]]:
    if isinstance(observation, Dict):
        return [(f"obs.{name}", observation.fields[name]) for name in sorted(observation.fields)]
    return [("obs", observation)]


def _input(name: str, space: Space) -> Any:
    element = space.element
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(element.base), ["N", *element.shape])


def _normalised(g: Graph, policy: Policy) -> str:
    """What the first layer sees. Images travel as NCHW, which ONNX convolves; the features, and so the weights of a
    Dense layer above, are in NHWC order."""
    p = policy.params
    x, image = _features(g, policy.game.observation)
    if "normaliser.mean" in p:
        axes = (2, 0, 1) if image else (0,)
        mean, std = (g.constant(p[f"normaliser.{k}"].transpose(axes), f"normaliser.{k}") for k in ("mean", "std"))
        x = g.op("Clip", g.op("Div", g.op("Sub", x, mean), std), -CLIP, CLIP)
    return x


def _head(g: Graph, policy: Policy, x: str) -> str:
    """The head's numbers [N, outputs]."""
    out = _dense(g, policy.params, "head", x)
    if isinstance(policy.head, QValues) and policy.head.duelling:
        parts = _split(g, out, choices(policy.game.action))
        centred = [g.op("Sub", part, g.op("ReduceMean", part, axes=[1], keepdims=1)) for part in parts]
        joined = centred[0] if len(centred) == 1 else g.op("Concat", *centred, axis=1)
        out = g.op("Add", joined, _dense(g, policy.params, "head.value", x))
    return out


def _torso(
    g: Graph, observation: Space, layers: Sequence[Layer], params: Mapping[str, Array], x: str, prefix: str = ""
) -> str:
    """The vector that the head sees."""
    shape = feature_shape(observation)
    for i, layer in enumerate(layers):
        if layer.takes_vector:
            x, shape = _flat(g, x, len(shape) == 3), (math.prod(shape),)
        g.scope, g.shape = f"{prefix}torso.{i}.", shape
        x = layer.onnx(g, own(params, f"torso.{i}."), x)
        g.scope, shape = "", layer.output(shape)
    return _flat(g, x, len(shape) == 3)


def _value(g: Graph, policy: Policy, value: Value, features: str, hidden: str) -> str:
    """[N], by layers of its own or from what the policy's layers give."""
    x = hidden
    if value.layers is not None:
        x = _torso(g, policy.game.observation, value.layers, value.params, features, "value.")
    g.scope = "value."
    out = _dense(g, value.params, "head", x)
    g.scope = ""
    return g.op("Squeeze", out, _axis(1))


def _features(g: Graph, observation: Space) -> tuple[str, bool]:
    """What the first layer sees, and whether it is an image (NCHW)."""
    parts = _parts(observation)
    if len(parts) == 1 and not isinstance(observation, Dict):
        return _part(g, *parts[0])
    return g.op("Concat", *[_flat(g, *_part(g, name, space)) for name, space in parts], axis=1), False


def _part(g: Graph, x: str, space: Box | Discrete | MultiDiscrete) -> tuple[str, bool]:
    if isinstance(space, Discrete):
        values = np.arange(space.start, space.start + space.n, dtype=np.int32)
        return _cast(g, g.op("Equal", g.op("Unsqueeze", x, _axis(1)), values), np.float32), False
    if isinstance(space, MultiDiscrete):
        # Each part repeated once per value it can have, against those values: one-hot without a loop.
        which = np.repeat(np.arange(len(space.nvec)), space.nvec)
        values = np.concatenate([np.arange(n, dtype=np.int32) for n in space.nvec])
        return _cast(g, g.op("Equal", g.op("Gather", x, which, axis=1), values), np.float32), False
    if space.dtype != "float32":
        x = _cast(g, x, np.float32)
    if space.is_image:
        h, w, c = (axis + 1 for axis in image_layout(space))
        if (c, h, w) != (1, 2, 3):
            x = g.op("Transpose", x, perm=[0, c, h, w])
        return g.op("Mul", x, 1 / 255), True
    return x if len(space.shape) == 1 else g.op("Flatten", x, axis=1), False


def _flat(g: Graph, x: str, image: bool) -> str:
    return g.op("Flatten", g.op("Transpose", x, perm=[0, 2, 3, 1]), axis=1) if image else x


def _dense(g: Graph, params: Mapping[str, Array], name: str, x: str) -> str:
    w, b = (g.constant(params[f"{name}.{k}"], f"{name}.{k}") for k in ("w", "b"))
    return g.op("Gemm", x, w, b)


def _q_values(g: Graph, policy: Policy, out: str) -> tuple[str, str, str]:
    """Each part of the action by itself; noise is whether each is random, then which."""
    action, e = policy.game.action, float(policy.exploration)
    sizes = choices(action)
    best, chosen, log_probs = [], [], []
    for i, (n, q) in enumerate(zip(sizes, _split(g, out, sizes), strict=True)):
        best.append(g.op("ArgMax", q, axis=1, keepdims=0))
        whether, which = (g.op("Gather", "noise", j, axis=1) for j in (i, len(sizes) + i))
        random = g.op("Min", _cast(g, g.op("Mul", which, float(n)), np.int64), n - 1)
        chosen.append(g.op("Where", g.op("Less", whether, e), random, best[-1]))
        other, of_best = (float(np.log(max(p, MIN_PROB))) for p in (e / n, e / n + 1 - e))
        log_probs.append(g.op("Where", g.op("Equal", chosen[-1], best[-1]), of_best, other))
    if isinstance(action, Discrete):
        return _discrete(g, policy, best[0]), _discrete(g, policy, chosen[0]), log_probs[0]
    columns = [[g.op("Unsqueeze", one, _axis(1)) for one in each] for each in (best, chosen, log_probs)]
    greedy, explored = (_discrete(g, policy, g.op("Concat", *each, axis=1)) for each in columns[:2])
    return greedy, explored, g.op("ReduceSum", g.op("Concat", *columns[2], axis=1), _axis(1), keepdims=0)


def _categorical(g: Graph, policy: Policy, out: str) -> tuple[str, str, str]:
    action = policy.game.action
    sizes = action.nvec if isinstance(action, MultiDiscrete) else (action_size(action),)
    u = g.op("Clip", "noise", *GUMBEL_CLIP)
    gumbel = g.op("Neg", g.op("Log", g.op("Neg", g.op("Log", u))))
    best, chosen, log_probs = [], [], []
    for logits, noise in zip(_split(g, out, sizes), _split(g, gumbel, sizes), strict=True):
        best.append(g.op("ArgMax", logits, axis=1, keepdims=1))
        chosen.append(g.op("ArgMax", g.op("Add", logits, noise), axis=1, keepdims=1))
        log_probs.append(g.op("GatherElements", g.op("LogSoftmax", logits, axis=1), chosen[-1], axis=1))
    log_prob = g.op("ReduceSum", g.op("Concat", *log_probs, axis=1), _axis(1), keepdims=0)
    picks = [g.op("Concat", *parts, axis=1) for parts in (best, chosen)]
    if isinstance(action, Discrete):
        picks = [g.op("Squeeze", pick, _axis(1)) for pick in picks]
    return _discrete(g, policy, picks[0]), _discrete(g, policy, picks[1]), log_prob


def _discrete(g: Graph, policy: Policy, index: str) -> str:
    action = policy.game.action
    if isinstance(action, Discrete) and action.start:
        index = g.op("Add", index, action.start)
    return _cast(g, index, np.int32)


def _continuous(g: Graph, policy: Policy, out: str) -> tuple[str, str, str]:
    k, s = policy.noise_size, policy.scaling
    if isinstance(policy.head, Gaussian):
        if policy.head.observed:
            mean, log_std = _split(g, out, (k, k))
            log_std = g.op("Clip", log_std, *OBSERVED_LOG_STD_RANGE)
        else:
            mean, log_std = out, g.constant(policy.params["head.log_std"], "head.log_std")
        u = g.op("Add", mean, g.op("Mul", "noise", g.op("Exp", log_std)))
        best, chosen = (_clip(g, v, s.unit_low, s.unit_high) for v in (mean, u))
        density = _log_clipped_normal(g, policy, mean, log_std, _scale(g, policy, chosen))
    elif isinstance(policy.head, Squashed):
        mean, log_std = _split(g, out, (k, k))
        log_std = g.op("Clip", log_std, *LOG_STD_RANGE)
        u = g.op("Add", mean, g.op("Mul", "noise", g.op("Exp", log_std)))
        best, chosen = g.op("Tanh", mean), g.op("Tanh", u)
        inner = g.op("Sub", g.op("Sub", LOG_2, u), g.op("Softplus", g.op("Mul", u, -2.0)))
        density = g.op("Sub", _log_normal(g, "noise", log_std), g.op("Mul", inner, 2.0))
    else:
        best = g.op("Tanh", out)
        noisy = g.op("Add", best, g.op("Mul", "noise", float(policy.exploration)))
        chosen = g.op("Clip", noisy, -1.0, 1.0)
        density = g.op("Mul", best, 0.0)
    log_prob = g.op("ReduceSum", density, _axis(1), keepdims=0)
    return _to_game(g, policy, best), _to_game(g, policy, chosen), log_prob


def _log_normal(g: Graph, z: str, log_std: str) -> str:
    """log N(z; 0, 1) − log σ."""
    return g.op("Sub", g.op("Sub", g.op("Mul", g.op("Mul", z, z), -0.5), log_std), HALF_LOG_2PI)


def _log_clipped_normal(g: Graph, policy: Policy, mean: str, log_std: str, action: str) -> str:
    """See `Policy._log_prob_gaussian`: the tail's mass on a bound, else the density."""
    s = policy.scaling
    at_low, at_high = (g.op("Equal", action, bound) for bound in (s.low, s.high))
    low, high = (np.where(np.isfinite(edge), edge, np.float32(0)) for edge in (s.unit_low, s.unit_high))
    distance = g.op("Where", at_high, g.op("Sub", mean, high), g.op("Sub", low, mean))
    tail = _log_normal_cdf(g, g.op("Mul", distance, g.op("Exp", g.op("Neg", log_std))))
    return g.op("Where", at_high, tail, g.op("Where", at_low, tail, _log_normal(g, "noise", log_std)))


def _log_normal_cdf(g: Graph, x: str) -> str:
    """See `distributions.log_normal_cdf`."""
    a = g.op("Mul", g.op("Min", g.op("Max", x, g.op("Neg", x)), FAR), 0.5**0.5)
    t = g.op("Div", 1.0, g.op("Add", g.op("Mul", a, 0.5), 1.0))
    fit = g.constant(ERFC[0])
    for c in ERFC[1:]:
        fit = g.op("Add", g.op("Mul", fit, t), c)
    tail = g.op("Sub", g.op("Add", g.op("Sub", g.op("Log", t), g.op("Mul", a, a)), fit), LOG_2)
    return g.op("Where", g.op("Less", x, 0.0), tail, g.op("Log", g.op("Sub", 1.0, g.op("Exp", tail))))


def _to_game(g: Graph, policy: Policy, unit: str) -> str:
    flat, shape = _scale(g, policy, unit), policy.game.action.element.shape
    return flat if len(shape) == 1 else g.op("Reshape", flat, np.array([0, *shape]))  # 0: as it was, N


def _scale(g: Graph, policy: Policy, unit: str) -> str:
    """Numbers in ±1 → the game's, still flat."""
    action, s = policy.game.action, policy.scaling
    assert isinstance(action, Box)
    if action.dtype != "float32":
        unit = _cast(g, unit, np.dtype(action.dtype).type)
    if s.bounded.any():
        unit = g.op("Add", g.op("Mul", unit, s.half), s.centre)
    return _clip(g, unit, s.low, s.high)


def _clip(g: Graph, x: str, low: Array, high: Array) -> str:
    """Per dimension; ONNX's Clip has one bound for all."""
    return g.op("Min", g.op("Max", x, low), high)


def _split(g: Graph, x: str, sizes: Sequence[int]) -> list[str]:
    if len(sizes) == 1:
        return [x]
    return g.ops("Split", x, np.array(sizes), axis=1, outputs=len(sizes))


def _cast(g: Graph, x: str, to: type[np.generic]) -> str:
    return g.op("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(to)))


def _axis(axis: int) -> Array:
    return np.array([axis])
