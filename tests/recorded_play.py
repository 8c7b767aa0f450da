"""Stores with play to learn from, by players who know what they do but err."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparring.experience.fragment import Columns, Fragment, new_id, pack
from sparring.games import catalog
from sparring.store.sqlite import SqliteStore


def record(
    path: Path, game_id: str, player: Callable[[np.ndarray], object], episodes: int, length: int = 10**6
) -> float:
    """Plays and stores; the mean return. Episodes travel in fragments of `length` steps."""
    game, env = catalog.load(game_id), catalog.make(game_id)
    fragments: list[Fragment] = []
    returns = []
    for episode in range(episodes):
        obs, action, reward, over = [env.reset(seed=episode)[0]], [], [], False
        while not over:
            action.append(player(obs[-1]))
            seen, gained, terminated, truncated, _ = env.step(action[-1])
            obs.append(seen)
            reward.append(gained)
            over = terminated or truncated
        returns.append(sum(reward))
        for start in range(0, len(action), length):
            part = slice(start, start + length)
            last = start + length >= len(action)
            element = game.action.element
            columns = Columns(
                np.array(obs[start : start + length + 1], game.observation.element.base),
                np.array(action[part], element.base).reshape(-1, *element.shape),
                np.array(reward[part], "<f4"),
            )
            fragments.append(
                pack(game, columns, id=new_id(), player="p", episode=str(episode), start=start, time=0.0,
                     terminated=terminated and last, truncated=truncated and last)
            )  # fmt: skip
    db = SqliteStore(path / "store.db")
    db.register(game)
    db.append(fragments)
    db.close()
    return float(np.mean(returns))


def balance(rng: np.random.Generator) -> Callable[[np.ndarray], int]:
    """CartPole by someone who pushes towards the side to which the pole falls, and errs one time in five."""
    return lambda obs: int((obs[2] + 0.5 * obs[3] > 0) != (rng.random() < 0.2))
