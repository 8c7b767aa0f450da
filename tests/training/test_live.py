"""The trainer from the store: learns, publishes by its rule, says which data it saw, goes on after a restart."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.api import TrainerStatus
from sparring.errors import InputError
from sparring.experience import Columns, Fragment, new_id, pack
from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.games.catalog import load
from sparring.registry.registry import Registry, RegistryError
from sparring.store.memory import MemoryStore
from sparring.trainer.game_trainer import GameTrainer, Settings

# A declared game whose right answer is to name the larger of two numbers: solved by one network layer.
LARGER = Game(name="larger", observation=Box((2,)), action=Discrete(2))
QUICK = {"learning_starts": 100, "exploration_steps": 500, "n_step": 1, "gamma": 0.5, "batch": 64}


def fragments(game: Game, count: int, rng: np.random.Generator, steps: int = 50) -> list[Fragment]:
    made = []
    for _ in range(count):
        obs = rng.standard_normal((steps + 1, 2), np.float32)
        action = rng.integers(0, 2, steps).astype("<i4")
        reward = (action == obs[:-1].argmax(-1)).astype(np.float32)
        columns = Columns(obs, action, reward, np.full(steps, np.log(0.5), np.float32))
        made.append(
            pack(
                game,
                columns,
                id=new_id(),
                player="p",
                episode=new_id(),
                start=0,
                time=time.time(),
                truncated=True,
                model="bot",
                version=1,
            )
        )
    return made


class Setup:
    def __init__(self, path: Path, game: Game = LARGER, **settings: object) -> None:
        self.path, self.game = path, game
        self.store, self.registry = MemoryStore(), Registry(path / "registry")
        self.settings = Settings(**{"publish_every": 0.0, "hyperparameters": QUICK, **settings})  # type: ignore[arg-type]
        self.store.register(game)
        self.rng = np.random.default_rng(0)

    def trainer(self) -> GameTrainer:
        return GameTrainer(self.store, self.registry, self.path / "trainer", self.game, self.settings)

    def feed(self, count: int) -> None:
        self.store.append(fragments(self.game, count, self.rng))


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def run_dry(trainer: GameTrainer) -> None:
    for _ in range(10_000):
        if not trainer.turn():
            return
    raise AssertionError("the trainer never runs out of work")


def accuracy(registry: Registry, game: str = "larger") -> float:
    manifest = registry.latest(game)
    assert manifest is not None
    policy = registry.policy(game, "bot", manifest.version)
    obs = np.random.default_rng(9).standard_normal((500, 2), np.float32)
    action, _ = policy.act(obs)
    return float((action == obs.argmax(-1)).mean())


@pytest.mark.parametrize(
    ("algorithm", "hyperparameters", "feed"),
    [("dqn", QUICK, 60), ("ppo", {"steps": 500, "gamma": 0.5, "lr": 3e-3}, 200)],
)
def test_it_learns_a_declared_game_from_what_was_sent(
    tmp_path: Path, algorithm: str, hyperparameters: dict[str, object], feed: int
) -> None:
    setup = Setup(tmp_path, algorithm=algorithm, hyperparameters=hyperparameters)
    trainer = setup.trainer()
    for _ in range(feed // 10):  # as it would come: an on-policy learner drops what it cannot keep up with
        setup.feed(10)
        run_dry(trainer)
    assert accuracy(setup.registry) > 0.9


def test_nothing_is_published_before_there_is_something_to_learn(setup: Setup) -> None:
    trainer = setup.trainer()
    run_dry(trainer)
    setup.feed(1)  # 50 steps: fewer than learning_starts
    run_dry(trainer)
    assert setup.registry.latest("larger") is None


def test_updates_stop_when_experience_does(setup: Setup) -> None:
    """More updates than `updates_per_step` allows would wear the same few records out."""
    trainer = setup.trainer()
    setup.feed(20)
    run_dry(trainer)
    steps, ratio = 20 * 50, trainer.learner.config.updates_per_step
    assert trainer.learner.updates <= steps * ratio
    assert trainer.learner.updates > steps * ratio - 32


def test_a_version_says_which_data_it_saw_and_its_parent(setup: Setup) -> None:
    trainer = setup.trainer()
    for _ in range(2):
        setup.feed(10)
        run_dry(trainer)
    first, *_, last = (setup.registry.manifest("larger", "bot", v) for v in setup.registry.versions("larger"))
    assert (last.data.fragments, last.data.steps) == (20, 1000)
    assert last.data.last == trainer.cursor
    assert first.data.steps < last.data.steps
    assert first.parent is None
    assert last.parent == last.version - 1
    assert last.algorithm == "dqn"
    assert last.config["learning_starts"] == 100


def test_versions_come_by_the_clock(tmp_path: Path) -> None:
    setup = Setup(tmp_path, publish_every=3600.0)
    trainer = setup.trainer()
    for _ in range(5):
        setup.feed(10)
        run_dry(trainer)
    assert setup.registry.versions("larger") == [1]


def test_a_worse_policy_is_held_back_and_a_better_one_published_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = load("CartPole-v1")
    setup = Setup(tmp_path, game, publish_every=3600.0, evaluate_every=0.0)
    scores = iter([100.0, 50.0, 102.0, 120.0, 60.0])
    seen = []

    def score(policy: object, episodes: int, seed: int) -> list[tuple[float, int]]:
        seen.append(next(scores))
        return [(seen[-1], 1)]

    monkeypatch.setattr("sparring.trainer.game_trainer.play", score)
    monkeypatch.setattr("sparring.trainer.game_trainer.TURN", 60.0)  # all updates of a feed in one turn, however slow
    trainer = setup.trainer()
    for _ in range(5):
        rng = setup.rng
        obs = rng.standard_normal((401, 4), np.float32)
        columns = Columns(obs, rng.integers(0, 2, 400).astype("<i4"), np.ones(400, np.float32))
        setup.store.append(
            [pack(game, columns, id=new_id(), player="p", episode="e", start=0, time=time.time(), terminated=True)]
        )
        run_dry(trainer)
    returns = [
        setup.registry.manifest(game.name, "bot", v).metrics["evaluation/return_mean"]
        for v in setup.registry.versions(game.name)
    ]
    assert len(seen) == 5
    assert returns == [100.0, 120.0]


def test_a_restart_goes_on_where_it_stopped(setup: Setup) -> None:
    before = setup.trainer()
    setup.feed(20)
    run_dry(before)
    before.checkpoint()
    after = setup.trainer()
    for name in ("steps", "fragments", "updates", "debt", "window"):
        assert getattr(after.learner, name) == getattr(before.learner, name), name
    assert after.cursor == before.cursor
    assert after.learner.rng.bit_generator.state == before.learner.rng.bit_generator.state
    one, two = before.learner.save()[0], after.learner.save()[0]
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)
    # … and from there both do the same with the same data, to the last bit.
    setup.feed(10)
    run_dry(before)
    run_dry(after)
    one, two = before.learner.save()[0], after.learner.save()[0]
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)
    assert before.learner.updates > 0


def test_a_small_window_is_refilled_with_the_newest(tmp_path: Path) -> None:
    setup = Setup(tmp_path, hyperparameters={**QUICK, "replay": 400})
    before = setup.trainer()
    for _ in range(6):
        setup.feed(5)
        run_dry(before)
    before.checkpoint()
    after = setup.trainer()
    assert after.learner.window_start > 0
    newest = lambda r: np.roll(r.obs, -r.head, 0)  # noqa: E731
    np.testing.assert_array_equal(newest(after.learner.replay), newest(before.learner.replay))  # type: ignore[attr-defined]


def test_a_damaged_checkpoint_is_said_and_left_alone(setup: Setup) -> None:
    trainer = setup.trainer()
    setup.feed(10)
    run_dry(trainer)
    trainer.checkpoint()
    file = setup.path / "trainer" / "checkpoint" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        setup.trainer()
    assert file.read_bytes() == data


def test_a_checkpoint_of_another_algorithm_is_refused(setup: Setup) -> None:
    trainer = setup.trainer()
    setup.feed(10)
    run_dry(trainer)
    trainer.checkpoint()
    setup.settings = Settings(algorithm="ppo")
    with pytest.raises(InputError, match="belongs to dqn"):
        setup.trainer()


def test_the_status_tells_how_it_is(setup: Setup) -> None:
    trainer = setup.trainer()
    setup.feed(20)
    run_dry(trainer)
    trainer.write_status("waiting for play")
    status = msgspec.json.decode((setup.path / "trainer" / "status.json").read_bytes(), type=TrainerStatus)
    assert (status.game, status.algorithm, status.state) == ("larger", "dqn", "waiting for play")
    assert (status.steps, status.lag, status.window) == (1000, 0, 1000)
    assert status.loss is not None
    assert np.isfinite(status.loss)


def test_people_and_bots_are_learned_from_alike_off_policy_but_ppo_needs_log_probabilities(tmp_path: Path) -> None:
    human = [
        msgspec.structs.replace(f, log_prob=None, model=None, version=None)
        for f in fragments(LARGER, 20, np.random.default_rng(0))
    ]
    for algorithm, learned in (("dqn", True), ("ppo", False)):
        hyper = QUICK if algorithm == "dqn" else {"steps": 200}
        setup = Setup(tmp_path / algorithm, algorithm=algorithm, hyperparameters=hyper)
        setup.store.append(human)
        trainer = setup.trainer()
        run_dry(trainer)
        assert (trainer.learner.updates > 0) == learned


def test_unknown_algorithms_and_hyperparameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'dqn'"):
        Setup(tmp_path, algorithm="dqm").trainer()
    with pytest.raises(InputError, match=r"unknown key algorithm\.nstep: did you mean algorithm\.n_step\?"):
        Setup(tmp_path, hyperparameters={"nstep": 3}).trainer()
    with pytest.raises(InputError, match="Discrete actions"):
        Setup(tmp_path, Game("m", Box((2,)), MultiDiscrete((2, 2))), algorithm="dqn", hyperparameters={}).trainer()


def test_a_client_cannot_make_the_trainer_import_a_module(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    game = msgspec.structs.replace(LARGER, env="evil:Game-v0")
    setup = Setup(tmp_path, game)
    trainer = setup.trainer()
    setup.feed(20)
    run_dry(trainer)
    assert setup.registry.latest("larger") is not None  # published by the clock, never simulated
    assert not trainer.simulated


def test_learning_goes_on_while_the_registry_is_away(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, away = Registry.publish, True

    def maybe(self: Registry, *args: Any, **options: Any) -> Any:
        if away:
            raise RegistryError("cannot write: nobody answers")
        return publish(self, *args, **options)

    monkeypatch.setattr(Registry, "publish", maybe)
    trainer = setup.trainer()
    setup.feed(20)
    run_dry(trainer)
    learned = trainer.learner.updates
    assert learned > 0
    trainer.next_status = 0.0
    trainer.turn()
    status = json.loads((setup.path / "trainer/status.json").read_bytes())
    assert "cannot publish: cannot write: nobody answers" in status["state"]
    away = False
    setup.feed(20)
    run_dry(trainer)
    assert trainer.learner.updates > learned
    assert setup.registry.latest("larger") is None  # not at once again: whoever comes back is not stormed
    trainer.hold_until = 0.0
    setup.feed(20)
    run_dry(trainer)
    latest = setup.registry.latest("larger")
    assert latest is not None
    assert latest.metrics["updates"] > learned  # what it has learned since, not what it had then
    trainer.next_status = 0.0
    trainer.turn()
    assert "publish" not in json.loads((setup.path / "trainer/status.json").read_bytes())["state"]
