"""HumanoidBullet as its package steps it, joint by joint: `plain_humanoid:PlainHumanoid-v0`."""

import gymnasium
from pybullet_envs_gymnasium.gym_locomotion_envs import HumanoidBulletEnv
from pybullet_envs_gymnasium.robot_locomotors import Humanoid

__all__ = ["PlainHumanoid"]


class _Robot(Humanoid):  # type: ignore[misc]
    """A robot that sparring.games.bullet does not know."""


class PlainHumanoid(HumanoidBulletEnv):  # type: ignore[misc]
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(_Robot(), render_mode)


gymnasium.register("PlainHumanoid-v0", entry_point=PlainHumanoid, max_episode_steps=1000)
