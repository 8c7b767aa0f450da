"""Which network a game gets when nobody chose one, and that it fits whatever the game shows."""

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from rich.console import Console

from sparring import algorithms
from sparring.experiment import Experiment, Stop
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.defaults import describe, kind_of, layers_for
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Conv, Dense, param_shapes
from sparring.runs.live_view import Lines
from sparring.training import loop

USUAL = (Dense(64, "tanh"), Dense(64, "tanh"))
NATURE = (Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3), Dense(512))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((84, 84, 4), NATURE),
        ((4, 84, 84), NATURE),
        ((96, 96, 3), NATURE),
        ((36, 200, 1), None),
        ((210, 160, 3), None),
        ((1080, 1000, 3), None),
        ((35, 35, 3), None),
        ((12, 12, 3), None),
        ((10, 10, 4), (Conv(16, 3), Dense(128))),
        ((8, 8, 3), (Conv(16, 3), Dense(128))),
        ((3, 3, 3), (Conv(16, 3), Dense(128))),
        ((3, 1000, 1), None),
        ((2, 2, 2), (Dense(64, "tanh"), Dense(64, "tanh"))),
        ((1, 1, 1), (Dense(64, "tanh"), Dense(64, "tanh"))),
    ],
)
def test_images_of_every_size_get_layers_that_fit(shape: tuple[int, ...], expected: Any) -> None:
    game = Game("g", Box(shape, "uint8", 0, 255), Discrete(3))
    layers = layers_for(game.observation, USUAL)
    assert expected is None or layers == expected
    assert isinstance(layers[0], Conv) or max(shape) < 3
    assert sum(math.prod(s) for s in param_shapes(game, layers, Categorical()).values()) < 5_000_000
    arrays = {k: np.zeros(s, np.float32) for k, s in param_shapes(game, layers, Categorical()).items()}
    assert Policy(game, layers, Categorical(), arrays).act(np.zeros(shape, np.uint8))[0].shape == ()


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_algorithm_sees_images_with_convolutions(name: str) -> None:
    action = Box((2,), low=-1.0, high=1.0) if name in ("ddpg", "td3", "sac") else Discrete(3)
    game = Game("g", Box((10, 10, 4), "uint8", 0, 255), action)
    config = algorithms.create(name, game).config
    assert isinstance(config.layers[0], Conv)
    assert isinstance((getattr(config, "critic_layers", None) or config.layers)[0], Conv)


def test_wide_vectors_get_wider_layers() -> None:
    for width, units in ((4, 64), (64, 64), (65, 128), (348, 256), (100_000, 256)):
        assert layers_for(Box((width,)), USUAL) == (Dense(units, "tanh"), Dense(units, "tanh"))
    assert layers_for(Box((30,)), (Dense(256),)) == (Dense(256),)
    assert layers_for(Dict({"a": Box((100,)), "b": Discrete(10)}), USUAL)[0].units == 128  # type: ignore[union-attr]


def test_what_is_given_is_left_alone() -> None:
    image = Game("g", Box((84, 84, 4), "uint8", 0, 255), Discrete(3))
    own = [{"layer": "dense", "units": 7}]
    assert algorithms.create("dqn", image, {"layers": own}).config.layers == (Dense(7),)
    assert algorithms.create("ppo", image, {"critic_layers": own}).config.shared is False
    choice = Game("g", Discrete(500), Discrete(6))
    config = algorithms.create("dqn", choice, {"layers": own}).config
    assert (config.lr, config.n_step, config.normalise) == (1e-3, 3, True)
    assert algorithms.create("dqn", choice).config.layers == ()
    assert algorithms.create("dqn", choice, {"lr": 0.5}).config.lr == 0.5
    vector = Game("g", Box((4,)), Discrete(2))
    for name in ("dqn", "ppo", "sac", "iql", "bc", "cql"):
        assert algorithms.defaults(name, vector, {"layers": own, "critic_layers": own}) == {}
        assert algorithms.create(name, vector).config == algorithms.create(name, vector, {}).config


def test_words() -> None:
    assert describe(NATURE) == "conv 32 8×8/4, conv 64 4×4/2, conv 64 3×3/1, dense 512"
    assert kind_of(Box((4, 84, 84), "uint8")) == "images of 84×84×4"
    assert kind_of(Discrete(500)) == "a choice of 500"
    assert kind_of(MultiDiscrete((2, 3))) == "2 choices, 5 inputs"
    assert kind_of(Box((17,))) == "17 inputs"


class Pixels(gymnasium.Env):  # type: ignore[type-arg]
    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self.t += 1
        return self.observation_space.sample(), float(action), self.t == 5, False, {}


gymnasium.register("DefaultPixels-v0", entry_point=Pixels)


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_chosen_network_is_said_and_written_into_the_run(tmp_path: Path, name: str) -> None:
    with (tmp_path / "said").open("w") as file:
        small = {"steps": 128} if name == "ppo" else {"learning_starts": 64}
        e = Experiment(
            game="DefaultPixels-v0",
            algorithm={"name": name, **small},
            iteration=128,
            stop=Stop(iterations=1),
            out=str(tmp_path / "run"),
        )
        run = loop.train(e, Lines(Console(file=file, width=200)))
    assert "network for images of 8×8×3: conv 16 3×3/1, dense 128" in (tmp_path / "said").read_text()
    layers = run.experiment.algorithm["layers"]
    assert [layer["layer"] for layer in layers] == ["conv", "dense"]
    assert run.policy().layers == (Conv(16, 3), Dense(128))


def test_a_run_that_began_with_other_defaults_goes_on_with_its_own(tmp_path: Path) -> None:
    small = [{"layer": "dense", "units": 64, "activation": "tanh", "norm": False}] * 2
    algorithm = {"name": "ppo", "steps": 128, "layers": small}
    e = Experiment(game="DefaultPixels-v0", algorithm=algorithm, stop=Stop(iterations=1), out=str(tmp_path / "run"))
    loop.train(e)
    run = loop.resume(tmp_path / "run", ["stop.iterations=2"])
    assert run.experiment.algorithm["layers"] == small
    assert run.rows()[-1]["iteration"] == 2
