"""A game's simulator, if it has one that is the game: two policies play the same episodes in it."""

import logging
from typing import Any

import numpy as np

from sparring.errors import GameError
from sparring.games import Game, env_check
from sparring.games.spec import Array
from sparring.networks.policy import Policy
from sparring.networks.random_play import RandomPlay
from sparring.trainer.interrupt import StopRequested, TooLong, limited
from sparring.training.evaluate import play

__all__ = ["EVALUATION_LIMIT", "Chance", "Simulator"]

log = logging.getLogger("sparring.trainer")

EVALUATION_LIMIT = 20.0  # seconds for a look at how good a policy is: other games wait meanwhile


class Chance:
    """Random play with the methods of a policy."""

    def __init__(self, game: Game, seed: int) -> None:
        self.game, self._play, self._rng = game, RandomPlay(game), np.random.default_rng(seed)

    def act(self, obs: Array, noise: Array | None = None) -> tuple[Array, Array]:
        return self._play.run({}, self._play.noise(self._rng, len(obs)))


class Simulator:
    """`usable` until it fails; then `why`, for people. Anybody can declare a game, so a simulator's trouble is no
    reason not to learn from play."""

    def __init__(self, game: Game) -> None:
        self.game, self.usable, self.why = game, game.env is not None, ""
        if self.usable and (why := self._problem()):
            self.give_up(why)

    def give_up(self, why: str) -> None:
        self.usable, self.why = False, f", not simulated: {why}"
        log.warning("%s: not simulated, so candidates are tried in play: %s", self.game.name, why)

    def returns(self, new: Policy, old: Policy | None, episodes: int, seed: int) -> tuple[list[float], list[float]]:
        """Of both policies in the same episodes; none of either when the simulator had to be given up. `old`: none for
        play at random."""
        players: list[Any] = [new, Chance(self.game, seed) if old is None else old]
        try:
            with limited(EVALUATION_LIMIT):
                ours, theirs = ([each.ret for each in play(player, episodes, seed)] for player in players)
                return ours, theirs
        except StopRequested:
            raise
        except TooLong:
            self.give_up(f"{episodes} episodes of {self.game.env} take longer than {EVALUATION_LIMIT:g} s")
        except BaseException as error:  # whatever a game raises, its own SystemExit included
            log.exception("%s: its simulator failed", self.game.name)
            cause = error.__cause__ if isinstance(error, GameError) else None  # the game's own words
            self.give_up(f"{self.game.env} failed: {env_check.line(cause or error)}")
        return [], []

    def _problem(self) -> str | None:
        """Why the game's `env` is not the game that was declared."""
        try:
            with limited(EVALUATION_LIMIT):
                return env_check.problem(self.game)
        except StopRequested:
            raise
        except BaseException as error:  # noqa: BLE001 - too long, or a game's own SystemExit
            return f"{self.game.env} cannot be made: {env_check.line(error)}"
