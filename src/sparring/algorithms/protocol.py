"""What every algorithm offers, and all that trainers read of it. Off-policy ones learn from batches of replayed
transitions, on-policy ones from the trajectories of recent policies. State is a NamedTuple of arrays: checkpointed,
sharded and compared as a pytree."""

from typing import Annotated, Any, ClassVar, Protocol

import jax
import msgspec

from sparring.algorithms.replay import Batch
from sparring.algorithms.trajectories import Trajectories
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.policy import Policy

__all__ = [
    "Algorithm",
    "Count",
    "Fraction",
    "Metrics",
    "NonNegative",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "Positive",
    "Trajectories",
]

# What a hyperparameter may be; checked when a configuration is read (`algorithms.create`).
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]

Metrics = dict[str, jax.Array]  # "loss/q", "q/mean", …: scalars, means over the updates of one call


class OffPolicyConfig(Protocol):
    """Hyperparameters that trainers themselves read. `layers` is optional: from it they see whether the network is so
    small that one thread of XLA is quickest (`training/xla.py`)."""

    @property
    def batch(self) -> int: ...  # transitions per update
    @property
    def gamma(self) -> float: ...  # with which rewards are summed …
    @property
    def n_step(self) -> int: ...  # … over so many steps
    @property
    def replay(self) -> int: ...  # rows of the replay window
    @property
    def learning_starts(self) -> int: ...  # transitions before the first update
    @property
    def updates_per_step(self) -> float: ...  # of experience
    @property
    def normalise(self) -> bool: ...  # observations that are no images to mean 0, deviation 1


class OnPolicyConfig(Protocol):
    """As above; `minibatch` is optional, too, and means the same as `batch` to `training/xla.py`."""

    @property
    def steps(self) -> int: ...  # of experience per update
    @property
    def normalise(self) -> bool: ...


class Algorithm(Protocol):
    name: ClassVar[str]
    on_policy: ClassVar[bool]
    game: Game
    # An OffPolicyConfig or an OnPolicyConfig: a frozen msgspec.Struct, named `Config` in the same file.
    config: Any

    def init(self, key: jax.Array) -> Any: ...

    def exploration(self, steps: int) -> float:
        """ε or noise after so many steps of experience; 0 where the policy explores by itself."""

    def policy(self, state: Any, normaliser: dict[str, Array], exploration: float) -> Policy:
        """What acts: on the host, exportable. `normaliser` is empty or has `normaliser.mean` and `normaliser.std`."""

    def update(self, state: Any, normaliser: dict[str, Array], data: Batch | Trajectories) -> tuple[Any, Metrics]:
        """Off-policy: one gradient step per leading row of a Batch (updates, batch, …), fused into one call.
        On-policy: all epochs over these Trajectories."""
