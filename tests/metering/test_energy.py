"""Sources of energy, at our own seam: a folder as the kernel has it for RAPL, a stand-in of NVIDIA's library, commands
that print watts. No machine with the real counters is asked."""

import itertools
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until

from sparring.errors import InputError
from sparring.metering import energy
from sparring.metering.energy import Estimate, Failed, GpuEnergy, Integral, Meter, Nvml, Rapl, energy_of, open_sources
from sparring.metering.sampler import Processes, Sampler


def zone(root, name, label, counter, most=1000):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{counter}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder / "energy_uj"


class StandIn:
    """pynvml as far as we use it."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus=2, counter=True):
        self.gpus, self.counter, self.broken, self.mj, self.mw = gpus, counter, False, 5000, 30_000

    def nvmlInit(self):
        if self.gpus is None:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        if self.broken or not self.counter:
            raise self.NVMLError("Not Supported")
        return self.mj

    def nvmlDeviceGetPowerUsage(self, device):
        return self.mw

    def nvmlDeviceGetUtilizationRates(self, device):
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=20 + 40 * device)

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=1_000_000)


def test_rapl_sums_packages_and_memory_and_wraps_around(tmp_path):
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900)
    dram = zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)  # a part of the package
    psys = zone(tmp_path, "intel-rapl:1", "psys", 5)  # holds the packages
    rapl = Rapl(tmp_path)
    assert rapl.joules() == 0
    package.write_text("950\n")
    dram.write_text("7\n")
    psys.write_text("500\n")
    assert rapl.joules() == pytest.approx(57e-6)
    package.write_text("20\n")  # beyond 1000
    assert rapl.joules() == pytest.approx(127e-6)
    package.unlink()
    with pytest.raises(Failed, match="cannot be read any more"):
        rapl.joules()


def test_rapl_that_is_not_there_or_not_readable(tmp_path):
    with pytest.raises(Failed, match="no counters"):
        Rapl(tmp_path)
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 900)
    counter.unlink()
    counter.mkdir()  # what root may not read either
    with pytest.raises(Failed, match="cannot be read"):
        Rapl(tmp_path)


def test_gpus_by_their_counters_or_by_power():
    module = StandIn()
    source = GpuEnergy(Nvml(module))
    module.mj = 8000
    assert source.joules() == 6.0  # of two
    assert Nvml(module).look() == (pytest.approx(0.4), 2_000_000)
    module.broken = True
    with pytest.raises(Failed, match="any more"):
        source.joules()
    old = GpuEnergy(Nvml(StandIn(counter=False)))
    time.sleep(0.01)
    assert 0 < old.joules() < 60 * 60


@pytest.mark.parametrize(("gpus", "why"), [(0, "no GPU"), (None, "Driver Not Loaded")])
def test_a_machine_without_gpus_has_no_nvml(gpus, why):
    with pytest.raises(Failed, match=why):
        Nvml(StandIn(gpus))


def test_watts_over_time():
    watts, times = iter([100.0, 200.0, 200.0]), iter([0.0, 2.0, 5.0])
    integral = Integral(lambda: next(watts), lambda: next(times))
    assert [integral.joules(), integral.joules()] == [300.0, 900.0]


def test_a_meter_is_a_command_that_prints_watts():
    meter = Meter("echo reading; echo 42.5")
    assert meter.watts() == 42.5
    time.sleep(0.01)
    assert 0 < meter.joules() < 42.5 * 60


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", "printed nothing"),
        ("echo 40 W", "printed '40 W': a number is expected"),
        ("echo nan", "printed 'nan'"),
        ("echo -3", "printed '-3'"),
        ("echo away >&2; exit 3", "ended with 3: away"),
        ("no-such-meter-here", "ended with 127"),
    ],
)
def test_a_meter_that_does_not_work_is_refused_at_once(command, why):
    with pytest.raises(InputError, match=f"--meter: .*{why}"):
        Meter(command)


def test_the_meter_of_the_docs_reaches_us_whole(tmp_path, monkeypatch):
    """As the line is typed into a shell, with a stand-in of ipmitool."""
    docs = Path(__file__, "../../../docs/energy.md").resolve().read_text()
    (line,) = [line for line in docs.splitlines() if line.startswith("sparring") and "ipmitool" in line]
    stand_ins = {
        "sparring": 'for last; do :; done; printf %s "$last"',
        "ipmitool": 'echo "    Instantaneous power reading:                   220 Watts"; echo "    Minimum: 9 Watts"',
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    meter = Meter(command)
    assert meter.watts() == 220
    meter.close()


def test_a_meter_that_hangs(monkeypatch):
    monkeypatch.setattr(energy, "METER_LIMIT", 0.1)
    with pytest.raises(InputError, match="did not end within"):
        Meter("sleep 5")


def test_one_figure_of_several_sources():
    assert energy_of({"meter": 9.0, "rapl": 5.0, "nvml": 1.0}) == (9.0, "power meter")
    assert energy_of({"rapl": 5.0, "nvml": 1.0}) == (6.0, "RAPL + NVML")
    assert energy_of({"nvml": 1.0}) == (1.0, "NVML")
    assert energy_of({"estimate": 1.0}) == (1.0, "CodeCarbon's estimate")
    assert energy_of({}) is None


def test_sources_of_a_machine(tmp_path):
    assert open_sources(None, tmp_path, None) == []
    zone(tmp_path, "intel-rapl:0", "package-0", 900)
    assert [s.name for s in open_sources("echo 5", tmp_path, Nvml(StandIn()))] == ["meter", "rapl", "nvml"]


def test_what_a_sampler_sees(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0, most=10**9)
    module = StandIn()
    row, seen = {}, 0.0
    with Sampler(0.01, powercap=tmp_path, nvml=Nvml(module)) as sampler:
        counter.write_text("4000000")
        module.mj = 6000
        end = time.monotonic() + 20
        while time.monotonic() < end and seen < 4:
            time.sleep(0.02)
            row = sampler.take()
            seen += row.get("energy/rapl_j", 0.0)
        time.sleep(1)  # CPU seconds are counted by hundredths: less says little
        row = sampler.take()
    assert seen == 4.0  # each joule once
    assert row["usage/gpu"] == pytest.approx(0.4)
    assert row["usage/vram_mb"] == 2.0
    assert row["usage/memory_mb"] > 5
    assert 0 <= row["usage/cpu"] < 1.5
    assert "energy/estimate_j" not in row
    assert sampler.sources == []


def test_an_estimate_is_read_seldom(tmp_path, monkeypatch):
    """It costs more than all other readings together."""

    class Fake:
        name, asked = "estimate", 0

        def joules(self):
            Fake.asked += 1
            return float(Fake.asked)

        def close(self):
            pass

    monkeypatch.setattr("sparring.metering.sampler.Estimate", Fake)
    seen = 0
    with Sampler(0.01, powercap=tmp_path, estimate_every=1000) as sampler:
        while seen < 5:
            time.sleep(0.02)
            seen += "usage/cpu" in sampler.take()
    assert Fake.asked == 2  # the first look, and the last
    assert sampler.take()["energy/estimate_j"] == 1.0


def test_nothing_seen_is_no_zero(tmp_path):
    sampler = Sampler(1000, powercap=tmp_path, estimate=False)
    assert sampler.take() == {}
    with sampler:
        assert sampler.take() == {}


def test_a_source_that_fails_is_said_once_and_then_missing(tmp_path, caplog):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    module = StandIn()
    with caplog.at_level(logging.WARNING), Sampler(0.01, powercap=tmp_path, nvml=Nvml(module)) as sampler:
        until(lambda: "energy/rapl_j" in sampler.take())
        counter.unlink()
        module.broken = True
        until(lambda: not sampler.sources)
        sampler.take()
        until(lambda: "usage/cpu" in sampler.take())  # the rest goes on
        row = sampler.take()
    assert not [name for name in row if name.startswith("energy/")]
    assert [text for text in caplog.messages if "RAPL" in text] == [
        text for text in caplog.messages if "RAPL is missing from here on" in text
    ]
    assert len([text for text in caplog.messages if "missing from here on" in text]) == 3


def test_a_mistake_in_the_thread_is_told_once_and_ends_nothing(tmp_path, caplog, monkeypatch):
    sampler, usage, looks = Sampler(0.01, powercap=tmp_path, estimate=False), Sampler._usage, itertools.count(1)
    monkeypatch.setattr(sampler, "_usage", lambda: usage(sampler) if next(looks) > 3 else 1 / 0)
    with sampler:
        until(lambda: "usage/cpu" in sampler.take())
    assert caplog.text.count("a look at usage failed") == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("children_only", [True, False])
def test_processes_count_their_children(children_only):
    began = time.monotonic()
    processes = Processes(children_only=children_only, family_s=0.0)
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        row = processes.look()
        seconds = time.monotonic() - began
        child.communicate(b"\n")
    assert row["usage/cpu"] * seconds * os.cpu_count() >= 0.4
    assert 0 <= row["usage/machine_cpu"] <= 1
    assert row["usage/memory_mb"] > 1


def test_codecarbon_estimates(tmp_path):
    pytest.importorskip("codecarbon")
    estimate = Estimate()
    try:
        first = estimate.joules()
        time.sleep(0.3)
        assert estimate.joules() > first >= 0
    finally:
        estimate.close()
