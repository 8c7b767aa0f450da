"""The command line as people and scripts use it: what it prints, where, and with which exit code."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
import urllib3

from sparring import __version__
from sparring.cli import entry as cli
from sparring.errors import InputError, SparringError
from sparring.experience import Columns, new_id, pack
from sparring.games import Box, Discrete, Game, catalog
from sparring.gateway.app import create_app
from sparring.gateway.server import background
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.manifest import DataSpan
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore

COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]  # it is a group
GAME = Game("Tiny-v0", Box((4,)), Discrete(2), env="CartPole-v1")
SPARRING = shutil.which("sparring", path=str(Path(sys.executable).parent)) or "sparring"


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> Callable[..., Result]:
    """`run("games", "--json")` as the installed command would, from an empty directory on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("SPARRING_SERVER", raising=False)
    return lambda *words: Result(*command_line(*words))


@pytest.fixture
def server(tmp_path: Path, random_policy: Callable[..., Policy]) -> Iterator[str]:
    """A platform without a trainer: two players' fragments, two versions of `bot` and one of another model."""
    store, registry = MemoryStore(), Registry(tmp_path / "registry")
    store.register(GAME)
    for player, steps in (("ann", 10), ("bob [bold]", 20)):
        columns = Columns(np.zeros((steps + 1, 4), "<f4"), np.zeros(steps, "<i4"), np.ones(steps, "<f4"))
        played = {"model": "bot", "version": 1, "start": 0, "time": time.time(), "terminated": True}
        store.append([pack(GAME, columns, id=new_id(), player=player, episode=new_id(), **played)])
    policy = random_policy(GAME, (Dense(8),), QValues())
    for model in ("bot", "bot", "other"):
        facts = {"metrics": {"evaluation/return_mean": 123.0}, "config": {"lr": 0.5}, "data": DataSpan(steps=4321)}
        registry.publish(policy, model=model, algorithm="dqn", **facts)
    with background(create_app(store, registry, tmp_path / "trainer")) as url:
        yield url
    store.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a server that is away: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


# Help


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_shows_an_example(run: Callable[..., Result], command: str, option: str) -> None:
    got = run(command, option)
    assert (got.code, got.err) == (0, "")
    assert f"$ sparring {command}" in got.out
    assert f"Usage: sparring {command}" in got.out


def test_help_lists_every_command(run: Callable[..., Result]) -> None:
    got = run("--help")
    assert got.code == 0
    listed = [line.split()[1] for line in got.out.splitlines() if line.startswith("│ ") and len(line.split()) > 2]
    assert set(COMMANDS) <= set(listed)
    assert "Usage:" in run().out


def test_version(run: Callable[..., Result]) -> None:
    assert run("--version") == Result(0, f"sparring {__version__}\n", "")


@pytest.mark.parametrize(
    "words", [("gmes",), ("games", "--jsn"), ("play",), ("up", "--port", "x"), ("up", "--port", "65536")]
)
def test_words_that_are_wrong(run: Callable[..., Result], words: tuple[str, ...]) -> None:
    got = run(*words)
    assert got.code == 2
    assert "Usage: sparring" in got.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algorithm=dqn", "algorithm is 'dqn': write {name: dqn}"),
        ("game=3", "game: expected"),
        ("algorithm.name=3", "algorithm.name is missing"),
    ],
)
def test_changes_that_make_no_experiment(run: Callable[..., Result], change: str, says: str) -> None:
    got = run("train", "CartPole-v1", "--set", change)
    assert got.code == 2
    assert says in got.err


def test_the_installed_command_and_its_completion() -> None:
    done = subprocess.run([SPARRING, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"sparring {__version__}\n"
    script = subprocess.run(
        ["bash", "-c", f"'{SPARRING}' --show-completion; exit $?"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "complete -o default -F _sparring_completion sparring" in script.stdout
    asked = {"COMP_WORDS": "sparring pla", "COMP_CWORD": "1", "_SPARRING_COMPLETE": "complete_bash"}
    words = subprocess.run([SPARRING], env=os.environ | asked, capture_output=True, text=True, timeout=60, check=True)
    assert words.stdout.split() == ["play", "players"]


# Errors


@pytest.mark.parametrize(
    "text", ["[bold]x[/bold]", "[/]", "[red", "a\\[b]", ":smile:", "'[x]' in [/etc/y]", "two\nlines"]
)
@pytest.mark.parametrize(("kind", "code"), [(InputError, 2), (SparringError, 1), (OSError, 1)])
def test_errors_are_printed_as_they_are(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception], code: int
) -> None:
    def broken(**_: object) -> None:
        raise kind(text)

    monkeypatch.setattr(cli, "app", broken)
    assert run() == Result(code, "", f"error {text}\n")


def test_errors_are_one_line_however_long(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / ("y" * 100) / "game.json"
    got = run("play", str(path))
    assert got.code == 2
    assert f"no game declaration at {path}: write one" in got.err


def test_what_a_server_says_cannot_move_the_cursor(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise InputError("\x1b]0;title\x07 \x1b[2J \x9b31m \r gone")

    monkeypatch.setattr(cli, "app", broken)
    got = run()
    assert not any(c in got.err for c in "\x1b\x07\x9b\r")
    assert "gone" in got.err


def test_bugs_keep_their_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError):
        cli.main()


def test_code_from_outside_that_ends_the_process_is_no_success(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: sys.exit(0))  # as an algorithm's update would
    got = run()
    assert (got.code, "test_cli.py, line" in got.err, "ended the process" in got.err) == (1, True, True)
    monkeypatch.undo()
    assert run("--version").code == 0
    (tmp_path / "leaves_on_import.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    got = run("train", "CartPole-v1", "--algorithm", "leaves_on_import:Mine")
    assert (got.code, "cannot import 'leaves_on_import': SystemExit: 0" in got.err) == (2, True)


@pytest.mark.parametrize("words", [("games",), ("games", "X"), ("models", "X"), ("players", "X"), ("games", "--json")])
def test_a_server_that_is_away(run: Callable[..., Result], nobody: str, words: tuple[str, ...]) -> None:
    got = run(*words, "--server", nobody)
    assert (got.code, got.out) == (1, "")
    assert got.err == f"error {nobody} is not reachable: [Errno 111] Connection refused\n"


def test_a_server_s_address_comes_from_the_environment(
    run: Callable[..., Result], nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARRING_SERVER", nobody)
    assert nobody in run("games").err


@pytest.mark.parametrize("address", ["127.0.0.1:8400", "ftp://x", "http://", "[bold]", "http://[::1", ""])
def test_an_address_that_is_none(run: Callable[..., Result], address: str) -> None:
    got = run("games", "--server", address)
    assert got.code == 2
    assert f"{address!r} is not a server's address: write it like http://127.0.0.1:8400" in got.err


# init


def test_init_writes_a_declaration_that_loads(run: Callable[..., Result], tmp_path: Path) -> None:
    got = run("init", "my-game")
    assert (got.code, got.err) == (0, "")
    assert "my-game.json" in got.out
    assert catalog.load(str(tmp_path / "my-game.json")) == catalog.declare("my-game")
    shown = json.loads((tmp_path / "my-game.json").read_text())["help"]
    assert {space["type"] for space in shown.values() if isinstance(space, dict)} == {
        "box", "discrete", "multi_discrete", "dict",
    }  # fmt: skip
    for space in [each for each in shown.values() if isinstance(each, dict)]:
        written = json.dumps({"name": "g", "observation": space, "action": {"type": "discrete", "n": 2}})
        assert Game.declared(written).observation


def test_init_does_not_overwrite(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "my-game.json").write_text("mine")
    got = run("init", "my-game")
    assert (got.code, got.err) == (2, "error my-game.json exists: choose another name with --out\n")
    assert (tmp_path / "my-game.json").read_text() == "mine"
    assert run("init", "my-game", "--out", "[other].json").out.startswith("Wrote [other].json.")
    assert (tmp_path / "[other].json").is_file()


@pytest.mark.parametrize("name", ["../evil", "a b", "", "-", "x" * 101, "[/]", "a/b", "é"])
def test_init_wants_a_name_that_can_be_one(run: Callable[..., Result], tmp_path: Path, name: str) -> None:
    got = run("init", "--", name)
    assert got.code == 2
    assert f"error game name {name!r}: use letters, digits" in got.err
    assert list(tmp_path.iterdir()) == []


def test_init_where_nothing_can_be_written(run: Callable[..., Result]) -> None:
    got = run("init", "mine", "--out", "no/such/folder.json")
    assert (got.code, got.err) == (2, "error cannot write no/such/folder.json: No such file or directory\n")


# up, demo, play: wrong input


def test_an_unknown_algorithm_is_told_the_nearest(run: Callable[..., Result], tmp_path: Path) -> None:
    for command in ("up", "demo"):
        assert run(command, "--algorithm", "dqm") == Result(2, "", "error no algorithm 'dqm', did you mean 'dqn'?\n")
    assert "choose one of dqn" in run("up", "--algorithm", "zzzzzz").err
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use(run: Callable[..., Result]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        got = run("up", "--no-train", "--port", str(port))
    assert got.code == 2
    assert f"error cannot listen on 127.0.0.1:{port}: Address already in use" in got.err
    assert "Choose another port" in got.err


def test_a_data_directory_that_cannot_be_one(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    got = run("up", "--no-train", "--data", "file/below")
    assert got.code in (1, 2)
    assert "file/below" in got.err


def test_games_that_cannot_be_played(run: Callable[..., Result], nobody: str) -> None:
    for game, message in (
        ("NoSuch-v0", "doesn't exist"),
        ("arena", "Mock players need a simulator: a game that is only declared is played by its own clients"),
        ("Blackjack-v1", "Tuple spaces"),
        ("no_such:X-v0", "needs no_such: No module named 'no_such'"),
    ):
        got = run("play", game, "--server", nobody, "--episodes", "1")
        assert got.code == 2
        assert message in got.err
        assert "exist.." not in got.err


# Looking at a platform


def test_games_of_a_platform(run: Callable[..., Result], server: str) -> None:
    got = run("games", "--server", server)
    assert (got.code, got.err) == (0, "")
    head, row = (line.split() for line in got.out.splitlines()[1:3])
    assert head == ["game", "simulated", "as", "seats", "steps", "version", "people", "bots"]
    assert row == [GAME.name, "CartPole-v1", "1", "30", "v2", "–", "15"]
    [game] = json.loads(run("games", "--server", server, "--json").out)
    assert (game["name"], game["schema"], game["steps"], game["latest"]) == (GAME.name, GAME.schema, 30, 2)


def test_one_game_of_a_platform(run: Callable[..., Result], server: str) -> None:
    got = run("games", GAME.name, "--server", server)
    assert (got.code, got.err) == (0, "")
    for part in ("sparring · Tiny-v0", "bob [bold]", "v2", '"shape":[4]', '"n":2', GAME.schema):
        assert part in got.out
    shown = json.loads(run("games", GAME.name, "--server", server, "--json").out)
    assert shown["game"]["name"] == shown["stats"]["game"] == GAME.name
    assert shown["stats"]["stats"]["steps"] == 30


def test_models_of_a_game(run: Callable[..., Result], server: str) -> None:
    got = run("models", GAME.name, "--server", server)
    assert (got.code, got.err) == (0, "")
    rows = [line.split() for line in got.out.splitlines()]
    assert [f"{GAME.name}:", "other"] in rows
    [first] = [row for row in rows if row[:1] == ["v1"] and len(row) > 2]
    assert (first[-5:-3], first[-3:]) == (["4.32", "k"], ["123", "2", "15"])
    [second] = [row for row in rows if row[:1] == ["v2"]]
    assert second[1] == "stable"
    models = json.loads(run("models", GAME.name, "--server", server, "--json").out)
    assert {m["model"]: m["versions"] for m in models} == {"bot": [1, 2], "other": [1]}


def test_one_version_of_a_model(run: Callable[..., Result], server: str) -> None:
    words = ("models", GAME.name, "--version", "2", "--server", server)
    got = run(*words)
    assert (got.code, got.err) == (0, "")
    for part in ("bot v2", "dqn", "4.32 k steps", "evaluation/return_mean", "123", "policy.onnx", "sha256", "lr"):
        assert part in got.out
    manifest = json.loads(run(*words, "--json").out)
    assert (manifest["version"], manifest["data"]["steps"]) == (2, 4321)
    assert run(*words[:3], "9", *words[4:]).code == 2


def test_players_of_a_game_and_one_of_them_erased(run: Callable[..., Result], server: str) -> None:
    got = run("players", GAME.name, "--server", server)
    assert (got.code, got.err) == (0, "")
    assert "bob [bold]" in got.out
    listed = json.loads(run("players", GAME.name, "--server", server, "--json").out)
    assert {p["player"]: p["steps"] for p in listed} == {"ann": 10, "bob [bold]": 20}
    assert len(json.loads(run("players", GAME.name, "--limit", "1", "--server", server, "--json").out)) == 1
    [bob] = json.loads(run("players", GAME.name, "bob [bold]", "--server", server, "--json").out)
    assert bob["steps"] == 20
    missing = run("players", GAME.name, "[/]", "--server", server)
    assert (missing.code, missing.err.startswith("error no player '[/]'")) == (2, True)
    erased = run("players", GAME.name, "--erase", "bob [bold]", "--yes", "--server", server)
    assert (erased.code, erased.out) == (0, "1 fragments erased\n")
    assert "bob" not in run("players", GAME.name, "--server", server).out


def test_nobody_is_erased_without_a_yes(
    run: Callable[..., Result], server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text("n\n")
    with (tmp_path / "answer").open() as answer:
        monkeypatch.setattr(sys, "stdin", answer)
        assert run("players", GAME.name, "--erase", "ann", "--server", server).code == 1
    assert "ann" in run("players", GAME.name, "--server", server).out


def test_a_game_is_paused_and_resumed(run: Callable[..., Result], server: str) -> None:
    got = run("pause", GAME.name, "--server", server)
    assert (got.code, got.out) == (0, f"{GAME.name} is paused: `sparring resume {GAME.name}` resumes it\n")
    assert "paused" in run("games", "--server", server).out
    assert "trainer: paused" in run("games", GAME.name, "--server", server).out
    assert json.loads(run("games", "--server", server, "--json").out)[0]["paused"] is True
    assert run("resume", GAME.name, "--server", server).code == 0
    assert "paused" not in run("games", "--server", server).out


def test_a_game_is_deleted_only_with_a_yes(
    run: Callable[..., Result], server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for answer, code, left in (("n\n", 1, True), ("", 1, True), ("y\n", 0, False)):
        (tmp_path / "answer").write_text(answer)
        with (tmp_path / "answer").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            got = run("delete", GAME.name, "--server", server)
        assert got.code == code, got.err
        assert (GAME.name in run("games", "--server", server).out) == left
    assert "is deleted, with 3 published versions" in got.out
    again = run("delete", GAME.name, "--yes", "--server", server)
    assert (again.code, again.out) == (2, "")


@pytest.mark.parametrize("command", ["games", "models", "players", "pause", "resume", "delete --yes"])
@pytest.mark.parametrize("name", ["Nothing-v0", "[bold]", "../..", "a b"])
def test_a_game_that_the_platform_does_not_have(
    run: Callable[..., Result], server: str, command: str, name: str
) -> None:
    got = run(*command.split(), name, "--server", server)
    assert (got.code, got.out) == (2, "")
    assert "there is no" in got.err
    assert name in got.err
    assert "GET /v1" not in got.err


def test_a_platform_without_games(run: Callable[..., Result], tmp_path: Path) -> None:
    with background(create_app(MemoryStore(), Registry(tmp_path / "registry"))) as url:
        got = run("games", "--server", url)
        assert (got.code, got.err) == (0, "")
        assert "`sparring play CartPole-v1` brings one" in got.out
        assert run("games", "--server", url, "--json").out == "[]\n"


def test_mock_players_of_the_command_line(run: Callable[..., Result], tmp_path: Path) -> None:
    store = MemoryStore()
    with background(create_app(store, Registry(tmp_path / "registry"))) as url:
        words = ("--server", url, "--players", "2", "--episodes", "2", "--seed", "1", "--prefix", "tester")
        got = run("play", "CartPole-v1", *words)
        assert got.code == 0, got.err
        assert "4 episodes" in got.out
        listed = json.loads(run("players", "CartPole-v1", "--server", url, "--json").out)
    assert sorted(p["player"] for p in listed) == ["tester-001", "tester-002"]
    assert store.stats("CartPole-v1").steps == sum(p["steps"] for p in listed) > 0


@pytest.mark.real
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_up_until_it_is_stopped_and_up_again(tmp_path: Path, sign: signal.Signals) -> None:
    words = [SPARRING, "up", "--no-train", "--port", "0", "--print-address", "--data", str(tmp_path / "data")]
    for _ in range(2):
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as platform:
            assert platform.stdout is not None
            url = platform.stdout.readline().strip()
            if not (tmp_path / "known").exists():
                assert urllib3.request("PUT", f"{url}/v1/games/Tiny-v0", json=json.loads(GAME.to_json())).status == 201
                (tmp_path / "known").touch()
            again = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert again.returncode == 2
            assert "is in use by another `sparring up`" in again.stderr
            assert [g["name"] for g in urllib3.request("GET", f"{url}/v1/games").json()] == ["Tiny-v0"]
            platform.send_signal(sign)
            _, err = platform.communicate(timeout=60)
            assert (platform.returncode, err) == (0, "")


def test_episodes_are_listed_and_shown(run: Callable[..., Result], server: str) -> None:
    listed = run("episodes", GAME.name, "--server", server)
    assert [line.split()[:1] for line in listed.out.splitlines()[2:]] == [["30"], ["10"]]
    assert "bob [bold]  bot v1        20      20" in listed.out
    assert "ann" not in run("episodes", GAME.name, "--limit", "1", "--server", server).out
    assert run("episodes", GAME.name, "--limit", "1", "--server", server).err == "older ones: --before 30\n"
    assert "none that is finished" in run("episodes", GAME.name, "--people", "--server", server).out
    kept = json.loads(run("episodes", GAME.name, "--player", "ann", "--since", "1h", "--json", "--server", server).out)
    assert [(e["id"], e["player"], e["return"]) for e in kept] == [(10, "ann", 10.0)]
    for words in ((f"{GAME.name}/10",), (GAME.name, "10"), ("10",)):
        shown = run("episode", *words, "--limit", "3", "--server", server)
        assert shown.out.startswith("episode 10 of Tiny-v0: ann, 10 steps, return 10\n")
        assert "0  bot v1     [0, 0, 0, 0]  0" in shown.out
        assert shown.err == "7 more steps: --first 3\n"
    rows = json.loads(run("episode", GAME.name, "10", "--first", "8", "--json", "--server", server).out)["rows"]
    assert [(r["step"], r["terminated"]) for r in rows] == [(8, False), (9, True)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("Tiny-v0",), "which episode of Tiny-v0"),
        (("chess",), "which game is 'chess' of"),
        (("Tiny-v0/x",), "name an episode as GAME/ID"),
        (("Tiny-v0", "11"), "Tiny-v0 has no episode 11"),
        (("Tiny-v0", "10", "--out", "x.mp4"), "CartPole-v1 goes another way"),
    ],
)
def test_an_episode_that_is_not_there_is_reported(
    run: Callable[..., Result], server: str, words: tuple[str, ...], why: str
) -> None:
    got = run("episode", *words, "--server", server)
    assert (got.code, why in got.err) == (2, True), got.err


def test_rejected_play_is_shown_whole(run: Callable[..., Result], server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "rejected play of Tiny-v0: none" in run("rejected", GAME.name, "--server", server).out
    pool = urllib3.PoolManager()
    columns = {"obs": [[0.0] * 4] * 2, "action": [0], "reward": [1e9]}
    bad = [{"id": f"bad-{i}" * 10, "player": "eve [bold]", "schema": GAME.schema, **columns} for i in range(2)]
    assert pool.request("POST", f"{server}/v1/games/{GAME.name}/fragments", json=bad).status == 422
    got = run("rejected", GAME.name, "--server", server)
    lines = [line for line in got.out.splitlines() if "eve [bold]" in line]
    assert (got.code, len(lines)) == (0, 2)
    assert "bad-1" * 10 in lines[0]
    assert '"reward": [LOW, HIGH]' in lines[0]  # the end of a long reason
    shown = json.loads(run("rejected", GAME.name, "--json", "--limit", "1", "--server", server).out)
    assert [(r["id"], r["player"]) for r in shown] == [("bad-1" * 10, "eve [bold]")]


def test_play_to_files_and_back(run: Callable[..., Result], tmp_path: Path) -> None:
    from sparring.store import open_store

    store = open_store(str(tmp_path / "one.db"))
    store.register(GAME)
    columns = Columns(np.zeros((4, 4), "<f4"), np.zeros(3, "<i4"), np.ones(3, "<f4"))
    for player in ("ann", "bob"):
        store.append([pack(GAME, columns, id=new_id(), player=player, episode="e", start=0, time=time.time())])
    store.close()
    got = run("data", "export", GAME.name, "out", "--format", "npz", "--player", "ann", "--store", "one.db")
    assert (got.code, got.out) == (0, "3 steps in 1 fragments of Tiny-v0 are in out (npz)\n")
    words = ("data", "import", GAME.name, "out", "--format", "npz", "--store", "two.db")
    assert run(*words).out == "3 steps in 1 fragments are new in Tiny-v0, 0 were there already\n"
    assert run(*words).out == "0 steps in 0 fragments are new in Tiny-v0, 1 were there already\n"
    other = run("data", "import", GAME.name, "one.db", "--format", "store", "--store", "two.db")
    assert other.out == "3 steps in 1 fragments are new in Tiny-v0, 1 were there already\n"
    renamed = run("data", "import", "arena", "out", "--format", "npz", "--store", "three.db")
    assert renamed.code == 2
    assert "out holds play of 'Tiny-v0': sparring data import Tiny-v0 out --format npz" in " ".join(renamed.err.split())
    assert run("data", "export", GAME.name, "new", "--format", "xls", "--store", "one.db").code == 2
    assert "no game 'nonesuch'" in run("data", "export", "nonesuch", "new", "--store", "one.db").err
