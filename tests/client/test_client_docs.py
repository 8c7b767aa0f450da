"""The client's lines on the pages run as they stand."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer

from sparring.games import Dict, Discrete, Game
from sparring.games.template import template

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "client.md"


def test_the_example_on_the_page_works(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARRING_CLIENT_DIR", str(tmp_path))
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    exec(found[1].replace("http://127.0.0.1:8400", server.url), {})
    assert sum(f.ended for f in server.fragments.values()) == 10
    assert {f.player for f in server.fragments.values()} == {"anna"}


class Played:
    """A game of the declaration that `sparring init` writes, as the README's reader has it: ten steps long."""

    def __init__(self, declaration: bytes) -> None:
        self.declared, self.steps = Game.declared(declaration), 0

    def reset(self) -> Any:
        assert isinstance(self.declared.observation, Dict)
        return {name: np.zeros((), part.element).tolist() for name, part in self.declared.observation.fields.items()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        assert isinstance(self.declared.action, Discrete)
        assert 0 <= action < self.declared.action.n
        self.steps += 1
        return self.reset(), 1.0, self.steps == 10, False


def test_the_readmes_lines_work(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARRING_CLIENT_DIR", str(tmp_path / "client"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-game.json").write_bytes(declaration := template("my-game"))
    (found,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "http://127.0.0.1:8400" in found
    exec(found.replace("http://127.0.0.1:8400", server.url), {"game": Played(declaration)})
    (fragment,) = server.fragments.values()
    assert (fragment.game, fragment.player, fragment.steps) == ("my-game", "player-1", 10)
    assert (fragment.terminated, fragment.reward) == (True, np.ones(10, "<f4").tobytes())
