"""A policy on an Edge TPU, as far as that goes without one: stand-ins of Google's compiler and of its delegate, which
know each other as the real ones do. The compiler makes one operator of the whole file, which nothing but the delegate
runs."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.bench import inference, runtimes, timed_play
from sparring.edge.exporter import Wanted, export
from sparring.errors import InputError, NotInstalled
from sparring.export import formats
from sparring.games import catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues

litert = pytest.importorskip("ai_edge_litert.interpreter")

COMPILER = """#!{python}
import sys
from pathlib import Path
import flatbuffers, numpy as np
from ai_edge_litert import schema_py_generated as s

out, source = Path(sys.argv[3]), Path(sys.argv[4])
model = s.ModelT.InitFromObj(s.Model.GetRootAs(source.read_bytes(), 0))
(graph,) = model.subgraphs
code, operator = s.OperatorCodeT(), s.OperatorT()
code.builtinCode = code.deprecatedBuiltinCode = s.BuiltinOperator.CUSTOM
code.customCode, code.version = "edgetpu-custom-op", 1
operator.opcodeIndex, operator.inputs, operator.outputs = 0, graph.inputs, graph.outputs
operator.customOptions = np.frombuffer(source.read_bytes(), np.uint8)
count = len(graph.operators)
graph.operators, model.operatorCodes, model.metadata = [operator], [code], []  # it drops metadata
builder = flatbuffers.Builder(0)
builder.Finish(model.Pack(builder), b"TFL3")
(out / (source.stem + "_edgetpu.tflite")).write_bytes(bytes(builder.Output()))
print(f"Number of operations that will run on Edge TPU: {{count}}")
print("Number of operations that will run on CPU: 0")
"""
DELEGATE = object()


class Interpreter(litert.Interpreter):  # type: ignore[misc]
    """With the delegate it runs what the compiler put away; all else is LiteRT's."""

    def __init__(self, model_content: bytes, num_threads: int, experimental_delegates: list[Any] | None = None) -> None:
        from sparring.export.tflite import schema

        s = schema()
        operator = s.ModelT.InitFromObj(s.Model.GetRootAs(model_content, 0)).subgraphs[0].operators[0]
        if experimental_delegates == [DELEGATE]:
            model_content = bytes(operator.customOptions)
        super().__init__(model_content=model_content, num_threads=num_threads)


@pytest.fixture
def edge_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "edgetpu_compiler"
    program.parent.mkdir()
    program.write_text(COMPILER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(runtimes, "_load_delegate", lambda library: DELEGATE)
    monkeypatch.setattr(litert, "Interpreter", Interpreter)


@pytest.fixture
def policy(random_policy: Callable[..., Policy]) -> Policy:
    return random_policy(catalog.load("CartPole-v1"), (Dense(8, "tanh"),), QValues())


SETTINGS = inference.InferenceSettings(steps=40, steady=0.05, estimate=False)


def here(order: timed_play.Order, settings: object, what: str, on_progress: object) -> timed_play.Result:
    """In this process, where the stand-ins are."""
    return timed_play.measure(order)


@pytest.mark.usefixtures("edge_tpu")
def test_a_policy_is_compiled_and_played(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_run", here)
    runtimes.check(["coral", "tflite-int8"])
    model = inference.Model("m", policy.game, policy)
    coral, cpu = inference.measure_all([model], ["coral", "tflite-int8"], SETTINGS, tmp_path)
    assert coral.result is not None
    assert cpu.result is not None
    assert (coral.result.device, cpu.result.device) == ("Edge TPU", "CPU")
    assert coral.result.episodes[0][:2] == cpu.result.episodes[0][:2]  # the same play
    assert coral.file_bytes is not None
    assert cpu.file_bytes is not None
    assert coral.file_bytes > cpu.file_bytes


@pytest.mark.usefixtures("edge_tpu")
def test_a_compiled_file_is_played(policy: Policy, tmp_path: Path) -> None:
    """It knows what it is of, though the compiler forgets that."""
    rows = export(policy, Wanted(["tflite-int8"], "p", tmp_path, episodes=0, calibrate=100))
    assert rows["p.int8.tflite"].edge_tpu is not None
    path, plain = tmp_path / "p.int8_edgetpu.tflite", tmp_path / "p.int8.tflite"
    model = inference.Model("theirs", policy.game, file=path)
    asked = ["coral", "onnx"]
    assert [model.refusal(name, asked) is None for name in asked] == [True, False]
    runner, other = runtimes.open_runner("coral", policy.game, None, path, 1), formats.load(plain, policy.game)
    for obs in np.random.default_rng(0).standard_normal((20, 1, 4), np.float32):
        found, expected = (each.outputs(each.run(each.prepare(obs))) for each in (runner, other))
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(InputError, match="is not compiled for the Edge TPU"):
        runtimes.open_runner("coral", policy.game, None, plain, 1)
    with pytest.raises(InputError, match=r"edgetpu-custom-op, .* where --runtime coral plays it"):
        formats.load(path, policy.game)


def test_without_the_compiler_nothing_is_measured(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(inference, "_order", lambda *given: pytest.fail("it begins"))
    with pytest.raises(NotInstalled, match="edgetpu_compiler has compiled, which is not on the path"):
        inference.measure_all([inference.Model("m", policy.game, policy)], ["numpy", "coral"], SETTINGS, tmp_path)
