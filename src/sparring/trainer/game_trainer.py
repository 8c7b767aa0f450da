"""One game of the live trainer: its learner, its place in the store, its versions."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring import algorithms
from sparring.api import TrainerStatus
from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.export.same_forms import require_same_forms
from sparring.files import write_whole
from sparring.games import Game
from sparring.networks.defaults import describe, kind_of
from sparring.networks.policy import Policy
from sparring.registry.manifest import DEFAULT_MODEL, DataSpan, Manifest, flat
from sparring.registry.registry import Registry, RegistryError
from sparring.runs import checkpoint
from sparring.store import Store
from sparring.store.lineage import Lineage
from sparring.trainer import culprits, warm
from sparring.trainer.costs import Costs
from sparring.trainer.interrupt import StopRequested, stopping
from sparring.trainer.promotion import Promotion
from sparring.trainer.settings import Settings, algorithm_name
from sparring.trainer.simulator import Simulator
from sparring.training.store_learner import PEOPLES, create
from sparring.training.xla import use_threads

__all__ = ["GameTrainer", "Replaced", "Settings", "algorithm_name", "write_status"]

log = logging.getLogger("sparring.trainer")

TURN = 0.25  # seconds of learning before looking at the store again
PAGE = 2000  # fragments that are taken in at once
PLAYERS = 100_000  # players, the last seen first, whose returns stay evidence after an erasure
COUNTED = 10_000  # fragments not taken in yet that are counted one by one, after an erasure
PUBLISH_AGAIN = 5.0, 300.0  # seconds until a publication that failed is tried again: at first, and at most
STATUS_AFTER = 5.0  # seconds without an update until the trainer says that it waits
SEARCH_LIMIT = 10.0  # seconds for a search for culprits, for the same reason
NOTICE = 3600.0  # seconds for which the status names culprits
METRICS_BYTES = 32 << 20  # of metrics.jsonl, which then begins anew beside `metrics.jsonl.old`
RETURN = "evaluation/return_mean"

Discard = Callable[[str, Sequence[str], str], int]  # like Store.discard


class Replaced(Exception):
    """The game was deleted and declared anew: what was learned is another game's."""


class GameTrainer:
    """`discard` puts fragments of the store into its quarantine: the store's own, where it can write."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        directory: Path,
        game: Game,
        settings: Settings,
        discard: Discard | None = None,
        play: Lineage | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.costs = costs or Costs()
        self.store, self.registry, self.directory, self.game, self.settings = store, registry, directory, game, settings
        self.discard = discard or store.discard
        self.play = play or Lineage(store, game)
        self.inherits = self.play.before is not None and not checkpoint.exists(directory / "checkpoint")
        directory.mkdir(parents=True, exist_ok=True)
        self.algorithm = warm.prepare(directory, registry, game, settings, self._before())
        chosen = checkpoint.hyperparameters(directory, self.algorithm, game, settings.hyperparameters)
        self.hyperparameters = algorithms.complete(self.algorithm, chosen, game)
        algorithm = algorithms.create(self.algorithm, game, chosen)
        use_threads(algorithm)
        if algorithm.layers is not None:
            network = f"network for {kind_of(game.observation)}: {describe(algorithm.layers)}"
            log.info("%s: %s, %s", game.name, self.algorithm, network)
        self.learner = create(algorithm, settings.seed, settings.window_bytes)
        require_same_forms(self.learner.policy())
        self.simulator = Simulator(game)
        self.promotion = Promotion(
            store, registry, game, settings, self.simulator, self._publish, self._adopt, self._taken
        )
        self.cursor = 0
        self.passed = 0  # fragments that the store has up to the cursor: what was erased is not among them
        self.erasure, self.registration = self.play.erasure(), store.registration(game.name)
        self.beside = ""  # why it could not go on from what players have
        self.trouble, self.hold, self.hold_until = "", 0.0, 0.0  # with the registry
        self.unsaved = ""  # why the newest checkpoint could not be written
        self.notice, self.noticed = "", 0.0  # of culprits, and when
        self.considered = 0  # updates when the policy was last looked at
        now = time.monotonic()
        self.next_checkpoint, self.next_evaluation = now + settings.checkpoint_every, now
        self.learned_at = now - STATUS_AFTER
        self.next_look = now + 1.0
        self.rest_until = now  # a search must not take more than a fifth of the time
        self.next_status, self.rate, self._rate_from = now, 0.0, (now, 0)
        self._restore()

    # Where it stands

    def _restore(self) -> None:
        path = self.directory / "checkpoint"
        if not checkpoint.exists(path):
            return
        arrays, meta = checkpoint.load(path)
        if meta.get("registration", self.registration) != self.registration:
            checkpoint.remove(path)
            log.warning("%s: was deleted and declared anew: learning begins anew", self.game.name)
            return
        if meta["schema"] != self.game.schema:
            raise InputError(
                f"{path} belongs to a game with schema {meta['schema']}, now it is {self.game.schema}: "
                f"move the directory away to start afresh"
            )
        if meta["algorithm"] != self.algorithm:
            self._begin_beside(meta, f"{self.algorithm} learns, {meta['algorithm']} did before")
            return
        fresh = self.learner.save()
        try:
            self.learner.restore(arrays, meta)
        except InputError as error:
            self._begin_beside(meta, str(error))
            return
        if (why := self.learner.problem()) is not None:  # of a trainer that did not look
            self.learner.restore(*fresh)
            log.warning("%s: its checkpoint is of no use, learning begins anew: %s", self.game.name, why)
            return
        self.cursor, self.considered = meta["cursor"], meta["considered"]
        self.passed = meta.get("passed", self.learner.fragments)
        if not self._recall(meta):  # of an older one, which published what is there
            self.promotion.memory.older = True
        self._recount()
        self._refill(meta["window_start"])
        if self._erased_since(meta):
            self._reload(self.learner.window_start, renew=True)
        log.info("%s: resumes at %s updates, %s steps", self.game.name, self.learner.updates, self.learner.steps)

    def _begin_beside(self, meta: dict[str, Any], why: str) -> None:
        """The settings ask for another algorithm or network: it begins anew, from what players have where that fits
        (see `_adopt`), and what was learned until now is kept beside."""
        checkpoint.set_aside(self.directory / "checkpoint")
        if self._recall(meta):
            self.promotion.memory.stable = None  # not known: it is looked at whether to go on from it
        self.notice, self.noticed = f"began anew: {why}", time.time()
        log.warning("%s: its settings changed, it begins anew: %s", self.game.name, why)

    def _recall(self, meta: dict[str, Any]) -> bool:
        """What a checkpoint knows of returns in play, if it does."""
        if "promotion" not in meta:
            return False
        self.promotion.restore(meta["promotion"])
        if self._erased_since(meta):
            self._forget_returns()
        return True

    def _erased_since(self, meta: dict[str, Any]) -> bool:
        """Whether play was erased since a checkpoint, while no trainer ran."""
        return bool(meta.get("erasure", self.erasure) != self.erasure)

    def apply(self, settings: Settings) -> None:
        """Other settings, under which the learner stays as it is."""
        self.settings = settings
        self.promotion.apply(settings, time.monotonic())

    def _refill(self, start: int) -> None:
        for before, fragments in self._between(start, self.cursor):
            self.learner.refill(fragments, before)

    def _between(self, after: int, last: int) -> Iterator[tuple[int, list[Fragment]]]:
        """The store's pages behind the one cursor up to the other, and nothing from behind that."""
        limit = PAGE // 2
        while after < last and limit:
            if stopping():
                raise StopRequested
            tail = self.play.tail(after, limit)
            if tail.cursor == after:
                return
            if tail.cursor > last:  # fewer: a page does not say which of its fragments lie behind `last`
                limit = min(limit, tail.count) // 2
                continue
            yield after, tail.fragments
            after = tail.cursor

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, meta = self.learner.save()
        meta |= {"algorithm": self.algorithm, "schema": self.game.schema, "registration": self.registration}
        return arrays, meta | {"cursor": self.cursor, "passed": self.passed, "considered": self.considered}

    def checkpoint(self) -> None:
        arrays, meta = self._state()
        meta |= {"promotion": self.promotion.save(), "erasure": self.erasure}
        checkpoint.save(self.directory / "checkpoint", arrays, meta)

    # Turns

    def turn(self) -> bool:
        """A short piece of work; whether there was any."""
        now = time.monotonic()
        if now < self.rest_until:
            return False
        if now >= self.next_look:
            if self.store.registration(self.game.name) != self.registration:
                raise Replaced
            self._look_for_erasures()
            self.next_look = now + 1.0
        before = self._state()
        tail = self.play.tail(self.cursor, PAGE)
        for reason, steps in tail.left_out.items():
            self.learner.leave_out(reason, steps)
        if tail.fragments:
            self.promotion.witness.take(tail.fragments)
            self.learner.take(tail.fragments, self.cursor)
        self.cursor, self.passed = tail.cursor, self.passed + tail.count
        made = self.learner.learn(TURN)
        if (made or tail.fragments) and (why := self.learner.problem()) is not None:
            self._recover(before, why)
            return True
        now = time.monotonic()
        if made:
            self.learned_at = now
        if now >= self.hold_until:
            try:
                self._consider(now)
            except RegistryError as error:
                self._publish_later(error)
        if now >= self.next_checkpoint and (made or tail.fragments):
            self._checkpoint_or_say()
            self.next_checkpoint = now + self.settings.checkpoint_every
        if now >= self.next_status:
            self.write_status("training" if now - self.learned_at < STATUS_AFTER else "waiting for play")
            self.next_status = now + 1.0
        return bool(made or tail.count)

    def _checkpoint_or_say(self) -> None:
        """A full disk holds up neither learning nor the other games."""
        try:
            self.checkpoint()
            self.unsaved = ""
        except OSError as error:
            self.unsaved = f", but cannot save its checkpoint: {error}"
            log.warning("%s: cannot save its checkpoint, trying again: %s", self.game.name, error)

    def _look_for_erasures(self) -> None:
        """What was erased from the store must not be learned from again."""
        mark = self.play.erasure()  # before the play is read: a later erasure then shows as another mark
        if mark == self.erasure:
            return
        self.promotion.witness.forget()
        self._forget_returns()
        self._reload(self.learner.window_start, renew=True)
        self._recount()
        self.erasure = mark
        log.info("%s: play was erased; the recent play was read anew", self.game.name)

    def _forget_returns(self) -> None:
        """Of those who were erased: they are no evidence any more."""
        self.promotion.memory.forget_others({p.player for p in self.store.players(self.game.name, PLAYERS)})

    def _recount(self) -> None:
        """What was erased may lie before the cursor or after it: `passed` follows from what is left after it. Of more
        than COUNTED the rest is not counted; then `lag` may be too low until the trainer has caught up."""
        total, after, behind = self.play.count(), self.cursor, 0
        while behind < COUNTED:
            tail = self.play.tail(after, PAGE)
            if tail.cursor == after:
                self.passed = total - behind
                return
            after, behind = tail.cursor, behind + tail.count
        self.passed = min(self.passed, total - behind)

    def _lag(self) -> int:
        """Fragments that are stored and not taken in yet."""
        total = self.play.count()
        if self.play.end() == self.cursor:  # asked after the total, which has nothing more
            self.passed = total
        return max(total - self.passed, 0)

    def _reload(self, start: int, renew: bool = False) -> None:
        self.learner.forget(renew)
        self._refill(start)

    def _recover(self, sound: tuple[dict[str, Any], dict[str, Any]], why: str) -> None:
        """Back to the state before this turn, and without the play that broke it."""
        began = time.monotonic()
        end, (arrays, meta) = self.cursor, sound
        log.warning("%s: learning diverged (%s): back to the state before", self.game.name, why)
        self.learner.restore(arrays, meta)
        self.cursor, self.passed = meta["cursor"], meta["passed"]
        found = culprits.find(
            self.learner,
            lambda: (fragments for _, fragments in self._between(meta["window_start"], end)),
            began + SEARCH_LIMIT,
        )
        if not found:
            raise SparringError(
                f"learning diverged ({why}), and no play with extreme numbers does that: lower the hyperparameter `lr`"
            )
        self.notice, self.noticed = culprits.names(found), time.time()
        reason = f"learning from it alone makes what was learned useless: {found[0].broken} ({found[0].largest})"
        gone = sum(self.discard(name, [c.fragment.id for c in found], reason) for name in self.play.names)
        log.warning("%s: %s; %d put into quarantine", self.game.name, self.notice, gone)
        self._reload(meta["window_start"])
        now = time.monotonic()
        self.rest_until = now + 4 * (now - began)

    # Versions

    def _consider(self, now: float) -> None:
        """What was played since, and what becomes of a policy that has learned more."""
        self.promotion.look(now)
        if self.inherits:
            self._inherit()
        waits = now < self.next_evaluation or now < self.hold_until
        if waits or (self.learner.updates <= self.considered and self.promotion.policy is None):
            return
        self.considered, before = self.learner.updates, self.promotion.evaluation
        self.promotion.offer(self.learner.policy(), now)
        if self.simulator.usable:
            # Looking must not cost more than a fifth of the time, however slow the game is.
            self.next_evaluation = now + max(self.settings.evaluate_every, 4 * (time.monotonic() - now))
        if self.promotion.evaluation is not None or before is not None:
            self._note()
        self.trouble, self.hold = "", 0.0

    def _adopt(self, manifest: Manifest) -> None:
        """Learning goes on from a version that players have and that it does not come from."""
        try:
            policy = self.registry.policy(self.game.name, DEFAULT_MODEL, manifest.version)
            why = self.learner.warm_start(policy, manifest.data.steps)
        except RegistryError:
            raise
        except SparringError as error:  # its files are damaged
            why = str(error)
        if why is None:
            self.beside = ""
            log.info("%s: continues from version %s", self.game.name, manifest.version)
        else:
            self.beside = f", learning beside version {manifest.version}: {why}"
            log.warning("%s: cannot continue from version %s, learns beside: %s", self.game.name, manifest.version, why)

    def _taken(self) -> tuple[int, int]:
        return self.learner.steps, self.learner.bot_steps

    def _before(self) -> Game | None:
        """The generation that this one continues."""
        return None if (before := self.play.before) is None else before.game

    def _inherit(self) -> None:
        """Players of a new generation get what the old one learned, as far as it fits, from the first second."""
        before, self.inherits = self._before(), False
        found = None if before is None or self.promotion.stable else warm.inherited(self.registry, self.game, before)
        if found is None or before is None:
            return
        manifest, policy = found
        why = policy if isinstance(policy, str) else self.learner.warm_start(policy, manifest.data.steps)
        if isinstance(policy, str) or why is not None:
            self.beside = f", not from {before.name} version {manifest.version}: {why}"
            log.warning("%s: cannot go on from %s version %s: %s", self.game.name, before.name, manifest.version, why)
            return
        self.promotion.memory.grown = True  # candidates must be better than what is good already
        self.promotion.begin(self.learner.policy(), f"grown from version {manifest.version} of {before.name}")

    def _publish_later(self, error: RegistryError) -> None:
        """The registry is away. The version that is there stays the newest; learning goes on."""
        first, most = PUBLISH_AGAIN
        self.hold = min(max(first, self.hold * 2), most)
        self.hold_until = time.monotonic() + self.hold
        self.trouble = f", but cannot publish: {error}"
        log.warning("%s: %s; trying again in %d s", self.game.name, error, self.hold)

    def _publish(self, policy: Policy) -> Manifest:
        """As a version that nobody gets yet."""
        learner, stable = self.learner, self.promotion.stable
        metrics = {name: value for name, value in learner.metrics.items() if math.isfinite(value)}
        metrics |= {"updates": float(learner.updates), "steps": float(learner.steps)}
        if self.promotion.evaluation is not None:
            metrics[RETURN] = self.promotion.evaluation
        manifest = self.registry.publish(
            policy,
            model=DEFAULT_MODEL,
            algorithm=self.algorithm,
            metrics=metrics,
            config=flat(msgspec.to_builtins(self.hyperparameters)),
            parent=stable.version if stable else None,
            data=DataSpan(0, self.cursor, learner.fragments, learner.steps),
            alias=None,
        )
        if self.store.registration(self.game.name) != self.registration:
            # Deleted meanwhile: who deleted it may have looked into the registry before this version was there.
            self.registry.delete_game(self.game.name)
            raise Replaced
        log.info("%s: published version %s", self.game.name, manifest.version)
        return manifest

    # What it says

    def _note(self) -> None:
        row = {
            "time": time.time(),
            "steps": self.learner.steps,
            "updates": self.learner.updates,
            RETURN: self.promotion.evaluation,
            "exploration": self.learner.exploration,
            **self.learner.metrics,
            **self.costs.now(),
        }
        path = self.directory / "metrics.jsonl"
        try:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
                full = file.tell() > METRICS_BYTES
            if full:
                path.replace(path.with_name(path.name + ".old"))
        except OSError as error:  # a full disk: a row is missing, learning goes on
            log.warning("%s: cannot write %s: %s", self.game.name, path, error)

    def status(self, state: str) -> TrainerStatus:
        now, learner, algorithm = time.monotonic(), self.learner, self.learner.algorithm
        (since, updates), (gathered, needed) = self._rate_from, learner.progress
        self.rate, self._rate_from = (learner.updates - updates) / max(now - since, 1e-3), (now, learner.updates)
        notice = f"; {self.notice}" if self.notice and time.time() - self.noticed < NOTICE else ""
        return TrainerStatus(
            game=self.game.name,
            algorithm=self.algorithm,
            state=state + self.trouble + self.unsaved + self.simulator.why + self.beside + self._unfit() + notice,
            updates=learner.updates,
            updates_per_s=self.rate,
            steps=learner.steps,
            lag=self._lag(),
            window=learner.window,
            window_bytes=learner.window_bytes,
            loss=next((value for name, value in learner.metrics.items() if name.startswith("loss/")), None),
            exploration=None if algorithm.offline or not algorithm.exploration(0) else learner.exploration,
            evaluation=self.promotion.evaluation,
            updated=time.time(),
            candidate=self.promotion.candidate,
            evidence=self.promotion.held or self.promotion.evidence,
            decision=self.promotion.memory.decision,
            people_steps=learner.people_steps,
            bot_steps=learner.bot_steps,
            left_out=dict(learner.left_out),
            on_policy=algorithm.on_policy,
            gathered=gathered,
            needed=needed,
            metrics={name: value for name, value in learner.metrics.items() if math.isfinite(value)},
            costs=self.costs.now(),
        )

    def _unfit(self) -> str:
        """That the algorithm cannot learn from people, where people have played."""
        steps = self.learner.left_out.get(PEOPLES, 0)
        if not steps:
            return ""
        other = algorithms.default_for(self.game)
        return f", {self.algorithm} cannot learn from people's steps ({steps:,} so far are left out): {other} can"

    def write_status(self, state: str) -> None:
        write_status(self.directory, self.status(state))


def write_status(directory: Path, status: TrainerStatus) -> None:
    """A disk that is full keeps the old status, and nothing else from working."""
    try:
        write_whole(directory / "status.json", msgspec.json.encode(status), parents=True)
    except OSError as error:
        log.warning("%s: cannot write its status: %s", status.game, error)
