"""Runs a page of docs/tutorials, or docs/in-your-game.md, as a reader does: block after block, in one directory.

What a block does follows from its language; comments on the lines before its fence say more. They do not show on the
page.

    sh                  is run by bash, and must end with 0
    python              is run by Python
    any, with a file    is written there

    <!-- file: NAME -->         write the block to NAME instead of running it
    <!-- append: NAME -->       add the block to the end of NAME, behind an empty line
    <!-- background: TEXT -->   run it beside the rest of the page; go on when it has printed TEXT
    <!-- add: WORDS -->         add WORDS to the block's last line: shorter budgets, free ports
    <!-- exit: CODE -->         it must end with CODE
    <!-- prints -->             nothing to run: what the block before this one printed has each of these lines; … stands
                                for any text, and spaces may be more or fewer
    <!-- interrupt -->          press Ctrl-C in the newest background block and wait for its end; needs no block
    <!-- finally -->            run it in its place, and also when a block before it failed: it stops what was started
    <!-- skip: WHY -->          not run

A block that is none of these is an error, so that nothing on a page is left out by accident. The ports 8400 (the
platform) and 6379 (a cluster's head) become free ones everywhere on the page.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Failed", "Step", "pages", "run", "steps"]

ROOT = Path(__file__).parents[1]
MARKERS = ("file", "append", "background", "add", "exit", "prints", "interrupt", "finally", "skip")
PORTS = ("8400", "6379")
LIMIT = 240.0  # seconds of a block
START = 60.0  # seconds until a background block says that it is ready
COMMENT = re.compile(r"<!-- ([a-z]+)(?:: (.*?))? -->")


class Failed(AssertionError):
    """A block that did not do what the page says."""


@dataclass
class Step:
    """A block, or an `interrupt` without one."""

    line: int
    language: str = ""
    text: str = ""
    markers: dict[str, str] = field(default_factory=dict)


def steps(page: str) -> list[Step]:
    """The page's blocks in their order. Raises Failed for a block that says neither how to run nor why not."""
    found: list[Step] = []
    markers: dict[str, str] = {}
    lines = iter(enumerate(page.splitlines(), 1))
    for number, line in lines:
        if fence := re.fullmatch(r"```(\w*)", line):
            text = []
            for _, inner in lines:
                if inner == "```":
                    break
                text.append(inner)
            found.append(_checked(Step(number, fence[1], "\n".join(text) + "\n", markers)))
            markers = {}
        elif comment := COMMENT.fullmatch(line.strip()):
            if comment[1] not in MARKERS:
                raise Failed(f"line {number}: {comment[1]!r} is none of {', '.join(MARKERS)}")
            if comment[1] == "interrupt":
                found.append(Step(number, markers={"interrupt": ""}))
            else:
                markers[comment[1]] = comment[2] or ""
        elif line.strip() and markers:
            raise Failed(f"line {number}: {', '.join(markers)} belongs on the line before a block")
    return found


def _checked(step: Step) -> Step:
    if step.language not in ("sh", "python") and not {"file", "append", "prints", "skip"} & step.markers.keys():
        raise Failed(f"line {step.line}: a block of {step.language!r} needs file:, prints or skip: on the line before")
    return step


def run(path: Path, directory: Path) -> None:
    """Raises Failed with the line of the page where it is not true."""
    page = path.read_text()
    free = {port: _free_port() for port in PORTS}
    for port, other in free.items():
        page = re.sub(rf"\b{port}\b", other, page)
    left = steps(page)
    with _Reader(directory, f"http://127.0.0.1:{free['8400']}") as reader:
        while left:
            step = left.pop(0)
            try:
                reader.do(step)
            except Failed as error:
                reader.clean_up([step for step in left if "finally" in step.markers])
                raise Failed(f"{path.name}, line {step.line}: {error}") from None


class _Reader(contextlib.AbstractContextManager["_Reader"]):
    """Who types what the page says; at the end all that still runs is ended."""

    def __init__(self, directory: Path, server: str) -> None:
        self._directory = directory / "work"
        self._directory.mkdir()
        self._logs = directory / "logs"
        self._logs.mkdir()
        self._environment = os.environ | {
            "HOME": str(directory),
            "SPARRING_SERVER": server,  # where commands look that name none
            "SPARRING_CLIENT_DIR": str(directory / "client"),
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "200",  # tables are not wrapped
            "RAY_AUTH_TOKEN_PATH": str(directory / "token"),  # `sparring cluster down` stops what has it, nothing else
        }
        self._printed = ""
        self._background: list[tuple[subprocess.Popen[str], Path]] = []

    def __exit__(self, *_: object) -> None:
        for process, _log in reversed(self._background):
            _end(process)

    def do(self, step: Step) -> None:
        if "skip" in step.markers:
            return
        if "interrupt" in step.markers:
            self._interrupt()
        elif "prints" in step.markers:
            self._compare(step.text)
        elif (name := step.markers.get("file")) is not None:
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
        elif (name := step.markers.get("append")) is not None:
            with (self._directory / name).open("a") as file:
                file.write("\n" + step.text)
        elif (ready := step.markers.get("background")) is not None:
            self._start(_command(step), ready)
        else:
            self._run(_command(step), int(step.markers.get("exit", "0")))

    def clean_up(self, steps: list[Step]) -> None:
        for step in steps:
            with contextlib.suppress(Failed):  # the first failure is the one to tell
                self.do(step)

    def _run(self, command: list[str], code: int) -> None:
        process, log = self._popen(command)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            _end(process)
            raise Failed(f"did not end within {LIMIT:g} s:\n{_tail(log)}") from None
        self._printed = log.read_text()
        if process.returncode != code:
            raise Failed(f"exit code {process.returncode}, expected {code}:\n{_tail(log)}")

    def _start(self, command: list[str], ready: str) -> None:
        process, log = self._popen(command)
        self._background.append((process, log))
        end = time.monotonic() + START
        while ready not in log.read_text():
            if process.poll() is not None or time.monotonic() > end:
                raise Failed(f"{ready!r} was not printed:\n{_tail(log)}")
            time.sleep(0.05)
        self._printed = log.read_text()

    def _interrupt(self) -> None:
        if not self._background:
            raise Failed("nothing runs in the background")
        process, log = self._background.pop()
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(START)
        except subprocess.TimeoutExpired:
            _end(process)
            raise Failed(f"did not end within {START:g} s of Ctrl-C:\n{_tail(log)}") from None
        self._printed = log.read_text()

    def _compare(self, text: str) -> None:
        printed = " ".join(self._printed.split())
        for line in filter(None, text.splitlines()):
            parts = (r"\s*".join(re.escape(word) for word in part.split()) for part in line.split("…"))
            if not re.search(".*?".join(parts), printed):
                raise Failed(f"{line!r} was not printed. This was:\n{self._printed[-3000:]}")

    def _popen(self, command: list[str]) -> tuple["subprocess.Popen[str]", Path]:
        log = self._logs / f"{len(list(self._logs.iterdir())):03d}"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self._directory, env=self._environment, text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                # Where the tests themselves run in the background, Ctrl-C is ignored by all that they start.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip
        return process, log


def _command(step: Step) -> list[str]:
    text = step.text
    if words := step.markers.get("add"):
        text = f"{text.rstrip()} {words}\n"
    if step.language == "python":
        return [sys.executable, "-c", text]
    # A shell in the background must be the command itself, or Ctrl-C would end the shell alone.
    background = "background" in step.markers and len(text.splitlines()) == 1
    return ["bash", "-euo", "pipefail", "-c", f"exec {text}" if background else text]


def _end(process: "subprocess.Popen[str]") -> None:
    """With all that it started: it has a session of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "in-your-game.md"]
