"""A learner: an algorithm with its state; what all learners have in common."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparring.algorithms.protocol import Algorithm
from sparring.games.spec import Array
from sparring.networks.defaults import describe
from sparring.networks.functions import Normaliser
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Deterministic, Gaussian, Head, QValues, Squashed, feature_shape
from sparring.runs.checkpoint import flatten, unflatten

__all__ = ["Learner", "another"]

EXPLORED = 1 << 40  # steps after which every schedule of exploration is at its end
STEADY = 100_000  # observations that the normaliser of a policy stands for at least


class Learner:
    """An algorithm's state, normaliser and counters: what every way to learn has, and a checkpoint holds."""

    def __init__(self, algorithm: Algorithm, seed: int = 0) -> None:
        self.algorithm, self.config, self.game = algorithm, algorithm.config, algorithm.game
        self.state = algorithm.init(jax.random.key(seed))
        self.rng = np.random.default_rng(seed)
        shape = feature_shape(self.game.observation)
        self.normaliser = Normaliser(shape) if self.config.normalise and len(shape) == 1 else None
        self.steps = self.updates = 0  # since the beginning, across restarts
        self.explored = 0  # steps that count as explored before: those of a policy that was taken in
        self.metrics: dict[str, float] = {}

    @property
    def exploration(self) -> float:
        return float(self.algorithm.exploration(self.steps + self.explored))

    def warm_start(self, policy: Policy, steps: int) -> str | None:
        """Goes on from a policy that plays already, with little exploration; why it cannot, for people.

        :param steps: of experience that the policy was trained on.
        """
        if (why := another(self.policy(), policy)) is not None:
            return why
        warm = getattr(self.algorithm, "warm_start", None)  # the protocol did not have it at first
        state = None if warm is None else warm(self.state, policy)
        if state is None:
            return "the algorithm has no way to continue from a policy"
        self.state, self.explored = state, EXPLORED
        if self.normaliser is not None:
            # A count that keeps it almost as it is: the network was trained with these numbers.
            self.normaliser.mean = policy.params["normaliser.mean"].astype(np.float64)
            self.normaliser.var = np.square(policy.params["normaliser.std"].astype(np.float64))
            self.normaliser.count = float(max(steps, STEADY))
        return None

    def policy(self) -> Policy:
        return self.algorithm.policy(self.state, self.normaliser_params, self.exploration)

    @property
    def normaliser_params(self) -> dict[str, Array]:
        return {} if self.normaliser is None else self.normaliser.params

    def apply(self, data: Any) -> dict[str, Any]:
        """One call of the algorithm's update. Its metrics are computed in the background: `note` waits for them."""
        self.state, metrics = self.algorithm.update(self.state, self.normaliser_params, data)
        return dict(metrics)

    def note(self, metrics: dict[str, Any]) -> None:
        self.metrics = {name: float(value) for name, value in metrics.items()}

    def problem(self) -> str | None:
        """Why nobody should act with this state, nor keep it; none when all of it is finite."""
        if bool(_finite(self.state)) and all(np.isfinite(x).all() for x in self.normaliser_params.values()):
            return None
        arrays = flatten(self.state, "") | self.normaliser_params
        name = next(name for name, array in arrays.items() if not np.isfinite(array).all())
        return f"{name.lstrip('.')} has NaN or infinite values"

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays = flatten(self.state, "state")
        if self.normaliser is not None:
            arrays |= {"normaliser.mean": self.normaliser.mean, "normaliser.var": self.normaliser.var}
        meta = {
            "steps": self.steps,
            "updates": self.updates,
            "rng": self.rng.bit_generator.state,
            "metrics": self.metrics,
            "normaliser_count": self.normaliser.count if self.normaliser else 0.0,
            "explored": self.explored,
        }
        return arrays, meta

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        self.state = jax.tree.map(jnp.asarray, unflatten(self.state, arrays, "state"))
        if self.normaliser is not None:
            self.normaliser.mean, self.normaliser.var = arrays["normaliser.mean"], arrays["normaliser.var"]
            self.normaliser.count = meta["normaliser_count"]
        self.steps, self.updates, self.metrics = meta["steps"], meta["updates"], meta.get("metrics", {})
        self.explored = meta.get("explored", 0)
        self.rng.bit_generator.state = meta["rng"]


def another(ours: Policy, theirs: Policy) -> str | None:
    """How another policy's network differs from ours; none where its numbers fit."""
    if theirs.game.schema != ours.game.schema:
        return "it plays a game with other observations or actions"
    if theirs.head != ours.head:
        return f"its network gives {_head_words(theirs.head)}, this algorithm's {_head_words(ours.head)}"
    if theirs.layers != ours.layers:
        return f"its network is {describe(theirs.layers)}, here it is {describe(ours.layers)}"
    shapes = {name: np.shape(x) for name, x in ours.params.items()}
    if shapes != {name: np.shape(x) for name, x in theirs.params.items()}:
        return "its network has other inputs or outputs, or only one of the two normalises observations"
    return None


def _head_words(head: Head) -> str:
    """What a network's last layer says about actions, for people."""
    match head:
        case QValues():
            return "a value of each action" + (", duelling" if head.duelling else "")
        case Categorical():
            return "a probability of each action"
        case Gaussian():
            return "a mean and a deviation of actions" + (", both by the observation" if head.observed else "")
        case Squashed():
            return "a mean and a deviation of actions, squashed into their bounds"
        case Deterministic():
            return "one action without a deviation"


@jax.jit
def _finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
