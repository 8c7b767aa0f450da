"""What tests of the registry publish, and where."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.registry import Registry


@pytest.fixture
def policy(random_policy: Callable[..., Policy]) -> Policy:
    game = Game("CartPole-v1", Box((4,)), Discrete(2), env="CartPole-v1")
    return random_policy(game, (Dense(8),), QValues(), exploration=0.1)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.fixture(params=["directory", "memory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    """Also on obstore's memory store, which like a bucket has conditional writes and no directories."""
    return Registry(tmp_path) if request.param == "directory" else Registry("memory:///")
