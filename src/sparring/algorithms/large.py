"""Games too large to learn. Anybody may declare one, and one trainer learns them all."""

import math

from sparring.algorithms.protocol import Algorithm
from sparring.errors import InputError
from sparring.games import Box
from sparring.networks.spec import action_size, choices, feature_shape

__all__ = ["require_small"]

# Of one update's observations or outputs: a game of a million actions takes 5 GB and ten seconds for each update.
BATCH_BYTES = 256 << 20
MAX_PARTS = 256  # of a MultiDiscrete action: XLA takes up to a second for each, and nothing else is learned meanwhile


def require_small(algorithm: Algorithm) -> None:
    """Refuses a game that would take too much memory, or too long, before anything is allocated or compiled. A field of
    a million values is four bytes on the wire, and four megabytes to learn from."""
    game, config = algorithm.game, algorithm.config
    rows = config.steps if algorithm.on_policy else 2 * config.batch
    key = "steps" if algorithm.on_policy else "batch"
    for what, size in (
        ("observation", math.prod(feature_shape(game.observation))),
        ("action", action_size(game.action)),
    ):
        if rows * size * 4 > BATCH_BYTES:
            raise InputError(
                f"one {what} is {size:,} numbers to a network, and {rows:,} of them are learned from at once: that is "
                f"more than {BATCH_BYTES >> 20} MiB. Make the {what} space smaller, or lower the hyperparameter {key!r}"
            )
    parts = len(choices(game.action)) if not isinstance(game.action, Box) else 1
    if parts > MAX_PARTS:
        raise InputError(
            f"one action has {parts:,} parts, at most {MAX_PARTS} are learned: each takes its time to compile. "
            "Make the action space smaller"
        )
