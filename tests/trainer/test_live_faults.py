"""The trainer under games that fail, play that breaks learning, erasures, pauses, signals and full disks."""

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.errors import InputError, SparringError
from sparring.experience import Columns, Fragment, new_id, pack
from sparring.experience.validate import check
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.games.catalog import load
from sparring.registry.registry import Registry
from sparring.runs import checkpoint
from sparring.store.lineage import Lineage
from sparring.store.profile import GameSettings, Profile, Revision
from sparring.store.protocol import Episode
from sparring.store.sqlite import SqliteStore
from sparring.trainer import culprits
from sparring.trainer.game_trainer import GameTrainer, Replaced, Settings
from sparring.trainer.process import LEAST_WINDOW, Roster

# The right answer is to name the larger of two numbers: solved by one network layer.
LARGER = Game(name="larger", observation=Box((2,)), action=Discrete(2))
QUICK = {"learning_starts": 100, "exploration_steps": 500, "n_step": 1, "gamma": 0.5, "batch": 64}
SETTINGS = {"publish_every": 0.0, "evaluate_every": 0.0, "hyperparameters": QUICK}


def played(
    game: Game, count: int, player: str = "alice", steps: int = 50, seed: int | None = None, **changed: float
) -> list[Fragment]:
    """Random play. `changed`: a column of which one number is another."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        obs = rng.standard_normal((steps + 1, *game.observation.element.shape)).astype(game.observation.element.base)
        action = rng.integers(0, 2, steps).astype("<i4")
        reward = (action == obs.reshape(steps + 1, -1)[:-1, :2].argmax(-1)).astype(np.float32)
        if isinstance(game.action, Box):
            action = rng.standard_normal((steps, *game.action.shape)).astype(np.float32)
        columns = {"obs": obs, "action": action, "reward": reward, "log_prob": np.full(steps, np.log(0.5), np.float32)}
        for name, value in changed.items():
            columns[name][steps // 2] = value
        made.append(
            pack(
                game,
                Columns(**columns),
                id=new_id(),
                player=player,
                episode=new_id(),
                start=0,
                time=time.time(),
                truncated=True,  # by nobody's bot: then each version is what players get, at once
            )
        )
    return made


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}")


class Platform:
    """A data directory with a store that we write, as the gateway would, and the trainer as a real process."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.store = SqliteStore(data / "store.db")
        self.registry = Registry(data / "registry")

    @contextmanager
    def trainer(self, **settings: Any) -> "Iterator[subprocess.Popen[bytes]]":
        words = ["--data", str(self.data), "--settings", json.dumps(SETTINGS | settings)]
        env = {"JAX_PLATFORMS": "cpu", **os.environ}
        with (self.data / "trainer.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sparring.trainer.process", *words], stdout=log, stderr=log, env=env
            )
        try:
            yield process
            assert process.poll() is None, f"the trainer ended:\n{self.log()}"
        finally:
            process.terminate()
            process.wait(60)
        assert process.returncode == 0, self.log()

    def log(self) -> str:
        return (self.data / "trainer.log").read_text()

    def status(self, game: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.data / "trainer" / game / "status.json").read_bytes())
            return found
        except FileNotFoundError:
            return {"state": "", "updates": 0}

    def says(self, game: str, words: str) -> Callable[[], bool]:
        return lambda: words in self.status(game)["state"]

    def version(self, game: str) -> Callable[[], int]:
        return lambda: (latest := self.registry.latest(game)) is not None and latest.version

    def learns_on(self, game: str, feed: Game | None = None) -> None:
        before = self.status(game)["updates"]

        def more() -> bool:
            if feed is not None:
                self.store.append(played(feed, 2))
            return bool(self.status(game)["updates"] > before)

        until(more, f"{game} to learn on; {self.status(game)}")

    def quarantine(self) -> list[tuple[str, str, str]]:
        with sqlite3.connect(self.data / "store.db") as db:
            return db.execute("SELECT player, id, reason FROM quarantine").fetchall()


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    made = Platform(tmp_path)
    yield made
    made.store.close()


def settings(**changed: Any) -> Settings:
    return msgspec.convert(SETTINGS | changed, Settings)


def in_process(path: Path, game: Game, store: Any = None, **changed: Any) -> GameTrainer:
    if store is None:
        store = SqliteStore(path / "store.db")
        store.register(game)
    return GameTrainer(store, Registry(path / "registry"), path / "trainer", game, settings(**changed))


def run_dry(trainer: GameTrainer) -> None:
    for _ in range(10_000):
        if not trainer.turn():
            return
    raise AssertionError("the trainer never runs out of work")


def drive(roster: Roster, condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, {name: place.status for name, place in roster.places.items()}
        roster.step()


def ids(store: Any, game: str) -> set[str]:
    return {f.id for piece in store.scan(game) for f in piece}


# Games are isolated


def test_a_game_declared_unlike_its_env_stops_nobody_and_is_shown(platform: Platform) -> None:
    wrong = Game(name="a-wrong", observation=Box((4,)), action=Discrete(500), env="CartPole-v1")
    for game in (wrong, LARGER):
        platform.store.register(game)
        platform.store.append(played(game, 20))
    with platform.trainer():
        until(platform.version("larger"), "the honest game's version")
        until(platform.version("a-wrong"), "the other's, by the clock")
        until(
            platform.says("a-wrong", 'CartPole-v1 has the actions {"type":"discrete","n":2'), "the reason in its status"
        )
        platform.learns_on("larger", LARGER)


def test_a_simulator_that_ends_the_process_stops_nobody(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_deadly(platform, tmp_path / "packages", monkeypatch, "raise SystemExit('the game is over')")
    with platform.trainer():
        until(platform.version("larger"), "the honest game's version")
        until(platform.says("deadly", "Deadly-v0 failed: SystemExit: the game is over"), "the reason in its status")


def test_a_simulator_that_kills_the_process_again_and_again_has_to_wait(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_deadly(platform, tmp_path / "packages", monkeypatch, "import os; os.kill(os.getpid(), 9)")
    for _ in range(3):
        with pytest.raises(AssertionError, match="the trainer ended"), platform.trainer() as process:
            process.wait(60)
    with platform.trainer():
        until(platform.says("deadly", "failed: the trainer died 3 times in a row in this game's turn"), "the reason")
        platform.learns_on("larger", LARGER)


def test_a_game_in_whose_turn_the_trainer_hung_waits_and_longer_the_second_time(platform: Platform) -> None:
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 20))
    for deaths, seconds in ((0, 900), (1, 6 * 3600)):
        (platform.data / "trainer.turn").write_text(f"{deaths} larger")
        address = str(platform.data / "store.db")
        roster = Roster(platform.data, platform.store, platform.registry, settings(), address, hung=True)
        roster.step()
        place = roster.places["larger"]
        assert place.trainer is None
        assert place.retry == seconds
        assert place.status is not None
        assert place.status.state == "failed: the trainer hung in this game's turn until it was killed"


def install_deadly(platform: Platform, packages: Path, monkeypatch: pytest.MonkeyPatch, reset: str) -> None:
    """Games of installed packages may do anything."""
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(
        "import gymnasium\n"
        "class Deadly(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, **options):\n"
        f"        {reset}\n"
        "gymnasium.register('Deadly-v0', Deadly)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    for game in (msgspec.structs.replace(LARGER, name="deadly", env="Deadly-v0"), LARGER):
        platform.store.register(game)
        platform.store.append(played(game, 20))


def test_a_game_that_is_paused_is_not_trained_until_it_is_resumed(platform: Platform) -> None:
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 20))
    with platform.trainer():
        until(platform.version("larger"), "a version")
        platform.store.pause("larger", True)
        until(platform.says("larger", "paused"), "the pause")
        before = platform.status("larger")
        assert before["updates"] > 0
        platform.store.append(played(LARGER, 20))
        until(lambda: platform.status("larger")["updated"] > before["updated"], "another sign of life")
        assert platform.status("larger")["updates"] == before["updates"]
        platform.store.pause("larger", False)
        platform.learns_on("larger")
        assert platform.status("larger")["updates"] > before["updates"]


def test_a_deleted_game_is_dropped_and_may_come_back_as_another(platform: Platform) -> None:
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 20))
    with platform.trainer():
        until(platform.version("larger"), "a version")
        platform.store.delete_game("larger")
        until(lambda: not (platform.data / "trainer/larger").exists(), "its directory to go")
        again = msgspec.structs.replace(LARGER, observation=Box((3,)))
        platform.store.register(again)
        platform.store.append(played(again, 20))
        until(lambda: platform.status("larger")["updates"] > 0, "the new one to be learned")
        # … and at once with the same spaces, too quick for the trainer to see it gone.
        platform.store.delete_game("larger")
        platform.store.register(again)
        platform.store.append(played(again, 10))
        until(lambda: platform.status("larger").get("steps") == 500, "only the newest one's play to count")
    with platform.trainer():  # while nobody looked
        until(platform.says("larger", "waiting for play"), "its return")
    platform.store.delete_game("larger")
    platform.store.register(again)
    platform.store.append(played(again, 12))
    with platform.trainer():
        until(lambda: platform.status("larger").get("steps") == 600, "only the newest one's play to count")


def test_a_game_deleted_while_its_version_is_published_keeps_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "store.db")
    store.register(LARGER)
    store.append(played(LARGER, 20))
    trainer = in_process(tmp_path, LARGER, store)
    publish = trainer.registry.publish

    def slow(*words: Any, **options: Any) -> Any:
        store.delete_game("larger")
        assert trainer.registry.delete_game("larger") == 0  # as the gateway does, which finds nothing yet
        return publish(*words, **options)

    monkeypatch.setattr(trainer.registry, "publish", slow)
    with pytest.raises(Replaced):
        until(lambda: trainer.turn() and False, "the deletion to be seen")
    assert trainer.registry.games() == []
    store.close()


# Play that breaks learning


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_play_that_breaks_learning_is_put_aside_and_its_player_named(platform: Platform, algorithm: str) -> None:
    game = msgspec.structs.replace(LARGER, reward=(-3.4e38, 3.4e38))
    hyperparameters = QUICK if algorithm == "dqn" else {"steps": 200, "gamma": 0.5, "lr": 3e-3}
    platform.store.register(game)
    with platform.trainer(algorithm=algorithm, hyperparameters=hyperparameters, checkpoint_every=0.1):
        platform.store.append(played(game, 20))
        until(platform.version("larger"), "a version")
        bad = played(game, 5, "mallory", steps=5, reward=3e38)
        assert check(game, bad) == [None] * 5  # the door cannot know
        platform.store.append([*played(game, 2), *bad, *played(game, 4, "bob")])
        until(lambda: len(platform.quarantine()) == 5, "the culprits to be found")
        until(
            platform.says("larger", "5 fragments of player 'mallory' made learning diverge (reward up to 3e+38"),
            "names",
        )
        platform.learns_on("larger", game)
        log = platform.log()
    assert {(player, name) for player, name, _ in platform.quarantine()} == {("mallory", f.id) for f in bad}
    assert "reward up to 3e+38" in platform.quarantine()[0][2]
    assert "mallory" in log
    assert "Traceback" not in log
    kept = {f.player for piece in platform.store.scan("larger") for f in piece}
    assert kept == {"alice", "bob"}
    assert platform.store.stats("larger").fragments >= 26
    arrays, _ = checkpoint.load(platform.data / "trainer/larger/checkpoint")
    assert all(np.isfinite(array).all() for array in arrays.values())
    latest = platform.registry.latest("larger")
    assert latest is not None
    policy = platform.registry.policy("larger", "bot", latest.version)
    obs = np.random.default_rng(9).standard_normal((500, 2), np.float32)
    assert (policy.act(obs)[0] == obs.argmax(-1)).mean() > 0.8  # what honest players taught is still known


UNBOUNDED = Game(name="larger", observation=Box((2,)), action=Box((1,)), reward=(-1e38, 1e38))
DOUBLE = Game(name="larger", observation=Box((2,), "float64", low=-1e308, high=1e308), action=Discrete(2))


@pytest.mark.parametrize(
    ("game", "algorithm", "hyperparameters", "column", "value"),
    [
        (DOUBLE, "dqn", QUICK | {"normalise": False}, "obs", 1e300),  # infinite as float32, which networks see
        (UNBOUNDED, "ppo", {"steps": 200}, "action", 1e30),  # in the logarithm of its probability
        (UNBOUNDED, "ppo", {"steps": 200}, "reward", -1e30),
    ],
)
def test_the_culprit_is_found_whatever_column_it_is(
    tmp_path: Path, game: Game, algorithm: str, hyperparameters: dict[str, Any], column: str, value: float
) -> None:
    trainer = in_process(tmp_path, game, algorithm=algorithm, hyperparameters=hyperparameters)
    trainer.store.append(played(game, 8))
    run_dry(trainer)
    bad = played(game, 1, "mallory", **{column: value})
    trainer.store.append([*bad, *played(game, 4, "bob")])
    for _ in range(100):
        trainer.rest_until = 0.0
        trainer.turn()
        if ids(trainer.store, "larger").isdisjoint(f.id for f in bad):
            break
    assert "1 fragment of player 'mallory'" in trainer.notice
    assert {f.player for piece in trainer.store.scan("larger") for f in piece} == {"alice", "bob"}
    updates = trainer.learner.updates
    trainer.rest_until = 0.0
    trainer.store.append(played(game, 20))
    run_dry(trainer)
    assert trainer.learner.updates > updates
    assert trainer.learner.problem() is None


def test_learning_that_diverges_by_itself_blames_nobody(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER, hyperparameters=QUICK | {"lr": 1e30, "max_grad_norm": 1e30})
    trainer.store.append(played(LARGER, 20))
    with pytest.raises(SparringError, match="no play with extreme numbers does that: lower"):
        run_dry(trainer)
    assert trainer.store.stats("larger").fragments == 20
    assert trainer.learner.problem() is None


def test_one_players_enormous_observations_do_not_hide_everybody_elses(tmp_path: Path) -> None:
    """Within all bounds, and finite: the normaliser must not spread over them."""
    trainer = in_process(tmp_path, LARGER)
    trainer.store.append(played(LARGER, 40))
    run_dry(trainer)
    trainer.store.append([*played(LARGER, 10, "mallory", obs=9e14), *played(LARGER, 40)])
    run_dry(trainer)
    std = trainer.learner.normaliser_params["normaliser.std"]
    assert (std < 3).all()  # of honest play: 1


@pytest.mark.parametrize("alone", [False, True])
def test_enormous_observations_that_come_first_do_not_hide_what_follows(tmp_path: Path, alone: bool) -> None:
    trainer = in_process(tmp_path, LARGER)
    first = played(LARGER, 1, "mallory", steps=1, obs=9e14)
    if alone:  # in a page of its own
        trainer.store.append(first)
        trainer.turn()
        first = []
    trainer.store.append([*first, *played(LARGER, 40)])
    run_dry(trainer)
    assert (trainer.learner.normaliser_params["normaliser.std"] < 3).all()


def test_erasing_a_player_takes_their_numbers_out_of_the_normaliser(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER)
    for fragment in played(LARGER, 20, "mallory"):  # alone for long enough to say what is usual
        columns = fragment.columns(LARGER)
        giant = Columns(columns.obs * np.float32(1e12), columns.action, columns.reward, columns.log_prob)
        rest = {"id": new_id(), "player": "mallory", "episode": new_id(), "start": 0, "time": time.time()}
        trainer.store.append([pack(LARGER, giant, truncated=True, **rest)])
    trainer.store.append(played(LARGER, 40))
    run_dry(trainer)
    assert (trainer.learner.normaliser_params["normaliser.std"] > 1e6).all()
    trainer.store.erase("larger", "mallory")
    trainer.next_look = 0.0
    trainer.turn()
    assert (trainer.learner.normaliser_params["normaliser.std"] < 3).all()


def test_what_was_erased_while_the_trainer_was_away_leaves_its_memory_too(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER)
    for fragment in played(LARGER, 20, "mallory"):
        columns = fragment.columns(LARGER)
        giant = Columns(columns.obs * np.float32(1e12), columns.action, columns.reward, columns.log_prob)
        rest = {"id": new_id(), "player": "mallory", "episode": new_id(), "start": 0, "time": time.time()}
        trainer.store.append([pack(LARGER, giant, truncated=True, **rest)])
    trainer.store.append(played(LARGER, 40))
    run_dry(trainer)
    trainer.promotion.look(time.monotonic())
    known = trainer.promotion.memory.control
    assert {who for who, _ in known.episodes} == {"alice", "mallory"}
    trainer.checkpoint()
    trainer.store.erase("larger", "mallory")
    again = in_process(tmp_path, LARGER, trainer.store)
    assert (again.learner.normaliser_params["normaliser.std"] < 3).all()
    assert {who for who, _ in again.promotion.memory.control.episodes} == {"alice"}
    again.checkpoint()
    assert b"mallory" not in b"".join(f.read_bytes() for f in (again.directory / "checkpoint").iterdir())
    # Another algorithm takes the evidence over, and no more of it than it may.
    trainer.checkpoint()
    beside = in_process(tmp_path, LARGER, trainer.store, algorithm="bc", hyperparameters={})
    assert {who for who, _ in beside.promotion.memory.control.episodes} == {"alice"}


def test_returns_of_a_player_who_is_erased_are_no_evidence_any_more(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER)
    memory = trainer.promotion.memory
    memory.stable, memory.candidate = 1, 2
    for i in range(40):
        who = "bob" if i < 5 else "alice"
        for version in (1, 2, None):
            memory.note(Episode(who, f"{i}", 1, float(i), 0.0, version and "bot", version, cursor=i), 0.0)
    assert (len(memory.reference), len(memory.recent), len(memory.new), len(memory.old)) == (30, 10, 40, 38)
    trainer.store.append([*played(LARGER, 3, "bob"), *played(LARGER, 3)])
    trainer._look_for_erasures()
    assert len(memory.new) == 40  # nothing was erased: all of it stays
    trainer.store.erase("larger", "bob")
    trainer._look_for_erasures()
    assert memory.new.values == [float(i) for i in range(5, 40)]
    assert (len(memory.old), memory.players, len(memory.reference)) == (34, ["alice"], 25)
    assert len(memory.recent) == 0  # the next episodes fill the reference up again
    assert {who for who, _ in memory.control.episodes} == {"alice"}
    assert "bob" not in json.dumps(trainer.promotion.save())


def test_play_that_is_unlikely_by_any_measure_does_not_break_ppo(tmp_path: Path) -> None:
    """The ratio of probabilities must not overflow: infinity times a weight of 0 is NaN."""
    trainer = in_process(tmp_path, UNBOUNDED, algorithm="ppo", hyperparameters={"steps": 200})
    rng = np.random.default_rng(0)
    for sign in (1.0, -1.0):
        for fragment in played(UNBOUNDED, 4):
            columns = fragment.columns(UNBOUNDED)
            far = (sign * 900 * rng.choice([-1.0, 1.0], columns.action.shape)).astype(np.float32)
            strange = Columns(columns.obs, far, -columns.reward, np.full(50, -0.9, np.float32))
            rest = {"id": new_id(), "player": "mallory", "episode": new_id(), "start": 0, "time": time.time()}
            trainer.store.append([*played(UNBOUNDED, 6), pack(UNBOUNDED, strange, truncated=True, **rest)])
        run_dry(trainer)
    assert trainer.learner.updates > 0
    assert trainer.learner.problem() is None
    assert trainer.notice == ""


def test_nobody_is_blamed_when_many_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One player who sends most of the play must not make everybody else's look extreme."""
    trainer = in_process(tmp_path, LARGER)
    monkeypatch.setattr(trainer.learner, "breaks", lambda fragments: "everything" if fragments else None)
    honest = [f for i in range(8) for f in played(LARGER, 2, f"honest{i}", obs=5000.0)]
    zeros = [f for f in played(LARGER, 100, "mallory")]
    forever = time.monotonic() + 60
    assert culprits.find(trainer.learner, lambda: [[*honest, *zeros]], forever) == []
    giants = played(LARGER, 2, "mallory", obs=1e9)
    found = culprits.find(trainer.learner, lambda: [[*honest, *giants]], forever)
    assert {c.fragment.player for c in found} == {"mallory"}
    everybody = [f for i in range(8) for f in played(LARGER, 2, f"sybil{i}")]
    assert culprits.find(trainer.learner, lambda: [[*honest, *everybody]], forever) == []


def test_a_checkpoint_with_nan_from_before_is_not_gone_on_from(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER)
    trainer.store.append(played(LARGER, 20))
    run_dry(trainer)
    trainer.learner.state = trainer.learner.state._replace(
        params={name: array * np.nan for name, array in trainer.learner.state.params.items()}
    )
    trainer.checkpoint()
    again = in_process(tmp_path, LARGER, store=trainer.store)
    assert again.learner.problem() is None
    run_dry(again)
    assert again.learner.updates > 0
    assert again.learner.problem() is None


# Erasures


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_erased_play_leaves_the_trainers_memory(tmp_path: Path, algorithm: str) -> None:
    hyperparameters = QUICK if algorithm == "dqn" else {"steps": 5000}
    trainer = in_process(tmp_path, LARGER, algorithm=algorithm, hyperparameters=hyperparameters)
    trainer.store.append([*played(LARGER, 20), *played(LARGER, 10, "bob")])
    run_dry(trainer)
    assert trainer.learner.window == 1500
    assert trainer.store.erase("larger", "bob") == 10
    trainer.next_look = 0.0
    trainer.turn()
    assert trainer.learner.window == 1000
    trainer.store.append(played(LARGER, 10))
    run_dry(trainer)
    assert trainer.learner.window == 1500
    assert trainer.learner.steps == 2000  # experience that was had


# Memory


def test_a_game_without_play_gets_no_learner(platform: Platform) -> None:
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    for game in (LARGER, msgspec.structs.replace(LARGER, name="quiet")):
        platform.store.register(game)
    platform.store.append(played(LARGER, 20))
    drive(roster, platform.version("larger"))
    drive(roster, platform.says("quiet", "waiting for play"))
    assert roster.places["quiet"].trainer is None
    platform.store.append(played(msgspec.structs.replace(LARGER, name="quiet"), 20))
    drive(roster, platform.version("quiet"))


def test_a_game_that_nobody_plays_any_more_makes_room_and_comes_back(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparring.trainer.process.UNLOAD_AFTER", 0.2)
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 20))
    drive(roster, lambda: "larger" in roster.places and roster.places["larger"].proven)
    assert roster.places["larger"].trainer is None
    assert platform.status("larger")["state"] == "waiting for play"
    learned = platform.status("larger")["updates"]
    assert learned > 0
    platform.store.append(played(LARGER, 20))
    drive(roster, lambda: platform.status("larger")["updates"] > learned)


def test_a_window_of_images_is_bounded_by_bytes(tmp_path: Path) -> None:
    game = Game(name="larger", observation=Box((64, 64, 3), "uint8"), action=Discrete(2))
    trainer = in_process(tmp_path, game, window_bytes=4 << 20)
    for _ in range(3):
        trainer.store.append(played(game, 10))
        trainer.learner.debt = 0.0  # only its memory is looked at
        run_dry(trainer)
    status = trainer.status("training")
    assert 3 << 20 < status.window_bytes <= 4 << 20
    assert 0 < status.window < (4 << 20) // (64 * 64 * 3)
    assert trainer.learner.replay.obs.nbytes <= 4 << 20


def test_the_windows_of_all_games_together_are_bounded(platform: Platform) -> None:
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    roster.memory = 40 << 20
    for name in ("one", "two"):
        game = Game(name=name, observation=Box((32, 32, 3), "uint8"), action=Discrete(2))
        platform.store.register(game)
        platform.store.append(played(game, 1))
    drive(roster, lambda: [p.trainer is not None for p in roster.places.values()] == [True, True])
    limits = sorted(place.trainer.learner.window_limit for place in roster.places.values() if place.trainer)
    assert sum(limits) <= (40 << 20) + LEAST_WINDOW
    assert limits[0] <= LEAST_WINDOW < limits[1] <= 40 << 20


@pytest.mark.parametrize(
    "game",
    [
        Game("larger", Dict({"item": Discrete(1 << 20), "other": Discrete(1 << 20)}), Discrete(2)),
        Game("larger", Box((2,)), Discrete(1 << 20)),
        Game("larger", Box((512, 512, 3), "uint8"), Discrete(2)),
        Game("larger", Box((2,)), MultiDiscrete((1,) * 257)),
    ],
    ids=["one-hot", "actions", "image", "parts"],
)
def test_a_game_too_large_to_learn_is_refused_before_it_takes_memory(tmp_path: Path, game: Game) -> None:
    with pytest.raises(InputError, match=r"Make the .* smaller"):
        in_process(tmp_path, game, hyperparameters={})


def test_a_fragment_longer_than_the_window_is_learned_from(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER, hyperparameters=QUICK | {"replay": 64})
    trainer.store.append(played(LARGER, 5, steps=500))
    run_dry(trainer)
    assert trainer.learner.updates > 0
    assert trainer.learner.window <= 64


# Turns


@pytest.mark.parametrize(
    "error", [AssertionError("no"), MemoryError(), SystemExit(3), KeyboardInterrupt(), KeyError("x")]
)
def test_whatever_a_game_raises_the_others_go_on(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(self: GameTrainer) -> bool:
        if self.game.name == "a-bad":
            raise error
        return turn(self)

    turn = GameTrainer.turn
    monkeypatch.setattr(GameTrainer, "turn", fails)
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    for game in (msgspec.structs.replace(LARGER, name="a-bad"), LARGER):
        platform.store.register(game)
        platform.store.append(played(game, 20))
    drive(roster, lambda: platform.version("larger")() and roster.places["a-bad"].failures)
    assert platform.status("a-bad")["state"] == f"failed: {type(error).__name__}: {error}"
    before = roster.places["a-bad"]
    for expected in (60.0, 120.0):  # each time later
        before.due = 0.0
        drive(roster, lambda expected=expected: before.retry == expected)


def test_many_failing_games_do_not_keep_an_honest_one_from_its_turns(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparring.trainer.process.RETRY_AFTER", (0.0, 0.0))  # at once again: the worst there can be

    def slow(self: GameTrainer, store: Any, registry: Any, directory: Path, game: Game, *rest: Any) -> None:
        if game.name != "larger":
            time.sleep(0.2)
            raise RuntimeError("cannot be learned")
        init(self, store, registry, directory, game, *rest)

    init = GameTrainer.__init__
    monkeypatch.setattr(GameTrainer, "__init__", slow)
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    for i in range(30):
        platform.store.register(msgspec.structs.replace(LARGER, name=f"bad-{i}"))
        platform.store.append(played(msgspec.structs.replace(LARGER, name=f"bad-{i}"), 1))
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 400))
    drive(roster, lambda: platform.status("larger")["updates"] > 0)
    place = roster.places["larger"]
    assert place.trainer is not None
    place.trainer.learner.debt = 1e9  # type: ignore[attr-defined]  # always something to do
    used, loading = place.used, roster.loading
    drive(roster, lambda: place.used > used + 1.0 or roster.loading > loading + 5.0)
    assert roster.loading - loading < 3.0  # all thirty together have as much of the time as the one


# Restarts, signals, disks


def test_after_a_restart_no_play_is_in_the_window_twice(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER)
    trainer.store.append(played(LARGER, 30))
    run_dry(trainer)
    trainer.checkpoint()
    trainer.store.append(played(LARGER, 45))  # while it is away
    again = in_process(tmp_path, LARGER, store=trainer.store)
    assert again.learner.window == 30 * 50
    run_dry(again)
    assert again.learner.window == 75 * 50
    assert again.learner.steps == 75 * 50


def test_a_signal_never_leaves_half_a_turn_in_the_checkpoint(platform: Platform) -> None:
    """Each step allows a quarter of an update. What is owed and what was made must add up, whenever the signal came."""
    platform.store.register(LARGER)
    path = platform.data / "trainer/larger/checkpoint"
    made = 0
    for attempt in range(6):
        platform.store.append(played(LARGER, 100))  # all of them: few enough for what may be owed
        with platform.trainer(checkpoint_every=3600.0, publish_every=3600.0) as process:
            until(lambda: platform.status("larger")["state"].startswith("training"), "learning")
            time.sleep(0.07 * attempt)  # another moment of a turn each time
            process.send_signal(signal.SIGTERM if attempt % 2 else signal.SIGINT)
            assert process.wait(60) == 0
            process.poll = lambda: None  # type: ignore[method-assign]  # that it ended is what was asked
        _, meta = checkpoint.load(path)
        assert meta["cursor"] == meta["steps"]  # SQLite's cursor counts steps
        assert meta["updates"] + meta["debt"] == pytest.approx(meta["steps"] * 0.25)
        made = meta["updates"]
    assert made > 0


def test_one_failing_checkpoint_does_not_skip_the_others(platform: Platform) -> None:
    for name in ("a-first", "larger"):
        platform.store.register(msgspec.structs.replace(LARGER, name=name))
        platform.store.append(played(msgspec.structs.replace(LARGER, name=name), 20))
    (platform.data / "trainer/a-first").mkdir(parents=True)
    (platform.data / "trainer/a-first/checkpoint.new").write_text("in the way")
    with platform.trainer(checkpoint_every=3600.0):
        for name in ("a-first", "larger"):
            until(platform.version(name), "a version")
    assert checkpoint.exists(platform.data / "trainer/larger/checkpoint")
    assert "stopped, but cannot save its checkpoint" in platform.status("a-first")["state"]
    assert platform.status("larger")["state"] == "stopped"


@pytest.mark.parametrize("error", [SparringError("its tally is damaged"), KeyError("tally"), SystemExit("no")])
def test_a_game_whose_play_cannot_be_counted_stops_nobody(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def counted(self: Lineage) -> int:
        if self.game.name == "a-first":
            raise error
        return count(self)

    count = Lineage.count
    monkeypatch.setattr(Lineage, "count", counted)
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    for name in ("a-first", "larger"):
        platform.store.register(msgspec.structs.replace(LARGER, name=name))
        platform.store.append(played(msgspec.structs.replace(LARGER, name=name), 20))
    drive(roster, lambda: platform.status("larger")["updates"] > 0)
    assert platform.status("a-first")["state"].startswith("failed: ")
    assert roster.places["a-first"].retry == 30.0  # not asked again at once
    roster.stop()


def test_figures_that_cannot_be_told_skip_no_last_checkpoint(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    for name in ("a-first", "larger"):
        platform.store.register(msgspec.structs.replace(LARGER, name=name))
        platform.store.append(played(msgspec.structs.replace(LARGER, name=name), 20))
    drive(roster, lambda: all(platform.status(name)["updates"] for name in ("a-first", "larger")))

    def told(self: GameTrainer, state: str) -> Any:
        if self.game.name == "a-first":
            raise ValueError("its tally is damaged")
        return status(self, state)

    status = GameTrainer.status
    monkeypatch.setattr(GameTrainer, "status", told)
    roster.stop()
    for name in ("a-first", "larger"):
        assert checkpoint.exists(platform.data / f"trainer/{name}/checkpoint")
        assert platform.status(name)["state"] == "stopped"
    assert caplog.text.count("a-first: its figures cannot be told") == 1


def test_learning_goes_on_while_its_figures_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = in_process(tmp_path, load("CartPole-v1"), evaluate_every=0.0, evaluation_episodes=1)
    (trainer.directory / "metrics.jsonl").symlink_to("/dev/full")
    trainer._note()
    assert "cannot write" in caplog.text


def test_learning_goes_on_while_checkpoints_cannot_be_written(tmp_path: Path) -> None:
    trainer = in_process(tmp_path, LARGER, checkpoint_every=0.0)
    (trainer.directory / "checkpoint.new").write_text("in the way")
    trainer.store.append(played(LARGER, 20))
    run_dry(trainer)
    assert trainer.learner.updates > 0
    assert "cannot save its checkpoint" in trainer.status("training").state
    (trainer.directory / "checkpoint.new").unlink()
    trainer.store.append(played(LARGER, 20))
    run_dry(trainer)
    assert trainer.status("training").state == "training"
    assert checkpoint.exists(trainer.directory / "checkpoint")


def test_an_evaluation_without_end_does_not_hold_up_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*args: Any, **options: Any) -> None:
        while True:
            time.sleep(0.01)

    trainer = in_process(tmp_path, load("CartPole-v1"))  # which looks at the game, for as long as that takes
    monkeypatch.setattr("sparring.trainer.simulator.EVALUATION_LIMIT", 0.2)
    monkeypatch.setattr("sparring.trainer.simulator.play", endless)
    trainer.store.append(played(trainer.game, 20))
    trainer.next_evaluation = math.inf
    run_dry(trainer)
    trainer.next_evaluation = 0.0  # when nothing more is learned: what was learned is offered all the same
    run_dry(trainer)
    assert "not simulated: 10 episodes of CartPole-v1 take longer than 0.2 s" in trainer.status("training").state
    assert trainer.registry.latest(trainer.game.name) is not None


def test_a_game_whose_declaration_cannot_be_read_any_more_keeps_what_was_learned(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparring.trainer.process.LIST_EVERY", 0.0)
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    for game in (LARGER, msgspec.structs.replace(LARGER, name="other")):
        platform.store.register(game)
        platform.store.append(played(game, 20))
    drive(roster, lambda: platform.version("larger")() and platform.version("other")())

    def declare(spec: bytes) -> None:
        with sqlite3.connect(platform.data / "store.db", timeout=20) as db:
            db.execute("UPDATE game SET spec = ? WHERE name = 'larger'", (spec.decode(),))

    declare(b"{")
    drive(roster, platform.says("larger", "declaration cannot be read"))
    assert roster.places["larger"].trainer is None
    learned = platform.status("larger")["updates"]
    assert learned > 0
    other = platform.status("other")["updates"]
    platform.store.append(played(msgspec.structs.replace(LARGER, name="other"), 20))
    drive(roster, lambda: platform.status("other")["updates"] > other)
    declare(LARGER.to_json())
    platform.store.append(played(LARGER, 20))
    drive(roster, lambda: platform.status("larger")["updates"] > learned)
    roster.stop()


# The lag: fragments that are stored and not taken in yet


def lagging(tmp_path: Path) -> GameTrainer:
    """Has taken in 20 fragments, 10 of each player's; 7 of bob's and 5 of alice's came since."""
    trainer = in_process(tmp_path, LARGER)
    for player in ("alice", "bob"):
        trainer.store.append(played(LARGER, 10, player))
    run_dry(trainer)
    assert trainer.status("").lag == 0
    trainer.store.append(played(LARGER, 7, "bob"))
    trainer.store.append(played(LARGER, 5))
    assert trainer.status("").lag == 12
    return trainer


def test_the_lag_is_right_after_an_erasure(tmp_path: Path) -> None:
    trainer = lagging(tmp_path)
    assert trainer.store.erase("larger", "bob") == 17
    trainer._look_for_erasures()
    assert trainer.status("").lag == 5
    trainer.store.append(played(LARGER, 3, "eve"))
    assert trainer.status("").lag == 8
    run_dry(trainer)
    assert trainer.status("").lag == 0
    trainer.store.append(played(LARGER, 4))
    assert trainer.status("").lag == 4


def test_the_lag_is_right_after_an_erasure_while_the_trainer_was_away(tmp_path: Path) -> None:
    trainer = lagging(tmp_path)
    trainer.checkpoint()
    trainer.store.erase("larger", "bob")
    again = in_process(tmp_path, LARGER, trainer.store)
    assert again.status("").lag == 5


def test_with_more_to_take_in_than_is_counted_the_lag_is_right_when_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparring.trainer.game_trainer.COUNTED", 4)
    monkeypatch.setattr("sparring.trainer.game_trainer.PAGE", 2)
    trainer = lagging(tmp_path)
    trainer.store.erase("larger", "bob")
    trainer._look_for_erasures()
    assert 4 <= trainer.status("").lag <= 5
    run_dry(trainer)
    assert trainer.status("").lag == 0
    trainer.store.append(played(LARGER, 9))
    assert trainer.status("").lag == 9


def test_settings_of_a_game_work_within_a_second_and_a_wrong_one_is_reported(platform: Platform) -> None:
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 20))
    drive(roster, lambda: platform.status("larger")["updates"] > 0)
    first, learned = roster.places["larger"].trainer, platform.status("larger")["updates"]

    def say(**given: Any) -> None:
        own = msgspec.convert(given, GameSettings)
        platform.store.revise("larger", lambda known: Revision(known.game, Profile(own)))

    say(promotion={"canary": 0.3})
    drive(roster, lambda: roster.places["larger"].settings.canary == 0.3)
    assert roster.places["larger"].trainer is first  # nothing but a number changes
    assert first is not None
    assert first.promotion.settings.canary == 0.3
    say(hyperparameters={"lrr": 1.0})
    drive(roster, platform.says("larger", "failed: unknown key algorithm.lrr: did you mean algorithm.lr?"))
    say(hyperparameters={"lr": 1e-5})
    drive(roster, lambda: roster.places["larger"].trainer is not None)
    second = roster.places["larger"].trainer
    assert second is not None
    assert (second.learner.config.lr, second.learner.config.gamma) == (1e-5, QUICK["gamma"])
    assert second.learner.updates >= learned  # what was learned stays


def test_an_archived_game_is_not_trained_and_comes_back_with_a_simulator(platform: Platform) -> None:
    """What is no part of the schema changes under a learner, which goes on."""
    roster = Roster(platform.data, platform.store, platform.registry, settings(), str(platform.data / "store.db"))
    platform.store.register(LARGER)
    platform.store.append(played(LARGER, 20))
    drive(roster, lambda: platform.status("larger")["updates"] > 0)
    platform.store.revise("larger", lambda known: Revision(known.game, Profile(archived=True)))
    drive(roster, platform.says("larger", "archived"))
    assert roster.places["larger"].trainer is None
    learned = platform.status("larger")["updates"]
    wrong = msgspec.structs.replace(LARGER, env="CartPole-v1")
    platform.store.revise("larger", lambda known: Revision(wrong, Profile()))
    drive(roster, platform.says("larger", "not simulated: CartPole-v1 has the observations"))
    assert platform.status("larger")["updates"] >= learned
