"""What every store does with fragments that arrive: refuses what was never checked, sums rewards, and tells when an
episode is complete. One rule for all stores, so that they cannot disagree."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Protocol

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.protocol import FragmentRefused, Outcome

__all__ = [
    "Refusal",
    "Submission",
    "Unfinished",
    "decode",
    "failed",
    "refusal",
    "require_checked",
    "require_same",
    "returns",
    "same",
    "stripe",
    "stripes",
]

REWARD = np.dtype("<f4")
Refusal = tuple[float, str, str, str, str]  # time, game, player, fragment's id, reason
encoder = msgspec.msgpack.Encoder()
decode = msgspec.msgpack.Decoder(Fragment).decode


class Submission:
    """Fragments that arrive together, with what is made of them on their caller's thread."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        require_checked(fragments)
        self.fragments = fragments
        self.games = {(f.game, f.schema) for f in fragments}
        self.bodies = _encode(fragments)
        self.returns = returns(fragments)
        self.sizes = [len(f.obs) + len(f.action) + len(f.reward) + len(f.log_prob or b"") for f in fragments]
        self.size = sum(self.sizes)


def failed(error: Exception) -> "Future[list[Outcome]]":
    """The answer to a submission that was not taken."""
    future: Future[list[Outcome]] = Future()
    future.set_exception(error)
    return future


def refusal(game: str, player: str, fragment_id: str, reason: str) -> Refusal:
    """A note for the quarantine: whoever sent it may have sent names of any length, none, or what no database takes."""
    texts = [text.encode(errors="replace").decode() for text in (game[:200] or "?", player[:200], fragment_id[:200])]
    return time.time(), texts[0], texts[1], texts[2], reason[:1000].encode(errors="replace").decode()


def _encode(fragments: Sequence[Fragment]) -> list[memoryview]:
    """Into one buffer: of many middling ones the C library returns the memory to the system each time, and page faults
    then cost ten times what encoding does."""
    buffer, ends = bytearray(), [0]
    try:
        for f in fragments:
            encoder.encode_into(f, buffer, -1)
            ends.append(len(buffer))
    except (UnicodeEncodeError, OverflowError) as error:
        raise FragmentRefused(f"a fragment cannot be written down: {error}") from error
    view = memoryview(buffer)
    return [view[first:last] for first, last in pairwise(ends)]


class Played(Protocol):
    """A fragment, or what a store keeps of one to count with."""

    @property
    def steps(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    @property
    def model(self) -> str | None: ...
    @property
    def version(self) -> int | None: ...


class Unfinished(msgspec.Struct):
    """What is stored of an episode that is not complete yet.

    It is complete once a fragment that ends it is there and the stored steps add up to that fragment's last step.
    Fragments may arrive in any order, and the one that arrives last completes it. So an episode's cursor is that of its
    latest arrival, and a reader that moves its cursor on misses no episode, however late an early fragment comes. A
    player who uses an episode's name again after it was complete starts another episode.
    """

    steps: int = 0
    ret: float = 0.0
    length: int | None = None  # known from the fragment that ends the episode …
    model: str | None = None  # … and so is who played it
    version: int | None = None

    def add(self, fragment: "Played", ret: float) -> bool:
        """Whether the episode is complete now."""
        self.steps += fragment.steps
        self.ret += ret
        if fragment.ended:
            self.length = fragment.start + fragment.steps
            self.model, self.version = fragment.model, fragment.version
        return self.steps == self.length


def returns(fragments: Sequence[Fragment]) -> list[float]:
    """The sum of rewards of each; of all at once, because NumPy costs more per call than per number here."""
    if not fragments:
        return []
    rewards = np.frombuffer(b"".join([f.reward for f in fragments]), REWARD)
    steps = fragments[0].steps
    if all([f.steps == steps for f in fragments]):  # as most are: fragments are cut at a fixed length
        equal: list[float] = rewards.reshape(-1, steps).sum(1, dtype=np.float64).tolist()
        return equal
    starts = list(accumulate([f.steps for f in fragments[:-1]], initial=0))
    sums: list[float] = np.add.reduceat(rewards, starts, dtype=np.float64).tolist()
    return sums


def require_checked(fragments: Sequence[Fragment]) -> None:
    """The least that a store relies on; doors run `validate.check`, which asks for more."""
    for f in fragments:
        if f.steps < 1 or len(f.reward) != 4 * f.steps:
            raise InputError(
                f"fragment {f.id!r} has {f.steps} steps and {len(f.reward)} bytes of reward: "
                f"a store takes only fragments that passed experience.validate.check"
            )


def same(stored: Fragment, sent: Fragment) -> bool:
    """Whether a fragment that comes again is the stored one. `time` does not count: of JSON without one the server's
    clock filled it in, another one each time."""
    return stored == sent or msgspec.structs.replace(stored, time=sent.time) == sent


def require_same(known: Game, game: Game) -> None:
    if known.schema != game.schema:
        raise InputError(
            f"the game {game.name!r} is registered with schema {known.schema}, yours has {game.schema}: "
            f"its spaces differ; use another name, or the spaces it was registered with"
        )


STRIPE = 1 << 16  # steps


def stripe(place: int) -> int:
    """The number of the one that holds this place."""
    return (place - 1) // STRIPE


def stripes(begin: int, end: int, share: int, of: int, salt: int = 0) -> Iterator[tuple[int, int]]:
    """One reader's stretches of the places after `begin` up to `end`. They are cut at fixed places, so readers agree on
    them although more is stored between their looks at the end."""
    if not 0 <= share < of:
        raise InputError(f"there is no share {share} of {of}: they are counted from 0")
    for number in range(begin // STRIPE, -(-end // STRIPE)):
        if (number + salt) % of == share:
            yield max(begin, number * STRIPE), min(end, (number + 1) * STRIPE)
