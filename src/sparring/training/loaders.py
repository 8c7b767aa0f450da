"""Reading a store with several actors on a Ray cluster, each its share; the learner keeps the only copy."""

from collections.abc import Iterator
from typing import Any

from sparring.errors import SparringError
from sparring.experience import Fragment, wire
from sparring.experiment import Resources
from sparring.launch.ray_cluster import cause, ray
from sparring.rollout.ray_pool import require
from sparring.store import open_store

__all__ = ["load"]


class Loader:
    """One reader, in an actor's process."""

    def __init__(self, address: str, game: str, share: int, of: int) -> None:
        self.pieces = open_store(address, readonly=True).scan(game, share, of)

    def next(self) -> bytes:
        """A piece as on the wire; empty when there are no more."""
        return wire.encode(next(self.pieces, []))


def load(address: str, game: str, loaders: int, resources: Resources) -> Iterator[list[Fragment]]:
    """All of a game's fragments, a piece of each loader in turn: always in the same order. Each has read its next
    piece when it is asked for it, and no more than that."""
    require(resources, loaders)
    options = {"num_cpus": resources.actor_cpus, "num_gpus": resources.actor_gpus}
    actors = [ray.remote(Loader).options(**options).remote(address, game, i, loaders) for i in range(loaders)]
    asked: dict[Any, Any] = {actor: actor.next.remote() for actor in actors}
    try:
        while asked:
            for actor, piece in list(asked.items()):
                try:
                    fragments = wire.decode(ray.get(piece))
                except ray.exceptions.RayError as error:
                    raise SparringError(f"a loader of {address.rpartition('@')[2]} failed: {cause(error)}") from error
                if fragments:
                    asked[actor] = actor.next.remote()
                    yield fragments
                else:
                    del asked[actor]
    finally:
        for actor in actors:
            ray.kill(actor)
