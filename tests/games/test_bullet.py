"""Walkers that are stepped with fewer calls play the very same game."""

import subprocess
import sys

import numpy as np
import pytest

from sparring.games import catalog

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("pybullet_envs_gymnasium")


@pytest.mark.parametrize("robot", ["Humanoid", "Ant", "HalfCheetah", "Walker2D", "Hopper"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_bit_is_the_packages(robot: str, dtype: type) -> None:
    name = f"{robot}BulletEnv-v0"
    plain, quick = gymnasium.make(name), catalog.make(name)
    assert type(quick.unwrapped.robot) is not type(plain.unwrapped.robot), "it is not the quick form that is tested"
    rng = np.random.default_rng(0)
    for seed in (3, None, 4, None):  # the first episode, a next one, a new seed, a next one
        first, expected = quick.reset(seed=seed)[0], plain.reset(seed=seed)[0]
        assert first.dtype == expected.dtype
        assert np.array_equal(first, expected)
        for _ in range(60):
            action = rng.uniform(-1.3, 1.3, plain.action_space.shape).astype(dtype)  # beyond the bounds too
            found, expected = quick.step(action), plain.step(action)
            assert found[0].dtype == expected[0].dtype
            assert np.array_equal(found[0], expected[0])
            assert found[1:4] == expected[1:4]
            if found[2]:
                break
    assert np.array_equal(quick.unwrapped.robot.body_real_xyz, plain.unwrapped.robot.body_real_xyz)  # the camera's aim
    quick.close()
    plain.close()


def test_it_says_nothing() -> None:
    """PyBullet's own words would be in the middle of a table or a live view."""
    code = (
        "from sparring.games import catalog; e = catalog.make('HumanoidBulletEnv-v0');"
        "e.reset(seed=0); e.reset(seed=1); e.close(); print('mine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("mine\n", "")


def test_other_robots_stay_as_they_are() -> None:
    env = catalog.make("InvertedPendulumBulletEnv-v0")
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[0].shape == env.observation_space.shape
    env.close()


def test_an_action_that_is_no_number_is_refused() -> None:
    env = catalog.make("HopperBulletEnv-v0")
    env.reset(seed=0)
    with pytest.raises(AssertionError):
        env.step(np.full(3, np.nan, np.float32))
    env.close()
