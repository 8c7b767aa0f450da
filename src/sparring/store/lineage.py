"""A game's play for who learns from it: first that of the generation which it continues, mapped, up to the change; then
its own. One cursor runs over both."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from sparring.experience import Fragment
from sparring.experience.change import Change, Unmapped
from sparring.games import Game
from sparring.store.family import Family
from sparring.store.profile import Origin, Profile
from sparring.store.protocol import Store

__all__ = ["Lineage", "LineagePage"]


class LineagePage(msgspec.Struct, frozen=True):
    """Like a store's `Tail`; when nothing is left the cursor is the one that was asked with."""

    fragments: list[Fragment]
    cursor: int
    left_out: dict[str, int] = {}  # steps that could not be mapped, by why
    count: int = 0  # fragments that the store gave, those left out among them


class Lineage:
    """:param family, profiles: of all games; without any, the game continues no other."""

    def __init__(
        self, store: Store, game: Game, family: Family | None = None, profiles: Mapping[str, Profile] = {}
    ) -> None:
        self._store, self.game = store, game
        origin = profiles.get(game.name, Profile()).origin
        self.until = 0 if origin is None else origin.until  # cursors up to there are the older play's
        self._origin, self._before = origin, None if origin is None else self._older(origin, family, profiles)

    def _older(self, origin: Origin, family: Family | None, profiles: Mapping[str, Profile]) -> "Lineage | None":
        parent = None if family is None else family.find(origin.game)
        if parent is None:
            return None
        self.change = Change(parent, self.game, origin.defaults)
        return None if self.change.problem is not None else Lineage(self._store, parent, family, profiles)

    @property
    def before(self) -> "Lineage | None":
        """None: it continues none, or one that was deleted. Looked at each time: another game may get the name."""
        older, origin = self._before, self._origin
        if older and origin and self._store.registration(older.game.name) != origin.registration:
            self._before = None
        return self._before

    @property
    def names(self) -> list[str]:
        """Of the games whose play it is."""
        before = self.before
        return [self.game.name, *([] if before is None else before.names)]

    def tail(self, after: int, limit: int) -> LineagePage:
        """The next fragments after the cursor."""
        if after < self.until:
            before = self.before
            page = None if before is None else self._mapped(before, after, limit)
            if page is not None:
                return page
            after = self.until
        tail = self._store.tail(self.game.name, after - self.until, limit)
        cursor = tail.cursor if tail.fragments else after - self.until
        return LineagePage(tail.fragments, cursor + self.until, count=len(tail.fragments))

    def _mapped(self, before: "Lineage", after: int, limit: int) -> LineagePage | None:
        """Of the older play; none when there is no more of it."""
        page = before.tail(after, limit)
        while page.cursor > self.until and len(page.fragments) > 1:  # which of them came later it does not say
            page = before.tail(after, len(page.fragments) // 2)
        if page.cursor > self.until or page.cursor == after:
            return None
        mapped, left_out = [], Counter(page.left_out)
        for f in page.fragments:
            try:
                mapped.append(self.change.fragment(f))
            except Unmapped as error:
                left_out[f"older play: {error}"] += f.steps
        return LineagePage(mapped, page.cursor, dict(left_out), page.count)

    def end(self) -> int:
        """The cursor after all there is."""
        return self._store.tail(self.game.name, -1).cursor + self.until

    def count(self) -> int:
        """How many fragments there are; of the older play, how many there were at the change."""
        earlier = 0 if self.before is None or self._origin is None else self._origin.fragments
        return self._store.stats(self.game.name).fragments + earlier

    def erasure(self) -> str:
        """See `Store.erasure`; of all whose play it is. Another one, too, when one of them was deleted."""
        marks = [self._store.erasure(name) for name in self.names]
        return marks[0] if len(marks) == 1 else " ".join(marks)
