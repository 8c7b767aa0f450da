"""What the client has to tell a developer: through logging (`sparring.client`), each thing once, never per step."""

import logging
import re
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Notices", "attempt", "describe", "log"]

T = TypeVar("T")
log = logging.getLogger("sparring.client")
MAX_REMEMBERED = 1000
MAX_LENGTH = 2000


class Notices:
    """Says each message once; two that differ only in their numbers are the same."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, message: str) -> None:
        message = message[:MAX_LENGTH]  # it may quote a server
        key = re.sub(r"[0-9a-f]{16,}|[\d.:+−-]+", "#", message)
        with self._lock:
            if key in self._said or len(self._said) >= MAX_REMEMBERED:
                return
            self._said.add(key)
        log.warning(message)

    def guard(self, what: str, job: Callable[[], T]) -> T | None:
        """Does a background thread's work, which must not end the thread: whatever goes wrong is logged once."""
        done = attempt(job)
        if not isinstance(done, Exception):
            return done
        self.warn(f"{what} failed: {describe(done)}. It is tried again later")
        return None


def attempt(job: Callable[[], T]) -> T | Exception:
    """What the job returns or, whatever it is, raises; its traceback is in the log for those who debug."""
    try:
        return job()
    except Exception as error:
        log.debug("%s", error, exc_info=True)
        return error


def describe(error: Exception) -> str:
    """With its kind: unforeseen errors often say little else."""
    return f"{type(error).__name__}: {error}"
