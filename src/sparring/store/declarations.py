"""The games' stored declarations. One that this version cannot read never stops another game: it is left out, told
once, and whoever asks for that game is told why."""

import logging
import threading
from collections.abc import Iterable

from sparring.errors import InputError
from sparring.games import Game
from sparring.store.protocol import GameUnreadable

__all__ = ["Declarations", "read_declaration"]

log = logging.getLogger(__name__)


def read_declaration(name: str, stored: str | bytes) -> Game:
    """Raises GameUnreadable."""
    try:
        return Game.from_json(stored)
    except InputError as error:
        raise GameUnreadable(
            f"the game {name!r} cannot be used: its stored declaration cannot be read ({error}). Use the version of "
            f"Sparring that registered it, or delete the game (`sparring delete {name}`)"
        ) from error


class Declarations:
    """Those of one store, which is called `where` in messages. What did not change since the last look is not parsed
    again: the games are listed every second."""

    def __init__(self, where: object) -> None:
        self._where = where
        self._lock = threading.Lock()  # guards the rest
        self._known: dict[str, tuple[str | bytes, Game | GameUnreadable]] = {}

    def read(self, stored: Iterable[tuple[str, str | bytes]]) -> tuple[list[Game], dict[str, str]]:
        """From all names and declarations of a store: the games in the same order, and why each of the others is not
        among them."""
        with self._lock:
            before, self._known = self._known, {}
            for name, text in stored:
                found = before.get(name)
                if found is None or found[0] != text:
                    found = text, self._parse(name, text)
                self._known[name] = found
            results = {name: result for name, (_, result) in self._known.items()}
        games = [result for result in results.values() if isinstance(result, Game)]
        return games, {name: str(why) for name, why in results.items() if isinstance(why, GameUnreadable)}

    def _parse(self, name: str, text: str | bytes) -> Game | GameUnreadable:
        try:
            return read_declaration(name, text)
        except GameUnreadable as error:
            log.error("the store %s: %s. Other games go on", self._where, error)
            return error
