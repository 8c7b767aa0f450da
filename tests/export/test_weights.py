"""Policies as safetensors: everything comes back, and nothing damaged comes in."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from sparring.errors import InputError
from sparring.export.weights import load, save
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Conv, Dense, Deterministic, Gaussian, QValues, Squashed

MakePolicy = Callable[..., Policy]
BOX = Box((2,), low=-1.0, high=(1.0, 2.0))
CASES: list[Any] = [
    (Box((4,)), Discrete(3, start=1), (Dense(8, "tanh"),), QValues(duelling=True), 0.25),
    (Dict({"b": Discrete(2), "a": Box((2, 2), "float64")}), MultiDiscrete((2, 3)), (), Categorical(), 0.0),
    (Box((9, 9, 3), "uint8"), BOX, (Conv(4, 3, 2, "silu"), Dense(8)), Gaussian(), 0.0),
    (Box((4,)), BOX, (Dense(8),), Squashed(), 0.0),
    (Box((4,)), BOX, (Dense(8),), Deterministic(), 0.1),
]


@pytest.fixture
def policy(random_policy: MakePolicy) -> Policy:
    return random_policy(Game("g", Box((4,)), Discrete(3), env="G-v0"), (Dense(8),), QValues(), exploration=0.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case[3]).__name__)
def test_everything_comes_back(case: Any, random_policy: MakePolicy) -> None:
    observation, action, layers, head, exploration = case
    policy = random_policy(Game("g", observation, action), layers, head, exploration=exploration)
    again = load(save(policy))
    assert (again.game, again.layers, again.head, again.exploration) == (
        policy.game,
        policy.layers,
        policy.head,
        policy.exploration,
    )
    assert again.params.keys() == policy.params.keys()
    for name, array in policy.params.items():
        np.testing.assert_array_equal(again.params[name], array)
    assert save(again) == save(policy)


def test_others_read_the_arrays_without_our_code(policy: Policy) -> None:
    arrays = load_arrays(save(policy))
    assert arrays.keys() == policy.params.keys()


def rewritten(policy: Policy, **changes: Any) -> bytes:
    """The file with another spec, or other arrays."""
    data = save(policy)
    (size,) = struct.unpack_from("<Q", data)
    spec = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["sparring"])
    arrays = policy.params | changes.pop("arrays", {})
    return save_arrays({k: v for k, v in arrays.items() if v is not None}, {"sparring": json.dumps(spec | changes)})


def test_wrong_contents(policy: Policy) -> None:
    w = policy.params["head.w"]
    assert load(rewritten(policy)).game == policy.game
    for data, reason in (
        (rewritten(policy, format=2), "format 2"),
        (rewritten(policy, surprise=1), "surprise"),
        (rewritten(policy, exploration=2.0), "exploration is 2"),
        (rewritten(policy, layers=[{"layer": "dense", "units": 9}]), "do not fit the network"),
        (rewritten(policy, layers=[{"layer": "lstm", "units": 8}]), "lstm"),
        (rewritten(policy, layers=[{"layer": "dense", "units": -8}]), "at least 1"),
        (rewritten(policy, head={"head": "squashed"}), "Squashed head"),
        (rewritten(policy, arrays={"head.w": w.T.copy()}), r"head.w: \(3, 8\) not \(8, 3\)"),
        (rewritten(policy, arrays={"head.w": w.astype(np.float64)}), "float64"),
        (rewritten(policy, arrays={"head.w": None}), "head.w: None"),
        (rewritten(policy, arrays={"head.z": w}), "head.z"),
        (rewritten(policy, arrays={"head.w": w * np.nan}), "NaN"),
        (rewritten(policy, arrays={"normaliser.std": np.zeros(4, np.float32)}), "not above 0"),
        (save_arrays(policy.params), "metadata"),
        (save_arrays(policy.params, {"sparring": "{}"}), "format"),
        (save_arrays(policy.params, {"sparring": "[" * 100_000}), "damaged"),
    ):
        with pytest.raises(InputError, match=reason):
            load(data)


def test_truncated(policy: Policy) -> None:
    data = save(policy)
    for end in range(0, len(data), 5):
        with pytest.raises(InputError):
            load(data[:end])
    with pytest.raises(InputError):
        load(data + b"x")


def test_any_damage_is_an_input_error_or_other_numbers(policy: Policy) -> None:
    """Without hashes a flipped bit of a weight cannot be noticed; the registry's manifest has those."""
    data, rng = save(policy), np.random.default_rng(0)
    header = 8 + struct.unpack_from("<Q", data)[0]
    refused = 0
    for i in range(2000):
        damaged = bytearray(data)
        at = int(rng.integers(header if i % 4 else len(data)))
        damaged[at] = int(rng.integers(256))
        try:
            load(bytes(damaged))
        except InputError:
            refused += 1
    assert 1000 < refused < 2000


def test_no_jax() -> None:
    code = "import sparring.export.weights, sys; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
