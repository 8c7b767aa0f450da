"""Where energy is read: the CPU's counters (RAPL), the GPUs' (NVML), a power meter by command, CodeCarbon's estimate.
Each source counts joules since it was opened. What is not there is not a source: nothing here answers zero for it."""

import contextlib
import logging
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sparring.errors import InputError, SparringError

__all__ = [
    "POWERCAP",
    "SOURCES",
    "Energy",
    "Estimate",
    "Failed",
    "Gpu",
    "GpuEnergy",
    "Integral",
    "Meter",
    "Nvml",
    "Rapl",
    "Source",
    "energy_of",
    "joules_of",
    "open_sources",
]

log = logging.getLogger("sparring.metering")
POWERCAP = Path("/sys/class/powercap")
METER_LIMIT = 10.0  # seconds that a meter's command may take
MAX_WATTS = 1e6
# By the name in metrics, `energy/<name>_j`.
SOURCES = {
    "meter": "power meter",
    "rapl": "RAPL",
    "nvml": "NVML",
    "estimate": "CodeCarbon's estimate",
}


class Failed(SparringError):
    """A source that worked, or should have, does not."""


class Source(Protocol):
    name: str  # a key of SOURCES

    def joules(self) -> float:
        """Since it was opened; raises Failed."""

    def close(self) -> None: ...


class Energy(NamedTuple):
    """Of a measurement, and who says so."""

    joules: float
    source: str


def energy_of(joules: dict[str, float]) -> Energy | None:
    """One figure from what the sources counted. A meter has seen the whole machine. RAPL and NVML have seen different
    parts of it. An estimate counts alone, where nothing was measured. None: nobody knows."""
    if "meter" in joules:
        return Energy(joules["meter"], SOURCES["meter"])
    parts = [name for name in ("rapl", "nvml") if name in joules]
    if parts:
        return Energy(sum(joules[name] for name in parts), " + ".join(SOURCES[name] for name in parts))
    return Energy(joules["estimate"], SOURCES["estimate"]) if "estimate" in joules else None


def joules_of(row: Mapping[str, float]) -> dict[str, float]:
    """By source, of what a sampler noted: `energy/meter_j` is the meter's."""
    return {name: row[column] for name in SOURCES if (column := f"energy/{name}_j") in row}


def open_sources(meter: str | None = None, powercap: Path = POWERCAP, nvml: "Nvml | None" = None) -> list[Source]:
    """What measures on this machine; maybe nothing.

    :raises InputError: the meter's command does not print watts.
    """
    sources: list[Source] = [] if meter is None else [Meter(meter)]
    makers: list[Callable[[], Source]] = [lambda: Rapl(powercap)]
    if nvml is not None:
        makers.append(lambda: GpuEnergy(nvml))
    for make in makers:
        try:
            sources.append(make())
        except Failed as error:
            log.info("%s", error)
    return sources


class Rapl:
    """The processor's own counters, of its packages and their memory; they wrap around."""

    name = "rapl"

    def __init__(self, root: Path = POWERCAP) -> None:
        # intel-rapl:0 is a package, intel-rapl:0:1 a part of it. "psys" holds packages: not twice.
        zones = [path for path in sorted(root.glob("intel-rapl:*")) if self._counts(path)]
        if not zones:
            raise Failed(f"RAPL: no counters under {root}")
        try:
            self._zones = [(path / "energy_uj", int((path / "max_energy_range_uj").read_text())) for path in zones]
            self._last = self._read()
        except (OSError, ValueError) as error:
            raise Failed(f"RAPL: the counters under {root} cannot be read ({error}); root may") from error
        self._total = 0

    @staticmethod
    def _counts(path: Path) -> bool:
        try:
            name = (path / "name").read_text().strip()
        except OSError:
            return False
        return name.startswith("package") or name == "dram"

    def _read(self) -> list[int]:
        return [int(counter.read_text()) for counter, _ in self._zones]

    def joules(self) -> float:
        try:
            now = self._read()
        except (OSError, ValueError) as error:
            raise Failed(f"RAPL: a counter cannot be read any more ({error})") from error
        for before, after, (_, most) in zip(self._last, now, self._zones, strict=True):
            self._total += after - before if after >= before else after + most - before
        self._last = now
        return self._total / 1e6

    def close(self) -> None:
        pass


class Gpu(NamedTuple):
    """All GPUs of a machine at one moment."""

    utilisation: float  # 0 … 1, their mean
    memory: int  # bytes in use, of all


class Nvml:
    """NVIDIA's library: raises Failed where it, a driver or a GPU is missing. `module`: what to take for pynvml."""

    def __init__(self, module: Any = None) -> None:
        self.module = _pynvml() if module is None else module
        with self._asked():
            self.module.nvmlInit()
            count = self.module.nvmlDeviceGetCount()
            self.devices = [self.module.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        if not self.devices:
            raise Failed("NVML: no GPU")

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except self.module.NVMLError as error:
            raise Failed(f"NVML: {error}") from error

    def look(self) -> Gpu:
        with self._asked():
            rates = [self.module.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in self.devices]
            used = [int(self.module.nvmlDeviceGetMemoryInfo(device).used) for device in self.devices]
        return Gpu(sum(rates) / len(rates), sum(used))

    def millijoules(self) -> list[int] | None:
        """Counters, of Volta and newer; None: there is only power."""
        try:
            return [int(self.module.nvmlDeviceGetTotalEnergyConsumption(device)) for device in self.devices]
        except self.module.NVMLError:
            return None

    def watts(self) -> float:
        with self._asked():
            return sum(self.module.nvmlDeviceGetPowerUsage(device) for device in self.devices) / 1000


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise Failed("NVML: nvidia-ml-py is not installed (pip install 'sparring[energy]')") from error
    return pynvml


class Integral:
    """Watts over time, by trapezoids."""

    def __init__(self, watts: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._watts, self._clock = watts, clock
        self._power, self._at, self._joules = watts(), clock(), 0.0

    def joules(self) -> float:
        power, at = self._watts(), self._clock()
        self._joules += (power + self._power) / 2 * (at - self._at)
        self._power, self._at = power, at
        return self._joules


class GpuEnergy:
    """Of all GPUs: by their counters, or by their power over time."""

    name = "nvml"

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._first = self._nvml.millijoules()
        self._integral = Integral(self._nvml.watts) if self._first is None else None

    def joules(self) -> float:
        if self._integral is not None:
            return self._integral.joules()
        now = self._nvml.millijoules()
        if now is None or self._first is None:
            raise Failed("NVML: the GPUs' counters of energy cannot be read any more")
        return (sum(now) - sum(self._first)) / 1000

    def close(self) -> None:
        pass


class Meter:
    """A command that prints the power in watts, such as one that asks a socket or a BMC; run for each reading."""

    name = "meter"

    def __init__(self, command: str) -> None:
        self.command = command
        try:
            self._integral = Integral(self.watts)
        except Failed as error:
            raise InputError(f"--meter: {error}") from error

    def watts(self) -> float:
        try:
            done = subprocess.run(
                self.command, shell=True, capture_output=True, text=True, timeout=METER_LIMIT, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the meter's command {self.command!r} did not end within {METER_LIMIT:g} s") from error
        except (OSError, ValueError) as error:  # bytes that are no text
            raise Failed(f"the meter's command {self.command!r} cannot be run: {error}") from error
        if done.returncode:
            why = done.stderr.strip()[-200:] or "without a word"
            raise Failed(f"the meter's command {self.command!r} ended with {done.returncode}: {why}")
        return self._number(done.stdout)

    def _number(self, printed: str) -> float:
        lines = printed.strip().splitlines()
        try:
            watts = float(lines[-1])
        except (IndexError, ValueError):
            watts = math.nan
        if not 0 <= watts < MAX_WATTS:
            found = repr(lines[-1][:60]) if lines else "nothing"
            raise Failed(f"the meter's command {self.command!r} printed {found}: a number is expected, the watts")
        return watts

    def joules(self) -> float:
        return self._integral.joules()

    def close(self) -> None:
        pass


class Estimate:
    """CodeCarbon's, offline: from the machine's load, the processor's rated power and the memory's size. It is an
    estimate, and named so everywhere."""

    name = "estimate"

    def __init__(self) -> None:
        try:
            from codecarbon import OfflineEmissionsTracker
            from codecarbon.output_methods.base_output import BaseOutput
        except ImportError as error:
            raise Failed("estimate: CodeCarbon is not installed (pip install 'sparring[energy]')") from error
        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
        self._kwh: list[float] = []  # since the last flush
        kept = self._kwh

        class Flushes(BaseOutput):  # type: ignore[misc]  # CodeCarbon is Any to mypy
            def out(self, total: Any, delta: Any) -> None:
                kept.append(float(total.energy_consumed))

            live_out = out

        self._tracker = OfflineEmissionsTracker(
            country_iso_code="DEU",  # which grid: of CO₂, which is not asked for
            output_methods=[],
            measure_power_secs=3600,  # `joules` asks
            log_level="critical",
            allow_multiple_runs=True,
            output_handlers=[Flushes()],
        )
        self._tracker.start()
        self._first = 0.0
        self._first = self.joules()

    def joules(self) -> float:
        self._kwh.clear()
        self._tracker.flush()
        if not self._kwh:
            raise Failed("CodeCarbon does not answer")
        return self._kwh[-1] * 3.6e6 - self._first

    def close(self) -> None:
        self._tracker.stop()
