"""A/B tests as a client follows them: which model each of its players gets."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from sparring.client.bot import BotPolicy
from sparring.client.bots import MAX_DELAY, Newest, PublishedBots
from sparring.client.notices import attempt, describe
from sparring.client.transports.base import Unavailable
from sparring.errors import InputError
from sparring.files import write_whole
from sparring.registry.ab import AbTest, AbTests
from sparring.registry.manifest import DEFAULT_MODEL

__all__ = ["Assigned", "Assignments"]


class Assigned:
    """What one player gets: an `Offer` that goes over to another model when an A/B test begins or ends."""

    def __init__(self, newest: Newest) -> None:
        self.newest = newest

    @property
    def policy(self) -> BotPolicy:
        return self.newest.policy

    @property
    def candidate(self) -> BotPolicy | None:
        return self.newest.candidate

    @property
    def share(self) -> float:
        return self.newest.share

    def choose(self, rng: np.random.Generator) -> BotPolicy:
        return self.newest.choose(rng)


class Assignments:
    """Follows a game's A/B tests. While the server is away, the test that was known last goes on, also after a
    restart: players keep their model."""

    def __init__(self, models: PublishedBots, every: float, newest: Callable[[str], Newest]) -> None:
        self._models, self._every, self._newest = models, every, newest
        self._lock = threading.Lock()
        self._assigned: dict[str, Assigned] = {}  # by player
        self._etag: str | None = None
        self._failures = 0
        self.due = 0.0  # when to look again
        self._test = self._remembered()
        self.refresh()

    def of(self, player: str) -> Assigned:
        """What a player gets. Waits for the download."""
        with self._lock:
            if player not in self._assigned:
                self._assigned[player] = Assigned(self._model_of(player) or self._newest(DEFAULT_MODEL))
            return self._assigned[player]

    def refresh(self) -> None:
        """Never raises: what is wrong is logged once, and tried again later."""
        error = attempt(self._look)
        self._failures = 0 if error is None else self._failures + 1
        if error is not None:
            why = str(error) if isinstance(error, Unavailable | InputError) else describe(error)
            self._models.notices.warn(f"no news of A/B tests for now: {why}")
        with self._lock:
            for player, assigned in self._assigned.items():
                assigned.newest = self._model_of(player) or assigned.newest
        self.due = time.monotonic() + min(MAX_DELAY, self._every * 2 ** min(self._failures, 10))

    def _model_of(self, player: str) -> Newest | None:
        """None: that model has no version here that can play; it is looked for again."""
        model = DEFAULT_MODEL if self._test is None else self._test.model(player)
        newest = self._newest(model)
        return newest if newest.policy.version or model == DEFAULT_MODEL else None

    def _look(self) -> None:
        source = self._models.source
        if not hasattr(source, "ab"):  # one from outside may not have it
            return
        found = source.ab(self._models.game.name, self._etag)
        if found is None:
            return
        tests, self._etag = found
        if tests.running != self._test:
            self._test = tests.running
            self._remember(tests)

    @property
    def _path(self) -> Path:
        return self._models.directory.parent / "ab.json"

    def _remember(self, tests: AbTests) -> None:
        try:
            write_whole(self._path, msgspec.json.encode(AbTests(tests.running)), parents=True, shared=True)
        except OSError as error:
            self._models.notices.warn(f"cannot write {self._path}: {error}")

    def _remembered(self) -> AbTest | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=AbTests).running
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._models.notices.warn(f"{self._path} is of no use: {error}")
            return None
