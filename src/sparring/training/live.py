"""The trainer of the platform: tails the store, learns each game that is played, and publishes better versions.

Its own process (`python -m sparring.training.live --data DIR`), so that learning and taking uploads in never wait for
each other. It can be killed at any time: it goes on from its last checkpoint and the store's fragments.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import msgspec

from sparring import algorithms
from sparring.api import TrainerStatus
from sparring.errors import InputError, SparringError
from sparring.games import Game
from sparring.networks.policy import Policy
from sparring.registry.manifest import DEFAULT_MODEL, DataSpan, Manifest
from sparring.registry.registry import Registry, RegistryError
from sparring.store import Store, StoreAway, open_store
from sparring.training import checkpoint
from sparring.training.evaluate import play, summary
from sparring.training.learner import create
from sparring.training.xla import use_threads

__all__ = ["GameTrainer", "Settings", "main", "run"]

log = logging.getLogger("sparring.trainer")

TURN = 0.25  # seconds of learning before looking at the store again
RETRY_AFTER = 30.0
PUBLISH_AGAIN = 5.0, 300.0  # seconds until a publication that failed is tried again: at first, and at most
STATUS_AFTER = 5.0  # seconds without an update until the trainer says that it waits
RETURN = "evaluation/return_mean"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    algorithm: str | None = None  # none: the default for the game's actions
    hyperparameters: dict[str, Any] = {}
    publish_every: float = 10.0  # seconds between versions while the new one is about as good or better
    evaluate_every: float = 2.0  # seconds between looks at how good the newest policy is, for games we can simulate
    evaluation_episodes: int = 10
    improvement: float = 1.05  # a policy this much better than the published one is published at once
    tolerance: float = 0.9  # one worse than this is held back
    checkpoint_every: float = 10.0
    seed: int = 0


class GameTrainer:
    """One game: its learner, its place in the store, its versions."""

    def __init__(self, store: Store, registry: Registry, directory: Path, game: Game, settings: Settings) -> None:
        self.store, self.registry, self.directory, self.game, self.settings = store, registry, directory, game, settings
        directory.mkdir(parents=True, exist_ok=True)
        name = settings.algorithm or algorithms.default_for(game)
        if name is None:
            raise InputError(f"no algorithm learns {type(game.action).__name__} actions yet")
        algorithm = algorithms.create(name, game, settings.hyperparameters)
        use_threads(algorithm)
        self.learner = create(algorithm, settings.seed)
        # Anybody can register a game, and "module:id" makes Gymnasium import that module: never for a client.
        self.simulated = game.env is not None and ":" not in game.env
        self.cursor = 0
        self.evaluation: float | None = None
        self.published: Manifest | None = None
        self.looked = False  # whether the registry was asked for it
        self.trouble, self.hold, self.hold_until = "", 0.0, 0.0  # with the registry
        self.considered = 0  # updates when the policy was last looked at
        now = time.monotonic()
        self.next_checkpoint, self.next_evaluation = now + settings.checkpoint_every, now
        self.published_at = now - settings.publish_every
        self.learned_at = now - STATUS_AFTER
        self.next_status, self.rate, self._rate_from = now, 0.0, (now, 0)
        self._restore()

    def _restore(self) -> None:
        path = self.directory / "checkpoint"
        if not checkpoint.exists(path):
            return
        arrays, meta = checkpoint.load(path)
        if (meta["algorithm"], meta["schema"]) != (self.learner.algorithm.name, self.game.schema):
            raise InputError(
                f"{path} belongs to {meta['algorithm']} on schema {meta['schema']}, now it is "
                f"{self.learner.algorithm.name} on {self.game.schema}: move the directory away to start afresh"
            )
        self.learner.restore(arrays, meta)
        self.cursor = meta["cursor"]
        self.considered = meta["considered"]
        for before, fragments in self._between(meta["window_start"], self.cursor):
            self.learner.refill(fragments, before)
        log.info("%s: going on at %s updates, %s steps", self.game.name, self.learner.updates, self.learner.steps)

    def _between(self, after: int, last: int) -> Iterator[tuple[int, Any]]:
        while after < last:
            tail = self.store.tail(self.game.name, after, 1000)
            if not tail.fragments:
                return
            yield after, tail.fragments
            after = tail.cursor

    def turn(self) -> bool:
        """A short piece of work; whether there was any."""
        tail = self.store.tail(self.game.name, self.cursor, 2000)
        if tail.fragments:
            self.learner.take(tail.fragments, self.cursor)
            self.cursor = tail.cursor
        made = self.learner.learn(TURN)
        now = time.monotonic()
        if made:
            self.learned_at = now
        if self.learner.updates > self.considered and now >= self.next_evaluation:
            try:
                self._consider(now)
            except RegistryError as error:
                self._publish_later(error)
        if now >= self.next_checkpoint and (made or tail.fragments):
            self.checkpoint()
            self.next_checkpoint = now + self.settings.checkpoint_every
        if now >= self.next_status:
            self.write_status(
                ("training" if now - self.learned_at < STATUS_AFTER else "waiting for play") + self.trouble
            )
            self.next_status = now + 1.0
        return bool(made or tail.fragments)

    def _consider(self, now: float) -> None:
        """Publishes when the newest policy is clearly better, or when it is time and it is not clearly worse."""
        s, policy = self.settings, self.learner.policy()
        due = now - self.published_at >= s.publish_every
        if not self.simulated:
            if due and now >= self.hold_until:
                self._look()
                self._publish(policy, now)
            return
        self.evaluation = float(summary(play(policy, s.evaluation_episodes, seed=self.learner.updates))[RETURN])
        # Looking must not cost more than a fifth of the time, however slow the game is.
        self.next_evaluation = now + max(s.evaluate_every, 4 * (time.monotonic() - now))
        self.considered = self.learner.updates
        self._note()
        if now < self.hold_until:
            return
        self._look()
        before = self.published.metrics.get(RETURN) if self.published else None
        if (
            before is None
            or self.evaluation > before + (s.improvement - 1) * abs(before)
            or (due and self.evaluation >= before - (1 - s.tolerance) * abs(before))
        ):
            self._publish(policy, now)

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
        metrics = {**learner.metrics, "updates": float(learner.updates), "steps": float(learner.steps)}
        if self.evaluation is not None:
            metrics[RETURN] = self.evaluation
        self.published = self.registry.publish(
            policy,
            model=DEFAULT_MODEL,
            algorithm=learner.algorithm.name,
            metrics=metrics,
            config={
                name: value if isinstance(value, str | int | float) else msgspec.json.encode(value).decode()
                for name, value in msgspec.structs.asdict(learner.config).items()
            },
            parent=self.published.version if self.published else None,
            data=DataSpan(0, self.cursor, learner.fragments, learner.steps),
        )
        self.published_at, self.considered = now, learner.updates
        self.trouble, self.hold = "", 0.0
        log.info("%s: published version %s", self.game.name, self.published.version)

    def checkpoint(self) -> None:
        arrays, meta = self.learner.save()
        meta |= {"cursor": self.cursor, "considered": self.considered}
        checkpoint.save(self.directory / "checkpoint", arrays, meta)

    def _note(self) -> None:
        row = {
            "time": time.time(),
            "steps": self.learner.steps,
            "updates": self.learner.updates,
            RETURN: self.evaluation,
            "exploration": self.learner.exploration,
            **self.learner.metrics,
        }
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def write_status(self, state: str) -> None:
        now, learner = time.monotonic(), self.learner
        since, updates = self._rate_from
        self.rate, self._rate_from = (learner.updates - updates) / max(now - since, 1e-3), (now, learner.updates)
        status = TrainerStatus(
            game=self.game.name,
            algorithm=learner.algorithm.name,
            state=state,
            updates=learner.updates,
            updates_per_s=self.rate,
            steps=learner.steps,
            lag=max(self.store.stats(self.game.name).fragments - learner.fragments, 0),
            window=learner.window,
            loss=next((value for name, value in learner.metrics.items() if name.startswith("loss/")), None),
            exploration=learner.exploration,
            evaluation=self.evaluation,
            updated=time.time(),
        )
        write_status(self.directory, status)


def write_status(directory: Path, status: TrainerStatus) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / "status.json.new"
    new.write_bytes(msgspec.json.encode(status))
    new.replace(directory / "status.json")


class _Stop(Exception):
    pass


def run(
    data: Path,
    settings: Settings,
    parent: int | None = None,
    address: str | None = None,
    registry: str | None = None,
) -> None:
    """Trains every game of the store until SIGTERM or SIGINT, or until the process `parent` is gone. `address` and
    `registry`: of another store and registry than the directory's own."""
    store, published = _open(address or str(data / "store.db"), parent), Registry(registry or data / "registry")
    trainers: dict[str, GameTrainer] = {}
    failed: dict[str, float] = {}  # game → when to try again
    try:
        while parent is None or os.getppid() == parent:
            busy = False
            for game in _games(store):
                if time.monotonic() < failed.get(game.name, 0.0):
                    continue
                directory = data / "trainer" / game.name
                try:
                    if game.name not in trainers:
                        trainers[game.name] = GameTrainer(store, published, directory, game, settings)
                    busy |= trainers[game.name].turn()
                except StoreAway as error:  # it comes back; what was learned stays
                    log.warning("%s: %s", game.name, error)
                    time.sleep(1.0)
                except (SparringError, ValueError, ArithmeticError, OSError, RuntimeError) as error:
                    # One game's trouble must not stop the others: it is shown, logged, and tried again.
                    log.exception("%s: training failed", game.name)
                    trainers.pop(game.name, None)
                    failed[game.name] = time.monotonic() + RETRY_AFTER
                    name = settings.algorithm or algorithms.default_for(game) or "none"
                    write_status(directory, TrainerStatus(game.name, name, f"failed: {error}", updated=time.time()))
            if not busy:
                time.sleep(0.05)
    except _Stop:
        log.info("stopping")
    finally:
        for trainer in trainers.values():
            trainer.checkpoint()
            with contextlib.suppress(StoreAway):
                trainer.write_status("stopped")
        store.close()


def _open(address: str, parent: int | None) -> Store:
    """The gateway creates a store that is a file: wait for it."""
    while "://" not in address and not Path(address).exists():
        if parent is not None and os.getppid() != parent:
            raise _Stop
        time.sleep(0.05)
    return open_store(address, readonly=True)


def _games(store: Store) -> list[Game]:
    try:
        return store.games()
    except StoreAway as error:
        log.warning("%s", error)
        time.sleep(1.0)
        return []


def _stop(signum: int, frame: FrameType | None) -> None:
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, signal.SIG_IGN)  # once is enough: the checkpoint must not be interrupted
    raise _Stop


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--store", help="another store than the directory's")
    parser.add_argument("--parent", type=int, help="exit when this process, which started us, is gone")
    parser.add_argument("--settings", default="{}", help="Settings as JSON")
    parser.add_argument("--registry", help="where to publish; default: DATA/registry")
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    jax.config.update("jax_compilation_cache_dir", str(args.data / "cache" / "jax"))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # type: ignore[no-untyped-call]  # JAX's
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, _stop)
    with contextlib.suppress(_Stop):
        run(args.data, msgspec.json.decode(args.settings, type=Settings), args.parent, args.store, args.registry)


if __name__ == "__main__":
    main()
