"""The JAX form of networks: what the declarative layers compute, and how their arrays begin."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparring.errors import InputError
from sparring.games.spec import Array
from sparring.networks.layers import NORM_EPSILON, Layer, Pads, orthogonal, own
from sparring.networks.policy import CLIP
from sparring.networks.spec import ParameterShape, QValues

__all__ = [
    "Normaliser",
    "Params",
    "convolve",
    "dense",
    "init_params",
    "mean_gradients",
    "normalise",
    "normalise_rows",
    "product",
    "q_values",
    "torso",
]

Params = dict[str, Any]  # flat: "torso.0.w" → array; the same names in checkpoints, safetensors and ONNX

AT_ONCE = (16, 64)  # images, at least and at most, whose gradients are computed together: see `mean_gradients`
WIDE = 128  # inputs of a layer from which a product in bfloat16 is quicker


def init_params(key: jax.Array, shapes: dict[str, tuple[int, ...]], head_scale: float = 0.01) -> Params:
    """Layers say how their parameters begin. Of heads: orthogonal and small weights, so that no action is preferred,
    and zeros.

    Made on the host: JAX would compile a decomposition for every shape, which takes seconds."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    params: Params = {}
    first: Array
    for name, shape in shapes.items():
        if isinstance(shape, ParameterShape):
            first = np.asarray(shape.init(rng), np.float32)
        elif name.endswith(".w"):
            first = head_scale * orthogonal(rng, shape)
        else:
            first = np.zeros(shape, np.float32)
        if first.shape != shape:
            raise InputError(f"{name} has to be of shape {tuple(shape)}, its layer begins with {first.shape}")
        params[name] = jnp.asarray(first)
    return params


def torso(
    layers: tuple[Layer, ...], params: Params, x: jax.Array, prefix: str = "", extra: jax.Array | None = None
) -> jax.Array:
    """Features (uint8 images or floats) → the flat vector that the heads see. `extra`: see `spec.torso_shapes`."""
    if x.dtype == jnp.uint8:
        x = x.astype(jnp.float32) * (1 / 255)
    for i, layer in enumerate(layers):
        if layer.takes_vector:
            x, extra = _join(x, extra), None
        x = layer.apply_jax(own(params, f"{prefix}torso.{i}."), x)
    return _join(x, extra)


def _join(x: jax.Array, extra: jax.Array | None) -> jax.Array:
    flat = x.reshape(len(x), -1)
    return flat if extra is None else jnp.concatenate([flat, extra], -1)


def normalise_rows(z: jax.Array) -> jax.Array:
    """To mean 0 and deviation 1 (`Dense.norm`)."""
    return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + NORM_EPSILON)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w, in bfloat16 summed in float32 where JAX is configured so and it is faster: not for narrow inputs, nor for
    heads, whose digits count. XLA for CPUs ignores that setting, though AMX multiplies bfloat16 three times as fast.
    """
    if jax.config.jax_default_matmul_precision != "bfloat16" or len(w) < WIDE:  # type: ignore[attr-defined]
        return x @ w
    return _half_product(x, w)


@jax.custom_vjp
def _half_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _half_dot(x, w, 0)


def _half_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _half_dot(x, w, 0), (x, w)


def _half_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return _half_dot(grad, w, 1), x.T @ grad  # the weights' gradient is no quicker in bfloat16


def _half_dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    half, axes = jnp.bfloat16, (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x.astype(half), w.astype(half), axes, preferred_element_type=jnp.float32)


_half_product.defvjp(_half_forward, _half_backward)


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.w"] + params[f"{name}.b"]


def convolve(x: jax.Array, w: jax.Array, stride: int, pads: Pads = ((0, 0), (0, 0))) -> jax.Array:
    """NHWC."""
    if jax.default_backend() == "cpu":
        return _convolve_on_cpu(x, w, stride, pads)
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _convolve_on_cpu(x: jax.Array, w: jax.Array, stride: int, pads: Pads) -> jax.Array:
    kernel, filters = w.shape[0], w.shape[-1]
    if all(size + sum(pad) < kernel + stride for size, pad in zip(x.shape[1:3], pads, strict=True)):
        x = jnp.pad(x, [(0, 0), *pads, (0, 0)])[:, :kernel, :kernel]  # one output: a dense layer
        return (x.reshape(len(x), -1) @ w.reshape(-1, filters))[:, None, None]
    return _convolve_by_products(*_stride_to_depth(x, w, stride, pads))


def _stride_to_depth(x: jax.Array, w: jax.Array, stride: int, pads: Pads) -> tuple[jax.Array, jax.Array]:
    """The same convolution without a stride: every block of stride × stride pixels becomes one with all their channels.
    A kernel that does not fill its blocks gets zeros."""
    (n, *sizes, channels), kernel = x.shape, w.shape[0]
    shifts = -(-kernel // stride)
    h, width = ((size + sum(pad) - kernel) // stride + shifts for size, pad in zip(sizes, pads, strict=True))
    more = [  # or fewer
        (before, blocks * stride - size - before, 0)
        for blocks, size, (before, _) in zip((h, width), sizes, pads, strict=True)
    ]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *more, (0, 0, 0)])
    x = x.reshape(n, h, stride, width, stride * channels)
    x = jnp.concatenate([x[:, :, row] for row in range(stride)], -1)  # a transposition takes longer
    w = jnp.pad(w, [(0, shifts * stride - kernel)] * 2 + [(0, 0)] * 2)
    w = w.reshape(shifts, stride, shifts, stride * channels, -1).swapaxes(1, 2)
    return x, w.reshape(shifts, shifts, x.shape[-1], -1)


def _convolve_by_products(x: jax.Array, w: jax.Array) -> jax.Array:
    """For XLA on a CPU, whose gradients of convolutions are slow, inside a loop (where we learn) twenty times slower
    still: jax-ml/jax#12868."""
    kernel, _, channels, filters = w.shape
    h, width = (size - kernel + 1 for size in x.shape[1:3])
    shifts = [(i, j) for i in range(kernel) for j in range(kernel)]
    if len(shifts) * filters <= 4 * channels:  # wider products cost more to move than the larger matrices gain
        products = _product(x, w.transpose(2, 0, 1, 3).reshape(channels, -1))
        terms = [
            products[:, i : i + h, j : j + width, k * filters : (k + 1) * filters] for k, (i, j) in enumerate(shifts)
        ]
    else:
        terms = [_product(x[:, i : i + h, j : j + width], w[i, j]) for i, j in shifts]
    return functools.reduce(jnp.add, terms)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` over pixels, as matrices: with more axes XLA takes up to three times as long."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)


def mean_gradients(loss: Callable[[Params, Any], Any], params: Params, rows: Any, images: bool) -> tuple[Params, Any]:
    """Gradients and metrics of `loss(params, rows)`, which are means over the rows, as `jax.grad(…, has_aux=True)`.

    Of images on a CPU some rows are taken at a time: what is between the layers then stays in the caches, which makes
    convolutions 1.2 to 1.8 times as fast."""
    grad = jax.grad(loss, has_aux=True)
    count = len(jax.tree.leaves(rows)[0])
    least, most = AT_ONCE
    part = next((n for n in range(most, least - 1, -1) if count % n == 0), count)
    if not images or part >= count or jax.default_backend() != "cpu":
        return grad(params, rows)
    parts = jax.tree.map(lambda x: x.reshape(count // part, part, *x.shape[1:]), rows)

    def add(total: Any, some: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(params, some)), None

    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], parts))
    total, _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), parts)
    mean: tuple[Params, Any] = jax.tree.map(lambda x: x * (part / count), total)
    return mean


def q_values(head: QValues, params: Params, hidden: jax.Array, sizes: tuple[int, ...] | None = None) -> jax.Array:
    """(batch, actions). `sizes`: of the parts of an action that has several (`spec.choices`)."""
    q = dense(params, "head", hidden)
    if head.duelling:
        parts = [q] if sizes is None else jnp.split(q, np.cumsum(sizes)[:-1], -1)
        centred = [part - part.mean(-1, keepdims=True) for part in parts]
        q = jnp.concatenate(centred, -1) + dense(params, "head.value", hidden)
    return q


class Normaliser:
    """Running mean and variance of features, in float64 on the host (Chan et al. 1979): counts grow beyond what float32
    can add to. Images are not normalised: they are divided by 255."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0.0
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)

    def observe(self, x: Array) -> None:
        if len(x) == 0:
            return
        n, mean, var = float(len(x)), x.mean(0, dtype=np.float64), x.var(0, dtype=np.float64)
        total = self.count + n
        delta = mean - self.mean
        self.var = (self.var * self.count + var * n + delta**2 * self.count * n / total) / total
        self.mean = self.mean + delta * n / total
        self.count = total

    @property
    def params(self) -> dict[str, Array]:
        """As the policy carries them."""
        std = np.sqrt(self.var + 1e-8)
        return {
            "normaliser.mean": self.mean.astype(np.float32),
            "normaliser.std": np.where(std < 1e-3, 1.0, std).astype(np.float32),  # a constant input stays what it is
        }


def normalise(params: Params, x: jax.Array) -> jax.Array:
    if "normaliser.mean" not in params:
        return x
    return jnp.clip((x - params["normaliser.mean"]) / params["normaliser.std"], -CLIP, CLIP)
