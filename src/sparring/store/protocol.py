"""The store's seam: the durable home of fragments. `sqlite` is the embedded default, `cassandra` a cluster, `memory`
serves unit tests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from sparring.errors import Busy, InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.profile import Profile, Revision

__all__ = [
    "Episode",
    "EpisodePage",
    "FragmentRefused",
    "GameUnreadable",
    "NotRegistered",
    "Outcome",
    "PlayerStats",
    "Quarantined",
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


class StoreBusy(Busy):
    """More is waiting for the disk than the store holds in memory. Nothing of the submission was kept; try later."""


class StoreAway(SparringError):
    """The store's servers do not answer. Whether an append was kept is not known: try again later, once is enough."""


class FragmentRefused(InputError):
    """A fragment of the append cannot be stored here, now or later: it is too large, or of no game that is registered.
    Others of the append may have been kept. Any other InputError is about the store itself: its address, its login."""


class NotRegistered(FragmentRefused):
    """There is no such game, or it has another schema by now."""


class GameUnreadable(InputError):
    """The game's stored declaration cannot be read: it is damaged, or of another version of Sparring."""


class Outcome(StrEnum):
    STORED = "stored"
    DUPLICATE = "duplicate"  # this id is there already, with the same content
    CONFLICT = "conflict"  # this id is there already, with other content (but for `time`): refused
    ERASED = "erased"  # this player's of this id was there, and was erased or discarded: not again


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


class EpisodePage(msgspec.Struct, frozen=True):
    """Episodes, the newest first, and where older ones go on."""

    episodes: list[Episode]
    before: int | None  # none: there are no older ones


class PlayerStats(msgspec.Struct, frozen=True):
    player: str
    fragments: int
    steps: int
    last_seen: float  # the server's clock
    bot_steps: int = 0  # of these, by bots; the others are people's


class VersionStats(msgspec.Struct, frozen=True):
    model: str | None  # none: humans
    version: int | None
    fragments: int
    steps: int


class Quarantined(msgspec.Struct, frozen=True, array_like=True):
    """A fragment, or a record that nobody can read, in the quarantine or for it."""

    game: str
    player: str
    id: str
    reason: str
    time: float = 0.0  # the server's clock, when it was rejected; 0: not noted yet


class Stats(msgspec.Struct, frozen=True):
    fragments: int
    steps: int
    players: int
    bytes: int  # of the columns, as sent
    rejected: int  # fragments in quarantine since the beginning
    bot_steps: int = 0  # of the steps, by bots; the others are people's


class Store(Protocol):
    """Where recorded play is kept. `open_store` opens one by its address. Its methods are called from several threads;
    other processes may have it open, too.

    In its methods `game` is a game's name (for `register` its declaration), `player` a player's name, `reason` a
    sentence for people. `limit` is how many are given at most.
    """

    def register(self, game: Game) -> None:
        """Idempotent; InputError when the name is taken by a game with another schema, GameUnreadable when it is taken
        by one whose declaration cannot be read."""

    def games(self) -> list[Game]:
        """By name; but for those whose stored declarations cannot be read, which never stop another game."""

    def unreadable(self) -> dict[str, str]:
        """The games that `games` leaves out, and why, for people."""

    def registration(self, game: str) -> str:
        """A mark of this registration: another one once the game was deleted and declared again. "" for no game."""

    def profiles(self) -> dict[str, Profile]:
        """What people decided about each game of `games`."""

    def revise(self, game: str, change: Callable[[Revision], Revision]) -> Revision:
        """Changes a game's declaration or profile, but neither its name nor its spaces: InputError. `change` gets what
        is there, and may be asked several times when others change it, too. NotRegistered when there is none."""

    def pause(self, game: str, paused: bool) -> None:
        """Whether the game is to be trained: not while it is `paused`. Its play is stored either way. NotRegistered
        when there is none."""

    def paused(self) -> set[str]:
        """The games that are not to be trained."""

    def delete_game(self, name: str) -> None:
        """The registration of the game `name` first, so that nothing more of it is taken, then everything of it. No
        game, no error: it may have been begun before. The name can be declared again at once, with any spaces."""

    def deleted(self, name: str) -> bool:
        """Whether there was a game `name`, and it was deleted. Asked when there is none: old deletions are
        forgotten."""

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        """The `fragments` are on disk (fsync) when it returns. Raises StoreFull; then nothing of this call was kept.
        Raises FragmentRefused when one of them cannot be stored at all, NotRegistered when that is for want of its
        game."""

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        """`append` of `fragments` without waiting; concurrent calls share one transaction and one fsync (group commit).

        Never blocks and never raises for the fragments' sake: StoreFull, StoreBusy, NotRegistered and other
        InputErrors are the future's.
        """

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        """Notes a refused fragment by its `fragment_id`. Bounded: only the newest few thousand are kept, all are
        counted."""

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Quarantined]) -> None:
        """What was refused of a `source` that may be read again, such as a stream. `totals` are per game since its
        beginning. They replace lower ones that it reported before, so nothing counts twice. Each of `newest` is noted
        once."""

    def quarantined(self, game: str, limit: int = 100) -> list[Quarantined]:
        """What was rejected of a game, with times and reasons, the newest first. What was noted a moment ago may be on
        its way; a player who was erased is in none of them."""

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        """Fragments stored after the cursor `after`, oldest first; misses none, repeats none. `after=-1`: only what
        comes.

        Fewer than `limit` may come when they are large; none means that the reader has caught up.
        """

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        """All fragments there are, in pieces. For several readers: each `share` of 0..`of`-1 is another part, together
        they are all."""

    def sample(self, game: str, steps: int, rng: np.random.Generator) -> list[Fragment]:
        """Random fragments, drawn with `rng`, that together hold at least `steps`; all of them, each once, when there
        are no more.

        Each is drawn with replacement and with a chance in proportion to its steps: uniform over steps.
        """

    def erase(self, game: str, player: str) -> int:
        """Deletes all of a player's fragments for good; how many they were. Their ids are remembered (nothing else):
        an upload that is sent again is ERASED, and does not bring the play back."""

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        """Moves the stored fragments with these `ids` into the quarantine, which names their players: how many. Their
        ids are remembered as those of erased ones are, and an episode that lacks one of its fragments is not complete
        any more."""

    def erasure(self, game: str) -> str:
        """A mark that changes whenever something of the game was erased or discarded; "" when nothing ever was. Who
        keeps play in memory drops it and reads it again when the mark is another one."""

    def stats(self, game: str) -> Stats:
        """How much there is of a game."""

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        """The most recently seen first."""

    def versions(self, game: str) -> list[VersionStats]:
        """How much each version of a model played, and how much humans did."""

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        """Finished, complete episodes whose last fragment to arrive was stored after the cursor `after`, oldest
        first."""

    def newest_episodes(self, game: str, before: int | None = None, limit: int = 100) -> EpisodePage:
        """Finished, complete episodes with cursors below `before`, the newest first. A page may be shorter than `limit`
        although there are older ones: a store looks at a bounded part of what it has for each."""

    def episode(
        self, game: str, cursor: int, first: int = 0, last: int | None = None
    ) -> tuple[Episode, list[Fragment]] | None:
        """The complete episode with this `cursor`, and those of its fragments that hold steps from `first` to before
        `last`, in their order. None when there is no such episode, or it arrived in too many pieces to be found."""

    def close(self) -> None:
        """Ends what waits to be written, then lets go of the store."""
