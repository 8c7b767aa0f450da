"""The client's door for ONNX files: our policies pass, everything else is refused with a reason and never a crash."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_onnx import observe

from sparring.client.bot import Loaded
from sparring.errors import InputError
from sparring.export import onnx_check, onnx_whole
from sparring.export.given import Given
from sparring.export.onnx import render
from sparring.export.onnx_check import OPERATORS, check
from sparring.games import Action, Box, Dict, Discrete, Game, MultiDiscrete, Space
from sparring.games.spec import DTYPES
from sparring.networks.activations import ACTIVATIONS
from sparring.networks.layers import LAYERS, find_layer
from sparring.networks.policy import Policy
from sparring.networks.spec import (
    Categorical,
    Conv,
    Dense,
    Deterministic,
    Gaussian,
    Head,
    QValues,
    Squashed,
    param_shapes,
)

MakePolicy = Callable[..., Policy]


@pytest.fixture
def policies(random_policy: MakePolicy) -> list[bytes]:
    """A few of each kind."""
    everything = Dict({"a": Box((3,), "float64"), "b": Discrete(3), "c": MultiDiscrete((2, 3)), "d": Box((2, 2))})
    image, box = Box((8, 8, 3), "uint8"), Box((2,), low=-1.0, high=2.0)
    return [
        render(random_policy(Game("g", *spaces), layers, head, exploration=0.1))
        for spaces, layers, head in (
            ((everything, Discrete(3, start=1)), (Dense(8, "silu", norm=True),), QValues(duelling=True)),
            ((everything, MultiDiscrete((2, 3))), (Dense(8, "tanh"),), Categorical()),
            ((Box((3,)), Discrete(2)), (Dense(8, "tanh"),), Categorical()),
            ((image, box), (Conv(4, 3, 2), Dense(8, "linear")), Gaussian()),
            ((Box((4,)), box), (Dense(8),), Squashed()),
            ((Box((4,)), Box((2, 2), "float64", -1.0, 1.0)), (Dense(8),), Deterministic()),
        )
    ]


def settings(kind: Any) -> Iterator[Any]:
    """Every layer or head of a kind, from its declaration: all words, both of a yes or no, two of a size."""
    choices: list[list[Any]] = []
    for field in msgspec.structs.fields(kind):
        match msgspec.inspect.type_info(field.type):
            case msgspec.inspect.StrType() if field.name == "activation":
                choices.append(list(ACTIVATIONS))
            case msgspec.inspect.BoolType():
                choices.append([False, True])
            case msgspec.inspect.LiteralType(values=words):
                choices.append(list(words))
            case msgspec.inspect.IntType():
                choices.append([2, 3])
            case other:
                raise AssertionError(f"{kind.__name__}.{field.name} is new to this test: which {other} are there?")
    yield from (kind(*values) for values in itertools.product(*choices))


def observations() -> Iterator[Any]:
    """Every space of games, and every element type of numbers, as vectors, as images and as anything else."""
    numbers = [Box(shape, dtype) for dtype in DTYPES for shape in ((3,), (), (2, 3), (6, 6, 3), (3, 7, 6))]
    flat = [*numbers, Discrete(3), Discrete(4, start=-2), MultiDiscrete((2,)), MultiDiscrete((3, 1, 2))]
    yield from flat
    yield Dict({f"part_{i}": part for i, part in enumerate(flat)})


def actions() -> Iterator[Any]:
    yield from (Discrete(1), Discrete(3), Discrete(3, start=5), MultiDiscrete((3,)), MultiDiscrete((3, 1, 2)))
    for dtype, shape in itertools.product(("float32", "float64"), ((2,), (), (2, 2))):
        for low, high in ((-1.0, 1.0), (0.0, 3.0), (None, None), (0.0, None), (None, 0.0)):
            yield Box(shape, dtype, low, high)


def fits(game: Game, layers: tuple[Any, ...], head: Any) -> bool:
    try:
        param_shapes(game, layers, head)
    except InputError:
        return False
    return True


def all_that_is_exported() -> dict[str, tuple[Game, tuple[Any, ...], Any]]:
    """Each space of observations, each layer, and each head with each action at least once, by what it is about.

    They meet nowhere in the graph but in vectors of numbers, so it need not be each with each."""
    found: dict[str, tuple[Game, tuple[Any, ...], Any]] = {}
    seen, acted, plain = list(observations()), list(actions()), Box((2,), low=-1.0, high=1.0)
    assert {type(o) for o in seen} == set(get_args(Space))
    assert {type(a) for a in acted} == set(get_args(Action))
    for space in seen:
        found[f"{space}"[:200]] = Game("g", space, Discrete(2)), (), QValues()
    for layer in itertools.chain.from_iterable(map(settings, map(find_layer, LAYERS))):
        games = [Game("g", space, Discrete(2)) for space in (plain, Box((6, 6, 3), "uint8"))]
        found |= {f"{layer} {g.observation}": (g, (layer,), QValues()) for g in games if fits(g, (layer,), QValues())}
        assert any(f"{layer} " in name for name in found), f"{layer} fits none of the observations"
    for head in itertools.chain.from_iterable(map(settings, get_args(Head))):
        games = [Game("g", plain, action) for action in acted]
        found |= {f"{head} {g.action}": (g, (), head) for g in games if fits(g, (), head)}
        assert any(f"{head} " in name for name in found), f"{head} fits none of the actions"
    return found


@pytest.fixture
def model(policies: list[bytes]) -> onnx.ModelProto:
    return onnx.load_from_string(policies[4])


def refused(model: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check(model.SerializeToString())


def test_the_list_has_what_the_exporter_can_write_and_nothing_else(
    random_policy: MakePolicy, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime loads each of them without a word, too; a few of them in whole numbers as well."""
    written: dict[str, set[str]] = {}
    for i, (name, (game, layers, head)) in enumerate(all_that_is_exported().items()):
        for form in ("plain", "normalised", "whole")[: 2 + (i % 12 == 0)]:
            policy = random_policy(game, layers, head, exploration=0.1, normalised=form != "plain")
            obs = observe(game.observation, np.random.default_rng(0), 20)
            data = render(policy) if form != "whole" else onnx_whole.render(policy, Given(calibration=obs))
            try:
                Loaded(data, game, "bot", 1)
            except InputError as error:
                pytest.fail(f"{name}: {error}")
            for node in onnx.load_from_string(data).graph.node:
                written.setdefault(node.op_type, set()).update(a.name for a in node.attribute)
    assert written == {name: set(attributes) for name, attributes in OPERATORS.items()}
    assert capfd.readouterr().err == ""


def test_a_normalised_layers_epsilon(policies: list[bytes]) -> None:
    model = onnx.load_from_string(policies[0])
    (node,) = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    for epsilon in (0.0, -1.0, 1.0, float("nan"), float("inf")):
        node.attribute[0].f = epsilon
        refused(model, "attribute epsilon of LayerNormalization out of bounds")
    node.attribute[0].CopyFrom(helper.make_attribute("epsilon", 1))
    refused(model, "attribute epsilon of LayerNormalization has another type")
    node.attribute[0].CopyFrom(helper.make_attribute("axis", 0.5))
    refused(model, "attribute 'axis' of LayerNormalization")


def test_external_data(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[1]
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../etc/passwd"
    refused(model, "external data")
    tensor.ClearField("data_location")
    refused(model, "external data")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    refused(model, "external data")
    tensor.ClearField("data_location")
    check(model.SerializeToString())


def test_external_data_of_a_constant_node(model: onnx.ModelProto) -> None:
    tensor = numpy_helper.from_array(np.zeros(3, np.float32))
    tensor.data_location = TensorProto.EXTERNAL
    model.graph.node.append(helper.make_node("Constant", [], ["x"], value=tensor))
    refused(model, "operator 'Constant'")
    model.graph.node[-1].op_type = "Relu"
    refused(model, "attribute")


def test_operators_domains_and_functions(model: onnx.ModelProto) -> None:
    def with_node(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.graph.node.append(helper.make_node(*args, **kwargs))
        return changed

    refused(with_node("RandomNormal", [], ["x"], shape=[10**9]), "operator 'RandomNormal'")
    refused(with_node("Relu", ["obs"], ["x"], domain="com.microsoft"), "com.microsoft")
    refused(with_node("FusedMatMul", ["obs", "obs"], ["x"], domain="com.microsoft"), "FusedMatMul")
    refused(with_node("Conv", ["a", "b"], ["x"], pads=[10**9] * 4), "attribute pads of Conv out of bounds")
    refused(with_node("Conv", ["a", "b"], ["x"], auto_pad=1), "attribute 'auto_pad' of Conv")
    refused(with_node("Conv", ["a", "b"], ["x"], strides=[0, 0]), "out of bounds")
    refused(with_node("Concat", ["a", "b"], ["x"], axis=-(10**12)), "out of bounds")
    model.opset_import.append(helper.make_opsetid("com.evil", 1))
    refused(model, "com.evil")
    del model.opset_import[-1]
    model.functions.append(helper.make_function("f", "Relu", ["x"], ["y"], [], [helper.make_opsetid("", 17)]))
    refused(model, "functions of its own")


@pytest.mark.parametrize("kind", ["If", "Relu"])
def test_graphs_within_nodes(model: onnx.ModelProto, kind: str) -> None:
    hidden = helper.make_node("Evil", ["obs"], ["y"], domain="com.evil")
    inner = helper.make_graph([hidden], "inner", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])
    nested = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)], "outer", [], inner.output
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=nested, else_branch=nested)
    node.op_type = kind
    model.graph.node.append(node)
    refused(model, "operator 'If'" if kind == "If" else "a graph within a node")


def test_absurd_sizes(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    data = model.SerializeToString()
    tensor = model.graph.initializer[1]
    tensor.dims.append(10**12)
    refused(model, "whose shape is")
    tensor.dims[-1] = -1
    refused(model, "whose shape is")
    tensor.dims[-1] = 1
    tensor.dims.extend([1] * 17)
    refused(model, "dimensions")
    del tensor.dims[-18:]
    check(model.SerializeToString())
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 10**15
    refused(model, "absurd size")
    monkeypatch.setattr(onnx_check, "MAX_FIELDS", 50)
    with pytest.raises(InputError, match="too many parts"):
        check(data)
    monkeypatch.setattr(onnx_check, "MAX_BYTES", 50)
    with pytest.raises(InputError, match="at most"):
        check(data)


def test_other_things_that_our_policies_do_not_have(model: onnx.ModelProto) -> None:
    def changed(change: Callable[[onnx.ModelProto], object], reason: str) -> None:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy)
        refused(copy, reason)

    changed(lambda m: m.metadata_props.add(key="ort_config", value="{}"), "metadata 'ort_config'")
    changed(lambda m: m.training_info.add(), "training information")
    changed(lambda m: m.graph.sparse_initializer.add(), "sparse tensors")
    changed(lambda m: m.graph.initializer.add(data_type=8, string_data=[b"x"], dims=[1]), "tensor")
    changed(lambda m: m.graph.initializer.add(data_type=1, float_data=[1.0], dims=[1]), "tensor")
    changed(lambda m: setattr(m, "ir_version", 999), "ONNX format 999")
    changed(lambda m: m.ClearField("opset_import"), "no operator set")
    changed(lambda m: m.ClearField("graph"), "without graph")


def test_two_of_what_there_is_one_of(model: onnx.ModelProto) -> None:
    """protobuf takes the last: a checker that took the first would be fooled."""
    data = model.SerializeToString()
    with pytest.raises(InputError, match="two of graph"):
        check(data + onnx.ModelProto(graph=model.graph).SerializeToString())


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff" * 40, b"not a model", b"\x3a\xff\xff\xff\xff\x0f", bytes(1000)])
def test_not_a_model(data: bytes) -> None:
    with pytest.raises(InputError, match="not a policy we load"):
        check(data)


def test_truncated_anywhere(policies: list[bytes]) -> None:
    """Only a cut between two fields of the outermost message can still be a model; none of ours ends before its graph
    and operator set."""
    data = policies[4]
    for end in range(0, len(data), 7):
        try:
            check(data[:end])
        except InputError:
            continue
        onnx.checker.check_model(onnx.load_from_string(data[:end]))


def test_mutations_pass_or_are_refused(policies: list[bytes]) -> None:
    rng = np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for i in range(3000):
        data = bytearray(policies[i % len(policies)])
        for _ in range(rng.integers(1, 6)):
            at, kind = int(rng.integers(len(data))), rng.integers(4)
            if kind == 0:
                data[at] = int(rng.integers(256))
            elif kind == 1:
                data[at] ^= 1 << int(rng.integers(8))
            elif kind == 2:
                del data[at : at + int(rng.integers(1, 20))]
            else:
                data[at:at] = rng.bytes(int(rng.integers(1, 20)))
        try:
            check(bytes(data))
            outcomes[True] += 1
        except InputError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100  # weights may change, structure may not


def test_random_bytes_are_refused() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 10, 100, 1000):
        for _ in range(300):
            with pytest.raises(InputError):
                check(rng.bytes(size))


def test_needs_nothing_but_the_client() -> None:
    code = "import sparring.export.onnx_check, sys; print({'onnx', 'jax', 'obstore', 'safetensors'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
