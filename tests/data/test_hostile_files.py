"""Files that are damaged, of something else, or made to hurt: an error for people or a rejection, and little memory."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_round_trip import GAMES, play, stored

from sparring.data import csv_files, exporting, importing, limits
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Box, Discrete, Game
from sparring.store.memory import MemoryStore

POLE = GAMES[0]
OBS = np.zeros((4, 4), "<f4")
GOOD: dict[str, Any] = {"obs": OBS, "action": np.zeros(3, "<i4"), "reward": np.zeros(3, "<f4"), "steps": np.array([3])}


def imported(source: Path, form: str, game: Game = POLE) -> importing.Imported:
    store = MemoryStore()
    store.register(game)
    return importing.store_fragments(store, game, importing.read(game, str(source), form))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    np.savez(tmp_path / "a.npz", **{**GOOD, "obs": np.array([Trap()], object)})
    with pytest.raises(InputError, match="`obs` holds Python objects, which are pickled: nothing is unpickled here"):
        imported(tmp_path, "npz")
    (tmp_path / "a.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match="not a zip file"):
        imported(tmp_path, "npz")
    assert not (tmp_path / "sprung").exists()


def test_a_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 4)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("obs.npy", header.getvalue() + bytes(64))
    with pytest.raises(InputError, match=r"`obs` says \(1000000000000, 4\) × float32, and has \d+ bytes"):
        imported(tmp_path, "npz")


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", **{**GOOD, "more": np.zeros(10 << 20, "u1")})
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    monkeypatch.setattr(limits, "MOST_BYTES", 5 << 20)
    with pytest.raises(InputError, match="has 10 MiB when unpacked, at most 5"):
        imported(tmp_path, "npz")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": np.array([3.0])}, "`steps` must be a list of whole numbers"),
        ({"steps": np.array([4, -1])}, "`steps` must be a list of whole numbers"),
        ({"steps": np.array([[3]])}, "`steps` must be a list of whole numbers"),
        ({"steps": np.array([2])}, "2 steps need as many numbers"),
        ({"id": np.array([7])}, "`id` must be texts"),
        ({"player": np.array(["a", "b"])}, "`player` must be texts, one for each of 1"),
        ({"time": np.array(["now"])}, "`time` must be numbers"),
        ({"reward": np.zeros((3, 2))}, r"`reward` has the shape \(3, 2\)"),
        ({"action": np.zeros(3, "M8[s]")}, "expected numbers"),
        ({"obs": np.zeros((4, 5))}, r"expected 4 × \(4,\), got \(4, 5\)"),
        ({"obs": np.zeros((3, 4))}, "4 observations; it has 3 and 3"),
        ({"action": np.full(3, 0.5)}, "expected whole numbers"),
    ],
)
def test_npz_of_another_form(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{**GOOD, **change})
    with pytest.raises(InputError, match=why):
        imported(tmp_path, "npz")


HEAD = "obs.0,obs.1,obs.2,obs.3,action,reward,terminated,next_obs.0,next_obs.1,next_obs.2,next_obs.3\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + "1,2,3,4,0,1\n", "more or fewer values than the 11 columns"),
        (HEAD + "1,2,3,4,0,1,1,1,1,1,1,1\n", "more or fewer values"),
        (HEAD + "=1+1,2,3,4,0,1,1,1,1,1,1\n", "could not convert string to float: '=1\\+1'"),
        (HEAD + "1,2,3,4,0.5,1,1,1,1,1,1\n", "expected a whole number, got '0.5'"),
        (HEAD + "1,2,3,4,0,,1,1,1,,1\n", "could not convert"),
        (HEAD + "1,2,3,4,99999999999999999999,1,1,1,1,1,1\n", "line"),
        (HEAD.replace("obs.1", "obs.0"), "the column 'obs.0' twice"),
        ("", "has no column obs.0"),
        (HEAD + '"' + "x" * 200_000 + '",2\n', "field larger than field limit"),
        (",".join(str(i) for i in range(30_000)), "has 30000 columns, at most 20000"),
        ("x" * (5 << 20), "a line of more than 4,194,304 characters"),
    ],
)
def test_csv_of_another_form(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=why):
        imported(tmp_path, "csv")


def test_csv_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(HEAD.encode() + b"\xff\xfe\x00" * 50)
    with pytest.raises(InputError, match=r"a\.csv"):
        imported(tmp_path, "csv")


def test_what_a_spreadsheet_makes_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeff" + HEAD + "1,2,3,4,1.0,1,TRUE,1,1,1,1\n".replace("TRUE", "1"))
    assert imported(tmp_path, "csv").steps == 1


def test_no_cell_that_an_export_writes_is_a_formula(tmp_path: Path) -> None:
    exporting.export(stored(POLE, play(POLE)), "pole", tmp_path / "out", "csv")
    [file] = (tmp_path / "out").glob("*.csv")
    lines = list(__import__("csv").DictReader(file.open()))
    assert any(line["player"].startswith("'=") for line in lines)
    for line in lines:
        for name in ("player", "episode", "model", "fragment"):
            assert line[name][:1] not in csv_files.FORMULA.replace("'", "") or not line[name]


def table(**change: Any) -> Any:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(8, "<f4")), 4)
    columns = {"obs": fixed, "action": pa.array([0, 1]), "reward": pa.array([0.0, 1.0]), "next_obs": fixed}
    return pa.table({**columns, **change})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"obs": pa.array(["a", "b"])}, r"expected numbers of shape \(4,\), got string"),
        ({"obs": pa.array([[1.0], [1.0, 2.0]])}, "got 3 numbers"),
        ({"obs": pa.array([[1.0] * 4, None])}, "expected"),
        ({"action": pa.array([[0], [1, 2]])}, "expected"),
        ({"action": pa.array([0.5, 1.0])}, "expected whole numbers"),
        ({"action": pa.array([1 << 40, 1])}, "values do not fit"),
        ({"reward": pa.array(["much", "more"])}, "does not fit the game pole"),
        ({"reward": pa.array([{"a": 1}, {"a": 2}])}, "does not fit the game pole"),
        ({"step": pa.array([0.5, 1.0])}, "`step` must be whole numbers"),
        ({"version": pa.array([1e300, 1.0])}, "`version` must be whole numbers"),
        ({"obs": pa.array([[0.0] * 1_000_000, [0.0] * 4])}, "values in 2 rows, where about"),
    ],
)
def test_parquet_with_wrong_types(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    pq.write_table(table(**change), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=why):
        imported(tmp_path, "parquet")


def test_rows_of_one_endless_fragment_are_rejected_in_pieces(tmp_path: Path) -> None:
    count = 25_000
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * count, "<f4")), 4)
    same = {"fragment": pa.array(["x"] * count), "episode": pa.array(["e"] * count), "player": pa.array(["a"] * count)}
    columns = {"obs": fixed, "action": pa.array([0] * count), "reward": pa.array([0.0] * count), "next_obs": fixed}
    pq.write_table(pa.table(columns | same), tmp_path / "a.parquet")
    pieces = [f.steps for f in importing.read(POLE, str(tmp_path), "parquet") if isinstance(f, Fragment)]
    assert pieces == [10_001, 10_001, 4998]
    assert imported(tmp_path, "parquet").reasons["steps is 10001, allowed are 1..10000"] == 2


def test_the_next_row_of_another_player_is_not_where_an_action_led(tmp_path: Path) -> None:
    made = table(player=pa.array(["ann", "bob"])).drop_columns(["next_obs"])
    pq.write_table(made, tmp_path / "a.parquet")
    assert imported(tmp_path, "parquet").fragments == 0


def changed_json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    exporting.export(stored(POLE, play(POLE)), "pole", tmp_path / "out", "minari")
    return tmp_path / "out"


def test_minari_that_says_more_episodes_than_it_has(dataset: Path) -> None:
    changed_json(dataset / "data" / "metadata.json", lambda known: known | {"total_episodes": 10**12})
    with pytest.raises(InputError, match=r"says that it has 1000000000000 episodes, and number \d is not there"):
        imported(dataset, "minari")


@pytest.mark.parametrize("text", ["[]", "{}", '{"total_episodes": "many"}', "no json", '{"total_episodes": null}'])
def test_minari_without_sense(dataset: Path, text: str) -> None:
    (dataset / "data" / "metadata.json").write_text(text)
    with pytest.raises(InputError, match="is no Minari dataset"):
        imported(dataset, "minari")


@pytest.mark.parametrize(
    "change",
    [
        lambda ours: ours["fragments"][0].update(steps=-1),
        lambda ours: ours["fragments"][0].update(steps=10**9),
        lambda ours: ours["fragments"].clear(),
        lambda ours: ours["fragments"][0].update(id=7),
        lambda ours: ours.pop("player"),
        lambda ours: ours.update(fragments="all"),
    ],
)
def test_minari_whose_metadata_lie_about_an_episode(dataset: Path, change: Callable[[Any], Any]) -> None:
    def apply(known: Any) -> Any:
        change(known["sparring"])
        return known

    changed_json(dataset / "data" / "0" / "metadata.json", apply)
    got = imported(dataset, "minari")
    assert (got.rejected, got.fragments > 0) == (1, True)
    assert next(iter(got.reasons)).startswith("episode 0: ")


@pytest.mark.parametrize(
    "change",
    [
        {"observations": pa.array([[1.0]] * 3)},
        {"actions": pa.array([[0, 1]] * 3)},
        {"rewards": pa.array([[1.0, 2.0]] * 3)},
        {"rewards": pa.array(["a", "b", "c"])},
        {"terminations": pa.array(["x"] * 3).dictionary_encode()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_minari_with_odd_shapes(change: dict[str, Any], tmp_path: Path) -> None:
    good: dict[str, Any] = {"observations": pa.array([[0.0] * 4] * 3), "actions": pa.array([0] * 3)}
    good |= {"rewards": pa.array([1.0] * 3)} | {name: pa.array([False] * 3) for name in ("terminations", "truncations")}
    folder = tmp_path / "data" / "0"
    folder.mkdir(parents=True)
    (tmp_path / "data" / "metadata.json").write_text(
        '{"total_episodes": 1, "data_format": "arrow", "jpeg_encoding": false}'
    )
    (folder / "metadata.json").write_text("{}")
    for columns, fragments in ((good, 1), ({**good, "rewards": pa.array([[1.0]] * 3)}, 1), (good | change, None)):
        made = pa.RecordBatch.from_pydict(columns)
        with pa.OSFile(str(folder / "part-0.arrow"), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
            writer.write_batch(made)
        got = imported(tmp_path, "minari")
        assert got.fragments + got.rejected == 1
        assert fragments is None or got.fragments == fragments


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "expected an object with columns"),
        ("7", "expected an object with columns"),
        ('{"obs": "BCJN", "actions": [0], "rewards": [0]}', "compressed by pickling"),
        ('{"obs": [[0,0,0,0]], "actions": [0], "rewards": [0, 1], "new_obs": [[0,0,0,0]]}', "different lengths"),
        ('{"obs": [[0,0,0]], "actions": [0], "rewards": [0]}', r"rows of shape \(4,\)"),
        ('{"obs": 7, "actions": [0], "rewards": [0]}', "line 1"),
        ("[" * 100_000, "line 1"),
        ("{", "line 1"),
    ],
)
def test_rllib_lines_of_another_form(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(line)
    with pytest.raises(InputError, match=why):
        imported(tmp_path, "rllib")


def test_rllib_episodes_that_are_none(tmp_path: Path) -> None:
    import msgspec

    state = {name: {"data": 7} for name in ("observations", "actions", "rewards")}
    items = [b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode(state), b""]
    pq.write_table(pa.table({"item": pa.array(items)}), tmp_path / "a.parquet")
    got = imported(tmp_path, "rllib")
    assert (got.fragments, got.rejected) == (0, 4)


@pytest.mark.parametrize("form", exporting.FORMATS)
def test_damaged_files_are_reported_and_never_crash(form: str, tmp_path: Path) -> None:
    """Bytes changed and files cut at random places: an InputError, or some fragments that are rejected or the same."""
    rng, game = np.random.default_rng(5), GAMES[0]
    exporting.export(stored(game, play(game)), game.name, tmp_path / "out", form)
    files = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file() and p.name not in ("game.json",)]
    failed = 0
    for _ in range(60):
        file = files[rng.integers(len(files))]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        if rng.random() < 0.3:
            del damaged[rng.integers(len(damaged)) :]
        else:
            for at in rng.integers(len(damaged), size=rng.integers(1, 6)):
                damaged[at] = rng.integers(256)
        file.write_bytes(damaged)
        try:
            failed += bool(imported(tmp_path / "out", form, game).rejected)
        except InputError:
            failed += 1
        file.write_bytes(whole)
    assert failed
    assert imported(tmp_path / "out", form, game).rejected == 0


def test_play_of_another_game_is_not_taken(tmp_path: Path) -> None:
    exporting.export(stored(POLE, play(POLE)), "pole", tmp_path / "out", "csv")
    source = str(tmp_path / "out")
    with pytest.raises(InputError, match="holds play of 'pole', whose observation and action differ from other's"):
        importing.require_same_game(Game("other", Box((2,)), Discrete(3)), source)
    same = Game("other", POLE.observation, POLE.action)
    with pytest.raises(InputError, match="holds play of 'pole', not of 'other': --other-game"):
        importing.require_same_game(same, source)
    importing.require_same_game(same, source, other=True)
    importing.require_same_game(POLE, source)


@pytest.mark.parametrize("form", exporting.FORMATS)
def test_an_export_that_is_cut_short_leaves_nothing_that_looks_whole(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "PART_STEPS", 2)

    class Cut(MemoryStore):
        def scan(self, *args: Any, **options: Any) -> Any:
            yield from super().scan(*args, **options)
            assert [p.name.startswith("out.unfinished-") for p in tmp_path.iterdir()] == [True]
            raise KeyboardInterrupt

    store = Cut()
    store.register(POLE)
    store.append(play(POLE))
    with pytest.raises(KeyboardInterrupt):
        exporting.export(store, "pole", tmp_path / "out", form)
    assert list(tmp_path.iterdir()) == []
    killed = tmp_path / "out.unfinished-abc"  # by a signal that leaves no time to clear up
    killed.mkdir()
    assert exporting.unfinished(tmp_path / "out") == [killed]
    with pytest.raises(InputError, match="was cut short: export again"):
        imported(killed, form)
