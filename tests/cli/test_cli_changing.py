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
    code, _, error = run("change", "pole", "--set", "shield=0.5")
    assert (code, "--set shield: only the game can be set here" in error) == (2, True), error
    code, _, error = run("change", "pole", "pole2.json", "--set", "game.x=1")
    assert (code, "these do not go together" in error) == (2, True), error
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


def test_a_wrong_setting_that_shows_in_the_first_step_is_refused(run: Run, store: MemoryStore) -> None:
    swing = Game("swing", Box((3,)), Box((1,), low=-2.0, high=2.0))
    store.register(swing)
    code, _, error = run("change", "swing", "--env", "Pendulum-v1", "--set", "game.g=abc")
    assert (code, "Pendulum-v1 fails in its first step: " in error) == (2, True), error
    assert swing in store.games()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            "Pole-v0",
            "Pole-v0 cannot be made: Gymnasium knows no such game on the platform, since a platform simulates only",
        ),
        ("mine:Pole-v0", "mine:Pole-v0 names a module or file, and none is read for a client: a platform simulates"),
    ],
)
def test_a_simulator_of_a_module_of_ones_own_is_refused_with_the_way(run: Run, env: str, said: str) -> None:
    code, _, error = run("change", "pole", "--env", env)
    assert (code, said in error, "module:Pole-v0" in error) == (2, True, False), error


def test_a_game_declared_with_a_module_is_listed_as_not_simulated(run: Run, store: MemoryStore) -> None:
    store.register(Game("garden", Box((4,)), Discrete(2), env="my_garden:Garden-v0"))
    assert "not simulated (my_garden:Garden-v0)" in run("games")[1]
