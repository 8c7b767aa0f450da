"""One game of the live trainer: its learner, its place in the store, its versions."""

import json
import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring import algorithms
from sparring.api import TrainerStatus
from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.files import write_whole
from sparring.games import Box, Dict, Game, Space
from sparring.games.catalog import load
from sparring.networks.defaults import describe, kind_of
from sparring.networks.policy import Policy
from sparring.registry.manifest import DEFAULT_MODEL, DataSpan, Manifest
from sparring.registry.registry import Registry, RegistryError
from sparring.runs import checkpoint
from sparring.store import Store
from sparring.trainer import culprits
from sparring.trainer.interrupt import Interrupted, TooLong, limited, stopping
from sparring.training.evaluate import play, summary
from sparring.training.learner import WINDOW_BYTES, create
from sparring.training.xla import use_threads

__all__ = ["GameTrainer", "Replaced", "Settings", "algorithm_name", "write_status"]

log = logging.getLogger("sparring.trainer")

TURN = 0.25  # seconds of learning before looking at the store again
PAGE = 2000  # fragments that are taken in at once
COUNTED = 10_000  # fragments not taken in yet that are counted one by one, after an erasure
PUBLISH_AGAIN = 5.0, 300.0  # seconds until a publication that failed is tried again: at first, and at most
STATUS_AFTER = 5.0  # seconds without an update until the trainer says that it waits
EVALUATION_LIMIT = 20.0  # seconds for a look at how good a policy is: other games wait meanwhile
SEARCH_LIMIT = 10.0  # seconds for a search for culprits, for the same reason
NOTICE = 3600.0  # seconds for which the status tells of culprits
METRICS_BYTES = 32 << 20  # of metrics.jsonl, which then begins anew beside `metrics.jsonl.old`
RETURN = "evaluation/return_mean"

Discard = Callable[[str, Sequence[str], str], int]  # like Store.discard


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    algorithm: str | None = None  # none: the default for the game's actions
    hyperparameters: dict[str, Any] = {}
    publish_every: float = 10.0  # seconds between versions while the new one is about as good or better
    evaluate_every: float = 2.0  # seconds between looks at how good the newest policy is, for games we can simulate
    evaluation_episodes: int = 10
    improvement: float = 1.05  # a policy this much better than the published one is published at once
    tolerance: float = 0.9  # one worse than this is held back
    checkpoint_every: float = 10.0
    window_bytes: int = WINDOW_BYTES  # memory of a game's replay window, which else has as many rows as `replay` says
    seed: int = 0


class Replaced(Exception):
    """The game was deleted and declared anew: what was learned is another game's."""


def algorithm_name(game: Game, settings: Settings) -> str:
    return settings.algorithm or algorithms.default_for(game)


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
    ) -> None:
        self.store, self.registry, self.directory, self.game, self.settings = store, registry, directory, game, settings
        self.discard = discard or store.discard
        directory.mkdir(parents=True, exist_ok=True)
        self.algorithm = algorithm_name(game, settings)
        chosen = checkpoint.hyperparameters(directory, self.algorithm, game, settings.hyperparameters)
        self.hyperparameters = algorithms.complete(self.algorithm, chosen, game)
        algorithm = algorithms.create(self.algorithm, game, chosen)
        use_threads(algorithm)
        if algorithm.layers is not None:
            network = f"network for {kind_of(game.observation)}: {describe(algorithm.layers)}"
            log.info("%s: %s, %s", game.name, self.algorithm, network)
        self.learner = create(algorithm, settings.seed, settings.window_bytes)
        self.simulated, self.unsimulated = game.env is not None, ""  # why not, for people
        self.cursor = 0
        self.passed = 0  # fragments that the store has up to the cursor: what was erased is not among them
        self.erasure, self.registration = store.erasure(game.name), store.registration(game.name)
        self.evaluation: float | None = None
        self.published: Manifest | None = None
        self.looked = False  # whether the registry was asked for it
        self.trouble, self.hold, self.hold_until = "", 0.0, 0.0  # with the registry
        self.unsaved = ""  # why the newest checkpoint could not be written
        self.notice, self.noticed = "", 0.0  # of culprits, and when
        self.considered = 0  # updates when the policy was last looked at
        now = time.monotonic()
        self.next_checkpoint, self.next_evaluation = now + settings.checkpoint_every, now
        self.published_at = now - settings.publish_every
        self.learned_at = now - STATUS_AFTER
        self.next_look = now + 1.0
        self.rest_until = now  # a search must not take more than a fifth of the time
        self.next_status, self.rate, self._rate_from = now, 0.0, (now, 0)
        self._check_simulator()
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
        if (meta["algorithm"], meta["schema"]) != (self.algorithm, self.game.schema):
            raise InputError(
                f"{path} belongs to {meta['algorithm']} on schema {meta['schema']}, now it is "
                f"{self.algorithm} on {self.game.schema}: move the directory away to start afresh"
            )
        fresh = self.learner.save()
        self.learner.restore(arrays, meta)
        if (why := self.learner.problem()) is not None:  # of a trainer that did not look
            self.learner.restore(*fresh)
            log.warning("%s: its checkpoint is of no use, learning begins anew: %s", self.game.name, why)
            return
        self.cursor, self.considered = meta["cursor"], meta["considered"]
        self.passed = meta.get("passed", self.learner.fragments)
        self._recount()
        self._refill(meta["window_start"])
        log.info("%s: going on at %s updates, %s steps", self.game.name, self.learner.updates, self.learner.steps)

    def _refill(self, start: int) -> None:
        for before, fragments in self._between(start, self.cursor):
            self.learner.refill(fragments, before)

    def _between(self, after: int, last: int) -> Iterator[tuple[int, list[Fragment]]]:
        """The store's pages behind the one cursor up to the other, and nothing from behind that."""
        limit = PAGE // 2
        while after < last and limit:
            if stopping():
                raise Interrupted
            tail = self.store.tail(self.game.name, after, limit)
            if not tail.fragments:
                return
            if tail.cursor > last:  # fewer: a page does not say which of its fragments lie behind `last`
                limit = min(limit, len(tail.fragments)) // 2
                continue
            yield after, tail.fragments
            after = tail.cursor

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, meta = self.learner.save()
        meta |= {"algorithm": self.algorithm, "schema": self.game.schema, "registration": self.registration}
        return arrays, meta | {"cursor": self.cursor, "passed": self.passed, "considered": self.considered}

    def checkpoint(self) -> None:
        checkpoint.save(self.directory / "checkpoint", *self._state())

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
        tail = self.store.tail(self.game.name, self.cursor, PAGE)
        if tail.fragments:
            self.learner.take(tail.fragments, self.cursor)
            self.cursor, self.passed = tail.cursor, self.passed + len(tail.fragments)
        made = self.learner.learn(TURN)
        if (made or tail.fragments) and (why := self.learner.problem()) is not None:
            self._recover(before, why)
            return True
        now = time.monotonic()
        if made:
            self.learned_at = now
        if self.learner.updates > self.considered and now >= self.next_evaluation:
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
        return bool(made or tail.fragments)

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
        mark = self.store.erasure(self.game.name)  # before the play is read: a later erasure then shows as another mark
        if mark == self.erasure:
            return
        self._reload(self.learner.window_start, renew=True)
        self._recount()
        self.erasure = mark
        log.info("%s: play was erased; the recent play was read anew", self.game.name)

    def _recount(self) -> None:
        """What was erased may lie before the cursor or after it: `passed` follows from what is left after it. Of more
        than COUNTED the rest is not counted; then `lag` may be too low until the trainer has caught up."""
        total, after, behind = self.store.stats(self.game.name).fragments, self.cursor, 0
        while behind < COUNTED:
            tail = self.store.tail(self.game.name, after, PAGE)
            if not tail.fragments:
                self.passed = total - behind
                return
            after, behind = tail.cursor, behind + len(tail.fragments)
        self.passed = min(self.passed, total - behind)

    def _lag(self) -> int:
        """Fragments that are stored and not taken in yet."""
        total = self.store.stats(self.game.name).fragments
        if self.store.tail(self.game.name, -1).cursor == self.cursor:  # asked after the total, which has nothing more
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
        gone = self.discard(self.game.name, [c.fragment.id for c in found], reason)
        log.warning("%s: %s; %d put into quarantine", self.game.name, self.notice, gone)
        self._reload(meta["window_start"])
        now = time.monotonic()
        self.rest_until = now + 4 * (now - began)

    # Versions

    def _check_simulator(self) -> None:
        """Whether the game's `env` is the game that was declared. Anybody can declare one, so a simulator's trouble is
        no reason not to learn from play: versions then come by the clock, and the status says why."""
        if self.game.env is None:
            return
        if ":" in self.game.env or self.game.env.endswith(".json"):  # Gymnasium would import that module
            return self._without_simulator(f"{self.game.env} names a module or file, never to be read for a client")
        try:
            with limited(EVALUATION_LIMIT):
                found = load(self.game.env)
        except Interrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a game raises, its own SystemExit included
            return self._without_simulator(f"{self.game.env} cannot be made: {_line(error)}")
        for what, ours, theirs, same in (
            ("observations", self.game.observation, found.observation, _same_form),
            ("actions", self.game.action, found.action, operator.eq),
        ):
            if not same(ours, theirs):
                return self._without_simulator(
                    f"{self.game.env} has the {what} {theirs!r:.100}, the game was declared with {ours!r:.100}: "
                    "declare it as its `env` is, or without `env`"
                )

    def _without_simulator(self, why: str) -> None:
        self.simulated, self.unsimulated = False, f", not simulated: {why}"
        log.warning("%s: not simulated, so published by the clock: %s", self.game.name, why)

    def _consider(self, now: float) -> None:
        """Publishes when the newest policy is clearly better, or when it is time and it is not clearly worse."""
        s, policy = self.settings, self.learner.policy()
        due = now - self.published_at >= s.publish_every
        if self.simulated:
            self._evaluate(policy, now)
        if now < self.hold_until:
            return
        if not self.simulated:
            if due:
                self._look()
                self._publish(policy, now)
            return
        assert self.evaluation is not None
        self._look()
        before = self.published.metrics.get(RETURN) if self.published else None
        if (
            before is None
            or self.evaluation > before + (s.improvement - 1) * abs(before)
            or (due and self.evaluation >= before - (1 - s.tolerance) * abs(before))
        ):
            self._publish(policy, now)

    def _evaluate(self, policy: Policy, now: float) -> None:
        s = self.settings
        try:
            with limited(EVALUATION_LIMIT):
                played = play(policy, s.evaluation_episodes, seed=self.learner.updates)
        except Interrupted:
            raise
        except TooLong:
            return self._without_simulator(
                f"{s.evaluation_episodes} episodes of {self.game.env} take longer than {EVALUATION_LIMIT:g} s"
            )
        except BaseException as error:  # whatever a game raises, its own SystemExit included
            log.exception("%s: its simulator failed", self.game.name)
            return self._without_simulator(f"{self.game.env} failed: {_line(error)}")
        self.evaluation = float(summary(played)[RETURN])
        # Looking must not cost more than a fifth of the time, however slow the game is.
        self.next_evaluation = now + max(s.evaluate_every, 4 * (time.monotonic() - now))
        self.considered = self.learner.updates
        self._note()

    def _look(self) -> None:
        if not self.looked:
            self.published, self.looked = self.registry.latest(self.game.name, DEFAULT_MODEL), True

    def _publish_later(self, error: RegistryError) -> None:
        """The registry is away. The version that is there stays the newest; learning goes on."""
        first, most = PUBLISH_AGAIN
        self.hold = min(max(first, self.hold * 2), most)
        self.hold_until = time.monotonic() + self.hold
        self.trouble = f", but cannot publish: {error}"
        log.warning("%s: %s; trying again in %d s", self.game.name, error, self.hold)

    def _publish(self, policy: Policy, now: float) -> None:
        learner = self.learner
        metrics = {name: value for name, value in learner.metrics.items() if math.isfinite(value)}
        metrics |= {"updates": float(learner.updates), "steps": float(learner.steps)}
        if self.evaluation is not None:
            metrics[RETURN] = self.evaluation
        self.published = self.registry.publish(
            policy,
            model=DEFAULT_MODEL,
            algorithm=self.algorithm,
            metrics=metrics,
            config={
                name: value if isinstance(value, str | int | float) else msgspec.json.encode(value).decode()
                for name, value in msgspec.structs.asdict(self.hyperparameters).items()
            },
            parent=self.published.version if self.published else None,
            data=DataSpan(0, self.cursor, learner.fragments, learner.steps),
        )
        if self.store.registration(self.game.name) != self.registration:
            # Deleted meanwhile: who deleted it may have looked into the registry before this version was there.
            self.registry.delete_game(self.game.name)
            raise Replaced
        self.published_at, self.considered = now, learner.updates
        self.trouble, self.hold = "", 0.0
        log.info("%s: published version %s", self.game.name, self.published.version)

    # What it says

    def _note(self) -> None:
        row = {
            "time": time.time(),
            "steps": self.learner.steps,
            "updates": self.learner.updates,
            RETURN: self.evaluation,
            "exploration": self.learner.exploration,
            **self.learner.metrics,
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
        now, learner = time.monotonic(), self.learner
        since, updates = self._rate_from
        self.rate, self._rate_from = (learner.updates - updates) / max(now - since, 1e-3), (now, learner.updates)
        told = f"; {self.notice}" if self.notice and time.time() - self.noticed < NOTICE else ""
        return TrainerStatus(
            game=self.game.name,
            algorithm=self.algorithm,
            state=state + self.trouble + self.unsaved + self.unsimulated + told,
            updates=learner.updates,
            updates_per_s=self.rate,
            steps=learner.steps,
            lag=self._lag(),
            window=learner.window,
            window_bytes=learner.window_bytes,
            loss=next((value for name, value in learner.metrics.items() if name.startswith("loss/")), None),
            exploration=learner.exploration,
            evaluation=self.evaluation,
            updated=time.time(),
        )

    def write_status(self, state: str) -> None:
        write_status(self.directory, self.status(state))


def write_status(directory: Path, status: TrainerStatus) -> None:
    """A disk that is full keeps the old status, and nothing else from working."""
    try:
        write_whole(directory / "status.json", msgspec.json.encode(status), parents=True)
    except OSError as error:
        log.warning("%s: cannot write its status: %s", status.game, error)


def _same_form(ours: Space, theirs: Space) -> bool:
    """Equal but for the bounds of numbers, which simulators do not keep to (see `games.catalog`)."""
    if isinstance(ours, Dict) and isinstance(theirs, Dict):
        return ours.fields.keys() == theirs.fields.keys() and all(
            _same_form(ours.fields[name], theirs.fields[name]) for name in ours.fields
        )
    return ours.element == theirs.element if isinstance(ours, Box) and isinstance(theirs, Box) else ours == theirs


def _line(error: BaseException) -> str:
    """The last line of what it says, and what it is."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[-1][:200] if lines else ''}"
