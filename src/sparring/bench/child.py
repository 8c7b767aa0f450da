"""A measurement is a process of its own: it inherits no compiled code, memory, threads or devices. It reads its order
as JSON and answers line by line; when it dies, its measurement fails and nothing else."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

import msgspec

from sparring.errors import InputError, SparringError

__all__ = ["Died", "MeasuringChild", "open_child", "say", "serve"]


class Died(SparringError):
    """The child ended without a word: a crash of what it measured."""


class MeasuringChild(NamedTuple):
    pid: int
    lines: Iterator[dict[str, Any]]


@contextlib.contextmanager
def open_child(
    module: str, order: Any, environment: dict[str, str], cores: Collection[int] | None = None
) -> Iterator[MeasuringChild]:
    """A process that does as ordered: `python -m module`. It runs on `cores` alone, from its first moment."""
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
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died: the end says why
                process.stdin.write(msgspec.json.encode(order).decode())
                process.stdin.close()
            yield MeasuringChild(process.pid, _lines(process, process.stdout, errors))
        finally:
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
    """In the child: reads the order and does it."""
    order = json.loads(sys.stdin.read())
    try:
        do(order)
    except SparringError as error:
        say(error=str(error), input=isinstance(error, InputError))
