"""`sparring up`: gateway, store and registry in this process, the trainer in a child. All data under one directory."""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sparring.errors import InputError
from sparring.gateway.app import create_app, serve
from sparring.registry.registry import Registry
from sparring.store import open_store

__all__ = ["up"]

STOP_TIMEOUT = 30.0  # seconds that the trainer gets for its last checkpoint
RESTART_AFTER = 5.0  # seconds before a trainer that died is started again


def up(
    data: Path,
    host: str = "127.0.0.1",
    port: int = 8400,
    *,
    store: str | None = None,
    settings: bytes | None = b"{}",
    ready: Callable[[str], None] | None = None,
) -> None:
    """Runs until SIGINT or SIGTERM, then stops cleanly; the next `up` on the same directory goes on. `settings`: the
    trainer's, as JSON; none: no trainer. `store`: the address of another store than the directory's own."""
    with _locked(data), contextlib.ExitStack() as stack:
        address = store or str(data / "store.db")
        opened = open_store(address)
        stack.callback(opened.close)
        app = create_app(opened, Registry(data / "registry"), data / "trainer")

        def started(url: str) -> None:
            if settings is not None:  # only now: a port in use must not cost a trainer's start
                stack.enter_context(_trainer(data, address, settings))
            if ready is not None:
                ready(url)

        serve(app, host, port, started)


@contextlib.contextmanager
def _locked(data: Path) -> Iterator[None]:
    """Two platforms on one directory would train the same games twice."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise InputError(
                f"{data} is in use by another `sparring up` (process {owner}): choose another --data"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def _trainer(data: Path, store: str, settings: bytes) -> Iterator[None]:
    """Keeps a trainer running. It writes to DIR/trainer.log and goes when we go, also when we are killed."""
    command = [sys.executable, "-m", "sparring.training.live", "--data", str(data), "--parent", str(os.getpid())]
    command += ["--store", store, "--settings", msgspec.json.encode(msgspec.json.decode(settings)).decode()]
    stopping = threading.Event()
    # Gateway, players and learner share the cores: a small network gains nothing from more threads than one.
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} | os.environ

    def keep() -> None:
        with (data / "trainer.log").open("ab") as output:
            while not stopping.is_set():
                with subprocess.Popen(
                    command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=env
                ) as child:
                    while child.poll() is None and not stopping.wait(0.2):
                        continue
                    if child.poll() is None:
                        child.terminate()
                        _wait(child)
                stopping.wait(RESTART_AFTER)

    thread = threading.Thread(target=keep, name="trainer-keeper")
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _wait(child: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + STOP_TIMEOUT
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    if child.poll() is None:
        child.kill()
