"""The client's fixtures: a server that answers, and clients that clean up."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import GAME, FakeServer

from sparring.client import Client, uploader
from sparring.games import Game


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again sooner than a client in the field would."""
    monkeypatch.setattr(uploader, "FIRST_DELAY", 0.05)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Makes clients whose files are the test's own; those that a test leaves open are closed."""
    made: list[Client] = []

    def make(url: str, game: Game | str | Path = GAME, player: str = "anna", **options: Any) -> Client:
        client = Client(url, game, player, **{"directory": tmp_path / "client", **options})
        made.append(client)
        return client

    yield make
    for client in made:
        client.close(timeout=0.2)
