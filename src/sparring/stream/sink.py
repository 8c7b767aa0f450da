"""Where a task of the ingest job puts what it read: decoded, checked as the gateway does, appended to the store."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pyarrow as pa

from sparring.errors import InputError
from sparring.experience import Fragment, validate
from sparring.games import Game
from sparring.store.declarations import DeclarationTooLarge, NoRoom, Room
from sparring.store.family import Family
from sparring.store.protocol import FragmentRefused, GameUnreadable, Outcome, Quarantined, Store, StoreAway, StoreBusy
from sparring.stream import record
from sparring.stream.source import CLOSED, Mark

__all__ = ["ShardResult", "StoreSink"]

CHUNK = 16 << 20  # bytes of fragments appended at once
PATIENCE = 120.0  # seconds with a store that is busy or away, until the task fails
PENDING = 2  # chunks that wait while one is written
MAX_TEXT = 300
NEWEST = 200  # refused fragments of a task that are noted one by one
log = logging.getLogger("sparring.ingest")


class ShardResult(msgspec.Struct):
    """What became of a shard's part of a batch."""

    batch: int = 0
    shard: str = ""
    after: str | None = None  # the sequence number up to which everything is stored; none: there was nothing to read
    lag: float = 0.0
    records: int = 0
    bytes: int = 0
    fragments: int = 0
    steps: int = 0
    duplicates: int = 0
    rejected: int = 0
    refused: dict[str, int] = {}  # the same, per game
    newest: list[Quarantined] = []  # of them, for the quarantine


class StoreSink:
    """One task's records into the store. Nothing is lost when it dies half-way: all of it comes again."""

    def __init__(self, store: Store, games: dict[str, Game]) -> None:
        self._into, self._games = store, games
        self._room = Room(games.values(), len(store.unreadable()))
        self._family = Family(games.values(), store.profiles())
        self._unregistered: dict[str, str] = {}  # games of these records that the store does not take, and why
        self._writer = ThreadPoolExecutor(1, "append")  # decoding goes on meanwhile; one, so that order is kept
        self._pending: deque[Future[list[Outcome | FragmentRefused]]] = deque()
        self._sent: deque[list[Fragment]] = deque()
        self.result = ShardResult()

    def take(self, rows: pa.RecordBatch) -> None:
        fragments: dict[tuple[str, str], list[Fragment]] = {}  # by game and schema
        arrived = 0.0
        for data, sequence, arrival, mark in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            if mark is not None:
                self._read_to(msgspec.json.decode(mark, type=Mark))
                continue
            self.result.after, arrived = sequence, max(arrived, arrival)
            self.result.records += 1
            self.result.bytes += len(data)
            try:
                games, found = record.decode(data)
            except InputError as error:
                self._reject("", "", f"record {sequence}", str(error))
                continue
            for f in found:
                fragments.setdefault((f.game, f.schema), []).append(f)
            for name in games.keys() - self._unregistered.keys():
                if self._family.find(name) is None and self._family.find(name, games[name].schema) is None:
                    self._register(games[name])
        for (name, _), some in fragments.items():
            self._check(name, some, arrived)

    def finish(self) -> ShardResult:
        """Everything is in the store when it returns."""
        while self._pending:
            self._written()
        self._writer.shutdown()
        return self.result

    def _read_to(self, mark: Mark) -> None:
        self.result.batch, self.result.shard, self.result.lag = mark.batch, mark.shard, mark.lag
        if mark.closed:
            self.result.after = CLOSED

    def _register(self, game: Game) -> None:
        """Within the same limits as at the gateway: whoever can write to the stream can declare games. Tasks that run
        side by side may each register one more."""
        try:
            self._room.require(game)
            self._into.register(game)
        except (DeclarationTooLarge, NoRoom, GameUnreadable) as error:
            self._unregistered[game.name] = str(error)
            if len(self._unregistered) == 1:  # the quarantine has the others
                log.warning("the game %r is not registered: %s", game.name, error)
            return
        except InputError as error:  # known with other spaces: the check will say so of each fragment
            log.warning("%s", error)
        self._games.update({known.name: known for known in self._into.games()})
        self._family = Family(self._games.values(), self._into.profiles())
        self._room = Room(self._games.values(), len(self._into.unreadable()))

    def _check(self, name: str, fragments: list[Fragment], arrived: float) -> None:
        """By the stream's clock: whenever it is read, and whatever the clock here says, the answer is the same."""
        game = self._family.find(name, fragments[0].schema) or self._family.find(name)
        if game is not None:
            game, fragments = self._family.adopt(game, fragments)
        if game is None:
            reason = self._unregistered.get(name, f"the record does not declare its game {name[:100]!r}")
            reasons: Sequence[str | None] = [reason] * len(fragments)
        else:
            reasons = validate.check(game, fragments, arrived)
        good = []
        for f, why in zip(fragments, reasons, strict=True):
            if why is None:
                good.append(f)
            else:
                self._reject(f.game, f.player, f.id, why)
        chunk: list[Fragment] = []
        size = 0
        for f in good:
            chunk.append(f)
            size += len(f.obs) + len(f.action) + len(f.reward)
            if size >= CHUNK:
                self._append(chunk)
                chunk, size = [], 0
        if chunk:
            self._append(chunk)

    def _append(self, fragments: list[Fragment]) -> None:
        self._sent.append(fragments)
        self._pending.append(self._writer.submit(self._store, fragments))
        if len(self._pending) > PENDING:
            self._written()

    def _store(self, fragments: list[Fragment]) -> list[Outcome | FragmentRefused]:
        """One that the store refuses is found by halving: the others are stored, and the batch does not come again."""
        try:
            return list(self._append_patiently(fragments))
        except FragmentRefused as refused:
            if len(fragments) == 1:
                return [refused]
            half = len(fragments) // 2
            return [*self._store(fragments[:half]), *self._store(fragments[half:])]

    def _append_patiently(self, fragments: list[Fragment]) -> list[Outcome]:
        """A store that is busy or away comes back. What a killed writer left half-done is cleared up only by one that
        keeps asking, not by the next process that a failed task gets."""
        until, delay = time.monotonic() + PATIENCE, 0.1
        while True:
            try:
                return self._into.append(fragments)
            except (StoreBusy, StoreAway) as error:
                if time.monotonic() > until:
                    raise
                log.warning("the store does not take it yet: %s", error)
                time.sleep(delay)
                delay = min(2 * delay, 2.0)

    def _written(self) -> None:
        result = self.result
        for f, outcome in zip(self._sent.popleft(), self._pending.popleft().result(), strict=True):
            if outcome is Outcome.STORED:
                result.fragments += 1
                result.steps += f.steps
            elif outcome in (Outcome.DUPLICATE, Outcome.ERASED):
                result.duplicates += 1
            else:
                taken = f"the id {f.id!r} is taken by a fragment with other content"
                self._reject(f.game, f.player, f.id, taken if outcome is Outcome.CONFLICT else str(outcome))

    def _reject(self, game: str, player: str, fragment_id: str, reason: str) -> None:
        """Reported to the driver: this task may be killed and done again, and a refusal counts once."""
        result, short = self.result, slice(MAX_TEXT)
        known = game if game in self._games else "?"  # names that somebody made up would be counted for ever
        result.rejected += 1
        result.refused[known] = result.refused.get(known, 0) + 1
        result.newest = [
            *result.newest[1 - NEWEST :],
            Quarantined(game[short], player[short], fragment_id[short], reason[short]),
        ]
