"""What is published: the wheel has all that a user needs and nothing else, and works where it is installed."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sparring import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"


def build(source: Path, to: Path, target: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(to), "--target", target]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for target in ("wheel", "sdist"):
        build(ROOT, folder, target)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"sparring-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return built / f"sparring-{__version__}.tar.gz"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, in a folder before this environment's packages: quick, and without a network."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True)
    return folder


def run(installed: Path, *command: str) -> str:
    """Its output. It runs in a folder without sources, so that only the wheel's can be found."""
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=installed.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    files = {
        str(path.relative_to(SOURCES))
        for path in (SOURCES / "sparring").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"sparring/py.typed", "sparring/dashboard/static/index.html"} <= files
    info = f"sparring-{__version__}.dist-info"
    files |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "RECORD")}
    assert set(contents(wheel)) == files


def test_the_wheel_has_the_licence(wheel: Path) -> None:
    found = contents(wheel)[f"sparring-{__version__}.dist-info/licenses/LICENSE"]
    assert found == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(sdist, tmp_path)
    source = tmp_path / f"sparring-{__version__}"
    build(source, tmp_path / "dist", "wheel")
    assert contents(tmp_path / "dist" / wheel.name) == contents(wheel)


def test_the_sdist_has_what_a_packager_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "tests/test_package.py",
        "docs/client.md",
    } <= names
    stray = {name for name in names if name.startswith((".venv", "site/", "dist/", ".sparring", "runs/"))}
    assert stray == set()


def test_the_description_is_the_readme(wheel: Path) -> None:
    data = contents(wheel)[f"sparring-{__version__}.dist-info/METADATA"]
    metadata = email.message_from_string(data.decode())
    assert metadata["Version"] == __version__
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_the_client_of_the_wheel_is_imported(installed: Path) -> None:
    where = run(installed, sys.executable, "-c", "import sparring.client; print(sparring.client.__file__)")
    assert Path(where.strip()).is_relative_to(installed)


def test_the_command_of_the_wheel_runs(installed: Path) -> None:
    command = str(installed / "bin" / "sparring")
    assert "Usage: sparring" in run(installed, command, "--help")
    assert __version__ in run(installed, command, "--version")


def test_the_dashboard_of_the_wheel_has_its_files(installed: Path) -> None:
    code = "import sparring.dashboard as d; print(d.__file__)"
    static = Path(run(installed, sys.executable, "-c", code).strip()).parent / "static"
    assert static.is_relative_to(installed)
    names = {path.name for path in (SOURCES / "sparring" / "dashboard" / "static").iterdir()}
    assert {path.name for path in static.iterdir()} == names
