"""Settings of the live trainer, for all games and for each, and how a game's algorithm follows from it."""

from typing import Any

import msgspec

from sparring import algorithms
from sparring.algorithms.replay import WINDOW_BYTES
from sparring.games import Game
from sparring.store.profile import GameSettings

__all__ = ["Settings", "algorithm_name", "for_game", "learned_alike"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    algorithm: str | None = None  # none: the published version's, else the default for the game's actions
    hyperparameters: dict[str, Any] = {}
    publish_every: float = 10.0  # seconds between promotions at least: every player downloads every one
    candidate_every: float = 120.0  # seconds between candidates of a declared game; more while they are rejected
    canary: float = 0.1  # share of play that a candidate gets; of this and alpha a young game has its own
    alpha: float = 0.05  # how often a difference may be found where there is none, however often one looks
    least_episodes: int = 10  # of a candidate before anything is decided
    most_episodes: int = 200  # of a candidate that is neither better nor worse by then: it is given up
    keep: int = 20  # of the newest versions, and of those promoted last; older ones are retired
    evaluate_every: float = 2.0  # seconds between looks at how good the newest policy is, for games we can simulate
    evaluation_episodes: int = 10  # of each look, by the new policy and by the one that players have
    checkpoint_every: float = 10.0
    window_bytes: int = WINDOW_BYTES  # memory of a game's replay window, which else has as many rows as `replay` says
    seed: int = 0


def for_game(defaults: Settings, own: GameSettings) -> Settings:
    """The trainer's settings with what was set for one game. (`pace` is the gateway's.)"""
    same = own.algorithm in (None, defaults.algorithm)  # hyperparameters are an algorithm's
    promotion = {name: value for name, value in msgspec.structs.asdict(own.promotion).items() if value is not None}
    return msgspec.structs.replace(
        defaults,
        algorithm=defaults.algorithm if own.algorithm is None else own.algorithm,
        hyperparameters=(defaults.hyperparameters if same else {}) | own.hyperparameters,
        **promotion,
    )


def learned_alike(one: Settings, other: Settings) -> bool:
    """Whether a learner of the one goes on under the other as it is: nothing but when versions are promoted differs."""
    return (one.algorithm, one.hyperparameters, one.window_bytes) == (
        other.algorithm,
        other.hyperparameters,
        other.window_bytes,
    )


def algorithm_name(game: Game, settings: Settings) -> str:
    return settings.algorithm or algorithms.default_for(game)
