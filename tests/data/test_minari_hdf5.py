"""Minari's HDF5 datasets, laid out as minari writes them: a group per episode, of any version, and damaged ones."""

import io
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from test_hostile_files import imported
from test_round_trip import GAMES, random

from sparring.data import importing
from sparring.errors import InputError
from sparring.experience import Fragment
from sparring.games import Box, Discrete, Game
from sparring.games.spec import Dict

POLE, PARTS, PICTURE = GAMES[:3]
JPEG = h5py.vlen_dtype(np.uint8)


def put(group: h5py.Group, name: str, space: Any, values: Any) -> None:
    """A Dict is a group of datasets."""
    if isinstance(space, Dict):
        for part, each in space.fields.items():
            put(group.require_group(name), part, each, values[part])
    else:
        group.create_dataset(name, data=values, chunks=True, maxshape=(None, *values.shape[1:]))


def dataset(home: Path, game: Game, lengths: list[int], **meta: Any) -> list[dict[str, Any]]:
    """Episodes that end in turn by the game and by a limit; the dataset lies in `home`/data, as minari's do."""
    rng, made = np.random.default_rng(5), []
    (home / "data").mkdir(parents=True)
    with h5py.File(home / "data" / "main_data.hdf5", "w", track_order=True) as file:
        for number, steps in enumerate(lengths):
            obs, action = random(game.observation, steps + 1, rng), random(game.action, steps, rng)
            ends = np.arange(steps) == steps - 1
            columns = {"rewards": rng.normal(size=steps), "terminations": ends & (number % 2 == 0)}
            columns["truncations"] = ends & (number % 2 == 1)
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "total_steps": steps, "seed": number})
            put(group, "observations", game.observation, obs)
            put(group, "actions", game.action, action.astype(np.int64) if game.action == Discrete(2) else action)
            for name, values in columns.items():
                group.create_dataset(name, data=values)
            group.create_group("infos")
            made.append({"obs": obs, "action": action, **columns})
    known = {"total_episodes": len(lengths), "total_steps": sum(lengths), "data_format": "hdf5", **meta}
    (home / "data" / "metadata.json").write_text(json.dumps(known))
    return made


def read(game: Game, home: Path) -> list[Fragment]:
    found = list(importing.read(game, str(home), "minari", player="expert"))
    assert all(isinstance(f, Fragment) for f in found), found
    return [f for f in found if isinstance(f, Fragment)]


@pytest.mark.parametrize("game", [POLE, PARTS, PICTURE], ids=lambda game: game.name)
def test_episodes_are_read_as_they_were(game: Game, tmp_path: Path) -> None:
    """Pictures, too, of versions that knew no JPEG: nothing in the metadata says so."""
    sent = dataset(tmp_path, game, [4, 1, 7])
    found = read(game, tmp_path)
    assert [(f.steps, f.terminated, f.truncated) for f in found] == [
        (4, True, False),
        (1, False, True),
        (7, True, False),
    ]
    for fragment, expected in zip(found, sent, strict=True):
        columns = fragment.columns(game)
        assert np.array_equal(columns.obs, expected["obs"])
        assert np.array_equal(columns.action, expected["action"])
        assert np.array_equal(columns.reward, expected["rewards"].astype("f4"))
        assert (fragment.player, fragment.start, fragment.model) == ("expert", 0, None)
    assert {f.id for f in read(game, tmp_path)} == {f.id for f in found}
    assert imported(tmp_path, "minari", game).fragments == 3


def test_long_episodes_become_several_fragments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparring.data.minari_files.longest", lambda game: 3)
    dataset(tmp_path, POLE, [7])
    found = read(POLE, tmp_path)
    assert [(f.start, f.steps, f.ended) for f in found] == [(0, 3, False), (3, 3, False), (6, 1, True)]
    assert len({f.episode for f in found}) == 1


def jpeg(picture: Any) -> Any:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=100, subsampling=0)
    return np.frombuffer(file.getvalue(), np.uint8)


def test_pictures_as_jpeg(tmp_path: Path) -> None:
    dataset(tmp_path, PICTURE, [3, 2], jpeg_encoding=True)
    smooth = np.add.outer(np.arange(36), np.arange(40))[..., None].repeat(3, 2).astype(np.uint8)
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "a") as file:
        for number, count, picture in ((0, 4, smooth), (1, 3, smooth[:-1])):
            group = file[f"episode_{number}"]
            del group["observations"]
            group.create_dataset("observations", (count,), JPEG)
            for i in range(count):
                group["observations"][i] = jpeg(picture)
    found = list(importing.read(PICTURE, str(tmp_path), "minari"))
    assert isinstance(found[0], Fragment)
    assert np.abs(found[0].columns(PICTURE).obs.astype(int) - smooth).max() <= 3
    assert found[1] == "episode 1: ValueError: a picture has (40, 35) pixels, the game's have (40, 36)"


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("observations", np.zeros((5, 3)), "cannot reshape"),
        ("observations", np.zeros((5, 4), "S1"), "could not convert"),
        ("actions", np.full(4, 0.5), "expected whole numbers"),
        ("rewards", np.zeros((4, 2)), "there is one for each step"),
        ("rewards", np.zeros(3), "3 rewards, 4 actions, 5 observations: there is one more of these"),
        ("terminations", np.zeros(0, bool), "out of range"),
        ("truncations", None, "'truncations' doesn't exist"),
    ],
)
def test_an_episode_with_odd_columns_is_rejected_alone(name: str, values: Any, why: str, tmp_path: Path) -> None:
    dataset(tmp_path, POLE, [4, 4])
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"][name]
        if values is not None:
            file["episode_0"].create_dataset(name, data=values)
    got = imported(tmp_path, "minari")
    assert (got.fragments, got.rejected) == (1, 1)
    [reason] = got.reasons
    assert re.search(why, reason), reason


def test_what_says_that_it_is_enormous_is_not_read(tmp_path: Path) -> None:
    dataset(tmp_path, POLE, [4, 4])
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"]["observations"]
        file["episode_0"].create_dataset("observations", (1 << 40, 4), "f4", chunks=(1024, 4), compression="gzip")
    got = imported(tmp_path, "minari")
    assert (got.fragments, got.rejected) == (1, 1)
    assert "at most 1024 are read at once" in next(iter(got.reasons))


def test_a_file_that_is_damaged_or_missing(tmp_path: Path) -> None:
    dataset(tmp_path, POLE, [4, 4])
    main = tmp_path / "data" / "main_data.hdf5"
    meta = tmp_path / "data" / "metadata.json"
    meta.write_text(meta.read_text().replace('"total_episodes": 2', '"total_episodes": 3'))
    with pytest.raises(InputError, match="says that it has 3 episodes, and number 2 is not there"):
        imported(tmp_path, "minari")
    main.write_bytes(main.read_bytes()[: main.stat().st_size // 2])
    with pytest.raises(InputError, match=r"main_data\.hdf5 cannot be read"):
        imported(tmp_path, "minari")
    main.unlink()
    with pytest.raises(InputError, match=r"main_data\.hdf5 cannot be read"):
        imported(tmp_path, "minari")


def test_a_grey_picture_of_another_size_is_no_jpeg(tmp_path: Path) -> None:
    game = Game("small", Box((8, 8), "uint8"), Discrete(2))
    dataset(tmp_path, game, [2], jpeg_encoding=True)
    assert [f.steps for f in read(game, tmp_path)] == [2]
