"""What layers compute in JAX. NumPy's and ONNX's forms are tested against each other elsewhere."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparring.games import Box, Discrete, Game
from sparring.networks.functions import Params, convolve, dense, init_params, mean_gradients, product, torso
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Conv, Dense, torso_shapes


def plain(x: jax.Array, w: jax.Array, stride: int, padding: str) -> jax.Array:
    """XLA's SAME is TensorFlow's."""
    strides, dimensions = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, strides, padding.upper(), dimension_numbers=dimensions)


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("size", "channels", "filters", "kernel", "stride"),
    [
        ((20, 20), 4, 8, 8, 4),
        ((23, 18), 4, 8, 8, 4),  # rows and columns that no kernel reaches
        ((10, 9), 3, 5, 4, 2),
        ((15, 12), 2, 3, 9, 3),
        ((9, 11), 3, 4, 2, 2),
        ((4, 5), 3, 4, 4, 2),  # one row of outputs
        ((4, 4), 3, 4, 4, 4),
        ((9, 9), 3, 4, 3, 1),
        ((9, 10), 3, 4, 3, 2),  # not a multiple of the stride
        ((11, 12), 3, 4, 5, 3),
        ((11, 8), 3, 4, 2, 3),  # pixels between kernels
        ((10, 10), 1, 32, 4, 2),  # few channels, many filters
        ((5, 5), 3, 6, 5, 1),  # one output
        ((5, 6), 3, 6, 4, 3),
    ],
)
def test_convolutions_and_their_gradients(
    size: tuple[int, int], channels: int, filters: int, kernel: int, stride: int, padding: Literal["valid", "same"]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, *size, channels), np.float32)
    w = rng.standard_normal((kernel, kernel, channels, filters), np.float32)

    layer = Conv(filters, kernel, stride, "linear", padding)
    pads = layer.pads(size[0]), layer.pads(size[1])

    expected, pull_expected = jax.vjp(lambda x, w: plain(x, w, stride, padding), x, w)
    found, pull_found = jax.vjp(lambda x, w: convolve(x, w, stride, pads), x, w)
    assert found.shape == expected.shape == (3, *layer.output((*size, channels)))
    acted = layer.bind_numpy({"w": w, "b": np.zeros(filters, np.float32)})(x)
    np.testing.assert_allclose(acted, expected, atol=1e-4)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    change = jnp.asarray(rng.standard_normal(expected.shape, np.float32))
    for ours, theirs in zip(pull_found(change), pull_expected(change), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_learners_see_what_actors_see(random_policy: Callable[..., Policy]) -> None:
    game = Game("g", Box((5,)), Discrete(3))
    layers = (Dense(16, "silu", norm=True), Dense(9, "tanh"), Dense(8, norm=True))
    policy = random_policy(game, layers, Categorical(), normalised=False)
    obs = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    hidden = torso(layers, policy.params, jnp.asarray(obs))
    np.testing.assert_allclose(dense(policy.params, "head", hidden), policy.outputs(obs), rtol=1e-4, atol=1e-5)
    plain = tuple(Dense(layer.units, layer.activation) for layer in layers)
    assert not np.allclose(torso(plain, policy.params, jnp.asarray(obs)), hidden, atol=0.1)


def test_learners_see_padded_images_as_actors_do(random_policy: Callable[..., Policy]) -> None:
    game = Game("g", Box((13, 10, 3), "uint8"), Discrete(3))
    layers = (Conv(4, 6, 4, "silu", "same"), Conv(5, 3, 2, padding="same"), Conv(8, 2))
    policy = random_policy(game, layers, Categorical(), normalised=False)
    obs = np.random.default_rng(0).integers(0, 256, (7, 13, 10, 3), np.uint8)
    hidden = torso(layers, policy.params, jnp.asarray(obs))
    assert hidden.shape == (7, 8)
    np.testing.assert_allclose(dense(policy.params, "head", hidden), policy.outputs(obs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [48, 128, 67], ids=["few: at once", "two parts", "a prime: at once"])
def test_gradients_of_images_some_rows_at_a_time(count: int) -> None:
    """The same as of all rows at once, metrics too; and some rows at a time is what is computed."""
    layers = (Conv(4, 3, 2), Dense(8))
    shapes, _ = torso_shapes(Box((9, 9, 2), "uint8"), layers)
    params = init_params(jax.random.key(0), shapes)
    rows = np.random.default_rng(0).integers(0, 256, (count, 9, 9, 2)).astype(np.uint8)
    seen = []

    def loss(params: Params, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        seen.append(len(rows))
        out = torso(layers, params, rows)
        return jnp.square(out - 1).mean(), {"largest": out.max(-1).mean()}

    found = mean_gradients(loss, params, rows, images=True)
    assert set(seen) == {48: {48}, 128: {64}, 67: {67}}[count]
    expected = jax.grad(loss, has_aux=True)(params, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    seen.clear()
    mean_gradients(loss, params, rows, images=False)
    assert seen == [count]


def test_products_in_bfloat16() -> None:
    rng = np.random.default_rng(0)
    for width, exact in ((64, True), (256, False)):
        x, w = rng.standard_normal((32, width), np.float32), rng.standard_normal((width, 256), np.float32)
        change = jnp.asarray(rng.standard_normal((32, 256), np.float32))

        def both(x: np.ndarray, w: np.ndarray, change: jax.Array = change) -> list[np.ndarray]:
            out, pull = jax.vjp(jax.jit(product), jnp.asarray(x), jnp.asarray(w))
            return [np.asarray(array) for array in (out, *pull(change))]

        expected = both(x, w)
        with jax.default_matmul_precision("bfloat16"):
            found = both(x, w)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, theirs, atol=0.02 * np.abs(theirs).max())
        if exact:
            assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        else:  # with 8 bits of precision something must differ, and the weights' gradient is exact
            assert not np.array_equal(found[0], expected[0])
            assert not np.array_equal(found[1], expected[1])
            assert np.array_equal(found[2], expected[2])
