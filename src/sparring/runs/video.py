"""Episodes as an mp4, without a display: PyBullet, Atari and Gymnasium render into arrays, ffmpeg does the rest."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparring.errors import InputError
from sparring.games import Game
from sparring.games.catalog import make
from sparring.games.spec import Array, Discrete

__all__ = ["Filmed", "record", "require"]

FPS = 30


def require(game: Game) -> None:
    """InputError where the game, or this machine, cannot be recorded: a run should not find out after an hour."""
    from gymnasium.error import DependencyNotInstalled

    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise InputError("recording needs ffmpeg: pip install 'sparring[train]'") from error
    if game.env is None:
        raise InputError(f"{game.name} is a declared game: it cannot be simulated, so not recorded")
    for device in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):  # pygame asks for a display and a sound card, or complains
        os.environ.setdefault(device, "dummy")
    env = make(game)
    env.close()
    if "rgb_array" not in (env.metadata.get("render_modes") or ()):
        raise InputError(f"{game.name} draws no pictures (rgb_array is not among its render_modes)")
    env = make(game, render_mode="rgb_array")
    try:
        env.reset(seed=0)
        frame = np.asarray(env.render())
        if frame.ndim != 3 or frame.shape[2] != 3:
            raise InputError(f"{game.name} draws frames of shape {frame.shape}: (height, width, 3) can be recorded")
    except DependencyNotInstalled as error:
        raise InputError(f"{game.name} cannot be recorded: {error}") from error
    finally:
        env.close()


class Filmed(Protocol):
    """As much of a policy as is filmed."""

    @property
    def game(self) -> Game: ...

    def act(self, obs: Any) -> tuple[Array, Array | None]: ...


def record(
    policy: Filmed,
    out: Path,
    episodes: int = 1,
    seed: int = 0,
    max_steps: int = 5000,
    on_frame: Callable[[int, int], object] = lambda episode, frames: None,
) -> list[float]:
    """Plays greedily and writes what is seen, whole or not at all; the returns. `on_frame` hears how far it is."""
    game = policy.game
    require(game)
    import imageio_ffmpeg

    if out.suffix != ".mp4" or out.is_dir():
        raise InputError(f"{out}: videos are written as .mp4 files")
    env = make(game, render_mode="rgb_array")
    writer: Any = None
    returns, new = [], out.with_name(f".{out.name}")
    try:
        for episode in range(episodes):
            obs, _ = env.reset(seed=seed + episode)
            total, over, steps = 0.0, False, 0
            while not over and steps < max_steps:
                frame = _even(np.asarray(env.render(), np.uint8))
                if writer is None:
                    out.parent.mkdir(parents=True, exist_ok=True)
                    fps = float(env.metadata.get("render_fps") or FPS)
                    size = (frame.shape[1], frame.shape[0])
                    writer = imageio_ffmpeg.write_frames(str(new), size, fps=fps, macro_block_size=1)
                    with warnings.catch_warnings():  # JAX warns of forks; what is forked here becomes ffmpeg at once
                        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
                        writer.send(None)
                if (frame.shape[1], frame.shape[0]) != size:
                    raise InputError(f"{game.name} draws frames of different sizes: they do not make a video")
                writer.send(np.ascontiguousarray(frame))
                action = policy.act(obs)[0]
                native = int(action) if isinstance(game.action, Discrete) else action.reshape(env.action_space.shape)
                obs, reward, terminated, truncated, _ = env.step(native)
                total, over, steps = total + float(reward), terminated or truncated, steps + 1
                on_frame(episode, steps)
            returns.append(total)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        if writer is not None:
            writer.close()
        env.close()
    new.replace(out)
    return returns


def _even(frame: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """H.264 wants even sides."""
    height, width = frame.shape[:2]
    return frame[: height - height % 2, : width - width % 2]
