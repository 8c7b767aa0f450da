"""How good a policy is where the game can be simulated: greedy episodes, several side by side."""

import numpy as np

from sparring.errors import InputError
from sparring.games.catalog import make
from sparring.games.spec import Discrete, column
from sparring.networks.policy import Policy

__all__ = ["evaluate"]


def evaluate(policy: Policy, episodes: int, seed: int = 0) -> float:
    """Mean return over so many episodes, without exploration."""
    game = policy.game
    if game.env is None:
        raise InputError(f"{game.name} is a declared game: it cannot be simulated here")
    envs = [make(game.env) for _ in range(episodes)]
    try:
        live = {i: env.reset(seed=seed * episodes + i)[0] for i, env in enumerate(envs)}
        returns = np.zeros(episodes)
        while live:
            actions, _ = policy.act(column(game.observation, list(live.values())))
            for i, action in zip(list(live), actions, strict=True):
                step = int(action) if isinstance(game.action, Discrete) else action
                live[i], reward, terminated, truncated, _ = envs[i].step(step)
                returns[i] += float(reward)
                if terminated or truncated:
                    del live[i]
        return float(returns.mean())
    finally:
        for env in envs:
            env.close()
