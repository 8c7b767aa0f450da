"""The published graph plays exactly as the policy does: every observation space with every head."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from sparring.export.onnx import render
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Conv, Dense, Deterministic, Gaussian, QValues, Squashed

MakePolicy = Callable[..., Policy]

OBSERVATIONS: dict[str, Any] = {
    "vector": Box((5,)),
    "matrix": Box((2, 3)),
    "scalar": Box(()),
    "float64": Box((4,), "float64"),
    "int8": Box((3,), "int8"),
    "int16": Box((3,), "int16"),
    "int32": Box((3,), "int32"),
    "int64": Box((3,), "int64"),
    "bool": Box((6,), "bool"),
    "bytes": Box((8,), "uint8"),
    "image": Box((12, 10, 3), "uint8"),
    "frames": Box((4, 11, 12), "uint8"),
    "discrete": Discrete(7, start=-2),
    "multi_discrete": MultiDiscrete((3, 1, 4)),
    "dict": Dict(
        {
            "weapon": Discrete(4, start=1),
            "camera": Box((6, 5, 3), "uint8"),
            "at": Box((2,), "float64"),
            "keys": MultiDiscrete((2, 3)),
            "one": Box(()),
        }
    ),
}
ACTIONS: dict[str, tuple[Any, Any, float]] = {
    "q": (Discrete(5), QValues(), 0.4),
    "q_start": (Discrete(5, start=-3), QValues(), 1.0),
    "q_greedy": (Discrete(3), QValues(), 0.0),
    "q_duelling": (Discrete(4), QValues(duelling=True), 0.3),
    "q_parts": (MultiDiscrete((3, 1, 4)), QValues(), 0.4),
    "q_one_part": (MultiDiscrete((3,)), QValues(), 0.4),
    "q_parts_duelling": (MultiDiscrete((3, 5)), QValues(duelling=True), 0.3),
    "one_choice": (Discrete(1), QValues(), 0.5),
    "categorical": (Discrete(5, start=10), Categorical(), 0.0),
    "multi_categorical": (MultiDiscrete((3, 1, 4)), Categorical(), 0.0),
    "one_part": (MultiDiscrete((3,)), Categorical(), 0.0),
    "gaussian": (Box((3,), low=-1.0, high=2.0), Gaussian(), 0.0),
    "gaussian_unbounded": (Box((2,)), Gaussian(), 0.0),
    "gaussian_half": (Box((3,), low=(0.0, -1e308, -1.0), high=(1e308, 0.5, 1.0)), Gaussian(), 0.0),
    "gaussian_observed": (Box((2,), low=(-1.0, 0.0), high=(1.0, 9.0)), Gaussian(observed=True), 0.0),
    "gaussian_float64": (Box((2,), "float64", low=(-1.0, 0.0), high=(1.0, 100.0)), Gaussian(), 0.0),
    "squashed": (Box((2,), low=(-2.0, 0.0), high=(2.0, 0.1)), Squashed(), 0.0),
    "squashed_matrix": (Box((2, 3), "float64", low=-0.1, high=0.7), Squashed(), 0.0),
    "deterministic": (Box((2,), low=-2.0, high=2.0), Deterministic(), 0.3),
    "deterministic_scalar": (Box((), low=-2.0, high=1.0), Deterministic(), 0.3),
}
ACTIVATIONS = ("relu", "tanh", "silu", "linear")


def layers_for(observation: Any, activation: str) -> tuple[Any, ...]:
    dense = (Dense(16, activation), Dense(9, activation, norm=activation != "linear"))
    if isinstance(observation, Box) and observation.is_image:
        padding = "same" if activation in ("relu", "silu") else "valid"  # of 12×10 and 11×12 with asymmetric halves
        return (Conv(4, 5, 2, activation, padding), Conv(5, 2, 1, activation, padding), *dense)
    return dense


def observe(space: Any, rng: np.random.Generator, n: int) -> np.ndarray:
    column = np.empty(n, space.element)
    if isinstance(space, Dict):
        for name, part in space.fields.items():
            column[name] = observe(part, rng, n)
    elif isinstance(space, Discrete):
        column[:] = rng.integers(space.start, space.start + space.n, n)
    elif isinstance(space, MultiDiscrete):
        column = rng.integers(0, space.nvec, (n, len(space.nvec))).astype("<i4")
    elif space.dtype.startswith("float"):
        column = (rng.standard_normal((n, *space.shape)) * 3).astype(space.dtype)
    elif space.dtype == "bool":
        column = rng.random((n, *space.shape)) < 0.5
    else:
        info = np.iinfo(space.dtype)
        column = rng.integers(max(info.min, -300), min(info.max, 300), (n, *space.shape)).astype(space.dtype)
    return column


def feeds(space: Any, column: np.ndarray) -> dict[str, np.ndarray]:
    if isinstance(space, Dict):
        return {f"obs.{name}": np.ascontiguousarray(column[name]) for name in space.fields}
    return {"obs": column}


def session(data: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that `noise` can be overridden, which is meant
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def assert_same(policy: Policy, run: onnxruntime.InferenceSession, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    obs = observe(policy.game.observation, rng, n)
    noise = policy.noise(rng, n)
    greedy, none = policy.act(obs)
    assert none is None
    chosen, log_prob = policy.act(obs, noise)
    inputs = feeds(policy.game.observation, obs)
    action, sampled, density, out = run.run(["action", "sampled", "log_prob", "outputs"], inputs | {"noise": noise})
    np.testing.assert_allclose(out, policy.outputs(obs), rtol=1e-4, atol=1e-5)
    for found, expected in ((action, greedy), (sampled, chosen)):
        assert found.dtype == policy.game.action.element.base
        assert found.shape == (n, *policy.game.action.element.shape) == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert policy.game.action.problem(found) is None
        assert policy.game.action.problem(expected) is None
    np.testing.assert_allclose(density, np.zeros(n) if log_prob is None else log_prob, rtol=1e-3, atol=1e-3)
    assert density.dtype == np.float32
    assert density.shape == (n,)


def grid() -> Iterator[Any]:
    for i, observation in enumerate(OBSERVATIONS):
        for j, action in enumerate(ACTIONS):
            activation = ACTIVATIONS[(i + j) % len(ACTIVATIONS)]
            yield pytest.param(observation, action, activation, i * 100 + j, id=f"{observation}-{action}-{activation}")


@pytest.mark.parametrize(("observation", "action", "activation", "seed"), list(grid()))
def test_acts_as_the_policy(
    observation: str, action: str, activation: str, seed: int, random_policy: MakePolicy
) -> None:
    space, head, exploration = ACTIONS[action]
    game = Game("g", OBSERVATIONS[observation], space)
    layers = layers_for(game.observation, activation)
    policy = random_policy(game, layers, head, exploration=exploration, normalised=seed % 3 > 0, seed=seed)
    with warnings.catch_warnings(action="error"):
        run = session(render(policy))
        assert_same(policy, run, 1, seed)
        assert_same(policy, run, 7, seed + 1)


def test_no_layers_and_convolution_without_dense(random_policy: MakePolicy) -> None:
    for seed, (observation, layers) in enumerate(
        [(Box((3,)), ()), (Box((9, 9, 2), "uint8"), (Conv(3, 3, 2),)), (Box((9, 9, 2), "uint8"), (Dense(4),))]
    ):
        policy = random_policy(Game("g", observation, Discrete(3)), layers, QValues(duelling=True), exploration=0.5)
        assert_same(policy, session(render(policy)), 7, seed)


def test_noise_may_be_left_out(random_policy: MakePolicy) -> None:
    """Then `sampled` is the policy's middle: greedy but for what exploration adds."""
    for action, head, exploration in ACTIONS.values():
        policy = random_policy(Game("g", Box((5,)), action), (Dense(8),), head, exploration=min(exploration, 0.4))
        run = session(render(policy))
        assert [i.name for i in run.get_inputs()] == ["obs"]
        assert [i.name for i in run.get_overridable_initializers()] == ["noise"]
        obs = observe(policy.game.observation, np.random.default_rng(0), 7)
        action_, sampled, log_prob = run.run(["action", "sampled", "log_prob"], {"obs": obs})
        np.testing.assert_allclose(sampled, action_, rtol=1e-6)
        assert log_prob.shape == (7,)


def test_empty_batch(random_policy: MakePolicy) -> None:
    for observation in ("dict", "frames", "scalar"):
        game = Game("g", OBSERVATIONS[observation], MultiDiscrete((2, 3)))
        policy = random_policy(game, layers_for(game.observation, "relu"), Categorical())
        assert_same(policy, session(render(policy)), 0, 0)


def test_extreme_numbers_stay_finite(random_policy: MakePolicy) -> None:
    """Saturated tanh, deviations at their limits, noise at its edges."""
    for action, head, exploration in ACTIONS.values():
        policy = random_policy(Game("g", Box((5,)), action), (Dense(8, "silu"),), head, exploration=exploration)
        run = session(render(policy))
        obs = np.full((4, 5), 1e30, np.float32) * np.float32([[1], [-1], [1e-30], [0]])
        edges = (0.0, np.nextafter(np.float32(1), np.float32(0))) if policy.noise_kind == "uniform" else (-6.0, 6.0)
        for edge in edges:
            noise = np.full((4, policy.noise_size), edge, np.float32)
            chosen, log_prob = policy.act(obs, noise)
            sampled, density = run.run(["sampled", "log_prob"], {"obs": obs, "noise": noise})
            np.testing.assert_allclose(sampled, chosen, rtol=1e-4, atol=1e-5)
            assert np.isfinite(sampled).all()
            assert np.isfinite(density).all()
            if log_prob is not None:
                np.testing.assert_allclose(density, log_prob, rtol=1e-3, atol=1e-3)


def test_same_bytes_for_the_same_policy(random_policy: MakePolicy) -> None:
    fields = OBSERVATIONS["dict"].fields
    swapped = Dict(dict(reversed(fields.items())))
    first, again, other = (
        random_policy(Game("g", space, Discrete(3)), (Dense(4),), QValues(), seed=seed)
        for space, seed in ((Dict(fields), 0), (swapped, 0), (Dict(fields), 1))
    )
    assert render(first) == render(again)
    assert render(first) != render(other)


def test_metadata_tells_what_a_bot_needs(random_policy: MakePolicy) -> None:
    expected = {"q": ("uniform", "probability"), "squashed": ("normal", "density"), "deterministic": ("normal", "none")}
    for name, (noise, log_prob) in expected.items():
        action, head, _ = ACTIONS[name]
        game = Game("g", Box((5,)), action)
        data = render(random_policy(game, (Dense(4),), head))
        props = session(data).get_modelmeta().custom_metadata_map
        assert Game.from_json(props["sparring.game"]) == game
        assert props["sparring.schema"] == game.schema
        assert (props["sparring.noise"], props["sparring.log_prob"]) == (noise, log_prob)


def test_batch_is_dynamic_and_the_opset_is_widely_supported(random_policy: MakePolicy) -> None:
    model = onnx.load_from_string(render(random_policy(Game("g", Box((5,)), Discrete(2)), (Dense(4),), QValues())))
    onnx.checker.check_model(model, full_check=True)
    assert 17 <= model.opset_import[0].version <= 21
    values = [*model.graph.input, *model.graph.output]
    assert all(v.type.tensor_type.shape.dim[0].dim_param for v in values)
