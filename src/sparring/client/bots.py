"""Published versions on their way to this machine: asked for, downloaded, checked by hash, kept on disk, followed.

Whatever goes wrong on the way, the version that is here goes on playing.
"""

import hashlib
import re
import threading
import time
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from sparring.client.bot import BotPolicy, Loaded
from sparring.client.notices import Notices, attempt, describe, log
from sparring.client.transports.base import ModelSource, Unavailable
from sparring.errors import InputError
from sparring.files import write_whole
from sparring.games import Game
from sparring.games.spec import NAME
from sparring.networks.random_play import RandomPlay
from sparring.registry.manifest import DEFAULT_MODEL, STABLE, FileInfo, Manifest, Serving

__all__ = ["Newest", "PublishedBots", "Refresher"]

FILE = "policy.onnx"
MAX_FILE = 1 << 30
KEEP = 8  # files of one game on disk
MAX_DELAY = 300.0
FAULT_DELAY = 5.0  # seconds after a fault that nobody foresaw
SHA256 = re.compile("[0-9a-f]{64}")


class PublishedBots:
    """One game's published versions, with their files in `directory`."""

    def __init__(self, source: ModelSource, game: Game, directory: Path, notices: Notices) -> None:
        self.source, self.game, self.directory, self.notices = source, game, directory, notices

    def version(self, model: str, version: int) -> BotPolicy:
        """A certain version."""
        return self.load(self.source.manifest(self.game.name, model, version))

    def load(self, manifest: Manifest) -> BotPolicy:
        """From disk or from where it is published. Raises InputError for a file that cannot play this game."""
        if manifest.game.schema != self.game.schema:
            raise InputError(
                f"version {manifest.version} of {manifest.model!r} is for schema {manifest.game.schema}, "
                f"this client's game has {self.game.schema}"
            )
        info = self._info(manifest)
        path = self.directory / f"{info.sha256}.onnx"
        data = self._cached(path, info.sha256)
        if data is None:
            data = self._download(manifest, info.sha256, info.size)
            self._store(path, data)
        return Loaded(data, self.game, manifest.model, manifest.version)

    def remember(self, manifest: Manifest) -> None:
        """For the next start without a server."""
        self._store(self.directory / f"{manifest.model}.json", msgspec.json.encode(manifest))
        try:
            files = sorted(self.directory.glob("*.onnx"), key=lambda path: path.stat().st_mtime)
            for path in files[:-KEEP]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("could not tidy %s: %s", self.directory, error)

    def remembered(self, model: str) -> BotPolicy | None:
        """The version that was last in use here, without asking the server."""
        try:
            manifest = msgspec.json.decode((self.directory / f"{model}.json").read_bytes(), type=Manifest)
            info = self._info(manifest)
            if self._cached(self.directory / f"{info.sha256}.onnx", info.sha256) is None:
                return None
            return self.load(manifest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InputError) as error:
            self.notices.warn(f"the bot kept in {self.directory} is of no use: {error}")
            return None

    def _info(self, manifest: Manifest) -> FileInfo:
        """Of the policy's file. Its sha256 becomes a file's name here."""
        which, info = f"version {manifest.version} of {manifest.model!r}", manifest.files.get(FILE)
        if info is None or not 0 < info.size <= MAX_FILE:
            raise InputError(f"{which} has no {FILE} of a sensible size")
        if not SHA256.fullmatch(info.sha256):
            raise InputError(f"{which} has a {FILE} whose sha256 is {info.sha256[:80]!r}: that is none")
        return info

    def _download(self, manifest: Manifest, sha256: str, size: int) -> bytes:
        data = self.source.file(manifest, FILE, size)
        if (found := hashlib.sha256(data).hexdigest()) != sha256:
            raise InputError(
                f"{FILE} of version {manifest.version} of {manifest.model!r} is damaged: "
                f"its sha256 is {found[:12]}…, the manifest says {sha256[:12]}…"
            )
        return data

    def _cached(self, path: Path, sha256: str) -> bytes | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None  # not there or not readable: it is downloaded
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def _store(self, path: Path, data: bytes) -> None:
        try:
            write_whole(path, data, parents=True, shared=True)
        except OSError as error:
            self.notices.warn(f"cannot keep bots in {self.directory}: {error}")


class Newest:
    """Follows what a model's players get: `policy` is always one that can play, beside it there may be a candidate.

    :param alias: follows that alias instead, and never meets a candidate.
    """

    def __init__(self, models: PublishedBots, model: str, every: float, alias: str | None = None) -> None:
        for kind, name in (("model", model), ("alias", alias)):
            if name is not None and not NAME.fullmatch(name):
                raise InputError(f"{name!r} is no {kind}'s name: use letters, digits, '.', '_' and '-'")
        self._models, self._model, self._every, self._alias = models, model, every, alias
        self.candidate: BotPolicy | None = None
        self.share = 0.0
        self.error: Exception | None = None  # of the last look
        self._etag: str | None = None
        self._failures = 0
        self.due = 0.0  # when to look again
        self.policy: BotPolicy = RandomPlay(models.game)
        self.refresh()
        known = alias in (None, STABLE)  # what is kept is what all players got
        if self.policy.version == 0 and known and (kept := models.remembered(model)) is not None:
            self.policy = kept

    def choose(self, rng: np.random.Generator) -> BotPolicy:
        """The version for one episode."""
        candidate = self.candidate
        return candidate if candidate is not None and rng.random() < self.share else self.policy

    def require(self) -> None:
        """Random play is for games whose first version is not there yet, and for those whose server is away.

        :raises InputError: the server answered, and has no such model or alias.
        """
        if self.policy.version or self._may_be_random:
            return
        if isinstance(self.error, InputError):
            raise self.error
        if isinstance(self.error, Unavailable) and self.error.status == 403:  # so S3 says that there is no such key
            raise InputError(str(self.error)) from self.error
        if self.error is None:
            raise InputError(f"{self._models.game.name} has no version of the model {self._model!r}")

    @property
    def _may_be_random(self) -> bool:
        return self._model == DEFAULT_MODEL and self._alias in (None, STABLE)

    def refresh(self) -> None:
        """Never raises, whatever the server, the file or ONNX Runtime does: logged once, and tried again later."""
        self.error = error = attempt(self._look)
        self._failures = 0 if error is None else self._failures + 1
        if error is not None and (self._may_be_random or self.policy.version or not isinstance(error, InputError)):
            why = str(error) if isinstance(error, Unavailable | InputError) else describe(error)
            kept = f"version {self.policy.version} of {self.policy.model!r} goes on playing"
            self._models.notices.warn(f"no newer bot for now: {why} ({kept})")
        self.due = time.monotonic() + min(MAX_DELAY, self._every * 2 ** min(self._failures, 10))

    def _look(self) -> None:
        source, names = self._models.source, (self._models.game.name, self._model)
        if self._alias is not None and self._alias != STABLE:
            named = source.alias(*names, self._alias, self._etag)
            found = None if named is None else (Serving(named[0]), named[1])
        elif self._alias is None and hasattr(source, "serving"):  # one from outside may not have it
            found = source.serving(*names, self._etag)
        else:
            newest = source.latest(*names, self._etag)
            found = None if newest is None else (Serving(newest[0]), newest[1])
        if found is None:
            return
        serving, etag = found
        if serving.stable is not None:
            self.policy = self._loaded(serving.stable, self.policy)
            if self._alias in (None, STABLE):
                self._models.remember(serving.stable)
        self._offer(serving)
        self._etag = etag

    def _offer(self, serving: Serving) -> None:
        """A candidate that cannot play takes nothing away from what all get."""
        self.share = 0.0
        if serving.candidate is None or serving.share <= 0:
            self.candidate = None
            return
        self.candidate = self._loaded(serving.candidate, self.candidate)
        self.share = serving.share

    def _loaded(self, manifest: Manifest, known: BotPolicy | None) -> BotPolicy:
        if manifest.model != self._model:
            raise InputError(f"asked for {self._model!r}, got a manifest of {manifest.model!r}")
        if known is not None and (manifest.model, manifest.version) == (known.model, known.version):
            return known
        return self._models.load(manifest)


class Followed(Protocol):
    """What is looked after from time to time."""

    due: float  # when, by the monotonic clock

    def refresh(self) -> None:
        """Never raises, and says when it is due again."""


class Refresher:
    """Looks for newer versions in a thread of its own, so that a slow download delays no upload."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._changed = threading.Condition()  # guards the rest
        self._followed: list[Followed] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sparring-bots", daemon=True)

    def follow(self, newest: Followed) -> None:
        with self._changed:
            self._followed.append(newest)
            if not self._thread.is_alive() and not self._closing:
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Waits for a download that is on its way for so long, and then leaves it alone: nobody needs it any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while (newest := self._next()) is not None:
            newest.due = time.monotonic() + FAULT_DELAY  # unless the refresh gets to say when to look again
            self._notices.guard("looking for a newer bot", newest.refresh)

    def _next(self) -> Followed | None:
        """Waits until one is due; none: it is closed."""
        with self._changed:
            while not self._closing:
                newest = min(self._followed, key=lambda one: one.due)
                wait = newest.due - time.monotonic()
                if wait <= 0:
                    return newest
                self._changed.wait(wait)
            return None
