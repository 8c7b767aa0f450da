"""The trainer from the store: learns, publishes by its rule, says which data it saw, goes on after a restart."""

import json
import time
from collections.abc import Callable
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
from sparring.networks.policy import Policy
from sparring.networks.random_play import RandomPlay
from sparring.registry.manifest import DataSpan
from sparring.registry.registry import Registry, RegistryError
from sparring.runs import checkpoint
from sparring.store.family import Family
from sparring.store.lineage import Lineage
from sparring.store.memory import MemoryStore
from sparring.store.profile import Origin, Profile, Revision
from sparring.trainer.game_trainer import GameTrainer, Settings
from sparring.trainer.simulator import Simulator

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
                truncated=True,  # by nobody's bot: then each version is what players get, at once
            )
        )
    return made


class Setup:
    def __init__(self, path: Path, game: Game = LARGER, **settings: object) -> None:
        self.path, self.game = path, game
        self.store, self.registry = MemoryStore(), Registry(path / "registry")
        quick = {"publish_every": 0.0, "candidate_every": 0.0, "hyperparameters": QUICK}
        self.settings = Settings(**{**quick, **settings})  # type: ignore[arg-type]
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
    first, last = (setup.registry.manifest("larger", "bot", v) for v in setup.registry.versions("larger"))
    assert (last.data.fragments, last.data.steps) == (20, 1000)
    assert last.data.last == trainer.cursor
    assert first.data.steps < last.data.steps
    assert first.parent is None
    assert last.parent == first.version
    assert last.algorithm == "dqn"
    assert last.config["learning_starts"] == 100


def test_versions_do_not_come_more_often_than_they_may(tmp_path: Path) -> None:
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
    setup = Setup(tmp_path, game, evaluate_every=0.0)
    means = iter([(100.0, 20.0), (50.0, 100.0), (101.0, 100.0), (101.0, 100.0), (120.0, 100.0), (60.0, 120.0)])
    seen = []

    def score(self: Simulator, new: object, old: object, episodes: int, seed: int) -> tuple[list[float], list[float]]:
        """Pairs whose differences vary by 10: +1 is not clear, +20 is."""
        seen.append(next(means))
        rng = np.random.default_rng(len(seen))
        ours, theirs = (np.full(episodes, mean) for mean in seen[-1])
        noise = rng.standard_normal(episodes) * 10
        return (ours + noise - noise.mean()).tolist(), theirs.tolist()

    monkeypatch.setattr(Simulator, "returns", score)
    monkeypatch.setattr("sparring.trainer.game_trainer.TURN", 60.0)  # all updates of a feed in one turn, however slow
    monkeypatch.setattr(GameTrainer, "turn", eager(GameTrainer.turn))
    trainer = setup.trainer()
    for _ in range(6):
        rng = setup.rng
        obs = rng.standard_normal((401, 4), np.float32)
        columns = Columns(obs, rng.integers(0, 2, 400).astype("<i4"), np.ones(400, np.float32))
        setup.store.append(
            [pack(game, columns, id=new_id(), player="p", episode="e", start=0, time=time.time(), terminated=True)]
        )
        trainer.turn()
        if len(seen) == 4:  # neither better nor worse: it is given up, and the next one is tried
            trainer.promotion.policy = None
    returns = [
        setup.registry.manifest(game.name, "bot", v).metrics["evaluation/return_mean"]
        for v in setup.registry.versions(game.name)
    ]
    assert len(seen) == 6
    assert returns == pytest.approx([100.0, 120.0])
    latest = setup.registry.latest(game.name)
    assert latest is not None
    assert latest.version == 2
    move = setup.registry.moves(game.name)[0]
    assert move.by == "trainer"
    assert move.reason.startswith("better than version 1 in 10 paired episodes: +20 (95 %: +")
    assert move.evidence["low"] > 0


def eager(turn: Callable[[GameTrainer], bool]) -> Callable[[GameTrainer], bool]:
    """Without the rest between two looks."""

    def at_once(self: GameTrainer) -> bool:
        self.next_evaluation = 0.0
        return turn(self)

    return at_once


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


def test_another_algorithm_or_network_begins_anew_and_says_so(setup: Setup) -> None:
    trainer = setup.trainer()
    setup.feed(60)
    run_dry(trainer)
    trainer.checkpoint()
    before = setup.registry.latest("larger")
    for settings, why in (
        (Settings(algorithm="ppo"), "ppo learns, dqn did before"),
        (Settings(algorithm="ppo", hyperparameters={"layers": [{"layer": "dense", "units": 7}]}), "another network"),
    ):
        setup.settings = settings
        trainer = setup.trainer()
        assert (trainer.learner.updates, trainer.cursor) == (0, 0)
        assert why in trainer.status("training").state
        assert checkpoint.load(setup.path / "trainer" / "checkpoint.before")[1]["schema"] == LARGER.schema
        trainer.turn()  # looks at what players have, and learns beside it: they keep it
        assert "learning beside version" in trainer.status("training").state
        assert setup.registry.latest("larger") == before
        trainer.checkpoint()


def published_by_a_person(tmp_path: Path, **settings: Any) -> tuple[Setup, Policy]:
    """What somebody trained elsewhere, as the first version of a game that has no trainer yet."""
    elsewhere = Setup(tmp_path / "elsewhere", **settings)
    trainer = elsewhere.trainer()
    elsewhere.feed(20)
    run_dry(trainer)
    setup, policy = Setup(tmp_path), trainer.learner.policy()
    made = setup.registry.publish(policy, algorithm=trainer.algorithm, by="person", data=DataSpan(steps=1000))
    assert made.version == 1
    return setup, policy


def test_a_new_trainer_goes_on_from_what_a_person_published(tmp_path: Path) -> None:
    setup, policy = published_by_a_person(
        tmp_path, hyperparameters=QUICK | {"layers": [{"layer": "dense", "units": 9}]}
    )
    setup.feed(1)  # too few steps for an update
    trainer = setup.trainer()
    trainer.turn()
    assert (trainer.algorithm, trainer.learner.updates) == ("dqn", 0)
    assert trainer.learner.policy().layers == policy.layers  # nobody chose others
    ours = trainer.learner.policy().params
    assert ours.keys() == policy.params.keys()
    for name, array in policy.params.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-5, err_msg=name)
    assert trainer.learner.exploration == trainer.learner.algorithm.exploration(1 << 40)
    assert "beside" not in trainer.status("training").state
    setup.feed(60)
    run_dry(trainer)
    assert trainer.learner.updates > 0
    assert setup.registry.aliases("larger")["stable"].version == 1  # until there is evidence of a better one
    assert setup.registry.aliases("larger")["stable"].by == "person"


def test_a_trainer_learns_beside_a_version_of_another_head(tmp_path: Path) -> None:
    setup, _ = published_by_a_person(tmp_path, algorithm="bc", hyperparameters={})
    trainer = setup.trainer()
    trainer.turn()
    assert trainer.algorithm == "dqn"
    state = trainer.status("training").state
    assert (
        "learning beside version 1: its network gives a probability of each action, this algorithm's a value of "
        in state
    )
    assert trainer.learner.exploration > 0.5  # it has everything to find out
    assert setup.registry.aliases("larger")["stable"].version == 1


def test_another_learning_rate_keeps_what_was_learned(setup: Setup) -> None:
    trainer = setup.trainer()
    setup.feed(20)
    run_dry(trainer)
    trainer.checkpoint()
    setup.settings = Settings(hyperparameters={**QUICK, "lr": 1e-5})
    again = setup.trainer()
    assert (again.learner.updates, again.learner.config.lr) == (trainer.learner.updates, 1e-5)
    assert again.learner.updates > 0
    for name, array in trainer.learner.save()[0].items():
        np.testing.assert_array_equal(array, again.learner.save()[0][name])


@pytest.mark.parametrize(
    ("algorithm", "hyperparameters", "progress", "explores"),
    [("dqn", QUICK, (50, 128), True), ("ppo", {"steps": 512}, (50, 512), False), ("bc", {}, (50, 500), False)],
)
def test_before_it_learns_it_says_how_many_steps_it_needs(
    tmp_path: Path, algorithm: str, hyperparameters: dict[str, Any], progress: tuple[int, int], explores: bool
) -> None:
    setup = Setup(tmp_path, algorithm=algorithm, hyperparameters=hyperparameters)
    setup.feed(1)
    trainer = setup.trainer()
    trainer.turn()
    status = trainer.status("training")
    assert (status.gathered, status.needed) == progress
    assert (status.updates, status.metrics) == (0, {})
    assert (status.exploration is not None) == explores  # no "exploration 0 %" for what has none
    assert status.on_policy == (algorithm == "ppo")


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
        status = trainer.status("waiting for play")
        if learned:
            assert (status.state, status.use) == ("waiting for play", "uses 1,000 steps of people, 0 of bots")
        else:
            why = "ppo cannot learn from people's steps (1,000 so far are left out): dqn can"
            assert status.state == f"waiting for play, {why}"
            assert status.use == "uses 0 steps of people, 0 of bots; leaves out 1,000: people's, without log_prob"


SPACES = (Discrete(3), MultiDiscrete((2, 3)), Box((2,), low=-1.0, high=1.0), Box((2,)), Box((2,), low=0.0))


@pytest.mark.parametrize("action", SPACES, ids=str)
@pytest.mark.parametrize("by_bot", [True, False])
def test_no_step_of_the_default_algorithms_is_left_out(action: Any, by_bot: bool, tmp_path: Path) -> None:
    """Whoever asked `/act` at random, and whether they said so or not."""
    game = Game("any", Box((2,)), action)
    play, rng = RandomPlay(game), np.random.default_rng(0)
    drawn, log_prob = play.run({}, play.noise(rng, 40))
    obs = rng.standard_normal((41, 2), np.float32)
    whose: dict[str, Any] = {"model": play.model, "version": play.version} if by_bot else {}
    columns = Columns(obs, drawn, np.ones(40, np.float32), log_prob if by_bot else None)
    sent = pack(game, columns, id="a", player="p", episode="e", start=0, time=time.time(), terminated=True, **whose)
    setup = Setup(tmp_path, game, hyperparameters={})
    setup.store.append([sent])
    trainer = setup.trainer()
    trainer.turn()
    status = trainer.status("training")
    assert (status.people_steps, status.bot_steps, status.left_out) == ((0, 40, {}) if by_bot else (40, 0, {}))
    assert status.window == 40


def test_unknown_algorithms_and_hyperparameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'dqn'"):
        Setup(tmp_path, algorithm="dqm").trainer()
    with pytest.raises(InputError, match=r"unknown key algorithm\.nstep: did you mean algorithm\.n_step\?"):
        Setup(tmp_path, hyperparameters={"nstep": 3}).trainer()
    with pytest.raises(InputError, match="Discrete actions"):
        Setup(tmp_path, Game("m", Box((2,)), Box((2,))), algorithm="dqn", hyperparameters={}).trainer()


def test_a_client_cannot_make_the_trainer_import_a_module(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    game = msgspec.structs.replace(LARGER, env="evil:Game-v0")
    setup = Setup(tmp_path, game)
    trainer = setup.trainer()
    setup.feed(20)
    run_dry(trainer)
    assert setup.registry.latest("larger") is not None  # published, never simulated
    assert not trainer.simulator.usable


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


def test_a_new_generation_begins_with_what_the_old_one_learned(setup: Setup) -> None:
    """The second form has one number more. Its trainer has the first one's play, and its players its bot, at once."""
    trainer = setup.trainer()
    setup.feed(60)
    run_dry(trainer)
    store, wider = setup.store, Game("larger.2", Box((3,)), Discrete(2))
    store.register(wider)
    origin = Origin("larger", store.registration("larger"), 2, store.tail("larger", -1).cursor, 60)
    store.revise("larger.2", lambda known: Revision(known.game, Profile(origin=origin)))
    play = Lineage(store, wider, Family(store.games(), store.profiles()), store.profiles())
    path, frozen = setup.path / "second", Settings(hyperparameters={**QUICK, "learning_starts": 10**6})
    second = GameTrainer(store, setup.registry, path, wider, frozen, play=play)
    run_dry(second)
    assert (second.learner.steps, second.learner.updates, second.status("").lag) == (3000, 0, 0)
    made, first = setup.registry.latest("larger.2"), setup.registry.latest("larger")
    assert made is not None
    assert first is not None
    old = setup.registry.policy("larger", "bot", first.version)
    new = setup.registry.policy("larger.2", "bot", made.version)
    obs = np.random.default_rng(9).standard_normal((500, 3), np.float32)
    obs[:, 2] = 0.0
    np.testing.assert_array_equal(new.act(obs)[0], old.act(obs[:, :2])[0])
    assert setup.registry.aliases("larger.2")["stable"].reason.startswith("grown from version")
    second.checkpoint()
    again = GameTrainer(store, setup.registry, path, wider, frozen, play=play)
    assert (again.learner.steps, again.learner.window, again.cursor) == (3000, second.learner.window, second.cursor)
