"""Where a trial's run directory lies: on the machine of `sparring sweep`. A trial on another machine works in a
directory of its own there and sends it home with every checkpoint; no shared filesystem is needed."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sparring.files import replace_directory
from sparring.launch.ray_cluster import NodeAffinitySchedulingStrategy, ray
from sparring.runs.run import Run, is_run

__all__ = ["Home", "write_files"]

T = TypeVar("T")
Files = dict[str, bytes | None]  # relative path → content; none: as it was


class Home:
    def __init__(self, path: Path, node: str) -> None:
        """`path` of the run directory on `node`."""
        self.path, self.node = path, node
        self.here = ray.get_runtime_context().get_node_id() == node
        self.work = path if self.here else Path(tempfile.mkdtemp(prefix="sparring-trial-")) / path.name
        self.sent: dict[str, tuple[int, int]] = {}  # path → time and size of what is at home
        if not self.here and (files := self._ask(read_files, path)):
            write_files(self.work, files)

    def _ask(self, function: Callable[..., T], *words: object) -> T:
        """Has it done at home."""
        if self.here:
            return function(*words)
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        done: T = ray.get(ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(*words))
        return done

    def send(self) -> None:
        if self.here:
            return
        found = {str(path.relative_to(self.work)): path for path in self.work.rglob("*") if path.is_file()}
        now = {name: (path.stat().st_mtime_ns, path.stat().st_size) for name, path in found.items()}
        files: Files = {
            name: None if self.sent.get(name) == now[name] else path.read_bytes() for name, path in found.items()
        }
        self._ask(write_files, self.path, files)
        self.sent = now

    def checkpoint_of(self, name: str) -> tuple[str, Files]:
        """Another trial's newest checkpoint: its name and files."""
        return self._ask(newest, self.path.with_name(name))

    def leave(self) -> None:
        if not self.here:
            shutil.rmtree(self.work.parent, ignore_errors=True)


def read_files(path: Path) -> Files:
    """A run directory; nothing where there is none."""
    path = path if path.exists() else path.with_name(path.name + ".old")
    if not is_run(path):
        return {}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def write_files(path: Path, files: Files) -> None:
    """Replaces a directory as a whole: there is always the old one or the new one."""
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    if not path.exists() and old.exists():
        old.rename(path)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    for name, content in files.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            os.link(path / name, new / name)
        else:
            (new / name).write_bytes(content)
    replace_directory(path, new, old)
    shutil.rmtree(old, ignore_errors=True)


def newest(path: Path) -> tuple[str, Files]:
    """Its owner trains on meanwhile, and removes older checkpoints: what vanishes while it is read is read anew."""
    for attempt in range(5):
        try:
            found = Run(path).checkpoints()[-1]
            return found.name, {file.name: file.read_bytes() for file in found.iterdir()}
        except FileNotFoundError:
            if attempt == 4:
                raise
    raise AssertionError
