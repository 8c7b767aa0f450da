"""Learning goes on from a policy that plays already: it acts as before, and untaught critics do not spoil it."""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sparring import algorithms
from sparring.experience import Columns, Fragment, new_id, pack
from sparring.games import Box, Discrete, Game, MultiDiscrete, Space
from sparring.networks.policy import Policy
from sparring.networks.random_play import RandomPlay
from sparring.training.store_learner import StoreLearner, create

SMALL = {"layers": [{"layer": "dense", "units": 8}]}
REPLAYED = SMALL | {"batch": 16, "learning_starts": 16, "updates_per_step": 1.0}
ON_POLICY = SMALL | {"steps": 64, "minibatch": 32, "epochs": 2, "normalise": True}
BOUNDED, BRANCHES = Box((2,), low=-1.0, high=1.0), MultiDiscrete((2, 3))
# With critics that are beside the policy, and teach it only when they have seen what it does.
WITH_CRITICS: list[tuple[str, Space, dict[str, Any]]] = [
    ("ppo", Discrete(3), ON_POLICY),
    ("ppo", BOUNDED, ON_POLICY),
    ("ppo", BRANCHES, ON_POLICY | {"shared": True}),
    ("sac", BOUNDED, REPLAYED | {"normalise": True}),
    ("td3", BOUNDED, REPLAYED),
    ("ddpg", BOUNDED, REPLAYED),
    ("iql", Box((2,)), REPLAYED),
]
CASES = [*WITH_CRITICS, ("dqn", Discrete(3), REPLAYED), ("dqn", BRANCHES, REPLAYED), ("bc", BRANCHES, REPLAYED)]


def play(game: Game, count: int = 4, steps: int = 50) -> list[Fragment]:
    acts, rng = RandomPlay(game), np.random.default_rng(3)
    made = []
    for _ in range(count):
        action, log_prob = acts.run({}, acts.noise(rng, steps))
        obs = 3.0 + 5.0 * rng.standard_normal((steps + 1, 3), np.float32)
        columns = Columns(obs, action, rng.standard_normal(steps, np.float32), log_prob)
        names = {"id": new_id(), "player": "p", "episode": new_id(), "start": 0, "time": time.time()}
        made.append(pack(game, columns, **names, terminated=True, model="random", version=0))
    return made


def learner(name: str, action: Space, given: dict[str, Any], seed: int) -> StoreLearner:
    return create(algorithms.create(name, Game("any", Box((3,)), action), given), seed)


def learn(learner: StoreLearner, updates: int) -> None:
    made = 0
    while made < updates:
        learner.take(play(learner.game), 0)
        made += learner.learn(0.01)


def taught(name: str, action: Space, given: dict[str, Any]) -> Policy:
    """By another seed, so that nothing of it is ours by chance."""
    theirs = learner(name, action, given, seed=7)
    learn(theirs, 2)
    return theirs.policy()


def network(policy: Policy) -> dict[str, Any]:
    return {name: array for name, array in policy.params.items() if not name.startswith("normaliser.")}


@pytest.mark.parametrize(("name", "action", "given"), CASES, ids=str)
def test_it_acts_like_the_policy_that_it_goes_on_from(name: str, action: Space, given: dict[str, Any]) -> None:
    theirs, ours = taught(name, action, given), learner(name, action, given, seed=0)
    obs = 3.0 + 5.0 * np.random.default_rng(1).standard_normal((200, 3)).astype(np.float32)
    expected = theirs.act(obs)[0]
    assert not np.allclose(ours.policy().act(obs)[0], expected)
    assert ours.warm_start(theirs, 1000) is None
    np.testing.assert_allclose(ours.policy().act(obs)[0], expected, rtol=1e-4, atol=1e-5)
    assert ours.exploration == float(ours.algorithm.exploration(1 << 40))  # it has explored enough


@pytest.mark.parametrize(("name", "action", "given"), WITH_CRITICS, ids=str)
def test_the_policy_stays_as_it_is_while_the_critics_learn(name: str, action: Space, given: dict[str, Any]) -> None:
    theirs, ours = taught(name, action, given), learner(name, action, given, seed=0)
    assert ours.warm_start(theirs, 1000) is None
    critics = {key: array.copy() for key, array in ours.save()[0].items() if "critic" in key or "value" in key}
    learn(ours, 3)
    assert ours.state.updates < 0
    for key, array in network(theirs).items():
        np.testing.assert_array_equal(network(ours.policy())[key], array, err_msg=key)
    assert any(not np.array_equal(ours.save()[0][key], array) for key, array in critics.items())
    ours.state = ours.state._replace(updates=jnp.zeros((), jnp.int32))  # the critics have had their time
    learn(ours, 4)
    assert any(not np.array_equal(network(ours.policy())[key], array) for key, array in network(theirs).items())
