"""What the durable stores do alike, whatever they are made of. They write by a writer, which a store that is open for
reading only does not have. They keep the games' declarations as text."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import Refusal, Submission, failed, refusal
from sparring.store.declarations import Declarations
from sparring.store.profile import Profile
from sparring.store.protocol import Outcome, Quarantined, StoreBusy

__all__ = ["DurableStore"]


class Writer(Protocol):
    def submit(self, submission: Submission) -> "Future[list[Outcome]]": ...
    def refuse(self, refusal: Refusal) -> None: ...
    def note_from(self, source: str, totals: Mapping[str, int], refusals: Sequence[Refusal]) -> None: ...


W = TypeVar("W", bound=Writer)


class DurableStore(Generic[W]):
    """`where` is what messages call the store; no writer: it is open for reading only."""

    def __init__(self, where: object, writer: W | None) -> None:
        self._where, self._writer = where, writer
        self._declarations = Declarations(where)

    def _specs(self) -> Sequence[tuple[str, str]]:
        """Names and declarations of all games, by name."""
        raise NotImplementedError

    def games(self) -> list[Game]:
        return self._declarations.read(self._specs())[0]

    def unreadable(self) -> dict[str, str]:
        return self._declarations.read(self._specs())[1]

    def profiles(self) -> dict[str, Profile]:
        return self._declarations.profiles(self._specs())

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        try:
            return self._writing().submit(Submission(fragments))
        except (InputError, StoreBusy) as error:
            return failed(error)

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        self._writing().refuse(refusal(game, player, fragment_id, reason))

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Quarantined]) -> None:
        self._writing().note_from(source, totals, [refusal(r.game, r.player, r.id, r.reason) for r in newest])

    def _writing(self) -> W:
        if self._writer is None:
            raise SparringError(f"the store {self._where} is open for reading only")
        return self._writer
