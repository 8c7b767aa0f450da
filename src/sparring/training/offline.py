"""Learning from what is in a store, without playing: offline algorithms, and off-policy ones on recorded play."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.sqlite import SqliteStore
from sparring.training.experiment import Experiment
from sparring.training.metrics import Row
from sparring.training.trainee import OffPolicy, States

__all__ = ["Offline", "open_store", "recorded_play"]


def open_store(experiment: Experiment) -> SqliteStore:
    assert experiment.store is not None
    path = Path(experiment.store)
    path = path / "store.db" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"there is no store at {path}: record play with `sparring up` and a client first")
    return SqliteStore(path, readonly=True)


def recorded_play(store: SqliteStore, game: Game, where: str | None) -> Iterator[Fragment]:
    """Everything of the game, oldest first; InputError where there is none."""
    schemas = {found.name: found.schema for found in store.games()}
    if schemas.get(game.name) != game.schema:
        names = ", ".join(schemas) or "none"
        raise InputError(f"{where} has no play of {game.name} with these spaces; games: {names}")
    cursor = 0
    while (tail := store.tail(game.name, cursor)).fragments:
        cursor = tail.cursor
        yield from tail.fragments
    if not cursor:
        raise InputError(f"{where} has no play of {game.name} yet")


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
        store = open_store(self.experiment)
        try:
            self._fill(store)
        finally:
            store.close()

    def _fill(self, store: SqliteStore) -> None:
        for fragment in recorded_play(store, self.game, self.experiment.store):
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

    def policy(self) -> Any:
        return self.algorithm.policy(self.state, self.normaliser_params, 0.0)

    @property
    def exploration(self) -> float:
        return 0.0
