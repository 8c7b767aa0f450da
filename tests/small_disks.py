"""Disks that are soon full, for tests of what then happens. Only root can make them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["enlarge", "mounted"]


def mounted(place: Path, size: str) -> Iterator[Path]:
    """A folder that holds no more than this; the body of a fixture."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can make a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def enlarge(place: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)
