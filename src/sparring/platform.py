"""`sparring up`: gateway, store and registry in this process, the trainer in a child. All data under one directory."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from sparring import news
from sparring.aws import sdk
from sparring.aws.kinesis import Kinesis, default_directory
from sparring.errors import InputError
from sparring.files import try_lock
from sparring.gateway.app import create_app, serve
from sparring.heartbeat import SilenceLimits, Watch
from sparring.registry.registry import Registry, RegistryError
from sparring.store import open_store
from sparring.store.profile import GameSettings
from sparring.store.protocol import Store
from sparring.stream.producer import Producer
from sparring.stream.stream_store import StreamedStore

__all__ = ["train", "up"]

log = logging.getLogger(__name__)
STOP_TIMEOUT = 30.0  # seconds that the trainer gets for its last checkpoint, and a batch to end
TRAINER_LOG, INGEST_LOG = "trainer.log", "ingest.log"
RESTART_AFTER = 5.0  # seconds before a child that died is started again


def up(
    data: Path,
    host: str = "127.0.0.1",
    port: int = 8400,
    *,
    store: str | None = None,
    registry: str | None = None,
    settings: bytes | None = b"{}",
    ready: Callable[[str], None] | None = None,
    stream: str | None = None,
    ingest: bool = True,
    allowed_hosts: Sequence[str] = (),
    limits: SilenceLimits | None = None,
    defaults: GameSettings = GameSettings(),
    on_news: Callable[[str], None] | None = None,
) -> None:
    """Runs until SIGINT or SIGTERM, then stops cleanly; the next `up` on the same directory goes on. `settings`: the
    trainer's, as JSON; none: no trainer. `store` and `registry`: others than the directory's own, by their addresses.
    With a `stream` uploads go over it to the store; `ingest`: by a job of ours. `allowed_hosts`: names that
    the gateway answers to, see `gateway.hosts`. `limits`: how long the trainer may be silent. `defaults`: what
    the gateway shows of settings for which a game has none. `on_news`: gets a line for people when a game's training
    fails, and when a version is promoted, rejected or rolled back."""
    published = _registry(data, registry)
    with _locked(data, "lock"), contextlib.ExitStack() as stack:
        if settings is not None:
            stack.enter_context(_locked(data, "trainer.lock"))
            _require_writable(data / TRAINER_LOG)
        if stream is not None and ingest:
            _require_writable(data / INGEST_LOG)
        address = store or str(data / "store.db")
        opened, status = open_store(address), None
        if stream is not None:
            opened, status = _streamed(opened, stream), default_directory(data, stream, address) / "status.json"
        stack.callback(opened.close)
        app = create_app(
            opened,
            published,
            data / "trainer",
            stream_status=status,
            allowed_hosts=allowed_hosts,
            defaults=defaults,
        )

        def started(url: str) -> None:
            if settings is not None and on_news is not None:
                stack.enter_context(news.following(data / "trainer", on_news))
            if settings is not None:  # only now: a port in use must not cost a trainer's start
                stack.enter_context(_trainer(data, settings, store, registry, limits or SilenceLimits()))
            if stream is not None and ingest:
                stack.enter_context(_ingest(data, stream, address))
            if ready is not None:
                ready(url)

        serve(app, host, port, started)


def train(data: Path, *, store: str | None = None, registry: str | None = None, settings: bytes = b"{}") -> None:
    """The trainer alone, in this process; the gateway is somewhere else."""
    _registry(data, registry)
    with _locked(data, "trainer.lock"):
        from sparring.trainer import process  # JAX, which a gateway does without

        process.main(_trainer_words(data, settings, store, registry))


def _registry(data: Path, address: str | None) -> Registry:
    """What is wrong with it for good is said now; one that is merely away may come back."""
    registry = Registry(address or data / "registry")
    try:
        registry.check()
    except RegistryError as error:
        log.warning("%s. Going on without it: bots are published and served when it is back", error)
    return registry


def _streamed(store: Store, address: str) -> Store:
    stream = Kinesis(address, credentials=sdk.credentials)
    stream.summary()  # a wrong address or missing credentials are reported now, not with the first upload
    return StreamedStore(store, Producer(stream))


@contextlib.contextmanager
def _locked(data: Path, name: str) -> Iterator[None]:
    """Two platforms on one directory would train the same games twice."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / name).open("a+") as file:
        if not try_lock(file.fileno()):
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise InputError(f"{data} is in use by another `sparring up` (process {owner}): choose another --data")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _require_writable(log: Path) -> None:
    try:
        log.open("ab").close()
    except OSError as error:
        raise InputError(f"cannot write {log}: {error.strerror}") from error


@contextlib.contextmanager
def _trainer(
    data: Path, settings: bytes, store: str | None, registry: str | None, limits: SilenceLimits
) -> Iterator[None]:
    command = [sys.executable, "-m", "sparring.trainer.process", "--parent", str(os.getpid())]
    command += _trainer_words(data, settings, store, registry)
    # Gateway, players and learner share the cores: a small network gains nothing from more threads than one.
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    with _kept(_Child(command, data / TRAINER_LOG, env | os.environ, limits)):
        yield


@contextlib.contextmanager
def _ingest(data: Path, stream: str, store: str) -> Iterator[None]:
    directory = default_directory(data, stream, store)
    command = [sys.executable, "-m", "sparring.stream.ingest", "--stream", stream, "--store", store]
    command += ["--directory", str(directory), "--master", "local[2]", "--parent", str(os.getpid())]
    with _kept(_Child(command, data / INGEST_LOG, dict(os.environ))):
        yield


class _Child:
    """A process that is kept running: started again when it dies, and, with `limits`, when it is silent for too long
    (--beat). It writes to `output` and goes when we go, also when we are killed."""

    def __init__(
        self, command: list[str], output: Path, env: dict[str, str], limits: SilenceLimits | None = None
    ) -> None:
        self.command, self.output, self.env, self.limits = command, output, env, limits
        self.stopping = threading.Event()
        self.hung = False  # the process before this one

    def keep(self) -> None:
        while not self.stopping.is_set():
            try:
                self.run()
            except Exception:  # no memory or processes left, for now
                log.exception("cannot run %s: trying again", self.command[2])
            self.stopping.wait(RESTART_AFTER)

    def run(self) -> None:
        """One process, to its end."""
        if self.limits is None:
            self.attend(self.command, None)
            return
        with contextlib.closing(Watch(self.limits)) as watch:
            words = [*self.command, "--beat", str(watch.pipe), *(["--hung"] if self.hung else [])]
            self.hung = False
            self.attend(words, watch)

    def attend(self, words: list[str], watch: Watch | None) -> None:
        with (
            self.output.open("ab") as output,
            subprocess.Popen(
                words,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self.env,
                pass_fds=() if watch is None else (watch.pipe,),
            ) as child,
        ):
            if watch is not None:
                watch.hand_over()
            while child.poll() is None and not self.stopping.wait(0.2):
                if watch is not None and watch.hung(child.pid):
                    self.hung = True
                    child.kill()
                    child.wait()
            if child.poll() is None:
                child.terminate()
                _wait(child)


@contextlib.contextmanager
def _kept(child: _Child) -> Iterator[None]:
    thread = threading.Thread(target=child.keep, name=f"{child.output.stem}-keeper")
    thread.start()
    try:
        yield
    finally:
        child.stopping.set()
        thread.join()


def _trainer_words(data: Path, settings: bytes, store: str | None, registry: str | None) -> list[str]:
    words = ["--data", str(data), "--settings", msgspec.json.encode(msgspec.json.decode(settings)).decode()]
    for option, address in (("--store", store), ("--registry", registry)):
        words += [] if address is None else [option, address]
    return words


def _wait(child: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + STOP_TIMEOUT
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    if child.poll() is None:
        child.kill()
