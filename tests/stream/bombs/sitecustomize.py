"""On the PYTHONPATH of processes under test, Python runs this first. A file in $SPARRING_BOMBS is a bomb: it is named
after a place, and the first process that comes to that place dies of SIGKILL there (or its Java child does)."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(os.environ["SPARRING_BOMBS"])


def explode(place: str) -> None:
    try:
        (FOLDER / place).unlink()
    except FileNotFoundError:
        return
    victim = os.getpid()
    if place == "java":
        found = subprocess.run(["pgrep", "-P", str(victim), "java"], capture_output=True, text=True, check=True)
        victim = int(found.stdout)
    os.kill(victim, signal.SIGKILL)


def around(owner: Any, name: str, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> None:
    """Bombs at these places, before and after a method does its work."""
    method: Callable[..., Any] = getattr(owner, name)

    def mined(*args: Any, **kwargs: Any) -> Any:
        for place in before:
            explode(place)
        result = method(*args, **kwargs)
        for place in after:
            explode(place)
        return result

    setattr(owner, name, mined)


if os.environ["SPARRING_BOMBS_IN"] == "gateway":
    from sparring.stream.producer import Producer

    around(Producer, "_landed", before=("gateway",))  # the stream has it, and nobody knows yet
elif not {"sparring.cli", "pyspark.worker"}.isdisjoint(sys.orig_argv):  # the driver, and what workers are forked from
    from sparring.store.cassandra import buckets
    from sparring.stream import ingest, sink, source

    # What a dead writer left half-done is taken over by the same rules, sooner; and batches are short.
    buckets.PATIENCE = 8.0
    source.BATCH_SECONDS = 2.0
    around(source._Reading, "__init__", before=("reading",))
    around(source, "_rows", after=("read",))  # a page was fetched, nothing of it is stored
    around(sink.StoreSink, "take", before=("before",))
    around(sink.StoreSink, "_written", after=("inside",))  # a chunk is in the store, others are not
    around(sink.StoreSink, "finish", after=("after",))  # all is in the store, and nobody knows yet
    around(ingest._Job, "batch", before=("java",), after=("driver-uncommitted",))
    around(ingest.Positions, "write", before=("driver-unwritten",))
