"""TFLite files that are refused before LiteRT sees them, one of each kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.errors import InputError
from sparring.export import formats, tflite_check
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues

flatbuffers = pytest.importorskip("flatbuffers")
schema = pytest.importorskip("ai_edge_litert.schema_py_generated")

GAME = Game("g", Box((4,)), Discrete(3))


@pytest.fixture
def good(random_policy: Callable[..., Policy]) -> bytes:
    return formats.render("tflite", random_policy(GAME, (Dense(8),), QValues()), "p")["p.tflite"]


def repacked(data: bytes, change: Callable[[Any], None]) -> bytes:
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    change(model)
    builder = flatbuffers.Builder(0)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def custom(model: Any) -> None:
    code = model.operatorCodes[0]
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode = "Elephant"


def for_edge_tpu(model: Any) -> None:
    custom(model)
    model.operatorCodes[0].customCode = "edgetpu-custom-op"


def branching(model: Any) -> None:
    model.operatorCodes[0].builtinCode = schema.BuiltinOperator.WHILE


def of_tomorrow(model: Any) -> None:
    model.operatorCodes[0].builtinCode = 9_999


def behind_its_end(model: Any) -> None:
    model.buffers[-2].data, model.buffers[-2].offset, model.buffers[-2].size = None, 4096, 32


def two_graphs(model: Any) -> None:
    model.subgraphs.append(model.subgraphs[0])


def no_graph(model: Any) -> None:
    model.subgraphs = []


def weights_of(model: Any) -> Any:
    """A matrix of the file."""
    (graph,) = model.subgraphs
    return next(t for t in graph.tensors if len(t.shape) == 2 and model.buffers[t.buffer].data is not None)


def too_few_bytes(model: Any) -> None:
    model.buffers[weights_of(model).buffer].data = np.zeros(3, np.uint8)


def larger_than_it_is(model: Any) -> None:
    weights_of(model).shape = [4_000, 4_000]


def beyond_all_bounds(model: Any) -> None:
    model.subgraphs[0].tensors[0].shape = [1, 1 << 30]


def negative(model: Any) -> None:
    model.subgraphs[0].tensors[0].shape = [1, -4]


def another_type(model: Any) -> None:
    weights_of(model).type = schema.TensorType.FLOAT64


def buffer_that_is_not_there(model: Any) -> None:
    weights_of(model).buffer = 500


def tensor_that_is_not_there(model: Any) -> None:
    model.subgraphs[0].operators[0].inputs = [0, 500]


def output_that_is_not_there(model: Any) -> None:
    model.subgraphs[0].outputs = [500]


def operator_that_is_not_there(model: Any) -> None:
    model.subgraphs[0].operators[0].opcodeIndex = 500


def sparse(model: Any) -> None:
    weights_of(model).sparsity = schema.SparsityParametersT()


def variable(model: Any) -> None:
    model.subgraphs[0].tensors[0].isVariable = True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (custom, "has the operator Elephant, which is not a standard one"),
        (for_edge_tpu, "edgetpu-custom-op, which is not a standard one: it is compiled for the Edge TPU"),
        (branching, "has the operator WHILE"),
        (of_tomorrow, "has the operator 9999"),
        (behind_its_end, "keeps weights in another file, or behind its end"),
        (two_graphs, "has 2 graphs"),
        (no_graph, "has 0 graphs"),
        (too_few_bytes, "has 3 bytes for a tensor of shape"),
        (larger_than_it_is, r"bytes for a tensor of shape \[4000, 4000\]"),
        (beyond_all_bounds, r"has a tensor of shape \[1, 1073741824\]"),
        (negative, r"has a tensor of shape \[1, -4\]"),
        (another_type, "bytes for a tensor of shape .* and type 10"),
        (buffer_that_is_not_there, "points to what it does not have"),
        (tensor_that_is_not_there, "points to what it does not have"),
        (output_that_is_not_there, "points to what it does not have"),
        (operator_that_is_not_there, "points to what it does not have"),
        (sparse, "sparse or variable tensors"),
        (variable, "sparse or variable tensors"),
    ],
)
def test_what_is_refused(change: Callable[[Any], None], says: str, good: bytes, tmp_path: Path) -> None:
    assert tflite_check.check(repacked(good, lambda model: None), "p") is not None
    (tmp_path / "p.tflite").write_bytes(repacked(good, change))
    with pytest.raises(InputError, match=says):
        formats.load(tmp_path / "p.tflite", GAME)


def test_on_an_edge_tpu_only_its_own_operator_is_taken(good: bytes) -> None:
    assert tflite_check.check(repacked(good, for_edge_tpu), "p", edge_tpu=True) is not None
    with pytest.raises(InputError, match="not compiled for the Edge TPU"):
        tflite_check.check(good, "p", edge_tpu=True)

    def both(model: Any) -> None:
        for_edge_tpu(model)
        code = model.operatorCodes[1]
        code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
        code.customCode = "Elephant"

    with pytest.raises(InputError, match="has the operator Elephant"):
        tflite_check.check(repacked(good, both), "p", edge_tpu=True)


def test_a_header_that_lies(good: bytes) -> None:
    """The root's place, the table's place, the file's end."""
    for at in (0, 1):
        data = bytearray(good)
        data[4 * at : 4 * at + 4] = (0xFFFF_FFF0).to_bytes(4, "little")
        with pytest.raises(InputError, match=r"damaged|does not begin like one"):
            tflite_check.check(bytes(data), "p")
    with pytest.raises(InputError, match="damaged"):
        tflite_check.check(good[: len(good) // 4], "p")


@pytest.mark.parametrize("error", [RecursionError, KeyError, IndexError, ValueError])
def test_what_its_parts_raise_is_damage(good: bytes, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fails(model: Any) -> None:
        raise error("deep")

    monkeypatch.setattr(tflite_check, "_about", fails)
    with pytest.raises(InputError, match=r"damaged TFLite file: .*deep"):
        tflite_check.check(good, "p")


def test_what_is_too_large(good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tflite_check, "MAX_BYTES", len(good) - 1)
    with pytest.raises(InputError, match="at most"):
        tflite_check.check(good, "p")
