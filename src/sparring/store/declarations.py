"""The games' declarations: how much room they may take, at every door, and how those of a store are read. One that this
version cannot read never stops another game: it is left out, logged once, and whoever asks for that game hears why."""

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

from sparring.errors import InputError
from sparring.games import Game
from sparring.store.profile import Profile, Revision, read_profile, write_declaration
from sparring.store.protocol import GameUnreadable

__all__ = [
    "ADVICE",
    "MAX_DECLARATION",
    "DeclarationTooLarge",
    "Declarations",
    "NoRoom",
    "Room",
    "read_declaration",
    "revised",
]

log = logging.getLogger(__name__)

# Of declarations. One takes twenty times its bytes in memory, and 70 µs a KiB each time that the games are read.
MAX_DECLARATION = 64 << 10  # bytes, without spaces and line breaks
MAX_STORED = 8 * MAX_DECLARATION  # with spaces, line breaks and its profile
MAX_GAMES = 1000
MAX_DECLARATIONS = 4 << 20  # bytes of all of them
ADVICE = "give one bound for all elements instead of a list of them, and fewer fields"


class DeclarationTooLarge(InputError):
    """This one, wherever it is sent."""


class NoRoom(InputError):
    """The platform has as many games, or bytes of declarations, as it takes."""


class Room:
    """What the games that are there leave for another one. `unreadable`: how many there are besides them."""

    def __init__(self, games: Iterable[Game], unreadable: int = 0) -> None:
        sizes = [_size(game) for game in games]
        self._games, self._bytes = len(sizes) + unreadable, sum(sizes)

    def require(self, game: Game) -> None:
        """Raises DeclarationTooLarge or NoRoom."""
        size, full = _size(game), ""
        if size > MAX_DECLARATION:
            raise DeclarationTooLarge(
                f"the declaration has {size} bytes, at most {MAX_DECLARATION} are allowed: {ADVICE}"
            )
        if self._games >= MAX_GAMES:
            full = f"this platform has {self._games} games, and takes no more"
        elif size + self._bytes > MAX_DECLARATIONS:
            full = (
                f"the games' declarations would take {size + self._bytes} bytes, at most {MAX_DECLARATIONS} are allowed"
            )
        if full:
            raise NoRoom(f"{full}: delete games that nobody plays (`sparring delete GAME`), or run another platform")


def _size(game: Game) -> int:
    return len(msgspec.json.encode(game))


def read_declaration(name: str, stored: str | bytes) -> Game:
    """Raises GameUnreadable."""
    try:
        return Game.from_json(stored)
    except InputError as error:
        raise GameUnreadable(
            f"the game {name!r} cannot be used: its stored declaration cannot be read ({error}). Use the version of "
            f"Sparring that registered it, or delete the game (`sparring delete {name}`)"
        ) from error


def revised(name: str, stored: str | bytes, change: Callable[[Revision], Revision]) -> tuple[Revision, bytes]:
    """What a stored declaration becomes, and its text. Raises InputError, GameUnreadable."""
    known = Revision(read_declaration(name, stored), read_profile(name, stored))
    new = change(known)
    if (new.game.name, new.game.schema) != (known.game.name, known.game.schema):
        raise InputError(f"the game {name!r} keeps its name and its spaces: a new generation has others")
    text = write_declaration(new)
    if len(text) > MAX_STORED:
        raise InputError(f"the declaration and settings of {name!r} would take {len(text)} bytes: say less")
    return new, text


class Declarations:
    """Those of one store, which is called `where` in messages. What did not change since the last look is not parsed
    again: the games are listed every second."""

    def __init__(self, where: object) -> None:
        self._where = where
        self._lock = threading.Lock()  # guards the rest
        self._known: dict[str, tuple[str | bytes, Game | GameUnreadable, Profile]] = {}

    def read(self, stored: Iterable[tuple[str, str | bytes]]) -> tuple[list[Game], dict[str, str]]:
        """From all names and declarations of a store: the games in the same order, and why each of the others is not
        among them."""
        with self._lock:
            before, self._known = self._known, {}
            for name, text in stored:
                found = before.get(name)
                if found is None or found[0] != text:
                    game = self._parse(name, text)
                    profile = read_profile(name, text) if isinstance(game, Game) else Profile()
                    found = text, game, profile
                self._known[name] = found
            results = {name: result for name, (_, result, _) in self._known.items()}
        games = [result for result in results.values() if isinstance(result, Game)]
        return games, {name: str(why) for name, why in results.items() if isinstance(why, GameUnreadable)}

    def profiles(self, stored: Iterable[tuple[str, str | bytes]]) -> dict[str, Profile]:
        """Of the games that `read` gives."""
        games, _ = self.read(stored)
        with self._lock:
            return {game.name: self._known[game.name][2] for game in games if game.name in self._known}

    def _parse(self, name: str, text: str | bytes) -> Game | GameUnreadable:
        try:
            return read_declaration(name, text)
        except GameUnreadable as error:
            log.error("the store %s: %s. Other games go on", self._where, error)
            return error
