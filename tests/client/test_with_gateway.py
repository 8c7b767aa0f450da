"""The client against the real gateway, in a process of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_server import GAME, walk
from waiting import until

from sparring.client import Acted, Client, SchemaMismatch
from sparring.errors import InputError
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense
from sparring.players.mock import play
from sparring.registry.registry import Registry

pytestmark = pytest.mark.real
OBS = np.zeros(4, np.float32)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "sparring.gateway", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_record_and_play(
    gateway: str, client_of: Callable[..., Client], tmp_path: Path, random_policy: Callable[..., Policy]
) -> None:
    client = client_of(gateway, refresh=0.05)
    bot = client.bot()
    for step in walk(250):
        client.record(*step)
    client.record(np.full(4, np.nan), 0, 0.0, True, False, OBS)
    assert client.flush()
    assert (client.stats.uploaded, client.stats.rejected) == (3, 1)
    other = client.player("bob")
    assert other.act(OBS) in range(3)
    assert other.last_act is not None
    assert other.last_act[1] == Acted("random", 0, pytest.approx(-np.log(3)))
    with pytest.raises(InputError, match="no version of the model 'nonesuch'"):
        client.act(OBS, model="nonesuch")
    registry = Registry(tmp_path / "data" / "registry")
    for version in (1, 2):
        policy = random_policy(GAME, (Dense(8),), Categorical(), seed=version)
        registry.publish(policy, algorithm="none")
        until(lambda version=version: bot.act(OBS) is not None and bot.version == version)
    greedy, _ = policy.act(OBS[None])
    until(lambda: client.act(OBS) == bot.act(OBS) == greedy[0])
    assert client.act(OBS, explore=True) in range(3)
    assert client.bot(version=1).version == 1
    with pytest.raises(InputError, match="no version 9"):
        client.bot(version=9)
    assert client_of(gateway, "Pong").game == GAME
    with pytest.raises(SchemaMismatch, match="the observation has the shape"):
        client_of(gateway, Game("Pong", Box((5,)), Discrete(3)))
    with pytest.raises(InputError, match="does not know the game 'Chess'"):
        client_of(gateway, "Chess")


def test_mock_players(gateway: str, tmp_path: Path) -> None:
    summary = play("CartPole-v1", gateway, players=3, episodes=20, directory=tmp_path / "client")
    assert summary.episodes == 60
    assert summary.stats.uploaded >= 60
    assert summary.stats.rejected == summary.stats.dropped == summary.stats.spooled == 0


def test_a_candidate_plays_a_share_of_the_episodes(
    gateway: str, client_of: Callable[..., Client], tmp_path: Path, random_policy: Callable[..., Policy]
) -> None:
    client = client_of(gateway, refresh=0.05)
    registry = Registry(tmp_path / "data" / "registry")
    for version, alias in ((1, "stable"), (2, None)):
        policy = random_policy(GAME, (Dense(8),), Categorical(), seed=version)
        registry.publish(policy, algorithm="none", alias=alias)
    registry.move("Pong", "bot", "candidate", 2, reason="to be tried", by="trainer", share=0.5)
    bot, steady = client.bot(seed=0), client.player("steady").bot(alias="stable")
    until(lambda: client.newest().candidate is not None)
    versions = []
    for _ in range(40):
        within = set()
        for obs, _, reward, _, _, next_obs in walk(3):
            action = bot.act(obs)
            steady.act(obs)
            within.add(bot.version)
            client.record(obs, action, reward, False, False, next_obs)
        client.end_episode()
        assert len(within) == 1  # never within an episode
        versions += within
    assert 8 < versions.count(2) < 32
    assert steady.version == 1
    registry.move("Pong", "bot", "stable", 2, reason="better", by="trainer")
    until(lambda: (bot.act(OBS), bot.version)[1] == 2 and (steady.act(OBS), steady.version)[1] == 2)
    registry.rollback("Pong", reason="worse after all", by="person")
    until(lambda: (bot.act(OBS), bot.version)[1] == 1 and (steady.act(OBS), steady.version)[1] == 1)
    registry.move("Pong", "bot", "mine", 2, reason="for the boss level", by="person")
    assert client.bot(alias="mine").version == 2
    with pytest.raises(InputError, match="no alias 'nonesuch'"):
        client.bot(alias="nonesuch")
    with pytest.raises(InputError, match="no version of the model 'nonesuch'"):
        client.bot("nonesuch")
