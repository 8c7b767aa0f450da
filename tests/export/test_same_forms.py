"""Layers from outside whose forms differ are refused before anything is learned, and the error names what is wrong."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from onnx import numpy_helper

from sparring.errors import InputError, Unrenderable
from sparring.export.same_forms import require_same_forms
from sparring.games import Box, Discrete, Game
from sparring.networks.activations import Activation
from sparring.networks.layers import Layer
from sparring.networks.onnx_graph import Graph
from sparring.networks.plain_steps import Affine, Step
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Conv, Dense
from sparring.training.loop import train

GAME = Game("g", Box((5,)), Discrete(3))
IMAGES = Game("images", Box((9, 8, 3), "uint8"), Discrete(3))
HERE = __name__


class Scaled(Layer, msgspec.Struct, frozen=True, tag_field="layer", tag=f"{HERE}:Scaled"):
    """x·w·2, and one way to get it wrong."""

    units: int = 4
    wrong: str = ""

    def shapes(self, inputs: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"w": (*inputs, self.units)}

    def output(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        return (self.units,)

    def apply_jax(self, params: Mapping[str, Any], x: Any) -> Any:
        return x @ params["w"] * 2 if self.wrong != "jax" else x @ params["v"]

    def bind_numpy(self, params: Mapping[str, Any]) -> Callable[[Any], Any]:
        w = params["w"]
        if self.wrong == "early":
            w = 2 * w  # of numbers that workers put there later
            return lambda x: x @ w
        factor = {"numpy": 3, "shape": 2}.get(self.wrong, 2)
        return lambda x: (x @ w * factor)[:, : self.units - (self.wrong == "shape")]

    def onnx(self, graph: Graph, params: Mapping[str, Any], x: str) -> str:
        if self.wrong == "none":
            raise Unrenderable("it has no ONNX form")
        kind = "Times" if self.wrong == "operator" else "Mul"
        return graph.op(
            kind, graph.op("Gemm", x, graph.constant(params["w"], "w")), 1.0 if self.wrong == "onnx" else 2.0
        )

    def plain(self, params: Mapping[str, Any], inputs: tuple[int, ...]) -> Sequence[Step]:
        if self.wrong == "none":
            raise Unrenderable("it has no plain steps")
        return (Affine((3 if self.wrong == "plain" else 2) * params["w"], np.zeros(self.units, np.float32)),)


def _shifted(x: Any) -> Any:
    return x + 1


shifted = Activation(_shifted, _shifted, lambda graph, x: x)


def policy(random_policy: Callable[..., Policy], layer: Layer, game: Game = GAME) -> Policy:
    return random_policy(game, (Dense(6), layer), Categorical())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("jax", "its `apply_jax` fails: KeyError: 'v'"),
        ("numpy", "its `bind_numpy` and its `apply_jax` differ by up to"),
        ("early", "its `bind_numpy` and its `apply_jax` differ by up to"),
        ("shape", r"its `bind_numpy` gives \(3, 3\), by its `output` it is \(3, 4\)"),
        ("onnx", "its `onnx` and its `apply_jax` differ by up to"),
        ("operator", "its `onnx` fails: .*Times"),
        ("plain", "its `plain` and its `apply_jax` differ by up to"),
    ],
)
def test_a_form_that_differs_is_named(wrong: str, why: str, random_policy: Callable[..., Policy]) -> None:
    with pytest.raises(InputError, match=rf"(?s)layer 1 \({HERE}:Scaled 4 {wrong}\): {why}"):
        require_same_forms(policy(random_policy, Scaled(wrong=wrong)))


def test_forms_that_agree_are_taken(random_policy: Callable[..., Policy]) -> None:
    for layer in (Scaled(), Scaled(wrong="none"), Dense(3, "relu")):
        require_same_forms(policy(random_policy, layer))
    require_same_forms(random_policy(IMAGES, (Conv(4, 3), Scaled()), Categorical()))


def test_an_activation_is_looked_at_in_its_layer(random_policy: Callable[..., Policy]) -> None:
    for game, layer in ((GAME, Dense(4, f"{HERE}:shifted")), (IMAGES, Conv(4, 3, 2, f"{HERE}:shifted"))):
        with pytest.raises(InputError, match=r"layer 0 .*: its `onnx` and its `apply_jax` differ by up to 1"):
            require_same_forms(random_policy(game, (layer,), Categorical()))


def test_a_run_with_such_a_layer_does_not_begin(tmp_path: Path) -> None:
    layers = [{"layer": f"{HERE}:Scaled", "wrong": "onnx"}]
    out = tmp_path / "run"
    with pytest.raises(InputError, match="players would meet another network than the one that learned"):
        train({"game": "CartPole-v1", "algorithm": {"name": "dqn", "layers": layers}, "out": str(out)})
    assert not out.exists()


def test_numbers_of_numpy_stay_what_they_are() -> None:
    graph = Graph()
    for value, kind in ((np.float32(0.5), "float32"), (0.5, "float32"), (3, "int64"), (np.int32(3), "int32")):
        made = graph.constants[graph.constant(value)]
        array = numpy_helper.to_array(made)
        assert (array.dtype, float(array)) == (kind, float(value))
