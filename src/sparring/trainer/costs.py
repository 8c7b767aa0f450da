"""What the trainer's process takes while it learns, all games together: CPU, memory, GPUs, energy. Every game's status
and metrics say it: turns are too short to tell whose it was."""

import time

from sparring.metering.sampler import Row, Sampler

__all__ = ["Costs", "open_sampler"]

LOOKS_S = 5.0  # between looks
ESTIMATE_AFTER = 30.0  # CodeCarbon takes seconds to get ready: not those in which the first game begins


def open_sampler() -> Sampler:
    return Sampler(LOOKS_S, estimate_after=ESTIMATE_AFTER)


class Costs:
    """Means of usage over the last looks, and the joules since the trainer began, by source; before the first look
    nothing."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._sampler = sampler
        self._now: Row = {}
        self._taken = 0.0

    def now(self) -> Row:
        if self._sampler is not None and time.monotonic() - self._taken >= LOOKS_S:
            self._taken = time.monotonic()
            seen = self._sampler.take()
            joules = {
                name: value + self._now.get(name, 0.0) for name, value in seen.items() if name.startswith("energy/")
            }
            self._now = self._now | seen | joules
        return dict(self._now)
