"""The seam between a client and whatever takes its play: `Transport`. Ours are HTTP and Kinesis; yours is a subclass,
passed as `Client(…, transport=Mine())` or named in the address, `my_module:Mine://…`.

Whatever happens on the way is one of three things:
- an answer;
- `Refused`: whoever was asked understood and said no. That is final;
- `Unavailable`: anything else. The client keeps what it has and tries again later.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from sparring.api import Act, ActionsInfo, Problem, Uploaded
from sparring.errors import InputError, SparringError
from sparring.experience import wire
from sparring.experience.fragment import Fragment
from sparring.games import Game
from sparring.registry.ab import AbTests
from sparring.registry.manifest import Manifest, Serving

__all__ = ["ModelSource", "Refused", "SchemaMismatch", "Transport", "Unavailable", "UnknownGame", "Upload"]
__all__ += ["UploadTooLarge"]

MAX_DECODED = 1 << 30  # of an upload of our own


class Unavailable(SparringError):
    """No usable answer from the server. What was asked may be asked again.

    :param message: What happened, for people.
    :param retry_after: Seconds to wait before the next try. None: the server did not say.
    :param status: The HTTP status. None: there was no answer.
    """

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class UploadTooLarge(Unavailable):
    """The upload is larger than something on the way takes. The client divides it and sends the halves."""


class Refused(InputError):
    """The server said no, and would again.

    :param problem: What it said, as in RFC 9457.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem
        self.status = problem.status


class UnknownGame(Refused):
    """The server does not know the game. A client that brought its declaration registers it again."""


class SchemaMismatch(InputError):
    """The server knows this game with other spaces than the client."""


class Upload:
    """Fragments that travel together. Each is encoded once, when it is added; what a wire makes of them, a body or
    records, is put together from those bytes."""

    def __init__(self) -> None:
        self._fragments: list[Fragment] = []
        self._encoded: list[bytes] = []
        self._body: bytes | None = None  # as it was on disk, or as it was made
        self._unread = False  # there is only the body

    @classmethod
    def of(cls, fragments: Iterable[Fragment]) -> "Upload":
        upload = cls()
        for fragment in fragments:
            upload.add(fragment)
        return upload

    @classmethod
    def from_body(cls, body: bytes) -> "Upload":
        """As `body` gave it, perhaps on a disk in the meantime."""
        upload = cls()
        upload._body, upload._unread = body, True
        return upload

    def add(self, fragment: Fragment) -> None:
        """Raises whatever a fragment that is not one raises.

        :param fragment: The next one.
        """
        self._encoded.append(wire.encode_one(fragment))
        self._fragments.append(fragment)
        self._body = None

    @property
    def fragments(self) -> Sequence[Fragment]:
        """Raises Refused when they come from a disk, and are damaged."""
        self._read()
        return self._fragments

    @property
    def encoded(self) -> Sequence[bytes]:
        """Each fragment as MessagePack. Raises as `fragments`."""
        self._read()
        return self._encoded

    @property
    def body(self) -> bytes:
        """A MessagePack list of them, gzipped: what the gateway takes and the spool keeps."""
        if self._body is None:
            self._body = wire.compress(wire.array(self._encoded))
        return self._body

    def halves(self) -> "tuple[Upload, Upload]":
        """Raises as `fragments`."""
        middle = len(self.fragments) // 2
        first, second = Upload(), Upload()
        first._fragments, second._fragments = self._fragments[:middle], self._fragments[middle:]
        first._encoded, second._encoded = self._encoded[:middle], self._encoded[middle:]
        return first, second

    def _read(self) -> None:
        if not self._unread:
            return
        assert self._body is not None
        try:
            plain = wire.decompress(self._body, "gzip", MAX_DECODED)
            self._fragments, self._encoded = wire.decode(plain), wire.split(plain)
        except InputError as error:  # as a gateway would say it
            raise Refused(Problem("Unprocessable Content", 422, str(error))) from error
        self._unread = False


class ModelSource(Protocol):
    """Where published versions are read. Raises Unavailable (try later) or InputError (final), nothing else."""

    def latest(self, game: str, model: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        """The newest version and a tag to ask with next time; none: nothing new since `etag`, or nothing at all."""

    def serving(self, game: str, model: str, etag: str | None) -> tuple[Serving, str | None] | None:
        """What players get, and a tag as for `latest`; none: nothing new since `etag`."""

    def alias(self, game: str, model: str, alias: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        """The version that an alias names; none: nothing new since `etag`. InputError: there is no such alias."""

    def ab(self, game: str, etag: str | None) -> tuple[AbTests, str | None] | None:
        """The game's A/B tests, and a tag as for `latest`; none: nothing new since `etag`."""

    def manifest(self, game: str, model: str, version: int) -> Manifest:
        """Of a certain version."""

    def file(self, manifest: Manifest, name: str, limit: int) -> bytes:
        """A version's file, of `limit` bytes at most."""

    def close(self) -> None: ...


class Transport(ABC):
    """How play leaves a game. `register` and `upload` are all that a transport must have; one that leads to a server
    also answers questions. Methods are called from several threads.

    :ivar address: shown and logged, so without passwords; unsent play is kept apart by it.
    :ivar timeout: seconds for a call whose caller does not say.
    """

    address: str
    timeout: float = 10.0

    @abstractmethod
    def register(self, game: Game, timeout: float | None = None) -> Game:
        """Makes the game known; the server's own idea of it comes back.

        :param game: The declaration.
        :param timeout: Seconds. None: the usual.
        :raises SchemaMismatch: it is known with other spaces.
        """

    @abstractmethod
    def upload(self, game: Game, upload: Upload, timeout: float | None = None) -> Uploaded:
        """Returns when each fragment is stored for good or refused.

        :param game: The game.
        :param upload: The fragments.
        :param timeout: Seconds. None: the usual.
        :raises UnknownGame: the game was never registered, or is forgotten.
        :raises UploadTooLarge: half of it may go through.
        """

    def ping(self, game: Game, timeout: float | None = None) -> None:  # noqa: B027  # may stay empty
        """Raises Unavailable while the other side is known to be away; asked when there is nothing to send.

        :param game: The game that is played.
        :param timeout: Seconds. None: the usual.
        """

    def game(self, name: str) -> Game:
        """A game that the server knows.

        :param name: The game's name.
        :raises UnknownGame: it does not.
        """
        raise self._takes_play_only()

    def act(self, game: Game, ask: Act) -> ActionsInfo:
        """The server's choice of actions.

        :param game: The game.
        :param ask: The observations, and which version shall choose.
        """
        raise self._takes_play_only()

    def models(self) -> ModelSource:
        """Where this server's bots are read."""
        return _NoModels(self._takes_play_only())

    def close(self) -> None:  # noqa: B027  # may stay empty
        """Nothing is asked any more. Does not wait."""

    def _takes_play_only(self) -> Refused:
        detail = f"{self.address} only takes play: pass models='http://…', the address of a gateway, for the rest"
        return Refused(Problem("Not Implemented", 501, detail))


class _NoModels:
    def __init__(self, why: Refused) -> None:
        self._why = why

    def latest(self, game: str, model: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        raise self._why

    def serving(self, game: str, model: str, etag: str | None) -> tuple[Serving, str | None] | None:
        raise self._why

    def alias(self, game: str, model: str, alias: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        raise self._why

    def ab(self, game: str, etag: str | None) -> tuple[AbTests, str | None] | None:
        raise self._why

    def manifest(self, game: str, model: str, version: int) -> Manifest:
        raise self._why

    def file(self, manifest: Manifest, name: str, limit: int) -> bytes:
        raise self._why

    def close(self) -> None:
        pass
