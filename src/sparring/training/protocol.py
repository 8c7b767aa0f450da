"""What the training loop, sweeps and measurements ask of whatever learns in a run: Sparring's own algorithms
(`trainee.py`, `offline.py`), RLlib's (`rllib/bridge.py`) and `module:Class` alike. `choose.py` decides which it is.
`tests/extensions/outside_trainee.py` is a small one from outside."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, Protocol

from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.policy import Policy
from sparring.runs.metrics import PHASES, Episodes, Row

__all__ = ["States", "Trainee", "require_row"]

States = list[dict[str, Array] | None]  # of rollout workers, to go on identically; none: it begins anew


class Trainee(Protocol):
    experiment: Experiment
    game: Game
    episodes: Episodes  # `add` those that ended; `take` makes the row's `episode/…`, which `sparring runs` shows
    steps: int  # of play, since the run began
    updates: int  # of the parameters, since the run began

    # Before there is one

    @classmethod
    @abstractmethod
    def hyperparameters(cls, experiment: Experiment, game: Game | None = None) -> dict[str, Any]:
        """All of the algorithm's, those that the experiment leaves out too, as the experiment would say them. Checked
        each by itself; without a game as for vectors."""

    @classmethod
    @abstractmethod
    def check(cls, experiment: Experiment, game: Game) -> None:
        """Refuses what the algorithm refuses: spaces, and hyperparameters that do not go together. Starts nothing."""

    @classmethod
    @abstractmethod
    def state_shapes(cls, experiment: Experiment, game: Game) -> dict[str, tuple[int, ...]]:
        """Of what is learned: where these are equal one trainee's state fits another. May refuse."""

    @abstractmethod
    def __init__(self, experiment: Experiment, game: Game, logs: Path) -> None:
        """Refuses as early as it can; starts nothing. `logs`: where processes of its own may write."""

    # A run

    @abstractmethod
    def prepare(self) -> None:
        """What a new run needs before it begins; a resumed one has it in its checkpoint. May refuse."""

    @abstractmethod
    def network(self) -> str | None:
        """The policy's network in words, for people: what follows "network for", such as `4 inputs: dense 64, dense
        64`. None: it cannot be described."""

    @abstractmethod
    def open(self, states: States | None = None) -> None:
        """Starts playing; `states` of the workers when a run is resumed."""

    @abstractmethod
    def iterate(self) -> Row:
        """One iteration: a row of metrics. It needs `steps` and `updates`, both since the run began, and the seconds
        of each phase: `time/sample_s`, `time/load_s`, `time/learn_s`, `time/update_s`. Such a row is
        `{"steps": self.steps, "updates": self.updates, **self.episodes.take(), **Phases().take()}`, with a `Phases` of
        `sparring.runs.metrics` that was kept since the trainee was made."""

    @abstractmethod
    def policy(self) -> Policy:
        """As it is now. `Unrenderable` where it cannot be one of ours."""

    @abstractmethod
    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything to go on from, as arrays and JSON."""

    @abstractmethod
    def resume(self, arrays: dict[str, Array], meta: dict[str, Any]) -> States | None:
        """As `save` left it, and the workers' states for `open`."""

    @abstractmethod
    def memory(self) -> list[int]:
        """Bytes of each worker's process, what it shares with others by its part (PSS)."""

    @property
    @abstractmethod
    def takes_turns(self) -> bool:
        """Play and learning alternate, so that `time/sample_s` is all the time that play took."""

    @abstractmethod
    def close(self) -> None: ...


def require_row(name: str, row: Row) -> Row:
    """Refuses a row without what sinks, sweeps and views read from every one."""
    needed = ("steps", "updates", *(f"time/{phase}_s" for phase in PHASES))
    if missing := [key for key in needed if key not in row]:
        raise InputError(
            f"the row of {name} has no {', '.join(missing)}: see sparring.training.protocol.Trainee.iterate"
        )
    return row
