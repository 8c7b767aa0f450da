"""How the trainer is stopped. SIGTERM and SIGINT set a flag, which is asked between turns: no turn is left
half-done. Only work whose result may be thrown away at any moment, such as an evaluation, is cut short (`limited`)."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequested", "TooLong", "catch_signals", "limited", "stopping", "wait"]


class StopRequested(BaseException):
    """The trainer shall stop, in the midst of limited work. Not an Exception: games catch those."""


class TooLong(Exception):
    """Limited work took longer than it may."""


_stopping = False
_limited = False  # whether limited work is under way: then a signal may raise


def catch_signals() -> None:
    """From now on SIGTERM and SIGINT only set the flag; a second one changes nothing. In the main thread."""
    global _stopping
    _stopping = False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)


def stopping() -> bool:
    return _stopping


def wait(seconds: float) -> None:
    """Sleeps, and wakes early when it is time to stop."""
    until = time.monotonic() + seconds
    while not _stopping and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Inside, StopRequested or TooLong may be raised between any two instructions."""
    global _limited
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGALRM, _alarm)
    try:
        try:
            _limited = True
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second: a game may have caught the first
            if _stopping:
                raise StopRequested
            yield
        finally:
            _limited = False
    finally:  # on its own: the alarm may go off before the line above is reached
        _limited = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _stop(signum: int, frame: FrameType | None) -> None:
    global _stopping, _limited
    _stopping = True
    if _limited:
        _limited = False  # raised once: what follows is the last checkpoint
        raise StopRequested


def _alarm(signum: int, frame: FrameType | None) -> None:
    if _limited:
        raise StopRequested if _stopping else TooLong
