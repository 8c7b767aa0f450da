"""Games by name: Gymnasium's, those of other packages, and declarations in files."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sparring.errors import InputError
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, catalog
from sparring.games.catalog import space_of


class Still(gymnasium.Env):  # type: ignore[type-arg]
    """A game of any spaces, to be looked at and not played."""

    def __init__(self, observation: Any = spaces.Discrete(2), action: Any = spaces.Discrete(2)) -> None:
        self.observation_space, self.action_space = observation, action


@pytest.fixture
def registered() -> Any:
    """`registered(id, observation, action)` while the test runs."""
    ids = []

    def add(env_id: str, *of: Any) -> str:
        gymnasium.register(env_id, entry_point=lambda: Still(*of), disable_env_checker=True)
        ids.append(env_id)
        return env_id

    yield add
    for env_id in ids:
        del gymnasium.registry[env_id]


@pytest.mark.parametrize(
    ("name", "observation", "action"),
    [
        ("CartPole-v1", Box((4,)), Discrete(2)),
        ("Pendulum-v1", Box((3,)), Box((1,), low=-2.0, high=2.0)),
        ("MountainCar-v0", Box((2,)), Discrete(3)),
        ("MountainCarContinuous-v0", Box((2,)), Box((1,), low=-1.0, high=1.0)),
        ("Acrobot-v1", Box((6,)), Discrete(3)),
        ("FrozenLake-v1", Discrete(16), Discrete(4)),
        ("CliffWalking-v1", Discrete(48), Discrete(4)),
    ],
)
def test_games_of_gymnasium(name: str, observation: Any, action: Any) -> None:
    assert catalog.load(name) == Game(name, observation, action, env=name)


def test_data_of_a_simulated_game_is_in_its_space() -> None:
    for name in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1"):
        game, env = catalog.load(name), catalog.make(name)
        obs, _ = env.reset(seed=1)
        env.action_space.seed(1)
        for _ in range(50):
            action = env.action_space.sample()
            assert game.observation.problem(np.asarray([obs], game.observation.element.base)) is None
            assert game.action.problem(np.asarray([action], game.action.element.base)) is None
            obs, _, ended, cut, _ = env.step(action)
            if ended or cut:
                obs, _ = env.reset()
        env.close()


def test_tuple_spaces_are_refused_with_what_to_use() -> None:
    with pytest.raises(InputError, match=r"Blackjack-v1: Tuple spaces are not supported: use Box, Discrete"):
        catalog.load("Blackjack-v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchGame-v0", "doesn't exist"),
        ("CartPole-v99", "v99"),
        ("nobody/Game-v0", "nobody"),
        ("", "Malformed"),
        ("a/b/c", "Malformed"),
        ("no game at all", "Malformed"),
        ("no_such_package:Game-v0", "needs no_such_package: No module named 'no_such_package'"),
        (":CartPole-v1", "MODULE:ID"),
        ("..:CartPole-v1", "MODULE:ID"),
        (".games:CartPole-v1", "MODULE:ID"),
        ("http://host:CartPole-v1", "MODULE:ID"),
        ("no/such/file.json", "sparring init"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        catalog.load(name)
    assert message in str(caught.value)


def test_a_game_whose_own_needs_are_missing_says_which() -> None:
    def entry() -> Any:
        raise ModuleNotFoundError("No module named 'flux_capacitor'")

    gymnasium.register("Needy-v0", entry_point=entry)
    try:
        with pytest.raises(InputError, match="flux_capacitor"):
            catalog.load("Needy-v0")
    finally:
        del gymnasium.registry["Needy-v0"]


def test_a_slash_of_an_id_is_a_dash_of_the_name(registered: Any) -> None:
    game = catalog.load(registered("arcade/Still-v3"))
    assert (game.name, game.env) == ("arcade-Still-v3", "arcade/Still-v3")


def test_a_package_before_a_colon_is_loaded_and_not_part_of_the_name() -> None:
    game = catalog.load("gymnasium.envs:CartPole-v1")
    assert (game.name, game.env) == ("CartPole-v1", "gymnasium.envs:CartPole-v1")
    assert game.schema == catalog.load("CartPole-v1").schema


def test_an_id_that_cannot_be_a_name_is_refused(registered: Any) -> None:
    with pytest.raises(InputError, match="_Still-v0: game name"):
        catalog.load(registered("_Still-v0"))


def test_dict_actions_are_refused(registered: Any) -> None:
    with pytest.raises(InputError, match="Dict actions are not supported"):
        catalog.load(registered("Still-v0", spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(2))))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (spaces.Discrete(3, start=-1), Discrete(3, -1)),
        (spaces.MultiDiscrete([2, 3]), MultiDiscrete((2, 3))),
        (spaces.MultiBinary(3), MultiDiscrete((2, 2, 2))),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), Box((84, 84, 3), "uint8", 0.0, 255.0)),
        (spaces.Box(-1, 1, (2,), np.float64), Box((2,), "float64", -1.0, 1.0)),
        (spaces.Box(-np.inf, np.inf, (2,)), Box((2,))),
        (spaces.Box(-3.4028234e38, 3.4028234e38, (2,)), Box((2,))),
        (spaces.Box(np.array([0, -1], "f4"), np.array([1, 1], "f4")), Box((2,), low=(0.0, -1.0), high=1.0)),
        (spaces.Box(np.array([0, -np.inf], "f4"), np.inf), Box((2,), low=(0.0, -1e308))),
        (
            spaces.Dict(b=spaces.Discrete(2), a=spaces.Box(0, 1, (1,), np.int8)),
            Dict({"a": Box((1,), "int8", 0.0, 1.0), "b": Discrete(2)}),
        ),
    ],
    ids=str,
)
def test_spaces_of_gymnasium(theirs: Any, ours: Any) -> None:
    assert space_of(theirs) == ours


def test_a_box_bounded_in_part_takes_everything_where_it_has_no_bound() -> None:
    space = space_of(spaces.Box(np.array([0, -np.inf], "f4"), np.inf))
    assert space.problem(np.array([[0, -3.4e38]], "<f4")) is None
    assert space.problem(np.array([[-1, 0]], "<f4")) is not None


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (spaces.Text(5), "Text spaces"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence spaces"),
        (spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2))), "flatten"),
        (spaces.MultiDiscrete([2, 2], start=[1, 1]), "start at 0"),
        (spaces.Box(0, 1, (2,), np.float16), "float16"),
        (spaces.Dict({"a.b": spaces.Discrete(2)}), "'a.b'"),
    ],
    ids=str,
)
def test_spaces_that_we_do_not_take(theirs: Any, message: str, registered: Any) -> None:
    with pytest.raises(InputError) as caught:
        catalog.load(registered("Still-v0", theirs))
    assert message in str(caught.value)


def test_simulators_may_leave_their_float_bounds_but_not_others(registered: Any) -> None:
    observation = spaces.Dict(speed=spaces.Box(-1, 1, (2,)), pixels=spaces.Box(0, 255, (2, 2, 1), np.uint8))
    game = catalog.load(registered("Still-v0", observation, spaces.Box(-1, 1, (2,))))
    assert game.observation == Dict({"speed": Box((2,)), "pixels": Box((2, 2, 1), "uint8", 0.0, 255.0)})
    assert game.action == Box((2,), low=-1.0, high=1.0)


def test_declarations_in_files_keep_their_bounds(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(catalog.declare("mine").to_json())
    game = catalog.load(str(path))
    assert game == catalog.declare("mine")
    assert game.env is None
    assert isinstance(game.observation, Dict)
    assert game.observation.fields["position"] == Box((2,), low=-1.0, high=1.0)


def test_a_file_that_is_no_declaration(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="not a game declaration"):
        catalog.load(str(path))
    with pytest.raises(InputError, match="no game declaration at"):
        catalog.load(str(tmp_path / "folder.json"))
