"""A changed game: what changed in words, old play in the new form, and a policy that grows with it."""

import time
from typing import Any

import numpy as np
import pytest

from sparring.errors import InputError
from sparring.experience import Columns, Fragment, new_id, pack
from sparring.experience.change import Change, Unmapped
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.grow import grow
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, QValues, param_shapes
from sparring.store.family import Family
from sparring.store.lineage import Lineage
from sparring.store.memory import MemoryStore
from sparring.store.profile import Origin, Profile, Revision

POSITION = Box((2,), low=-1.0, high=1.0)
OLD = Game("arena", Dict({"position": POSITION, "weapon": Discrete(4), "ammo": Box(())}), MultiDiscrete((3, 2)))
NEW = Game(
    "arena.2",
    Dict({"position": POSITION, "weapon": Discrete(5), "shield": Box((1,), low=0.5, high=1.0)}),
    MultiDiscrete((3, 3)),
)


def played(game: Game, steps: int = 4, **fields: Any) -> Fragment:
    rng = np.random.default_rng(steps)
    obs = np.zeros(steps + 1, game.observation.element)
    obs["position"] = rng.uniform(-1, 1, (steps + 1, 2))
    obs["weapon"] = rng.integers(0, 4, steps + 1)
    action = np.stack([rng.integers(0, 3, steps), rng.integers(0, 2, steps)], -1).astype("<i4")
    columns = Columns(obs, action, np.ones(steps, "<f4"), np.full(steps, -1.0, "<f4"))
    usual = {"id": new_id(), "player": "ann", "episode": new_id(), "start": 0, "time": time.time()}
    return pack(game, columns, **usual | {"truncated": True, "model": "bot", "version": 1} | fields)


def test_what_changed_is_reported_in_words() -> None:
    assert Change(OLD, NEW, {"shield": [0.75]}).words() == [
        "you added `shield`: in old play it is [0.75]",
        "you dropped `ammo`",
        "`weapon` has 5 values, it had 4",
        "the action has the choices [3, 3], it had [3, 2]",
    ]
    assert Change(OLD, OLD).words() == []
    other = Game("arena", Box((2,)), Discrete(2), players=2)
    assert Change(OLD, other).words() == [
        "the observation is a box of 1 dimensions, it was a dict",
        "the action is discrete, it was multi_discrete",
        "2 play at once, it was 1",
        "old play cannot be used: the observation is a box of 1 dimensions, it was a dict",
    ]
    for wrong, message in (({"sheild": 1}, "of no field"), ({"shield": [9.0]}, "above"), ({"shield": "x"}, "shield")):
        with pytest.raises(InputError, match=message):
            Change(OLD, NEW, wrong)


def test_old_steps_become_steps_of_the_new_form() -> None:
    f = played(OLD)
    mapped = Change(OLD, NEW).fragment(f)
    assert (mapped.game, mapped.schema, mapped.id, mapped.reward) == ("arena.2", NEW.schema, f.id, f.reward)
    assert mapped.log_prob is None  # of fewer actions
    was, now = f.columns(OLD), mapped.columns(NEW)
    for name in ("position", "weapon"):
        np.testing.assert_array_equal(was.obs[name], now.obs[name])
    np.testing.assert_array_equal(now.obs["shield"], np.full((5, 1), 0.5))  # the nearest to 0 that is allowed
    np.testing.assert_array_equal(was.action, now.action)
    back = Change(NEW, OLD)
    assert back.fragment(mapped).columns(OLD).obs["ammo"].tolist() == [0.0] * 5
    obs = now.obs.copy()
    obs["weapon"][2] = 4
    with pytest.raises(Unmapped, match=r"weapon is outside 0\.\.3"):
        back.fragment(pack(NEW, Columns(obs, now.action, now.reward), id="x", player="p", episode="e", start=0, time=0))


def test_a_board_that_grows_keeps_what_was_on_it() -> None:
    old, new = Game("board", Box((2, 2)), Discrete(4)), Game("board.2", Box((3, 3)), Discrete(9))
    obs = np.arange(8, dtype="<f4").reshape(2, 2, 2)
    f = pack(
        old, Columns(obs, np.array([3], "<i4"), np.ones(1, "<f4")), id="x", player="p", episode="e", start=0, time=0
    )
    grown = Change(old, new, {"observation": [[9.0] * 3] * 3}).fragment(f).columns(new)
    np.testing.assert_array_equal(grown.obs[:, :2, :2], obs)
    assert grown.obs[:, 2].tolist() == [[9.0] * 3] * 2


@pytest.mark.parametrize("head", [Categorical(), QValues(duelling=True)])
@pytest.mark.parametrize("layers", [(Dense(8), Dense(4)), ()])
def test_a_grown_policy_plays_as_before_where_nothing_is_new(head: Any, layers: Any) -> None:
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape) for name, shape in param_shapes(OLD, layers, head).items()}
    params |= {"normaliser.mean": rng.standard_normal(7), "normaliser.std": rng.uniform(1, 2, 7)}
    params["normaliser.mean"][0] = 0.0  # `ammo`, which is dropped
    old = Policy(OLD, layers, head, params)
    new = grow(old, NEW)
    if not layers and isinstance(head, QValues):
        assert new == "it has no layers below its two heads"
        return
    assert isinstance(new, Policy)
    f = played(OLD, 200)
    mapped = Change(OLD, NEW).fragment(f)
    before, after = old.act(f.columns(OLD).obs)[0], new.act(mapped.columns(NEW).obs)[0]
    np.testing.assert_array_equal(before, after)


def test_what_cannot_grow_says_why() -> None:
    params = {name: np.zeros(shape) for name, shape in param_shapes(OLD, (Dense(8),), Categorical()).items()}
    policy = Policy(OLD, (Dense(8),), Categorical(), params)
    assert grow(policy, Game("arena.2", OLD.observation, Discrete(3))) == "its actions are of another kind"
    image = Game("arena.2", Box((36, 36, 3), "uint8"), OLD.action)
    assert "does not take a vector" in str(grow(policy, image))


class TestLineage:
    @pytest.fixture
    def store(self) -> MemoryStore:
        store = MemoryStore()
        store.register(OLD)
        store.append([played(OLD, n) for n in (1, 2, 3)])
        store.register(NEW)
        origin = Origin("arena", store.registration("arena"), 2, store.tail("arena", -1).cursor, 3)
        store.revise("arena.2", lambda known: Revision(known.game, Profile(origin=origin)))
        return store

    def view(self, store: MemoryStore, game: Game = NEW) -> Lineage:
        return Lineage(store, game, Family(store.games(), store.profiles()), store.profiles())

    def steps(self, play: Lineage, limit: int) -> list[int]:
        cursor, found = 0, []
        while (page := play.tail(cursor, limit)).cursor != cursor:
            assert all(f.schema == play.game.schema for f in page.fragments)
            found += [f.steps for f in page.fragments]
            cursor = page.cursor
        assert cursor == play.end()
        return found

    @pytest.mark.parametrize("limit", [1, 2, 100])
    def test_the_older_play_comes_first_and_none_that_came_later(self, store: MemoryStore, limit: int) -> None:
        store.append([played(OLD, 10)])  # by an old client, after the change
        store.append([played(NEW, 20), played(NEW, 21)])
        play = self.view(store)
        assert self.steps(play, limit) == [1, 2, 3, 20, 21]
        assert (play.count(), play.names) == (5, ["arena.2", "arena"])
        mark = play.erasure()
        store.erase("arena", "ann")
        assert play.erasure() != mark
        assert self.steps(play, limit) == [20, 21]

    def test_of_a_third_generation_it_is_mapped_twice(self, store: MemoryStore) -> None:
        store.append([played(NEW, 20)])
        third = Game("arena.3", OLD.observation, NEW.action)
        store.register(third)
        origin = Origin("arena.2", store.registration("arena.2"), 3, self.view(store).end(), 4)
        store.revise("arena.3", lambda known: Revision(known.game, Profile(origin=origin)))
        assert self.steps(self.view(store, third), 2) == [1, 2, 3, 20]
        family = Family(store.games(), store.profiles())
        assert [game.name for game in family.generations("arena.2")] == ["arena", "arena.2", "arena.3"]
        found = [family.find("arena", game.schema) for game in (OLD, NEW, third)]
        assert [game.name for game in found if game] == ["arena", "arena.2", "arena.3"]

    def test_a_game_that_was_deleted_is_continued_by_nothing(self, store: MemoryStore) -> None:
        store.append([played(NEW, 20)])
        reading = self.view(store)
        mark = reading.erasure()
        store.delete_game("arena")
        store.register(OLD)
        store.append([played(OLD, 9)])
        assert self.steps(self.view(store), 10) == [20]
        assert self.steps(reading, 10) == [20]  # also by who read it before
        assert reading.erasure() != mark
        assert reading.count() == 1

    def test_what_cannot_be_mapped_is_counted(self, store: MemoryStore) -> None:
        smaller = Game("arena.3", NEW.observation, MultiDiscrete((1, 2)))
        store.register(smaller)
        origin = Origin("arena", store.registration("arena"), 3, store.tail("arena", -1).cursor, 3)
        store.revise("arena.3", lambda known: Revision(known.game, Profile(origin=origin)))
        page = self.view(store, smaller).tail(0, 100)
        assert sum(page.left_out.values()) + sum(f.steps for f in page.fragments) == 6
        assert page.left_out
        assert "action is outside" in next(iter(page.left_out))
