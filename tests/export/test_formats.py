"""`sparring export`: our formats and anybody's, of runs and of published models."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from sparring.errors import InputError
from sparring.experiment import Checkpoints, Evaluation, Experiment, Stop
from sparring.export import formats, onnx, weights
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.registry import Registry
from sparring.runs.run import Run
from sparring.training import loop

GAME = Game("Tiny-v0", Box((4,)), Discrete(2))
Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def policy(random_policy: Callable[..., Policy]) -> Policy:
    return random_policy(GAME, (Dense(8),), QValues())


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, command_line: Export, tmp_path: Path) -> Export:
    """`sparring export …` where somebody works, with a module of their own: exit code, what it printed, its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    shutil.copy(Path(__file__).parent / "outside_formats.py", tmp_path)
    return partial(command_line, "export")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    layers = [{"layer": "dense", "units": 8}]
    config = {"name": "dqn", "layers": layers, "learning_starts": 64, "batch": 16, "replay": 3000}
    return loop.train(
        Experiment(
            game="CartPole-v1", algorithm=config, iteration=200, stop=Stop(iterations=2),
            evaluation=Evaluation(every=1, episodes=1), checkpoint=Checkpoints(every=1),
            out=str(tmp_path_factory.mktemp("runs") / "tried"),
        )
    )  # fmt: skip


@pytest.mark.parametrize("which", ["", "@last", "@best", "@1"])
def test_a_runs_policies_are_exported(run: Run, which: str, export: Export, tmp_path: Path) -> None:
    stem = "tried" + which.replace("@", "-")
    code, out, _ = export(f"{run.path}{which}", "--episodes", "0")
    assert (code, out.splitlines()[0]) == (0, f"{stem}.onnx")
    expected = run.policy(which[1:] or "last")
    assert (tmp_path / f"{stem}.onnx").read_bytes() == onnx.render(expected)
    assert export(f"{run.path}{which}", "--to", "safetensors", "--out", "a/b", "--episodes", "0")[0] == 0
    again = weights.load((tmp_path / "a" / "b" / f"{stem}.safetensors").read_bytes())
    assert all(np.array_equal(again.params[name], array) for name, array in expected.params.items())


def test_a_format_from_outside(run: Run, export: Export, tmp_path: Path) -> None:
    code, out, _ = export(f"{run.path}@best", "--to", "outside_formats:Json", "--out", "out")
    assert (code, out) == (0, "out/tried-best.json\n")
    found = json.loads((tmp_path / "out" / "tried-best.json").read_bytes())
    assert found["network"] == ["dense 8"]
    expected = run.policy("best").params
    assert found["params"].keys() == expected.keys()
    np.testing.assert_array_equal(np.float32(found["params"]["torso.0.w"]), expected["torso.0.w"])


def test_a_format_of_several_files(run: Run, export: Export, tmp_path: Path) -> None:
    code, out, _ = export(str(run.path), "--to", "outside_formats:Folder", "--out", "out")
    expected = run.policy().params
    assert code == 0
    assert set(out.split()) == {"out/game.txt"} | {f"out/weights/{name}.bin" for name in expected}
    assert (tmp_path / "out" / "export.json").exists()
    for name, array in expected.items():
        assert (tmp_path / "out" / "weights" / f"{name}.bin").read_bytes() == array.tobytes()


def test_a_published_model_is_exported(policy: Policy, export: Export, tmp_path: Path) -> None:
    Registry(tmp_path / "registry").publish(policy, model="careful", algorithm="dqn")
    for target, name in (("Tiny-v0/careful", "Tiny-v0-careful"), ("Tiny-v0/careful/1", "Tiny-v0-careful-1")):
        code, out, _ = export(target, "--registry", "registry")
        assert (code, out.splitlines()[0]) == (0, f"{name}.onnx")
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        obs = np.random.default_rng(0).standard_normal((5, 4), np.float32)
        np.testing.assert_array_equal(session.run(["action"], {"obs": obs})[0], policy.act(obs)[0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "onx"], "no format 'onx', did you mean 'onnx'"),
        (["--to", "safetensors+json"], "no format 'safetensors+json', did you mean 'safetensors'"),
        (["--to", "onnx,hdf5"], "no format 'hdf5', did you mean 'h5'"),
        (["--to", "tflite_int8"], "no format 'tflite_int8', did you mean 'tflite-int8'"),
        (["--to", "jpeg"], "choose one of onnx, onnx-int8, tflite, tflite-int8, c, c-int8, keras, h5, safetensors, or"),
        (["--to", "outside_formats:Jsn"], "has no 'Jsn', did you mean 'Json'"),
        (["--to", "outside_formats:json"], "it has to be a class with a `suffix` and a `render(policy)`"),
        (["--to", "outside_formats:NoFormat"], "it has to be a class with a `suffix` and a `render(policy)`"),
        (["--to", "outside_formats:Picky"], "picky has no dense layers"),
        (["--to", "outside_formats:Astray", "--out", "out"], "gives '../astray.txt'"),
    ],
)
def test_what_cannot_be_exported_is_said(run: Run, export: Export, tmp_path: Path, words: list[str], says: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, _, error = export(str(run.path), *words)
    assert code == 2
    assert says in error
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


def test_a_policy_that_is_not_kept(run: Run, export: Export) -> None:
    code, _, error = export(f"{run.path}@7")
    assert code == 2
    assert "there is no checkpoint of iteration 7" in error


def test_an_export_replaces_only_its_own_file(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "other.onnx").write_bytes(b"mine")
    (tmp_path / "p.onnx").write_bytes(b"old")
    assert formats.write(formats.render("onnx", policy, "p"), tmp_path) == [tmp_path / "p.onnx"]
    assert (tmp_path / "p.onnx").read_bytes() == onnx.render(policy)
    assert (tmp_path / "other.onnx").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.onnx", "p.onnx"]


def test_formats_are_found_by_name() -> None:
    suffixes = {name: formats.find_format(name).suffix for name in formats.FORMATS}
    assert suffixes["onnx"] == ".onnx"
    assert suffixes["tflite-int8"] == ".int8.tflite"
    assert len({*suffixes.values()}) == len(suffixes)
    with pytest.raises(InputError, match="cannot import 'no_such_module'"):
        formats.find_format("no_such_module:Format")
