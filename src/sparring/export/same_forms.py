"""A layer from outside has several forms, written by hand: JAX learns, NumPy acts, ONNX is published, and plain steps
become Keras, TFLite and C. Where they differ, players would meet another network than the one that was learned, and
nothing would say so. This looks before."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from sparring import plugins
from sparring.errors import InputError, Unrenderable
from sparring.games.spec import Array
from sparring.networks.layers import Layer, Shape, own
from sparring.networks.plain import walk
from sparring.networks.policy import Policy
from sparring.networks.spec import feature_shape

__all__ = ["require_same_forms"]

ROWS = 3
RTOL, ATOL = 1e-3, 1e-4  # float32, summed in another order

Arrays = Mapping[str, Array]


def require_same_forms(policy: Policy) -> None:
    """InputError where a layer, or an activation, from outside fails or computes something else in one of its forms.
    Those of ours are compared by tests: of a network of these alone nothing is loaded."""
    shape = feature_shape(policy.game.observation)
    for place, layer in enumerate(policy.layers):
        if layer.takes_vector:
            shape = (math.prod(shape),)
        if plugins.is_outside(layer.kind) or plugins.is_outside(str(getattr(layer, "activation", ""))):
            _compare(
                f"layer {place} ({layer.kind} {layer.summary()})", layer, own(policy.params, f"torso.{place}."), shape
            )
        shape = layer.output(shape)


def _compare(name: str, layer: Layer, params: Arrays, inputs: Shape) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, *inputs), np.float32)
    params = {key: (p + 0.1 * rng.standard_normal(p.shape)).astype(np.float32) for key, p in params.items()}
    expected = (ROWS, *layer.output(inputs))
    found: dict[str, Array] = {}
    forms: dict[str, Callable[[Layer, Arrays, Array], Array]] = {
        "apply_jax": _jax,
        "bind_numpy": _numpy,
        "onnx": _onnx,
        "plain": lambda layer, params, x: walk(layer.plain(params, x.shape[1:]), x),
    }
    for method, form in forms.items():
        try:
            found[method] = form(layer, params, x.copy())
        except Unrenderable:
            continue  # it says itself that it has no such form
        except (Exception, SystemExit) as error:  # whatever the layer does
            raise InputError(f"{name}: its `{method}` fails: {type(error).__name__}: {error}") from error
        if found[method].shape != expected:
            raise InputError(f"{name}: its `{method}` gives {found[method].shape}, by its `output` it is {expected}")
        if not np.allclose(found[method], found["apply_jax"], RTOL, ATOL):
            far = np.abs(found[method] - found["apply_jax"]).max()
            raise InputError(
                f"{name}: its `{method}` and its `apply_jax` differ by up to {far:.2g} for the same input and "
                "parameters: players would meet another network than the one that learned"
            )


def _jax(layer: Layer, params: Arrays, x: Array) -> Array:
    import jax.numpy as jnp

    return np.asarray(layer.apply_jax({key: jnp.asarray(p) for key, p in params.items()}, jnp.asarray(x)))


def _numpy(layer: Layer, params: Arrays, x: Array) -> Array:
    """As workers do it: the arrays get their numbers after the function was made."""
    arrays = {key: np.zeros_like(p) for key, p in params.items()}
    act = layer.bind_numpy(arrays)
    for key, p in params.items():
        arrays[key][...] = p
    return np.asarray(act(x))


def _onnx(layer: Layer, params: Arrays, x: Array) -> Array:
    """Images are (channels, height, width) there."""
    import onnxruntime
    from onnx import TensorProto, helper

    from sparring.export.onnx import IR_VERSION, OPSET
    from sparring.networks.onnx_graph import Graph

    graph = Graph()
    graph.shape = x.shape[1:]
    out = layer.onnx(graph, params, "x")
    fed = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", fed.shape), (out, None))]
    made = helper.make_graph(graph.nodes, "layer", values[:1], values[1:], list(graph.constants.values()))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4  # what fails is raised
    session = onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=["CPUExecutionProvider"])
    result = np.asarray(session.run(None, {"x": fed})[0])
    return result.transpose(0, 2, 3, 1) if result.ndim == 4 else result
