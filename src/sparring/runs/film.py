"""Recorded play as pictures: the game's simulator draws each recorded observation, where it can be put there; a game
whose observations are pictures needs none."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.games import Game
from sparring.games.catalog import make, own_fault
from sparring.games.spec import Array, Box, Dict, Discrete

__all__ = ["draw"]

FPS = 30.0
TRIED = 20  # steps with which a simulator has to show that it is where we put it
SMALLEST = 240  # pixels of a picture's longer side
SUFFIXES = (".mp4", ".gif")
HOOK = "set_observation"


def draw(game: Game, obs: Array, action: Array, out: Path, env: str | None = None) -> str:
    """Writes an episode's observations as a film, whole or not at all; how it was drawn, for people.

    :param obs: One more than actions.
    :param env: The simulator, where it is not the game's own.
    :raises InputError: nothing can draw this game; the message says why.
    """
    if out.suffix not in SUFFIXES or out.is_dir():
        raise InputError(f"{out}: replays are written as {' or '.join(SUFFIXES)} files")
    source = game if env is None else msgspec.structs.replace(game, env=env, env_kwargs=msgspec.UNSET)
    simulator, why = _simulator(source, obs, action)
    try:
        if simulator is not None:
            fps = float(simulator.metadata.get("render_fps") or FPS)
            _write(out, (_drawn(simulator, one) for one in obs), fps)
            return f"drawn by {source.env}, put into each recorded observation"
        pictures, name = _pictures(game, obs)
        if pictures is None:
            raise InputError(f"{game.name} cannot be drawn: its observations are no pictures, and {why}")
        _write(out, (_enlarged(one) for one in pictures), FPS)
        return f"the recorded {name}"
    finally:
        if simulator is not None:
            simulator.close()


def _simulator(game: Game, obs: Array, action: Array) -> tuple[Any, str]:
    """An environment that can be put into the recorded observations and draw, or why there is none."""
    if (name := game.env) is None:
        return None, "it has no simulator (`env` in its declaration, or --env)"
    for device in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):  # pygame asks for a display and a sound card, or complains
        os.environ.setdefault(device, "dummy")
    probe = make(game)
    probe.close()
    if "rgb_array" not in (probe.metadata.get("render_modes") or ()):
        return None, f"{name} draws no pictures (rgb_array is not among its render_modes)"
    env = make(game, render_mode="rgb_array")
    try:
        with own_fault(name, "its reset"):
            env.reset(seed=0)
        if _placer(env, obs) is None:
            why = f"{name} has no `{HOOK}(obs)`, and no `state` that is the observation"
        elif not hasattr(env.unwrapped, HOOK) and not _follows(env, game, obs, action):
            why = f"{name} goes another way than the recorded one: observations do not show all of its state"
        else:
            return env, ""
    except BaseException:
        env.close()
        raise
    env.close()
    return None, why


def _placer(env: Any, obs: Array) -> Callable[[Any], object] | None:
    inner = env.unwrapped
    if callable(hook := getattr(inner, HOOK, None)):
        return lambda one: hook(_plain(one))
    state = getattr(inner, "state", None)  # of Gymnasium's CartPole and others it is what they show
    if obs.dtype.kind == "f" and isinstance(state, np.ndarray | tuple | list) and np.shape(state) == obs.shape[1:]:
        return lambda one: setattr(inner, "state", one.astype(np.float64))
    return None


def _plain(one: Any) -> Any:
    """As the environment knows it: a dict of arrays, an array, a number."""
    if one.dtype.names:
        return {name: one[name] for name in one.dtype.names}
    return one


def _follows(env: Any, game: Game, obs: Array, action: Array) -> bool:
    """Whether it leads from recorded observations to the ones after them."""
    place = _placer(env, obs)
    assert place is not None
    for i in range(min(len(action), TRIED)):
        env.reset(seed=0)
        place(obs[i])
        native = int(action[i]) if isinstance(game.action, Discrete) else action[i]
        after = env.unwrapped.step(native)[0]
        if not np.allclose(after, obs[i + 1], rtol=1e-3, atol=1e-4):
            return False
    return True


def _drawn(env: Any, one: Any) -> Array:
    place = _placer(env, np.asarray([one]))
    assert place is not None
    with own_fault(str(env.spec.id if env.spec else "game"), f"its {HOOK} or render"):
        place(one)
        frame = np.asarray(env.render(), np.uint8)
    if frame.ndim != 3 or frame.shape[2] != 3:
        raise InputError(f"it draws frames of shape {frame.shape}: (height, width, 3) can be recorded")
    return frame


def _pictures(game: Game, obs: Array) -> tuple[Array | None, str]:
    spaces = game.observation.fields if isinstance(game.observation, Dict) else {"": game.observation}
    for name in sorted(spaces):
        space = spaces[name]
        if isinstance(space, Box) and space.dtype == "uint8" and len(space.shape) == 3:
            return (obs[name] if name else obs), f"pictures `{name}`" if name else "pictures"
    return None, ""


def _enlarged(picture: Array) -> Array:
    """In colour; of other numbers of channels the last one, which is a stack's newest."""
    colour = picture if picture.shape[2] == 3 else np.repeat(picture[:, :, -1:], 3, axis=2)
    times = max(SMALLEST // max(colour.shape[:2]), 1)
    return colour.repeat(times, axis=0).repeat(times, axis=1)


def _write(out: Path, frames: Iterator[Array] | Sequence[Array], fps: float) -> None:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise InputError("replays need ffmpeg: pip install 'sparring[train]'") from error
    new, writer, size = out.with_name(f".new{out.suffix}"), None, (0, 0)
    options: dict[str, Any] = {"codec": "gif", "pix_fmt_out": "rgb8"} if out.suffix == ".gif" else {}
    try:
        for frame in frames:
            even = frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]  # H.264 wants even sides
            if writer is None:
                out.parent.mkdir(parents=True, exist_ok=True)
                size = (even.shape[1], even.shape[0])
                writer = imageio_ffmpeg.write_frames(str(new), size, fps=fps, macro_block_size=1, **options)
                writer.send(None)
            if (even.shape[1], even.shape[0]) != size:
                raise InputError("the game draws frames of different sizes: they do not make a film")
            writer.send(np.ascontiguousarray(even))
    except BaseException:
        if writer is not None:
            writer.close()
        new.unlink(missing_ok=True)
        raise
    assert writer is not None
    writer.close()
    new.replace(out)
