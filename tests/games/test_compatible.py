"""When a policy of one game plays another."""

import pytest

from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.compatible import difference, differences
from sparring.games.spec import Action

FREE = Dict({"at": Box((2,)), "gear": Discrete(3)})
BOUNDED = Dict({"at": Box((2,), low=(-1.0, 0.0), high=1.0), "gear": Discrete(3)})


def game(observation: Space = FREE, action: Action = Discrete(2), **fields: object) -> Game:
    return Game("g", observation, action, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (game(), game(BOUNDED)),
        (game(), game(players=2, env="CartPole-v1", reward=(0.0, 1.0))),
        (game(Box((4,))), game(Box((4,), low=-5.0))),
        (game(action=Box((2,), low=-1.0, high=1.0)), game(action=Box((2,), low=(-1.0, -1.0), high=1.0))),
    ],
)
def test_bounds_of_observations_do_not_matter(one: Game, other: Game) -> None:
    assert difference(one, other) is None
    assert difference(other, one) is None


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (game(Dict({"at": Box((3,)), "gear": Discrete(3)})), "observation.at"),
        (game(Dict({"at": Box((2,), "float64"), "gear": Discrete(3)})), "observation.at"),
        (game(Dict({"at": Box((2,)), "gear": Discrete(3, 1)})), "observation.gear"),
        (game(Dict({"at": Box((2,))})), "observation.gear"),
        (game(Dict({**FREE.fields, "shield": Box((1,))})), "observation.shield"),
        (game(Box((2,))), "observation"),
        (game(action=MultiDiscrete((2,))), "action"),
        (game(action=Discrete(3)), "action"),
    ],
)
def test_what_a_policy_cannot_play_is_named(other: Game, part: str) -> None:
    assert [each.part for each in differences(game(), other)] == [part]
    assert [each.part for each in differences(other, game())] == [part]


def test_bounds_of_actions_matter() -> None:
    free, bounded = game(action=Box((2,))), game(action=Box((2,), low=-1.0, high=1.0))
    assert 'they differ in action ({"type":"box","shape":[2]' in str(difference(free, bounded))
    wider = game(action=Box((2,), low=-1.0, high=2.0))
    assert difference(bounded, wider)


def test_a_missing_field_is_called_so() -> None:
    less = game(Dict({"at": Box((2,))}))
    assert (
        difference(less, game())
        == 'they differ in observation.gear (missing, there {"type":"discrete","n":3,"start":0})'
    )
