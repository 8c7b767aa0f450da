"""Layers and activations as somebody else writes them: the package does not know this file. JAX is imported where it
is needed, so that rollout workers get by without it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from sparring.networks.activations import Activation, find_activation
from sparring.networks.layers import Layer, orthogonal
from sparring.networks.plain_steps import Affine, Step

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]


class Gate(
    Layer, msgspec.Struct, frozen=True, tag_field="layer", tag="outside_layers:Gate", forbid_unknown_fields=True
):
    """act(x·w + b) · sigmoid(x·gate + shift), a gated linear unit (Dauphin et al. 2017); the gate begins open."""

    units: int
    activation: str = "outside_layers:elu"

    def shapes(self, inputs: Shape) -> dict[str, Shape]:
        weights, bias = (*inputs, self.units), (self.units,)
        return {"w": weights, "b": bias, "gate": weights, "shift": bias}

    def output(self, inputs: Shape) -> Shape:
        return (self.units,)

    def init(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        if name == "shift":
            return np.ones(shape, np.float32)
        return 0.5 * orthogonal(rng, shape) if name == "gate" else super().init(name, shape, rng)

    def apply_jax(self, params: Mapping[str, Any], x: Any) -> Any:
        import jax

        z = find_activation(self.activation).apply_jax(x @ params["w"] + params["b"])
        return z * jax.nn.sigmoid(x @ params["gate"] + params["shift"])

    def bind_numpy(self, params: Mapping[str, Array]) -> Callable[[Array], Array]:
        w, b, gate, shift = (params[name] for name in ("w", "b", "gate", "shift"))
        activate = find_activation(self.activation).apply_numpy
        return lambda x: activate(x @ w + b) * (0.5 + 0.5 * np.tanh(0.5 * (x @ gate + shift)))

    def onnx(self, graph: Any, params: Mapping[str, Array], x: str) -> str:
        w, b, gate, shift = (graph.constant(params[name], name) for name in ("w", "b", "gate", "shift"))
        z = find_activation(self.activation).onnx(graph, graph.op("Gemm", x, w, b))
        return str(graph.op("Mul", z, graph.op("Sigmoid", graph.op("Gemm", x, gate, shift))))


class Mean(Layer, msgspec.Struct, frozen=True, tag_field="layer", tag="outside_layers:Mean"):
    """An image → the mean of each channel. It learns nothing."""

    takes_vector: ClassVar[bool] = False

    def shapes(self, inputs: Shape) -> dict[str, Shape]:
        return {}

    def output(self, inputs: Shape) -> Shape:
        return inputs[-1:]

    def apply_jax(self, params: Mapping[str, Any], x: Any) -> Any:
        return x.mean((1, 2))

    def bind_numpy(self, params: Mapping[str, Array]) -> Callable[[Array], Array]:
        return lambda x: x.mean((1, 2))

    def onnx(self, graph: Any, params: Mapping[str, Array], x: str) -> str:
        return str(graph.op("ReduceMean", x, axes=[2, 3], keepdims=0))

    def plain(self, params: Mapping[str, Array], inputs: Shape) -> Sequence[Step]:
        height, width, channels = inputs
        one = np.eye(channels, dtype=np.float32) / (height * width)
        return (Affine(np.tile(one, (height * width, 1)), np.zeros(channels, np.float32)),)


class Unfinished(Layer, msgspec.Struct, frozen=True, tag_field="layer", tag="outside_layers:Unfinished"):
    def shapes(self, inputs: Shape) -> dict[str, Shape]:
        return {}


class Misnamed(Mean, frozen=True, tag_field="layer", tag="mean"):
    """Files would not find it again."""


class Listed(Mean, frozen=True, tag_field="layer", tag="outside_layers:Listed"):
    """Lists have no hash."""

    sizes: list[int] = []


def _jax_elu(x: Any) -> Any:
    import jax

    return jax.nn.elu(x)


def _onnx_elu(graph: Any, x: str) -> str:
    below = graph.op("Sub", graph.op("Exp", graph.op("Min", x, 0.0)), 1.0)
    return str(graph.op("Where", graph.op("Less", x, 0.0), below, x))


elu = Activation(_jax_elu, lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x), _onnx_elu)


def _jax_gelu(x: Any) -> Any:
    import jax

    return jax.nn.gelu(x, approximate=False)


def _numpy_gelu(x: Array) -> Array:
    return x * (0.5 + 0.5 * np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(0.5**0.5)))


def _onnx_gelu(graph: Any, x: str) -> str:
    """With an operator that bots do not know."""
    inner = graph.op("Erf", graph.op("Mul", x, 0.5**0.5))
    return str(graph.op("Mul", x, graph.op("Add", graph.op("Mul", inner, 0.5), 0.5)))


gelu = Activation(_jax_gelu, _numpy_gelu, _onnx_gelu)
