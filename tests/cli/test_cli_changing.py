"""`sparring change`: a game's simulator, and what it is set to."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparring.games import Box, Discrete, Game
from sparring.gateway.app import create_app
from sparring.gateway.server import background
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore

POLE = Game("pole", Box((4,)), Discrete(2))  # CartPole, as a person would declare it
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Iterator[Run]:
    store.register(POLE)
    monkeypatch.setenv("COLUMNS", "200")
    with background(create_app(store, Registry(tmp_path / "registry"), tmp_path / "trainer")) as url:
        monkeypatch.setenv("SPARRING_SERVER", url)
        yield command_line


def test_a_simulator_and_its_settings(run: Run, store: MemoryStore) -> None:
    code, _, error = run("change", "pole", "--set", "game.sutton_barto_reward=true")
    assert (code, "pole has no simulator to set: name one with --env ID" in error) == (2, True)
    words = ("change", "pole", "--env", "CartPole-v1", "--set", "game.sutton_barto_reward=true")
    assert run(*words)[:2] == (0, "pole is simulated as CartPole-v1 with sutton_barto_reward=true\n")
    [game] = store.games()
    assert (game.env, game.env_kwargs) == ("CartPole-v1", {"sutton_barto_reward": True})
    said = "pole is simulated as CartPole-v1 with sutton_barto_reward=true, max_episode_steps=100\n"
    assert run("change", "pole", "--set", "game.max_episode_steps=100")[:2] == (0, said)  # the other one stays
    for wrong, message in (
        ("game.gravty=3", "CartPole-v1 has no setting game.gravty"),
        ("game.id=Pendulum-v1", "--env ID names another simulator"),
        ("game.max_episode_steps=.nan", "env_kwargs.max_episode_steps is nan: only finite numbers"),
        ("game.max_episode_steps=[1, -.inf]", "env_kwargs.max_episode_steps.1 is -inf: only finite numbers"),
        ("algorithm=dqn", "only the game can be set here"),
    ):
        code, _, error = run("change", "pole", "--set", wrong)
        assert (code != 0, message in error) == (True, True), error
    assert run("change", "pole", "--env", "CartPole-v1")[:2] == (0, "pole is simulated as CartPole-v1\n")
    assert run("change", "pole", "--no-env", "--set", "game.x=1")[0] == 2
    assert run("change", "pole", "--no-env")[0] == 0
    assert store.games() == [POLE]
