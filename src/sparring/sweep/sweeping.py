"""From a sweep's file to its results: `begin` a new one, `reopen` one that was interrupted, `carry_out` either."""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sparring.errors import InputError, SparringError
from sparring.experiment import override
from sparring.files import write_whole
from sparring.runs.run import RUNS, alone
from sparring.sweep.journal import Journal, TrialStatus
from sparring.sweep.plan import Sweep, read

__all__ = ["begin", "carry_out", "reopen"]

CHANGEABLE = ("tune.samples", "tune.parallel", "resources")  # of a sweep that has begun
TrialsView = Callable[[], AbstractContextManager[Callable[[Iterable[TrialStatus]], None]]]


def begin(file: Path, changes: Iterable[str] = (), out: Path | None = None) -> tuple[Sweep, Path]:
    """A new sweep, checked, with a Ray to run on, and its directory."""
    if (file / "sweep.yaml").is_file():
        raise InputError(f"{file} is a sweep that has begun: continue it with --resume")
    sweep = read(file, changes)
    sweep.check()
    root = out or _free_directory(sweep)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        what = "has a sweep already: continue it with --resume, or" if (root / "sweep.yaml").is_file() else "exists:"
        raise InputError(f"{root} {what} choose another directory (--out)")
    load_tuning().prepare(sweep)  # before anything is written: it may refuse
    root.mkdir(parents=True, exist_ok=True)
    _write(sweep, root)
    return sweep, root


def reopen(root: Path, changes: Iterable[str] = ()) -> tuple[Sweep, Path]:
    path = root / "sweep.yaml"
    if not path.is_file():
        raise InputError(f"{root} has no sweep to resume: there is no sweep.yaml")
    changes = list(changes)
    for change in changes:
        if not change.startswith(CHANGEABLE):
            raise InputError(f"--set {change}: a sweep that has begun can only change {', '.join(CHANGEABLE)}")
    sweep = read(path)
    if changes:
        before = sweep
        sweep = Sweep.parse(override(sweep.to_builtins(), changes))
        if sweep.total < before.total or (sweep.total > before.total and sweep.tune.scheduler == "pbt"):
            raise InputError(f"tune.samples: a sweep of {before.total} trials can grow, unless it is pbt's population")
        sweep.check()
    load_tuning().prepare(sweep)
    if changes:
        _write(sweep, root)
    return sweep, root


def carry_out(sweep: Sweep, root: Path, view: TrialsView) -> tuple[list[TrialStatus], bool]:
    """All trials, as far as they came, with their results written; and whether all have ended. False: interrupted."""
    from sparring.sweep import results as report

    tuning = load_tuning()
    assert sweep.tune.metric is not None
    with alone(root, "swept"):
        journal = Journal(root, sweep.tune.metric)
        complete = True
        if len(journal.trials) < sweep.total or journal.left():
            with view() as watcher:
                complete = tuning.run(sweep, root, journal, watcher)
        trials = list(journal.trials.values())
        report.write_all(sweep, root, trials)
    failed = [trial for trial in trials if trial.state == "failed"]
    if complete and len(failed) == len(trials):
        raise SparringError(f"all {len(trials)} trials failed. The first one:\n{failed[0].cause}")
    return trials, complete


def load_tuning() -> Any:
    """Ray Tune is an extra, and takes seconds to import."""
    try:
        importlib.import_module("matplotlib")
        return importlib.import_module("sparring.sweep.tuning")
    except ImportError as error:
        raise InputError(
            f"sweeps need Ray Tune, Optuna and matplotlib ({error}): pip install 'sparring[tune]'"
        ) from error


def _free_directory(sweep: Sweep) -> Path:
    first, number = sweep.first, 1
    stem = f"{Path(first.game_id).stem.replace(':', '-')}-{first.name}-sweep".replace("/", "-")
    while (path := RUNS / f"{stem}-{number}").exists():
        number += 1
    return path


def _write(sweep: Sweep, root: Path) -> None:
    import yaml

    text = yaml.safe_dump(sweep.to_builtins(), sort_keys=False, default_flow_style=None)
    write_whole(root / "sweep.yaml", text.encode())
