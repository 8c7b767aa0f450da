"""What `sparring bench inference` found, as files: every inference and every episode in the columns of the hardware
study, a summary, and pictures."""

import csv
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparring.bench import study
from sparring.bench.inference import Measured
from sparring.bench.timed_play import STEP_COLUMNS
from sparring.errors import InputError
from sparring.files import replacing, save_figure, write_whole

__all__ = ["SUMMARY", "check_output", "rows", "study_rows", "write"]

EPISODE_COLUMNS = ("episode", "total_model_time", "num_steps", "average_model_time_per_step", "reward")
# Column → its head in the terminal.
SUMMARY = {
    "model": "model",
    "runtime": "runtime",
    "p50_ms": "p50 ms",
    "p95_ms": "p95 ms",
    "p99_ms": "p99 ms",
    "call_p50_ms": "call p50",
    "steps_per_s": "steps/s",
    "return_mean": "return",
    "episodes": "episodes",
    "steps": "steps",
    "first_ms": "first ms",
    "load_s": "load s",
    "file_mb": "file MB",
    "memory_mb": "memory MB",
    "cpu": "CPU",
    "joules_per_1000": "J/1000",
    "energy_source": "energy by",
    "device": "device",
    "measured": "measured",
    "skipped": "skipped",
}
Cells = dict[str, Any]


def check_output(output: Path, info: Path | None, videos: Path | None) -> None:
    """Before anything is measured: what is to be written can be.

    :raises InputError: it cannot.
    """
    for path, suffix in ((output, ".csv"), (info, ".npz")):
        if path is None:
            continue
        if path.suffix != suffix or path.is_dir():
            raise InputError(f"{path}: name a file that ends in {suffix}")
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no directory {path.parent}")
        probe = path.with_name(f".{path.name}.probe")
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
    if videos is not None:
        place = next(each for each in (videos, *videos.absolute().parents) if each.exists())
        if not place.is_dir():
            raise InputError(f"--video-dir {videos}: {place} is not a directory")
        if not os.access(place, os.W_OK):
            raise InputError(f"--video-dir {videos} cannot be written")


def rows(found: Sequence[Measured]) -> list[Cells]:
    return [_row(each) for each in found]


def _row(each: Measured) -> Cells:
    row: Cells = {"model": each.model.name, "runtime": each.runtime, "measured": "here"}
    if each.file_bytes is not None:
        row["file_mb"] = each.file_bytes / 1e6
    result = each.result
    if result is None:
        return row | {"skipped": each.skipped}
    p50, p95, p99 = np.percentile(each.ms, (50, 95, 99)).tolist()
    whole = result.episodes[:-1] if result.cut and len(result.episodes) > 1 else result.episodes
    return row | {
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "call_p50_ms": float(np.median(each.call_ms)),
        "steps_per_s": result.per_s,
        "return_mean": None if result.cut and len(result.episodes) == 1 else float(np.mean([r for r, _, _ in whole])),
        "episodes": len(result.episodes),
        "steps": len(each.ms),
        "first_ms": result.first_ms,
        "load_s": result.load_s,
        "memory_mb": result.memory_mb,
        "cpu": result.cpu,
        "joules_per_1000": result.joules,
        "energy_source": result.energy_source,
        "device": result.device,
    }


def study_rows(found: Sequence[Measured]) -> list[Cells]:
    """The study's figures, marked as its own, where Pong was played."""
    if not any(study.is_pong(each.model.game.name) for each in found):
        return []
    return [
        {"model": f"study's model {model}", "runtime": name, "p50_ms": ms, "measured": "study (mean)"}
        for name, figures in study.INFERENCE.items()
        for model, ms in zip(study.MODELS, figures, strict=True)
    ]


def write(found: Sequence[Measured], output: Path, info: Path | None = None, videos: Path | None = None) -> list[Path]:
    """All of it, at the end: each file is there whole or not at all."""
    stem = output.with_suffix("")
    written = [
        _table(output, ("model", "runtime", *STEP_COLUMNS), _steps(found)),
        _table(stem.with_name(stem.name + "-episodes.csv"), ("model", "runtime", *EPISODE_COLUMNS), _episodes(found)),
        _table(stem.with_name(stem.name + "-summary.csv"), tuple(SUMMARY), _summary(found)),
    ]
    if info is not None:
        written.append(_merge(found, info))
    filmed = [each.video for each in found if each.video is not None]
    if videos is not None and filmed:
        for video in filmed:
            write_whole(videos / video.name, video.read_bytes(), parents=True, shared=True)
            written.append(videos / video.name)
    picture = stem.with_suffix(".png")
    if draw(found, picture):
        written.append(picture)
    return written


def _table(path: Path, columns: Sequence[str], lines: Iterator[Sequence[Any]]) -> Path:
    with replacing(path) as new, new.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(lines)
    return path


def _steps(found: Sequence[Measured]) -> Iterator[Sequence[Any]]:
    for each in found:
        if each.times is not None:
            with each.times.open(newline="") as file:
                yield from ((each.model.name, each.runtime, *row) for row in csv.reader(file))


def _episodes(found: Sequence[Measured]) -> Iterator[Sequence[Any]]:
    for each in found:
        if each.result is not None:
            for number, (returned, steps, seconds) in enumerate(each.result.episodes, 1):
                yield each.model.name, each.runtime, number, f"{seconds:.6f}", steps, f"{seconds / steps:.9f}", returned


def _summary(found: Sequence[Measured]) -> Iterator[Sequence[Any]]:
    for row in [*rows(found), *study_rows(found)]:
        yield [f"{value:.6g}" if isinstance(value := row.get(name), float) else value for name in SUMMARY]


def _merge(found: Sequence[Measured], path: Path) -> Path:
    """`MODEL/RUNTIME/obs_1`, `…/actions_1`, …: np.load reads them by name."""
    with replacing(path) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for each in found:
            if each.info is None:
                continue
            with zipfile.ZipFile(each.info) as file:
                for name in file.namelist():
                    entry = f"{each.model.name}/{each.runtime}/{name}"
                    with file.open(name) as source, out.open(entry, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, 1 << 20)
    return path


def draw(found: Sequence[Measured], path: Path) -> bool:
    """Times of every inference as distributions, and their medians beside the study's. False: without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [each for each in found if each.result is not None]
    if not done:
        return False
    names = [f"{each.model.name}\n{each.runtime}" for each in done]
    theirs = study_rows(found)
    figure, (times, medians) = pyplot.subplots(1, 2, figsize=(13, max(3.6, 0.42 * (len(done) + len(theirs)) + 1.5)))
    try:
        times.boxplot([each.ms for each in done], orientation="horizontal", whis=(5, 95), showfliers=False)
        times.set_yticks(range(1, len(done) + 1), names, fontsize=8)
        times.set(xlabel="ms of an inference (box: quartiles; whiskers: 5 and 95 %)", xscale="log")
        bars = [(name, float(np.median(each.ms)), "#1b6ca8") for name, each in zip(names, done, strict=True)]
        bars += [(f"{row['model']}\n{row['runtime']}", row["p50_ms"], "#b9b9b9") for row in theirs]
        at = range(len(bars))
        medians.barh(at, [ms for _, ms, _ in bars], color=[colour for _, _, colour in bars])
        medians.set_yticks(at, [name for name, _, _ in bars], fontsize=7)
        for y, (_, ms, _) in zip(at, bars, strict=True):
            medians.annotate(f" {ms:.3g}", (ms, y), va="center", fontsize=8)
        medians.set(
            xlabel="ms, median" + ("; grey: the study's means, on its machines" if theirs else ""), xscale="log"
        )
        for axes in (times, medians):
            axes.invert_yaxis()
            axes.grid(alpha=0.25, axis="x")
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        save_figure(figure, path, dpi=120)
    finally:
        pyplot.close(figure)
    return True
