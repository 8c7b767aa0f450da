"""The six networks of `experiments/pong`: what the hardware study had, number by number."""

from pathlib import Path

import pytest

from sparring import algorithms
from sparring.algorithms.ppo import PPO
from sparring.experiment import read
from sparring.games import Box, Discrete, Game
from sparring.networks.spec import torso_shapes

HERE = Path(__file__).parents[2] / "experiments" / "pong"
MODELS = {
    1: (84, [(16, 8, 4), (32, 4, 2), (256, 11, 1)]),
    2: (168, [(16, 16, 8), (32, 4, 2), (256, 11, 1)]),
    3: (252, [(16, 8, 4), (16, 8, 4), (32, 4, 2), (256, 8, 1)]),
    4: (168, [(16, 8, 4), (32, 4, 2), (32, 4, 2), (256, 11, 1)]),
    5: (252, [(16, 8, 4), (32, 4, 2), (32, 4, 2), (256, 16, 1)]),
    6: (168, [(16, 8, 4), (32, 4, 2), (256, 21, 1)]),
}


@pytest.mark.parametrize("number", MODELS)
def test_the_six_networks(number: int) -> None:
    pixels, convolutions = MODELS[number]
    experiment = read(HERE / f"model{number}.yaml")
    assert isinstance(experiment.game, dict)
    assert experiment.game["pixels"] == pixels
    game = Game("pong", Box((4, pixels, pixels), "uint8", 0.0, 255.0), Discrete(6))
    ppo = algorithms.create("ppo", game, experiment.hyperparameters)
    assert isinstance(ppo, PPO)
    assert [(layer.filters, layer.kernel, layer.stride) for layer in ppo.config.layers] == convolutions
    _, left = torso_shapes(game.observation, ppo.config.layers)
    assert left == (1, 1, 256)
    assert ppo.shapes["head.w"] == (256, 6)
    tower = {name.removeprefix("critic."): shape for name, shape in ppo.critic_shapes.items()}
    assert tower["head.w"] == (256, 1)
    assert {k: v for k, v in tower.items() if "torso" in k} == {k: v for k, v in ppo.shapes.items() if "torso" in k}
    c = ppo.config
    assert (c.steps, c.minibatch, c.epochs, c.lr, c.lam, c.clip, c.gamma) == (4000, 128, 30, 5e-5, 1.0, 0.3, 0.99)
    assert (c.kl_coefficient, c.kl_target, ppo.entropy_coefficient) == (0.2, 0.01, 0.0)
