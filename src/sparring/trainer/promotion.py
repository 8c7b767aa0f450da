"""When a new version becomes the one that players get: on evidence, and back again when it collapses.

Where the game can be simulated, candidate and `stable` play the same episodes until their difference is clear. A
declared game's candidate gets a share of play. Either way the test is sequential (see `sequential`), and one candidate
is tried at a time. Until there is a `stable`, bots play at random, and that is what the first version must be better
than.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sparring.errors import InputError
from sparring.games import Game
from sparring.networks.policy import Policy
from sparring.registry.manifest import CANDIDATE, DEFAULT_MODEL, STABLE, Alias, Manifest
from sparring.registry.registry import Moved, NotPublished, Pinned, Registry
from sparring.store import Store
from sparring.trainer.evidence import YOUNG, EpisodeReturns, Memory, decisive, name_of
from sparring.trainer.sequential import Interval, paired, unpaired
from sparring.trainer.settings import Settings
from sparring.trainer.simulator import Simulator
from sparring.trainer.witness import Witness

__all__ = ["Promotion"]

log = logging.getLogger("sparring.trainer")

BY = "trainer"
LOOK_EVERY = 1.0  # seconds between looks at what was played
ALIASES_EVERY = 5.0  # seconds between looks whether somebody else moved an alias
YOUNG_SHARE = 0.75  # a candidate's share of play while the game is young, …
YOUNG_ALPHA = 0.2  # … and the alpha
GROWTH = 1.25  # a candidate makes room when so many times its experience was taken in …
PROMISING = 0.5  # … unless it is ahead by this part of what it takes to be clearly better; then it has twice the time
LONGEST_WAIT = 3600.0  # seconds between candidates while all are rejected
COLLAPSE_ALPHA = 0.01
UNMET = 30, 120.0  # episodes of bots, and seconds, after which a candidate that met nobody is one that clients
# do not try
USUAL = Settings()


class Promotion:
    """:param publish: publishes a policy as a version that no alias names.
    :param adopt: makes the learner go on from a version, which somebody else made `stable`.
    :param taken: steps of experience that the learner has taken in, and how many of them bots played."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        game: Game,
        settings: Settings,
        simulator: Simulator,
        publish: Callable[[Policy], Manifest],
        adopt: Callable[[Manifest], None],
        taken: Callable[[], tuple[int, int]],
    ) -> None:
        self.store, self.registry, self.game, self.settings, self.simulator = store, registry, game, settings, simulator
        self.publish, self.adopt, self.taken = publish, adopt, taken
        self.memory, self.witness = Memory(), Witness(game)
        self.aliases: dict[str, Alias] = {}
        self.known = self.behind = False  # whether the registry was asked; whether there are episodes not looked at yet
        self.policy: Policy | None = None  # in simulation: what is tried, …
        self.differences: list[float] = []  # … pair by pair, …
        self.against: tuple[int, Policy] | None = None  # … and against what
        self.evaluation: float | None = None
        self.evidence = self.held = ""  # held: why nothing moves for now
        now = time.monotonic()
        self.next_aliases = self.next_episodes = now
        self.next_candidate = self.next_promotion = now
        self.seed = settings.seed

    def save(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self.memory)
        return found

    def restore(self, saved: dict[str, Any]) -> None:
        try:
            self.memory = msgspec.convert(saved, Memory)
        except msgspec.ValidationError as error:  # another version of ours wrote it
            self.memory = Memory(older=True)
            log.warning(
                "%s: what was known of returns in play cannot be read (%s), it begins anew", self.game.name, error
            )

    def apply(self, settings: Settings, now: float) -> None:
        """Other settings. A candidate's share follows with the next look."""
        self.settings = settings
        self.next_candidate = min(self.next_candidate, now + settings.candidate_every)
        self.next_promotion = min(self.next_promotion, now + settings.publish_every)

    @property
    def stable(self) -> Alias | None:
        return self.aliases.get(STABLE)

    @property
    def candidate(self) -> int | None:
        found = self.aliases.get(CANDIDATE)
        return None if found is None else found.version

    # What others did

    def look(self, now: float) -> None:
        """Aliases, and episodes that were played: evidence on a candidate, or of a collapse."""
        if now >= self.next_aliases or not self.known:
            self._look_at_aliases()
            self.next_aliases = now + ALIASES_EVERY
            self._follow_share()
        if now >= self.next_episodes:
            self.behind = self.memory.read(self.store, self.game.name)
            if self.behind:  # much was played while nobody looked: it goes on with the next turn
                return
            self.next_episodes = now + LOOK_EVERY
            if self._changed():
                return
            if self.memory.candidate is not None:
                self._decide_in_play(now)
            self._check_collapse()

    def _changed(self) -> bool:
        """Whether the game pays people differently since a while: then returns of bots say nothing of their version."""
        m, before, known = self.memory, self.memory.control.changed, bool(self.held)
        self.held = m.control.look(time.time())
        if self.held and not known:
            log.warning("%s: %s", self.game.name, self.held)
            if m.collapsed is not None and m.collapsed == m.candidate:
                self._promote(m.collapsed, f"it did not collapse: {self.held}", {}, EpisodeReturns())
            self._forget_trial(self.held)
        elif before and not self.held:
            m.recent = EpisodeReturns()
            if m.control.lasted:  # what was good before is no measure any more
                m.reference = EpisodeReturns()
            self._say("people's returns are as before, or have stayed as they are now: promotions go on")
        return bool(self.held)

    def _look_at_aliases(self) -> None:
        self.aliases, m = self.registry.aliases(self.game.name, DEFAULT_MODEL), self.memory
        stable, tried = self.stable, self.aliases.get(CANDIDATE)
        self.known = True
        m.grown = m.grown or (stable is not None and stable.by != BY)
        if stable is not None and stable.version != m.stable:
            manifest = self.registry.manifest(self.game.name, DEFAULT_MODEL, stable.version)
            known = m.older and manifest.data.fragments > 0  # what a trainer published says which play it saw
            m.older = False
            self._forget_trial(f"version {stable.version} was made stable meanwhile")
            self._new_stable(stable.version, EpisodeReturns())
            log.info("%s: version %s is stable, by %s: %s", self.game.name, stable.version, stable.by, stable.reason)
            if not known:
                self.adopt(manifest)
        if m.candidate is not None and stable is not None and stable.pinned and tried is not None and tried.share > 0:
            self._forget_trial(f"version {stable.version} is pinned, all players get it")
        if m.candidate is not None and (tried is None or tried.version != m.candidate):
            self._forget_trial("the candidate was moved or removed by somebody else")
        if tried is not None and m.candidate is None and tried.by == BY and tried.share > 0:
            self._remove_candidate(f"version {tried.version}: what was known of it was lost")

    def _forget_trial(self, why: str) -> None:
        m = self.memory
        if m.candidate is not None:
            self._say(f"version {m.candidate} is no candidate any more: {why}")
            found = self.aliases.get(CANDIDATE)
            if found is not None and found.version == m.candidate:
                self._remove_candidate(why)
        m.end_trial()
        self.policy, self.differences, self.evidence = None, [], ""

    def _remove_candidate(self, why: str) -> None:
        found = self.aliases.pop(CANDIDATE, None)
        if found is None:
            return
        at = found.version
        with contextlib.suppress(Moved, NotPublished):  # gone already, or somebody else's by now
            self.registry.move(self.game.name, DEFAULT_MODEL, CANDIDATE, None, reason=why, by=BY, expected=at)

    def _new_stable(self, version: int, reference: EpisodeReturns, rolled_back: bool = False) -> None:
        self.memory.new_stable(version, reference, rolled_back)
        self.memory.learned, self.memory.bot_steps = self.taken()

    # Candidates in play

    def offer(self, policy: Policy, now: float) -> None:
        """A policy that has learned more: what becomes of it."""
        if self.simulator.usable:
            self._try_in_simulation(policy, now)
        if self.simulator.usable:  # else it has just been given up
            return
        waits = now < max(self.next_candidate, self.next_promotion) or self.held or self.behind
        pinned = self.stable is not None and self.stable.pinned  # then it is what all players get
        if (self.memory.candidate is not None and not self._obsolete()) or waits or pinned:
            return
        if (why := self._unplayed()) is None:
            self._try_in_play(policy)
        elif why:
            self.begin(policy, why)

    def _unplayed(self) -> str | None:
        """Why a policy may take the place of what bots have, of which nobody has met a step; "": not yet. None: it is
        played, and so evidence decides."""
        m, (learned, bot_steps) = self.memory, self.taken()
        proven = self.stable is not None and (self.stable.by != BY or self.stable.evidence or m.rolled_back)
        if bot_steps > m.bot_steps or proven:
            return None
        if learned < 2 * m.learned:  # versions that nobody meets need not be many
            return ""
        if not m.stable:
            return f"no bot has played yet: learned from {learned:,} steps"
        since = name_of(m.stable)
        return f"no bot has played since {since}: learned from {learned:,} steps instead of {m.learned:,}"

    def begin(self, policy: Policy, reason: str, evidence: Mapping[str, float] = {}) -> None:
        """What players get from now on, without a trial in play: there is other evidence, or nobody to ask, or nobody
        should play at random until there is some."""
        version = self.publish(policy).version
        self.policy = None
        self._promote(version, reason, dict(evidence), EpisodeReturns())

    def _held(self) -> bool:
        """A pinned `stable` has one better candidate beside it at most: a person decides."""
        return self.stable is not None and self.stable.pinned and self.candidate is not None

    def _try_in_play(self, policy: Policy) -> None:
        m, manifest = self.memory, self.publish(policy)
        before = m.candidate
        m.cursor = max(m.cursor, self.store.tail(self.game.name, -1).cursor)
        was = f"not clearly better in {len(m.new)} episodes" if m.new else "which nobody played"
        instead = f"instead of version {before}, {was}: " if before else ""
        self._give_share(manifest.version, f"{instead}to be compared with {name_of(m.stable)} in play")
        self.next_candidate = time.monotonic() + self._pause
        m.begin_trial(manifest.version, self.taken()[0], anew=before is None)
        estimate = self.witness.estimate(policy)
        m.witness = {} if estimate is None else {"estimate": estimate.ret, "estimate_worth": estimate.episodes}
        self._retire()
        log.info("%s: version %s is a candidate for %g of play", self.game.name, manifest.version, self._share)

    def _give_share(
        self, version: int, reason: str, expected: int | UnsetType = UNSET, share: float | None = None
    ) -> None:
        share, name = self._usual("canary", YOUNG_SHARE) if share is None else share, self.game.name
        self.registry.move(
            name, DEFAULT_MODEL, CANDIDATE, version, reason=reason, by=BY, share=share, expected=expected
        )
        self.aliases[CANDIDATE] = Alias(CANDIDATE, version, time.time(), BY, reason, share=share)
        self.memory.canary = self.settings.canary

    @property
    def _share(self) -> float:
        found = self.aliases.get(CANDIDATE)
        return 0.0 if found is None else found.share

    def _follow_share(self) -> None:
        """A candidate that is tried gets the share that somebody has set since. Its trial begins anew: of a time with
        one share and a time with another, the two versions' returns would be of different hours, and not compare."""
        m, before = self.memory, self._share
        if m.candidate is None or m.canary in (None, self.settings.canary):
            m.canary = self.settings.canary
            return
        if m.read(self.store, self.game.name):  # first what was played until now
            return
        try:
            self._give_share(m.candidate, "the share of play that candidates get was set anew", expected=m.candidate)
        except (Moved, NotPublished):  # somebody else was faster: with the next look
            return
        m.read(self.store, self.game.name)  # what was played with the share of before
        m.begin_trial(m.candidate, m.candidate_learned)
        self.evidence = ""
        self._say(
            f"version {m.candidate} gets {self._share:g} of play, it had {before:g}: its episodes are counted anew"
        )

    def _obsolete(self) -> bool:
        """Whether a newer policy had better be tried: much was learned since, and this one does not look better."""
        m, learned = self.memory, self.taken()[0]
        if learned < GROWTH * m.candidate_learned:
            return False
        if len(m.new) < self.settings.least_episodes or learned >= GROWTH**2 * m.candidate_learned:
            return True
        interval = unpaired(m.new.values, self._old.values, self._alpha)
        return interval.difference < PROMISING * (interval.difference - interval.low)

    @property
    def _old(self) -> EpisodeReturns:
        """Of what bots have: while the candidate is tried; of a young game, of which there are few, all."""
        m = self.memory
        return m.reference.and_then(m.recent) if self._young else m.old

    @property
    def _young(self) -> bool:
        """Not where a person chose what players get: that is good enough to be careful, also afterwards."""
        m = self.memory
        new = m.bots < YOUNG[0] or 0 <= time.time() - m.began < YOUNG[1]  # a clock may have been wrong then
        return new and not m.grown

    @property
    def _alpha(self) -> float:
        return self._usual("alpha", YOUNG_ALPHA)

    def _usual(self, name: str, young: float) -> float:
        """A young game has its own, unless somebody chose one."""
        chosen = float(getattr(self.settings, name))
        return young if self._young and chosen == getattr(USUAL, name) else chosen

    @property
    def _pause(self) -> float:
        """Seconds between candidates."""
        return self.settings.publish_every if self._young else self.settings.candidate_every

    def _decide_in_play(self, now: float) -> None:
        m, s = self.memory, self.settings
        assert m.candidate is not None
        old = self._old
        few, interval = min(len(m.new), len(old)), unpaired(m.new.values, old.values, self._alpha)
        self.evidence = f"{len(m.new)} of at least {s.least_episodes} episodes{self._testimony}"
        tried = self.aliases.get(CANDIDATE)
        if not m.new and len(m.old) >= UNMET[0] and tried is not None and time.time() > tried.since + UNMET[1]:
            self._unmet()
        if few < s.least_episodes:
            return
        compared = f"than {name_of(m.stable)} in {len(m.new)} episodes of play"
        found = f"{len(m.new)} episodes, {len(old)} of {name_of(m.stable)}: {interval.words(self._alpha)}"
        self.evidence = found + self._testimony
        alone = decisive(m.new, old, self._alpha) if interval.low > 0 else None
        if alone is not None:
            self.evidence += f"; but not without the episodes of {alone!r}: others have to be ahead, too"
        if interval.low > 0 and alone is None:
            evidence = interval.numbers() | {"returns": m.new.mean, "returns_before": old.mean} | m.witness
            if self._promote(m.candidate, f"better {compared}: {interval.words(self._alpha)}", evidence, m.new):
                return self._end_trial(now, rejected=False)
            return self._end_trial(now, rejected=True, keep=True)
        no_better = few >= 4 * s.least_episodes and interval.difference <= 0
        if interval.high < 0 or no_better or len(m.new) >= s.most_episodes:
            how = "worse" if interval.high < 0 else "not clearly better"
            self._say(f"version {m.candidate} was rejected: {how} {compared}: {interval.words(self._alpha)}")
            self._end_trial(now, rejected=True)

    @property
    def _testimony(self) -> str:
        """The witness's; it decides nothing."""
        said = self.memory.witness
        if not said:
            return ""
        return f"; recorded play suggests {said['estimate']:.4g}, as if from {said['estimate_worth']:.0f} episodes"

    def _unmet(self) -> None:
        """Clients that know `latest` only, or ask for actions without saying who plays, meet no candidate."""
        m = self.memory
        assert m.candidate is not None
        self.evidence = (
            f"nobody tried version {m.candidate} in {len(m.old)} episodes of bots: their clients ask without `player` "
            "and `episode`, or are older; promote it by hand, or let them say it"
        )
        if m.stable is None:
            why = f"the first version: no client tries candidates, in {len(m.old)} episodes of play at random"
            if self._promote(m.candidate, why, {}, EpisodeReturns()):
                self._end_trial(time.monotonic(), rejected=False)

    def _end_trial(self, now: float, *, rejected: bool, keep: bool = False) -> None:
        m, first = self.memory, self._pause
        m.wait = min(max(m.wait, first) * 2, max(LONGEST_WAIT, first)) if rejected else first
        self.next_candidate = now + m.wait
        m.end_trial()
        self.evidence = ""
        if not keep:
            self._remove_candidate(m.decision)

    # Candidates in simulation

    def _try_in_simulation(self, policy: Policy, now: float) -> None:
        """One look: the first ones sort out what is no better, the next ones add up until the difference is clear."""
        s, stable = self.settings, self.stable
        if self.policy is None:
            self.policy, self.differences, self.evidence = policy, [], ""
        self.seed += 1
        ours, theirs = self.simulator.returns(self.policy, self._stable_policy(), s.evaluation_episodes, self.seed)
        if not ours:
            self.policy = None
            return
        self.differences += [a - b for a, b in zip(ours, theirs, strict=True)]
        self.evaluation, interval = fmean(ours), paired(self.differences, s.alpha)
        n, before = len(self.differences), name_of(stable.version if stable else None)
        self.evidence = (
            f"{n} of at least {s.least_episodes} paired episodes against {before}: {interval.words(s.alpha)}"
        )
        if interval.difference <= 0:
            self._sort_out(f"not better than {before}", interval)
        elif n >= s.least_episodes and interval.low > 0:
            if now < self.next_promotion or self._held():
                self.policy = None  # a newer one by then
                return
            reason = f"better than {before} in {n} paired episodes: {interval.words(s.alpha)}"
            self.begin(self.policy, reason, interval.numbers() | {"evaluation": self.evaluation})
        elif n >= s.most_episodes:
            self._sort_out(f"not clearly better than {before}", interval)

    def _sort_out(self, why: str, interval: Interval) -> None:
        if interval.episodes > self.settings.evaluation_episodes:
            how = interval.words(self.settings.alpha)
            self._say(f"a policy was rejected: {why} in {interval.episodes} paired episodes: {how}")
        self.policy = None

    def _stable_policy(self) -> Policy | None:
        stable = self.stable
        if stable is None:
            return None
        if self.against is None or self.against[0] != stable.version:
            self.against = stable.version, self.registry.policy(self.game.name, DEFAULT_MODEL, stable.version)
        return self.against[1]

    # Moving `stable`

    def _promote(self, version: int, reason: str, evidence: dict[str, float], reference: EpisodeReturns) -> bool:
        stable = self.stable
        at = None if stable is None else stable.version
        try:
            self.registry.move(
                self.game.name, DEFAULT_MODEL, STABLE, version, reason=reason, by=BY, evidence=evidence, expected=at
            )
        except Pinned:
            self.registry.move(
                self.game.name, DEFAULT_MODEL, CANDIDATE, version, reason=reason, by=BY, evidence=evidence
            )
            self._look_at_aliases()
            self._say(f"version {version} is {reason}; but version {at} is pinned: a person has to promote it")
            return False
        except Moved as error:
            self._say(f"version {version} was not promoted: {error}")
            self.next_aliases = 0.0
            return False
        self.aliases[STABLE] = Alias(STABLE, version, time.time(), BY, reason, evidence)
        self._new_stable(version, reference)
        self.next_promotion = time.monotonic() + self.settings.publish_every
        self.next_candidate = time.monotonic() + self._pause
        self._say(f"version {version} was promoted: {reason}")
        self._retire()
        return True

    def _check_collapse(self) -> None:
        m, stable = self.memory, self.stable
        if stable is None or m.stable != stable.version or m.rolled_back or stable.pinned:
            return
        if min(len(m.reference), len(m.recent)) < self.settings.least_episodes:
            return
        interval = unpaired(m.recent.values, m.reference.values, COLLAPSE_ALPHA)
        if interval.high >= 0 or decisive(m.reference, m.recent, COLLAPSE_ALPHA) is not None:
            return
        reason = (
            f"version {stable.version} collapsed: {m.recent.mean:.4g} in its newest {len(m.recent)} episodes of "
            f"play, {m.reference.mean:.4g} when it was promoted: {interval.words(COLLAPSE_ALPHA)}"
        )
        try:
            move = self.registry.rollback(self.game.name, DEFAULT_MODEL, reason=reason, by=BY)
        except InputError as error:  # nothing to go back to, or pinned meanwhile
            m.rolled_back = True
            self._say(f"{reason}; not rolled back: {error}")
            return
        assert move.version is not None
        self._forget_trial("stable was rolled back")
        self.aliases[STABLE] = Alias(STABLE, move.version, move.time, BY, reason, interval.numbers())
        self._new_stable(move.version, EpisodeReturns(), rolled_back=True)
        self._say(f"back to version {move.version}: {reason}")
        self.adopt(self.registry.manifest(self.game.name, DEFAULT_MODEL, move.version))
        self._try_again(stable.version, move.version)

    def _try_again(self, version: int, before: int) -> None:
        """What collapsed, beside the version before: was it the version, or do all versions get less now?"""
        why = f"it collapsed: to be compared with version {before} in play, which may get no more now"
        self._give_share(version, why, share=self.settings.canary)
        self.memory.begin_trial(version, self.taken()[0])
        self.memory.collapsed = version

    def _retire(self) -> None:
        """Keeps what aliases name, what was promoted last, and the newest."""
        keep, name = self.settings.keep, self.game.name
        versions = self.registry.versions(name, DEFAULT_MODEL)
        if len(versions) <= 2 * keep:
            return
        moves = self.registry.moves(name, DEFAULT_MODEL, limit=20 * keep)
        promoted = list(dict.fromkeys(move.version for move in moves if move.alias == STABLE))[:keep]
        kept = {*versions[-keep:], *promoted, *(alias.version for alias in self.aliases.values())}
        self.registry.retire(name, DEFAULT_MODEL, [v for v in versions if v not in kept])

    def _say(self, decision: str) -> None:
        self.memory.decision = decision
        log.info("%s: %s", self.game.name, decision)
