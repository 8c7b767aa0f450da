"""What the Makefile says and sets up on machines that lack something. `scripts/fresh-machine` runs it on a bare one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A copy of the Makefile, on a machine with a few commands and a Python without venv."""
    (tmp_path / "bin").mkdir()
    for name in ("make", "sh", "touch", "env"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *venv*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def make(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": str(place / "bin")}
    return subprocess.run(["make", *words], cwd=place, env=path, capture_output=True, text=True, timeout=60)


def test_without_venv_and_apt_it_says_which_modules_are_missing(bare: Path) -> None:
    done = make(bare, ".venv/.uv")
    assert done.returncode != 0
    assert "python3 cannot make environments: please install its modules venv and ensurepip" in done.stderr
    assert "PATH" not in done.stdout + done.stderr  # venv is no command
    assert not (bare / ".venv").exists()


def test_without_venv_apt_installs_it(bare: Path) -> None:
    """Debian has it in a package of its own."""
    (bare / "scripts" / "system-packages").write_text('#!/bin/sh\necho "asked for $*" >&2\nexit 1\n')
    (bare / "bin" / "apt-get").symlink_to(bare / "bin" / "touch")
    done = make(bare, ".venv/.uv")
    assert done.returncode != 0
    assert "asked for venv=python3-venv" in done.stderr
    assert "cannot make environments" not in done.stderr


def test_uv_of_any_version_uses_the_systems_certificates(bare: Path) -> None:
    done = make(bare, "--eval", "show: ; @env", "show")
    assert done.returncode == 0, done.stderr
    assert {"UV_SYSTEM_CERTS=true", "UV_NATIVE_TLS=true"} <= set(done.stdout.splitlines())
