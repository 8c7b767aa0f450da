"""How well a policy plays: whole episodes without exploration, several side by side."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from sparring.errors import InputError
from sparring.games.vector import Separate
from sparring.networks.policy import Policy
from sparring.runs.metrics import INFOS, PlayedEpisode, Row, info_means

__all__ = ["LONGEST", "play", "summary"]

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
    endless: int = LONGEST,
    warn: bool = True,
    on_episode: Callable[[int], object] = lambda ended: None,
) -> list[PlayedEpisode]:
    """Episodes of at most `longest` steps, and `endless` in a game without a time limit of its own. `on_episode` hears
    how many have ended. The same seed has the same episodes in the same order, whoever plays them. Every environment
    plays a fixed share: taking the first to finish would count short episodes more often than long ones."""
    game = policy.game
    if game.env is None:
        raise InputError(
            f"{game.name} is a declared game: it cannot be simulated, so not evaluated here "
            "(`sparring eval --env ID` plays it in a Gymnasium game that has the same spaces)"
        )
    environments = Separate(game, min(episodes, ABREAST))
    count = environments.count
    share = np.array([len(range(i, episodes, count)) for i in range(count)])
    rng = np.random.default_rng(seed)
    longest = longest if environments.has_time_limit else min(longest, endless)
    ended: list[tuple[int, int, PlayedEpisode]] = []  # with the environment's share that is left, and its number
    try:
        obs = environments.reset(seed)
        returns, lengths, over = np.zeros(count), np.zeros(count, int), np.zeros(count, bool)
        while share.any():
            action, _ = policy.act(obs, policy.noise(rng, count) if explore else None)
            step = environments.step(action)
            returns += step.reward
            lengths += ~over
            obs, over = step.obs, step.terminated | step.truncated
            cut = ~over & (lengths >= longest)
            for i in np.flatnonzero(cut).tolist():
                environments.cut(i)
                over[i] = True
            for i in np.flatnonzero(over).tolist():
                if share[i]:
                    episode = PlayedEpisode(float(returns[i]), int(lengths[i]), step.infos.get(i, {}), bool(cut[i]))
                    ended.append((-int(share[i]), i, episode))
                    share[i] -= 1
                    on_episode(len(ended))
                returns[i], lengths[i] = 0.0, 0
    finally:
        environments.close()
    played = [episode for _, _, episode in sorted(ended, key=lambda each: each[:2])]
    if warn:
        _warn_of_cuts(played, game.name, longest)
    return played


def _warn_of_cuts(played: Sequence[PlayedEpisode], game: str, longest: int) -> None:
    if count := sum(episode.cut for episode in played):
        log.warning(
            "%d of %d episodes of %s were cut after %d steps: their returns are those until there",
            count, len(played), game, longest,
        )  # fmt: skip


def summary(played: Sequence[tuple[float, int] | PlayedEpisode]) -> Row:
    episodes = [PlayedEpisode(*each) for each in played]
    returns = np.array([episode.ret for episode in episodes])
    names = sorted({name for episode in episodes for name in episode.info})
    infos = info_means(episodes, names[:INFOS], "evaluation")
    return infos | {
        "evaluation/return_min": float(returns.min()),
        "evaluation/return_mean": float(returns.mean()),
        "evaluation/return_max": float(returns.max()),
        "evaluation/return_std": float(returns.std()),
        "evaluation/length_mean": float(np.mean([episode.length for episode in episodes])),
        "evaluation/episodes": len(episodes),
        "evaluation/cut": sum(episode.cut for episode in episodes),
    }
