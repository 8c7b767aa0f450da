"""`sparring dataset`: whose play it is, with which settings, and what is refused before anything is played."""

import io
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recorded_play import record

from sparring.edge import dataset
from sparring.errors import InputError
from sparring.experiment import Checkpoints, Experiment, Stop
from sparring.export import weights
from sparring.games import Box, Discrete, Game, catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense
from sparring.training import loop

MakePolicy = Callable[..., Policy]
Sparring = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sparring(monkeypatch: pytest.MonkeyPatch, command_line: Sparring, tmp_path: Path) -> Sparring:
    monkeypatch.chdir(tmp_path)
    return command_line


@pytest.fixture
def mine(random_policy: MakePolicy, tmp_path: Path) -> str:
    policy = random_policy(catalog.load("CartPole-v1"), (Dense(8, "tanh"),), Categorical())
    (tmp_path / "mine.safetensors").write_bytes(weights.save(policy))
    return "mine.safetensors"


def game_of(path: Path) -> Game:
    with np.load(path) as arrays:
        return Game.from_json(str(arrays["game"]))


def test_a_game_is_played_as_it_is_set(mine: str, sparring: Sparring, tmp_path: Path) -> None:
    words = ("dataset", "CartPole-v1", "set.npz", "--samples", "30", "--set", "game.sutton_barto_reward=true")
    assert sparring(*words)[0] == 0
    assert game_of(tmp_path / "set.npz").env_kwargs == {"sutton_barto_reward": True}
    # The game is the one that was named, also where a policy plays that was made for another form of it.
    assert sparring(*words, "--policy", mine)[0] == 0
    assert game_of(tmp_path / "set.npz").env_kwargs == {"sutton_barto_reward": True}


def test_a_runs_game_is_played_as_it_is_set(sparring: Sparring, tmp_path: Path) -> None:
    layers = [{"layer": "dense", "units": 8}]
    made = {"name": "ppo", "layers": layers, "steps": 64, "minibatch": 32, "epochs": 1}
    stop, checkpoint = Stop(iterations=1), Checkpoints(every=1)
    loop.train(Experiment("CartPole-v1", made, iteration=64, stop=stop, checkpoint=checkpoint, out=str(tmp_path / "r")))
    words = ("dataset", "r", "r.npz", "--samples", "30")
    assert sparring(*words, "--set", "game.sutton_barto_reward=true")[0] == 0
    assert game_of(tmp_path / "r.npz").env_kwargs == {"sutton_barto_reward": True}
    assert sparring(*words, "--policy", "random")[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["NoSuchGame-v9", "o.npz", "--policy", "mine.safetensors"], "NoSuchGame-v9"),
        (["Acrobot-v1", "o.npz", "--policy", "mine.safetensors"], "mine.safetensors does not play Acrobot-v1"),
        (["CartPole-v1", "o.csv"], "name a file that ends in .npz"),
        (["CartPole-v1", "folder.npz"], "folder.npz is a directory"),
        (["CartPole-v1", "text/o.npz"], "cannot write to text: text is a file"),
        (["CartPole-v1", "o.npz", "--set", "game.wind=3"], "wind"),
        (["CartPole-v1", "o.npz", "--set", "algorithm.lr=3"], "only the game can be set here"),
        (["CartPole-v1", "o.npz", "--game", "CartPole-v1"], "--game CartPole-v1 is for stores"),
        (["CartPole-v1", "o.npz", "--policy", "nobody"], "nobody"),
        (["store.db", "o.npz", "--policy", "random"], "a store has play already"),
        (["store.db", "o.npz", "--set", "game.x=1"], "a store has play already"),
        (["store.db", "o.npz", "--game", "Acrobot-v1"], "Acrobot-v1"),
        (["text", "o.npz"], "text"),
        (["declared.json", "o.npz"], "declared.json"),
    ],
)
def test_what_is_refused_leaves_nothing(
    words: list[str], says: str, mine: str, sparring: Sparring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "store.db", "CartPole-v1", lambda obs: 0, 2)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "declared.json").write_bytes(Game("mine", Box((4,)), Discrete(2)).to_json())
    monkeypatch.setattr(dataset, "played", lambda *given: pytest.fail("it plays"))
    before = sorted(tmp_path.rglob("*"))
    code, _, err = sparring("dataset", *words)
    assert (code, says in err) == (2, True), err
    assert sorted(path for path in tmp_path.rglob("*") if not path.name.startswith("store.db-")) == before


def test_a_directory_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root everything may be written: what `os.access` says is made up here."""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr(dataset.os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="is not writable"):
        dataset.check_place(tmp_path / "deeper" / "still")
    tmp_path.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(bad: float, mine: str, sparring: Sparring, tmp_path: Path) -> None:
    obs = np.zeros((60, 4), np.float32)
    obs[40, 2] = bad
    np.savez(tmp_path / "bad.npz", obs=obs)
    code, _, err = sparring("export", mine, "--to", "c-int8", "--calibrate", "bad.npz", "--episodes", "0")
    assert (code, "bad.npz has NaN or infinity in obs" in err) == (2, True), err


def test_a_file_without_rows(random_policy: MakePolicy, sparring: Sparring, tmp_path: Path) -> None:
    policy = random_policy(Game("mine", Box((4,)), Discrete(2)), (Dense(8),), Categorical())
    (tmp_path / "p.safetensors").write_bytes(weights.save(policy))
    np.savez(tmp_path / "none.npz", obs=np.zeros((0, 4), np.float32))
    code, _, err = sparring("export", "p.safetensors", "--to", "onnx", "--calibrate", "none.npz")
    assert (code, "none.npz has no observations" in err) == (2, True), err
    assert not (tmp_path / "export.json").exists()


def npz(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.npy", data)
    return path


def entry(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return out.getvalue() + data


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (b"hello", "reading magic string"),
        (b"\x93NUMPY\x01\x00\x14\x00" + b"(" * 19 + b"\n", "EOF in multi-line|never closed"),
        (entry((10**11, 4)), r"says \(100000000000, 4\)"),
        (entry((-1, 4)), r"says \(-1, 4\)"),
    ],
)
def test_damaged_files_are_named(damaged: bytes, says: str, tmp_path: Path) -> None:
    path, game = npz(tmp_path / "o.npz", obs=damaged), catalog.load("CartPole-v1")
    with pytest.raises(InputError, match=rf"o\.npz is not an npz of observations: .*({says})"):
        dataset.read(path, game)


def test_compressed_data_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "o.npz"
    np.savez_compressed(path, obs=np.random.default_rng(0).standard_normal((4000, 4), np.float32))
    data = path.read_bytes()
    path.write_bytes(data[:300] + b"\xff" * 1000 + data[1300:])
    with pytest.raises(InputError, match=r"o\.npz is not an npz of observations"):
        dataset.read(path, catalog.load("CartPole-v1"))


def test_what_nobody_asked_for_is_not_unpacked(tmp_path: Path) -> None:
    path = npz(tmp_path / "o.npz", obs=entry((2, 4), bytes(32)), x=b"no array at all")
    assert dataset.read(path, catalog.load("CartPole-v1")).shape == (2, 4)


def test_a_game_that_is_none_names_its_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", obs=np.zeros((2, 4), np.float32), game=np.array("[["))
    with pytest.raises(InputError, match=r"o\.npz .*not a game declaration"):
        dataset.read(tmp_path / "o.npz", catalog.load("CartPole-v1"))
