"""What is known of the version that players have and of the one that is tried: returns of episodes in play. It outlives
a restart, in the trainer's checkpoint."""

import math
import time
from collections import Counter
from collections.abc import Set

import msgspec

from sparring.registry.manifest import DEFAULT_MODEL, RANDOM
from sparring.store.protocol import Episode, Store
from sparring.trainer.control import Control
from sparring.trainer.sequential import unpaired

__all__ = ["YOUNG", "EpisodeReturns", "Memory", "decisive", "name_of"]

PAGE, PAGES = 1000, 10  # episodes that are read at once, and so often in one look: then the other games have their turn
YOUNG = 500, 3600.0  # episodes of bots and seconds until which a game is young: bad bots, quick learning
REFERENCE = 30  # episodes in play that say how good a version is, where its promotion does not
BLOCK = 200  # episodes that are compared with these at once: after many good ones a collapse would take long to show
MANY = 2000  # returns of `stable` that are remembered beside a candidate's
SEVERAL = 3  # players from whom on none of them decides alone; …
BUSY, HARDLY = 20, 0.5  # … the busiest of them are left out in turn; by this part of what is clear others must agree


class EpisodeReturns(msgspec.Struct):
    """Of finished episodes, with who played them."""

    values: list[float] = []
    players: list[str] = []

    def note(self, player: str, ret: float, most: int) -> None:
        self.values, self.players = [*self.values[1 - most :], ret], [*self.players[1 - most :], player]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def newest(self, most: int) -> "EpisodeReturns":
        return EpisodeReturns(self.values[-most:], self.players[-most:])

    def and_then(self, later: "EpisodeReturns") -> "EpisodeReturns":
        return EpisodeReturns([*self.values, *later.values], [*self.players, *later.players])

    def of(self, players: Set[str]) -> "EpisodeReturns":
        kept = [(ret, who) for ret, who in zip(self.values, self.players, strict=True) if who in players]
        return EpisodeReturns([ret for ret, _ in kept], [who for _, who in kept])

    def without(self, player: str) -> list[float]:
        return [ret for ret, who in zip(self.values, self.players, strict=True) if who != player]


def decisive(above: EpisodeReturns, below: EpisodeReturns, alpha: float) -> str | None:
    """The player without whose episodes the one would hardly be above the other; none where there are too few to tell.
    Somebody who plays day and night, or whose client lies, must not decide for all."""
    counts = Counter([*above.players, *below.players])
    for player, _ in counts.most_common(BUSY) if len(counts) >= SEVERAL else ():
        interval = unpaired(above.without(player), below.without(player), alpha)
        if interval.difference <= HARDLY * (interval.difference - interval.low):
            return player
    return None


class Memory(msgspec.Struct):
    stable: int | None = None  # as we know it; none: bots play at random
    bot_steps: int = 0  # that bots had played when it became that …
    learned: int = 0  # … and the steps that it had learned from
    cursor: int = 0  # episodes up to there were looked at
    bots: int = 0  # episodes that bots finished, up to those of `YOUNG`
    began: float = 0.0  # when the first of them was seen
    candidate: int | None = None  # that is tried in play, …
    candidate_learned: int = 0  # … the steps that it had learned from, …
    canary: float | None = None  # … the setting that its share follows from, …
    new: EpisodeReturns = msgspec.field(default_factory=EpisodeReturns)  # its returns …
    old: EpisodeReturns = msgspec.field(default_factory=EpisodeReturns)  # … and those of `stable` meanwhile
    players: list[str] = []  # whose first episode of `stable` meanwhile was left out: it may have begun before
    reference: EpisodeReturns = msgspec.field(default_factory=EpisodeReturns)  # of `stable`, when promoted
    recent: EpisodeReturns = msgspec.field(default_factory=EpisodeReturns)  # and now
    collapsed: int | None = None  # `stable` was rolled back from it, and it is tried again beside the one before
    grown: bool = False  # never young: a person chose what players get, or an older generation did
    rolled_back: bool = False  # to this `stable`: not again
    control: Control = msgspec.field(default_factory=Control)
    witness: dict[str, float] = {}  # what recorded play says of the candidate
    wait: float = 0.0  # seconds between candidates
    decision: str = ""
    older: bool = False  # it was written before there were candidates: what is there is ours

    def read(self, store: Store, game: str) -> bool:
        """Episodes that were finished since; whether there may be more."""
        for _ in range(PAGES):
            page = store.episodes(game, self.cursor, PAGE)
            for episode in page:
                self.note(episode, time.time())
            if len(page) < PAGE:
                return False
        return True

    def note(self, episode: Episode, now: float) -> None:
        """A finished episode, whoever played it."""
        self.cursor = max(self.cursor, episode.cursor)
        if episode.model is None:
            self.control.note(episode.player, episode.ret)  # people's: their returns are not the bot's
        at = _bot(episode)
        if at is None:
            return
        self.bots, self.began = min(self.bots + 1, YOUNG[0]), self.began or now
        if at == self.candidate:
            self.new.note(episode.player, episode.ret, MANY)
        elif at == (self.stable or 0) and not self.control.changed:  # else the game is not what it was
            self._note_stable(episode.player, episode.ret)

    def _note_stable(self, player: str, ret: float) -> None:
        if self.candidate is not None:
            if player in self.players or len(self.players) >= PAGE:
                self.old.note(player, ret, MANY)
            else:
                self.players.append(player)
        if len(self.reference) < REFERENCE and not self.recent:
            self.reference.note(player, ret, REFERENCE)
            return
        if len(self.recent) >= BLOCK:
            self.recent = EpisodeReturns()
        self.recent.note(player, ret, BLOCK)

    def forget_others(self, players: Set[str]) -> None:
        """What is known of those who are not among these: they were erased."""
        whole = len(self.reference)
        self.new, self.old, self.recent = self.new.of(players), self.old.of(players), self.recent.of(players)
        self.reference, self.players = self.reference.of(players), [who for who in self.players if who in players]
        if len(self.reference) < min(whole, REFERENCE):
            self.recent = EpisodeReturns()  # so that the next episodes say how good `stable` is
        self.control.forget_others(players)

    def new_stable(self, version: int, reference: EpisodeReturns, rolled_back: bool) -> None:
        self.stable, self.rolled_back = version, rolled_back
        self.reference, self.recent = reference.newest(BLOCK), EpisodeReturns()

    def begin_trial(self, version: int | None, learned: int, anew: bool = True) -> None:
        """:param anew: what `stable` did until now says nothing beside this one."""
        self.candidate, self.candidate_learned, self.collapsed, self.new = version, learned, None, EpisodeReturns()
        if anew:
            self.old, self.players = EpisodeReturns(), []

    def end_trial(self) -> None:
        self.begin_trial(None, self.candidate_learned)


def _bot(episode: Episode) -> int | None:
    """The version that played it, 0 for play at random; none for people and other models."""
    if not math.isfinite(episode.ret):
        return None
    if episode.model == RANDOM:
        return 0
    return episode.version if episode.model == DEFAULT_MODEL else None


def name_of(version: int | None) -> str:
    return f"version {version}" if version else "play at random"
