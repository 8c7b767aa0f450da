"""Signs of life of the trainer, for the platform that started it: a byte a second through a pipe, from between turns.
A pipe, not a file: a full disk must not look like a trainer that hangs."""

import contextlib
import logging
import os
import time

import msgspec

__all__ = ["Heartbeat", "SilenceLimits", "Watch"]

log = logging.getLogger("sparring.platform")
EVERY = 1.0  # seconds between two signs of life
TICK = 1.0  # seconds that one look can add to a silence


class SilenceLimits(msgspec.Struct, frozen=True):
    """Seconds without a sign of life. Turns are short, but a network may take minutes to compile on a busy machine."""

    reported: float = 30.0  # until it is said
    killed: float = 600.0  # until the process is killed
    start: float = 600.0  # the same for a process that has not given its first one: it loads JAX


class Heartbeat:
    """The trainer's end; of one that nobody watches, none."""

    def __init__(self, pipe: int | None) -> None:
        self._pipe, self._next = pipe, 0.0
        if pipe is not None:
            os.set_inheritable(pipe, False)
            os.set_blocking(pipe, False)

    def beat(self) -> None:
        now = time.monotonic()
        if self._pipe is None or now < self._next:
            return
        self._next = now + EVERY
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # nobody looks, or will any more
            os.write(self._pipe, b".")


class Watch:
    """The platform's end, of one process. Silence is added up over our own looks: a machine that slept, or a platform
    that was stopped itself, is not a trainer that hangs."""

    def __init__(self, limits: SilenceLimits) -> None:
        self._limits = limits
        self._read, self.pipe = os.pipe()  # `pipe` is the process's
        os.set_blocking(self._read, False)
        self._silent, self._looked = 0.0, time.monotonic()
        self._alive = self._warned = False

    def hung(self, pid: int) -> bool:
        """Looks; whether the process is to be killed. A silence is logged once, and its end."""
        now = time.monotonic()
        self._silent += min(now - self._looked, TICK)
        self._looked = now
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read, 4096):
                self._heard()
        limits = self._limits
        if self._alive and self._silent > limits.reported and not self._warned:
            self._warned = True
            log.warning(
                "the trainer (process %d) has given no sign of life for %.0f s: it is busy with a long turn, or hangs; "
                "after %.0f s it is replaced",
                pid,
                self._silent,
                limits.killed,
            )
        if self._silent <= (limits.killed if self._alive else limits.start):
            return False
        log.error("the trainer (process %d) gave no sign of life for %.0f s: killed and replaced", pid, self._silent)
        return True

    def _heard(self) -> None:
        if self._warned:
            log.warning("the trainer is back after %.0f s", self._silent)
        self._silent, self._alive, self._warned = 0.0, True, False

    def hand_over(self) -> None:
        """The process has its end of the pipe: ours of the same is not needed."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def close(self) -> None:
        self.hand_over()
        os.close(self._read)
