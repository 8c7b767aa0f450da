"""What is exported comes back as it was, in every format and for every space; once more changes nothing."""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sparring.data import exporting, importing
from sparring.data.selection import Selection, parse_since
from sparring.errors import InputError
from sparring.experience import Columns, Fragment, new_id
from sparring.experience.fragment import pack
from sparring.games import Box, Discrete, Game
from sparring.games.spec import Dict, MultiDiscrete
from sparring.store.memory import MemoryStore

GAMES = [
    Game("pole", Box((4,)), Discrete(2)),
    Game("parts", Dict({"at": Box((2, 3)), "hp": Box((), "float64"), "kind": Discrete(3)}), MultiDiscrete((3, 4))),
    Game("picture", Box((36, 40, 3), "uint8"), Box((2,), low=-1.0, high=1.0)),
    Game(
        "widths",
        Dict(
            {
                "on": Box((3,), "bool"),
                "far": Box((2,), "int64"),
                "fine": Box((2, 2), "float64"),
                "tiny": Box((), "int8"),
                "grey": Box((32, 33), "uint8"),
            }
        ),
        Box((), "float64", low=-1.0, high=1.0),
    ),
    Game("counts", MultiDiscrete((5, 6)), Discrete(3, start=1)),
]


def random(space: Any, count: int, rng: np.random.Generator) -> Any:
    out = np.zeros(count, space.element)
    if isinstance(space, Dict):
        for name, part in space.fields.items():
            out[name] = random(part, count, rng)
    elif isinstance(space, Discrete):
        out[:] = rng.integers(space.start, space.start + space.n, count)
    elif isinstance(space, MultiDiscrete):
        out[:] = rng.integers(0, space.nvec, (count, len(space.nvec)))
    elif np.dtype(space.dtype).kind in "iub":
        least, most = (0, 1) if space.dtype == "bool" else (np.iinfo(space.dtype).min, np.iinfo(space.dtype).max)
        out[:] = rng.integers(least, most, out.shape, endpoint=True, dtype=np.int64)
    else:
        out[:] = rng.uniform(-1, 1, out.shape)
    return out


def play(game: Game) -> list[Fragment]:
    """Of a person and of bots: terminated, truncated, and an episode whose beginning and end are missing."""
    rng, found = np.random.default_rng(3), []
    for player, lengths, start, end, actor in (
        ("ann", [3, 2], 0, "terminated", {}),
        ("bob é", [4], 0, "truncated", {"model": "bot", "version": 0}),
        ('=1+1,"x"', [2, 5], 7, None, {"model": "@other", "version": (1 << 53) - 1}),
        ("'-é", [1], 0, "truncated", {"model": "'", "version": 1}),
    ):
        total, episode = sum(lengths), new_id()
        obs, action = random(game.observation, total + 1, rng), random(game.action, total, rng)
        reward = rng.normal(size=total).astype("<f4")
        log_prob = -rng.random(total).astype("<f4") if actor else None
        at = 0
        for length in lengths:
            last = at + length
            part = None if log_prob is None else log_prob[at:last]
            ends = {end: True} if end and last == total else {}
            fields = {
                "id": new_id(),
                "player": player,
                "episode": episode,
                "start": start + at,
                "time": time.time() - at * 0.1,
            }
            columns = Columns(obs[at : last + 1], action[at:last], reward[at:last], part)
            found.append(pack(game, columns, **fields, **ends, **actor))
            at = last
    return found


def everything(store: MemoryStore, game: Game) -> list[Fragment]:
    return sorted((f for piece in store.scan(game.name) for f in piece), key=lambda f: f.id)


def stored(game: Game, fragments: list[Fragment]) -> MemoryStore:
    store = MemoryStore()
    store.register(game)
    store.append(fragments)
    return store


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
@pytest.mark.parametrize("form", exporting.FORMATS)
def test_play_comes_back_as_it_was(game: Game, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (game.name, form) == ("picture", "csv"):
        with pytest.raises(InputError, match="4320 numbers: use --format parquet"):
            exporting.export(stored(game, play(game)), game.name, tmp_path / "out", form)
        return
    monkeypatch.setattr(exporting, "PART_STEPS", 6)  # several files
    sent = play(game)
    done = exporting.export(stored(game, sent), game.name, tmp_path / "out", form)
    assert (done.fragments, done.steps) == (len(sent), sum(f.steps for f in sent))
    target = stored(game, [])
    for expected in ((len(sent), 0), (0, len(sent))):
        got = importing.store_fragments(target, game, importing.read(game, str(tmp_path / "out"), form))
        assert (got.fragments, got.duplicates, got.rejected, got.reasons) == (*expected, 0, {})
    assert everything(target, game) == sorted(sent, key=lambda f: f.id)


def test_what_is_rejected_is_counted_and_reported(tmp_path: Path) -> None:
    game = GAMES[0]
    good, bad = play(game)[:2]
    wild = msgspec.structs.replace(bad, reward=np.full(bad.steps, 1e9, "<f4").tobytes())
    old = msgspec.structs.replace(good, time=1000.0)
    exporting.export(stored(game, [old, wild]), game.name, tmp_path / "out", "npz")
    target = stored(game, [])
    got = importing.store_fragments(target, game, importing.read(game, str(tmp_path / "out"), "npz"))
    assert (got.fragments, got.rejected) == (1, 1)  # old play may come in
    [reason] = got.reasons
    assert "reward reaches 1e+09" in reason
    assert [q.id for q in target.quarantined(game.name)] == [wild.id]


def test_a_selection_and_the_age_of_play() -> None:
    sent = play(GAMES[0])
    assert [f in Selection(people=True) for f in sent] == [True, True, False, False, False, False]
    assert [f in Selection(people=False, version=1) for f in sent] == [False, False, False, False, False, True]
    assert [f in Selection(player="bob é", model="bot") for f in sent] == [False, False, True, False, False, False]
    assert parse_since("2d", now=200_000.0) == 200_000.0 - 172_800
    assert parse_since("1970-01-02") == 86_400.0
    assert parse_since("1970-01-02T02:00+01:00") == 86_400.0 + 3600
    assert parse_since("90 min", now=5400.0) == parse_since("1.5h", now=5400.0) == 0.0
    for wrong in ("yesterday", "7", "7 days", "-1d", "", "2026-13-01"):
        with pytest.raises(InputError, match="an age like 7d"):
            parse_since(wrong)


def test_a_directory_with_something_in_it_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InputError, match="has something in it"):
        exporting.export(stored(GAMES[0], []), "pole", tmp_path, "npz")


def test_rows_of_others_get_ids_that_follow_from_their_content(tmp_path: Path) -> None:
    lines = ["obs.0,obs.1,obs.2,obs.3,action,reward,terminated,next_obs.0,next_obs.1,next_obs.2,next_obs.3"]
    lines += ["0,0,0,0,1,1,0,,,,", "1,0,0,0,0,1,1,2,0,0,0", "5,0,0,0,0,1,0,,,,"]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    game, ids = GAMES[0], []
    for _ in range(2):
        found = list(importing.read(game, str(tmp_path), "csv", player="eve"))
        [whole] = [f for f in found if isinstance(f, Fragment)]
        assert (whole.player, whole.steps, whole.terminated, whole.start) == ("eve", 2, True, 0)
        assert next(text for text in found if isinstance(text, str)).endswith("the last observation is missing")
        ids.append(whole.id)
    assert ids[0] == ids[1]
