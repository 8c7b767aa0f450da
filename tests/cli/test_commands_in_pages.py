"""Every `sparring …` that a page, an example or a message names exists, with its options, and every option has help."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sparring.cli.entry import app

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*", "experiments/**/*.yaml", "src/**/*.py", "src/**/*.js")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.name != "CHANGELOG.md"  # which tells of what was, in short forms
)
# In a line of its own, perhaps behind a prompt or a `cd`, or between backticks.
LINE = re.compile(r"^\s*(?:cd / && )?(?:\w*\$ +)?(sparring [a-z].*)$", re.M)
QUOTED = re.compile(r"`(sparring [a-z][^`]*)`")
ROOT_COMMAND: Any = typer.main.get_command(app)


def commands(text: str) -> Iterator[str]:
    text = text.replace("\\\n", " ")
    for found in LINE.findall(text):
        yield from re.split(r"; |&&|\| (?=grep)| &$", re.split(r"\s#\s", found)[0])
    yield from QUOTED.findall(re.sub(r"\s+", " ", text))


def words(command: str) -> list[str]:
    try:
        return shlex.split(command)[1:]
    except ValueError:  # half a line: a quote goes on in the next
        return command.split()[1:]


def alternatives(given: list[str]) -> Iterator[list[str]]:
    """`promote GAME VERSION | rollback GAME` is two commands."""
    while "|" in given:
        yield given[: given.index("|")]
        given = given[given.index("|") + 1 :]
    yield given


def mistakes(command: str) -> Iterator[str]:
    for given in alternatives(words(command)):
        node, rest = ROOT_COMMAND, given
        while hasattr(node, "commands") and rest and re.fullmatch(r"[a-z|-]+", rest[0]):
            unknown = [name for name in rest[0].split("|") if name not in node.commands]
            if unknown:
                yield f"there is no command {unknown[0]!r}"
                return
            node, rest = node.commands[rest[0].split("|")[0]], rest[1:]
        options = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            name = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][a-z-]*", name) and name not in options | {"--help"}:
                yield f"{node.name} has no option {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_are_named_exist(path: Path) -> None:
    found = [(command, list(mistakes(command))) for command in commands(path.read_text())]
    assert [each for each in found if each[1]] == []


def test_mistakes_are_seen() -> None:
    page = "Type `sparring trian x` or:\n\n    $ sparring train x --algoritm ppo --set a.b=1 # --no\n"
    page += "sparring models GAME | playes GAME\nhead$   sparring cluster up --haed; sparring ab start x --model y\n"
    assert [why for command in commands(page) for why in mistakes(command)] == [
        "train has no option --algoritm",
        "there is no command 'playes'",
        "up has no option --haed",
        "start has no option --model",
        "there is no command 'trian'",
    ]


def test_the_pages_are_looked_at() -> None:
    assert sum(len(list(commands(path.read_text()))) for path in FILES) > 350


def leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(node, "commands", {}).items():
        yield from leaves(command, f"{path} {name}")
    if not hasattr(node, "commands"):
        yield path, node


def test_every_command_and_option_has_help() -> None:
    for path, command in leaves(ROOT_COMMAND, "sparring"):
        assert command.help, path
        silent = [p.opts for p in command.params if p.param_type_name == "option" and not p.help]
        assert silent == [], path
