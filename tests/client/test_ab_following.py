"""Clients in an A/B test: each player gets its model, from a gateway or from a public registry, and keeps it."""

import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import GAME, walk
from waiting import until

from sparring.client import Client, public_bot
from sparring.client.transports.base import Unavailable
from sparring.errors import InputError
from sparring.gateway.app import create_app
from sparring.gateway.server import background
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense
from sparring.players.mock import play
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore

NAME = GAME.name
OBS = np.zeros(4, np.float32)
HALVES = {"bot": 0.5, "careful": 0.5}
PLAYERS = [f"player-{n}" for n in range(12)]
Make = Callable[..., Client]


@pytest.fixture
def registry(tmp_path: Path, random_policy: Callable[..., Policy]) -> Registry:
    """Two models of a version each, and a name of `bot`'s."""
    registry = Registry(tmp_path / "registry")
    for seed, model in enumerate(HALVES):
        policy = random_policy(GAME, (Dense(8),), Categorical(), seed=seed)
        registry.publish(policy, algorithm="none", model=model)
    registry.move(NAME, "bot", "easy", 1, reason="", by="person")
    return registry


@pytest.fixture
def gateway(tmp_path: Path, registry: Registry) -> Iterator[str]:
    store = MemoryStore()
    store.register(GAME)
    with background(create_app(store, registry, tmp_path / "trainer")) as url:
        yield url


@pytest.fixture
def bucket(tmp_path: Path, registry: Registry) -> Iterator[str]:
    """The registry's directory as anybody may GET it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send_error(self, code: int, *args: Any) -> None:
            super().send_error(403 if code == 404 else code, *args)  # as S3 says to strangers

    handler = functools.partial(Quiet, directory=str(tmp_path / "registry"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def models(client: Client) -> dict[str, str]:
    return {name: client.player(name).bot().model for name in PLAYERS}


def test_players_get_their_models_and_the_server_agrees(gateway: str, registry: Registry, client_of: Make) -> None:
    test = registry.start_ab(NAME, HALVES, by="person")
    client = client_of(gateway)
    assert models(client) == {name: test.model(name) for name in PLAYERS}
    for name in PLAYERS:
        player = client.player(name)
        player.act(OBS)
        assert player.last_act is not None
        assert player.last_act[1].model == test.model(name)
    careful = client.player(next(name for name in PLAYERS if test.model(name) == "careful"))
    named = (careful.bot("bot"), careful.bot(version=1), careful.bot(alias="stable"), careful.bot(alias="easy"))
    assert {(bot.model, bot.version) for bot in named} == {("bot", 1)}  # who asks for something gets it
    careful.act(OBS, alias="easy")
    assert careful.last_act is not None
    assert careful.last_act[1].model == "bot"


def test_bots_go_over_between_episodes_when_a_test_begins_and_ends(
    gateway: str, registry: Registry, client_of: Make
) -> None:
    client = client_of(gateway, refresh=0.02)
    bots = {name: client.player(name).bot() for name in PLAYERS}
    assert {bot.model for bot in bots.values()} == {"bot"}
    careless = client.player(PLAYERS[0])
    obs, action, reward, _, _, next_obs = next(iter(walk(1)))
    careless.record(obs, action, reward, False, False, next_obs)  # in an episode
    shares = {"careful": 1 - 1e-9, "bot": 1e-9}  # all of them
    registry.start_ab(NAME, shares, by="person")

    def all_of(names: list[str], model: str) -> bool:
        for bot in bots.values():
            bot.act(OBS)
        return {bots[name].model for name in names} == {model}

    until(lambda: all_of(PLAYERS[1:], "careful"))
    assert bots[PLAYERS[0]].model == "bot"
    careless.end_episode()
    assert all_of(PLAYERS, "careful")
    registry.stop_ab(NAME, by="person")
    until(lambda: all_of(PLAYERS, "bot"))


def test_a_public_registry_has_the_test_too(gateway: str, bucket: str, registry: Registry, client_of: Make) -> None:
    test = registry.start_ab(NAME, HALVES, by="person")
    client = client_of(gateway, registry=bucket, refresh=0.02)
    assert models(client) == {name: test.model(name) for name in PLAYERS}
    bot = client.player(next(name for name in PLAYERS if test.model(name) == "careful")).bot()
    registry.stop_ab(NAME, by="person")
    until(lambda: (bot.act(OBS), bot.model)[1] == "bot")


def test_players_keep_their_model_while_nobody_answers(
    gateway: str, registry: Registry, client_of: Make, random_policy: Callable[..., Policy]
) -> None:
    registry.start_ab(NAME, HALVES, by="person")
    first = client_of(gateway)
    found = models(first)
    first.close()
    away = "http://127.0.0.1:9"
    folder = first.directory  # as if the same server were away
    second = client_of(away, GAME, timeout=0.5)
    second.close()
    second.directory.parent.mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*"):
        if path.is_file():
            target = second.directory / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    third = client_of(away, GAME, timeout=0.5)
    assert models(third) == found


def test_a_model_that_cannot_be_had_leaves_the_bot(
    gateway: str, registry: Registry, client_of: Make, tmp_path: Path
) -> None:
    test = registry.start_ab(NAME, HALVES, by="person")
    (tmp_path / "registry" / "games" / NAME / "models" / "careful" / "1" / "policy.onnx").write_bytes(b"torn")
    name = next(name for name in PLAYERS if test.model(name) == "careful")
    bot = client_of(gateway).player(name).bot()
    assert (bot.model, bot.version) == ("bot", 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "nonesuch"}, "model 'nonesuch' for players: it has bot, careful"),
        ({"version": 9}, "no version 9"),
        ({"model": "nonesuch", "version": 1}, "no version 1 of the model 'nonesuch'"),
        ({"alias": "hard"}, "no alias 'hard'"),
        ({"model": "careful", "alias": "easy"}, "no alias 'easy'"),
        ({"model": "nonesuch", "alias": "stable"}, "model 'nonesuch'"),
        ({"version": 1, "alias": "easy"}, "give one of them"),
        ({"model": "../x"}, "model"),
        ({"model": ""}, "model"),
        ({"model": "", "version": 1}, "."),
    ],
)
def test_what_is_not_there_is_an_error_never_random_play(
    gateway: str, bucket: str, client_of: Make, asked: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(gateway)
    with pytest.raises(InputError, match=words):
        client.bot(**asked)
    assert "goes on playing" not in caplog.text  # nothing does
    with pytest.raises((InputError, Unavailable)):
        client_of(gateway, registry=bucket).bot(**asked)
    if "version" not in asked:
        with pytest.raises(InputError, match=words):
            client.act(OBS, **asked)
    with pytest.raises((InputError, Unavailable)):
        public_bot(bucket, NAME, **asked)


def test_mock_players_play_what_is_asked_for(gateway: str, tmp_path: Path) -> None:
    game = "CartPole-v1"
    for asked in ({"model": "nonesuch"}, {"version": 3}, {"alias": "hard"}):
        with pytest.raises(InputError, match=r"nonesuch|no version 3|hard"):
            play(game, gateway, players=1, episodes=1, directory=tmp_path / "client", **asked)
    assert play(game, gateway, players=1, episodes=1, directory=tmp_path / "client").version == 0  # until there is one


def test_public_bots_by_alias(bucket: str, tmp_path: Path) -> None:
    bot = public_bot(bucket, NAME, alias="easy", directory=tmp_path / "client")
    assert (bot.model, bot.version) == ("bot", 1)
    with pytest.raises(InputError, match="no alias 'hard'"):
        public_bot(bucket, NAME, alias="hard", directory=tmp_path / "client")
