"""A gateway for every test here, over an empty store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_api import Api, Setup

from sparring.gateway.app import create_app
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(MemoryStore(), Registry(tmp_path / "registry"), tmp_path / "trainer")


@pytest.fixture
def api(setup: Setup) -> Iterator[Api]:
    """A gateway over an empty store in memory in which GAME is registered."""
    api = Api(create_app(setup.store, setup.registry, setup.trainer_dir))
    assert api.register().status == 201
    yield api
    api.close()
