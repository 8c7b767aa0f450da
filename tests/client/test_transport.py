"""A transport from outside: a directory of files. Whatever holds over HTTP (spool, retries, halving) holds over it."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_server import GAME, FakeServer, walk
from waiting import until

from sparring.api import Problem, Rejected, Uploaded
from sparring.client import (
    Client,
    Refused,
    SchemaMismatch,
    Transport,
    Unavailable,
    UnknownGame,
    Upload,
    UploadTooLarge,
)
from sparring.client.transports import open_transport
from sparring.client.transports.http import HttpConnection, HttpTransport
from sparring.errors import InputError
from sparring.experience import Fragment, wire
from sparring.games import Box, Discrete, Game

Make = Callable[..., Client]


class Folder(Transport):
    """One file a fragment, named by its id."""

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self.address, self.timeout = address, timeout
        self.root = Path(address.partition("://")[2])
        self.away, self.most, self.pings, self.closed = False, 1000, 0, False

    def register(self, game: Game, timeout: float | None = None) -> Game:
        self._look()
        place = self.root / f"{game.name}.json"
        if not place.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            place.write_bytes(game.to_json())
        return Game.from_json(place.read_bytes())

    def upload(self, game: Game, upload: Upload, timeout: float | None = None) -> Uploaded:
        self._look()
        if not (self.root / f"{game.name}.json").exists():
            raise UnknownGame(Problem("Not Found", 404, f"no game {game.name}"))
        if len(upload.fragments) > self.most:
            raise UploadTooLarge(f"{len(upload.fragments)} are too many")
        new = 0
        for fragment, data in zip(upload.fragments, upload.encoded, strict=True):
            place = self.root / f"{fragment.id}.play"
            new += not place.exists()
            place.write_bytes(data)
        return Uploaded(new, len(upload.fragments) - new)

    def ping(self, game: Game, timeout: float | None = None) -> None:
        self.pings += 1
        self._look()

    def close(self) -> None:
        self.closed = True

    def _look(self) -> None:
        if self.away:
            raise Unavailable(f"{self.address} is not mounted")

    @property
    def fragments(self) -> list[Fragment]:
        return [f for path in sorted(self.root.glob("*.play")) for f in wire.decode(wire.array([path.read_bytes()]))]

    @property
    def steps(self) -> int:
        return sum(f.steps for f in self.fragments)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(f"folder://{tmp_path / 'play'}")


@pytest.fixture
def outside() -> Iterator[str]:
    """A module that could be anybody's."""
    module = ModuleType("somebodys")
    module.Folder, module.NoTransport = Folder, dict  # type: ignore[attr-defined]
    sys.modules["somebodys"] = module
    yield "somebodys"
    del sys.modules["somebodys"]


def play(client: Client, episodes: int = 1) -> None:
    for seed in range(episodes):
        for step in walk(5, seed):
            client.record(*step)


def test_play_goes_where_the_transport_says(client_of: Make, folder: Folder) -> None:
    client = client_of(None, transport=folder)
    play(client, 3)
    assert client.flush()
    assert (folder.steps, client.stats.uploaded, client.away) == (15, 3, False)
    assert {f.game for f in folder.fragments} == {GAME.name}
    client.close()
    assert folder.closed


def test_by_its_name_in_the_address(client_of: Make, tmp_path: Path, outside: str) -> None:
    client = client_of(f"{outside}:Folder://{tmp_path / 'play'}", timeout=3)
    play(client)
    assert client.flush()
    assert isinstance(client._transport, Folder)
    assert (client._transport.steps, client._transport.timeout) == (5, 3)


def test_without_it_play_is_kept_and_sent_later(
    client_of: Make, folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.away = True
    first = client_of(None, transport=folder)
    play(first, 2)
    until(lambda: first.away)
    first.close(timeout=0.3)
    assert first.stats.spooled == 2
    assert sum(r.name == "sparring.client" and r.levelno >= logging.WARNING for r in caplog.records) == 2
    second = client_of(None, transport=Folder(folder.address))
    play(second)
    assert second.flush()
    assert (folder.steps, second.stats.uploaded, second.stats.spooled) == (15, 3, 0)


def test_retries_in_one_process(client_of: Make, folder: Folder) -> None:
    client = client_of(None, transport=folder)
    folder.away = True
    play(client, 2)
    until(lambda: client._uploader._failures >= 3)
    folder.away = False
    assert client.flush(20)
    assert (folder.steps, client.stats.uploaded, client.stats.dropped) == (10, 2, 0)


def test_a_transport_that_is_back_is_noticed_without_play(client_of: Make, folder: Folder) -> None:
    client = client_of(None, transport=folder)
    folder.away = True
    play(client)
    until(lambda: client.away)
    client.flush(0.5)
    folder.away = False
    assert client.flush(20)
    client._uploader._failures = 1
    until(lambda: not client.away)
    assert folder.pings


@pytest.mark.parametrize("spooled", [False, True])
def test_what_is_too_large_is_halved(client_of: Make, folder: Folder, spooled: bool) -> None:
    folder.most = 1
    if spooled:
        folder.away = True
        client = client_of(None, transport=folder)
        play(client, 5)
        client.close(timeout=0.2)
        folder.away = False
    client = client_of(None, transport=folder)
    play(client, 5)
    assert client.flush(20)
    assert folder.steps == (50 if spooled else 25)


def test_a_game_that_is_forgotten_is_taught_again(client_of: Make, folder: Folder) -> None:
    client = client_of(None, transport=folder)
    (folder.root / f"{GAME.name}.json").unlink()
    play(client)
    assert client.flush()
    assert folder.steps == 5


def test_what_it_refuses_is_counted_and_reported(
    client_of: Make, folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Uploaded:
        raise Refused(Problem("No", 422, "no room", rejected=[Rejected(0, "x", 422, "the folder is read-only")]))

    client = client_of(None, transport=folder)
    monkeypatch.setattr(folder, "upload", refuse)
    play(client)
    assert client.flush()
    assert client.stats.rejected == 1
    assert "the folder is read-only" in caplog.text


def test_other_spaces_are_refused_at_once(client_of: Make, folder: Folder) -> None:
    client_of(None, transport=folder)
    with pytest.raises(SchemaMismatch, match="they differ in: observation"):
        client_of(None, Game(GAME.name, Box((7,)), Discrete(3)), transport=Folder(folder.address))


def test_questions_need_a_gateway(client_of: Make, folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(None, transport=folder)
    assert client.bot().version == 0
    assert "only takes play: pass models=" in caplog.text
    with pytest.raises(InputError, match="only takes play"):
        client.act([0, 0, 0, 0])
    with pytest.raises(InputError, match="only takes play"):
        client_of(None, "Pong", transport=folder)


def test_what_is_no_transport(client_of: Make, outside: str, folder: Folder) -> None:
    for address, why in (
        (f"{outside}:Foldr://x", "did you mean 'Folder'"),
        (f"{outside}:NoTransport://x", "cannot be opened"),
        ("no_such_module:Folder://x", "cannot import 'no_such_module'"),
        ("localhost:8400", "is not a server's address"),
        ("ftp://localhost", "is not a server's address"),
    ):
        with pytest.raises(InputError, match=why):
            open_transport(address)
    with pytest.raises(InputError, match="both an address"):
        client_of("http://127.0.0.1:1", transport=folder)
    with pytest.raises(InputError, match="where to"):
        client_of(None)
    assert isinstance(open_transport("http://127.0.0.1:1"), HttpTransport)


def test_a_fragment_is_encoded_once(client_of: Make, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it waits on disk in between, and is divided there."""
    encoded: list[str] = []
    encode_one = wire.encode_one

    def counted(fragment: Fragment) -> bytes:
        encoded.append(fragment.id)
        return encode_one(fragment)

    monkeypatch.setattr(wire, "encode_one", counted)
    monkeypatch.setattr(wire, "encode", None)
    folder.away, folder.most = True, 2
    client = client_of(None, transport=folder)
    play(client, 4)
    client.close(timeout=0.2)
    folder.away = False
    client = client_of(None, transport=folder)
    assert client.flush(20)
    assert sorted(encoded) == sorted(f.id for f in folder.fragments)
    assert len(encoded) == 4


@pytest.mark.parametrize(("name", "written"), [("..", "%2E%2E"), (".", "%2E"), ("a.b", "a.b"), ("...", "...")])
def test_a_name_of_dots_is_no_step_in_the_path(server: FakeServer, name: str, written: str) -> None:
    HttpConnection(server.url).fetch("GET", "v1", "games", "Pong", "players", name)
    assert server.requests[-1] == ("GET", f"/v1/games/Pong/players/{written}")
