"""Uploads of fragments, the hot path: bounded reading, decoding, the check, and the store's group commit. What is
acknowledged is on disk; what is rejected is reported per fragment, and noted in quarantine."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import Rejected, Uploaded
from sparring.errors import Busy, InputError, SparringError
from sparring.experience import Fragment, validate, wire
from sparring.experience.wire import JsonFragment
from sparring.games import Game
from sparring.gateway.endpoint import JSON, MSGPACK, Budget, HTTPProblem, answer, media_type, read_body
from sparring.gateway.openapi import Operation
from sparring.gateway.prometheus import PrometheusMetrics
from sparring.gateway.routes.games import CARTPOLE, WRITES, Games
from sparring.store.protocol import Outcome, Store

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["Limits", "Uploads", "operations"]

ENCODINGS = ("", "identity", "gzip", "deflate")
# Up to this many bytes and fragments are decoded and checked in the event loop: 0.4 ms for 50 fragments in 1.3 MB, less
# than it costs to hand them to a thread. (Only a batch with a fault is looked at one by one, at 20 µs per fragment.)
INLINE, INLINE_FRAGMENTS = 2 << 20, 100
# Our client's uploads are gzipped: 0.05 ms for 4 fragments in 7 kB, 0.4 ms for 50 in 82 kB; a thread adds 0.1 ms.
INLINE_GZIP, INLINE_INFLATED = 96 << 10, 256 << 10
FAILURE_EXPIRES = 30.0  # seconds
log = logging.getLogger(__name__)
MAX_TEXT = 300  # of ids and reasons that come back: they quote what the client sent


@dataclass(frozen=True)
class Limits:
    """Bytes and counts. JSON gets less. A byte of it can take twenty of memory once it is Python lists. Nothing else
    runs while it is parsed (0.05 s for 2 MiB of numbers, ten times that for the nastiest nesting)."""

    body: int = 8 << 20
    decompressed: int = 64 << 20
    json: int = 2 << 20
    in_flight: int = 64 << 20
    fragments: int = 1000


@dataclass
class Checked:
    """An upload after the check: what may be stored, where it was in the upload, and what may not."""

    good: list[Fragment]
    places: list[int] | None = None  # none: all of them were good, in order
    rejected: list[Rejected] = field(default_factory=list)
    senders: list[str] = field(default_factory=list)  # the players of `rejected`
    ignored: dict[str, int] = field(default_factory=dict)  # fields that we do not know, and who has them first
    notes: list[str] = field(default_factory=list)  # about them, for people
    game: Game | None = None  # the generation that they are of


class Uploads:
    def __init__(
        self,
        store: Store,
        games: Games,
        metrics: PrometheusMetrics,
        limits: Limits,
        budget: Budget,
        changed: Callable[[str, int, int], None],
    ) -> None:
        """`changed(game, fragments, steps)` is called with what an upload added to the store (or its quarantine)."""
        self._budget = budget
        self._failure: tuple[float, str] | None = None  # when and why the store failed; none after a write that worked
        self._store = store
        self._games = games
        self._metrics = metrics
        self._limits = limits
        self._changed = changed
        self._threads = ThreadPoolExecutor(2, "ingest")

    @property
    def failing(self) -> str | None:
        """Why the store fails. A failure that no upload confirms is no longer believed after a while. Otherwise an
        instance that is called unready gets no uploads, and never learns that the disk has room again."""
        if self._failure is None or time.monotonic() - self._failure[0] > FAILURE_EXPIRES:
            return None
        return self._failure[1]

    async def upload(self, request: Request) -> Response:
        started = time.perf_counter()
        game = await self._games.get(request.path_params["game"])
        kind = media_type(request, MSGPACK, JSON)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ENCODINGS:
            raise HTTPProblem(415, f"Content-Encoding is {encoding[:50]!r}: send gzip, deflate or none")
        with self._budget.hold(request) as hold:
            body = await read_body(request, self._limits.json if kind == JSON else self._limits.body, hold)
            self._metrics.received += len(body)
            try:
                if kind == MSGPACK and (plain := _small(body, encoding, self._limits)) is not None:
                    batch, size, pending = self._take(plain, kind, "", game)
                else:
                    batch, size, pending = await self._take_in_thread(body, kind, encoding, game)
                hold.grow(size - len(body))
                outcomes = await asyncio.wrap_future(pending) if pending is not None else []
            except (InputError, Busy):  # the sender's fault, or a queue that is full: no failure of the store
                raise
            except (OSError, SparringError) as error:
                self._failure = time.monotonic(), str(error) or type(error).__name__
                raise
            if outcomes:
                self._failure = None
        response = await self._respond(batch.game or game, batch, outcomes, size)
        self._metrics.ack.observe(time.perf_counter() - started)
        return response

    def close(self) -> None:
        self._threads.shutdown()

    async def _take_in_thread(
        self, body: bytes, kind: str, encoding: str, game: Game
    ) -> tuple[Checked, int, Future[list[Outcome]] | None]:
        """`_take` of what would hold up the event loop."""
        work = functools.partial(self._take, body, kind, encoding, game)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _take(
        self, body: bytes, kind: str, encoding: str, game: Game
    ) -> tuple[Checked, int, Future[list[Outcome]] | None]:
        """The upload as checked fragments, its size once decompressed, and the store's promise for the good ones."""
        limits = self._limits
        body = wire.decompress(body, encoding, limits.json if kind == JSON else limits.decompressed)
        if kind == JSON:
            rows = wire.parse_json(body, limits.fragments)
            schema = next((row.schema for row in rows if not isinstance(row, str)), None)
            game = self._games.family.find(game.name, schema) or game
            batch = _check(game, wire.from_rows(rows, game), limits)
        else:
            if (count := _array_length(body)) is not None:
                _limit_count(count, limits)  # before memory is taken for them
            game, fragments = self._games.family.adopt(game, wire.decode(body))
            batch = _check(game, fragments, limits)
        batch.game = game
        if not batch.good:
            return batch, len(body), None
        batch.ignored = wire.unknown_fields(body, json=kind == JSON)
        if kind == JSON:
            bad = {rejected.index for rejected in batch.rejected}
            batch.notes = [wire.unknown_note(name, i) for name, i in batch.ignored.items() if i not in bad]
        return batch, len(body), self._store.submit(batch.good)

    async def _respond(self, game: Game, batch: Checked, outcomes: list[Outcome], size: int) -> Response:
        duplicates, steps = outcomes.count(Outcome.DUPLICATE) + outcomes.count(Outcome.ERASED), 0
        stored = outcomes.count(Outcome.STORED)
        if stored == len(outcomes):
            steps = sum([f.steps for f in batch.good])
        else:
            steps = sum(f.steps for f, o in zip(batch.good, outcomes, strict=True) if o is Outcome.STORED)
        if stored + duplicates < len(outcomes):
            _reject_conflicts(batch, outcomes)
        rejected = batch.rejected
        self._metrics.accepted(stored, duplicates, len(rejected), steps, size if stored else 0)
        if rejected:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._quarantine, game.name, batch)
        if stored or rejected:
            self._changed(game.name, stored, steps)
        if stored + duplicates:
            ignored = [name[:MAX_TEXT] for name in batch.ignored]
            pace, notes = self._games.settings(game.name).pace or msgspec.UNSET, batch.notes or msgspec.UNSET
            return answer(Uploaded(stored, duplicates, rejected, ignored or msgspec.UNSET, pace, notes))
        statuses = {r.status for r in rejected}
        status = statuses.pop() if len(statuses) == 1 else 422
        count = f"all {len(rejected)} fragments were rejected, the first: " if len(rejected) > 1 else ""
        raise HTTPProblem(status, f"{count}{rejected[0].reason}", rejected=rejected)

    def _quarantine(self, game: str, batch: Checked) -> None:
        try:
            for rejected, player in zip(batch.rejected, batch.senders, strict=True):
                self._store.quarantine(game, player, rejected.id, rejected.reason)
        except OSError as error:  # the answer, which says what was stored, matters more than the note
            log.warning("%s: %d rejected fragments are not in quarantine: %s", game, len(batch.rejected), error)


def _check(game: Game, found: list[Fragment] | list[Fragment | wire.Unfit], limits: Limits) -> Checked:
    _limit_count(len(found), limits)
    fragments = [f for f in found if isinstance(f, Fragment)]
    reasons = validate.check(game, fragments)
    if len(fragments) == len(found) and not any(reasons):
        return Checked(fragments)
    batch = Checked([], [])
    assert batch.places is not None
    checked = iter(reasons)
    for place, f in enumerate(found):
        reason = f if isinstance(f, str) else next(checked)
        if reason is None and isinstance(f, Fragment):
            batch.good.append(f)
            batch.places.append(place)
            continue
        wrong_schema = isinstance(f, Fragment) and f.game == game.name and f.schema != game.schema
        _reject(batch, place, f, 409 if wrong_schema else 422, reason or "")
    return batch


def _reject(batch: Checked, place: int, f: Fragment | wire.Unfit, status: int, reason: str) -> None:
    batch.rejected.append(Rejected(place, f.id[:MAX_TEXT], status, reason[:MAX_TEXT]))
    batch.senders.append(f.player[:MAX_TEXT])


def _reject_conflicts(batch: Checked, outcomes: list[Outcome]) -> None:
    for i, (f, outcome) in enumerate(zip(batch.good, outcomes, strict=True)):
        if outcome is Outcome.CONFLICT:
            reason = f"the id {f.id!r} is taken by a fragment with other content: make a new id for every fragment"
            _reject(batch, i if batch.places is None else batch.places[i], f, 409, reason)
    order = sorted(range(len(batch.rejected)), key=lambda i: batch.rejected[i].index)
    batch.rejected, batch.senders = [batch.rejected[i] for i in order], [batch.senders[i] for i in order]


def _limit_count(count: int, limits: Limits) -> None:
    if count == 0:
        raise HTTPProblem(422, "the list of fragments is empty")
    if count > limits.fragments:
        raise HTTPProblem(
            413, f"{count} fragments in one request, at most {limits.fragments} are allowed: send several"
        )


def _small(body: bytes, encoding: str, limits: Limits) -> bytes | None:
    """The upload as msgpack, if that is quickly made and quickly checked; else none."""
    if encoding == "gzip":
        # gzip ends with the size of what it holds. A body that lies costs no more than one that does not.
        most = min(INLINE_INFLATED, limits.decompressed)
        if len(body) > INLINE_GZIP or int.from_bytes(body[-4:], "little") > most:
            return None
        try:
            body = wire.decompress(body, encoding, most)
        except wire.TooLarge:
            return None
    elif encoding not in ("", "identity") or len(body) > INLINE:
        return None
    return body if (_array_length(body) or 0) <= INLINE_FRAGMENTS else None


def _array_length(body: bytes) -> int | None:
    """What a msgpack array says of its length, from its first bytes; None when it is no array."""
    if body[:1] == b"\xdc":
        return int.from_bytes(body[1:3], "big")
    if body[:1] == b"\xdd":
        return int.from_bytes(body[1:5], "big")
    return body[0] & 0x0F if body and 0x90 <= body[0] <= 0x9F else None


EXAMPLE_UPLOAD = [
    {
        "player": "player-1",
        "schema": CARTPOLE.schema,
        "obs": [[0.0, 0.0, 0.0, 0.0], [0.0, 0.2, 0.0, -0.3]],
        "action": [1],
        "reward": [1.0],
        "terminated": True,
    }
]


def operations(parts: "Parts") -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/games/{game}/fragments",
            parts.lifecycle.upload,
            "Upload fragments: stored for good once answered; those rejected are listed, the others are stored",
            {JSON: Uploaded},
            {MSGPACK: list[Fragment], JSON: list[JsonFragment]},
            {200: "At least one fragment is stored, now or since an earlier upload"},
            (404, 408, 409, 410, *WRITES),
            headers={"Content-Encoding": {"enum": [*ENCODINGS[1:]], "description": "none: identity"}},
            example=EXAMPLE_UPLOAD,
            body_limits={"minItems": 1, "maxItems": parts.limits.fragments},
            shared="game",
        )
    ]
