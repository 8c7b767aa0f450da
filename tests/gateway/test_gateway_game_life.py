"""A game's life over HTTP, with a trainer beside it, on every durable store: declared, played, changed, renamed,
archived, deleted; candidates, promotions and A/B tests."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import urllib3
from gateway_api import JSON

from sparring.client import Client
from sparring.experience import Columns, Fragment, new_id, pack
from sparring.games import Box, Dict, Discrete, Game
from sparring.games.spec import column
from sparring.gateway.ab_results import AbCount
from sparring.gateway.app import background, create_app
from sparring.gateway.history import History
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.ab import AbTest
from sparring.registry.manifest import Manifest
from sparring.registry.registry import Registry
from sparring.store import Outcome, Store, open_store
from sparring.store.family import Family
from sparring.store.lineage import Lineage
from sparring.store.memory import MemoryStore
from sparring.trainer.process import Roster
from sparring.trainer.promotion import Promotion
from sparring.trainer.settings import Settings
from sparring.trainer.simulator import Simulator

# Whose right answer is to name the larger of two numbers; later there is a hint, too.
OLD = Game("larger", Dict({"numbers": Box((2,))}), Discrete(2))
NEW = Game("larger", Dict({"numbers": Box((2,)), "hint": Box((), low=0.0, high=1.0)}), Discrete(2))
QUICK = {"learning_starts": 100, "exploration_steps": 500, "n_step": 1, "gamma": 0.5, "batch": 64}
SETTINGS = Settings("dqn", QUICK, publish_every=0.0, candidate_every=0.0, least_episodes=5, checkpoint_every=0.0)
STEPS = 20  # of an episode


class Stage:
    """A gateway with a store to write to, and a trainer that reads it, as two processes have them."""

    def __init__(self, address: str, path: Path, url: str, store: Store, reader: Store) -> None:
        self.path, self.url, self.store, self.reader = path, url, store, reader
        self.registry = Registry(path / "registry")
        self.roster = Roster(path, reader, self.registry, SETTINGS, address)
        self.rng = np.random.default_rng(0)

    def client(self, game: Game | str, player: str) -> Client:
        return Client(self.url, game, player, directory=self.path / "client" / player, refresh=0.05)

    def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        answer = urllib3.request(method, f"{self.url}/v1/games{path}", body=sent, headers=JSON if body else {})
        assert answer.status == status, answer.data
        return json.loads(answer.data)

    def play(self, client: Client, episodes: int) -> None:
        """As a person, by chance."""
        for _ in range(episodes):
            self.episode(client, lambda _: int(self.rng.integers(2)))
        assert client.flush()
        assert client.stats.rejected == 0

    def episode(self, player: Client, act: Callable[[Any], int]) -> None:
        obs = self._see(player.game)
        for step in range(STEPS):
            action, after = act(obs), self._see(player.game)
            reward = float(action == obs["numbers"].argmax())
            player.record(obs, action, reward, step == STEPS - 1, False, after)
            obs = after

    def _see(self, game: Game) -> dict[str, Any]:
        obs: dict[str, Any] = {"numbers": self.rng.standard_normal(2).astype(np.float32)}
        return obs | ({"hint": 0.5} if game.schema == NEW.schema else {})

    def train(self, until: Callable[[], Any], seconds: float = 60) -> None:
        """Turns go to whose game has had less time: how many it takes is not known."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.roster.next_list = 0.0
            for place in self.roster.places.values():  # no waiting between looks
                place.due = 0.0
                if place.trainer is not None:
                    place.trainer.next_look = place.trainer.promotion.next_episodes = 0.0
            self.roster.step()
            if until():
                return
        raise AssertionError("the trainer did not come to it")

    def stable(self, game: str) -> int:
        latest = self.registry.latest(game)
        return 0 if latest is None else latest.version

    def trained(self, game: str) -> Any:
        """The trainer's learner of a game."""
        place = self.roster.places.get(game)
        return None if place is None or place.trainer is None else place.trainer.learner

    def learned_from(self, game: str) -> list[Fragment]:
        """What the trainer reads for a game, by a view of its own."""
        games, profiles = self.reader.games(), self.reader.profiles()
        family = Family(games, profiles)
        found = family.find(game)
        assert found is not None
        play, cursor, fragments = Lineage(self.reader, found, family, profiles), 0, list[Fragment]()
        while (page := play.tail(cursor, 7)).cursor != cursor:
            fragments, cursor = fragments + page.fragments, page.cursor
        return fragments


@pytest.fixture(params=["sqlite", pytest.param("cassandra", marks=pytest.mark.real)])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    in_cluster = request.param == "cassandra"
    address = request.getfixturevalue("cassandra_address") if in_cluster else str(tmp_path / "store.db")
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(open_store(address)))
        reader = stack.enter_context(contextlib.closing(open_store(address, readonly=True)))
        app = create_app(store, Registry(tmp_path / "registry"), tmp_path / "trainer")
        yield Stage(address, tmp_path, stack.enter_context(background(app)), store, reader)


def test_a_game_is_changed_renamed_archived_and_deleted(stage: Stage) -> None:
    with stage.client(OLD, "ann") as old:
        stage.play(old, 10)
        stage.train(lambda: stage.stable("larger"))

        # Changed: both go on, each in its generation.
        change = {"game": json.loads(NEW.to_json()), "defaults": {"hint": 0.25}, "confirmed": True}
        made = stage.ask("POST", "/larger/generations", change, 201)
        assert (made["name"], made["continues"]) == ("larger.2", "larger")
        assert made["changes"] == ["you added `hint`: in old play it is 0.25"]
        with stage.client(NEW, "bob") as new:
            stage.play(old, 2)  # after the change: the old generation's alone
            stage.play(new, 3)
            assert [stage.reader.stats(name).steps // STEPS for name in ("larger", "larger.2")] == [12, 3]

            # Old play is read in the new form, up to the change.
            read = stage.learned_from("larger.2")
            assert {f.schema for f in read} == {NEW.schema}
            hints = {f.player: set(f.columns(NEW).obs["hint"].tolist()) for f in read}
            assert hints == {"ann": {0.25}, "bob": {0.5}}
            assert sum(f.steps for f in read) == 13 * STEPS
            stage.train(lambda: stage.stable("larger.2") and stage.trained("larger.2").steps == 13 * STEPS)
            assert stage.registry.moves("larger.2")[-1].reason.startswith("grown from version")
            stage.train(lambda: stage.trained("larger") and stage.trained("larger").steps == 12 * STEPS)

            # Each is served by bots of its own form.
            for client, name in ((old, "larger"), (new, "larger.2")):
                bot, version = client.bot(), stage.stable(name)
                policy = stage.registry.policy(name, "bot", version)
                obs = [stage._see(client.game) for _ in range(20)]
                rows = column(client.game.observation, obs)
                assert [bot.act(each) for each in obs] == policy.act(rows)[0].tolist()

            _renamed_and_archived(stage, old, new)
            _deleted(stage, new)


def _renamed_and_archived(stage: Stage, old: Client, new: Client) -> None:
    """Clients that know its first name go on, and one with the new name finds the same game."""
    stage.ask("PATCH", "/larger", {"name": "bigger"})
    stage.play(old, 1)
    with stage.client(msgspec.structs.replace(OLD, name="bigger"), "cleo") as renamed:
        stage.play(renamed, 1)
    assert stage.reader.stats("larger").steps == 14 * STEPS
    assert {p.player for p in stage.reader.players("larger")} == {"ann", "cleo"}

    stage.ask("PATCH", "/bigger", {"archived": True})
    stage.train(lambda: stage.roster.places["larger"].paused)
    assert stage.ask("GET", "/bigger/models/bot/latest")["version"] == stage.stable("larger")
    stage.play(old, 1)
    stage.play(new, 1)
    assert [stage.reader.stats(name).steps // STEPS for name in ("larger", "larger.2")] == [15, 4]
    stage.train(lambda: stage.trained("larger.2").steps == 14 * STEPS)


def _deleted(stage: Stage, new: Client) -> None:
    """With its play: the new generation forgets what it had of it, also while its trainer runs, and also when another
    game gets the name."""
    window = stage.trained("larger.2").window
    assert stage.ask("DELETE", "/bigger")["deleted"] == "larger"
    stage.train(lambda: "larger" not in stage.roster.places)
    assert not (stage.path / "trainer" / "larger").exists()
    with stage.client(OLD, "dora") as anew:
        stage.play(anew, 3)
    stage.train(lambda: stage.trained("larger.2").window < window)
    assert stage.trained("larger.2").window <= 4 * STEPS
    assert {f.player for f in stage.learned_from("larger.2")} == {"bob"}
    stage.play(new, 1)
    stage.train(lambda: stage.trained("larger.2").window > 4 * STEPS)
    assert {f.player for f in stage.learned_from("larger")} == {"dora"}


class Evidence:
    """What becomes of the same play on one store: candidates, collapse, people as a control, an A/B test."""

    def __init__(self, store: Store, reader: Store, path: Path, policy: Policy) -> None:
        self.store, self.reader, self.policy, self.registry = store, reader, policy, Registry(path)
        self.rng, self.steps = np.random.default_rng(0), 0
        store.register(OLD)
        parts = (reader, self.registry, OLD, SETTINGS, Simulator(OLD))
        self.promotion = Promotion(*parts, self.publish, lambda _: None, lambda: (self.steps, self.steps))
        self.history = History()

    def publish(self, policy: Policy) -> Manifest:
        return self.registry.publish(policy, algorithm="dqn", alias=None)

    def play(self, model: str | None, version: int | None, mean: float, episodes: int = 40) -> None:
        """In two fragments each."""
        self.steps += 2 * episodes
        sent, obs = list[Fragment](), np.zeros(2, OLD.observation.element)
        for number in range(episodes):
            who = {"player": f"p{number % 7}", "episode": new_id(), "model": model, "version": version}
            for start, reward in enumerate((mean, float(self.rng.standard_normal()))):
                columns = Columns(obs, np.zeros(1, "<i4"), np.array([reward], "<f4"))
                sent.append(pack(OLD, columns, id=new_id(), start=start, time=0.0, terminated=start == 1, **who))
        assert set(self.store.append(sent)) == {Outcome.STORED}

    def look(self) -> tuple[Any, ...]:
        """What is known after all that was played."""
        self.promotion.next_episodes = self.promotion.next_aliases = 0.0
        self.promotion.look(time.monotonic())
        memory = self.promotion.save()
        memory["cursor"] = memory["began"] = memory["control"]["since"] = 0  # its own, and the clock's
        for episode in self.reader.episodes(OLD.name, self.history.cursor):
            self.history.add(episode)
        h = self.history
        recent = [line.recent.returns() for line in (h.all, h.people, h.bots)]
        rows = sorted((p.player, p.steps, p.bot_steps) for p in self.reader.players(OLD.name))
        return memory, self.promotion.held, recent, rows, self.reader.stats(OLD.name).bot_steps

    def story(self) -> Iterator[tuple[Any, ...]]:
        self.play("random", 0, 0.0)
        self.offer()
        self.play("bot", 1, 3.0)
        yield self.look()  # better than chance
        self.play("bot", 1, 3.0, 10)
        self.offer()
        test = AbTest("x", {"bot": 0.5, "careful": 0.5}, 0.0, "me", cursor=self.reader.tail(OLD.name, -1).cursor)
        count = AbCount(OLD.name, test)
        self.play("bot", 1, 3.0)
        self.play("bot", 2, -3.0)
        yield self.look()  # rejected
        self.play("careful", 1, 3.0)
        self.play(None, None, 5.0, 60)
        yield *self.look(), count.results(self.reader)
        self.play(None, None, -5.0, 40)
        self.play("bot", 1, -3.0)
        yield self.look()  # the game changed, for people too
        self.store.erase(OLD.name, "p3")
        yield *self.look(), count.results(self.reader)

    def offer(self) -> None:
        self.look()
        self.promotion.next_candidate = 0.0
        self.promotion.offer(self.policy, time.monotonic())


def test_the_same_play_is_the_same_evidence_on_every_store(
    stage: Stage, tmp_path: Path, random_policy: Callable[..., Policy]
) -> None:
    """Promotions, people and bots apart, and A/B tests do not depend on how a store counts its cursors."""
    policy, memory = random_policy(OLD, (Dense(4),), QValues()), MemoryStore()
    usual = list(Evidence(memory, memory, tmp_path / "usual", policy).story())
    decisions = [found[0]["decision"] for found in usual]
    assert "version 1 was promoted: better than play at random" in decisions[0]
    assert "version 2 was rejected: worse than version 1" in decisions[1]
    assert "people's returns changed" in usual[3][1]
    here = Evidence(stage.store, stage.reader, tmp_path / "here", policy)
    for expected, found in zip(usual, here.story(), strict=True):
        assert found == expected
