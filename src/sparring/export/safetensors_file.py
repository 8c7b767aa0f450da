"""The format `safetensors`: to train on from, and for anybody's own evaluator (`export/weights.py`)."""

from dataclasses import dataclass
from pathlib import Path

from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.policy import Policy

__all__ = ["PolicyRunner", "Safetensors"]


class Safetensors:
    suffix = ".safetensors"

    def render(self, policy: Policy) -> bytes:
        from sparring.export import weights

        return weights.save(policy)

    def load(self, path: Path, game: Game, *, threads: int = 1) -> "PolicyRunner":
        """It plays in NumPy, whose number of threads is the environment's."""
        from sparring.export import weights

        policy = weights.load(path.read_bytes())
        if policy.game.schema != game.schema:
            raise InputError(f"{path} was made for schema {policy.game.schema}, {game.name!r} has {game.schema}")
        return PolicyRunner(policy)


@dataclass(frozen=True)
class PolicyRunner:
    """A policy in NumPy, as rollout workers play it."""

    policy: Policy

    def prepare(self, obs: Array) -> Array:
        return obs

    def run(self, ready: Array) -> Array:
        return self.policy.outputs(ready)

    def action(self, found: Array) -> Array:
        return self.policy.choose(found, None)

    def outputs(self, found: Array) -> Array:
        return found

    def value(self, found: Array) -> None:
        return None
