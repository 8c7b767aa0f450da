"""Recorded play as a film: by a simulator that can be put there, or by pictures that were recorded."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from sparring.errors import InputError
from sparring.games import Box, Discrete, Game, catalog
from sparring.games.spec import Dict
from sparring.runs.film import draw


def played(name: str, steps: int = 12) -> tuple[Game, Any, Any]:
    game, env = catalog.load(name), gymnasium.make(name)
    obs, actions = [env.reset(seed=3)[0]], []
    for i in range(steps):
        actions.append(i % 2)
        obs.append(env.step(i % 2)[0])
    env.close()
    return game, np.array(obs, game.observation.element.base), np.array(actions, game.action.element)


def frames(path: Path) -> list[Any]:
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(one, np.uint8).reshape(height, width, 3) for one in reader]


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_simulator_draws_each_recorded_observation(suffix: str, tmp_path: Path) -> None:
    game, obs, action = played("CartPole-v1")
    out = tmp_path / f"replay{suffix}"
    assert draw(game, obs, action, out) == "drawn by CartPole-v1, put into each recorded observation"
    found = frames(out)
    assert len(found) >= len(obs) - 1
    assert not np.array_equal(found[0], found[-1])
    assert list(tmp_path.iterdir()) == [out]


def test_what_the_simulator_would_not_have_done_is_not_drawn(tmp_path: Path) -> None:
    game, obs, action = played("CartPole-v1")
    with pytest.raises(InputError, match="cannot be drawn: its observations are no pictures, and CartPole-v1 goes ano"):
        draw(game, obs[::-1].copy(), action, tmp_path / "out.mp4")
    assert list(tmp_path.iterdir()) == []


def test_who_cannot_be_put_there_says_so(tmp_path: Path) -> None:
    game, obs, action = played("Acrobot-v1")
    with pytest.raises(InputError, match="Acrobot-v1 has no `set_observation"):
        draw(game, obs, action, tmp_path / "out.mp4")
    declared = Game("mine", Box((4,)), Discrete(2))
    with pytest.raises(InputError, match=r"mine cannot be drawn.*no simulator"):
        draw(declared, obs[:, :4], action, tmp_path / "out.mp4")
    with pytest.raises(InputError, match=r"replays are written as .mp4 or .gif files"):
        draw(game, obs, action, tmp_path / "out.txt")


class Dots(gymnasium.Env[Any, Any]):
    """One that is put there by a hook."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # as Gymnasium's are
    observation_space = gymnasium.spaces.Dict({"at": gymnasium.spaces.Box(0, 1, (1,))})
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.at = render_mode, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"at": np.zeros(1, np.float32)}, {}

    def set_observation(self, obs: Any) -> None:
        self.at = float(obs["at"][0])

    def render(self) -> Any:
        return np.full((20, 30, 3), int(250 * self.at), np.uint8)


def test_a_game_of_ones_own_is_put_there_by_a_hook(tmp_path: Path) -> None:
    gymnasium.register("Dots-v0", entry_point=Dots)
    game = Game("dots", Dict({"at": Box((1,))}), Discrete(2))
    obs = np.zeros(3, game.observation.element)
    obs["at"][:, 0] = [0.1, 0.5, 0.9]
    draw(game, obs, np.zeros(2, game.action.element), tmp_path / "out.mp4", env="Dots-v0")
    means = [frame.mean() for frame in frames(tmp_path / "out.mp4")]
    assert np.allclose(means, [25, 125, 225], atol=8)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_recorded_pictures_need_no_simulator(channels: int, tmp_path: Path) -> None:
    game = Game("view", Dict({"view": Box((20, 30, channels), "uint8"), "hp": Box(())}), Discrete(2))
    obs = np.zeros(4, game.observation.element)
    obs["view"] = np.array([0, 80, 160, 240], np.uint8).reshape(4, 1, 1, 1)
    assert draw(game, obs, np.zeros(3, game.action.element), tmp_path / "out.mp4") == "the recorded pictures `view`"
    found = frames(tmp_path / "out.mp4")
    assert found[0].shape == (160, 240, 3)
    assert np.allclose([frame.mean() for frame in found], [0, 80, 160, 240], atol=8)
