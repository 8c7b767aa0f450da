"""A process that writes to a store or erases from it, and stops itself (SIGSTOP) at a point that its caller names; it
goes on when it gets SIGCONT. Not a test: `test_cassandra_paused.py` starts it.

    python paused_writer.py ADDRESS POINT append FILE
    python paused_writer.py ADDRESS POINT erase PLAYER
"""

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sparring.experience import wire
from sparring.store import StoreAway, StoreBusy, open_store
from sparring.store.cassandra import keyspace

keyspace.TIMEOUT = 2.0  # the pause is longer than that
Keyspace = keyspace.Keyspace
run, start, applied = Keyspace.run, Keyspace.start, Keyspace.applied
stopped = False


def stop() -> None:
    global stopped
    if not stopped:
        stopped = True
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread: it takes no further step


def install(point: str) -> None:
    """Wraps the calls before, or after, which it stops: once."""

    def before(self: Any, statement: str, *values: Any, **options: Any) -> Any:
        if statement == {"claimed": "claims", "looked": "put record"}.get(point):
            stop()
        return start(self, statement, *values, **options)

    def conditional(self: Any, statement: str, *values: Any) -> Any:
        if statement == "advance" and point == "put":
            stop()
        answer = applied(self, statement, *values)
        if statement == "advance" and point == "committed" and not stopped:
            stop()
            raise StoreAway("the answer was lost")
        return answer

    def after(self: Any, statement: str, *values: Any) -> Any:
        rows = run(self, statement, *values)
        if statement == "blocks" and point == "read":
            stop()
        return rows

    Keyspace.start, Keyspace.applied, Keyspace.run = before, conditional, after


def main(address: str, point: str, what: str, given: str) -> None:
    install(point)
    with contextlib.closing(open_store(address)) as store:
        if what == "erase":
            print(store.erase("pole", given))
            return
        fragments = wire.decode(Path(given).read_bytes())
        for _ in range(20):
            try:
                print(" ".join(store.append(fragments)))
                return
            except (StoreAway, StoreBusy):
                time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
