"""Looks at a process and its children once in a while, from a thread of its own: CPU, memory, GPUs, energy. What fails
is said once and then missing; it is never a zero, and never ends what is measured."""

import functools
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from sparring.metering.energy import POWERCAP, SOURCES, Estimate, Failed, Nvml, Source, open_sources

__all__ = ["USAGE", "Processes", "Sampler"]

Row = dict[str, float]

log = logging.getLogger("sparring.metering")
FAMILY_S = 10.0  # between looks for new children, and at memory: each reads much of /proc
CLOSE_S = 15.0  # that closing waits for a look that is under way
# Names in metrics: parts of all cores of the machine, of this process and its children, and of everybody …
USAGE = ("usage/cpu", "usage/machine_cpu", "usage/memory_mb", "usage/gpu", "usage/vram_mb")


class Processes:
    """CPU and memory of a process and its children, and the machine's load."""

    def __init__(self, pid: int | None = None, *, children_only: bool = False, family_s: float = FAMILY_S) -> None:
        import psutil

        self._psutil, self._family_s = psutil, family_s
        self._root = psutil.Process(pid)
        self._own = [] if children_only else [self._root]
        self._cores = os.cpu_count() or 1
        self._seconds: dict[Any, float] = {}  # CPU seconds of each process so far
        self._memory: float | None = None
        self._looked = 0.0
        self._family()
        self._at, self._machine = time.monotonic(), psutil.cpu_times()

    def look(self) -> Row:
        """Since the look before."""
        psutil, used = self._psutil, 0.0
        if time.monotonic() - self._looked >= self._family_s:
            used += self._family()
        for process, before in list(self._seconds.items()):
            try:
                now = self._cpu(process)
            except psutil.Error:  # it has ended, or is nobody's to see
                del self._seconds[process]
                continue
            used += now - before
            self._seconds[process] = now
        at, machine = time.monotonic(), psutil.cpu_times()
        row = {"usage/cpu": used / max(at - self._at, 1e-9) / self._cores, "usage/machine_cpu": self._busy(machine)}
        if self._memory is not None:
            row["usage/memory_mb"] = self._memory / 1e6
        self._at, self._machine = at, machine
        return row

    def _busy(self, now: Any) -> float:
        def idle(times: Any) -> float:
            return float(times.idle + getattr(times, "iowait", 0.0))

        total = sum(now[:8]) - sum(self._machine[:8])  # guests' time is the user's already
        return 1 - (idle(now) - idle(self._machine)) / total if total > 0 else 0.0

    @staticmethod
    def _cpu(process: Any) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def _family(self) -> float:
        """Takes in new children, and memory of all. The CPU seconds of new ones: they began since the last time."""
        psutil, new, memory = self._psutil, 0.0, 0.0
        for process in [*self._own, *self._root.children(recursive=True)]:
            try:
                if process not in self._seconds:
                    self._seconds[process] = self._cpu(process)
                    new += self._seconds[process]
                memory += self._bytes(process)
            except psutil.Error:
                continue
        self._memory, self._looked = memory or None, time.monotonic()
        return new

    def _bytes(self, process: Any) -> float:
        """With shared pages by their part, where the system tells."""
        full = process.memory_full_info()
        return float(getattr(full, "pss", 0) or full.rss)


class Sampler:
    """From `start` to `close`; `take` gives what was seen since the `take` before.

    :param every: Seconds between looks.
    :param meter: A command that prints watts.
    :param estimate: Let CodeCarbon estimate energy where nothing is measured.
    :param children_only: This process only watches: what it does itself does not count.
    :param family_s: Seconds between looks for new children, and at memory.
    :param estimate_after: Seconds before an estimate begins: CodeCarbon takes seconds to get ready.
    :param estimate_every: Seconds between its readings, which cost more than all others.
    :param powercap: Where RAPL's counters are.
    :param nvml: What knows the GPUs; None: the machine's own, if it has any.
    """

    def __init__(
        self,
        every: float = 1.0,
        meter: str | None = None,
        estimate: bool = True,
        *,
        children_only: bool = False,
        family_s: float = FAMILY_S,
        estimate_after: float = 0.0,
        estimate_every: float = 5.0,
        powercap: Path = POWERCAP,
        nvml: Nvml | None = None,
    ) -> None:
        self.every = every
        self._gpus = nvml or _gpus()
        self.sources = open_sources(meter, powercap, self._gpus)
        self._estimate_at = time.monotonic() + estimate_after if estimate and not self.sources else None
        self._watch = functools.partial(Processes, children_only=children_only, family_s=family_s)
        self._processes: Processes | None = None
        self._estimate_every, self._estimated = estimate_every, 0.0
        self._lock = threading.Lock()  # of what `take` takes
        self._sums: dict[str, tuple[float, int]] = {}  # of looks since the last `take`, and how many they were
        self._joules: dict[str, float] = {}
        self._read: dict[str, float] = {}
        self.looks = 0
        self.seconds = 0.0  # between the looks whose joules the last `take` gave
        self._looked = self._taken = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metering", daemon=True)

    def start(self) -> "Sampler":
        """What was spent before does not count."""
        self._processes = self._watch()
        self._read = {source.name: joules for source in [*self.sources] if (joules := self._ask(source)) is not None}
        self._thread.start()
        return self

    def take(self) -> Row:
        """Means of usage and joules since the last time. A name is missing where nothing was seen meanwhile."""
        with self._lock:
            sums, self._sums = self._sums, {}
            joules, self._joules = self._joules, {}
            self.seconds, self._taken = self._looked - self._taken, self._looked
        row = {name: sums[name][0] / sums[name][1] for name in USAGE if name in sums}
        return row | {f"energy/{name}_j": each for name, each in joules.items()}

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("what measures usage hangs: %s", ", ".join(source.name for source in self.sources))
                return
        for source in self.sources:
            source.close()
        self.sources = []

    def __enter__(self) -> "Sampler":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        told = stopping = False
        while not stopping:
            stopping = self._stop.wait(self.every)  # then one more look, for the rest
            try:
                self._look()
            except Exception:  # a thread that dies silently would leave a gap that nobody can explain
                if not told:
                    log.exception("a look at usage failed, which is a mistake of ours; it goes on, and says so once")
                told = True

    def _look(self) -> None:
        if self._estimate_at is not None and time.monotonic() >= self._estimate_at and not self._stop.is_set():
            self._estimate_at = None
            self._open_estimate()
        row = self._usage()
        due = [source for source in self.sources if source.name != "estimate" or self._estimate_due()]
        counted = {source.name: joules for source in due if (joules := self._ask(source)) is not None}
        with self._lock:
            for name, value in row.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
            for name, joules in counted.items():
                self._joules[name] = self._joules.get(name, 0.0) + joules - self._read.get(name, 0.0)
            self._read |= counted
            self._looked, self.looks = time.monotonic(), self.looks + 1

    def _estimate_due(self) -> bool:
        now = time.monotonic()
        if now - self._estimated < self._estimate_every and not self._stop.is_set():
            return False
        self._estimated = now
        return True

    def _open_estimate(self) -> None:
        try:
            self.sources.append(Estimate())
        except Failed as error:
            log.info("no estimate of energy: %s", error)

    def _ask(self, source: Source) -> float | None:
        try:
            return source.joules()
        except Failed as error:
            log.warning("energy by %s is missing from here on: %s", SOURCES[source.name], error)
            self.sources.remove(source)
            source.close()
            return None

    def _usage(self) -> Row:
        row: Row = {}
        if self._processes is not None:
            try:
                row = self._processes.look()
            except (OSError, ProcessLookupError, _psutil_error()) as error:
                log.info("CPU and memory are not measured any more: %s", error)
                self._processes = None
        if self._gpus is not None:
            try:
                gpu = self._gpus.look()
                row |= {"usage/gpu": gpu.utilisation, "usage/vram_mb": gpu.memory / 1e6}
            except Failed as error:
                log.warning("the GPUs' usage is missing from here on: %s", error)
                self._gpus = None
        return row


def _psutil_error() -> type[Exception]:
    import psutil

    found: type[Exception] = psutil.Error
    return found


def _gpus() -> Nvml | None:
    try:
        return Nvml()
    except Failed as error:
        log.debug("%s", error)
        return None
