"""Commands that say which version serves whom: what they do, print and refuse."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparring.games import Box, Discrete, Game
from sparring.gateway.app import create_app
from sparring.gateway.server import background
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore

GAME = Game("Tiny-v0", Box((4,)), Discrete(2))
NAME = GAME.name
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def registry(tmp_path: Path, random_policy: Callable[..., Policy]) -> Registry:
    """`bot` with versions 1 to 3, `careful` with version 1."""
    registry, policy = Registry(tmp_path / "registry"), random_policy(GAME, (Dense(8),), QValues())
    for model in ("bot", "bot", "bot", "careful"):
        registry.publish(policy, algorithm="dqn", model=model, reason="better: +3", evidence={"difference": 3.0})
    return registry


@pytest.fixture
def run(
    tmp_path: Path,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    command_line: Run,
) -> Iterator[Run]:
    """`run("promote", …)` against a platform: the code, and what was printed."""
    store = MemoryStore()
    store.register(GAME)
    monkeypatch.setenv("COLUMNS", "200")
    with background(create_app(store, registry, tmp_path / "trainer")) as url:
        monkeypatch.setenv("SPARRING_SERVER", url)
        yield command_line


def stable(registry: Registry) -> int:
    latest = registry.latest(NAME)
    assert latest is not None
    return latest.version


def test_promote_roll_back_and_pin(run: Run, registry: Registry) -> None:
    code, out, _ = run("promote", NAME, "1", "--reason", "it was best", "--by", "anna")
    assert (code, out) == (0, "Tiny-v0: players get version 1 of bot now (was 3)\n")
    assert stable(registry) == 1
    assert run("rollback", NAME)[:2] == (0, "Tiny-v0: players get version 3 of bot again (was 1)\n")
    assert stable(registry) == 3
    code, out, _ = run("pin", NAME, "2", "--reason", "the tournament")
    assert (code, out.splitlines()[0][:50]) == (0, "Tiny-v0: version 2 of bot is pinned (was 3). `spar")
    assert registry.aliases(NAME)["stable"].pinned
    assert "is pinned: `sparring unpin Tiny-v0`" in run("promote", NAME, "3")[1]
    assert run("unpin", NAME)[0] == 0
    assert not registry.aliases(NAME)["stable"].pinned
    code, out, _ = run("aliases", NAME)
    for part in ("stable", "v3", "it was best", "anna", "the tournament", "better: +3", "difference 3"):
        assert part in out
    shown = json.loads(run("aliases", NAME, "--json")[1])
    assert [m["version"] for m in shown["moves"]] == [3, 3, 2, 3, 1, 3, 2, 1]
    assert shown["aliases"][0]["version"] == 3


def test_names_of_ones_own(run: Run, registry: Registry) -> None:
    assert run("alias", NAME, "easy", "1")[:2] == (0, "Tiny-v0: easy is version 1 of bot now\n")
    assert run("alias", NAME, "easy", "2")[1] == "Tiny-v0: easy is version 2 of bot now (was 1)\n"
    assert registry.aliases(NAME)["easy"].version == 2
    assert run("alias", NAME, "easy", "--remove")[:2] == (0, "Tiny-v0: easy of bot is removed (was 2)\n")
    assert "easy" not in registry.aliases(NAME)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("promote", NAME, "9"), "no whole version 9 of the model 'bot': it has 1–3"),
        (("promote", NAME, "1", "--model", "nobody"), "no model 'nobody': it has bot, careful"),
        (("promote", "Nothing", "1"), "Nothing"),
        (("rollback", NAME, "--model", "careful"), "no way back"),
        (("rollback", NAME, "--model", "nobody"), "it has bot, careful"),
        (("pin", NAME, "9"), "it has 1–3"),
        (("alias", NAME, "hard", "--remove"), "no alias 'hard'"),
        (("alias", NAME, "hard"), "give a version, or --remove"),
        (("alias", NAME, "hard", "1", "--remove"), "give a version, or --remove"),
        (("alias", NAME, "stable", "--remove"), "what players get"),
        (("aliases", NAME, "--model", "nobody"), "it has bot, careful"),
        (("models", NAME, "--model", "nobody"), "no model 'nobody': it has bot, careful"),
        (("models", NAME, "--version", "9"), "no version 9 of the model 'bot': it has from v1 to v3"),
        (("ab", "start", NAME, "bot=0.5", "nobody=0.5"), "model 'nobody' for players: it has bot, careful"),
        (("ab", "start", NAME, "bot=0.5", "careful"), "'careful' is no share: write MODEL=SHARE"),
        (("ab", "start", NAME, "bot=0.5", "bot=0.5"), "named twice"),
        (("ab", "start", NAME, "bot=0.5", "careful=0.6"), "add up to 1.1"),
        (("ab", "stop", NAME), "sparring ab start"),
    ],
)
def test_mistakes_are_explained(run: Run, registry: Registry, words: tuple[str, ...], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out, message in err) == (2, "", True), err
    assert stable(registry) == 3


def test_models_tells_what_players_get(run: Run, registry: Registry) -> None:
    registry.move(NAME, "bot", "candidate", 1, reason="to be compared", by="trainer", share=0.1)
    registry.pin(NAME, version=2, by="person", reason="the tournament")
    _, out, _ = run("models", NAME)
    bots = out[out.index(f"{NAME}: bot") : out.index("v2 is stable")]
    rows = {line.split()[0]: line for line in bots.splitlines() if line.startswith("v")}
    assert "candidate (10% of play)" in rows["v1"]
    assert "stable, pinned" in rows["v2"]
    assert not {"stable", "candidate"} & set(rows["v3"].split())
    assert "v2 is stable: the tournament" in out
    assert "Tiny-v0: careful" in out
    assert "careful" not in run("models", NAME, "--model", "bot")[1]
    _, out, _ = run("models", NAME, "--version", "3")
    assert "better: +3" in out
    assert "difference 3" in out
    assert [line.split()[-2:] for line in out.splitlines() if "tournament" in line] == [["the", "tournament"]]


def test_an_ab_test_from_start_to_end(run: Run, registry: Registry) -> None:
    assert run("ab")[:2] == (0, "no A/B test runs: `sparring ab start GAME MODEL=SHARE MODEL=SHARE` starts one\n")
    code, out, _ = run("ab", "start", NAME, "bot=0.5", "careful=0.5", "--reason", "which one?")
    assert (code, out[:57]) == (0, "Tiny-v0: an A/B test runs: 0.5 bot, 0.5 careful. `sparrin")
    assert "runs already" in run("ab", "start", NAME, "bot=0.5", "careful=0.5")[2]
    for words in (("ab",), ("ab", "show", NAME)):
        _, out, _ = run(*words)
        for part in ("which one?", "careful", "people", "bots", "no clear difference yet"):
            assert part in out
    assert json.loads(run("ab", "show", NAME, "--json")[1])["running"]["shares"] == {"bot": 0.5, "careful": 0.5}
    code, out, err = run("ab", "stop", NAME, "--keep", "wild")
    assert (code, "which are bot, careful" in err) == (2, True)
    code, out, _ = run("ab", "stop", NAME, "--keep", "careful")
    assert (code, out.splitlines()[-1]) == (
        0,
        "Tiny-v0: the A/B test is over: players get careful, as the next version of bot",
    )
    assert stable(registry) == 4
    _, out, _ = run("ab", "show", NAME)
    assert "no A/B test runs" in out
    assert "ended" in out
