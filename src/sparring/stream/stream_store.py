"""A store behind a stream: what is appended goes onto the stream, and `sparring ingest` brings it into the store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.arrival import failed
from sparring.store.profile import Profile, Revision
from sparring.store.protocol import (
    Episode,
    EpisodePage,
    NotRegistered,
    Outcome,
    PlayerStats,
    Quarantined,
    Stats,
    Store,
    Tail,
    VersionStats,
)
from sparring.stream.producer import Producer

__all__ = ["StreamedStore"]


class StreamedStore:
    """Outcomes are always STORED: what is a duplicate shows at the other end. Everything else is the store's."""

    def __init__(self, store: Store, producer: Producer) -> None:
        self.producer = producer
        self._store = store
        self._games: dict[str, Game] = {}  # those that a gateway asked for: it does, before it submits

    def submit(self, fragments: Sequence[Fragment]) -> "Future[list[Outcome]]":
        game = self._games.get(fragments[0].game)
        if game is not None and all([f.game == game.name for f in fragments]):
            return self.producer.submit(game, fragments)
        return failed(NotRegistered(f"{fragments[0].game!r} is not registered, or not the game of all of them"))

    def append(self, fragments: Sequence[Fragment]) -> list[Outcome]:
        return self.submit(fragments).result()

    def register(self, game: Game) -> None:
        self._store.register(game)

    def games(self) -> list[Game]:
        games = self._store.games()
        self._games = {game.name: game for game in games}
        return games

    def unreadable(self) -> dict[str, str]:
        return self._store.unreadable()

    def registration(self, game: str) -> str:
        return self._store.registration(game)

    def profiles(self) -> dict[str, Profile]:
        return self._store.profiles()

    def revise(self, game: str, change: Callable[[Revision], Revision]) -> Revision:
        return self._store.revise(game, change)

    def pause(self, game: str, paused: bool) -> None:
        self._store.pause(game, paused)

    def paused(self) -> set[str]:
        return self._store.paused()

    def delete_game(self, name: str) -> None:
        """What is still on the stream declares the game again when it arrives."""
        self._games.pop(name, None)
        self._store.delete_game(name)

    def deleted(self, name: str) -> bool:
        return self._store.deleted(name)

    def quarantine(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        self._store.quarantine(game, player, fragment_id, reason)

    def quarantine_from(self, source: str, totals: Mapping[str, int], newest: Sequence[Quarantined]) -> None:
        self._store.quarantine_from(source, totals, newest)

    def quarantined(self, game: str, limit: int = 100) -> list[Quarantined]:
        return self._store.quarantined(game, limit)

    def tail(self, game: str, after: int = 0, limit: int = 1000) -> Tail:
        return self._store.tail(game, after, limit)

    def scan(self, game: str, share: int = 0, of: int = 1) -> Iterator[list[Fragment]]:
        return self._store.scan(game, share, of)

    def sample(self, game: str, steps: int, rng: np.random.Generator) -> list[Fragment]:
        return self._store.sample(game, steps, rng)

    def erase(self, game: str, player: str) -> int:
        return self._store.erase(game, player)

    def discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        return self._store.discard(game, ids, reason)

    def erasure(self, game: str) -> str:
        return self._store.erasure(game)

    def stats(self, game: str) -> Stats:
        return self._store.stats(game)

    def players(self, game: str, limit: int = 100) -> list[PlayerStats]:
        return self._store.players(game, limit)

    def versions(self, game: str) -> list[VersionStats]:
        return self._store.versions(game)

    def episodes(self, game: str, after: int = 0, limit: int = 1000) -> list[Episode]:
        return self._store.episodes(game, after, limit)

    def newest_episodes(self, game: str, before: int | None = None, limit: int = 100) -> EpisodePage:
        return self._store.newest_episodes(game, before, limit)

    def episode(
        self, game: str, cursor: int, first: int = 0, last: int | None = None
    ) -> tuple[Episode, list[Fragment]] | None:
        return self._store.episode(game, cursor, first, last)

    def close(self) -> None:
        self.producer.close()
        self._store.close()
