"""The trainer of the platform: tails the store, learns each game that is played, and publishes better versions.

Its own process (`python -m sparring.trainer.process --data DIR`), so that learning and taking uploads in never wait for
each other. It can be killed at any time: it goes on from its last checkpoint and the store's fragments.

Games share its time fairly, and nothing that one of them raises reaches the others.
"""

import argparse
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparring.api import TrainerStatus
from sparring.errors import SparringError
from sparring.games import Game
from sparring.heartbeat import Heartbeat
from sparring.registry.registry import Registry
from sparring.runs import checkpoint
from sparring.store import Store, StoreAway, is_file, open_store
from sparring.store.family import Family
from sparring.store.lineage import Lineage
from sparring.store.profile import Origin, Profile
from sparring.trainer.costs import Costs, open_sampler
from sparring.trainer.game_trainer import GameTrainer, Replaced, Settings, algorithm_name, write_status
from sparring.trainer.interrupt import StopRequested, catch_signals, stopping, wait
from sparring.trainer.settings import for_game, learned_alike
from sparring.training.xla import use_compilation_cache

__all__ = ["Roster", "main", "run"]

log = logging.getLogger("sparring.trainer")

POLL = 0.05  # seconds until a game that had nothing to do is asked again
LIST_EVERY = 1.0  # seconds between looks at which games there are, and which of them are paused
LOOK_EVERY = 1.0  # seconds between looks whether a game without a learner is played
STATUS_EVERY = 5.0  # seconds between signs of life of such a game
RETRY_AFTER = 30.0, 900.0  # seconds until a game that failed is tried again: at first, and at most
UNLOAD_AFTER = 600.0  # seconds without play until a game's learner makes room
LEAD = 1.0  # seconds of the trainer's time that a game which was idle has ahead of the others
WAITING = "waiting for play"
# Seconds until a game is tried again in whose turn the trainer hung, while all others waited: at first, and later.
HUNG_RETRY = 900.0, 6 * 3600.0
LEAST_WINDOW = 16 << 20  # bytes of a game's replay window, however many games there are
DEATHS = 3  # of the trainer in a row, all in one game's turn, after which that game has to wait
SURVIVED = 60.0  # seconds after which a game's turn did not kill the trainer
AWAY = 1.0  # seconds until a store that is away is asked again


def memory() -> int:
    """Bytes of this machine, or of the container that we are in."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit: "max"
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most


class RosterPlace:
    """A game on the roster."""

    def __init__(self, game: Game, directory: Path, settings: Settings, play: Lineage) -> None:
        self.game, self.directory, self.settings, self.play = game, directory, settings, play
        self.origin: Origin | None = None
        self.trainer: GameTrainer | None = None
        self.proven = checkpoint.exists(directory / "checkpoint")  # it had a learner before
        self.paused = False
        self.used = 0.0  # seconds of the trainer's time, by which turns are shared out
        self.due = 0.0  # when it may have its next turn
        self.busy_at = 0.0  # when it last had something to do
        self.seen = 0  # fragments that the store had when its learner made room: without others it needs none
        self.failures, self.retry = 0, 0.0  # in a row, and the seconds until it is tried again
        self.failed_at = self.loaded_at = 0.0
        self.deaths = 0  # of the trainer, in this game's turns
        self.status: TrainerStatus | None = None
        self.reported_at = 0.0


class Roster:
    """All games of a store, and whose turn it is."""

    def __init__(
        self,
        data: Path,
        store: Store,
        registry: Registry,
        settings: Settings,
        address: str,
        hung: bool = False,
        costs: Costs | None = None,
    ) -> None:
        """`hung`: the trainer before this one was killed because it gave no sign of life."""
        self.costs = costs or Costs()
        self.data, self.store, self.registry, self.settings, self.address = data, store, registry, settings, address
        self.hung = hung
        self.places: dict[str, RosterPlace] = {}
        self.next_list, self.unlisted = 0.0, ""  # when to look which games there are; why that failed
        self.marker, self.marked = data / "trainer.turn", ""  # whose turn it is, should the trainer die in it
        self.died = self._last_death()
        self.clock = 0.0  # `used` of whoever had the last turn
        self.memory = memory() // 2  # bytes of all replay windows together
        self.loading = 0.0  # `used` of all games that have no learner yet: together they get one game's share

    def step(self) -> None:
        """One game's turn, or a short rest when no game has anything to do."""
        now = time.monotonic()
        try:
            if now >= self.next_list:
                self._list()
                self.next_list = now + LIST_EVERY
            place = self._choose(now)
            if place is None:
                wait(POLL)
            elif place.trainer is None:
                self._meet(place)
                self.loading = max(self.loading, self.clock - LEAD) + time.monotonic() - now
            else:
                place.used = self.clock = max(place.used, self.clock - LEAD)
                self._turn(place)
                place.used += time.monotonic() - now
        except StoreAway as error:  # it comes back; what was learned stays
            log.warning("%s", error)
            wait(AWAY)

    def stop(self) -> None:
        """The last checkpoints. One that fails does not keep the others from theirs."""
        for place in self.places.values():
            if place.trainer is not None:
                self._unload(place, "stopped")
        self.marker.unlink(missing_ok=True)

    # Turns that end the process: no memory left, a simulator's crash

    def _last_death(self) -> tuple[str, int]:
        """In whose turn the trainer before this one died, and how many before it did. That may have been
        anybody's kill, so a game has to do it a few times in a row."""
        with contextlib.suppress(OSError, ValueError):
            deaths, game = self.marker.read_text().split(" ", 1)
            return game, int(deaths) + 1
        return "", 0

    def _mark(self, place: RosterPlace) -> None:
        words = f"{place.deaths} {place.game.name}"
        if words == self.marked:
            return
        try:
            self.marker.write_text(words)
            self.marked = words
        except OSError as error:
            log.warning("cannot write %s: %s", self.marker, error)

    def _remember_death(self, place: RosterPlace) -> None:
        game, deaths = self.died
        if game != place.game.name:
            return
        place.deaths = deaths
        if self.hung:  # the store may have been at fault, or the machine: not the second time
            retry = HUNG_RETRY[deaths > 1]
            self._fail(place, SparringError("the trainer hung in this game's turn until it was killed"), retry)
        elif deaths >= DEATHS:
            place.failures = deaths - DEATHS
            self._fail(place, SparringError(f"the trainer died {deaths} times in a row in this game's turn"))

    # Which games there are

    def _list(self) -> None:
        try:
            games, paused = {game.name: game for game in self.store.games()}, self.store.paused()
            profiles = self.store.profiles()
            unreadable = self.store.unreadable()
        except StoreAway:
            raise
        except SparringError as error:  # those that are known go on
            if str(error) != self.unlisted:
                log.error("cannot list the games: %s", error)
            self.unlisted = str(error)
            return
        self.unlisted = ""
        family = Family(games.values(), profiles)
        for name in self.places.keys() - games.keys():
            if name in unreadable:  # not deleted: what was learned stays
                self._set_aside(self.places[name], unreadable[name])
            else:
                self._remove(self.places.pop(name), "deleted")
        for name, game in games.items():
            place = self.places.get(name)
            profile = profiles.get(name, Profile())
            settings = for_game(self.settings, profile.settings)
            if place is not None and place.game.schema != game.schema:  # deleted, and declared anew
                self._remove(self.places.pop(name), "deleted")
                place = None
            if place is None:
                play = Lineage(self.store, game, family, profiles)
                place = self.places[name] = RosterPlace(game, self.data / "trainer" / name, settings, play)
                place.origin = profile.origin
                place.used = self.clock
                self._remember_death(place)
            elif (place.game, place.settings, place.origin) != (game, settings, profile.origin):
                place.play, place.origin = Lineage(self.store, game, family, profiles), profile.origin
                self._revise(place, game, settings)
            archived = profile.archived
            self._pause(place, name in paused or archived, "archived" if archived else "paused")

    def _remove(self, place: RosterPlace, why: str) -> None:
        place.trainer = None
        shutil.rmtree(place.directory, ignore_errors=True)
        if place.directory.exists():
            log.error("%s was %s, but %s cannot be removed: remove it", place.game.name, why, place.directory)
        else:
            log.info("%s was %s: what was learned of it is removed", place.game.name, why)

    def _revise(self, place: RosterPlace, game: Game, settings: Settings) -> None:
        """Somebody changed the game's settings or declaration. A learner that need not change goes on, another one
        makes room for its successor, which goes on from its checkpoint as far as that fits."""
        trainer = place.trainer
        if trainer is not None and place.game == game and learned_alike(place.settings, settings):
            trainer.apply(settings)
        elif trainer is not None:
            self._unload(place, "settings changed")
            if place.trainer is not None:  # it cannot be saved now: with the next look
                return
        place.game, place.settings = game, settings
        place.due, place.seen, place.failures, place.status = 0.0, 0, 0, None
        log.info("%s: its settings changed", game.name)

    def _set_aside(self, place: RosterPlace, why: str) -> None:
        """A game whose declaration cannot be read any more: no turns until it can."""
        state = f"failed: {why}"
        if place.trainer is not None:
            self._unload(place, state)
        place.paused = True
        self._tell(place, state)

    def _pause(self, place: RosterPlace, paused: bool, word: str) -> None:
        if paused and place.trainer is not None:
            self._unload(place, word)
        if paused and not place.paused:
            log.info("%s: %s", place.game.name, word)
        if place.paused and not paused:
            place.due = place.seen = 0
            log.info("%s: resumed", place.game.name)
        place.paused = paused
        if paused:
            self._tell(place, word)

    # Turns

    def _choose(self, now: float) -> RosterPlace | None:
        """Of those that are due, who had the least of the trainer's time."""
        due = [p for p in self.places.values() if not p.paused and p.due <= now]
        ready = min((p for p in due if p.trainer is not None), key=lambda p: p.used, default=None)
        new = min((p for p in due if p.trainer is None), key=lambda p: (not p.proven, p.due), default=None)
        if ready is None or new is None:
            return ready or new
        return new if self.loading <= ready.used else ready

    def _meet(self, place: RosterPlace) -> None:
        """A game without a learner gets one if it is played: a learner takes memory, and seconds to compile."""
        try:
            fragments = place.play.count()
            place.due = time.monotonic() + LOOK_EVERY
            if fragments == place.seen:
                self._tell(place, WAITING)
                return
            self._mark(place)
            settings = self._within_memory(place.settings)
            place.trainer = GameTrainer(
                self.store, self.registry, place.directory, place.game, settings, self._discard, place.play, self.costs
            )
        except (StoreAway, StopRequested):
            raise
        except BaseException as error:  # noqa: BLE001 - as below
            self._fail(place, error)
            return
        place.used, place.due, place.busy_at = self.clock, 0.0, time.monotonic()
        place.loaded_at = place.busy_at

    def _within_memory(self, settings: Settings) -> Settings:
        """A game that comes late gets what the others' windows leave: anybody may declare games of images."""
        taken = sum(p.trainer.learner.window_limit for p in self.places.values() if p.trainer is not None)
        room = max(self.memory - taken, LEAST_WINDOW)
        return msgspec.structs.replace(settings, window_bytes=min(settings.window_bytes, room))

    def _turn(self, place: RosterPlace) -> None:
        assert place.trainer is not None
        self._mark(place)
        try:
            busy = place.trainer.turn()
        except (StoreAway, StopRequested):
            raise
        except Replaced:
            self._remove(self.places.pop(place.game.name), "deleted")  # the next listing has the new one
            return
        except BaseException as error:  # noqa: BLE001
            # Anything at all: AssertionErrors of simulators, a game's own SystemExit, no memory. Signals only set a
            # flag (see `interrupt`), so nothing caught here means that the trainer should end.
            self._fail(place, error)
            return
        now = time.monotonic()
        if busy:
            place.busy_at, place.due = now, now
        else:
            place.due = now + POLL
            if now - place.busy_at > UNLOAD_AFTER:
                self._unload(place, WAITING)
        if now - place.loaded_at > SURVIVED:
            place.deaths = 0
        if place.failures and now - place.failed_at > 2 * place.retry:
            place.failures = 0

    def _fail(self, place: RosterPlace, error: BaseException, retry: float | None = None) -> None:
        """It is shown, logged, and tried again from its last checkpoint, each time later or after `retry` seconds."""
        place.trainer = None
        first, most = RETRY_AFTER
        place.retry = min(first * 2**place.failures, most) if retry is None else retry
        place.failures += 1
        place.failed_at = time.monotonic()
        place.due, place.seen = place.failed_at + place.retry, 0
        ours = isinstance(error, SparringError)  # then it says all there is to say
        why = str(error) if ours else f"{type(error).__name__}: {error}"
        log.error(
            "%s: failed, trying again in %d s: %s", place.game.name, place.retry, why, exc_info=None if ours else error
        )
        place.status = None
        self._tell(place, f"failed: {why}")

    def _unload(self, place: RosterPlace, state: str) -> None:
        """Saved, and out of memory; what cannot be saved stays in memory, and is tried again."""
        trainer = place.trainer
        assert trainer is not None
        place.reported_at = 0.0
        try:
            trainer.checkpoint()
        except Exception as error:  # this game's alone
            log.exception("%s: its checkpoint failed", place.game.name)
            place.busy_at = time.monotonic()
            self._tell(place, f"{state}, but cannot save its checkpoint: {error}")
            return
        place.trainer, place.proven = None, True
        try:
            place.status = trainer.status(state)
            place.seen = place.play.count() if state == WAITING else 0
        except StoreAway:  # then with the figures of before
            pass
        except Exception:  # this game's alone
            log.exception("%s: its figures cannot be told", place.game.name)
        self._tell(place, state)

    def _tell(self, place: RosterPlace, state: str) -> None:
        """What a game without a learner has to say: its last figures, and its state."""
        now = time.monotonic()
        known = place.status
        if known is not None and known.state == state and now - place.reported_at < STATUS_EVERY:
            return
        if known is None:
            known = TrainerStatus(place.game.name, algorithm_name(place.game, place.settings), state)
        place.status = msgspec.structs.replace(known, state=state, updates_per_s=0.0, updated=time.time())
        place.reported_at = now
        write_status(place.directory, place.status)

    def _discard(self, game: str, ids: Sequence[str], reason: str) -> int:
        """The trainer only reads its store, but for this."""
        writer = open_store(self.address)
        try:
            return writer.discard(game, ids, reason)
        finally:
            writer.close()


def run(
    data: Path,
    settings: Settings,
    parent: int | None = None,
    address: str | None = None,
    registry: str | None = None,
    heartbeat: Heartbeat | None = None,
    hung: bool = False,
) -> None:
    """Trains every game of the store until SIGTERM or SIGINT, or until the process `parent` is gone. `address` and
    `registry`: of another store and registry than the directory's own. `heartbeat`: for who watches us. `hung`: see
    `Roster`."""
    heartbeat = heartbeat or Heartbeat(None)

    def over() -> bool:
        return stopping() or (parent is not None and os.getppid() != parent)

    address = address or str(data / "store.db")
    while is_file(address) and not Path(address).exists():  # the gateway creates a store that is a file
        if over():
            return
        heartbeat.beat()
        wait(POLL)
    with contextlib.closing(open_store(address, readonly=True)) as store, open_sampler() as sampler:
        models = Registry(registry or data / "registry")
        roster = Roster(data, store, models, settings, address, hung, Costs(sampler))
        try:
            while not over():
                heartbeat.beat()
                roster.step()
        except StopRequested:  # out of an evaluation, whose game's state is as it was before
            pass
        finally:
            log.info("stopping")
            roster.stop()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--store", help="another store than the directory's")
    parser.add_argument("--parent", type=int, help="exit when this process, which started us, is gone")
    parser.add_argument("--settings", default="{}", help="Settings as JSON")
    parser.add_argument("--registry", help="where to publish; default: DATA/registry")
    parser.add_argument("--beat", type=int, help="a pipe's number, for signs of life")
    parser.add_argument("--hung", action="store_true", help="the trainer before this one hung, and was killed")
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    use_compilation_cache(args.data / "cache" / "jax")
    catch_signals()
    settings = msgspec.json.decode(args.settings, type=Settings)
    run(args.data, settings, args.parent, args.store, args.registry, Heartbeat(args.beat), args.hung)


if __name__ == "__main__":
    main()
