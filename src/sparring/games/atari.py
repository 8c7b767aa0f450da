"""Atari games as everybody learns them, unless they are set otherwise: every fourth frame, grey, 84 × 84, the last four
stacked. One environment is ale-py's own vector form with one, so that one and many are the same game; scores are the
game's own, not clipped."""

from typing import Any

import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Discrete
from gymnasium.vector.utils import batch_space

from sparring.games.atari_settings import ACTIONS, AtariSettings

__all__ = ["Atari", "Ataris"]

HEIGHT = 336  # of a video, about
SEEDS = 2**31  # that ale-py knows; it counts on from the first environment's


class Ataris(AtariVectorEnv):  # type: ignore[misc]  # as Gymnasium's below
    """Many environments abreast."""

    def __init__(self, env_id: str, count: int, settings: AtariSettings) -> None:
        s = settings
        own = {k: v for k, v in gymnasium.spec(env_id).kwargs.items() if k not in ("obs_type", "render_mode")}
        own |= {"img_height": s.pixels, "img_width": s.pixels, "stack_num": s.frames, "frameskip": s.frame_skip}
        own |= {"noop_max": s.noop_starts, "use_fire_reset": s.fire_reset}
        if s.sticky_actions is not None:
            own["repeat_action_probability"] = s.sticky_actions
        if s.actions is not None:
            own["full_action_space"] = True
        super().__init__(num_envs=count, num_threads=1 if count == 1 else 0, reward_clipping=False, **own)
        self._actions = None
        if s.actions is not None:
            self._actions = np.array([ACTIONS.index(name) for name in s.actions])
            self.single_action_space = Discrete(len(s.actions))
            self.action_space = batch_space(self.single_action_space, count)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=None if seed is None else seed % (SEEDS - self.num_envs), options=options)
        return obs, {}  # ale-py's: lives and numbers of frames, which say nothing of how well it went

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        chosen = actions if self._actions is None else self._actions[actions]
        obs, reward, terminated, truncated, _ = super().step(chosen)
        return obs, reward, terminated, truncated, {}


class Atari(gymnasium.Env[Any, Any]):  # type: ignore[misc]  # Gymnasium is Any to mypy here
    has_time_limit = True  # ale-py's: 108,000 frames

    def __init__(self, env_id: str, render_mode: str | None = None, **settings: Any) -> None:
        self.settings = AtariSettings.parse(settings)
        self.env = Ataris(env_id, 1, self.settings)
        self.observation_space, self.action_space = self.env.single_observation_space, self.env.single_action_space
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 60 / self.settings.frame_skip}
        self.render_mode = render_mode
        self._obs: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._obs = self.env.reset(seed=seed)[0][0]
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self.env.step(np.array([action]))
        self._obs = obs[0]
        return self._obs, float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        """What the policy sees, enlarged."""
        zoom = max(1, HEIGHT // self.settings.pixels)
        frame = self._obs[-1].repeat(zoom, 0).repeat(zoom, 1)
        return np.repeat(frame[:, :, None], 3, 2)

    def close(self) -> None:
        self.env.close()
