"""Rooms know each other in one direction. docs/architecture.md has the same list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparring"
# A room imports only from rooms above it. Imports inside functions count, too.
# fmt: off
ORDER = [
    "errors", "files", "fields", "plugins", "metering",
    "games", "experience", "networks", "export",
    "aws", "store", "registry", "api", "heartbeat", "terminal",
    "stream", "client", "players", "data",
    "algorithms", "search_space", "experiment", "launch", "runs", "callbacks",
    "rollout", "training", "policies", "edge", "rllib", "sweep", "json_schemas", "trainer", "bench",
    "dashboard", "gateway", "news", "platform", "demo", "cli",
]
# fmt: on
# The other way, by a name in a string: an experiment asks for RLlib; the demo is a command, run as a person runs it.
UPWARDS = {("training", "sparring.rllib.bridge"), ("demo", "sparring.cli")}


def rooms_of(module: str) -> str | None:
    """`sparring.games.spec` → games; the package itself and its version are everybody's."""
    return module.split(".")[1] if "." in module else None


def imports(path: Path) -> Iterator[str]:
    """What is imported, and modules that are named in strings: `importlib`, parts by name, processes (`-m`)."""
    tree = ast.parse(path.read_text())
    loggers = {id(word) for node in ast.walk(tree) if is_logger(node) for word in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers:
            module = node.value.partition(":")[0]
            if re.fullmatch(r"sparring(\.\w+)+", module) and is_module(module):
                yield node.value


def is_logger(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger"


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_each_room_knows_only_rooms_above_it():
    wrong, upwards = [], set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":  # the public names, loaded on demand
            continue
        for module in imports(path):
            other = rooms_of(module) if module.startswith("sparring.") else None
            if other in (None, room, "__version__"):
                continue
            if (room, module) in UPWARDS:
                upwards.add((room, module))
            elif other not in ORDER[: ORDER.index(room)]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong, "\n".join(wrong)
    assert upwards == UPWARDS


def test_imports_are_absolute():
    """A relative one hides which room it enters."""
    relative = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_modules_that_strings_name_are_seen(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        'import logging\nlog = logging.getLogger("sparring.training")\n'
        'KINDS = {"dqn": "sparring.algorithms.dqn:DQN", "word": "sparring.nothing", "key": "sparring.schema"}\n'
        'bridge = importlib.import_module("sparring.rllib.bridge")\n'
    )
    assert set(imports(file)) == {"logging", "sparring.algorithms.dqn:DQN", "sparring.rllib.bridge"}


def test_the_list_is_complete():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert rooms - {"__init__"} == set(ORDER)


def test_two_modules_do_not_share_a_name():
    names = [path.name for path in PACKAGE.rglob("*.py")]
    shared = {name for name in names if names.count(name) > 1}
    assert shared <= {"__init__.py", "__main__.py", "protocol.py", "registry.py", "spec.py", "kinesis.py"}


def test_the_page_says_the_same():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.search(r"<!-- rooms -->\n```\n(.*?)```", page, re.S)
    assert listed is not None
    assert listed[1].split() == ORDER


def test_no_file_is_long():
    long = {path.name: lines for path in PACKAGE.rglob("*.py") if (lines := path.read_text().count("\n")) > 500}
    assert long == {}


def test_no_function_is_long():
    """Signatures and docstrings do not count: options of commands take many lines, and are read one by one."""
    long = {}
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > 50:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    assert long == {}


# What each algorithm has, under the same name; and what waits for a commit, in two stores.
ONE_THING = {"Config", "State", "_Append"}


def test_the_name_of_a_class_means_one_thing():
    places: dict[str, list[str]] = {}
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in ONE_THING:
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_walk_enters_no_room_twice():
    """Each hop is a link. The first walk ends where it began: with the player."""
    page = (ROOT / "docs" / "walk.md").read_text()
    walks = [part for part in page.split("\n## ")[1:]]
    assert len(walks) == 2
    for walk, closed in zip(walks, (True, False), strict=True):
        hops = re.findall(r"^\d+\. \[`[\w/.]+`\]\(\.\./src/sparring/([\w/.]+)\)", walk, re.M)
        assert len(hops) == len(re.findall(r"^\d+\. ", walk, re.M))
        rooms = [hop.partition("/")[0].removesuffix(".py") for hop in hops]
        entered = [room for room, before in zip(rooms, [None, *rooms], strict=False) if room != before]
        assert len(set(entered)) == len(entered) - closed, entered
        assert (entered[0] == entered[-1]) is closed
        assert set(entered) <= set(ORDER)
