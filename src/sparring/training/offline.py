"""Learning from what is in a store, without playing: offline algorithms, and off-policy ones on recorded play."""

from collections.abc import Iterator
from pathlib import Path

from sparring.algorithms.protocol import Algorithm
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.experiment import Experiment
from sparring.export.same_forms import require_same_forms
from sparring.games import Game
from sparring.networks.policy import Policy
from sparring.runs.metrics import Row
from sparring.store import GameUnreadable, Store, open_store
from sparring.training.protocol import States
from sparring.training.trainee import OffPolicy

__all__ = ["Offline", "recorded_play"]


def recorded_play(store: Store, game: Game, experiment: Experiment) -> Iterator[Fragment]:
    """Everything of the game; InputError where there is none. On a cluster several readers bring it together."""
    if why := store.unreadable().get(game.name):
        raise GameUnreadable(why)
    schemas = {found.name: found.schema for found in store.games()}
    if schemas.get(game.name) != game.schema:
        names = ", ".join(schemas) or "none"
        raise InputError(f"{experiment.store} has no play of {game.name} with these spaces; games: {names}")
    some = False
    for piece in _pieces(store, game, experiment):
        some = some or bool(piece)
        yield from piece
    if not some:
        raise InputError(f"{experiment.store} has no play of {game.name} yet")


def _pieces(store: Store, game: Game, experiment: Experiment) -> Iterator[list[Fragment]]:
    if experiment.runner == "local":
        return store.scan(game.name)
    from sparring.training.loaders import load

    assert experiment.store is not None
    return load(experiment.store, game.name, experiment.rollout.workers, experiment.resources)


class Offline(OffPolicy):
    """The replay window is filled once; an iteration is a number of updates."""

    def __init__(self, experiment: Experiment, game: Game, logs: Path) -> None:
        super().__init__(experiment, game, logs)
        self.fused = min(max(self.fused, 32), experiment.iteration)

    @classmethod
    def _check_source(cls, experiment: Experiment, algorithm: Algorithm) -> None:
        if algorithm.on_policy:
            raise InputError(f"{experiment.name} learns from fresh play: use `source: simulate`, or the live trainer")
        if experiment.stop.steps is not None:
            raise InputError("stop.steps counts play, of which `source: store` makes none: use stop.iterations")
        if experiment.stop.return_ is not None and not experiment.evaluation.every:
            raise InputError("stop.return is that of evaluations, as `source: store` plays none: set evaluation.every")

    def open(self, states: States | None = None) -> None:
        pass  # nobody plays

    def prepare(self) -> None:
        require_same_forms(self.policy())
        assert self.experiment.store is not None
        store = open_store(self.experiment.store, readonly=True)
        try:
            self._fill(store)
        finally:
            store.close()

    def _fill(self, store: Store) -> None:
        for fragment in recorded_play(store, self.game, self.experiment):
            if self.replay.rows + fragment.steps + 1 > self.replay.capacity:
                raise InputError(
                    f"{self.experiment.store} has more play than algorithm.replay = {self.replay.capacity} rows: "
                    "raise it"
                )
            obs = self.replay.add(fragment.columns(self.game), fragment.terminated)
            if self.normaliser is not None:
                self.normaliser.observe(obs)
        self.steps = len(self.replay)

    def iterate(self) -> Row:
        self.debt += self.experiment.iteration
        self._learn()
        return self._row() | {"replay/transitions": len(self.replay)}

    def policy(self) -> Policy:
        return self.algorithm.policy(self.state, self.normaliser_params, 0.0)

    @property
    def exploration(self) -> float:
        return 0.0
