import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import GAME, FakeServer, Handler, Reply, policy_file, problem
from waiting import until

from sparring.client import Unavailable
from sparring.errors import InputError
from sparring.games import catalog
from sparring.players import mock as players
from sparring.players.mock import MockEpisode, PlaySummary

CARTPOLE = catalog.load("CartPole-v1")
Play = Callable[..., PlaySummary]


@pytest.fixture
def play(server: FakeServer, tmp_path: Path) -> Play:
    def run(game: Any = "CartPole-v1", **options: Any) -> PlaySummary:
        return players.play(game, server.url, **{"seed": 1, "directory": tmp_path, "refresh": 0.05, **options})

    return run


def test_players_play_and_upload(server: FakeServer, play: Play) -> None:
    seen: list[MockEpisode] = []
    summary = play(players=3, episodes=4, on_episode=seen.append)
    assert server.games == {"CartPole-v1": CARTPOLE}
    assert summary.episodes == len(seen) == 12
    assert {e.player for e in seen} == {"player-001", "player-002", "player-003"}
    assert sum(e.steps for e in seen) <= summary.steps == server.steps()
    ended = [f for f in server.fragments.values() if f.ended]
    assert len(ended) == 12
    assert all((f.model, f.version) == ("random", 0) for f in ended)
    assert sorted(e.ret for e in seen) == sorted(float(f.start + f.steps) for f in ended)
    assert summary.return_mean == pytest.approx(sum(e.ret for e in seen) / 12)
    assert summary.stats.queued == summary.stats.spooled == 0


def test_players_take_up_new_versions(server: FakeServer, play: Play) -> None:
    stop, versions = threading.Event(), set()
    server.publish(CARTPOLE, policy_file(CARTPOLE, 0), 1)

    def watch(episode: MockEpisode) -> None:
        versions.add(episode.version)
        if episode.version == 1 and len(server.models["CartPole-v1"]) == 1:
            server.publish(CARTPOLE, policy_file(CARTPOLE, 1), 2)
        if episode.version == 2:
            stop.set()

    summary = play(players=4, stop=stop, on_episode=watch)
    assert versions == {1, 2}
    assert summary.version == 2
    by_episode: dict[str, set[int | None]] = {}
    for f in server.fragments.values():
        by_episode.setdefault(f.episode, set()).add(f.version)
    assert all(len(found) == 1 for found in by_episode.values())  # nobody changes within an episode


def test_a_seed_repeats_the_play(server: FakeServer, play: Play) -> None:
    runs: list[list[tuple[str, float]]] = []
    for _ in range(2):
        seen: list[tuple[str, float]] = []
        play(players=2, episodes=5, on_episode=lambda e, seen=seen: seen.append((e.player, e.ret)))
        runs.append(seen)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("game", ["Pendulum-v1", "FrozenLake-v1"])
def test_other_spaces(server: FakeServer, play: Play, game: str) -> None:
    spec = catalog.load(game)
    summary = play(game, players=2, episodes=1)
    assert summary.stats.rejected == 0
    assert server.steps() == summary.steps
    if game == "FrozenLake-v1":
        server.publish(spec, policy_file(spec), 1)
        assert play(game, players=2, episodes=2).version == 1


def test_players_wait_for_a_slow_server(server: FakeServer, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is dropped or left on disk although the server takes one small request at a time, slowly."""
    monkeypatch.setattr(players, "UNSENT", 200_000)
    waiting: list[int] = []

    def slow(handler: Handler, body: bytes) -> bool:
        handler.server.ending.wait(0.05)
        waiting.append(len(body))
        return False

    server.fault = slow
    summary = play(players=4, episodes=100)
    assert summary.stats.dropped == summary.stats.spooled == 0
    assert server.steps() == summary.steps
    assert len(waiting) > 3


def test_players_pause_while_the_server_is_away(server: FakeServer, play: Play) -> None:
    stop, done = threading.Event(), []

    def away(handler: Handler, body: bytes) -> Reply | bool:
        return problem(503, "away", **{"Retry-After": "0.2"}) if handler.command == "POST" else False

    server.fault = away
    thread = threading.Thread(target=lambda: done.append(play(players=2, stop=stop)))
    thread.start()
    until(lambda: sum(method == "POST" for method, _ in server.requests) >= 4)
    assert server.steps() == 0
    server.fault = None
    until(lambda: server.steps() > 2000)
    stop.set()
    thread.join(30)
    assert done[0].stats.dropped == 0
    assert done[0].steps == server.steps()


def test_players_as_slow_as_people(server: FakeServer, play: Play) -> None:
    summary = play(players=2, episodes=1, rate=200.0)
    assert summary.seconds >= (summary.steps / 2 - 1) / 200
    assert server.steps() == summary.steps


def test_stopping_leaves_no_false_ends(server: FakeServer, play: Play) -> None:
    stop = threading.Event()
    play(players=3, stop=stop, on_episode=lambda e: stop.set())
    ended = [f for f in server.fragments.values() if f.ended]
    assert all(f.terminated for f in ended)
    assert any(not f.ended for f in server.fragments.values())


def test_what_cannot_be_played(server: FakeServer, play: Play) -> None:
    with pytest.raises(InputError, match="'Pong' is declared only"):
        play(GAME)
    with pytest.raises(InputError, match="players must be at least 1"):
        play(players=0)
    with pytest.raises(InputError, match="rate must be above 0"):
        play(rate=0.0)
    with pytest.raises(InputError, match="cannot make the game 'NoSuchGame-v9'"):
        play("NoSuchGame-v9")
    server.fault = lambda handler, body: None
    with pytest.raises(Unavailable, match="start it with `sparring up`"):
        play()
