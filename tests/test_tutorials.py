"""Every page of docs/tutorials does what it says; and the one who reads them notices when it does not."""

import os
import sys
from pathlib import Path

import pytest
import tutorial_page
from tutorial_page import Failed


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", tutorial_page.pages(), ids=lambda page: page.stem)
def test_a_tutorial_runs_as_written(page: Path, tmp_path: Path) -> None:
    tutorial_page.run(page, tmp_path)


def read(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    tutorial_page.run(page, tmp_path)


def test_blocks_share_a_directory(tmp_path: Path) -> None:
    page = """
<!-- file: text.txt -->
```text
It works.
```
Then:
```sh
cat text.txt
```
<!-- prints -->
```text
It wor…
```
```python
assert open("text.txt").read() == "It works.\\n"
```
"""
    read(tmp_path, page)


def test_a_file_in_parts(tmp_path: Path) -> None:
    part = "<!-- {} -->\n```text\n{}\n```\n"
    page = part.format("file: text.txt", "one") + part.format("append: text.txt", "two") + "```sh\ncat text.txt\n```\n"
    read(tmp_path, page)
    assert (tmp_path / "work/text.txt").read_text() == "one\n\ntwo\n"


def test_the_algorithm_of_the_tutorial_is_the_example() -> None:
    """Line by line: the page shows all of examples/a2c.py, and nothing else."""
    page = (tutorial_page.ROOT / "docs/tutorials/your-own-algorithm.md").read_text()
    shown = [
        line
        for step in tutorial_page.steps(page)
        if "a2c.py" in (step.markers.get("file"), step.markers.get("append"))
        for line in step.text.splitlines()
    ]
    example = (tutorial_page.ROOT / "examples/a2c.py").read_text()
    code = example[example.index("from functools") :].splitlines()
    assert list(filter(None, shown)) == list(filter(None, code))


def test_a_failing_block_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"page\.md, line 3: exit code 3, expected 0(.|\n)*no such thing"):
        read(tmp_path, "# Page\n\n```sh\necho no such thing; exit 3\n```\n")


def test_the_first_failing_command_of_a_block_ends_it(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="exit code 1"):
        read(tmp_path, "```sh\nfalse\ntrue\n```\n")


def test_an_expected_exit_code(tmp_path: Path) -> None:
    read(tmp_path, "<!-- exit: 75 -->\n```sh\nexit 75\n```\n")
    (again := tmp_path / "again").mkdir()
    with pytest.raises(Failed, match="exit code 0, expected 75"):
        read(again, "<!-- exit: 75 -->\n```sh\ntrue\n```\n")


def test_other_output_than_the_page_shows(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="'return 475' was not printed"):
        read(tmp_path, "```sh\necho return 12\n```\n<!-- prints -->\n```text\nreturn 475\n```\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```yaml\na: 1\n```\n", "line 1: a block of 'yaml' needs"),
        ("<!-- backgruond: ready -->\n```sh\ntrue\n```\n", "line 1: 'backgruond' is none of"),
        ("<!-- exit: 75 -->\n\nText between.\n\n```sh\nexit 75\n```\n", "line 3: exit belongs"),
    ],
)
def test_what_would_be_left_out_by_accident_is_refused(text: str, why: str) -> None:
    with pytest.raises(Failed, match=why):
        tutorial_page.steps(text)


def test_a_background_block_is_interrupted_and_ended(tmp_path: Path) -> None:
    waiting = (
        "import os, time\n"
        "print(os.getpid(), 'waits', flush=True)\n"
        "try:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    (tmp_path / "waiting.py").write_text(waiting)
    command = f"{sys.executable} ../waiting.py"
    read(
        tmp_path,
        f"<!-- background: waits -->\n```sh\n{command}\n```\n"
        "<!-- interrupt -->\n<!-- prints -->\n```text\ninterrupted\n```\n"
        f"<!-- background: waits -->\n```sh\n{command}\n```\n",
    )
    left = int((tmp_path / "logs" / "001").read_text().split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_a_background_block_that_dies_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"'ready' was not printed(.|\n)*in use"):
        read(tmp_path, "<!-- background: ready -->\n```sh\npython -c 'exit(\"port in use\")'\n```\n")


def test_a_block_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutorial_page, "LIMIT", 0.5)
    with pytest.raises(Failed, match=r"did not end within 0\.5 s"):
        read(tmp_path, "```sh\necho $$ > pid; sleep 600\n```\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "work" / "pid").read_text()), 0)


def test_what_cleans_up_runs_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="line 1: exit code 1"):
        read(tmp_path, "```sh\nfalse\n```\n```sh\ntouch not-reached\n```\n<!-- finally -->\n```sh\ntouch done\n```\n")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["done"]
