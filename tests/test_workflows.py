"""What the forge runs and shows: .github/, the Makefile that the workflows call, and a release's steps."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparring import __version__

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"]


def name_of(path: Path) -> str:
    return path.name


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def commands(path: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps(path))


def schema(name: str, *files: Path) -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", f"vendor.{name}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflows_are_there() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"check", "test", "docs", "release"}


def test_the_workflows_follow_their_schema() -> None:
    schema("github-workflows", *WORKFLOWS)


def test_the_issue_forms_follow_their_schema() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    config = folder / "config.yml"
    schema("github-issue-config", config)
    schema("github-issue-forms", *(path for path in folder.glob("*.yml") if path != config))


def test_all_other_yaml_is_yaml() -> None:
    for path in [ROOT / ".pre-commit-config.yaml", *(ROOT / "experiments").rglob("*.yaml")]:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


@pytest.mark.parametrize("path", [*WORKFLOWS, *GUIDES], ids=name_of)
def test_make_has_the_targets_that_are_named(path: Path) -> None:
    text = commands(path) if path in WORKFLOWS else path.read_text()
    named = set(re.findall(r"(?:^|[`\s])make ([a-z]+)(?=[`\s]|$)", text, re.M))
    assert named, "names no target of make: does this look at the right thing?"
    assert named <= TARGETS


def test_the_guide_tells_of_every_target() -> None:
    named = set(re.findall(r"`make ([a-z]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named >= TARGETS - {"peers", "clean"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_is_allowed_no_more_than_it_needs(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert "timeout-minutes" in job, name
        assert "permissions" not in job or job["environment"] == "release", name
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"(actions|pypa)/[a-z-]+@(v\d+|release/v1)", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_the_changelog_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert __version__ in headings
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", heading) for heading in headings[1:])


# A release


RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def release_step(name: str, tag: str, folder: Path) -> int:
    """The exit code of a step of the release, run where the files of this repository are."""
    [step] = [step for step in steps(RELEASE) if step.get("name") == name]
    for file in ("pyproject.toml", "CHANGELOG.md"):
        (folder / file).write_bytes((ROOT / file).read_bytes())
    env = os.environ | {"GITHUB_REF_NAME": tag}
    return subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=env, check=False).returncode


@pytest.mark.parametrize(("tag", "right"), [(f"v{__version__}", True), ("v99.0.0", False)])
def test_a_release_has_the_version_of_its_tag(tag: str, right: bool, tmp_path: Path) -> None:
    assert (release_step("The tag is the version", tag, tmp_path) == 0) is right


def test_a_release_has_its_part_of_the_changelog(tmp_path: Path) -> None:
    assert release_step("The changelog has this version", "v0.1.0", tmp_path) == 0
    notes = (tmp_path / "notes.md").read_text()
    assert "The first version" in notes
    assert "## " not in notes


def test_a_release_without_a_word_in_the_changelog_fails(tmp_path: Path) -> None:
    assert release_step("The changelog has this version", "v99.0.0", tmp_path) != 0


def test_a_release_takes_what_make_dist_leaves() -> None:
    [upload] = [step["with"] for step in steps(RELEASE) if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert upload["path"].split() == ["dist", "sbom", "notes.md"]
    recipe = (ROOT / "Makefile").read_text().partition("\ndist:")[2].partition("\n\n")[0]
    [sbom] = [s["with"]["predicate-path"] for s in steps(RELEASE) if "predicate-path" in s.get("with", {})]
    assert sbom in recipe


def test_the_sbom_names_every_pinned_package(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndist:")[2].partition("\n\n")[0]
    [command] = [line.split() for line in recipe.splitlines() if "cyclonedx-py" in line]
    command = [str(BIN / "cyclonedx-py"), *command[1:-1], str(tmp_path / "sbom.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "sbom.json").read_text())
    pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "requirements" / "platform.txt").read_text(), re.M)
    assert sorted((c["name"], c["version"]) for c in found["components"]) == sorted(pinned)
    about = found["metadata"]["component"]
    assert (about["name"], about["version"]) == ("sparring", __version__)


def test_the_tests_have_every_extra() -> None:
    """Code for a package that is not in the lock would be tested by nobody. JAX for GPUs has no code of ours: devices
    are tested as virtual ones."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    locked = set(re.findall(r"--extra (\S+)", (ROOT / "requirements" / "dev.txt").read_text()))
    assert locked | {"play", "gateway", "cuda"} == set(extras)  # platform has the first two
    assert locked <= set(re.findall(r"--extra (\S+)", (ROOT / "Makefile").read_text()))


def test_the_version_is_said_once_in_effect() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
