"""What is sent again, erased, paused and deleted, over real sockets and a store on disk."""

import http.client
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_api import GAME, JSON, MSGPACK, fragment, row
from waiting import until

from sparring.client import Client
from sparring.experience import wire
from sparring.games import Box, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.registry import Registry, RegistryError
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.real
DOCS = Path(__file__).parents[2] / "docs" / "other-languages.md"
UPLOAD = f"/v1/games/{GAME.name}/fragments"


class Site:
    """A gateway, its store and its registry."""

    def __init__(self, url: str, store: SqliteStore, registry: Registry) -> None:
        self.store = store
        self.registry = registry
        self.address = url.removeprefix("http://")

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] = JSON, *, raw: bool = False
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers if body is not None else {})
            response = connection.getresponse()
            content = response.read()
            return response.status, content if raw or not content else json.loads(content)
        finally:
            connection.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    registry = Registry(tmp_path / "registry")
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.register(GAME)
        with background(create_app(store, registry, tmp_path / "trainer")) as url:
            yield Site(url, store, registry)


def test_json_without_a_time_sent_again_is_a_duplicate_as_the_page_says(site: Site) -> None:
    """The requests are the page's own."""
    requests = dict(
        re.findall(r"curl[^\n]*8400(/v1/games/arena[^ ]*) [^\n]*-d '\n(.*?)'\s", DOCS.read_text(), re.DOTALL)
    )
    declaration, play = requests["/v1/games/arena"].encode(), requests["/v1/games/arena/fragments"].encode()
    assert b'"time"' not in play
    assert site.ask("PUT", "/v1/games/arena", declaration)[0] == 201
    answers = [site.ask("POST", "/v1/games/arena/fragments", play) for _ in range(3)]
    assert answers == [(200, {"accepted": stored, "duplicates": 1 - stored, "rejected": []}) for stored in (1, 0, 0)], (
        answers
    )
    assert site.store.stats("arena").fragments == 1
    assert site.store.stats("arena").rejected == 0


def test_json_with_an_id_alone_sent_again_is_a_duplicate(site: Site) -> None:
    for stored in (1, 0):
        status, answer = site.ask("POST", UPLOAD, [row(id="mine", terminated=True)])
        assert (status, answer["accepted"], answer["duplicates"]) == (200, stored, 1 - stored)
    assert [e.steps for e in site.store.episodes(GAME.name)] == [3]
    assert site.ask("POST", UPLOAD, [row(id="mine", terminated=False)])[0] == 409


def test_a_retried_upload_does_not_bring_an_erased_player_back(site: Site) -> None:
    body = wire.encode([fragment(), fragment(4)])
    assert site.ask("POST", UPLOAD, body, MSGPACK)[1]["accepted"] == 2
    assert site.ask("DELETE", f"/v1/games/{GAME.name}/players/ann") == (200, {"erased": 2})
    for _ in range(2):
        status, answer = site.ask("POST", UPLOAD, body, MSGPACK)
        assert (status, answer) == (200, {"accepted": 0, "duplicates": 2, "rejected": []})
    assert site.store.stats(GAME.name).fragments == 0
    new = wire.encode([fragment()])
    assert site.ask("POST", UPLOAD, new, MSGPACK)[1]["accepted"] == 1


def test_a_game_is_paused_and_resumed(site: Site) -> None:
    assert site.ask("POST", f"/v1/games/{GAME.name}/pause") == (200, {"game": GAME.name, "paused": True})
    assert site.store.paused() == {GAME.name}
    assert site.ask("GET", f"/v1/games/{GAME.name}/stats")[1]["paused"] is True
    assert [game["paused"] for game in site.ask("GET", "/v1/games")[1]] == [True]
    assert site.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[0] == 200
    assert site.ask("POST", f"/v1/games/{GAME.name}/resume") == (200, {"game": GAME.name, "paused": False})
    assert site.ask("GET", f"/v1/games/{GAME.name}/stats")[1]["paused"] is False
    for verb in ("pause", "resume"):
        status, problem = site.ask("POST", f"/v1/games/none/{verb}")
        assert status == 404
        assert "no game 'none'" in problem["detail"]


def test_a_deleted_game_is_gone_everywhere_and_may_be_declared_anew(
    site: Site, random_policy: Callable[..., Policy]
) -> None:
    game, models = f"/v1/games/{GAME.name}", f"/v1/games/{GAME.name}/models"
    for _ in range(2):
        site.registry.publish(random_policy(GAME, (Dense(8),), QValues()), algorithm="dqn")
    assert site.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[0] == 200
    look = {"obs": [[0, 0, 0, 0]]}
    assert site.ask("POST", f"{game}/act", look)[1]["version"] == 2
    assert site.ask("POST", f"{game}/act", {**look, "version": 1})[0] == 200
    for path in ("bot/latest", "bot/1/manifest", "bot/2/files/card.md"):
        assert site.ask("GET", f"{models}/{path}", raw=True)[0] == 200
    assert site.ask("DELETE", game) == (200, {"deleted": GAME.name, "versions": 2})
    for path in ("", "/stats", "/models", "/players", "/models/bot/latest", "/models/bot/1/manifest"):
        assert site.ask("GET", game + path)[0] == 404
    assert site.ask("POST", f"{game}/act", look)[0] == 404
    assert site.ask("DELETE", game)[0] == 404
    other = Game(GAME.name, Box((2,)), Discrete(3))
    assert site.ask("PUT", game, other.to_json())[0] == 201
    assert site.ask("GET", f"{game}/stats")[1]["stats"]["steps"] == 0
    for path in ("bot/latest", "bot/1/manifest", "bot/2/files/card.md"):
        assert site.ask("GET", f"{models}/{path}", raw=True)[0] == 404
    assert site.ask("POST", f"{game}/act", {"obs": [[0, 0]]})[1]["model"] == "random"
    site.registry.publish(random_policy(other, (Dense(8),), QValues()), algorithm="dqn")
    until(lambda: site.ask("GET", f"{models}/bot/latest")[0] == 200)
    assert site.ask("POST", f"{game}/act", {"obs": [[0, 0]]})[1]["version"] == 3


def test_who_goes_on_uploading_to_a_deleted_game_is_told_and_does_not_bring_it_back(site: Site, tmp_path: Path) -> None:
    """The client declared the game, so it would declare it again to a server that merely lost it."""
    other = Game("Other-v0", GAME.observation, GAME.action)
    url = f"http://{site.address}"
    with (
        Client(url, GAME, player="ann", directory=tmp_path / "client") as one,
        Client(url, other, player="ann", directory=tmp_path / "client") as two,
    ):
        play(one)
        assert one.flush(30)
        assert site.ask("DELETE", f"/v1/games/{GAME.name}")[0] == 200
        play(one)
        play(two)
        assert one.flush(30)
        assert two.flush(30)
        assert (one.stats.uploaded, one.stats.rejected) == (1, 1)
        assert (two.stats.uploaded, two.stats.rejected) == (1, 0)
    assert [game["name"] for game in site.ask("GET", "/v1/games")[1]] == [other.name]
    status, problem = site.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)
    assert status == 410
    assert "was deleted here" in problem["detail"]
    with Client(url, GAME, player="ann", directory=tmp_path / "client") as again:
        play(again)
        assert again.flush(30)
        assert again.stats.uploaded == 1
    assert site.store.stats(GAME.name).fragments == 1


def test_a_game_that_another_gateway_deleted_is_reported(site: Site) -> None:
    body = wire.encode([fragment()])
    assert site.ask("POST", UPLOAD, body, MSGPACK)[0] == 200
    site.store.delete_game(GAME.name)
    assert site.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[0] == 410
    assert site.ask("PUT", f"/v1/games/{GAME.name}", GAME.to_json())[0] == 201
    assert site.ask("POST", UPLOAD, body, MSGPACK)[1]["accepted"] == 1


def test_a_gateway_that_starts_anew_knows_what_was_deleted(site: Site, tmp_path: Path) -> None:
    assert site.ask("DELETE", f"/v1/games/{GAME.name}")[0] == 200
    with background(create_app(site.store, site.registry, tmp_path / "trainer")) as url:
        again = Site(url, site.store, site.registry)
        assert again.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[0] == 410
        assert again.ask("POST", "/v1/games/none/fragments", wire.encode([fragment()]), MSGPACK)[0] == 404
        assert again.ask("PUT", f"/v1/games/{GAME.name}", GAME.to_json())[0] == 201
        assert again.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[0] == 200


def test_a_deletion_that_the_registry_interrupted_is_finished_by_the_next(
    site: Site, random_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.registry.publish(random_policy(GAME, (Dense(8),), QValues()), algorithm="dqn")

    def away(game: str) -> int:
        raise RegistryError("the bucket does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(site.registry, "delete_game", away)
        status, problem = site.ask("DELETE", f"/v1/games/{GAME.name}")
        assert status == 503
        assert "models are not yet: the bucket does not answer" in problem["detail"]
    assert site.ask("GET", f"/v1/games/{GAME.name}")[0] == 404
    assert site.ask("DELETE", f"/v1/games/{GAME.name}") == (200, {"deleted": GAME.name, "versions": 1})
    assert site.registry.games() == []


def play(client: Client) -> None:
    obs = np.zeros(4, "<f4")
    for step in range(5):
        client.record(obs, 0, 1.0, step == 4, False, obs)


def test_a_game_whose_declaration_cannot_be_read_stops_no_other(site: Site) -> None:
    """Clients keep their play meanwhile (503); and the game can be deleted."""
    other = Game("other", Box((2,)), Discrete(2))
    site.store.register(other)
    with closing(sqlite3.connect(site.store.path)) as db, db:
        db.execute("UPDATE game SET spec = '{' WHERE name = 'other'")
    assert [game["name"] for game in site.ask("GET", "/v1/games")[1]] == [GAME.name]
    assert site.ask("POST", UPLOAD, wire.encode([fragment()]), MSGPACK)[1]["accepted"] == 1
    declaration = json.loads(other.to_json())
    for method, path, body in (
        ("GET", "/v1/games/other", None),
        ("PUT", "/v1/games/other", declaration),
        ("POST", "/v1/games/other/fragments", [row()]),
    ):
        status, answer = site.ask(method, path, body)
        assert status == 503, answer
        assert "declaration cannot be read" in answer["detail"]
    assert site.ask("DELETE", "/v1/games/other")[0] == 200
    assert site.ask("PUT", "/v1/games/other", declaration)[0] == 201
