"""`sparring bench hardware`: experiments × devices × workers × cores × precision, as far as the machine goes. Every
configuration is measured in a process of its own, and noted at once: the same command goes on where it was stopped."""

import contextlib
import itertools
import os
import platform
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sparring.bench import placing
from sparring.bench.scaling import measure
from sparring.errors import InputError, SparringError
from sparring.experiment import Experiment, read
from sparring.metering.energy import energy_of, joules_of
from sparring.metering.sampler import USAGE, Sampler

__all__ = [
    "Configuration",
    "Machine",
    "Matrix",
    "MeasuredConfiguration",
    "Skipped",
    "grouped",
    "matrix_of",
    "measure_all",
    "open_results",
]

LOOKS_S = 0.25  # between looks at usage: iterations are short
RESULTS = "results.jsonl"


class Configuration(msgspec.Struct, frozen=True):
    """What is measured.

    :param model: The experiment's name: its file's stem.
    :param gpus: Numbers of the GPUs; empty: a CPU learns.
    :param cores: None: all.
    """

    model: str
    gpus: tuple[int, ...]
    workers: int
    cores: tuple[int, ...] | None
    precision: str

    @property
    def device(self) -> str:
        return "CPU" if not self.gpus else "GPU " + "+".join(str(gpu) for gpu in self.gpus)

    @property
    def affinity(self) -> str:
        return "all" if self.cores is None else ",".join(str(core) for core in self.cores)

    def __str__(self) -> str:
        return f"{self.model}, {self.device}, {self.workers} workers, cores {self.affinity}, {self.precision}"

    def of(self, experiment: Experiment) -> Experiment:
        """:raises InputError: the experiment cannot be so."""
        data = experiment.to_builtins()
        data["rollout"]["workers"] = self.workers
        data["resources"] |= {"gpu": ",".join(map(str, self.gpus)) or "none", "devices": 1}
        data["precision"] = self.precision
        return Experiment.parse(data)


class MeasuredConfiguration(msgspec.Struct, kw_only=True):
    """Of a configuration: means over its iterations, without warm-up.

    :param key: Of what it was measured: see `key_of`.
    :param phases: Seconds of an iteration by task.
    :param learned_per_s: Steps of an iteration by the seconds that learning from them took.
    :param usage: Of `metering.sampler.USAGE`, what was seen.
    :param series: The same by iteration.
    :param joules: Of an iteration.
    """

    configuration: Configuration
    key: str
    iterations: int
    iteration_s: float
    steps_per_s: float
    phases: dict[str, float]
    learned_per_s: float | None
    start_s: float
    usage: dict[str, float]
    series: list[dict[str, float]]
    joules: float | None = None
    energy_source: str | None = None


class Skipped(msgspec.Struct, kw_only=True):
    """What was not measured, and why."""

    configuration: Configuration
    why: str


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured."""

    processor: str
    cores: int
    memory_gb: int
    gpus: tuple[str, ...]
    system: str
    python: str
    jax: str

    @classmethod
    def here(cls) -> "Machine":
        from importlib.metadata import version

        import psutil

        return cls(
            processor=_processor(),
            cores=os.cpu_count() or 1,
            memory_gb=round(psutil.virtual_memory().total / 2**30),
            gpus=_gpu_names(),
            system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
            python=platform.python_version(),
            jax=version("jax"),
        )

    def __str__(self) -> str:
        gpus = ", ".join(self.gpus) or "no GPU"
        parts = f"{self.processor}, {self.cores} cores, {self.memory_gb} GiB, {gpus}"
        return f"{parts}; {self.system}, Python {self.python}, JAX {self.jax}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown processor"


def _gpu_names() -> tuple[str, ...]:
    from sparring.metering.energy import Failed, Nvml

    try:
        nvml = Nvml()
    except Failed:
        return ()
    return tuple(str(nvml.module.nvmlDeviceGetName(device)) for device in nvml.devices)


@dataclass(frozen=True)
class Matrix:
    """What to measure. Devices are as `--gpu` has them, cores as `--cpu-affinity`, or `all`."""

    models: dict[str, Experiment]
    devices: tuple[str, ...]
    workers: tuple[int, ...]
    affinity: tuple[str, ...]
    precisions: tuple[str, ...]

    def each(self) -> Iterator[tuple[Configuration, str | None]]:
        """Every configuration, and why it cannot be had here, if so."""
        axes = itertools.product(self.models, self.devices, self.workers, self.affinity, self.precisions)
        seen: set[Configuration] = set()
        for model, device, workers, affinity, precision in axes:
            gpus: tuple[int, ...] = ()
            cores: tuple[int, ...] | None = None
            why: str | None = None
            try:
                gpus = placing.parse_gpus(device)
            except InputError as error:
                gpus, why = _asked_gpus(device), str(error)
            try:
                cores = None if affinity == "all" else placing.parse_affinity(affinity)
            except InputError as error:
                cores, why = placing.cores_of(affinity), str(error)
            configuration = Configuration(model, gpus, workers, cores, precision)
            if configuration in seen:  # "both" where there is one
                continue
            seen.add(configuration)
            if why is None:
                why = self._refusal(configuration)
            yield configuration, why

    def _refusal(self, configuration: Configuration) -> str | None:
        try:
            configuration.of(self.models[configuration.model])
        except InputError as error:
            return str(error)
        return None


def _asked_gpus(device: str) -> tuple[int, ...]:
    """`both` of a machine without any: the study's two."""
    return (0, 1) if device == "both" else tuple(int(part) for part in device.split(",") if part.isdecimal())


def matrix_of(
    files: Sequence[Path],
    devices: str | None,
    workers: str | None,
    affinity: str,
    precision: str,
    changes: Sequence[str] = (),
) -> Matrix:
    """As the command line has it. Devices and cores of several are written with a plus or a dash here: commas are
    between configurations.

    :raises InputError: something is not written as it should be.
    """
    models: dict[str, Experiment] = {}
    for path in files:
        experiment = read(path, changes)
        if experiment.source != "simulate":
            raise InputError(f"{path} learns from a store: this is about trainings that play")
        if path.stem in models:
            raise InputError(f"two experiments are named {path.stem}: rename one")
        models[path.stem] = experiment
    cores = os.cpu_count() or 1
    if devices is None:
        gpus = [str(gpu) for gpu in range(max(placing.gpus_here(), 2))]
        devices = ",".join(["none", *gpus, "+".join(gpus)])
    if workers is None:
        workers = ",".join(["0", *(str(2**i) for i in range(cores.bit_length()) if 2**i <= cores)])
    precisions = tuple(dict.fromkeys(precision.split(",")))
    if wrong := set(precisions) - {"float32", "bfloat16"}:
        raise InputError(f"--precision {sorted(wrong)[0]!r}: float32 or bfloat16, or both with a comma between")
    return Matrix(
        models,
        _parts("--devices", devices, r"none|both|\d{1,4}(\+\d{1,4})*"),
        tuple(int(part) for part in _parts("--workers", workers, r"\d{1,5}")),
        _parts("--affinity", affinity, r"all|\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*"),
        precisions,
    )


def grouped(skipped: Sequence[Skipped]) -> list[tuple[list[str], str]]:
    """What was skipped for the same reason together: models, devices, workers, cores, precisions, and the reason."""
    reasons: dict[str, list[Configuration]] = {}
    for each in skipped:
        reasons.setdefault(" ".join(each.why.split()), []).append(each.configuration)
    found = []
    for why, members in reasons.items():
        rows = [(c.model, c.device, str(c.workers), c.affinity, c.precision) for c in members]
        found.append(([" / ".join(dict.fromkeys(column)) for column in zip(*rows, strict=True)], why))
    return found


def _parts(option: str, text: str, form: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in parts:
        if not re.fullmatch(form, part):
            raise InputError(f"{option} {text}: {part!r} is not one; see `sparring bench hardware --help`")
    return tuple(part.replace("+", ",") for part in parts)


def key_of(experiment: Experiment, configuration: Configuration, iterations: int) -> str:
    """Two measurements with the same key are of the same thing."""
    import hashlib

    data = [configuration.of(experiment).to_builtins() | {"out": None}, msgspec.to_builtins(configuration), iterations]
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:16]


def open_results(folder: Path, machine: Machine) -> list[MeasuredConfiguration]:
    """What was measured before.

    :raises InputError: on another machine, or the file is damaged.
    """
    path = folder / RESULTS
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a directory: choose another with --out")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(machine) + b"\n")
        return []
    first, *lines = path.read_bytes().split(b"\n")
    try:
        before = msgspec.json.decode(first, type=Machine)
        found = [
            msgspec.json.decode(line, type=MeasuredConfiguration) for line in lines[:-1]
        ]  # a last one may be cut short
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InputError(f"{path} is damaged ({error}): choose another directory with --out") from error
    if before != machine:
        raise InputError(f"{path} was measured on another machine ({before}): choose another directory with --out")
    path.write_bytes(b"".join(line + b"\n" for line in [first, *lines[:-1]]))
    return found


def measure_all(
    matrix: Matrix,
    folder: Path,
    iterations: int,
    *,
    meter: str | None = None,
    on_progress: Callable[[str], object] = lambda words: None,
) -> tuple[list[MeasuredConfiguration], list[Skipped], bool]:
    """All that can be measured and was not yet, in order; each is noted in `folder` when it is done. The third: whether
    it came to its end, or was interrupted."""
    before = {each.key: each for each in open_results(folder, Machine.here())}
    found: list[MeasuredConfiguration] = []
    skipped: list[Skipped] = []
    sampler = Sampler(LOOKS_S, meter, children_only=True, family_s=4 * LOOKS_S, estimate_every=LOOKS_S)
    wanted = list(matrix.each())
    try:
        with sampler, terminated_is_interrupted():
            for number, (configuration, why) in enumerate(wanted, 1):
                if why is not None:
                    skipped.append(Skipped(configuration=configuration, why=why))
                    continue
                experiment = matrix.models[configuration.model]
                key = key_of(experiment, configuration, iterations)
                try:
                    if (each := before.get(key)) is None:
                        on_progress(words := f"{number} of {len(wanted)}: {configuration}")
                        each = _measure(configuration, experiment, key, iterations, sampler, words, on_progress)
                        with (folder / RESULTS).open("ab") as file:
                            file.write(msgspec.json.encode(each) + b"\n")
                    found.append(each)
                except SparringError as error:  # also a crash: the others are measured all the same
                    skipped.append(Skipped(configuration=configuration, why=str(error)))
    except KeyboardInterrupt:
        return found, skipped, False
    return found, skipped, True


@contextlib.contextmanager
def terminated_is_interrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(
    configuration: Configuration,
    experiment: Experiment,
    key: str,
    iterations: int,
    sampler: Sampler,
    words: str,
    on_progress: Callable[[str], object],
) -> MeasuredConfiguration:
    series: list[dict[str, float]] = []

    def on_row(counts: bool) -> None:
        seen = sampler.take()
        if counts:
            series.append(seen)

    def progress(number: int) -> None:
        on_progress(f"{words}, iteration {number}")

    environment = placing.environment(None if configuration.gpus else (), None)  # JAX chooses among all that it sees
    done = measure(
        configuration.of(experiment),
        iterations,
        environment,
        progress,
        cores=configuration.cores,
        on_row=on_row,
    )
    joules: dict[str, float] = {}
    for seen in series:
        for source, value in joules_of(seen).items():
            joules[source] = joules.get(source, 0.0) + value
    energy = energy_of(joules)
    steps = done.iteration_s * done.steps_per_s
    return MeasuredConfiguration(
        configuration=configuration,
        key=key,
        iterations=iterations,
        iteration_s=done.iteration_s,
        steps_per_s=done.steps_per_s,
        phases=done.phases,
        learned_per_s=steps / done.phases["learn"] if done.phases["learn"] else None,
        start_s=done.start_s,
        usage=_means(series),
        series=series,
        joules=None if energy is None else energy.joules / iterations,
        energy_source=None if energy is None else energy.source,
    )


def _means(series: Sequence[dict[str, float]]) -> dict[str, float]:
    means: dict[str, Any] = {}
    for name in USAGE:
        if values := [seen[name] for seen in series if name in seen]:
            means[name] = sum(values) / len(values)
    return means
