"""Layers: what stands between a policy's observation and its head. Each is one entry with its renderings: JAX to
learn, NumPy to act, ONNX to publish, and plain steps, of which the other formats are made.

Files name ours by a word and others by where they are:

    layers: [{layer: dense, units: 64, activation: tanh}, {layer: my_layers:Gate, units: 64}]

This module is light: what needs JAX imports it when it is called. `spec.torso_shapes`, `functions.torso`,
`Policy.outputs` and `export.onnx` walk through a network's layers; none of them knows a layer by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from sparring import plugins
from sparring.errors import InputError, Unrenderable
from sparring.games.spec import Array
from sparring.networks.activations import find_activation
from sparring.networks.plain_steps import Affine, Convolve, Normalise, Step

if TYPE_CHECKING:
    import jax

    from sparring.networks.onnx_graph import Graph

__all__ = [
    "LAYERS",
    "NORM_EPSILON",
    "Conv",
    "Dense",
    "Layer",
    "decode",
    "decode_imported",
    "find_layer",
    "flatten",
    "orthogonal",
    "own",
]

LAYERS = {"dense": "sparring.networks.layers:Dense", "conv": "sparring.networks.layers:Conv"}
NORM_EPSILON = 1e-5  # added to the variance
GAIN = 2**0.5  # of weights before they are learned

Shape = tuple[int, ...]
Pads = tuple[tuple[int, int], tuple[int, int]]  # zeros above and below, left and right


class Layer:
    """The base of every layer. One from outside is a frozen struct that says where it is found; its fields are what
    files may set. A field `activation` names one of `networks/activations.py` or a `module:value`.

        class Gate(Layer, msgspec.Struct, frozen=True, tag_field="layer", tag="my_layers:Gate"):
            units: int
            activation: str = "tanh"

    It then has the methods below that raise NotImplementedError. Shapes are without the batch. Images are
    (height, width, channels), in ONNX (channels, height, width). Parameters have names of one's own, such as "w" and
    "b"; in files they are `torso.<place>.<name>`.

    Two things are left room for. Neither changes the layers that there are.

    A state, for layers that remember (recurrent ones). Such a layer will say its state's shape by a method, which gives
    None by default. `apply_jax` and the function of `bind_numpy` will take and give the state beside `x`. So will
    `Policy.act`, and the ONNX graph as inputs and outputs `state.<place>`. An actor will clear it when an episode
    begins, and keep it with the first row of a block.

    An image with numbers beside it. A Dict with both is one flat vector now. `features` will give such an observation
    by parts, and a first layer will take them: it has layers of its own for each part, and gives one vector.
    """

    __slots__ = ()
    __struct_config__: ClassVar[Any]

    # True: the input is flattened first. A critic's action joins the input of the first such layer.
    takes_vector: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """How files name it: `dense`, `my_layers:Gate`."""
        return str(self.__struct_config__.tag)

    def summary(self) -> str:
        """Its settings in a few words, for people; the activation is not among them."""
        assert isinstance(self, msgspec.Struct)
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "activation"}
        words = [name if value is True else str(value) for name, value in fields.items() if value is not False]
        return " ".join(words)

    def shapes(self, inputs: Shape) -> dict[str, Shape]:
        """Names and shapes of what it learns.

        :raises InputError: it cannot have such an input, or its settings make no sense.
        """
        raise NotImplementedError

    def output(self, inputs: Shape) -> Shape:
        """The shape that leaves it."""
        raise NotImplementedError

    def init(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        """How a parameter begins: weights "w" orthogonal with gain √2 (Saxe et al. 2014), all others 0."""
        return GAIN * orthogonal(rng, shape) if name == "w" else np.zeros(shape, np.float32)

    def apply_jax(self, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        """For learners: differentiable, compiled. Import JAX inside it: rollout workers load its module as well."""
        raise NotImplementedError

    def bind_numpy(self, params: Mapping[str, Array]) -> Callable[[Array], Array]:
        """The function that acts: called at every step, so look up here what it needs. The arrays get new numbers in
        place when a worker gets a new policy: compute nothing from them before it is called."""
        raise NotImplementedError

    def onnx(self, graph: Graph, params: Mapping[str, Array], x: str) -> str:
        """Adds nodes to a graph and gives the name of their result; `graph.shape` is that of `x`. Bots refuse operators
        other than those of `export/onnx_check.py`, so a policy with others cannot be published."""
        raise NotImplementedError

    def plain(self, params: Mapping[str, Array], inputs: Shape) -> Sequence[Step]:
        """The same in steps that Keras, TFLite and C are written from (`networks/plain.py`). May be left out: then
        these formats refuse a policy that has the layer, and all others hold it."""
        raise Unrenderable(
            f"layer {self.kind!r} has no `plain`, of which this format is made: see sparring.networks.layers.Layer"
        )


class Dense(Layer, msgspec.Struct, frozen=True, tag="dense", tag_field="layer", forbid_unknown_fields=True):
    """`norm`: its numbers get mean 0 and deviation 1, row by row, before the activation (Ba et al. 2016, without scale
    and shift of their own). Critics with it learn faster from replayed experience."""

    units: int
    activation: str = "relu"
    norm: bool = False

    def summary(self) -> str:
        return f"{self.units}{' normalised' * self.norm}"

    def shapes(self, inputs: Shape) -> dict[str, Shape]:
        _check_sizes(self, self.units)
        return {"w": (*inputs, self.units), "b": (self.units,)}

    def output(self, inputs: Shape) -> Shape:
        return (self.units,)

    def apply_jax(self, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        from sparring.networks.functions import normalise_rows, product

        z = product(x, params["w"]) + params["b"]
        return find_activation(self.activation).apply_jax(normalise_rows(z) if self.norm else z)

    def bind_numpy(self, params: Mapping[str, Array]) -> Callable[[Array], Array]:
        w, b, activate, epsilon = params["w"], params["b"], _numpy(self.activation), np.float32(NORM_EPSILON)

        def plain(x: Array) -> Array:
            z = x @ w
            z += b
            return activate(z)

        def normalised(x: Array) -> Array:
            z = x @ w
            z += b
            return activate((z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + epsilon))

        return normalised if self.norm else plain

    def onnx(self, graph: Graph, params: Mapping[str, Array], x: str) -> str:
        b, w = (graph.constant(params[name], name) for name in ("b", "w"))
        x = graph.op("Gemm", x, w, b)
        if self.norm:
            x = graph.op("LayerNormalization", x, np.ones(self.units, np.float32), epsilon=NORM_EPSILON)
        return find_activation(self.activation).onnx(graph, x)

    def plain(self, params: Mapping[str, Array], inputs: Shape) -> Sequence[Step]:
        norm = (Normalise(NORM_EPSILON),) if self.norm else ()
        return (Affine(params["w"], params["b"]), *norm, *_plain(self.activation))


class Conv(Layer, msgspec.Struct, frozen=True, tag="conv", tag_field="layer", forbid_unknown_fields=True):
    """Square kernel. Its weights are (kernel, kernel, in, out).

    `padding`: "same" puts zeros around the image, so that there is an output for every `stride`-th pixel. Of an odd
    number of rows or columns the larger half goes below and right, as in TensorFlow. "valid" adds none.
    """

    takes_vector: ClassVar[bool] = False

    filters: int
    kernel: int
    stride: int = 1
    activation: str = "relu"
    padding: Literal["valid", "same"] = "valid"

    def summary(self) -> str:
        return f"{self.filters} {self.kernel}×{self.kernel}/{self.stride}{' same' * (self.padding == 'same')}"

    def shapes(self, inputs: Shape) -> dict[str, Shape]:
        _check_sizes(self, self.filters, self.kernel, self.stride)
        if len(inputs) != 3:
            raise InputError(f"it is a Conv, but its input is a flat vector of {inputs}: use Dense here")
        h, w, channels = inputs
        if self.padding == "valid" and min(h, w) < self.kernel:
            raise InputError(f"a kernel of {self.kernel} does not fit its {h}×{w} input")
        return {"w": (self.kernel, self.kernel, channels, self.filters), "b": (self.filters,)}

    def output(self, inputs: Shape) -> Shape:
        h, w = ((sum(self.pads(side)) + side - self.kernel) // self.stride + 1 for side in inputs[:2])
        return h, w, self.filters

    def pads(self, side: int) -> tuple[int, int]:
        """Zeros before and after an image's height or width."""
        if self.padding == "valid":
            return 0, 0
        pixels = (-(-side // self.stride) - 1) * self.stride + self.kernel  # that the kernels reach
        missing = max(0, pixels - side)
        return missing // 2, missing - missing // 2

    def apply_jax(self, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        from sparring.networks.functions import convolve

        z = convolve(x, params["w"], self.stride, (self.pads(x.shape[1]), self.pads(x.shape[2])))
        return find_activation(self.activation).apply_jax(z + params["b"])

    def bind_numpy(self, params: Mapping[str, Array]) -> Callable[[Array], Array]:
        w, b, stride, activate = params["w"], params["b"], self.stride, _numpy(self.activation)
        kernel, pads, padded = w.shape[:2], self.pads, self.padding == "same"

        def convolve(x: Array) -> Array:
            if padded:
                x = np.pad(x, ((0, 0), pads(x.shape[1]), pads(x.shape[2]), (0, 0)))
            windows = np.lib.stride_tricks.sliding_window_view(x, kernel, (1, 2))[:, ::stride, ::stride]
            z = np.tensordot(windows, w, ((4, 5, 3), (0, 1, 2)))
            z += b
            return activate(z)

        return convolve

    def onnx(self, graph: Graph, params: Mapping[str, Array], x: str) -> str:
        b = graph.constant(params["b"], "b")
        w = graph.constant(params["w"].transpose(3, 2, 0, 1), "w")
        (top, bottom), (left, right) = (self.pads(side) for side in graph.shape[:2])
        pads = {"pads": [top, left, bottom, right]} if self.padding == "same" else {}
        x = graph.op("Conv", x, w, b, kernel_shape=[self.kernel] * 2, strides=[self.stride] * 2, **pads)
        return find_activation(self.activation).onnx(graph, x)

    def plain(self, params: Mapping[str, Array], inputs: Shape) -> Sequence[Step]:
        pads = self.pads(inputs[0]), self.pads(inputs[1])
        return (Convolve(params["w"], params["b"], self.stride, pads), *_plain(self.activation))


def _check_sizes(layer: Layer, *sizes: int) -> None:
    """What the types cannot say when a layer is made in Python rather than decoded."""
    if min(sizes) < 1:
        raise InputError(f"{layer}: its sizes must be at least 1")


def _numpy(activation: str) -> Callable[[Array], Array]:
    return find_activation(activation).apply_numpy


def _plain(activation: str) -> Sequence[Step]:
    if (steps := find_activation(activation).plain) is None:
        raise Unrenderable(f"activation {activation!r} has no `plain`, of which this format is made")
    return steps


# Finding


NEEDED = ("shapes", "output", "apply_jax", "bind_numpy", "onnx")


@lru_cache(maxsize=256)
def find_layer(name: str) -> type[Layer]:
    """The layer that a name means.

    :raises InputError: there is none, or it is not what a layer has to be; the error says what to write.
    """
    found = plugins.find("layer", name, LAYERS)
    if not (isinstance(found, type) and issubclass(found, Layer) and issubclass(found, msgspec.Struct)):
        raise InputError(f"layer {name!r} is {found!r}: it has to be a class of both Layer and msgspec.Struct")
    config = found.__struct_config__
    if (config.tag_field, config.tag, config.frozen) != ("layer", name, True):
        raise InputError(f'layer {name!r}: declare its struct with frozen=True, tag_field="layer", tag="{name}"')
    if missing := [method for method in NEEDED if getattr(found, method) is getattr(Layer, method)]:
        raise InputError(f"layer {name!r} has no {', '.join(missing)}: see sparring.networks.layers.Layer")
    return found


def decode(kind: type, written: Any) -> Any:
    """A layer as files write it → the layer: the `dec_hook` for msgspec of every type that has a `Layer` in it."""
    if kind is not Layer:
        raise NotImplementedError(f"{kind} is not read here")
    if isinstance(written, Layer):  # it was made in Python
        return written
    name = written.get("layer") if isinstance(written, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"{str(written)[:200]!r} is no layer: say which `layer` it is, {' or '.join(LAYERS)}")
    try:
        layer = msgspec.convert(written, find_layer(name))
        hash(layer)  # algorithms are looked up by their hyperparameters
        check_activation(layer)
    except InputError as error:
        raise ValueError(str(error)) from error
    except TypeError as error:
        raise ValueError(f"layer {name!r}: {error}. Use tuples in its fields, not lists") from error
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise ValueError(f"{path.rstrip('`')}: {message}" if path else message) from error
    return layer


def decode_imported(kind: type, written: Any) -> Any:
    """As `decode`, for files that somebody else may have written: it imports nothing. What is not ours has to be
    imported already by whoever reads."""
    for value in written.values() if isinstance(written, dict) else ():
        if not isinstance(value, str) or not plugins.is_outside(value):
            continue
        module, _, attribute = value.partition(":")
        if module not in sys.modules or attribute not in vars(sys.modules[module]):  # not by a lazy `__getattr__`
            raise ValueError(f"it needs {value!r}: import {module!r} before, if you trust it")
    return decode(kind, written)


def check_activation(layer: Layer) -> None:
    """:raises InputError: a layer's field `activation` names nothing."""
    if isinstance(name := getattr(layer, "activation", None), str):
        find_activation(name)


# What renderings share


def flatten(x: Array) -> Array:
    """Rows of numbers; written so that an empty batch has a shape too."""
    return x if x.ndim == 2 else x.reshape(len(x), math.prod(x.shape[1:]))


def own(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """One layer's parameters by its own names: those that begin with `prefix`, without it."""
    return {name.removeprefix(prefix): array for name, array in params.items() if name.startswith(prefix)}


def orthogonal(rng: np.random.Generator, shape: Shape) -> Array:
    """All axes but the last are rows."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tall = rng.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(tall)
    q = (q * np.sign(np.diag(r))).astype(np.float32)  # so that every orthogonal matrix is as likely
    return (q if rows >= columns else q.T).reshape(shape)
