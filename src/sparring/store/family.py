"""Which game is meant: by its name or a further one, and by the schema where a game has several generations."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sparring.experience import Fragment
from sparring.games import Game
from sparring.store.profile import Profile

__all__ = ["Family"]


class Family:
    """All games of a store as they are at one moment, by all their names."""

    def __init__(self, games: Iterable[Game], profiles: Mapping[str, Profile]) -> None:
        self._games = {game.name: game for game in games}
        self._profiles = profiles
        further = {name: game for game, profile in profiles.items() for name in profile.names if game in self._games}
        self._names = further | {name: name for name in self._games}  # a game's own name comes first
        self._generations: dict[str, list[Game]] = {}  # by the first one's name, oldest first
        for game in sorted(self._games.values(), key=lambda game: self.generation(game.name)):
            self._generations.setdefault(self.first(game.name), []).append(game)

    @property
    def games(self) -> Iterable[Game]:
        return self._games.values()

    def find(self, name: str, schema: str | None = None) -> Game | None:
        """The game of that name, or the newest generation of it with that schema."""
        name = self._names.get(name, name)
        game = self._games.get(name)
        if schema is None or (game is not None and game.schema == schema):
            return game
        fitting = [one for one in self.generations(name) if one.schema == schema]
        return fitting[-1] if fitting else None

    def generations(self, name: str) -> Sequence[Game]:
        """Of a game, oldest first; those that were deleted are not among them."""
        name = self._names.get(name, name)
        return self._generations.get(self.first(name), [])

    def generation(self, name: str) -> int:
        """Its number: 1 unless it continues another one."""
        origin = self._profiles.get(name, Profile()).origin
        return 1 if origin is None else origin.generation

    def first(self, name: str) -> str:
        """The name of the generation that all began with."""
        seen = {name}
        while (origin := self._profiles.get(name, Profile()).origin) is not None and origin.game not in seen:
            name = origin.game
            seen.add(name)
        return name

    def title(self, name: str) -> str:
        """What a game is called now: its last further name, if it has one."""
        names = self._profiles.get(name, Profile()).names
        return names[-1] if names else name

    def names(self, name: str) -> list[str]:
        """All by which a game is found, its first one first. What another game is called leads to that one."""
        further = self._profiles.get(name, Profile()).names
        return [name, *(one for one in further if one != name and self._names.get(one) == name)]

    def adopt(self, game: Game, fragments: Sequence[Fragment]) -> tuple[Game, list[Fragment]]:
        """Fragments that were sent to `game`: the generation that their schema means, and those of them that are of it
        under that name. What fits nothing stays as it is, for the check to say so."""
        found = self.find(game.name, fragments[0].schema) if fragments else None
        target = game if found is None else found
        if target.name == game.name and all([f.game == game.name for f in fragments]):
            return target, list(fragments)
        names = {one.name for one in self.generations(target.name)}

        def meant(f: Fragment) -> bool:
            return f.schema == target.schema and self._names.get(f.game, f.game) in names

        return target, [msgspec.structs.replace(f, game=target.name) if meant(f) else f for f in fragments]
