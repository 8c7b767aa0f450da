"""Every algorithm that learns from a replay window: it solves games of one thought, knows what play is worth, exports
what it learned, and can be repeated. Tests of one algorithm come together, since compiling it takes the longest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_games import BOX, CHOICES, DISCRETE, LAYERS, Learning, anything, make, play, target

from sparring import algorithms
from sparring.algorithms.replay import encode_obs
from sparring.errors import InputError
from sparring.experience.fragment import Columns
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.functions import dense, normalise, torso
from sparring.networks.spec import param_shapes

BOXED = ("sac", "td3", "ddpg", "iql", "cql")
WITH_VALUES = [*((name, DISCRETE) for name in ("dqn", "sac", "iql", "cql")), *((name, BOX) for name in BOXED)]
ALL = [*WITH_VALUES, ("bc", DISCRETE), ("bc", BOX), ("iql", CHOICES), ("bc", CHOICES)]
PLAIN: dict[str, dict[str, Any]] = {  # values of rewards alone: no entropy, no penalty
    "sac": {"temperature": 1e-3, "tune_temperature": False},
    "cql": {"penalty": 0.0, "temperature": 1e-3, "target_entropy": -1e3},
}
label = {"ids": lambda x: x if isinstance(x, str) else x.name}


def filled(name: str, game: Game, updates: int = 0) -> Learning:
    """With random play in its window."""
    learning = Learning(make(name, game))
    learning.take(play(game, anything(game, learning.rng), learning.rng, 10, 50))
    learning.update(updates)
    return learning


def same(a: Any, b: Any) -> bool:
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def actor(state: Any) -> Any:
    return state.actor if hasattr(state, "actor") else state.params


def seen(learning: Learning, count: int = 100) -> tuple[Array, jax.Array]:
    """Observations as the game gives them and as the learner sees them."""
    obs = play(learning.game, anything(learning.game, learning.rng), learning.rng, 1, count)[0][0].obs
    return obs, normalise(learning.normaliser.params, jnp.asarray(encode_obs(learning.game, obs)))


@pytest.fixture(scope="module", params=ALL, ids=lambda p: f"{p[0]}-{p[1].name}")
def learned(request: pytest.FixtureRequest) -> Learning:
    learning = filled(*request.param, updates=100)
    learning.name = request.param[0]
    return learning


# Learning


@pytest.mark.parametrize("extra", [{}, {"double": False, "duelling": True, "n_step": 1}], ids=str)
def test_dqn_learns_identity(extra: dict[str, Any]) -> None:
    learning = Learning(make("dqn", DISCRETE, **extra))
    learning.online(8)
    assert learning.score() == 1.0


def test_sac_learns_identity() -> None:
    learning = Learning(make("sac", DISCRETE))
    learning.online(8)
    assert learning.score() == 1.0


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_learns_to_reach(name: str) -> None:
    learning = Learning(make(name, BOX))
    before = learning.score()
    learning.online(16)
    assert before < -0.3
    assert learning.score() > -0.03


def test_learns_in_bfloat16() -> None:
    wide = [{"layer": "dense", "units": 128}] * 2  # narrower layers are not touched
    with jax.default_matmul_precision("bfloat16"):
        learning = Learning(make("sac", BOX, layers=wide, critic_layers=wide))
        learning.online(16)
        assert learning.score() > -0.03


@pytest.mark.parametrize("game", [DISCRETE, CHOICES, BOX], ids=lambda g: g.name)
def test_bc_imitates(game: Game) -> None:
    """Players who do the right thing seven times in ten: the usual is right, and what varies varies as theirs did."""
    learning = Learning(make("bc", game))

    def mostly(obs: Array) -> Array:
        right = learning.rng.random(len(obs)) < 0.7
        wrong = anything(game, learning.rng)(obs)
        return np.where(right.reshape(-1, *[1] * (wrong.ndim - 1)), target(game, obs), wrong)

    data = play(game, mostly, learning.rng, 20, 200)
    learning.take(data)
    learning.update(600)
    theirs = float(np.concatenate([f.reward for f in data[0]]).mean())
    if game is BOX:  # the mean of right and wrong lies in between
        assert learning.score() > theirs + 0.2
    else:
        assert learning.score() == 1.0
    assert learning.score(explore=True) == pytest.approx(theirs, abs=0.15)


@pytest.mark.parametrize(
    ("name", "game"), [("iql", DISCRETE), ("iql", CHOICES), ("iql", BOX), ("cql", DISCRETE), ("cql", BOX)], **label
)
def test_offline_from_random_play(name: str, game: Game) -> None:
    """Nobody played well; what is good shows in the rewards alone."""
    learning = Learning(make(name, game))
    learning.take(play(game, anything(game, learning.rng), learning.rng, 20, 200))
    learning.update(1500)
    assert learning.score() > (-0.1 if game is BOX else 0.99)


# Values


@pytest.mark.parametrize(("name", "game"), WITH_VALUES, **label)
def test_what_a_reward_of_one_per_step_is_worth(name: str, game: Game) -> None:
    """Fragments of one step. Where it ends the game, play is worth 1; where it was only cut it goes on:
    1 / (1 − γ) = 4."""
    for terminated, worth in ((False, 4.0), (True, 1.0)):
        learning = Learning(make(name, game, **PLAIN.get(name, {})))
        data, _ = play(game, anything(game, learning.rng), learning.rng, 500, 1)
        data = [Columns(f.obs, f.action, np.ones(1, "<f4")) for f in data]
        learning.take((data, [terminated] * len(data)))
        learning.update(1500)
        assert learning.metrics["q/mean"] == pytest.approx(worth, abs=0.4)  # DDPG over-estimates


@pytest.mark.parametrize("name", ["dqn", "sac", "iql", "cql"])
def test_time_up_is_not_game_over(name: str) -> None:
    """The first action brings 1 and ends the game. The second brings 0.5, after which either the time is up, and 0.5
    for ever would be worth 2; or the game is over, and 1 is better. The others bring nothing."""
    obs = np.array([1, 1], "<i4")
    data = [
        Columns(obs, np.array([a], "<i4"), np.array([r], "<f4")) for a, r in ((-2, 1.0), (-1, 0.5), (0, 0.0), (1, 0.0))
    ]
    for over, best in ((False, -1), (True, -2)):
        learning = Learning(make(name, DISCRETE, **PLAIN.get(name, {})))
        learning.take((data * 50, [True, over, True, True] * 50))
        learning.update(1000)
        assert learning.policy().act(obs)[0][0] == best


# What is exported is what learned


def test_the_policy_is_the_learners_actor(learned: Learning) -> None:
    policy, params, game = learned.policy(), actor(learned.state), learned.game
    shapes = param_shapes(game, policy.layers, policy.head)
    assert policy.params.keys() - learned.normaliser.params.keys() == shapes.keys()
    obs, x = seen(learned)
    out = np.asarray(dense(params, "head", torso(policy.layers, params, x)))
    assert policy.outputs(obs) == pytest.approx(out, abs=1e-4)
    assert out.std() > 1e-3  # it has learned something


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_the_policy_acts_as_the_learner_thinks_it_does(name: str) -> None:
    learning = filled(name, BOX, 100)
    algorithm, policy, params = learning.algorithm, learning.policy(), learning.state.actor
    obs, x = seen(learning)
    assert isinstance(BOX.action, Box)
    low, high = BOX.action.bounds
    assert low is not None
    if name == "sac":
        key = jax.random.key(3)
        action, log_prob = policy.act(obs, np.asarray(jax.random.normal(key, (len(obs), 2))))
        unit, expected = algorithm.act(params, x, key)
        assert log_prob == pytest.approx(np.asarray(expected), abs=1e-3)
    else:
        action, unit = policy.act(obs)[0], algorithm.act(params, x)
    assert action == pytest.approx(low + (np.asarray(unit) + 1) / 2 * (high - low), abs=1e-3)


def test_a_policy_keeps_its_numbers_while_the_learner_goes_on(learned: Learning) -> None:
    policy = learned.policy()
    before = {key: array.copy() for key, array in policy.params.items()}
    state, _ = learned.algorithm.update(learned.state, learned.normaliser.params, learned.sample(50))
    assert same(before, policy.params)
    assert not same(before["head.w"], actor(state)["head.w"])


# Targets are targets


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "iql"])
def test_no_gradient_flows_into_what_a_critic_is_compared_with(name: str) -> None:
    learning = filled(name, BOX)
    algorithm, state = learning.algorithm, learning.state
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), learning.sample(1))
    rest = {k: v for k, v in state._asdict().items() if k in ("actor", "critic") or k.startswith("target")}

    def loss(critic: Any, rest: dict[str, Any]) -> Any:
        key = () if name in ("ddpg", "iql") else (jax.random.key(0),)
        return algorithm.critic_loss(critic, state._replace(**rest), batch, *key)[0]

    own, others = jax.jit(jax.grad(loss, (0, 1)))(state.critic, rest)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(own)) > 0
    assert all((g == 0).all() for g in jax.tree.leaves(others))


def test_targets_follow_slowly(learned: Learning) -> None:
    first, now = (s._asdict() for s in (learned.algorithm.init(jax.random.key(0)), learned.state))
    targets = {key for key in now if key.startswith("target")}
    assert bool(targets) == (learned.name != "bc")
    for key in targets:
        source = key.removeprefix("target_") if "_" in key else ("params" if "params" in now else "critic")
        for name, array in now[key].items():
            if name.endswith(".w"):
                moved, ahead = jnp.abs(array - first[key][name]).mean(), jnp.abs(now[source][name] - array).mean()
                assert moved > 0
                assert ahead > 0


# Repeatable


def test_the_same_seed_gives_the_same_result(learned: Learning) -> None:
    again = filled(learned.name, learned.game, 100)
    assert same(again.state, learned.state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again.state))
    assert int(again.state.updates) == 100
    assert not same(*(learned.algorithm.init(jax.random.key(seed)) for seed in (1, 2)))


@pytest.mark.parametrize(
    ("name", "game"), [pytest.param("sac", BOX, marks=pytest.mark.real), ("dqn", DISCRETE)], **label
)
def test_how_many_updates_share_a_call_does_not_matter(name: str, game: Game) -> None:
    learning = filled(name, game)
    batches, params = learning.sample(50), learning.normaliser.params
    whole, _ = learning.algorithm.update(learning.state, params, batches)
    parts = learning.state
    for half in (slice(25), slice(25, None)):
        some = type(batches)(*(x[half] for x in batches[:-1]))  # the last is of demonstrations
        parts, _ = learning.algorithm.update(parts, params, some)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert np.asarray(a) == pytest.approx(np.asarray(b), rel=1e-3, abs=1e-5)


# Wrong input


@pytest.mark.parametrize(
    ("name", "game", "words"),
    [
        ("dqn", BOX, "DQN takes Discrete and MultiDiscrete actions, reach has Box: use sac, td3 or ppo"),
        ("sac", CHOICES, "SAC takes Box or Discrete actions, identities has MultiDiscrete: use ppo"),
        ("td3", CHOICES, "TD3 takes Box actions, identities has MultiDiscrete"),
        ("ddpg", DISCRETE, "DDPG takes Box actions"),
        ("cql", CHOICES, "CQL takes Discrete or Box actions, identities has MultiDiscrete: use iql or bc"),
        ("sac", Game("free", Box((1,)), Box((1,))), "needs a lower and an upper bound"),
    ],
)
def test_wrong_action_space(name: str, game: Game, words: str) -> None:
    with pytest.raises(InputError, match=words):
        algorithms.create(name, game)


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "ddpg", "bc", "iql", "cql"])
@pytest.mark.parametrize(
    "wrong", [{"lr": 0}, {"batch": 0}, {"batch": "many"}, {"layers": [{"layer": "magic"}]}], ids=str
)
def test_wrong_hyperparameters(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{next(iter(wrong))}(\[0\])?(: expected| is )"):
        algorithms.create(name, DISCRETE if name == "dqn" else BOX, wrong)


def test_misspelt_names() -> None:
    with pytest.raises(InputError, match=r"unknown key algorithm\.critik_lr: did you mean algorithm\.critic_lr\?"):
        algorithms.create("sac", BOX, {"critik_lr": 1e-3})
    with pytest.raises(InputError, match="did you mean 'td3'"):
        algorithms.create("td4", BOX)


def test_which_algorithm_learns_when_nobody_chose() -> None:
    assert algorithms.default_for(BOX) == "sac"
    assert algorithms.default_for(DISCRETE) == "dqn"
    assert algorithms.default_for(CHOICES) == "dqn"
    assert algorithms.default_for(Game("free", Box((1,)), Box((1,)))) == "iql"  # no bounds: nothing to squash into


# Images


@pytest.mark.real
@pytest.mark.parametrize("name", ["iql", "cql"])
def test_images(name: str) -> None:
    """Actions join a critic behind the convolutions of its image."""
    game = Game("look", Box((12, 12, 3), "uint8", low=0, high=255), Box((2,), low=-1.0, high=1.0))
    layers = [{"layer": "conv", "filters": 4, "kernel": 4, "stride": 4}, *LAYERS]
    algorithm = make(name, game, layers=layers, critic_layers=layers, batch=8)
    learning = Learning(algorithm, capacity=200)
    obs = learning.rng.integers(0, 255, (41, 12, 12, 3)).astype(np.uint8)
    action = learning.rng.uniform(-1, 1, (40, 2)).astype("<f4")
    learning.replay.add(Columns(obs, action, np.ones(40, "<f4")), True)
    state, metrics = algorithm.update(learning.state, {}, learning.sample(2))
    assert all(np.isfinite(float(m)) for m in metrics.values())
    assert state.critic["critic.0.torso.1.w"].shape == (3 * 3 * 4 + 2, 32)
    for params, before in ((state.actor, learning.state.actor), (state.critic, learning.state.critic)):
        assert not any(same(params[key], before[key]) for key in params if key.endswith(".w"))
    greedy = algorithm.policy(state, {}, 0.0).act(obs)[0]
    assert game.action.problem(greedy) is None


def test_a_critic_without_dense_layers_sees_the_action_at_its_head() -> None:
    game = Game("look", Box((8, 8, 3), "uint8", low=0, high=255), Box((2,), low=-1.0, high=1.0))
    conv = [{"layer": "conv", "filters": 4, "kernel": 4, "stride": 4}]
    shapes = make("sac", game, layers=conv, critic_layers=conv).critic_shapes
    assert shapes["critic.1.head.w"] == (2 * 2 * 4 + 2, 1)
    flat = make("sac", BOX, critic_layers=[]).critic_shapes
    assert flat == {f"critic.{i}.head.{p}": s for i in range(2) for p, s in (("w", (4, 1)), ("b", (1,)))}


def test_exploration_falls_in_a_straight_line() -> None:
    td3 = make("td3", BOX, exploration_initial=1.0, exploration_final=0.2, exploration_steps=100)
    assert [td3.exploration(n) for n in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    dqn = make("dqn", DISCRETE, exploration_initial=1.0, exploration_final=0.0, exploration_steps=10)
    assert [dqn.exploration(n) for n in (0, 5, 20)] == pytest.approx([1.0, 0.5, 0.0])
    assert make("sac", BOX).exploration(0) == 0.0
    assert make("cql", DISCRETE).exploration(0) == 0.0
