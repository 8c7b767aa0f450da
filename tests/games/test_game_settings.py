"""What a game is set to: keywords of its constructor, in experiments, declarations, sweeps and every environment."""

import sys
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest

from sparring.errors import InputError
from sparring.experiment import Experiment, override
from sparring.games import Box, Discrete, Game, env_check
from sparring.games.catalog import load, make
from sparring.games.spec import Array
from sparring.games.vector import Native, Separate, VectorStep, build
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, param_shapes
from sparring.rollout.actor import Actor, Rows, row_types
from sparring.sweep.plan import Sweep


def test_every_environment_of_a_game_is_set() -> None:
    game = load({"id": "LunarLander-v3", "gravity": -5, "continuous": True})
    assert game.env_kwargs == {"gravity": -5, "continuous": True}
    assert isinstance(game.action, Box)
    again = Game.from_json(game.to_json())
    assert again == game
    environments = build(again, 2)
    assert isinstance(environments, Separate)
    assert [env.unwrapped.gravity for env in environments.envs] == [-5, -5]
    environments.close()


def test_a_set_game_may_have_a_name() -> None:
    game = load({"id": "LunarLander-v3", "gravity": -5, "name": "moon"})
    assert (game.name, game.env, game.env_kwargs) == ("moon", "LunarLander-v3", {"gravity": -5})
    assert load({"id": "ALE/Pong-v5"}).name == "ALE-Pong-v5"


def test_a_game_that_is_not_set_is_written_as_ever() -> None:
    assert load({"id": "CartPole-v1"}) == load("CartPole-v1")
    assert b"env_kwargs" not in load("CartPole-v1").to_json()


def test_the_vector_form_serves_what_it_knows() -> None:
    """CartPole's own knows its time limit and its rewards."""
    found = build(load({"id": "CartPole-v1", "max_episode_steps": 7, "sutton_barto_reward": True}), 3)
    assert isinstance(found, Native)
    found.reset(0)
    steps = [found.step(np.array([0, 1, 0])) for _ in range(7)]
    assert steps[0].reward.tolist() == [0, 0, 0]
    assert steps[6].truncated.tolist() == [True] * 3
    found.close()
    one = make(load({"id": "CartPole-v1", "max_episode_steps": 7}))
    assert one.spec.max_episode_steps == 7
    one.close()


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"id": "LunarLander-v3", "gravty": -5}, "no setting game.gravty: did you mean game.gravity?"),
        ({"id": "CartPole-v1", "wind": 5}, "there are sutton_barto_reward, max_episode_steps"),
        ({"id": "LunarLander-v3", "gravity": 5}, "does not take gravity=5: AssertionError: gravity"),
        ({"id": "CartPole-v1", "render_mode": "human"}, "no setting game.render_mode"),
        (
            {"id": "CartPole-v1", "max_episode_steps": {"a": 1}},
            "game.max_episode_steps is {'a': 1}: a setting is a number",
        ),
        (
            {"id": "CartPole-v1", "max_episode_steps": float("nan")},
            "game.max_episode_steps is nan: a setting is finite",
        ),
        ({"id": "LunarLander-v3", "gravity": float("-inf")}, "game.gravity is -inf: a setting is finite"),
        ({"gravity": -5}, "game.id is missing"),
        ({"id": "my.json", "gravity": -5}, "as `env_kwargs`"),
        ({"id": "CartPole-v1", "name": "a/b"}, "game name 'a/b'"),
        ({"id": "ALE/Pong-v5", "pixel": 84}, "unknown key game.pixel: did you mean game.pixels?"),
        ({"id": "ALE/Pong-v5", "pixels": 500}, "game.pixels: expected `int` <= 252"),
        ({"id": "ALE/Pong-v5", "actions": ["NOOP", "JUMP"]}, "actions has 'JUMP': there are NOOP, FIRE"),
        ({"id": "ALE/Pong-v5", "actions": ["NOOP", "NOOP"]}, "names each action once"),
    ],
)
def test_refusals(written: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load(written)


def test_clients_never_set_files() -> None:
    declared = msgspec.structs.replace(load("CartPole-v1"), env_kwargs={"xml_file": "/etc/passwd"})
    assert "a file is never read for a client" in str(env_check.problem(declared))
    for key in ("id", "name"):  # of the mapping that is loaded
        declared = msgspec.structs.replace(declared, env_kwargs={key: "LunarLander-v3"})
        assert f"env_kwargs has the key '{key}'" in str(env_check.problem(declared))
    declared = msgspec.structs.replace(declared, env_kwargs={"max_episode_steps": 9})
    assert env_check.problem(declared) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1.0, float("-inf"))])
def test_settings_that_json_cannot_keep(value: Any) -> None:
    with pytest.raises(ValueError, match="env_kwargs: x has to be finite"):
        Game("g", Box((4,)), Discrete(2), env="CartPole-v1", env_kwargs={"x": value})


def test_what_a_simulator_raises_is_one_line_without_control_characters() -> None:
    assert env_check.line(RuntimeError("boom\n\0{x} \x1b[31mred")) == "RuntimeError: �{x} �[31mred"
    gymnasium.register("Exits-v0", entry_point=lambda: sys.exit(0))
    try:
        declared = Game("Exits-v0", Box((4,)), Discrete(2), env="Exits-v0")
        assert "Exits-v0 cannot be made" in str(env_check.problem(declared))
    finally:
        gymnasium.registry.pop("Exits-v0")


def test_experiments_and_sweeps() -> None:
    data: dict[str, Any] = {"game": "LunarLander-v3", "algorithm": {"name": "ppo"}}
    experiment = Experiment.parse(override(data, ["game.gravity=-5", "game.continuous=true"]))
    assert experiment.game == {"id": "LunarLander-v3", "gravity": -5, "continuous": True}
    assert experiment.game_id == "LunarLander-v3"
    assert experiment.game_words == "LunarLander-v3 (gravity -5, continuous True)"
    assert Experiment.parse(experiment.to_builtins()) == experiment
    assert Experiment.parse(data | {"game": {"id": "CartPole-v1"}}).game == "CartPole-v1"
    with pytest.raises(InputError, match=r"game\.id is missing"):
        Experiment.parse(data | {"game": {"gravity": -5}})
    searched = override(data, ["game.gravity={uniform: [-10, -1]}", "stop.steps=100", "tune.samples=2"])
    sweep = Sweep.parse(searched)
    assert [axis.name for axis in sweep.axes] == ["game.gravity"]
    gravity = sweep.experiment(sweep.draw(0)).game["gravity"]
    assert -10 <= gravity <= -1


class Scores:
    """An environment whose every step scores 30, and whose every second one ends an episode."""

    count, masked = 1, False

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, seed: int) -> Array:
        return np.zeros((1, 2), np.float32)

    def step(self, actions: Array) -> VectorStep:
        self.steps += 1
        over = np.array([self.steps % 3 == 2])
        reward = np.float32([0.0 if self.steps % 3 == 0 else -30.0])
        return VectorStep(np.zeros((1, 2), np.float32), reward, over, np.zeros(1, bool))


@pytest.mark.parametrize("clipped", [False, True])
def test_rewards_are_clipped_for_learning_alone(clipped: bool) -> None:
    kwargs = {"reward_clipping": clipped}
    game = Game("g", Box((2,)), Discrete(2), env="ALE/SpaceInvaders-v5", env_kwargs=kwargs)
    params = {name: np.zeros(shape, np.float32) for name, shape in param_shapes(game, (), Categorical()).items()}
    rows = Rows(*(np.empty((1, 7), kind) for kind in row_types(game)))
    episodes = Actor(game, Scores(), seed=0).fill(rows, Policy(game, (), Categorical(), params))  # type: ignore[arg-type]
    assert rows.reward[0, :2].tolist() == ([-1, -1] if clipped else [-30, -30])
    assert [episode.ret for episode in episodes] == [-60, -60]


def test_atari() -> None:
    pytest.importorskip("ale_py")
    written = {"id": "ALE/Pong-v5", "pixels": 42, "frames": 2, "frame_skip": 6, "sticky_actions": 0.0}
    game = load(written | {"noop_starts": 0, "actions": ["NOOP", "RIGHT", "LEFT"]})
    assert (game.observation, game.action) == (Box((2, 42, 42), "uint8", 0.0, 255.0), Discrete(3))
    one, many = build(game, 1), build(game, 2)
    assert isinstance(many, Native)
    assert many.env.action_space.nvec.tolist() == [3, 3]
    seen = {}
    for name, environments in (("one", one), ("many", many)):
        first = environments.reset(0)[0]
        steps = [environments.step(np.full(environments.count, 1 + i // 8 % 2)) for i in range(40)]
        seen[name] = np.stack([first, *(step.obs[0] for step in steps)])
        environments.close()
    np.testing.assert_array_equal(seen["one"], seen["many"])  # no chance is left in it
    others = load({**written, "noop_starts": 0})
    six = build(others, 1)
    assert others.action == Discrete(6)  # of its own: NOOP, FIRE, RIGHT, LEFT …
    first = six.reset(0)[0]
    again = np.stack([first, *(six.step(np.array([2 + i // 8 % 2])).obs[0] for i in range(40))])
    six.close()
    np.testing.assert_array_equal(again, seen["one"])


def test_an_atari_picture_is_drawn_as_large_as_ever() -> None:
    pytest.importorskip("ale_py")
    for pixels, height in ((84, 336), (168, 336), (252, 252)):
        env = make(load({"id": "ALE/Pong-v5", "pixels": pixels, "frame_skip": 2}), render_mode="rgb_array")
        env.reset(seed=0)
        assert env.render().shape == (height, height, 3)
        assert env.metadata["render_fps"] == 30
        env.close()
