"""What every store promises, run against each of them."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from store_samples import MAZE, POLE, assert_counts, cut, everything, fragment, rewards
from waiting import until

from sparring.errors import InputError, SparringError
from sparring.experience import Fragment
from sparring.games import Box, Discrete, Game
from sparring.store import Episode, NotRegistered, Outcome, Quarantined, Stats, Store, open_store
from sparring.store.memory import MemoryStore
from sparring.store.profile import GameSettings, Profile, PromotionRule, Revision
from sparring.store.protocol import FragmentRefused
from sparring.store.sqlite import SqliteStore

STORED, DUPLICATE, CONFLICT, ERASED = Outcome.STORED, Outcome.DUPLICATE, Outcome.CONFLICT, Outcome.ERASED


@pytest.fixture(params=["sqlite", "memory", "outside", pytest.param("cassandra", marks=pytest.mark.real)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    match request.param:
        case "sqlite":
            store: Store = SqliteStore(tmp_path / "store.db")
        case "memory":
            store = MemoryStore()
        case "outside":  # somebody else's, by its address
            store = open_store(f"outside_store:Filed?path={quote(str(tmp_path))}")
        case _:
            store = open_store(request.getfixturevalue("cassandra_address"))
    store.register(POLE)
    store.register(MAZE)
    yield store
    store.close()


@pytest.fixture(params=["sqlite", pytest.param("cassandra", marks=pytest.mark.real)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same store again and again, in which POLE and MAZE are registered at first."""
    in_cluster = request.param == "cassandra"
    address = request.getfixturevalue("cassandra_address") if in_cluster else str(tmp_path / "store.db")
    with contextlib.ExitStack() as stores:

        def make() -> Store:
            return stores.enter_context(contextlib.closing(open_store(address)))

        with contextlib.closing(open_store(address)) as first:
            first.register(POLE)
            first.register(MAZE)
        yield make


class TestGames:
    def test_registered_games_come_back_as_they_were(self, store: Store) -> None:
        assert store.games() == [MAZE, POLE]

    def test_registering_again_changes_nothing(self, store: Store) -> None:
        store.append([fragment()])
        store.register(POLE)
        assert len(everything(store)) == 1

    def test_another_schema_under_the_same_name_is_refused(self, store: Store) -> None:
        other = Game("pole", Box((5,)), Discrete(2))
        with pytest.raises(InputError, match=f"{POLE.schema}.*{other.schema}"):
            store.register(other)
        assert POLE in store.games()


class TestAppend:
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"log_prob": np.full(3, -0.7, "<f4").tobytes(), "model": "bot", "version": 0},
            {"truncated": True, "start": (1 << 53) - 1},
            {"terminated": True, "truncated": True, "model": "модель 🤖", "version": (1 << 53) - 1},
            {"id": "x" * 200, "player": "'; DROP TABLE fragment; --", "episode": '"'},
            {"id": "018f" * 8, "player": "ß" * 200, "episode": "00", "time": 0.1 + 0.2},
        ],
    )
    def test_a_fragment_comes_back_as_it_was(self, store: Store, fields: dict[str, object]) -> None:
        sent = fragment(**fields)
        assert store.append([sent]) == [STORED]
        assert everything(store) == [sent]

    def test_nothing_may_be_appended(self, store: Store) -> None:
        assert store.append([]) == []
        assert store.submit([]).result(20) == []

    def test_a_second_upload_stores_nothing(self, store: Store) -> None:
        batch = [fragment() for _ in range(70)]
        assert store.append(batch) == [STORED] * 70
        assert store.append(batch) == [DUPLICATE] * 70
        assert everything(store) == batch
        assert_counts(store)

    def test_old_and_new_ids_in_one_batch(self, store: Store) -> None:
        old, new, other = fragment(), fragment(), fragment()
        store.append([old])
        changed = msgspec.structs.replace(other, id=old.id)
        assert store.append([new, old, changed, new]) == [STORED, DUPLICATE, CONFLICT, DUPLICATE]
        assert everything(store) == [old, new]
        assert_counts(store)

    def test_the_same_id_twice_in_one_batch(self, store: Store) -> None:
        first = fragment()
        again = msgspec.structs.replace(first)
        other = msgspec.structs.replace(first, player="eve")
        assert store.append([first, first, again, other]) == [STORED, DUPLICATE, DUPLICATE, CONFLICT]
        assert everything(store) == [first]

    @pytest.mark.parametrize(
        "change",
        [
            {"player": "eve"},
            {"episode": "other"},
            {"start": 1},
            {"terminated": True},
            {"truncated": True},
            {"model": "bot", "version": 1},
            {"obs": bytes(64)},
            {"action": bytes(12)},
            {"reward": bytes(12)},
            {"log_prob": bytes(12)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_the_same_id_with_any_other_content_is_a_conflict(self, store: Store, change: dict[str, object]) -> None:
        first = fragment(reward=np.ones(3, "<f4").tobytes(), action=np.ones(3, "<i4").tobytes())
        store.append([first])
        assert store.append([msgspec.structs.replace(first, **change)]) == [CONFLICT]
        assert everything(store) == [first]

    def test_another_time_alone_is_the_same_content(self, store: Store) -> None:
        """Of JSON without a time the server fills in its clock, so the same upload comes with another one."""
        first = fragment(time=1000.0)
        later = msgspec.structs.replace(first, time=2000.0)
        assert store.append([first]) == [STORED]
        assert store.append([later]) == [DUPLICATE]
        assert everything(store) == [first]
        new = fragment(time=1000.0)
        assert store.append([new, msgspec.structs.replace(new, time=3000.0)]) == [STORED, DUPLICATE]
        assert store.append([msgspec.structs.replace(later, player="eve")]) == [CONFLICT]

    def test_an_id_belongs_to_one_game(self, store: Store) -> None:
        store.append([fragment(id="same")])
        assert store.append([fragment(game=MAZE, id="same")]) == [CONFLICT]

    @pytest.mark.parametrize(
        "stray",
        [
            fragment(game=Game("chess", Box((4,)), Discrete(2))),
            fragment(game=Game("chess", Box((4,)), Discrete(2)), schema=""),
            fragment(schema="old"),
            fragment(schema=""),
        ],
    )
    def test_a_fragment_of_no_registered_game_refuses_its_batch_only(self, store: Store, stray: Fragment) -> None:
        before, after = store.submit([fragment()]), store.submit([fragment(), stray])
        last = store.submit([fragment()])
        assert before.result(20) == last.result(20) == [STORED]
        with pytest.raises(NotRegistered, match=stray.game):  # not the error of a store that is out of order
            after.result(20)
        with pytest.raises(FragmentRefused, match=f"schema {stray.schema!r}"):
            store.append([stray])
        assert len(everything(store)) == 2

    @pytest.mark.parametrize("fields", [{"reward": bytes(8)}, {"reward": b""}, {"steps": 0, "reward": b""}])
    def test_a_fragment_that_was_never_checked_is_refused(self, store: Store, fields: dict[str, object]) -> None:
        bad = msgspec.structs.replace(fragment(), **fields)
        with pytest.raises(InputError, match="check"):
            store.append([fragment(), bad])
        with pytest.raises(InputError, match="check"):
            store.submit([bad]).result(20)
        assert everything(store) == []


class TestTail:
    def test_in_the_order_of_arrival_and_of_each_game_alone(self, store: Store) -> None:
        sent = [fragment(steps=1 + i % 5, game=(POLE, MAZE)[i % 3 == 0]) for i in range(60)]
        for first in range(0, 60, 7):
            store.append(sent[first : first + 7])
        for game in (POLE, MAZE):
            for limit in (1, 4, 1000):
                assert everything(store, game, limit) == [f for f in sent if f.game == game.name]

    def test_from_now_on(self, store: Store) -> None:
        assert store.tail("pole", -1).cursor == 0
        store.append([fragment(), fragment()])
        now = store.tail("pole", -1)
        assert now.fragments == []
        assert now.cursor == store.tail("pole").cursor
        new = fragment()
        store.append([new])
        assert store.tail("pole", now.cursor).fragments == [new]

    def test_an_unknown_game_has_nothing(self, store: Store) -> None:
        assert store.tail("chess").fragments == []
        assert store.tail("chess", -1).cursor == 0
        assert store.stats("chess") == Stats(0, 0, 0, 0, 0)
        assert store.players("chess") == store.versions("chess") == store.episodes("chess") == []
        assert store.sample("chess", 10, np.random.default_rng(0)) == []
        assert store.erase("chess", "ann") == 0

    def test_a_cursor_is_not_used_again_after_an_erasure(self, store: Store) -> None:
        store.append([fragment(), fragment(player="eve")])
        cursor = store.tail("pole").cursor
        store.erase("pole", "eve")
        new = fragment()
        store.append([new])
        assert store.tail("pole", cursor).fragments == [new]
        store.erase("pole", "ann")
        assert store.tail("pole", -1).cursor > cursor


class TestScan:
    def test_shares_are_disjoint_and_together_all(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparring.store.arrival.STRIPE", 20)
        sent = [fragment(steps=1 + i % 7) for i in range(60)]
        store.append(sent)
        store.append([fragment(game=MAZE)])
        assert [f for piece in store.scan("pole") for f in piece] == sent
        for of in (2, 5):
            shares = [[f.id for piece in store.scan("pole", share, of) for f in piece] for share in range(of)]
            assert sorted(name for share in shares for name in share) == sorted(f.id for f in sent)
            assert all(shares)
        with pytest.raises(InputError, match="no share 2 of 2"):
            list(store.scan("pole", 2, 2))
        assert list(store.scan("chess")) == []


class TestSample:
    def test_at_least_as_many_steps_as_asked(self, store: Store) -> None:
        store.append([fragment(steps=s) for s in (1, 10, 100)])
        for steps in (1, 50, 110):
            drawn = store.sample("pole", steps, np.random.default_rng(0))
            assert sum(f.steps for f in drawn) >= steps > sum(f.steps for f in drawn[:-1])

    @pytest.mark.parametrize("steps", [111, 10**9])
    def test_all_there_are_each_once(self, store: Store, steps: int) -> None:
        sent = [fragment(steps=s) for s in (1, 10, 100)]
        store.append([*sent, fragment(game=MAZE)])
        assert store.sample("pole", steps, np.random.default_rng(0)) == sent

    def test_none_are_asked_for(self, store: Store) -> None:
        store.append([fragment()])
        assert store.sample("pole", 0, np.random.default_rng(0)) == []

    @pytest.mark.parametrize("erased", [0, 20, 400], ids=["nothing erased", "half erased", "almost all erased"])
    def test_uniform_over_steps(self, store: Store, erased: int) -> None:
        """Every fragment in proportion to its steps, wherever others were erased."""
        lengths = [1 + 3 * (i % 7) for i in range(20)]
        for i, steps in enumerate(lengths):
            store.append([fragment(steps=steps, id=str(i))])
            store.append([fragment(steps=5, player="eve") for _ in range(erased // 20)] + [fragment(game=MAZE)])
        store.erase("pole", "eve")
        rng = np.random.default_rng(3)
        counts: Counter[str] = Counter()
        for _ in range(160):
            counts.update(f.id for f in store.sample("pole", 150, rng))
        expected = np.array(lengths) / sum(lengths) * counts.total()
        seen = np.array([counts[str(i)] for i in range(20)])
        # 19 degrees of freedom: a fair draw exceeds 43.8 once in a thousand seeds, and this seed is fixed.
        assert ((seen - expected) ** 2 / expected).sum() < 43.8


class TestErase:
    def test_takes_all_of_one_player_in_one_game(self, store: Store) -> None:
        mine = [*cut([2, 3], player="eve"), fragment(player="eve", model="bot", version=7)]
        others = [*cut([4, 5]), fragment(game=MAZE, player="eve")]
        for a, b in zip(mine, others, strict=True):
            store.append([a, b])
        assert store.erase("pole", "eve") == 3
        assert everything(store) == others[:2]
        assert everything(store, MAZE) == others[2:]
        assert [e.player for e in store.episodes("pole")] == ["ann"]
        assert_counts(store)
        assert_counts(store, MAZE)
        assert store.erase("pole", "eve") == 0
        assert store.erase("pole", "nobody") == 0

    def test_an_upload_that_is_sent_again_does_not_bring_erased_play_back(self, store: Store) -> None:
        batch = cut([2, 3])
        store.append(batch)
        store.erase("pole", "ann")
        new = fragment()
        later = msgspec.structs.replace(batch[0], time=1.0)
        assert store.append([*batch, new, later]) == [ERASED, ERASED, STORED, ERASED]
        assert store.submit(batch).result(20) == [ERASED, ERASED]
        assert everything(store) == [new]
        assert_counts(store)
        store.erase("pole", "ann")
        assert store.append([new, *batch]) == [ERASED] * 3

    def test_an_id_that_was_erased_is_free_for_other_players(self, store: Store) -> None:
        eves, anns = fragment(id="match-1", player="eve"), fragment(id="match-1")
        store.append([eves])
        store.erase("pole", "eve")
        assert store.append([anns]) == [STORED]
        assert store.append([anns, eves]) == [DUPLICATE, ERASED]
        assert everything(store) == [anns]
        assert_counts(store)
        store.erase("pole", "ann")
        assert store.append([anns, eves]) == [ERASED, ERASED]

    def test_in_one_batch_an_erased_id_comes_from_its_player_and_from_others(self, store: Store) -> None:
        eves, anns, bobs = (fragment(id="match-1", player=player) for player in ("eve", "ann", "bob"))
        store.append([eves])
        store.erase("pole", "eve")
        assert store.append([eves, anns, bobs, anns]) == [ERASED, STORED, CONFLICT, DUPLICATE]
        assert store.append([bobs, eves, anns]) == [CONFLICT, ERASED, DUPLICATE]
        assert everything(store) == [anns]
        store.erase("pole", "ann")
        assert store.append([bobs, anns]) == [STORED, ERASED]
        assert everything(store) == [bobs]
        assert_counts(store)

    def test_what_was_erased_from_one_game_is_no_matter_of_another(self, store: Store) -> None:
        first, other = fragment(id="match-1"), fragment(id="match-1", game=MAZE)
        store.append([first])
        store.erase("pole", "ann")
        assert store.append([other, first]) == [STORED, ERASED]
        assert everything(store, MAZE) == [other]

    def test_its_mark_changes_with_every_erasure(self, store: Store) -> None:
        marks = [store.erasure("pole")]
        for _ in range(2):
            store.append([fragment(player="eve"), fragment()])
            assert store.erasure("pole") == marks[-1]
            store.erase("pole", "eve")
            marks.append(store.erasure("pole"))
        store.erase("pole", "nobody")
        assert store.erasure("pole") == marks[-1]
        assert marks[0] == store.erasure("maze") == store.erasure("chess") == ""
        assert len(set(marks)) == 3

    def test_half_an_episode_is_forgotten_too(self, store: Store) -> None:
        first, last = cut([2, 3])
        store.append([first])
        store.erase("pole", "ann")
        store.append([last])
        assert store.episodes("pole") == []


class TestDiscard:
    def test_moves_fragments_into_the_quarantine_for_good(self, store: Store) -> None:
        bad, good = [fragment(player="eve") for _ in range(3)], [fragment(player="eve"), fragment()]
        other = fragment(game=MAZE)
        store.append([bad[0], good[0], bad[1], good[1], bad[2], other])
        ids = [f.id for f in bad]
        assert store.discard("pole", [*ids, ids[0], "unknown", other.id], "its reward is 3e38") == 3
        assert everything(store) == good
        assert everything(store, MAZE) == [other]
        until(lambda: store.stats("pole").rejected == 3)
        assert_counts(store)
        assert store.append(bad) == [ERASED] * 3
        assert store.discard("pole", ids, "again") == store.discard("chess", ids, "why") == 0

    def test_a_player_of_whom_some_was_discarded_can_be_erased(self, store: Store) -> None:
        sent = [fragment() for _ in range(6)]
        store.append(sent)
        store.discard("pole", [sent[i].id for i in (5, 1, 2)], "why")
        new = fragment()
        store.append([new, fragment(player="bob")])
        assert store.erase("pole", "ann") == 4
        assert {f.player for f in everything(store)} == {"bob"}
        assert_counts(store)

    def test_a_player_with_nothing_left_is_not_counted(self, store: Store) -> None:
        parts = cut([2, 3, 4])
        store.append(parts[:2])
        store.discard("pole", [f.id for f in parts], "why")
        assert_counts(store)
        assert store.append(parts) == [ERASED, ERASED, STORED]
        assert store.episodes("pole") == []
        assert_counts(store)

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_its_episode_is_not_complete_any_more(self, store: Store, which: int) -> None:
        parts, others = cut([2, 3, 4]), cut([2, 3, 4])
        store.append(parts + others)
        store.discard("pole", [parts[which].id], "why")
        assert [e.episode for e in store.episodes("pole")] == [others[0].episode]
        late = cut([2, 3, 4])
        store.append([late[which]])
        store.discard("pole", [late[which].id], "why")
        store.append(late)
        assert [e.episode for e in store.episodes("pole")] == [others[0].episode]

    def test_the_mark_of_erasures_changes(self, store: Store) -> None:
        sent = [fragment(), fragment()]
        store.append(sent)
        marks = {store.erasure("pole")}
        for f in sent:
            store.discard("pole", [f.id], "why")
            marks.add(store.erasure("pole"))
        store.discard("pole", ["unknown"], "why")
        assert store.erasure("pole") in marks
        assert len(marks) == 3


class TestNewestEpisodes:
    def test_pages_from_the_newest_on_tell_what_episodes_tells(self, store: Store) -> None:
        for i in range(4):
            whole, parts, open_ended = cut([3], version=i, model="bot"), cut([2, 1, 4], player="eve"), fragment()
            store.append([parts[2], *whole, parts[0], open_ended])
            store.append([parts[1], fragment(game=MAZE, ended=True)])
        every = store.episodes("pole")
        assert len(every) == 8
        for limit in (1, 3, 8, 100):
            found: list[Episode] = []
            before = None
            while True:
                page = store.newest_episodes("pole", before, limit)
                assert len(page.episodes) <= limit
                found += page.episodes
                if (before := page.before) is None:
                    break
            assert found == every[::-1]
        assert store.newest_episodes("pole", every[0].cursor).episodes == []
        assert store.newest_episodes("chess").episodes == []

    def test_the_fragments_of_one_come_in_their_order(self, store: Store) -> None:
        parts, others = cut([2, 3, 4], episode="e"), cut([2, 2], player="bob", episode="e")
        store.append([parts[1], others[0], fragment(), parts[2]])
        store.append([others[1], parts[0], fragment()])
        (bobs, anns) = store.episodes("pole")
        assert store.episode("pole", anns.cursor) == (anns, parts)
        assert store.episode("pole", bobs.cursor) == (bobs, others)
        assert store.episode("pole", anns.cursor, 2, 5) == (anns, parts[1:2])
        assert store.episode("pole", anns.cursor, 4, 6) == (anns, parts[1:])
        assert store.episode("pole", anns.cursor, 9) == (anns, [])
        for wrong in (anns.cursor - 1, anns.cursor + 1, 0, 10**12):
            assert store.episode("pole", wrong) is None
        assert store.episode("chess", anns.cursor) is None

    def test_a_name_that_is_used_again_is_another_episode(self, store: Store) -> None:
        first, second, third = (cut([2, 1], episode="again") for _ in range(3))
        store.append([*first, *second, third[0]])
        found = store.newest_episodes("pole").episodes
        assert [e.ret for e in found] == [rewards(second), rewards(first)]
        assert [store.episode("pole", e.cursor) for e in found] == list(zip(found, (second, first), strict=True))

    def test_an_erased_or_discarded_one_is_gone(self, store: Store) -> None:
        erased, kept, torn, after = cut([2, 2], player="eve"), cut([2, 2]), cut([1, 1]), cut([1, 3])
        store.append([*erased, *kept, *torn, *after])
        store.erase("pole", "eve")
        store.discard("pole", [torn[0].id], "why")
        found = store.newest_episodes("pole").episodes
        assert [store.episode("pole", e.cursor) for e in found] == list(zip(found, (after, kept), strict=True))


class TestPaused:
    def test_a_profile_is_kept_with_the_game_and_goes_with_it(self, store: Store) -> None:
        assert store.profiles()["pole"] == Profile()
        mark = store.registration("pole")
        slow = Profile(GameSettings(algorithm="ppo", hyperparameters={"lr": 0.5}, promotion=PromotionRule(canary=0.2)))
        store.append([fragment()])
        made = store.revise("pole", lambda known: Revision(known.game, slow))
        assert (made.game, made.profile) == (POLE, slow)
        assert (store.profiles()["pole"], store.profiles()["maze"]) == (slow, Profile())
        assert (store.games(), store.registration("pole")) == ([MAZE, POLE], mark)
        store.register(POLE)  # as every client does
        assert store.profiles()["pole"] == slow
        assert len(everything(store)) == 1
        store.delete_game("pole")
        store.register(POLE)
        assert store.profiles()["pole"] == Profile()

    def test_what_is_no_part_of_the_schema_can_be_changed_and_spaces_cannot(self, store: Store) -> None:
        other = Game("pole", POLE.observation, POLE.action, env="CartPole-v1")
        store.revise("pole", lambda known: Revision(other, known.profile))
        assert other in store.games()
        for wrong in (Game("pole", Box((5,)), Discrete(2)), Game("stick", POLE.observation, POLE.action)):
            with pytest.raises(InputError, match="keeps its name and its spaces"):
                store.revise("pole", lambda known, wrong=wrong: Revision(wrong, known.profile))  # type: ignore[misc]
        assert other in store.games()
        with pytest.raises(NotRegistered):
            store.revise("chess", lambda known: known)

    def test_a_game_is_paused_and_resumed_and_its_play_still_stored(self, store: Store) -> None:
        assert store.paused() == set()
        store.pause("pole", True)
        store.pause("pole", True)
        store.register(POLE)
        assert store.paused() == {"pole"}
        assert store.append([fragment()]) == [STORED]
        store.pause("maze", True)
        store.pause("pole", False)
        assert store.paused() == {"maze"}

    def test_there_must_be_such_a_game(self, store: Store) -> None:
        with pytest.raises(NotRegistered, match="chess"):
            store.pause("chess", True)
        assert store.paused() == set()


class TestDeletedGame:
    def test_everything_of_it_is_gone_and_other_games_stay(self, store: Store) -> None:
        other = fragment(game=MAZE)
        sent = [*cut([2, 3]), fragment(player="eve", model="bot", version=1)]
        store.append([*sent, other])
        store.quarantine("pole", "eve", "id", "why")
        store.pause("pole", True)
        store.delete_game("pole")
        assert store.games() == [MAZE]
        assert store.paused() == set()
        assert store.registration("pole") == store.erasure("pole") == ""
        assert everything(store) == list(store.scan("pole")) == []
        assert store.stats("pole") == Stats(0, 0, 0, 0, 0)
        assert store.players("pole") == store.versions("pole") == store.episodes("pole") == []
        with pytest.raises(NotRegistered, match="pole"):
            store.append([fragment()])
        assert store.append([fragment(game=MAZE)]) == [STORED]
        assert everything(store, MAZE)[0] == other
        assert_counts(store, MAZE)
        store.delete_game("pole")
        store.delete_game("chess")

    @pytest.mark.parametrize("again", [POLE, Game("pole", Box((2,)), Discrete(4))], ids=["same", "other spaces"])
    def test_declared_again_it_starts_from_nothing(self, store: Store, again: Game) -> None:
        first = store.registration("pole")
        half, erased = fragment(), fragment(player="eve")
        store.append([half, erased])
        store.erase("pole", "eve")
        store.delete_game("pole")
        assert store.deleted("pole")
        store.register(again)
        assert not store.deleted("pole")
        assert not store.deleted("chess")
        assert store.registration("pole") not in ("", first)
        assert store.registration("pole") == store.registration("pole")
        assert everything(store, again) == []
        assert store.stats("pole") == Stats(0, 0, 0, 0, 0)
        sent = [fragment(game=again, id=f.id, player=f.player) for f in (half, erased)]
        assert store.append(sent) == [STORED, STORED]
        assert everything(store, again) == sent
        assert_counts(store, again)

    def test_that_it_was_deleted_is_remembered(self, opened: Callable[[], Store]) -> None:
        """Also by the next process: clients that still play it get an error, and do not declare it again."""
        first = opened()
        first.append([fragment()])
        first.pause("pole", True)
        first.delete_game("pole")
        first.close()
        store = opened()
        assert store.deleted("pole")
        assert not store.deleted("maze")
        assert not store.deleted("chess")
        assert (store.games(), store.paused()) == ([MAZE], set())
        store.delete_game("pole")
        assert store.deleted("pole")
        store.register(POLE)
        assert not store.deleted("pole")
        assert (store.games(), store.paused()) == ([MAZE, POLE], set())
        assert store.append([fragment()]) == [STORED]

    def test_registering_again_without_deleting_is_the_same_registration(self, store: Store) -> None:
        first = store.registration("pole")
        store.register(POLE)
        assert store.registration("pole") == first != store.registration("maze")
        assert first
        assert store.registration("chess") == ""


class TestStats:
    def test_counts_per_game_player_and_version(self, store: Store) -> None:
        store.append([fragment(steps=2), fragment(steps=3, player="eve", model="bot", version=2)])
        store.append([fragment(steps=4, player="eve", model="bot", version=1), fragment(game=MAZE)])
        assert store.stats("pole").players == 2
        assert [(v.model, v.version, v.steps) for v in store.versions("pole")] == [
            (None, None, 2),
            ("bot", 1, 4),
            ("bot", 2, 3),
        ]
        assert_counts(store)
        assert_counts(store, MAZE)

    def test_players_by_when_they_were_seen(self, store: Store) -> None:
        begin = time.time()
        for player in ("ann", "bob", "eve", "ann"):
            store.append([fragment(player=player)])
        seen = store.players("pole")
        assert [(p.player, p.fragments) for p in seen] == [("ann", 2), ("eve", 1), ("bob", 1)]
        assert begin <= seen[-1].last_seen <= seen[0].last_seen <= time.time()
        assert [p.player for p in store.players("pole", 2)] == ["ann", "eve"]

    def test_refused_fragments_are_counted(self, store: Store) -> None:
        for i in range(30):
            store.quarantine("pole", "eve", f"id {i}", "it has NaN")
        store.quarantine("chess", "eve", "id", "there is no such game")
        store.quarantine("", "", "record 7", "nobody can read it")
        until(lambda: store.stats("pole").rejected == 30)
        assert store.stats("maze").rejected == 0
        store.erase("pole", "eve")
        assert store.stats("pole").rejected == 30

    def test_what_was_rejected_is_reported_with_its_reason(self, store: Store) -> None:
        begin = time.time()
        assert store.quarantined("pole") == []
        for i in range(5):
            store.quarantine("pole", ("eve", "ann")[i % 2], f"id {i}", f"reason {i}")
            until(lambda i=i: len(store.quarantined("pole")) == i + 1)
        found = store.quarantined("pole")
        assert [(q.game, q.player, q.id, q.reason) for q in found] == [
            ("pole", ("eve", "ann")[i % 2], f"id {i}", f"reason {i}") for i in (4, 3, 2, 1, 0)
        ]
        assert begin <= found[-1].time <= found[0].time <= time.time()
        assert store.quarantined("pole", 2) == found[:2]
        assert store.quarantined("maze") == store.quarantined("chess") == []
        store.erase("pole", "eve")
        assert store.quarantined("pole") == [q for q in found if q.player == "ann"]

    def test_what_was_discarded_is_reported_with_its_reason(self, store: Store) -> None:
        bad = fragment(player="eve")
        store.append([fragment(), bad])
        store.discard("pole", [bad.id], "it makes learning diverge")
        until(lambda: len(store.quarantined("pole")) == 1)
        [found] = store.quarantined("pole")
        assert (found.player, found.id, found.reason) == ("eve", bad.id, "it makes learning diverge")

    def test_what_a_source_rejected_is_reported_once(self, store: Store) -> None:
        some = [Quarantined("pole", "eve", f"id {i}", "it has NaN") for i in range(3)]
        for _ in range(2):
            store.quarantine_from("a", {"pole": 3}, some)
        assert sorted(q.id for q in store.quarantined("pole")) == ["id 0", "id 1", "id 2"]

    def test_what_a_source_refused_counts_once_however_often_it_is_reported(self, store: Store) -> None:
        some = [Quarantined("pole", "eve", f"id {i}", "it has NaN") for i in range(3)]
        store.quarantine("pole", "eve", "id", "why")
        for source, total in (("a", 2), ("b", 5), ("a", 3), ("a", 3), ("a", 2), ("b", 5)):
            store.quarantine_from(
                source, {"pole": total, "?": 1, "maze": 0}, [*some, Quarantined("", "", "record 7", "why")]
            )
        until(lambda: store.stats("pole").rejected == 1 + 3 + 5)
        assert store.stats("maze").rejected == 0
        store.erase("pole", "eve")
        assert store.stats("pole").rejected == 1 + 3 + 5


class TestEpisodes:
    def test_a_finished_episode(self, store: Store) -> None:
        begin = time.time()
        parts = cut([2, 3, 4], model="bot", version=5)
        store.append(parts)
        [episode] = store.episodes("pole")
        assert begin <= episode.ended <= time.time()
        cursor = store.tail("pole").cursor
        assert episode == Episode("ann", parts[0].episode, 9, rewards(parts), episode.ended, "bot", 5, cursor)
        assert store.episodes("pole", episode.cursor) == []

    def test_one_fragment_may_be_all_of_it(self, store: Store) -> None:
        won, left = fragment(terminated=True), fragment(truncated=True)
        store.append([won, left, fragment()])
        assert [(e.episode, e.steps, e.ret) for e in store.episodes("pole")] == [
            (won.episode, 3, rewards([won])),
            (left.episode, 3, rewards([left])),
        ]

    def test_without_one_of_its_fragments_it_is_not_complete(self, store: Store) -> None:
        for missing in range(3):
            parts = cut([2, 3, 4])
            store.append(parts[:missing] + parts[missing + 1 :])
        assert store.episodes("pole") == []

    def test_a_late_fragment_completes_it_after_the_cursor(self, store: Store) -> None:
        """A caller has moved on when the first fragment arrives at last: it must still see the episode."""
        late, *rest = cut([2, 3, 4], model="bot", version=1)
        store.append(rest)
        store.append([fragment(ended=True)])
        [other] = store.episodes("pole")
        store.append([msgspec.structs.replace(late, model="bot", version=9)])
        [episode] = store.episodes("pole", other.cursor)
        assert (episode.steps, episode.version) == (9, 1)  # who finished it, not who arrived last
        assert [e.cursor for e in store.episodes("pole")] == [other.cursor, episode.cursor]

    def test_a_fragment_sent_twice_counts_once(self, store: Store) -> None:
        first, last = cut([2, 3])
        store.append([first])
        store.append([first])
        store.append([last, last])
        [episode] = store.episodes("pole")
        assert episode.steps == 5

    def test_a_name_used_again_is_another_episode(self, store: Store) -> None:
        """A simple client may count its episodes from 1 whenever it starts."""
        store.append(cut([2, 3], episode="1") + cut([4, 1], episode="1"))
        store.append(cut([6], episode="1"))
        store.append(cut([2, 2], episode="1")[:1])
        store.append(cut([2, 9], episode="1")[1:])
        store.append(cut([3], episode="1", player="eve"))
        assert [(e.player, e.steps) for e in store.episodes("pole")] == [
            ("ann", 5),
            ("ann", 5),
            ("ann", 6),
            ("ann", 11),
            ("eve", 3),
        ]

    def test_a_reader_that_follows_sees_each_once_whatever_the_order(self, store: Store) -> None:
        rng = np.random.default_rng(11)
        whole = [cut(rng.integers(1, 6, rng.integers(1, 6)).tolist(), player=f"p{i % 3}") for i in range(60)]
        parts = [f for episode in whole for f in episode]
        rng.shuffle(parts)  # type: ignore[arg-type]  # a list is fine
        seen: list[Episode] = []
        cursor = 0
        while parts:
            count = int(rng.integers(1, 12))
            store.append(parts[:count])
            del parts[:count]
            for episode in store.episodes("pole", cursor, int(rng.integers(1, 4))):
                seen.append(episode)
                cursor = episode.cursor
        seen += store.episodes("pole", cursor)
        assert sorted((e.episode, e.steps, e.ret) for e in seen) == sorted(
            (parts[0].episode, sum(f.steps for f in parts), rewards(parts)) for parts in whole
        )


class TestClose:
    def test_twice_is_fine(self, store: Store) -> None:
        store.close()
        store.close()

    def test_afterwards_nothing_works_and_says_so(self, store: Store) -> None:
        store.close()
        for use in (
            lambda: store.append([fragment()]),
            lambda: store.submit([fragment()]),
            lambda: store.register(POLE),
            lambda: store.tail("pole"),
            lambda: store.stats("pole"),
            lambda: store.quarantine("pole", "ann", "id", "why"),
        ):
            with pytest.raises(SparringError, match="closed"):
                use()


@pytest.mark.parametrize("seed", range(5))
def test_stores_agree(seed: int, tmp_path: Path) -> None:
    """Whatever is done to them in whatever order, all answer alike."""
    rng = np.random.default_rng(seed)
    stores: tuple[Store, Store] = (SqliteStore(tmp_path / "store.db"), MemoryStore())
    for store in stores:
        store.register(POLE)
        store.register(MAZE)
    sent: list[Fragment] = []
    for _ in range(60):
        action = rng.random()
        if action < 0.8:
            game, player = (POLE, MAZE)[rng.integers(2)], f"player {rng.integers(4)}"
            version = int(rng.integers(3))
            batch = cut(rng.integers(1, 9, 4).tolist(), game=game, player=player, model="bot", version=version)
            batch = [batch[i] for i in rng.permutation(4)[: rng.integers(1, 5)]]
            batch += [sent[i] for i in rng.integers(len(sent), size=2)] if sent else []
            batch += [fragment(id=sent[-1].id, game=game)] if sent and rng.random() < 0.2 else []
            sent += batch
            assert stores[0].append(batch) == stores[1].append(batch)
        elif action < 0.9 and sent:
            ids = [sent[i].id for i in rng.integers(len(sent), size=3)]
            assert stores[0].discard("pole", ids, "why") == stores[1].discard("pole", ids, "why")
        elif action < 0.91:
            for store in stores:
                store.delete_game("maze")
                store.register(MAZE)
        else:
            who = ("pole", f"player {rng.integers(4)}")
            assert stores[0].erase(*who) == stores[1].erase(*who)
        for game in (POLE, MAZE):
            assert _view(stores[0], game) == _view(stores[1], game)
    for store in stores:
        assert_counts(store)
        store.close()


def _view(store: Store, game: Game) -> list[object]:
    """Everything but the clock."""
    return [
        store.erasure(game.name) != "",
        store.tail(game.name, limit=10**6),
        store.stats(game.name),
        sorted((p.player, p.fragments, p.steps) for p in store.players(game.name)),
        store.versions(game.name),
        [msgspec.structs.replace(e, ended=0.0) for e in store.episodes(game.name)],
        [msgspec.structs.replace(e, ended=0.0) for e in store.newest_episodes(game.name, limit=5).episodes],
        [
            (store.episode(game.name, e.cursor) or [None, None])[1]
            for e in store.newest_episodes(game.name).episodes[:3]
        ],
    ]
