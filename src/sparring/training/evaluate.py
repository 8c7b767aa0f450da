"""How well a policy plays: whole episodes without exploration, several side by side."""

import logging
from collections.abc import Callable

import numpy as np

from sparring.errors import InputError
from sparring.games.vector import Separate
from sparring.networks.policy import Policy
from sparring.training.metrics import Row

__all__ = ["play", "summary"]

log = logging.getLogger("sparring.training")
ABREAST = 8  # environments side by side: a network is cheaper for eight observations than eight times for one
LONGEST = 30_000  # steps of an episode: a game without a time limit may never end (Atari's end after 27,000)


def play(
    policy: Policy,
    episodes: int,
    seed: int = 0,
    *,
    explore: bool = False,
    longest: int = LONGEST,
    told: Callable[[int], object] = lambda ended: None,
) -> list[tuple[float, int]]:
    """Return and length of each episode; `told` hears how many have ended. Every environment plays a fixed share:
    taking the first to finish would count short episodes more often than long ones."""
    game = policy.game
    if game.env is None:
        raise InputError(f"{game.name} is a declared game: it cannot be simulated, so not evaluated here")
    environments = Separate(game, min(episodes, ABREAST))
    count = environments.count
    share = np.array([len(range(i, episodes, count)) for i in range(count)])
    rng = np.random.default_rng(seed)
    ended: list[tuple[float, int]] = []
    try:
        obs = environments.reset(seed)
        returns, lengths, over = np.zeros(count), np.zeros(count, int), np.zeros(count, bool)
        while share.any():
            action, _ = policy.act(obs, policy.noise(rng, count) if explore else None)
            step = environments.step(action)
            returns += step.reward
            lengths += ~over
            obs, over = step.obs, step.terminated | step.truncated
            for i in np.flatnonzero(~over & (lengths >= longest)):
                environments.cut(int(i))
                over[i] = True
            for i in np.flatnonzero(over):
                if share[i]:
                    ended.append((float(returns[i]), int(lengths[i])))
                    share[i] -= 1
                    told(len(ended))
                returns[i], lengths[i] = 0.0, 0
    finally:
        environments.close()
    if endless := sum(length >= longest for _, length in ended):
        log.warning("%d of %d episodes of %s took %d steps: they are cut there", endless, episodes, game.name, longest)
    return ended


def summary(episodes: list[tuple[float, int]]) -> Row:
    returns = np.array([ret for ret, _ in episodes])
    return {
        "evaluation/return_min": float(returns.min()),
        "evaluation/return_mean": float(returns.mean()),
        "evaluation/return_max": float(returns.max()),
        "evaluation/return_std": float(returns.std()),
        "evaluation/length_mean": float(np.mean([length for _, length in episodes])),
        "evaluation/episodes": len(episodes),
    }
