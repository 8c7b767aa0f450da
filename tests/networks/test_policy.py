"""What a policy does with an observation: chances, densities, bounds, refusals. ONNX is tested against it elsewhere."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparring.errors import InputError
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.policy import Policy, features
from sparring.networks.spec import (
    Categorical,
    Conv,
    Dense,
    Deterministic,
    Gaussian,
    Head,
    QValues,
    Squashed,
    param_shapes,
    scaling,
)

MakePolicy = Callable[..., Policy]


def fixed(action: Any, head: Head, outputs: list[float], exploration: float = 0.0, **params: Any) -> Policy:
    """A policy that always gives these outputs, whatever it sees."""
    game = Game("g", Box((1,)), action)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in param_shapes(game, (), head).items()}
    return Policy(game, (), head, arrays | {"head.b": np.array(outputs, np.float32)} | params, exploration)


def sample(policy: Policy, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    action, log_prob = policy.act(np.zeros((n, 1), np.float32), policy.noise(np.random.default_rng(seed), n))
    assert log_prob is not None
    return action, log_prob


def test_epsilon_greedy_frequencies() -> None:
    policy, n = fixed(Discrete(4, start=5), QValues(), [0.0, 3.0, 1.0, 2.0], 0.4), 40_000
    action, log_prob = sample(policy, n)
    expected = np.array([0.1, 0.7, 0.1, 0.1])
    np.testing.assert_allclose(np.bincount(action - 5, minlength=4) / n, expected, atol=5 * np.sqrt(0.25 / n))
    np.testing.assert_allclose(np.exp(log_prob), expected[action - 5], rtol=1e-5)
    assert policy.act(np.zeros((2, 1), np.float32))[0].tolist() == [6, 6]


def test_epsilon_at_its_ends() -> None:
    values = [0.0, 3.0, 1.0]
    action, log_prob = sample(fixed(Discrete(3), QValues(), values, 0.0), 1000)
    assert set(action) == {1}
    assert set(log_prob) == {0.0}
    action, log_prob = sample(fixed(Discrete(3), QValues(), values, 1.0), 1000)
    assert set(action) == {0, 1, 2}
    np.testing.assert_allclose(log_prob, np.log(1 / 3), rtol=1e-5)


def test_duelling_does_not_move_the_mean() -> None:
    """Q = V + A − mean(A), Wang et al. 2016, eq. 9."""
    policy = fixed(Discrete(3), QValues(duelling=True), [1.0, 2.0, 6.0], **{"head.value.b": np.float32([10])})
    np.testing.assert_allclose(policy.outputs(np.zeros((1, 1), np.float32)), [[8, 9, 13]])


def test_each_part_of_an_action_is_greedy_and_explored_by_itself() -> None:
    policy, n = fixed(MultiDiscrete((2, 3)), QValues(), [0.0, 1.0, 5.0, 0.0, 2.0], 0.3), 40_000
    action, log_prob = sample(policy, n)
    joint = np.outer([0.15, 0.85], [0.8, 0.1, 0.1])
    found = np.zeros((2, 3))
    np.add.at(found, (action[:, 0], action[:, 1]), 1 / n)
    np.testing.assert_allclose(found, joint, atol=5 * np.sqrt(0.25 / n))
    np.testing.assert_allclose(np.exp(log_prob), joint[action[:, 0], action[:, 1]], rtol=1e-4)
    assert policy.act(np.zeros((1, 1), np.float32))[0].tolist() == [[1, 0]]
    assert [part.tolist() for part in policy.values(np.zeros(1))] == [[0, 1], [5, 0, 2]]
    np.testing.assert_allclose(policy.probabilities(np.zeros(1))[1], [0.8, 0.1, 0.1], rtol=1e-6)


def test_duelling_centres_each_part() -> None:
    policy = fixed(
        MultiDiscrete((2, 3)), QValues(duelling=True), [1.0, 3.0, 1.0, 2.0, 6.0], **{"head.value.b": np.float32([10])}
    )
    np.testing.assert_allclose(policy.outputs(np.zeros((1, 1), np.float32)), [[9, 11, 8, 9, 13]])


def test_sampling_follows_softmax() -> None:
    logits = np.array([2.0, 0.0, -1.0, 0.5])
    chance, n = np.exp(logits) / np.exp(logits).sum(), 40_000
    action, log_prob = sample(fixed(Discrete(4), Categorical(), logits.tolist()), n)
    np.testing.assert_allclose(np.bincount(action, minlength=4) / n, chance, atol=5 * np.sqrt(0.25 / n))
    np.testing.assert_allclose(np.exp(log_prob), chance[action], rtol=1e-4)


def test_parts_of_a_multi_discrete_are_independent() -> None:
    policy, n = fixed(MultiDiscrete((2, 3)), Categorical(), [0.0, 1.0, 0.0, 0.0, 2.0]), 40_000
    action, log_prob = sample(policy, n)
    first, second = np.exp([0.0, 1.0]), np.exp([0.0, 0.0, 2.0])
    joint = np.outer(first / first.sum(), second / second.sum())
    found = np.zeros((2, 3))
    np.add.at(found, (action[:, 0], action[:, 1]), 1 / n)
    np.testing.assert_allclose(found, joint, atol=5 * np.sqrt(0.25 / n))
    np.testing.assert_allclose(np.exp(log_prob), joint[action[:, 0], action[:, 1]], rtol=1e-4)
    assert policy.act(np.zeros((1, 1), np.float32))[0].tolist() == [[1, 2]]


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.2, 0.5)])
def test_squashed_density_is_the_density_of_what_it_samples(mean: float, log_std: float) -> None:
    """exp(log_prob), as a function of the action scaled to ±1, integrates to one and agrees with a histogram."""
    policy = fixed(Box((1,), low=0.0, high=10.0), Squashed(), [mean, log_std])
    z = np.linspace(-7, 7, 20_001, dtype=np.float32)[:, None]
    action, log_prob = policy.act(np.zeros((len(z), 1), np.float32), z)
    assert log_prob is not None
    unit = action[:, 0].astype(np.float64) / 5 - 1
    density = np.exp(log_prob.astype(np.float64))
    assert np.trapezoid(density, unit) == pytest.approx(1, abs=1e-3)
    found, edges = np.histogram(sample(policy, 100_000)[0] / 5 - 1, 20, (-1, 1), density=True)
    inside = [np.interp(np.linspace(a, b, 50), unit, density).mean() for a, b in itertools.pairwise(edges)]
    np.testing.assert_allclose(found[2:-2], inside[2:-2], rtol=0.1, atol=0.02)


def test_squashed_density_far_out_stays_finite() -> None:
    policy = fixed(Box((1,), low=-1.0, high=1.0), Squashed(), [300.0, 2.0])
    action, log_prob = policy.act(np.zeros((3, 1), np.float32), np.float32([[-5], [0], [5]]))
    assert action.tolist() == [[1.0]] * 3
    assert log_prob is not None
    assert np.isfinite(log_prob).all()


def test_gaussian_density_is_of_the_recorded_action() -> None:
    """A learner recomputes it from the (clipped) action in the fragment; at the same parameters the ratio must be 1.
    On a bound lies all of the Gaussian's mass beyond it."""
    log_std, mean = np.float32([0.3, -0.5]), np.float32([0.8, -0.1])
    policy = fixed(Box((2,), low=(0.0, -4.0), high=(2.0, 4.0)), Gaussian(), list(mean), **{"head.log_std": log_std})
    action, log_prob = sample(policy, 1000)
    unit = (action - [1, 0]) / [1, 4]
    z, beyond = (unit - mean) / np.exp(log_std), (1 - unit * mean) / np.exp(log_std)
    density = -0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)
    mass = np.vectorize(lambda x: math.log(0.5 * math.erfc(x / 2**0.5)))(beyond)
    on_bound = np.abs(unit) == 1
    assert on_bound.any(0).all()
    for i, edge in itertools.product((0, 1), (-1, 1)):
        there = (1 - edge * mean[i]) / np.exp(log_std[i])
        assert (unit[:, i] == edge).mean() == pytest.approx(0.5 * math.erfc(there / 2**0.5), abs=0.05)
    np.testing.assert_allclose(log_prob, np.where(on_bound, mass, density).sum(-1), rtol=1e-4, atol=1e-4)


def test_gaussian_density_with_a_tiny_deviation() -> None:
    """mean + σ·noise − mean loses every digit here; the noise itself does not."""
    policy = fixed(Box((1,)), Gaussian(), [1000.0], **{"head.log_std": np.float32([-12])})
    _, log_prob = policy.act(np.zeros((1, 1), np.float32), np.float32([[1.0]]))
    assert log_prob is not None
    assert log_prob[0] == pytest.approx(-0.5 + 12 - 0.9189, abs=1e-3)


def test_deterministic_adds_its_noise_in_scaled_units() -> None:
    policy = fixed(Box((1,), low=-10.0, high=10.0), Deterministic(), [0.0], 0.1)
    noise = np.float32([[1.0], [-2.0], [100.0]])
    action, log_prob = policy.act(np.zeros((3, 1), np.float32), noise)
    np.testing.assert_allclose(action, [[1.0], [-2.0], [10.0]], rtol=1e-5)
    assert log_prob is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head", [Gaussian(), Squashed(), Deterministic()])
def test_actions_never_leave_bounds_that_float32_cannot_hold(head: Head, dtype: str) -> None:
    """float32(0.1) > 0.1: a bot that acts at its limit must not have its own records refused."""
    action = Box((3,), dtype, low=(-0.1, 0.7, 0.3), high=(0.1, 0.8, 1 / 3))
    for sign in (-50.0, 50.0):
        outputs = [sign] * 3 * (2 if isinstance(head, Squashed) else 1)
        found, _ = fixed(action, head, outputs, 1.0).act(
            np.zeros((1, 1), np.float32), np.full((1, 3), sign, np.float32)
        )
        assert action.problem(found) is None
        assert found.dtype == dtype
        np.testing.assert_allclose(found[0], action.bounds[int(sign > 0)], rtol=1e-6)


def test_partly_bounded_actions() -> None:
    """1e308 is how the catalogue writes that there is no bound."""
    action = Box((3,), low=(0.0, -1e308, -2.0), high=(1e308, 5.0, 2.0))
    s = scaling(action)
    assert s.bounded.tolist() == [False, False, True]
    found, _ = fixed(action, Gaussian(), [7.0, 7.0, 7.0]).act(np.zeros((1, 1), np.float32))
    assert found.tolist() == [[7.0, 5.0, 2.0]]
    found, _ = fixed(action, Gaussian(), [-7.0, -7.0, -0.5]).act(np.zeros((1, 1), np.float32))
    assert found.tolist() == [[0.0, -7.0, -1.0]]
    for head in (Squashed(), Deterministic()):
        with pytest.raises(InputError, match="needs a lower and an upper bound"):
            fixed(action, head, [0.0] * 3)


def test_features_of_every_space() -> None:
    image = np.arange(2 * 5 * 4 * 3).reshape(2, 5, 4, 3).astype(np.uint8)
    as_frames = np.ascontiguousarray(image.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(
        features(Box((5, 4, 3), "uint8"), image), features(Box((3, 5, 4), "uint8"), as_frames)
    )
    np.testing.assert_allclose(features(Box((5, 4, 3), "uint8"), image), image / np.float32(255), rtol=1e-6)
    assert features(Discrete(3, start=-1), np.int32([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert features(MultiDiscrete((2, 3)), np.int32([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]
    space = Dict({"b": Discrete(2), "a": Box((2,), "int16")})
    row = np.zeros(1, space.element)
    row["a"], row["b"] = [5, -6], 1
    assert features(space, row).tolist() == [[5, -6, 0, 1]]


def test_convolution_is_what_it_says() -> None:
    game = Game("g", Box((7, 6, 2), "uint8"), Discrete(2))
    rng = np.random.default_rng(0)
    layers = (Conv(3, 3, 2, "linear"),)
    params = {k: rng.standard_normal(v).astype(np.float32) for k, v in param_shapes(game, layers, QValues()).items()}
    obs = rng.integers(0, 256, (2, 7, 6, 2)).astype(np.uint8)
    x, w = obs / 255, params["torso.0.w"]
    plane = np.zeros((2, 3, 2, 3))
    for i in range(3):
        for j in range(2):
            plane[:, i, j] = np.einsum("nhwc,hwco->no", x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3], w)
    expected = (plane + params["torso.0.b"]).reshape(2, -1) @ params["head.w"] + params["head.b"]
    np.testing.assert_allclose(Policy(game, layers, QValues(), params).outputs(obs), expected, rtol=1e-3, atol=1e-4)


def test_padding_puts_the_larger_half_below_and_right() -> None:
    """As TensorFlow has it, with what it says for kernels of ones: each output counts the pixels that it sees."""
    counts = {(5, 4, 2): [3, 4, 2], (6, 3, 2): [3, 3, 2], (5, 2, 3): [2, 2], (3, 7, 1): [3, 3, 3], (7, 1, 3): [1, 1, 1]}
    for (size, kernel, stride), expected in counts.items():
        layer = Conv(1, kernel, stride, "linear", "same")
        ones = {"w": np.ones((kernel, kernel, 1, 1), np.float32), "b": np.zeros(1, np.float32)}
        found = layer.bind_numpy(ones)(np.ones((1, size, 9, 1), np.float32))[0, :, -(-9 // stride) // 2, 0]
        assert (found / kernel).tolist() == expected, (size, kernel, stride)
        assert layer.output((size, 9, 1))[0] == len(expected)


def test_normalised_observations_are_clipped(random_policy: MakePolicy) -> None:
    game = Game("g", Box((2,)), Discrete(2))
    policy = random_policy(game, (Dense(4, "tanh"),), QValues())
    far = policy.params["normaliser.mean"] + policy.params["normaliser.std"] * np.float32(10)
    np.testing.assert_allclose(
        policy.outputs(far[None]), policy.outputs(far[None] + np.float32(1e6)), rtol=1e-5, atol=1e-6
    )


def test_parameters_become_float32_numpy(random_policy: MakePolicy) -> None:
    game = Game("g", Box((2,)), Discrete(2))
    first = random_policy(game, (Dense(4),), QValues())
    again = Policy(game, first.layers, first.head, {k: v.astype(np.float64) for k, v in first.params.items()})
    assert {v.dtype for v in again.params.values()} == {np.dtype(np.float32)}
    assert again.act(np.zeros((3, 2)))[0].tolist() == first.act(np.zeros((3, 2), np.float32))[0].tolist()
    shared = Policy(game, first.layers, first.head, first.params)
    assert all(np.shares_memory(shared.params[k], v) for k, v in first.params.items())  # no copies for rollout workers


def test_refusals() -> None:
    game = Game("g", Box((4,)), Discrete(2))
    image = Game("g", Box((8, 8, 3), "uint8"), Discrete(2))
    for where, layers, head, reason in (
        (game, (Conv(4, 3),), QValues(), "use Dense here"),
        (game, (Dense(0),), QValues(), "at least 1"),
        (image, (Conv(4, 3, 0),), QValues(), "at least 1"),
        (image, (Conv(4, 9),), QValues(), "does not fit"),
        (game, (Dense(4, "gelu"),), QValues(), "gelu"),  # type: ignore[arg-type]  # what a typo looks like
        (game, (), Squashed(), "use one of QValues, Categorical"),
    ):
        with pytest.raises(InputError, match=reason):
            param_shapes(where, layers, head)
    with pytest.raises(InputError, match=r"head.w: None not \(4, 2\)"):
        Policy(game, (), QValues(), {"head.b": np.zeros(2, np.float32)})
    for exploration in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="exploration"):
            fixed(Discrete(2), QValues(), [0.0, 0.0], exploration)


def test_a_diverged_policy_says_so(random_policy: MakePolicy) -> None:
    policy = random_policy(Game("g", Box((2,)), Discrete(2)), (Dense(4),), QValues())
    assert policy.problem() is None
    for name, value in (("head.w", np.nan), ("torso.0.b", np.inf), ("normaliser.std", 0.0)):
        broken = Policy(
            policy.game, policy.layers, policy.head, policy.params | {name: policy.params[name] * 0 + value}
        )
        assert (broken.problem() or "").startswith(name)


SPACES = {
    "box": (Box((4,)), np.arange(8, dtype=np.float32).reshape(2, 4)),
    "number": (Box(()), np.float32([1, 2])),
    "double": (Box((2, 3), "float64"), np.arange(12, dtype=np.float64).reshape(2, 2, 3)),
    "image": (Box((5, 6, 3), "uint8"), np.arange(180, dtype=np.uint8).reshape(2, 5, 6, 3)),
    "frames": (Box((3, 5, 6), "uint8"), np.arange(180, dtype=np.uint8).reshape(2, 3, 5, 6)),
    "discrete": (Discrete(4, start=3), np.int32([3, 6])),
    "multi": (MultiDiscrete((2, 3, 4)), np.int32([[0, 1, 2], [1, 2, 3]])),
}


def seeing(observation: Any) -> Policy:
    game = Game("g", observation, Discrete(5))
    rng = np.random.default_rng(0)
    shapes = param_shapes(game, (), Categorical())
    return Policy(game, (), Categorical(), {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()})


@pytest.mark.parametrize("kind", SPACES)
def test_one_observation_gets_one_action_and_a_batch_as_many(kind: str) -> None:
    space, both = SPACES[kind]
    policy = seeing(space)
    noise = policy.noise(np.random.default_rng(1), 2)
    actions, log_probs = policy.act(both, noise)
    assert actions.shape == (2,)
    assert log_probs is not None
    for again in (both.tolist(), both.astype(np.float64), list(both)):
        assert policy.act(again, noise)[0].tolist() == actions.tolist()
    for i in range(2):
        for one in (both[i], both[i].tolist()):
            for row in (noise[i], noise[i : i + 1]):
                action, log_prob = policy.act(one, row)
                assert action.shape == ()
                assert action == actions[i]
                assert log_prob == pytest.approx(log_probs[i], rel=1e-5)
        assert policy.act(both[i])[0] == policy.act(both[i : i + 1])[0][0]


def test_observations_with_fields_come_as_mappings_columns_or_rows() -> None:
    space = Dict({"at": Box((3,)), "item": Discrete(3), "hand": MultiDiscrete((2, 2))})
    policy = seeing(space)
    columns = {"at": np.float32([[1, 2, 3], [4, 5, 6]]), "item": [0, 2], "hand": [[0, 1], [1, 1]]}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(2)]
    structured = np.empty(2, space.element)
    for name, column in columns.items():
        structured[name] = column
    expected = policy.outputs(structured).argmax(-1).tolist()
    for batch in (structured, columns, rows, tuple(rows), {n: np.asarray(c).tolist() for n, c in columns.items()}):
        assert policy.act(batch)[0].tolist() == expected
    for i in range(2):
        for one in (rows[i], {n: np.asarray(v).tolist() for n, v in rows[i].items()}, structured[i]):
            assert policy.act(one)[0] == expected[i]
    assert policy.act([])[0].shape == (0,)


def test_a_box_action_for_one_observation_has_the_actions_shape() -> None:
    policy = fixed(Box((2, 2), low=-1, high=1), Gaussian(), [0.0, 0.5, 1.0, -0.5])
    assert policy.act(np.zeros(1))[0].shape == (2, 2)
    assert policy.act(np.zeros((3, 1)))[0].shape == (3, 2, 2)


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (Box((4,)), np.zeros(3), r"expected shape \(4,\), or \(n, 4\) for a batch, got \(3,\)"),
        (Box((4,)), np.zeros((2, 2, 4)), r"got \(2, 2, 4\)"),
        (Box((4,)), 1.0, r"got \(\)"),
        (Box((4,)), None, "expected shape"),
        (Box((4,)), {"a": 1}, "expected shape"),
        (Box((2,)), [[1, 2], [3]], "ragged"),
        (Box((2,)), ["a", "b"], "expected numbers"),
        (Discrete(3), [[1]], r"expected shape \(\), or \(n,\) for a batch"),
        (Discrete(3), 1.5, "whole numbers"),
        (Discrete(3), 3, r"outside 0\.\.2"),
        (Discrete(3), np.int32([0, -1]), r"outside 0\.\.2"),
        (MultiDiscrete((2, 2)), [0, 2], "outside"),
        (Dict({"a": Discrete(2), "b": Box((1,))}), {"a": 1}, "mapping with a, b; got one with a"),
        (Dict({"a": Discrete(2), "b": Box((1,))}), {"a": 1, "b": [0], "c": 0}, "got one with a, b, c"),
        (Dict({"a": Discrete(2), "b": Box((1,))}), np.zeros(2), "mapping with a, b; got ndarray"),
        (Dict({"a": Discrete(2), "b": Box((1,))}), [{"a": 1, "b": [0]}, 7], "mapping with a, b; got int"),
        (Dict({"a": Discrete(2), "b": Box((1,))}), {"a": [1, 0], "b": [0.0]}, "a has 2, b has one"),
        (Dict({"a": Discrete(2), "b": Box((1,))}), {"a": 2, "b": [0.0]}, "observation a is outside"),
        (Dict({"a": Discrete(2), "b": Box((2,))}), [{"a": 1, "b": 0.0}] * 2, r"observation\.b: expected shape \(2,\)"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused_with_what_was_expected(space: Any, obs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        seeing(space).act(obs)


def test_noise_that_does_not_fit_is_refused() -> None:
    policy = seeing(Box((2,)))
    for noise in (np.zeros(4, np.float32), np.zeros((2, 5), np.float32), [0] * 5, "x"):
        with pytest.raises(InputError, match=r"noise: expected numbers of shape \(1, 5\)"):
            policy.act(np.zeros(2), noise)
