"""Checkpoints: the same bits back, damage noticed, and always one to go on from, whenever the process is killed."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparring.errors import InputError
from sparring.experience import Columns, new_id, pack
from sparring.games import Box, Discrete, Game
from sparring.networks.spec import Conv, Dense
from sparring.registry.registry import Registry
from sparring.runs import checkpoint
from sparring.store.memory import MemoryStore
from sparring.trainer.process import GameTrainer, Settings

META = {"steps": 12, "name": "Zoë", "lr": 1e-05, "rng": {"state": 2**100, "flags": [True, None]}, "mean": -0.1}


class State(NamedTuple):
    params: dict[str, Any]
    optimiser: Any
    count: Any


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((3, 2)).astype("f4"),
        "view": np.arange(24.0).reshape(4, 6)[::2, ::-1].T,  # not contiguous
        "scalar": np.float32(0.1),
        "zero-d": np.array(7, np.int64),
        "empty": np.empty((0, 3), np.float32),
        "bool": np.array([True, False]),
        "key": np.array([1, 2**32 - 1], np.uint32),
        "bytes": np.arange(256, dtype=np.uint8),
        "odd": np.array([np.nan, np.inf, -0.0, 5e-324]),
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Bit by bit, with types and shapes."""

    def bits(named: dict[str, Any]) -> dict[str, Any]:
        return {k: (np.asarray(v).dtype, np.shape(v), np.asarray(v).tobytes()) for k, v in named.items()}

    return bits(left) == bits(right)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a checkpoint with `arrays()` and META is."""
    checkpoint.save(tmp_path / "deep" / "checkpoint", arrays(), META)
    return tmp_path / "deep" / "checkpoint"


def test_the_same_bits_come_back(path: Path) -> None:
    found, meta = checkpoint.load(path)
    assert same(found, arrays())
    assert meta == META
    assert type(meta["rng"]["state"]) is int


def test_the_next_one_takes_its_place_and_keeps_it_as_old(path: Path) -> None:
    for n in (1, 2):
        checkpoint.save(path, {"n": np.array(n)}, {"n": n})
        assert checkpoint.load(path)[1] == {"n": n}
    assert checkpoint.load(path.with_name("checkpoint.old"))[1] == {"n": 1}
    assert sorted(p.name for p in path.parent.iterdir()) == ["checkpoint", "checkpoint.old"]


# Trees


def tree(width: int = 4) -> State:
    params = {"dense": {"w": jnp.arange(2.0 * width).reshape(2, width), "b": jnp.zeros(width)}, "log": [jnp.ones(())]}
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)))
    state = optimiser.init(params)
    _, state = optimiser.update(params, state, params)
    return State(params, (state, optax.EmptyState()), jnp.array(3, jnp.uint32))


def test_a_tree_with_an_optimiser_in_it_comes_back_bit_by_bit(tmp_path: Path) -> None:
    here = tree()
    flat = checkpoint.flatten(here, "state")
    assert all(name.startswith("state") for name in flat)
    checkpoint.save(tmp_path / "c", {**flat, "normaliser.mean": np.ones(2)}, {})
    found, _ = checkpoint.load(tmp_path / "c")
    back = checkpoint.unflatten(jax.tree.map(jnp.zeros_like, here), found, "state")
    assert type(back) is State
    assert type(back.optimiser[0][1][0]) is type(here.optimiser[0][1][0])  # Adam's named tuple
    assert same(checkpoint.flatten(back, "state"), flat)


def test_two_trees_live_side_by_side() -> None:
    both = {
        **checkpoint.flatten({"w": np.ones(2)}, "a"),
        **checkpoint.flatten({"w": np.zeros(3), "v": np.ones(1)}, "b"),
    }
    assert checkpoint.unflatten({"w": np.zeros(2)}, both, "a")["w"].tolist() == [1, 1]
    assert checkpoint.unflatten({"w": np.ones(3), "v": np.zeros(1)}, both, "b")["v"].tolist() == [1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (tree(width=5), "is float32(4,)"),
        (tree()._replace(count=jnp.array(3, jnp.int32)), ".count is uint32()"),
        (tree()._replace(count=jnp.array([3], jnp.uint32)), ".count is uint32()"),
        (tree()._replace(params={**tree().params, "more": jnp.ones(2)}), "['more'] is missing"),
        (tree()._replace(params={"dense": tree().params["dense"]}), "['log'][0] as well"),
        (tree()._replace(optimiser=optax.sgd(0.1).init(tree().params)), "as well"),
        (tuple(tree()), "is missing"),
    ],
)  # fmt: skip
def test_a_tree_of_another_form_is_refused(template: Any, message: str) -> None:
    with pytest.raises(InputError, match="of another network or algorithm") as caught:
        checkpoint.unflatten(template, checkpoint.flatten(tree(), "state"), "state")
    assert message in str(caught.value)


# Damage


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors"])
def test_no_flipped_bit_is_loaded(path: Path, name: str) -> None:
    """Each of them. A bit may be one that says nothing (1e-05 and 1E-05): then what is loaded is what was saved."""
    file = path / name
    good = file.read_bytes()
    refused = 0
    for bit in range(8 * len(good)):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(changed)
        try:
            found, meta = checkpoint.load(path)
        except InputError:
            refused += 1
            continue
        assert same(found, arrays())
        assert meta == META
    assert refused >= 8 * len(good) - 3


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors"])
def test_no_file_cut_short_is_loaded(path: Path, name: str) -> None:
    good = (path / name).read_bytes()
    for length in {0, 1, len(good) // 2, len(good) - 1}:
        (path / name).write_bytes(good[:length])
        with pytest.raises(InputError, match="damaged"):
            checkpoint.load(path)


def test_the_arrays_of_another_checkpoint_are_refused(path: Path, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "other", {"w": np.zeros((3, 2), "f4")}, META)
    shutil.copy(tmp_path / "other" / "state.safetensors", path)
    with pytest.raises(InputError, match="does not match its hash"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "text",
    [
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{}",
        b'{"sha256": 1}',
        b"\xff",
        b'{"sha256": "", "state_sha256": ""}',
        b"[" * 100_000,
    ],
)
def test_a_page_that_is_no_page(path: Path, text: bytes) -> None:
    (path / "checkpoint.json").write_bytes(text)
    with pytest.raises(InputError, match="damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("page", "data", "why"),
    [
        ({"format": 1, "meta": {}}, b"", "damaged .state.safetensors"),
        ({"format": 1, "meta": {}}, b"\xff" * 500, "damaged .state.safetensors"),
        ({"format": 1, "meta": {}}, None, "damaged .state.safetensors"),
        ({"format": 1, "meta": []}, b"", "has no meta"),
        ({"meta": {}}, b"", "has format None"),
    ],
)
def test_a_page_with_the_right_hash_may_be_wrong(
    path: Path, page: dict[str, Any], data: bytes | None, why: str
) -> None:
    if data is None:  # a type that NumPy lacks
        header = b'{"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
        data = len(header).to_bytes(8, "little") + header + b"\0"
    page = page | {"state_sha256": hashlib.sha256(data).hexdigest()}
    page["sha256"] = hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(page))
    (path / "state.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=why):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors"])
def test_a_missing_file_is_named(path: Path, name: str) -> None:
    (path / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        checkpoint.load(path)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert not checkpoint.exists(tmp_path / "none")
    with pytest.raises(InputError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load(tmp_path / "file")


def test_another_format_is_told_apart_from_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 2)
        checkpoint.save(path, arrays(), META)
    with pytest.raises(InputError, match=r"has format 2, this version of Sparring reads 1"):
        checkpoint.load(path)


# Kills


def test_killed_between_the_renames_the_old_one_is_used(path: Path) -> None:
    checkpoint.save(path, {"n": np.array(2)}, {"n": 2})
    shutil.copytree(path, path.with_name("checkpoint.new"))  # complete, but not in its place yet
    shutil.rmtree(path.with_name("checkpoint.old"))
    path.rename(path.with_name("checkpoint.old"))
    assert checkpoint.exists(path)
    assert checkpoint.load(path)[1] == {"n": 2}
    checkpoint.save(path, {"n": np.array(3)}, {"n": 3})
    assert checkpoint.load(path)[1] == {"n": 3}
    checkpoint.save(path, {"n": np.array(4)}, {"n": 4})
    assert checkpoint.load(path)[1] == {"n": 4}


def test_killed_while_writing_the_one_in_place_is_used(path: Path) -> None:
    unfinished = path.with_name("checkpoint.new")
    unfinished.mkdir()
    (unfinished / "state.safetensors").write_bytes(b"half")
    assert checkpoint.load(path)[1] == META
    checkpoint.save(path, {}, {"n": 1})
    assert checkpoint.load(path) == ({}, {"n": 1})
    assert not unfinished.exists()


SAVER = """
import sys
from pathlib import Path
import numpy as np
from sparring.runs import checkpoint

path = Path(sys.argv[1])
n = int(checkpoint.load(path)[1]["n"]) if checkpoint.exists(path) else 0
while True:
    n += 1
    checkpoint.save(path, {"n": np.full(20_000, n)}, {"n": n})
    print(n, flush=True)
"""


@pytest.mark.real
def test_killed_at_any_moment_there_is_a_checkpoint_not_older_than_the_last_that_was_told(tmp_path: Path) -> None:
    path, rng, newest = tmp_path / "checkpoint", np.random.default_rng(0), 0
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            for _ in range(int(rng.integers(1, 6))):
                saved = int(saver.stdout.readline())
            time.sleep(rng.uniform(0, 0.01))  # another moment of the next save each time
            saver.send_signal(signal.SIGKILL)
            saved = max([saved, *(int(line) for line in saver.stdout.read().split("\n")[:-1])])
        found, meta = checkpoint.load(path)
        assert meta["n"] in (saved, saved + 1)
        assert meta["n"] > newest
        assert found["n"].tolist() == [meta["n"]] * 20_000
        newest = meta["n"]


def test_the_page_can_be_read_by_people(path: Path) -> None:
    page = json.loads((path / "checkpoint.json").read_text())
    assert (page["format"], page["meta"]["steps"]) == (1, 12)


PIXELS = Game("pixels", Box((8, 8, 3), "uint8", 0, 255), Discrete(2))


def test_a_live_trainer_of_images_convolves_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    store, registry = MemoryStore(), Registry(tmp_path / "registry")
    store.register(PIXELS)
    rng = np.random.default_rng(0)

    def trainer() -> GameTrainer:
        settings = Settings(algorithm="dqn", hyperparameters={"learning_starts": 50, "batch": 8, "replay": 500})
        return GameTrainer(store, registry, tmp_path / "trainer", PIXELS, settings)

    first = trainer()
    assert [type(layer) for layer in first.learner.policy().layers] == [Conv, Dense]
    columns = Columns(
        rng.integers(0, 255, (201, 8, 8, 3)).astype(np.uint8),
        rng.integers(0, 2, 200).astype("<i4"),
        np.ones(200, "<f4"),
    )
    store.append(
        [pack(PIXELS, columns, id=new_id(), player="p", episode="e", start=0, time=time.time(), truncated=True)]
    )
    first.turn()
    first.checkpoint()
    again = trainer()
    assert again.learner.updates == first.learner.updates > 0
    assert again.learner.policy().layers == first.learner.policy().layers


def test_hyperparameters_that_followed_from_a_game_are_remembered(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    chosen = checkpoint.hyperparameters(tmp_path / "new", "dqn", PIXELS, {"lr": 0.5})
    assert chosen["layers"][0]["layer"] == "conv"
    assert chosen["lr"] == 0.5
    (tmp_path / "old").mkdir()
    checkpoint.save(tmp_path / "old" / "checkpoint", arrays(), META)  # of a version that knew one network
    for _ in range(2):
        chosen = checkpoint.hyperparameters(tmp_path / "old", "dqn", PIXELS, {})
        assert [layer["layer"] for layer in chosen["layers"]] == ["dense", "dense"]
        assert chosen["layers"][0]["units"] == 64
    wide = Game("pixels", Box((8,)), Discrete(2))  # declared anew: what followed from the other spaces does not
    assert checkpoint.hyperparameters(tmp_path / "new", "dqn", wide, {})["layers"][0]["layer"] == "dense"
    (tmp_path / "old" / "algorithm.json").write_text("[]")
    with pytest.raises(InputError, match=r"algorithm\.json is damaged"):
        checkpoint.hyperparameters(tmp_path / "old", "dqn", PIXELS, {})
