"""Environments side by side: never a transition across a reset, and the same again from a saved state."""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from sparring.errors import GameError, InputError
from sparring.games import Discrete, Game, catalog, vector
from sparring.games.vector import Native, Separate, build


class Count(gymnasium.Env):  # type: ignore[type-arg]
    """Observes how many steps the episode has had; ends after `length`, by time or by rule."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 3, truncates: bool = False) -> None:
        self.length, self.truncates, self.t = length, truncates, 0

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self.t += 1
        over = self.t == self.length
        return np.full(1, self.t, np.float32), 1.0, over and not self.truncates, over and self.truncates, {}


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register("Count-v0", entry_point=Count)
    gymnasium.register("CountTruncated-v0", entry_point=Count, kwargs={"truncates": True})
    yield
    for name in ("Count-v0", "CountTruncated-v0"):
        gymnasium.registry.pop(name)


@pytest.mark.parametrize("name", ["Count-v0", "CountTruncated-v0"])
def test_the_step_after_an_end_starts_the_next_episode(name):
    games = Separate(catalog.load(name), 1)
    seen = [games.reset(0)[0, 0]]
    rewards, ends = [], []
    for _ in range(7):
        step = games.step(np.zeros(1, np.int32))
        seen.append(step.obs[0, 0])
        rewards.append(step.reward[0])
        ends.append(bool(step.terminated[0] or step.truncated[0]))
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]  # the last observation is there, then the next episode's first
    assert rewards == [1, 1, 1, 0, 1, 1, 1]
    assert ends == [False, False, True, False, False, False, True]


def test_the_native_form_plays_the_same_game():
    game = catalog.load("CartPole-v1")
    native, single = build(game, 3), catalog.make("CartPole-v1")
    assert isinstance(native, Native)
    obs = native.reset(3)
    single.reset(seed=0)
    single.unwrapped.state = tuple(obs[1].astype(np.float64))
    for _ in range(60):
        step = native.step(np.ones(3, np.int32))
        expected, reward, terminated, truncated, _ = single.step(1)
        assert step.obs[1] == pytest.approx(expected, abs=1e-4)
        assert (step.reward[1], step.terminated[1], step.truncated[1]) == (reward, terminated, truncated)
        if terminated:
            break
    else:
        pytest.fail("CartPole never fell")
    assert native.step(np.zeros(3, np.int32)).reward[1] == 0


@pytest.mark.parametrize(("name", "count"), [("CartPole-v1", 4), ("CartPole-v1", 1), ("Pendulum-v1", 2)])
def test_a_restored_state_goes_on_identically(name, count):
    game = catalog.load(name)
    games, again = build(game, count), build(game, count)
    rng = np.random.default_rng(0)
    draw = (
        (lambda: rng.integers(0, 2, count, np.int32))
        if isinstance(game.action, Discrete)
        else (lambda: rng.uniform(-2, 2, (count, 1)).astype(np.float32))
    )
    games.reset(5)
    for _ in range(130):
        before = games.step(draw())
    state = games.state()
    assert state is not None
    again.reset(9)
    assert np.array_equal(again.restore(state), before.obs)
    for _ in range(250):
        action = draw()
        for a, b in zip(games.step(action), again.step(action), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("game", ["Moody-v0", "Odd-v0"])
def test_a_game_that_does_not_do_the_same_again_is_noticed(game, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    games = Separate(catalog.load(f"odd_games:{game}"), 2)
    games.reset(5)
    for _ in range(14):
        games.step(np.zeros(2, np.int32))
    assert (games.restore(games.state()) is None) == (game == "Moody-v0")


def test_an_episode_too_long_to_be_played_again_has_no_state(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setattr(vector, "REPLAYED", 20)
    games = Separate(catalog.load("odd_games:Endless-v0"), 1)
    games.reset(5)
    for _ in range(20):
        games.step(np.zeros(1, np.int32))
    assert games.state() is not None
    for _ in range(20):
        games.step(np.zeros(1, np.int32))
    assert games.state() is None


def test_episodes_have_seeds_of_their_own():
    games = Separate(catalog.load("CartPole-v1"), 2)
    first = games.reset(1)
    assert not np.array_equal(first[0], first[1])
    assert np.array_equal(first, games.reset(1))
    assert not np.array_equal(first, games.reset(2))


def test_a_declared_game_cannot_be_simulated():
    game = catalog.load("CartPole-v1")
    declared = Game("mine", game.observation, game.action)
    with pytest.raises(InputError, match="declared game"):
        build(declared, 1)


def test_two_humanoids_in_one_process_do_not_share_a_robot():
    pytest.importorskip("pybullet_envs_gymnasium")
    game = catalog.load("HumanoidBulletEnv-v0")
    alone, pair = Separate(game, 1), Separate(game, 2)
    rng = np.random.default_rng(0)
    assert np.array_equal(alone.reset(0)[0], pair.reset(0)[0])
    for _ in range(20):
        actions = rng.uniform(-1, 1, (2, 17)).astype(np.float32)
        assert np.array_equal(alone.step(actions[:1]).obs[0], pair.step(actions).obs[0])
    alone.close()
    pair.close()


@pytest.mark.parametrize("count", [1, 2])
def test_atari_takes_any_seed_and_tells_the_games_own_scores(count):
    pytest.importorskip("ale_py")
    game, rng = catalog.load("ALE/MsPacman-v5"), np.random.default_rng(0)
    environments, best = build(game, count), 0.0
    environments.reset(2**32 - 1)
    for _ in range(300):
        best = max(best, environments.step(rng.integers(0, 9, count).astype(np.int32)).reward.max())
    assert best >= 10  # a dot is worth ten points
    environments.close()


def test_atari_is_one_game_alone_and_abreast():
    pytest.importorskip("ale_py")
    game = catalog.load("ALE/Pong-v5")
    assert game.observation.element.shape == (4, 84, 84)
    assert isinstance(game.action, Discrete)
    many = build(game, 2)
    assert isinstance(many, Native)
    assert many.reset(1).shape == (2, 4, 84, 84)
    step = many.step(np.zeros(2, np.int32))
    assert step.obs.dtype == np.uint8
    assert many.state() is None  # it has none to give: a resumed run starts its games anew
    many.close()
    one = Separate(game, 1)
    first = one.reset(1)
    for _ in range(5):
        one.step(np.full(1, 2, np.int32))
    state = one.state()
    following = one.step(np.full(1, 3, np.int32)).obs
    assert not np.array_equal(first, following)
    one.restore(state)
    assert np.array_equal(one.step(np.full(1, 3, np.int32)).obs, following)
    one.close()


def test_numbers_in_the_info_of_a_native_form_belong_to_those_who_ended():
    class Columns:
        """As Gymnasium's vector environments tell: a column for each name, `_name` for whom it counts."""

        num_envs = 3

        def reset(self, *, seed):
            return np.zeros((3, 4), np.float32), {}

        def step(self, actions):
            info = {
                "is_success": np.array([True, False, True]), "_is_success": np.array([True, True, False]),
                "action_mask": np.ones((3, 2)), "score": np.arange(3.0), "words": "none",
            }  # fmt: skip
            return (
                np.zeros((3, 4), np.float32),
                np.zeros(3),
                np.array([True, False, False]),
                np.array([0, 0, 1], bool),
                info,
            )

    games = Native(catalog.load("CartPole-v1"), Columns())
    games.reset(0)
    assert not games.masked
    assert games.step(np.zeros(3, np.int32)).infos == {0: {"is_success": 1.0, "score": 0.0}, 2: {"score": 2.0}}
    assert games.masked


def test_games_with_and_without_a_time_limit():
    assert Separate(catalog.load("CartPole-v1"), 1).has_time_limit
    assert not Separate(catalog.load("CliffWalking-v1"), 1).has_time_limit
    assert not Separate(catalog.load("Count-v0"), 1).has_time_limit


def test_a_game_that_ends_the_process_is_at_fault() -> None:
    class Leaves(Count):
        def step(self, action):  # type: ignore[no-untyped-def]
            raise SystemExit(0)

    gymnasium.register("Leaves-v0", entry_point=Leaves)
    try:
        envs = build(catalog.load("Leaves-v0"), 2)
        envs.reset(1)
        with pytest.raises(GameError, match="failed in step: SystemExit: 0"):
            envs.step(np.zeros(2, np.int64))
        gymnasium.registry["Leaves-v0"].entry_point = lambda: sys.exit(0)
        with pytest.raises(GameError, match="failed in its constructor: SystemExit: 0"):
            catalog.load("Leaves-v0")
    finally:
        gymnasium.registry.pop("Leaves-v0")
