"""Waits of tests for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


def until(condition: Callable[[], Any], what: str | Callable[[], str] = "it", seconds: float = 120) -> Any:
    """Asks until the condition holds, more and more slowly, and returns what it said.

    :param what: It is waited for this: said where it does not come.
    """
    deadline, pause = time.monotonic() + seconds, 0.005
    while not (found := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return found
