"""Play between stores: another platform's store as the source, files of one kind of store into another, and both while
a platform writes."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from test_round_trip import GAMES, play

from sparring.data import exporting, importing
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Box, Discrete, Game
from sparring.store import Store, open_store
from sparring.store.profile import Profile, Revision

GAME = GAMES[1]


def ordered(fragments: list[Fragment]) -> list[Fragment]:
    return sorted(fragments, key=lambda f: f.id)


def everything(store: Store) -> list[Fragment]:
    return ordered([f for piece in store.scan(GAME.name) for f in piece])


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("cassandra", marks=pytest.mark.real)])
def test_play_goes_from_store_to_store_and_by_files(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue("cassandra_address") if kind == "cassandra" else str(tmp_path / "one.db")
    sent = play(GAME)
    with closing(open_store(address)) as one, closing(open_store(str(tmp_path / "two.db"))) as two:
        for store in (one, two):
            store.register(GAME)
        one.append(sent)
        for expected in ((len(sent), 0), (0, len(sent))):
            got = importing.store_fragments(two, GAME, importing.read(GAME, address, "store"))
            assert (got.fragments, got.duplicates, got.rejected) == (*expected, 0)
        assert everything(two) == ordered(sent)
        two.erase(GAME.name, "ann")
        exporting.export(one, GAME.name, tmp_path / "out", "parquet")
        back = importing.store_fragments(two, GAME, importing.read(GAME, str(tmp_path / "out"), "parquet"))
        assert (back.fragments, back.duplicates) == (0, len(sent))  # what was erased does not come back
        exporting.export(two, GAME.name, tmp_path / "less", "npz")
        one.erase(GAME.name, "bob é")
        again = importing.store_fragments(one, GAME, importing.read(GAME, str(tmp_path / "less"), "npz"))
        assert (again.fragments, again.rejected) == (0, 0)


def test_other_spaces_of_the_same_name_are_refused(tmp_path: Path) -> None:
    with closing(open_store(str(tmp_path / "one.db"))) as one:
        one.register(Game(GAME.name, Box((2,)), Discrete(2)))
    with pytest.raises(InputError, match=f"{GAME.name} has schema .* there and {GAME.schema} here"):
        list(importing.read(GAME, str(tmp_path / "one.db"), "store"))


@pytest.mark.parametrize("form", ["parquet", "npz"])
def test_while_a_platform_writes(form: str, tmp_path: Path) -> None:
    """Another connection appends between the pieces of an export, and of an import."""
    path = str(tmp_path / "store.db")
    first, later = play(GAME), [play(GAME) for _ in range(4)]
    with closing(open_store(path)) as platform, closing(open_store(path, readonly=True)) as reader:
        platform.register(GAME)
        platform.append(first)
        exporting.export(
            reader, GAME.name, tmp_path / "out", form, on_progress=lambda _: platform.append(later[0]) and None
        )
        taken = [f for f in importing.read(GAME, str(tmp_path / "out"), form) if isinstance(f, Fragment)]
        assert {f.id for f in first} <= {f.id for f in taken}
        platform.erase(GAME.name, "nobody")
        others = iter(later[1:])

        def beside(source: list[Fragment]) -> object:
            for f in source:
                platform.append(next(others, []))
                yield f

        new = play(GAME)
        with closing(open_store(path)) as second:
            got = importing.store_fragments(second, GAME, beside(new))  # type: ignore[arg-type]
        assert got.fragments == len(new)
        stored = {f.id for f in everything(platform)}
        assert stored == {f.id for some in (first, *later, new) for f in some}
        assert platform.stats(GAME.name).fragments == len(stored)


def test_a_game_that_got_another_name_is_found_by_both(tmp_path: Path) -> None:
    with closing(open_store(str(tmp_path / "one.db"))) as one:
        one.register(GAME)
        one.append(play(GAME))
        one.revise(GAME.name, lambda was: Revision(was.game, Profile(names=("renamed",))))
        done = [exporting.export(one, name, tmp_path / name, "npz") for name in (GAME.name, "renamed")]
        assert done[0] == done[1]
        with pytest.raises(InputError, match="no game 'chess' in this store: it has parts"):
            exporting.find_game(one, "chess")


def test_play_of_a_game_that_has_another_name_there_is_taken_in(tmp_path: Path) -> None:
    there, here = tmp_path / "there.db", msgspec.structs.replace(GAME, name="renamed")
    sent = play(GAME)
    with closing(open_store(str(there))) as one, closing(open_store(str(tmp_path / "here.db"))) as two:
        one.register(GAME)
        one.append(sent)
        one.revise(GAME.name, lambda was: Revision(was.game, Profile(names=("renamed",))))
        two.register(here)
        got = importing.store_fragments(two, here, importing.read(here, str(there), "store"))
        assert (got.fragments, got.rejected) == (len(sent), 0)
        stored = ordered([f for piece in two.scan("renamed") for f in piece])
        assert stored == ordered([msgspec.structs.replace(f, game="renamed") for f in sent])


def test_a_reason_that_is_shown_goes_on_being_counted(tmp_path: Path) -> None:
    with closing(open_store(str(tmp_path / "store.db"))) as store:
        store.register(GAME)
        found = [f"reason {n}" for n in range(importing.REASONS + 2)] + ["reason 0"] * 3
        got = importing.store_fragments(store, GAME, iter(found))
    assert (got.rejected, got.reasons["reason 0"], got.reasons["other reasons"]) == (importing.REASONS + 5, 4, 2)
