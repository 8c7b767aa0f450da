"""A measurement is a process of its own: it inherits no compiled code, memory, threads or devices. It reads its order
as JSON and answers line by line; when it dies, its measurement fails and nothing else."""

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

import msgspec

from sparring.errors import InputError, SparringError

__all__ = ["Died", "MeasuringChild", "open_child", "say", "serve"]


PR_SET_PDEATHSIG = 1  # of Linux's prctl: what we get when our parent ends


class Died(SparringError):
    """The child ended without a word: a crash of what it measured."""


class MeasuringChild(NamedTuple):
    pid: int
    lines: Iterator[dict[str, Any]]


@contextlib.contextmanager
def open_child(
    module: str,
    order: Any,
    environment: dict[str, str],
    cores: Collection[int] | None = None,
    limit: float | None = None,
) -> Iterator[MeasuringChild]:
    """A process that does as ordered: `python -m module`. It runs on `cores` alone, from its first moment, and for no
    more than `limit` seconds."""
    command = [sys.executable, "-m", module]
    if cores is not None:  # not preexec_fn: other threads may run here
        pin = f"import os, runpy; os.sched_setaffinity(0, {sorted(cores)})"
        command = [sys.executable, "-c", f"{pin}; runpy.run_module({module!r}, None, '__main__')"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit or 0, end)
        if limit is not None:
            timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died: the end says why
                process.stdin.write(msgspec.json.encode(order).decode())
                process.stdin.close()
            yield MeasuringChild(process.pid, _lines(process, process.stdout, errors))
        except Died as error:
            if late.is_set():
                raise Died(f"it was not done after {limit:g} seconds") from error
            raise
        finally:
            timer.cancel()
            process.terminate()


def _lines(process: subprocess.Popen[str], said: IO[str], errors: IO[str]) -> Iterator[dict[str, Any]]:
    for line in said:
        if not line.startswith("{"):
            continue
        words: dict[str, Any] = json.loads(line)
        if "error" in words:
            raise (InputError if words["input"] else SparringError)(words["error"])
        yield words
    if code := process.wait():
        errors.seek(0)
        end = errors.read()[-3000:].strip()
        if code < 0:
            raise Died(f"the process died of {signal.Signals(-code).name}" + (f":\n{end}" if end else ""))
        raise Died(f"measuring failed:\n{end}")


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def serve(do: Callable[[dict[str, Any]], None]) -> None:
    """In the child: reads the order and does it. Whoever gave it may be killed meanwhile: we end then, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    order = json.loads(sys.stdin.read())
    try:
        do(order)
    except SparringError as error:
        say(error=str(error), input=isinstance(error, InputError))
