"""Learning from what is in a store, without playing: offline algorithms, and off-policy ones on recorded play."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.store import Store, open_store
from sparring.training.experiment import Experiment
from sparring.training.metrics import Row
from sparring.training.trainee import OffPolicy, States

__all__ = ["Offline"]


class Offline(OffPolicy):
    """The replay window is filled once; an iteration is a number of updates."""

    def __init__(self, experiment: Experiment, algorithm: Any, logs: Path) -> None:
        if algorithm.on_policy:
            raise InputError(f"{algorithm.name} learns from fresh play: use `source: simulate`, or the live trainer")
        if experiment.stop.steps is not None:
            raise InputError("stop.steps counts play, of which `source: store` makes none: use stop.iterations")
        super().__init__(experiment, algorithm, logs)
        self.fused = min(max(self.fused, 32), experiment.iteration)

    def open(self, states: States | None = None) -> None:
        pass  # nobody plays

    def prepare(self) -> None:
        assert self.experiment.store is not None
        store = open_store(self.experiment.store, readonly=True)
        try:
            self._fill(store)
        finally:
            store.close()

    def _fill(self, store: Store) -> None:
        schemas = {game.name: game.schema for game in store.games()}
        if schemas.get(self.game.name) != self.game.schema:
            found = ", ".join(schemas) or "none"
            raise InputError(
                f"{self.experiment.store} has no play of {self.game.name} with these spaces; games: {found}"
            )
        for fragments in self._pieces(store):
            for fragment in fragments:
                if self.replay.rows + fragment.steps + 1 > self.replay.capacity:
                    raise InputError(
                        f"{self.experiment.store} has more play than algorithm.replay = {self.replay.capacity} rows: "
                        "raise it"
                    )
                obs = self.replay.add(fragment.columns(self.game), fragment.terminated)
                if self.normaliser is not None:
                    self.normaliser.observe(obs)
        if not len(self.replay):
            raise InputError(f"{self.experiment.store} has no play of {self.game.name} yet")
        self.steps = len(self.replay)

    def _pieces(self, store: Store) -> Iterator[list[Fragment]]:
        if self.experiment.runner == "local":
            return store.scan(self.game.name)
        from sparring.training.loaders import load

        e = self.experiment
        assert e.store is not None
        return load(e.store, self.game.name, e.rollout.workers, e.resources)

    def iterate(self) -> Row:
        self.debt += self.experiment.iteration
        self._learn()
        return self._row() | {"replay/transitions": len(self.replay)}

    def policy(self) -> Any:
        return self.algorithm.policy(self.state, self.normaliser_params, 0.0)

    @property
    def exploration(self) -> float:
        return 0.0
