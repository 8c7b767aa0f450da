"""What recorded play says of a policy that did not play it."""

import numpy as np
import pytest

from sparring.experience import Columns, Fragment, new_id, pack
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import QValues
from sparring.trainer.witness import Witness

# Whoever names the larger of two numbers gets a point, four times in an episode.
GAME = Game(name="larger", observation=Box((2,)), action=Discrete(2))
STEPS = 4


def episode(rng: np.random.Generator, cut: int = STEPS, **fields: object) -> list[Fragment]:
    """At random, in one or two fragments."""
    obs = rng.standard_normal((STEPS + 1, 2)).astype(np.float32)
    action = rng.integers(0, 2, STEPS).astype("<i4")
    reward = (action == obs[:-1].argmax(-1)).astype(np.float32)
    name, made = new_id(), []
    for first, last in ((0, cut), (cut, STEPS)):
        if first < last:
            columns = Columns(
                obs[first : last + 1], action[first:last], reward[first:last],
                np.full(last - first, np.log(0.5), np.float32),
            )  # fmt: skip
            whose = {"player": "p", "episode": name, "start": first, "time": 0.0, "model": "random", "version": 0}
            made.append(pack(GAME, columns, id=new_id(), terminated=last == STEPS, **whose | fields))
    return made


def policy(exploration: float) -> Policy:
    """Names the larger one, but for its exploration."""
    return Policy(GAME, (), QValues(), {"head.w": np.eye(2, dtype="<f4"), "head.b": np.zeros(2, "<f4")}, exploration)


@pytest.mark.parametrize("cut", [STEPS, 2])
def test_it_knows_how_good_another_policy_would_be(cut: int) -> None:
    rng, witness = np.random.default_rng(0), Witness(GAME)
    for _ in range(200):
        witness.take(episode(rng, cut))
    for exploration in (1.0, 0.5, 0.2):
        said = witness.estimate(policy(exploration))
        assert said is not None
        assert said.ret == pytest.approx(STEPS * (1 - exploration / 2), abs=0.25)
    whole, none = witness.estimate(policy(1.0)), witness.estimate(policy(0.2))
    assert whole is not None
    assert none is not None
    assert whole.episodes == pytest.approx(200)
    assert none.episodes < 60  # what that one would do was seldom played


def test_it_says_nothing_where_it_cannot_know() -> None:
    rng, witness = np.random.default_rng(0), Witness(GAME)
    assert witness.estimate(policy(0.5)) is None
    for _ in range(50):
        witness.take(episode(rng, 2)[1:])  # the beginnings are missing
    assert witness.estimate(policy(0.5)) is None
    for _ in range(20):
        witness.take(episode(rng))
    assert witness.estimate(policy(0.5)) is not None
    assert witness.estimate(policy(0.0)) is None  # two or three episodes of twenty would be all its evidence
    witness.forget()
    assert witness.estimate(policy(0.5)) is None
    assert not Witness(Game("box", Box((2,)), Box((2,), low=-1, high=1))).usable


def test_it_remembers_so_many_episodes_and_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, watched = np.random.default_rng(0), Witness(GAME)
    size = sum(len(f.obs) for f in episode(rng))
    monkeypatch.setattr("sparring.trainer.witness.EPISODES", 7)
    for number in range(20):
        watched.take(episode(rng, number % 3 + 1))
        held = [f for each in watched._played for f in each]
        assert len(watched._played) == min(number + 1, 7)
        assert watched._bytes == sum(len(f.obs) for f in held)
    watched.forget()
    monkeypatch.setattr("sparring.trainer.witness.BYTES", 3 * size)
    for _ in range(10):
        watched.take(episode(rng))
    assert (len(watched._played), watched._bytes) == (3, 3 * size)
