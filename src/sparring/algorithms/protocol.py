"""What an algorithm is: all that the training loop, the live trainer and sweeps read of it.

Subclass `Algorithm`, declare `config_class` and the traits that differ, write `init`, `policy` and `update`:

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        lr: PositiveFloat = 1e-3
        ...                                # and what OnPolicyConfig or OffPolicyConfig asks for

    class MyAlgorithm(Algorithm):
        config_class = Config
        on_policy = True

Then `algorithm: {name: my_module:MyAlgorithm, lr: 1e-3}` in an experiment trains it. The tutorial
docs/tutorials/your-own-algorithm.md does this with A2C (examples/a2c.py).

Off-policy algorithms learn from batches of replayed transitions, on-policy ones from the trajectories of recent
policies. State is a pytree of arrays, best a NamedTuple: it is checkpointed, sharded and compared as such.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import msgspec

from sparring.algorithms.replay import Transitions
from sparring.algorithms.trajectories import Trajectories
from sparring.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from sparring.games import Game, Space
from sparring.games.spec import Array
from sparring.networks.policy import Policy, Value
from sparring.networks.spec import Layer

__all__ = [
    "FROZEN",
    "Algorithm",
    "Fraction",
    "Metrics",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "PositiveFloat",
    "PositiveInt",
    "Trajectories",
    "Transitions",
]

FROZEN = 2000  # updates of critics alone after a warm start, before they teach the policy that was taken in
Metrics = dict[str, jax.Array]  # "loss/q", "q/mean", …: scalars, means over the updates of one call


class OffPolicyConfig(Protocol):
    """Hyperparameters of an off-policy algorithm that trainers read themselves."""

    @property
    def batch(self) -> int: ...  # transitions per update
    @property
    def gamma(self) -> float: ...  # with which rewards are summed …
    @property
    def n_step(self) -> int: ...  # … over so many steps
    @property
    def replay(self) -> int: ...  # rows of the replay window
    @property
    def learning_starts(self) -> int: ...  # steps before the first update
    @property
    def updates_per_step(self) -> float: ...  # of experience
    @property
    def normalise(self) -> bool: ...  # observations that are no images to mean 0, deviation 1


class OnPolicyConfig(Protocol):
    """Hyperparameters of an on-policy algorithm that trainers read themselves."""

    @property
    def steps(self) -> int: ...  # of experience per update
    @property
    def normalise(self) -> bool: ...  # as above


class Algorithm(Protocol):
    """An algorithm for one game. It has no state of its own: `init` makes one, `update` makes the next out of it.

    :cvar config_class: its hyperparameters: a frozen msgspec.Struct with a default for each, and with those of
        `OnPolicyConfig` or `OffPolicyConfig`. A default annotated `tuple[Layer, ...]` is for vectors; images and wide
        vectors get layers that fit them.
    :cvar on_policy: it learns from `Trajectories` of recent policies; otherwise from replayed `Transitions`.
    :cvar offline: it learns from recorded play only and has no way to explore.
    :cvar demonstrations: it imitates people while bots make less than they do: live trainers give it
        `Transitions.demo`. Those without it learn from people's steps as from anybody's.
    """

    config_class: ClassVar[type[msgspec.Struct]]
    on_policy: ClassVar[bool] = False
    offline: ClassVar[bool] = False
    demonstrations: ClassVar[bool] = False
    game: Game
    config: Any  # an instance of `config_class`, or another with the hyperparameters that trainers read

    def __init__(self, game: Game, config: Any) -> None:
        """:raises InputError: the game's spaces, or these hyperparameters together, are not for this algorithm."""
        self.game, self.config = game, config

    @classmethod
    def defaults_for(cls, observation: Space, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Hyperparameters that differ from `config_class`'s for such observations. Those that are `given` stay."""
        return {}

    @classmethod
    def defaults_for_action(cls, action: Space) -> Mapping[str, Any]:
        """Hyperparameters that differ from `config_class`'s for such actions; those for the observation come first."""
        return {}

    @property
    def batch(self) -> int:
        """Rows of one gradient step: with few rows and small layers one thread of XLA is quickest."""
        return int(self.config.steps if self.on_policy else self.config.batch)

    @property
    def layers(self) -> tuple[Layer, ...] | None:
        """Of the policy's network; none where it is not described by layers."""
        layers = getattr(self.config, "layers", None)
        return layers if isinstance(layers, tuple) else None

    @abstractmethod
    def init(self, key: jax.Array) -> Any:
        """The state before the first update."""

    def exploration(self, steps: int) -> float:
        """ε or noise after so many steps of experience; 0 where the policy explores by itself."""
        return 0.0

    @abstractmethod
    def policy(self, state: Any, normaliser: dict[str, Array], exploration: float) -> Policy:
        """What acts: on the host, exportable.

        :param normaliser: empty, or `normaliser.mean` and `normaliser.std`: arrays of the policy, too.
        """

    def value(self, state: Any) -> Value | None:
        """The network that says what a state is worth to the policy, for exports with `--value`; none: it has none."""
        return None

    def warm_start(self, state: Any, policy: Policy) -> Any | None:
        """The state that goes on from a policy of this algorithm's network, which another run or algorithm may have
        trained; none where it cannot. What a policy does not carry, such as critics, stays as in `state`: do not let
        them teach the policy before they have learned what it does.

        :param policy: has the game, layers, head and shapes of what `policy` gives.
        """
        return None

    @abstractmethod
    def update(self, state: Any, normaliser: dict[str, Array], data: Any) -> tuple[Any, Metrics]:
        """The next state, and metrics.

        :param data: off-policy: `Transitions` (updates, batch, …), one gradient step for each leading row, fused into
            one call. On-policy: `Trajectories`, for all the gradient steps that this experience is good for.
        """
