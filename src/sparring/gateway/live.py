"""What people watch: one snapshot per game, brought up to date about once a second while somebody watches, and pushed
to them as server-sent events. History is rebuilt from the store, so a restart loses nothing."""

import asyncio
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.api import GameInfo, Play, PlayerRow, RecentReturns, Snapshot, StreamStatus, TrainerStatus, VersionRow
from sparring.gateway.endpoint import HTTPProblem, answer, query_int
from sparring.gateway.history import History, ReturnLine, VersionReturns
from sparring.gateway.routes.games import Games
from sparring.gateway.routes.models import Models
from sparring.registry.manifest import DEFAULT_MODEL, Manifest
from sparring.store.protocol import Stats, Store

__all__ = ["Live"]

PERIOD = 1.0  # seconds between snapshots of a game that changes
IDLE_PERIOD = 5.0  # and of one that does not: it tells the watchers that we are here
ERASED_EVERY = 5.0  # seconds between looks whether play was erased elsewhere: by another gateway, by the trainer
WINDOW = 5  # seconds over which rates are taken
ACTIVE = 30.0  # a player is active for so long after their newest fragment
MAX_VERSIONS = 200
MAX_PLAYERS = 20
MAX_ACTIVE = 1000  # players looked at to count the active ones
PAGE, MAX_PAGES = 1000, 50  # episodes taken in at once: the rest of a long history waits for the next second
MAX_WATCHERS = 500
QUEUE = 8  # events that a watcher may be behind
SEND_TIMEOUT = 10.0
log = logging.getLogger(__name__)
T = TypeVar("T")


class Rate:
    """Fragments and steps per second over the last few whole seconds."""

    def __init__(self) -> None:
        self.last = 0.0  # when something was added
        self._lock = threading.Lock()  # uploads add in the event loop, snapshots are built in threads
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW + 1)  # [second, fragments, steps]

    def add(self, fragments: int, steps: int, now: float) -> None:
        self.last = now
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != int(now):
                self._seconds.append([int(now), 0, 0])
            self._seconds[-1][1] += fragments
            self._seconds[-1][2] += steps

    def per_second(self, now: float) -> tuple[float, float]:
        with self._lock:
            whole = [s for s in self._seconds if int(now) - WINDOW <= s[0] < int(now)]
        return sum(s[1] for s in whole) / WINDOW, sum(s[2] for s in whole) / WINDOW


class GameView:
    """One game as it is shown. Built in a thread (`build`), one build at a time."""

    def __init__(self, game: str, store: Store, trainer_dir: Path | None, stream_status: Path | None) -> None:
        self.rate = Rate()
        self.lock = asyncio.Lock()
        self.snapshot: Snapshot | None = None
        self.built = float("-inf")
        self._game = game
        self._store = store
        self._status = trainer_dir / game / "status.json" if trainer_dir else None
        self._stream_status = stream_status
        self._stats: Stats | None = None
        self._history, self._begun = History(), ("", "")  # without what was erased up to this mark
        self._behind = False  # there are more episodes than one build takes in
        self._built_from: object = None
        self._looked = float("-inf")

    def touch(self) -> None:
        self._built_from, self.built = None, float("-inf")

    def stale(self, latest: int | None) -> bool:
        """Whether a new snapshot would say anything else than the last one."""
        quiet = time.monotonic() - self.rate.last > ACTIVE + 2 * PERIOD
        return self._behind or not quiet or self._built_from != self._inputs(latest)

    def may_look(self) -> bool:
        """Whether it is time to ask `erased` again."""
        return time.monotonic() - self._looked >= ERASED_EVERY

    def erased(self) -> bool:
        """Whether something was erased since the last snapshot, or the game declared anew, by whomever."""
        self._looked = time.monotonic()
        return self._mark() != self._begun

    def _mark(self) -> tuple[str, str]:
        return self._store.registration(self._game), self._store.erasure(self._game)

    def _inputs(self, latest: int | None) -> object:
        return self.rate.last, latest, _mtime(self._status), _mtime(self._stream_status)

    def build(self, latest: Manifest | None, manifests: list[Manifest]) -> Snapshot:
        now, inputs = time.time(), self._inputs(latest.version if latest else None)
        history = self._take_in(max((m.version for m in (latest, *manifests[-1:]) if m is not None), default=0))
        returns = history.all.recent.returns()
        players, stats = self._store.players(self._game, MAX_ACTIVE), self._store.stats(self._game)
        if self._stream_status is not None:
            self._grown(stats)
        fragments_per_s, steps_per_s = self.rate.per_second(time.monotonic())
        self.snapshot = Snapshot(
            game=self._game,
            time=now,
            stats=stats,
            steps_per_s=steps_per_s,
            fragments_per_s=fragments_per_s,
            active_players=sum(p.last_seen > now - ACTIVE for p in players),
            episodes=returns.episodes,
            return_mean=returns.return_mean,
            return_best=returns.return_best,
            length_mean=returns.length_mean,
            latest=latest.version if latest else None,
            published=latest.created if latest else None,
            versions=[_row(m, history) for m in manifests],
            players=[history.row(p) for p in players[:MAX_PLAYERS]],
            curve=history.all.curve,
            trainer=self.trainer(),
            stream=_read_status(self._stream_status, StreamStatus),
            paused=self._game in self._store.paused(),
            people=_play(history.people, stats.steps - stats.bot_steps),
            bots=_play(history.bots, stats.bot_steps),
            behind=self._behind,
        )
        self._built_from, self.built = inputs, time.monotonic()
        return self.snapshot

    def trainer(self) -> TrainerStatus | None:
        return _read_status(self._status, TrainerStatus)

    def players(self, limit: int) -> list[PlayerRow]:
        """As of the newest snapshot, what returns are about. While nobody builds one."""
        return [self._history.row(p) for p in self._store.players(self._game, limit)]

    def _grown(self, stats: Stats) -> None:
        """Behind a stream nobody tells what arrives: the store's growth does."""
        if self._stats is not None and stats.steps > self._stats.steps:
            fragments = stats.fragments - self._stats.fragments
            self.rate.add(fragments, stats.steps - self._stats.steps, time.monotonic())
        self._stats = stats

    def _take_in(self, newest: int) -> History:
        """:param newest: version that there is."""
        mark = self._mark()  # before the episodes: a later erasure then shows as another mark
        if mark != self._begun:
            self._history, self._begun = History(), mark
        history = self._history
        history.newest = newest
        for _ in range(MAX_PAGES):
            page = self._store.episodes(self._game, history.cursor, PAGE)
            for episode in page:
                history.add(episode)
            self._behind = len(page) == PAGE
            if not self._behind:
                break
        return history


def _row(manifest: Manifest, history: History) -> VersionRow:
    played = history.played.get(manifest.version) or VersionReturns()
    return VersionRow(
        version=manifest.version,
        created=manifest.created,
        steps=manifest.data.steps,
        evaluation=manifest.metrics.get("evaluation/return_mean"),
        played=played.episodes,
        return_mean=played.mean,
        margin=played.margin,
    )


def _play(line: ReturnLine, steps: int) -> Play:
    returns: RecentReturns = line.recent.returns()
    return Play(**msgspec.structs.asdict(returns), steps=steps, curve=line.curve)


def _mtime(path: Path | None) -> int | None:
    try:
        return path.stat().st_mtime_ns if path else None
    except OSError:  # `_read_status` logs why, if it is there
        return None


def _read_status(path: Path | None, kind: type[T]) -> T | None:
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s is not a %s: %s", path, kind.__name__, error)
        return None


class Watcher:
    """One open event stream: a short queue, closed when its reader is too slow or gone."""

    def __init__(self, game: str) -> None:
        self.game = game
        self.version: int | None = None  # the newest it knows of
        self.built = float("nan")  # when the snapshot that it has was made
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE)

    def push(self, event: bytes) -> bool:
        """False: it was too far behind, and is closed."""
        if self._queue.full():
            self.close()
            return False
        self._queue.put_nowait(event)
        return True

    def close(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self) -> bytes | None:
        return await self._queue.get()


class Live:
    def __init__(
        self,
        store: Store,
        games: Games,
        models: Models,
        trainer_dir: Path | None,
        stream_status: Path | None = None,
    ) -> None:
        self._store = store
        self._games = games
        self._models = models
        self._trainer_dir = trainer_dir
        self._stream_status = stream_status
        self._views: dict[str, GameView] = {}
        self._watchers: set[Watcher] = set()
        self._stopping = False

    def changed(self, game: str, fragments: int, steps: int) -> None:
        if self._stream_status is None:  # else it is on the stream, and not in the store yet
            self._view(game).rate.add(fragments, steps, time.monotonic())

    def stream(self) -> StreamStatus | None:
        return _read_status(self._stream_status, StreamStatus)

    def touch(self, game: str) -> None:
        """The next look at it is a new one."""
        self._view(game).touch()

    def drop(self, game: str) -> None:
        """It was deleted: who watches it hears so when they ask again."""
        self._views.pop(game, None)
        for watcher in [w for w in self._watchers if w.game == game]:
            watcher.close()

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def stop(self) -> None:
        """Ends all streams; new ones are refused."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.close()

    async def run(self) -> None:
        """Pushes to the watchers, until cancelled."""
        while True:
            started = time.monotonic()
            for game in {w.game for w in self._watchers}:
                try:
                    await self._tick(game)
                except Exception:
                    log.exception("%s: no live events this second", game)
            await asyncio.sleep(max(0.1, started + PERIOD - time.monotonic()))

    async def _tick(self, game: str) -> None:
        view = self._view(game)
        snapshot = await self.snapshot(game)
        watchers = [w for w in self._watchers if w.game == game]
        behind = [w for w in watchers if w.built != view.built]
        if not behind:
            if time.time() - snapshot.time < IDLE_PERIOD:
                return
            behind = watchers
            snapshot = view.snapshot = msgspec.structs.replace(snapshot, time=time.time())
        event = _event("stats", msgspec.json.encode(snapshot))
        version = await self._version_event(game)
        for watcher in behind:
            watcher.built = view.built
            if version is not None and watcher.version != version[0]:
                watcher.version = version[0]
                watcher.push(version[1])
            if not watcher.push(event):
                log.info("%s: a watcher was too slow, its stream ends", game)

    async def _version_event(self, game: str) -> tuple[int, bytes] | None:
        latest = await self._models.latest(game, DEFAULT_MODEL)
        return (latest.manifest.version, _event("version", latest.body)) if latest else None

    async def snapshot(self, game: str) -> Snapshot:
        """At most about a second old."""
        view = self._view(game)
        async with view.lock:
            if view.snapshot is not None and time.monotonic() - view.built < 0.9 * PERIOD:
                return view.snapshot
            latest = await self._models.latest(game, DEFAULT_MODEL)
            newest = latest.manifest if latest else None
            fresh = view.snapshot is not None and not view.stale(newest.version if newest else None)
            if fresh and view.may_look():
                fresh = not await asyncio.to_thread(view.erased)
            if fresh and view.snapshot is not None:
                return view.snapshot
            trainer = await asyncio.to_thread(view.trainer)
            candidate = trainer.candidate if trainer else None
            manifests = await self._models.newest(game, DEFAULT_MODEL, MAX_VERSIONS, candidate)
            return await asyncio.to_thread(view.build, newest, manifests)

    def _view(self, game: str) -> GameView:
        if (view := self._views.get(game)) is None:
            view = self._views[game] = GameView(game, self._store, self._trainer_dir, self._stream_status)
        return view

    # Handlers

    async def stats(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        return answer(await self.snapshot(game.name))

    async def games(self, request: Request) -> Response:
        asked = request.query_params.get("archived", "false")
        if asked not in ("true", "false"):
            raise HTTPProblem(422, f"archived is {asked[:50]!r}: say true or false")
        rows = []
        for game in await self._games.all():
            archived = self._games.profile(game.name).archived
            if archived and asked == "false":
                continue
            s = await self.snapshot(game.name)
            info = GameInfo(
                self._games.family.title(game.name),
                game.schema,
                game.env,
                game.players,
                s.stats.steps,
                s.latest,
                s.return_mean,
                s.paused,
                archived=archived,
                generation=self._games.family.generation(game.name),
                names=self._games.family.names(game.name),
                bot_steps=s.stats.bot_steps,
            )
            apart = {"people_return_mean": s.people.return_mean, "bot_return_mean": s.bots.return_mean}
            rows.append(msgspec.structs.replace(info, **apart))
        return answer(rows)

    async def players(self, request: Request) -> Response:
        game = await self._games.get(request.path_params["game"])
        limit = query_int(request, "limit", 100, 1, 1000)
        await self.snapshot(game.name)
        view = self._view(game.name)
        async with view.lock:
            return answer(await asyncio.to_thread(view.players, limit))

    async def events(self, request: Request) -> Response:
        name = request.query_params.get("game")
        if name is None:
            raise HTTPProblem(422, "say which game to watch: GET /v1/events?game=NAME")
        game = await self._games.get(name)
        self._require_room()
        watcher = Watcher(game.name)
        latest = await self._models.latest(game.name, DEFAULT_MODEL)
        watcher.version = latest.manifest.version if latest else None
        snapshot = await self.snapshot(game.name)
        watcher.built = self._view(game.name).built
        watcher.push(b"retry: 2000\n\n" + _event("stats", msgspec.json.encode(snapshot)))
        self._require_room()  # others asked meanwhile
        return _Stream(watcher, self._watchers)

    def _require_room(self) -> None:
        if self._stopping or len(self._watchers) >= MAX_WATCHERS:
            raise HTTPProblem(
                503, "no more event streams at the moment: poll stats instead", headers={"retry-after": "10"}
            )


def _event(name: str, data: bytes) -> bytes:
    """JSON has no raw line breaks, so it is one `data` line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class _Stream(Response):
    def __init__(self, watcher: Watcher, watchers: set[Watcher]) -> None:
        super().__init__(
            None, headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._watcher = watcher
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._watchers.add(self._watcher)
        gone = asyncio.create_task(self._close_when_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (event := await self._watcher.next()) is not None:
                async with asyncio.timeout(SEND_TIMEOUT):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            async with asyncio.timeout(SEND_TIMEOUT):
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            # The reader is there but does not read; closing would wait for it for ever.
            scope["extensions"]["sparring.abort"]["abort"]()
        finally:
            self._watchers.discard(self._watcher)
            gone.cancel()

    async def _close_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._watcher.close()
