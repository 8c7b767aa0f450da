"""The store's seam: the durable home of fragments. `sqlite` is the embedded default, `cassandra` a cluster, `memory`
serves unit tests."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from sparring.errors import SparringError
from sparring.experience import Fragment
from sparring.games import Game

__all__ = [
    "Episode",
    "Outcome",
    "PlayerStats",
    "Refused",
    "Stats",
    "Store",
    "StoreAway",
    "StoreBusy",
    "StoreFull",
    "Tail",
    "VersionStats",
]


class StoreFull(OSError):
    """No room left on the store's disk. Nothing of the append was kept; a later one may succeed."""


class StoreBusy(SparringError):
    """More is waiting for the disk than the store holds in memory. Nothing of the submission was kept; try later."""


class StoreAway(SparringError):
    """The store's servers do not answer. Whether an append was kept is not known: try again later, once is enough."""


class Outcome(StrEnum):
    STORED = "stored"
    DUPLICATE = "duplicate"  # this id is there already, with the same content
    CONFLICT = "conflict"  # this id is there already, with other content: refused


class Tail(msgspec.Struct, frozen=True):
    """Fragments in the order in which the store took them, and the cursor after the last of them."""

    fragments: list[Fragment]
    cursor: int


class Episode(msgspec.Struct, frozen=True):
    """A finished episode all of whose fragments arrived."""

    player: str
    episode: str
    steps: int
    ret: float  # sum of rewards
    ended: float  # the server's clock
    model: str | None
    version: int | None
    cursor: int


class PlayerStats(msgspec.Struct, frozen=True):
    player: str
    fragments: int
    steps: int
    last_seen: float  # the server's clock


class VersionStats(msgspec.Struct, frozen=True):
    model: str | None  # none: humans
    version: int | None
    fragments: int
    steps: int


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A fragment, or a record that nobody can read, for the quarantine."""

    game: str
    player: str
    id: str
    reason: str


class Stats(msgspec.Struct, frozen=True):
    fragments: int
    steps: int
    players: int
    bytes: int  # of the columns, as sent
    rejected: int  # fragments in quarantine since the beginning


class Store(Protocol):
    def register(self, game: Game) -> None:
        """Idempotent; InputError when the name is taken by a game with another schema."""

    def games(self) -> list[Game]: ...

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        """On disk (fsync) when it returns. Raises StoreFull; then nothing of this call was kept."""

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        """`append` without waiting; concurrent calls share one transaction and one fsync (group commit).

        Never blocks and never raises for the fragments' sake: StoreFull, StoreBusy and InputError are the future's.
        """

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        """Notes a refused fragment. Bounded: only the newest few thousand are kept, all are counted."""

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Refused]) -> None:
        """What was refused of a source that may be read again, such as a stream: `totals` per game since its beginning,
        which replace lower ones that it told before, so nothing counts twice; each of `newest` is noted once."""

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        """Fragments stored after the cursor, oldest first; misses none, repeats none. `after=-1`: only what comes.

        Fewer than `limit` may come when they are large; none means that the reader has caught up.
        """

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        """All fragments there are, in pieces, for several readers: the shares 0..of-1 are disjoint and together all."""

    def sample(self, game: str, steps: int, rng: np.random.Generator) -> list[Fragment]:
        """Random fragments that together hold at least `steps`; all of them, each once, when there are no more.

        Each is drawn with replacement and with a chance in proportion to its steps: uniform over steps.
        """

    def erase(self, game: str, player: str) -> int:
        """Deletes all of a player's fragments for good; how many they were."""

    def stats(self, game: str) -> Stats: ...

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        """The most recently seen first."""

    def versions(self, game: str) -> list[VersionStats]: ...

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        """Finished, complete episodes whose last fragment to arrive was stored after the cursor, oldest first."""

    def close(self) -> None: ...
