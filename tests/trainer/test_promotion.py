"""Promotion: what players get changes on evidence only, and goes back when it collapses."""

import math
import time
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from sparring.experience import Columns, new_id, pack
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, param_shapes
from sparring.registry.manifest import Manifest
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore
from sparring.trainer.control import Control
from sparring.trainer.evidence import EpisodeReturns
from sparring.trainer.promotion import Promotion
from sparring.trainer.settings import Settings
from sparring.trainer.simulator import Simulator

GAME = Game(name="larger", observation=Box((2,)), action=Discrete(2))


class Stage:
    """A declared game, bots whose returns we choose, and what the trainer makes of them."""

    def __init__(self, path: Path, **settings: float) -> None:
        self.store, self.registry = MemoryStore(), Registry(path)
        self.store.register(GAME)
        self.settings = Settings(**{"publish_every": 0.0, "candidate_every": 0.0, **settings})  # type: ignore[arg-type]
        self.adopted: list[int] = []
        self.steps = self.bot_steps = 1000  # that the learner has taken in
        self.rng = np.random.default_rng(0)
        self.promotion = self.new()

    def new(self) -> Promotion:
        parts = (self.store, self.registry, GAME, self.settings, Simulator(GAME))
        adopt = lambda manifest: self.adopted.append(manifest.version)  # noqa: E731
        return Promotion(*parts, self.publish, adopt, lambda: (self.steps, self.bot_steps))

    def publish(self, policy: Policy) -> Manifest:
        return self.registry.publish(policy, algorithm="dqn", alias=None)

    def play(self, version: int | None, mean: float, episodes: int = 1, player: str = "p") -> None:
        """Version 0 plays at random, none is a person."""
        self.steps += episodes
        self.bot_steps += 0 if version is None else episodes
        for _ in range(episodes):
            reward = np.array([mean + self.rng.standard_normal()], np.float32)
            columns = Columns(np.zeros((2, 2), np.float32), np.zeros(1, "<i4"), reward)
            made = {"id": new_id(), "player": player, "episode": new_id(), "start": 0, "time": time.time()}
            model = None if version is None else "bot" if version else "random"
            self.store.append([pack(GAME, columns, **made, terminated=True, model=model, version=version)])

    def look(self) -> None:
        self.promotion.next_episodes = self.promotion.next_aliases = 0.0
        self.promotion.look(time.monotonic())

    def offer(self) -> None:
        self.look()
        self.promotion.offer(policy(), time.monotonic())

    @property
    def stable(self) -> int | None:
        latest = self.registry.latest(GAME.name)
        return None if latest is None else latest.version


def policy() -> Policy:
    layers = (Dense(4),)
    params = {name: np.zeros(shape, np.float32) for name, shape in param_shapes(GAME, layers, Categorical()).items()}
    return Policy(GAME, layers, Categorical(), params)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.registry.publish(policy(), algorithm="dqn", by="trainer")
    stage.look()
    stage.adopted.clear()
    stage.play(1, 0.0)
    stage.offer()
    assert (stage.stable, stage.promotion.candidate) == (1, 2)
    assert stage.registry.aliases(GAME.name)["candidate"].share == 0.75  # a young game
    return stage


def test_the_first_version_must_be_better_than_play_at_random(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.play(0, 0.0, 5)
    stage.offer()
    assert (stage.stable, stage.promotion.candidate) == (None, 1)
    stage.play(0, 0.0, 50)
    stage.play(1, -3.0, 50)
    stage.look()
    assert (stage.stable, stage.promotion.candidate) == (None, None)
    assert "version 1 was rejected: worse than play at random" in stage.promotion.memory.decision
    stage.promotion.next_candidate = 0.0
    stage.offer()
    stage.play(0, 0.0, 50)
    stage.play(2, 3.0, 50)
    stage.look()
    assert stage.stable == 2
    assert "better than play at random in 50 episodes of play" in stage.promotion.memory.decision


def test_clients_that_try_no_candidates_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)
    stage.play(0, 0.0)
    stage.offer()
    stage.play(0, 0.0, 31)  # each player's first may have begun before
    stage.look()
    assert stage.stable is None  # clients look for new versions every few seconds
    monkeypatch.setattr("sparring.trainer.promotion.UNMET", (30, 0.0))
    stage.look()
    assert stage.stable == 1
    assert "the first version: no client tries candidates" in stage.promotion.memory.decision
    stage.play(1, 0.0)
    stage.offer()
    assert stage.promotion.candidate == 2
    stage.play(1, 0.0, 40)
    stage.look()
    assert (stage.stable, stage.promotion.candidate) == (1, 2)
    assert "nobody tried version 2 in" in stage.promotion.evidence


def test_a_newer_candidate_takes_the_place_of_one_that_does_not_look_better(stage: Stage) -> None:
    stage.play(1, 0.0, 20)
    stage.play(2, 0.0, 12)
    stage.offer()
    assert stage.promotion.candidate == 2  # little was learned since
    stage.steps *= 2
    stage.offer()
    assert stage.promotion.candidate == 3
    reason = "instead of version 2, not clearly better in 12 episodes: to be compared with version 1 in play"
    assert stage.registry.moves(GAME.name)[0].reason == reason
    stage.play(3, 3.0, 20)  # what was seen of `stable` still counts
    stage.look()
    assert stage.stable == 3


def test_while_no_bot_plays_versions_follow_what_people_taught(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.bot_steps = 0
    stage.play(None, 1.0, 10)
    stage.offer()
    assert stage.stable == 1
    stage.offer()
    assert stage.stable == 1  # it has learned from hardly more
    stage.play(None, 1.0, 2000)
    stage.offer()
    assert stage.stable == 2
    assert "no bot has played since version 1: learned from 3,010 steps instead of" in stage.promotion.memory.decision
    stage.play(2, 1.0)  # from now on, evidence decides
    stage.play(None, 1.0, 5000)
    stage.offer()
    assert (stage.stable, stage.promotion.candidate) == (2, 3)


def test_what_a_person_published_is_not_replaced_because_nobody_played_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.registry.publish(policy(), algorithm="ppo", by="person")
    stage.play(None, 1.0, 5000)
    stage.offer()
    assert (stage.stable, stage.promotion.candidate, stage.adopted) == (1, 2, [1])
    assert stage.registry.aliases(GAME.name)["candidate"].share == 0.1  # not a young game's


def test_a_better_candidate_is_promoted_with_its_reason_and_numbers(stage: Stage) -> None:
    for _ in range(100):
        stage.play(1, 0.0)
        stage.play(2, 3.0)
        stage.play(None, -50.0)  # people's returns are not the bot's
        stage.look()
        if stage.stable == 2:
            break
    assert stage.stable == 2
    assert "candidate" not in stage.registry.aliases(GAME.name)
    stable = stage.registry.aliases(GAME.name)["stable"]
    assert stable.reason.startswith("better than version 1 in ")
    assert stable.by == "trainer"
    assert 0 < stable.evidence["low"] < stable.evidence["difference"] < stable.evidence["high"]
    assert stable.evidence["episodes"] >= stage.settings.least_episodes
    assert stage.promotion.memory.decision.startswith("version 2 was promoted: better than version 1")


def test_a_worse_one_is_rejected_and_the_next_one_waits(stage: Stage) -> None:
    stage.settings = Settings(publish_every=100.0, candidate_every=100.0)
    stage.promotion.settings = stage.settings
    for _ in range(100):
        stage.play(1, 3.0)
        stage.play(2, 0.0)
        stage.look()
    assert stage.stable == 1
    assert stage.promotion.candidate is None
    assert "rejected: worse than version 1" in stage.promotion.memory.decision
    assert stage.promotion.memory.wait == 200.0
    stage.offer()
    assert stage.registry.versions(GAME.name) == [1, 2]


def test_a_candidates_share_follows_the_setting_and_its_trial_begins_anew(stage: Stage) -> None:
    stage.play(1, 0.0, 9)
    stage.play(2, 9.0, 9)  # one more would be enough
    stage.look()
    stage.play(2, 9.0, 5)  # with the share of before, and not looked at yet
    stage.promotion.apply(msgspec.structs.replace(stage.settings, canary=0.3, alpha=0.01), time.monotonic())
    stage.look()
    candidate = stage.registry.aliases(GAME.name)["candidate"]
    assert (candidate.version, candidate.share, candidate.by) == (2, 0.3, "trainer")
    assert "version 2 gets 0.3 of play, it had 0.75" in stage.promotion.memory.decision
    newest = stage.registry.moves(GAME.name)[0]
    assert (newest.alias, newest.share, "set anew" in newest.reason) == ("candidate", 0.3, True)
    assert (stage.promotion.memory.new.values, stage.stable) == ([], 1)
    stage.look()
    assert len(stage.registry.moves(GAME.name)) == 3  # nothing moves twice
    again = stage.new()  # a restart knows
    again.restore(stage.promotion.save())
    again.settings = stage.promotion.settings
    stage.promotion = again
    stage.play(1, 0.0, 12)
    stage.play(2, 9.0, 12)
    stage.look()
    assert (stage.stable, len(stage.registry.moves(GAME.name))) == (2, 5)
    assert "in 12 episodes of play" in stage.promotion.memory.decision


def test_a_share_that_is_set_while_somebody_moves_the_candidate_is_left_to_them(stage: Stage) -> None:
    stage.promotion.apply(msgspec.structs.replace(stage.settings, canary=0.3), time.monotonic())
    stage.registry.publish(policy(), algorithm="ppo", alias=None)
    stage.registry.move(GAME.name, "bot", "candidate", 3, reason="mine", by="person", share=0.5)
    stage.promotion._follow_share()  # as of the look before
    assert stage.registry.aliases(GAME.name)["candidate"].share == 0.5
    stage.look()
    assert (stage.promotion.memory.candidate, stage.promotion.candidate) == (None, 3)


def test_much_that_was_played_while_nobody_looked_is_read_in_several_looks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparring.trainer.evidence.PAGE", 5)
    monkeypatch.setattr("sparring.trainer.evidence.PAGES", 2)
    stage.play(1, 0.0, 12)
    stage.play(2, 3.0, 12)
    monkeypatch.setattr(stage.store, "episodes", count := Mock(wraps=stage.store.episodes))
    stage.look()
    assert (count.call_count, stage.promotion.behind) == (2, True)  # then the other games have their turn
    stage.offer()  # nothing is tried or decided beside episodes that are not known yet
    assert (stage.stable, stage.promotion.memory.candidate, len(stage.promotion.memory.new)) == (1, 2, 8)
    now = time.monotonic()
    stage.promotion.look(now)  # with the next turn, not a second later
    assert (stage.promotion.behind, stage.stable) == (False, 2)
    assert "better than version 1 in 12 episodes" in stage.promotion.memory.decision


def test_one_that_is_as_good_is_given_up_in_the_end(stage: Stage) -> None:
    for _ in range(stage.settings.most_episodes):
        stage.play(1, 0.0)
        stage.play(2, 0.0)
    stage.look()
    assert stage.stable == 1
    assert "not clearly better" in stage.promotion.memory.decision


def test_evidence_outlives_a_restart(stage: Stage) -> None:
    stage.play(1, 0.0, 6)
    stage.play(2, 3.0, 5)
    stage.look()
    assert stage.promotion.evidence == "5 of at least 10 episodes"
    saved = stage.promotion.save()
    stage.promotion = stage.new()
    stage.promotion.restore(saved)
    stage.play(1, 0.0, 10)
    stage.play(2, 3.0, 10)
    stage.look()
    assert stage.stable == 2
    assert stage.adopted == []  # all of it was its own


def test_a_memory_that_cannot_be_read_begins_anew(stage: Stage) -> None:
    stage.promotion = stage.new()
    stage.promotion.restore({"stable": 1, "new": "of another time"})
    stage.look()
    assert (stage.promotion.memory.stable, stage.promotion.candidate) == (1, None)


def test_a_collapse_is_rolled_back_once_and_learning_goes_on_from_there(stage: Stage) -> None:
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.look()
    assert stage.stable == 2
    stage.play(2, 3.0, 100)
    stage.look()
    assert stage.stable == 2
    stage.play(2, -3.0, 200)
    stage.look()
    assert stage.stable == 1
    assert stage.adopted == [1]
    again, move = stage.registry.moves(GAME.name)[:2]
    assert move.reason.startswith("version 2 collapsed: ")
    assert (again.version, again.share, "it collapsed: to be compared with" in again.reason) == (2, 0.1, True)
    stage.play(1, 0.0, 40)
    stage.play(2, -3.0, 40)  # it was the version
    stage.look()
    assert "version 2 was rejected: worse than version 1" in stage.promotion.memory.decision
    stage.play(1, 0.0, 100)
    stage.play(1, -9.0, 200)
    stage.look()
    assert stage.stable == 1  # not to and fro


def test_what_did_not_collapse_comes_back(stage: Stage) -> None:
    """All versions get less since the game pays less, and nobody but bots plays: no people tell."""
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.look()
    stage.play(2, 1.0, 200)
    stage.look()
    assert stage.stable == 1
    stage.play(1, -2.0, 40)
    stage.play(2, 1.0, 40)
    stage.look()
    assert stage.stable == 2
    assert "better than version 1" in stage.registry.aliases(GAME.name)["stable"].reason
    stage.play(2, 1.0, 200)
    stage.look()
    assert stage.stable == 2


def test_a_rollback_is_undone_when_people_tell_that_it_was_the_game(stage: Stage) -> None:
    stage.play(None, 5.0, 60)
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.look()
    stage.play(2, -3.0, 60)
    stage.look()
    assert (stage.stable, stage.promotion.candidate) == (1, 2)
    stage.play(None, -1.0, 30)  # they were slower to finish
    stage.look()
    assert (stage.stable, stage.promotion.candidate) == (2, None)
    reason = stage.registry.aliases(GAME.name)["stable"].reason
    assert reason.startswith("it did not collapse: people's returns changed from 5")


def test_a_change_that_lasts_makes_no_collapse_of_what_is_good(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.play(None, 5.0, 60)
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.look()
    stage.play(2, 3.0, 30)
    stage.play(None, -5.0, 30)
    stage.look()
    assert stage.promotion.held
    stage.play(2, -3.0, 50)
    again = stage.new()  # the trainer is started again, and nobody played meanwhile
    again.restore(stage.promotion.save())
    stage.promotion, today = again, time.time
    monkeypatch.setattr(time, "time", lambda: today() + 25 * 3600)
    stage.look()
    assert not stage.promotion.held
    stage.play(2, -3.0, 200)
    stage.look()
    assert stage.stable == 2


def test_what_changes_for_people_too_is_not_the_versions_fault(stage: Stage) -> None:
    stage.play(None, 5.0, 60)
    stage.play(1, 3.0, 60)
    stage.look()
    stage.play(None, -5.0, 30)  # the game pays less, or the other way round
    stage.play(1, -3.0, 200)
    stage.play(2, 9.0, 200)  # what suits that
    stage.look()
    assert stage.stable == 1
    assert "people's returns changed from 5.0" in stage.promotion.held
    stage.offer()
    assert stage.promotion.candidate is None
    again = stage.new()
    again.restore(stage.promotion.save())
    stage.promotion = again
    stage.look()
    assert stage.promotion.held
    stage.play(None, 5.0, 40)
    stage.look()
    assert not stage.promotion.held
    stage.play(1, 3.0, 20)
    stage.look()
    assert stage.stable == 1
    stage.offer()
    assert stage.promotion.candidate is not None


def test_a_change_that_lasts_is_how_the_game_is() -> None:
    control = Control()
    for ret in [*np.random.default_rng(0).normal(5.0, 1.0, 60), *np.random.default_rng(1).normal(0.0, 1.0, 30)]:
        control.note("p", float(ret))
    assert "changed from 5" in control.look(1000.0)
    assert control.look(1000.0 + 3600)
    assert control.look(1000.0 + 25 * 3600) == ""
    assert control.look(1000.0 + 25 * 3600) == ""


def test_other_people_at_another_hour_are_no_change_of_the_game() -> None:
    control, rng = Control(), np.random.default_rng(0)
    for hour in range(24):
        for ret in rng.normal(5.0 if hour % 24 < 12 else 4.4, 1.0, 50):
            control.note("p", float(ret))
            assert control.look(3600.0 * hour) == ""


def test_that_somebody_else_plays_is_no_change_of_the_game() -> None:
    control, rng = Control(), np.random.default_rng(0)
    for hour, players in enumerate([["good"], ["good", "bad"], ["bad"], ["bad", "new"], ["new"], ["good"]]):
        for _ in range(60):
            for player in players:
                control.note(player, float(rng.normal({"good": 5.0, "bad": -5.0, "new": 0.0}[player], 1.0)))
                assert control.look(3600.0 * hour) == ""
    for i in range(300):  # very many, of whom each plays seldom
        control.note(f"p{i}", float(rng.normal(2.0, 2.0)))
        assert control.look(6 * 3600.0) == ""
    for i in range(30):
        control.note(f"q{i}", float(rng.normal(-4.0, 2.0)))
    assert "changed from 1.9" in control.look(6 * 3600.0)


def test_one_person_stops_no_promotions() -> None:
    control, rng = Control(), np.random.default_rng(0)
    for _ in range(30):
        for player in ("ann", "bob", "cid", "liar"):
            control.note(player, float(rng.normal(5.0, 1.0)))
    for _ in range(300):  # who never sleeps, or lies
        control.note("liar", -50.0)
        assert control.look(0.0) == ""
    for _ in range(12):
        for player in ("ann", "bob", "cid"):
            control.note(player, float(rng.normal(-5.0, 1.0)))
    assert "people's returns changed from" in control.look(0.0)


def test_no_player_decides_for_all(stage: Stage) -> None:
    """One whose client lies, or who plays day and night, beside three others."""
    for _ in range(15):
        for player in ("ann", "bob", "cid"):
            stage.play(1, 0.0, player=player)
            stage.play(2, -0.5, player=player)
        stage.play(1, -9.0, 2, player="liar")
        stage.play(2, 9.0, 3, player="liar")
    stage.look()
    assert (stage.stable, stage.promotion.candidate) == (1, 2)
    assert "but not without the episodes of 'liar'" in stage.promotion.evidence
    again = stage.new()
    again.restore(stage.promotion.save())
    stage.promotion = again
    for player in ("ann", "bob", "cid"):
        stage.play(2, 3.0, 60, player=player)
        stage.look()
    assert stage.stable == 2
    for player in ("ann", "bob", "cid"):
        stage.play(2, 2.0, 10, player=player)
    stage.play(2, -90.0, 60, player="liar")
    stage.look()
    assert stage.stable == 2


def test_what_evidence_promoted_is_not_replaced_because_nobody_plays_it(stage: Stage) -> None:
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.look()
    assert stage.stable == 2
    stage.play(None, 1.0, 5000)
    stage.offer()
    assert (stage.stable, stage.promotion.candidate) == (2, 3)
    moves = stage.registry.moves(GAME.name)
    assert moves[0].reason == "to be compared with version 2 in play"


def test_a_game_is_not_young_after_a_person_chose(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.registry.publish(policy(), algorithm="ppo", by="person")
    stage.play(1, 0.0)
    stage.offer()
    stage.play(1, 0.0, 30)
    stage.play(2, 5.0, 30)
    stage.offer()
    assert (stage.stable, stage.promotion.candidate) == (2, 3)
    assert stage.registry.aliases(GAME.name)["candidate"].share == 0.1


def test_a_clock_that_was_wrong_keeps_no_game_young(stage: Stage) -> None:
    stage.play(1, 0.0, 600)
    stage.look()
    assert stage.promotion._young
    stage.promotion.memory.began += 10 * 365 * 24 * 3600
    assert not stage.promotion._young


def test_a_pinned_version_is_what_all_players_get(stage: Stage) -> None:
    assert stage.registry.serving(GAME.name).candidate is not None
    stage.registry.pin(GAME.name, by="person")
    assert stage.registry.serving(GAME.name).candidate is None  # at once, whatever the trainer does
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.look()
    assert (stage.stable, stage.promotion.candidate) == (1, None)
    assert "version 1 is pinned, all players get it" in stage.promotion.memory.decision
    stage.offer()
    assert (stage.promotion.candidate, stage.registry.versions(GAME.name)) == (None, [1, 2])
    stage.registry.pin(GAME.name, pinned=False, by="person")
    stage.offer()
    assert stage.promotion.candidate == 3


def test_what_is_found_just_before_a_pin_waits_for_a_person(stage: Stage) -> None:
    stage.play(1, 0.0, 30)
    stage.play(2, 3.0, 30)
    stage.registry.pin(GAME.name, by="person")
    stage.promotion.next_episodes, stage.promotion.next_aliases = 0.0, math.inf  # it does not know yet
    stage.promotion.look(time.monotonic())
    candidate = stage.registry.aliases(GAME.name)["candidate"]
    assert (stage.stable, candidate.version, candidate.share) == (1, 2, 0.0)
    assert "version 1 is pinned: a person has to promote it" in stage.promotion.memory.decision


def test_what_a_person_decides_stands(stage: Stage) -> None:
    stage.registry.pin(GAME.name, by="person")
    stage.look()
    stage.registry.publish(policy(), algorithm="ppo", alias=None)
    stage.registry.move(GAME.name, "bot", "stable", 3, reason="mine", by="person")
    stage.look()
    assert stage.adopted == [3]


def test_old_versions_are_retired(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep=3)
    for _ in range(8):
        stage.offer()
        stage.promotion._promote(stage.registry.versions(GAME.name)[-1], "a test", {}, EpisodeReturns())
        stage.promotion.memory.candidate = None
    assert len(stage.registry.versions(GAME.name)) <= 8
    assert stage.stable == stage.registry.versions(GAME.name)[-1]
    for _ in range(8):  # also while none is promoted
        stage.offer()
        stage.promotion._forget_trial("a test")
    assert stage.stable in stage.registry.versions(GAME.name)
    assert len(stage.registry.versions(GAME.name)) <= 8
