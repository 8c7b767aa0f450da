"""Ctrl-C and SIGTERM end a training, or a sweep, after what is under way is saved."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["asked_to_stop"]

log = logging.getLogger("sparring.training")


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set by the first SIGTERM or Ctrl-C: the iteration is finished and saved. The second ends us as ever."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals are the main thread's
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def stop(signum: int, frame: Any) -> None:
        asked.set()
        log.warning("finishing this iteration and writing a checkpoint; once more to end at once")
        for s, handler in before.items():  # shells start what runs in the background with Ctrl-C ignored
            signal.signal(s, signal.SIG_DFL if handler == signal.SIG_IGN else handler)

    for s in before:
        signal.signal(s, stop)
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
