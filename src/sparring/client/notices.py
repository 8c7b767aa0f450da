"""What the client has to tell a developer: through logging (`sparring.client`), each thing once, never per step."""

import logging
import re
import threading

__all__ = ["Notices", "log"]

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
