"""Which of people's play is imitated, and that nothing is left out silently."""

import numpy as np
import pytest

from sparring import algorithms
from sparring.algorithms.demonstrations import Demonstrations
from sparring.experience.fragment import Columns, Fragment, new_id, pack
from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.training.store_learner import create

GAME = Game("g", Box((2,)), MultiDiscrete((3, 2)))


def fragment(ret: float, person: bool = True, episode: str = "", steps: int = 4, **fields) -> Fragment:
    reward = np.full(steps, ret / steps, np.float32)
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((steps + 1, 2)).astype(np.float32)
    action = np.stack([(obs[:-1, 0] > 0) * 2, obs[:-1, 1] > 0], -1).astype(np.int32)
    whose = {} if person else {"model": "bot", "version": 1}
    ends = {"truncated": True} | fields
    columns = Columns(obs, action, reward, None if person else np.zeros(steps, np.float32))
    name = episode or new_id()
    return pack(GAME, columns, id=new_id(), player="p", episode=name, **{"start": 0, "time": 0.0} | whose | ends)


def test_the_better_half_of_people_is_imitated_until_bots_surpass_it() -> None:
    d = Demonstrations()
    slots = [d.slot(fragment(ret)) for ret in (1.0, 10.0, 2.0, 12.0)]
    assert d.weights()[slots].tolist() == [0, 1, 0, 1]
    assert d.slot(fragment(5.0, person=False)) == 0
    assert d.weights()[slots].tolist() == [0, 1, 0, 1]
    for _ in range(20):
        d.slot(fragment(11.5, person=False))
    assert not d.weights().any()


def test_an_episode_is_the_sum_of_its_fragments_and_needs_all_of_them() -> None:
    d = Demonstrations()
    first = d.slot(fragment(3.0, episode="e", truncated=False))
    assert d.slot(fragment(4.0, episode="e", start=4)) == first
    assert d.people.tolist() == [7.0]
    d.slot(fragment(4.0, episode="half", start=4))
    assert d.people.tolist() == [7.0]


def test_dqn_learns_a_person_alone() -> None:
    learner = create(algorithms.create("dqn", GAME, {"learning_starts": 32, "batch": 32, "updates_per_step": 4.0}))
    learner.take([fragment(0.0, steps=200)], 0)
    learner.learn(20.0)
    obs = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    action, _ = learner.policy().act(obs)
    wanted = np.stack([(obs[:, 0] > 0) * 2, obs[:, 1] > 0], -1)
    assert (action == wanted).mean() > 0.9
    assert (learner.people_steps, learner.bot_steps, learner.left_out) == (200, 0, {})


def test_sac_learns_a_person_alone() -> None:
    """Without imitation, critics that saw no other action send the actor anywhere."""
    game = Game("g", Box((2,)), Box((2,), low=-1.0, high=1.0))
    rng = np.random.default_rng(0)
    obs = rng.uniform(-0.5, 0.5, (301, 2)).astype(np.float32)
    columns = Columns(obs, obs[:-1], rng.standard_normal(300).astype(np.float32))
    played = pack(game, columns, id=new_id(), player="p", episode=new_id(), start=0, time=0.0, truncated=True)

    def error(**given: float) -> float:
        small = {"layers": [{"layer": "dense", "units": 32}], "critic_layers": [{"layer": "dense", "units": 32}]}
        quick = {"learning_starts": 32, "batch": 32, "updates_per_step": 4.0, "lr": 3e-3, **small}
        learner = create(algorithms.create("sac", game, {**quick, **given}))
        learner.take([played], 0)
        while learner.ready:
            learner.learn(1.0)
        action, _ = learner.policy().act(obs)
        return float(np.abs(action - obs).mean())

    assert error() < 0.1
    assert error(imitation=0.0) > 0.2


def test_what_ppo_leaves_out_is_counted_and_kept() -> None:
    learner = create(algorithms.create("ppo", GAME, {}))
    learner.take([fragment(0.0), fragment(0.0, person=False)], 0)
    assert (learner.people_steps, learner.bot_steps) == (0, 4)
    assert learner.left_out == {"people's, without log_prob": 4}
    again = create(algorithms.create("ppo", GAME, {}))
    again.restore(*learner.save())
    assert again.left_out == learner.left_out


@pytest.mark.parametrize(
    ("action", "name"),
    [(Discrete(2), "dqn"), (MultiDiscrete((2, 3)), "dqn"), (Box((1,), low=-1, high=1), "sac"), (Box((1,)), "iql")],
)
def test_every_default_learns_from_people(action, name) -> None:
    game = Game("g", Box((2,)), action)
    assert algorithms.default_for(game) == name
    assert not algorithms.create(name, game).on_policy
