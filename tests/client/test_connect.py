import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import GAME, FakeServer, Handler, Reply, walk
from waiting import until

from sparring.client import Client, SchemaMismatch, Unavailable
from sparring.errors import InputError
from sparring.games import Box, Discrete, Game

Make = Callable[..., Client]
OTHER = Game("Pong", Box((5,)), Discrete(3))
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


def test_a_game_is_registered(server: FakeServer, client_of: Make) -> None:
    assert client_of(server.url, GAME).game == GAME
    assert server.games == {"Pong": GAME}


def test_a_declaration_on_disk_is_registered(server: FakeServer, client_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "pong.json"
    path.write_bytes(GAME.to_json())
    assert client_of(server.url, path).game == GAME
    assert client_of(server.url, str(path)).game == GAME
    with pytest.raises(InputError, match=r"cannot read the game declaration .*none\.json"):
        client_of(server.url, "none.json")


def test_a_known_game_is_enough_by_name(server: FakeServer, client_of: Make) -> None:
    server.games["Pong"] = GAME
    assert client_of(server.url, "Pong").game == GAME


def test_an_unknown_name_says_how_to_register(server: FakeServer, client_of: Make) -> None:
    with pytest.raises(InputError, match="does not know the game 'Chess': pass a Game"):
        client_of(server.url, "Chess")


def test_other_spaces_than_the_servers_are_refused(server: FakeServer, client_of: Make) -> None:
    server.games["Pong"] = OTHER
    with pytest.raises(SchemaMismatch, match="another schema"):
        client_of(server.url, GAME)
    server.fault = lambda handler, body: Reply(200, OTHER.to_json())  # a server that does not check
    with pytest.raises(SchemaMismatch, match="they differ in: observation"):
        client_of(server.url, GAME)


def test_without_a_server_a_game_is_enough(client_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(NOWHERE, GAME)
    client.record(*walk(1)[0])
    assert client.away
    assert "Play is kept in" in caplog.text
    client.close(timeout=0.5)
    assert client.stats.spooled == 1


def test_without_a_server_a_name_needs_an_earlier_visit(client_of: Make) -> None:
    with pytest.raises(Unavailable, match="never used on this machine"):
        client_of(NOWHERE, "Pong")
    visited = FakeServer()
    visited.games["Pong"] = GAME
    client_of(visited.url, "Pong").close()
    visited.stop()
    assert client_of(visited.url, "Pong").game == GAME


def test_a_game_unknown_to_the_server_at_first_is_registered_later(client_of: Make) -> None:
    gone = FakeServer()
    gone.stop()
    client = client_of(gone.url, GAME)
    back = FakeServer(gone.server_port)
    try:
        for step in walk(3):
            client.record(*step)
        until(lambda: back.steps() == 3)
        assert back.games == {"Pong": GAME}
    finally:
        back.stop()


@pytest.mark.parametrize("url", ["127.0.0.1:8400", "ftp://host", "http://", "http://host:notaport", ""])
def test_a_bad_address(url: str, client_of: Make) -> None:
    with pytest.raises(InputError, match="is not a server's address"):
        client_of(url)


def test_a_login_in_the_address_is_sent_and_shown_nowhere(
    server: FakeServer, client_of: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    logins: list[str | None] = []

    def note(handler: Handler, body: bytes) -> Reply | bool:
        logins.append(handler.headers.get("Authorization"))
        return Reply(401, b"<html>who are you?</html>") if handler.command == "POST" else False

    server.fault = note
    client = client_of(server.url.replace("://", "://ann%3Ae:p%40ss%25@"))
    client.record(*walk(1)[0])
    until(lambda: client.away)
    client.close(timeout=0.1)
    assert set(logins) == {"Basic " + base64.b64encode(b"ann:e:p@ss%").decode()}
    assert "it asks for a login" in caplog.text
    shown = [caplog.text, client._transport.address, *map(str, tmp_path.rglob("*"))]
    assert not [text for text in shown if "ss%" in text or "ann" in text]


def test_a_bad_name(server: FakeServer, client_of: Make) -> None:
    with pytest.raises(InputError, match="is no game's name"):
        client_of(server.url, "../../etc")


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"<html>Welcome to the hotel's network</html>", {"Content-Type": "text/html"}),
        Reply(404, b"<html>nginx</html>", {"Content-Type": "text/html"}),
        Reply(302, b"", {"Location": "http://elsewhere/"}),
        Reply(200, b'{"name": 5'),
        Reply(500, b"oops"),
        None,
    ],
)
def test_something_else_than_our_server_counts_as_no_server(
    server: FakeServer, client_of: Make, reply: Reply | None
) -> None:
    server.fault = lambda handler, body: reply
    assert client_of(server.url, GAME).away
    with pytest.raises(Unavailable):
        client_of(server.url, "Pong")


def test_a_closed_client_takes_no_more(server: FakeServer, client_of: Make) -> None:
    client = client_of(server.url)
    client.close()
    client.close()
    with pytest.raises(Exception, match="is closed"):
        client.record(*walk(1)[0])
