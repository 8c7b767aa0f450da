"""The SQLite store: what is really gone from its files after an erasure or a deletion."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from store_samples import MAZE, POLE, assert_counts, cut, everything, fragment, raw
from waiting import until

from sparring.games import Game
from sparring.store import Outcome
from sparring.store.sqlite import SqliteStore
from sparring.store.sqlite import erasing as erasing_module
from sparring.store.sqlite import writer as writer_module

STORED = Outcome.STORED


def checkpointed(db: sqlite3.Connection) -> bool:
    """Whether all of the log is in the file now. While somebody else is at it, SQLite answers (1, -1, -1)."""
    busy, frames, moved = db.execute("PRAGMA wal_checkpoint").fetchone()
    return not busy and bool(frames == moved)


class TestErased:
    def test_a_player_is_in_no_file_any_more(self, path: Path, store: SqliteStore) -> None:
        """Names, ids and observations; after fragments of all sizes, interleaved with others', and across restarts."""
        store.register(MAZE)
        rng = np.random.default_rng(5)
        marks: dict[str, list[bytes]] = {f"player-{i}-of-the-test": [] for i in range(12)}
        for _ in range(120):
            batch = []
            for player in rng.choice(list(marks), 4).tolist():
                game = (POLE, MAZE)[rng.integers(2)]
                lengths = rng.choice([1, 3, 30, 300, 1500], 3).tolist()
                parts = cut(lengths, game=game, player=player)
                batch += parts[: rng.integers(1, 4)]
                marks[player] += [f.id.encode() for f in parts] + [f.episode.encode() for f in parts[:1]]
                marks[player] += [part[at : at + 16] for f in parts for part in (f.obs,) for at in (0, len(part) // 2)]
            store.append(batch)
            store.quarantine("pole", player, "an id", f"{player} sent NaN")
        kept = ["player-0-of-the-test", "player-1-of-the-test"]
        for player in marks:
            if player not in kept:
                store.erase("pole", player)
                store.erase("maze", player)
        files = b"".join(p.read_bytes() for p in path.parent.iterdir())
        for player, traces in marks.items():
            left = [trace for trace in (player.encode(), *traces) if trace in files]
            assert bool(left) == (player in kept), f"{len(left)} of {len(traces) + 1} traces of {player}"
        for game in (POLE, MAZE):
            assert_counts(store, game)

    def test_appends_go_on_while_the_files_are_cleaned_of_what_was_erased(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Counted from when the player's rows are gone until `erase` returns: rewriting the whole file at once, nobody
        could write in that time."""
        monkeypatch.setattr(writer_module, "CLEANED", 16, raising=False)
        for _ in range(40):
            store.append([fragment(400, player=("ann", "eve")[i % 2]) for i in range(100)])
        during = 0
        with ThreadPoolExecutor(1) as pool:
            erased = pool.submit(store.erase, "pole", "eve")
            while not erased.done():
                assert store.append([fragment(player="bob")]) == [STORED]
                gone = all(p.player != "eve" for p in store.players("pole"))
                during += gone and not erased.done()
            assert erased.result() == 2000
        assert during >= 20
        assert_counts(store)
        with raw(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    def test_an_erased_player_gives_room_back_to_the_disk(self, path: Path, store: SqliteStore) -> None:
        for _ in range(20):
            store.append([fragment(400, player=("ann", "eve")[i % 5 > 0]) for i in range(100)])
        with raw(path) as db:
            until(lambda: checkpointed(db))  # the store's thread may be at it, too
        before = path.stat().st_size
        store.erase("pole", "eve")
        assert path.stat().st_size < before / 2
        assert {f.player for f in everything(store, limit=1000)} == {"ann"}
        assert_counts(store)

    def test_files_are_clean_and_whole_after_many_erasures_among_appends(self, path: Path, store: SqliteStore) -> None:
        store.register(MAZE)
        stop, rng = threading.Event(), np.random.default_rng(9)
        kept = [0]

        def play() -> None:
            while not stop.is_set():
                store.append([fragment(int(steps), MAZE, player="kept") for steps in (1, 30, 300)])
                kept[0] += 3

        with ThreadPoolExecutor(2) as pool:
            players = [pool.submit(play) for _ in range(2)]
            for turn in range(15):
                sent = [
                    fragment(int(rng.choice([1, 30, 300, 1500])), (POLE, MAZE)[i % 2], player=f"gone-{turn}-of-it")
                    for i in range(60)
                ]
                store.append(sent)
                assert store.erase("pole", f"gone-{turn}-of-it") + store.erase("maze", f"gone-{turn}-of-it") == 60
                if turn % 5 == 4:
                    store.delete_game("pole")
                    store.register(POLE)
            stop.set()
            for player in players:
                player.result(60)
        until(lambda: b"gone-" not in b"".join(p.read_bytes() for p in path.parent.iterdir()))
        assert store.stats("maze").fragments == kept[0]
        assert_counts(store, MAZE)
        with raw(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    def test_a_deletion_that_was_interrupted_is_finished_by_the_next_process(
        self, path: Path, store: SqliteStore
    ) -> None:
        store.register(MAZE)
        store.append([fragment(100, player="eve-of-the-test") for _ in range(50)] + [fragment(game=MAZE)])
        store._writer.call(lambda db: erasing_module.doom(db, "pole"))  # type: ignore[union-attr]
        store.close()
        with closing(SqliteStore(path)) as again:
            again.register(POLE)
            assert again.append([fragment(id="new")]) == [STORED]
            until(lambda: not any(b"eve-of-the-test" in p.read_bytes() for p in path.parent.iterdir()))
            assert [f.id for f in everything(again)] == ["new"]
            assert_counts(again)

    def test_the_next_process_knows_which_games_were_deleted(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(erasing_module, "DELETED", 3)
        for i in range(5):
            game = Game(f"game-{i}", POLE.observation, POLE.action)
            store.register(game)
            store.delete_game(game.name)
        store.register(game)
        store.close()
        with closing(SqliteStore(path)) as again:
            assert [again.deleted(f"game-{i}") for i in range(5)] == [False, False, True, True, False]
            assert not again.deleted("pole")

    def test_a_file_of_this_format_that_remembers_no_deletions_begins_to(self, path: Path, store: SqliteStore) -> None:
        store.close()
        with raw(path) as db:
            db.execute("DROP TABLE deleted")
        with closing(SqliteStore(path)) as again:
            again.delete_game("pole")
            assert again.deleted("pole")

    def test_play_that_comes_again_is_not_taken_for_rows_of_an_interrupted_deletion(
        self, path: Path, store: SqliteStore
    ) -> None:
        sent = [fragment(100) for _ in range(50)]
        store.append(sent)
        store._writer.call(lambda db: erasing_module.doom(db, "pole"))  # type: ignore[union-attr]
        store.register(POLE)
        assert store.append(sent) == [STORED] * 50
        assert store.append(sent) == [Outcome.DUPLICATE] * 50
        store.close()
        with closing(SqliteStore(path)) as again:
            until(lambda: not again._writer.call(erasing_module.raze))  # type: ignore[union-attr]
            assert everything(again) == sent
            assert_counts(again)
            assert_counts(again, MAZE)

    def test_a_lot_takes_several_transactions_and_others_get_through(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(erasing_module, "ERASE", 5000)
        store.append([fragment(100, player=("ann", "eve")[i % 2]) for i in range(100)])
        with ThreadPoolExecutor(1) as pool:
            erased = pool.submit(store.erase, "pole", "eve")
            for _ in range(20):
                store.append([fragment()])
            assert erased.result(60) == 50
        assert {f.player for f in everything(store)} == {"ann"}
        assert store.stats("pole").fragments == 70
        assert_counts(store)

    def test_a_reader_in_the_way_only_delays_it(self, path: Path, store: SqliteStore) -> None:
        store.append([fragment(player="eve-of-the-test")])
        with raw(path) as slow:
            slow.execute("BEGIN")
            slow.execute("SELECT count(*) FROM fragment").fetchone()
            assert store.erase("pole", "eve-of-the-test") == 1
            slow.execute("COMMIT")
        until(lambda: not any(b"eve-of-the-test" in p.read_bytes() for p in path.parent.iterdir()))
