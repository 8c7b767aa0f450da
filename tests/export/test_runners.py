"""Every format that can be loaded gives the policy's own actions back, for every space and head."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_onnx import ACTIONS, OBSERVATIONS, layers_for, observe

from sparring.errors import InputError
from sparring.export import c, c_file, distil, formats, onnx_file, tflite, tflite_file, whole_numbers
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.networks.plain import Plain, Value, decide, evaluate, pixels
from sparring.networks.policy import Policy
from sparring.networks.spec import Conv, Dense, QValues

MakePolicy = Callable[..., Policy]
FLOATS = [name for name in formats.FORMATS if not getattr(formats.find_format(name), "calibrated", False)]
VALUED = [name for name in FLOATS if "value" in getattr(formats.find_format(name), "takes", ())]


def cases() -> list[Any]:
    """Each observation with one head, and each head with one observation."""
    names = [(observation, "q") for observation in OBSERVATIONS] + [("vector", action) for action in ACTIONS]
    return [pytest.param(*pair, id="-".join(pair)) for pair in names]


def files() -> Iterator[Any]:
    """Keras takes half a second for each: it gets one of each kind."""
    few = {("frames", "q"), ("dict", "q"), ("vector", "q_parts_duelling"), ("vector", "categorical")}
    few |= {("vector", "gaussian_half"), ("vector", "squashed_matrix"), ("vector", "deterministic_scalar")}
    for name in FLOATS:
        for case in cases():
            if name not in ("keras", "h5") or tuple(case.values) in few:
                yield pytest.param(name, *case.values, id=f"{name}-{case.id}")


def made(random_policy: MakePolicy, observation: str, action: str) -> Policy:
    space, head, exploration = ACTIONS[action]
    game = Game("g", OBSERVATIONS[observation], space)
    return random_policy(game, layers_for(game.observation, "tanh"), head, exploration=exploration, seed=len(action))


@pytest.mark.parametrize(("observation", "action"), cases())
def test_plain_steps_are_the_policy(observation: str, action: str, random_policy: MakePolicy) -> None:
    policy = made(random_policy, observation, action)
    obs = observe(policy.game.observation, np.random.default_rng(1), 9)
    plain = Plain.of(policy)
    out, value = evaluate(plain, pixels(policy.game, obs))
    assert value is None
    np.testing.assert_allclose(out, policy.outputs(obs)[:, : plain.outputs], rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(decide(policy.game, out, plain.bound), policy.act(obs)[0], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("name", "observation", "action"), list(files()))
def test_a_file_acts_as_the_policy(
    name: str, observation: str, action: str, random_policy: MakePolicy, tmp_path: Path
) -> None:
    policy = made(random_policy, observation, action)
    (path,) = formats.write(formats.render(name, policy, "policy"), tmp_path)
    assert formats.format_of(path) == name
    runner = formats.load(path, policy.game)
    for obs in np.split(observe(policy.game.observation, np.random.default_rng(1), 5), 5):
        found = runner.run(runner.prepare(obs))
        chosen, expected = runner.action(found), policy.act(obs)[0]
        assert (chosen.dtype, chosen.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(chosen, expected, rtol=1e-3, atol=2e-4)
        out = runner.outputs(found)
        assert out is not None
        np.testing.assert_allclose(out, policy.outputs(obs)[:, : out.shape[1]], rtol=2e-3, atol=2e-4)
        assert runner.value(found) is None


@pytest.mark.parametrize(("observation", "action"), cases())
def test_whole_numbers_are_what_litert_computes(
    observation: str, action: str, random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Whole.outputs` is what weights are tuned on and C is written from: LiteRT's own arithmetic, to one step of 255.
    And rounding costs little, though nothing is tuned here."""
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    policy, rng = made(random_policy, observation, action), np.random.default_rng(1)
    game = policy.game
    rounded = whole_numbers.whole(Plain.of(policy), observe(game.observation, rng, 200))
    (path,) = formats.write({"p.int8.tflite": tflite.render_whole(rounded)}, tmp_path)
    assert formats.format_of(path) == "tflite-int8"
    runner, step = formats.load(path, game), rounded.forms[rounded.tape.outputs["outputs"]].scale
    obs, actions = observe(game.observation, rng, 60), []
    for i in range(len(obs)):
        found = runner.run(ready := runner.prepare(obs[i : i + 1]))
        assert (ready.dtype, found.dtype) == (np.int8, np.int8)
        np.testing.assert_array_equal(ready, rounded.into(pixels(game, obs[i : i + 1])))
        expected = rounded.outputs(pixels(game, obs[i : i + 1]))["outputs"]
        np.testing.assert_allclose(runner.outputs(found), expected, atol=2.1 * step)
        actions.append(runner.action(found))
    assert whole_numbers.same_actions(game, np.concatenate(actions), policy.act(obs)[0]) > 0.9


@pytest.mark.parametrize(("observation", "action"), [("dict", "q_parts"), ("vector", "gaussian_half")])
def test_a_runner_of_onnx_leaves_exploring_out(
    observation: str, action: str, random_policy: MakePolicy, tmp_path: Path
) -> None:
    policy = made(random_policy, observation, action)
    data = formats.render("onnx", policy, "p")["p.onnx"]
    whole, left = onnx.load_from_string(data).graph, onnx.load_from_string(onnx_file.greedy(data)).graph
    assert {value.name for value in whole.output} == {"action", "outputs", "sampled", "log_prob"}
    assert {value.name for value in left.output} == {"action", "outputs"}
    assert "noise" in {value.name for value in whole.input}
    assert "noise" not in {value.name for value in left.input}
    assert len(left.node) < len(whole.node)


def test_pixels_become_whole_numbers_without_floats(
    random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large picture that took longer than a small network."""
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    game = Game("g", OBSERVATIONS["frames"], Discrete(3))
    policy = random_policy(game, layers_for(game.observation, "relu"), QValues(), normalised=False)
    obs = observe(game.observation, np.random.default_rng(1), 30)
    (path,) = formats.write(formats.render("tflite-int8", policy, "p", formats.Given(calibration=obs)), tmp_path)
    runner = formats.load(path, game)
    monkeypatch.delattr(tflite_file, "into")
    np.testing.assert_array_equal(runner.prepare(obs), pixels(game, obs).astype(int) - 128)


def whole_cases() -> list[Any]:
    """Every case with tanh; other activations with some of them; an image with actions that are numbers."""
    more = [("frames", "q", "relu"), ("dict", "q", "silu"), ("vector", "squashed_matrix", "silu"),
            ("vector", "gaussian_half", "relu"), ("discrete", "q", "linear"), ("image", "gaussian", "silu"),
            ("frames", "squashed", "tanh"), ("image", "gaussian_float64", "relu")]  # fmt: skip
    return [pytest.param(*case.values, "tanh", id=f"{case.id}-tanh") for case in cases()] + more


def test_metadata_of_tflite_are_read_as_the_docs_say(
    random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ai_edge_litert")
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    game = Game("g", Box((4,)), Discrete(2))
    obs = observe(game.observation, np.random.default_rng(1), 50)
    policy, given = random_policy(game, (Dense(4),), QValues()), formats.Given(calibration=obs)
    files = formats.render("tflite-int8", policy, "CartPole-v1-ppo-1", given)
    formats.write(files, tmp_path)
    monkeypatch.chdir(tmp_path)
    docs = Path(__file__, "../../../docs/edge.md").resolve().read_text()
    (code,) = [part.split("```")[0] for part in docs.split("```python\n") if "schema_py_generated" in part]
    found: dict[str, Any] = {}
    exec(code, found)
    expected = whole_numbers.of(policy, given)
    np.testing.assert_allclose(found["factor"], expected.factor, rtol=1e-5)
    np.testing.assert_allclose(found["shift"], expected.shift, rtol=1e-5)


def test_c_says_how_an_observation_is_spread(random_policy: MakePolicy) -> None:
    policy = made(random_policy, "dict", "q")
    text = formats.render("c", policy, "p")["p.c"].decode()
    head = text.split("action:")[0]
    assert [line.strip(" *") for line in head.splitlines() if "from obs" in line] == [
        "from obs[0], at: 2 numbers",
        "from obs[2], camera: 6 × 5 × 3 pixels, each divided by 255 (rows, columns, channels)",
        "from obs[92], keys: 5 numbers (2 + 3), in each part a 1 for its choice (0 is the first), else 0",
        "from obs[97], one: 1 number",
        "from obs[98], weapon: 4 numbers, a 1 for the choice (1 is the first, 4 the last), else 0",
    ]
    obs = np.zeros(1, policy.game.observation.element)
    obs["weapon"], obs["keys"], obs["one"], obs["camera"] = 3, [1, 2], 7, 255
    (x,) = pixels(policy.game, obs)
    assert x[98:].tolist() == [0, 0, 1, 0]
    assert x[92:98].tolist() == [0, 1, 0, 0, 1, 7]
    assert set(x[2:92]) == {1}


@pytest.mark.parametrize(("observation", "action", "activation"), whole_cases())
def test_c_in_whole_numbers_is_the_same_arithmetic(
    observation: str,
    action: str,
    activation: str,
    random_policy: MakePolicy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It compiles as C99 without a warning, with -Werror, and agrees with what LiteRT was seen to compute."""
    assert {"-std=c99", "-Wall", "-Wextra", "-Werror"} <= {*c_file.FLAGS}
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    space, head, _ = ACTIONS[action]
    game, rng = Game("g", OBSERVATIONS[observation], space), np.random.default_rng(1)
    policy = random_policy(game, layers_for(game.observation, activation), head)
    rounded = whole_numbers.whole(Plain.of(policy), observe(game.observation, rng, 200))
    (path,) = formats.write({"p.int8.c": c.render_whole(rounded)}, tmp_path)
    runner, step = formats.load(path, game), rounded.forms[rounded.tape.outputs["outputs"]].scale
    for obs in np.split(observe(game.observation, rng, 40), 40):
        found = runner.run(runner.prepare(obs))
        expected = rounded.outputs(pixels(game, obs))["outputs"]
        out = runner.outputs(found)
        np.testing.assert_allclose(out, expected, atol=1.1 * step)
        assert out is not None
        chosen, greedy = runner.action(found), decide(game, out, rounded.bound)
        assert (chosen.dtype, chosen.shape) == (greedy.dtype, greedy.shape)
        np.testing.assert_allclose(chosen, greedy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 3, 4])
@pytest.mark.parametrize("name", ["c", "c-int8"])
def test_c_sums_up_some_outputs_at_a_time(
    name: str, tile: int, random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of outputs that are no multiple of it, and kernels that reach over the border."""
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    monkeypatch.setattr(c, "TILE", tile)
    layers = (Conv(5, 3, 2, padding="same"), Conv(7, 4, 1, padding="same"), Dense(10, "tanh"))
    policy = random_policy(Game("g", Box((11, 9, 2), "uint8"), Discrete(5)), layers, QValues())
    obs = observe(policy.game.observation, np.random.default_rng(1), 40)
    given = formats.Given(calibration=obs)
    plain, rounded = Plain.of(policy), whole_numbers.of(policy, given)
    (path,) = formats.write(formats.render(name, policy, "p", given if name == "c-int8" else formats.Given()), tmp_path)
    runner, step = formats.load(path, policy.game), rounded.forms[rounded.tape.outputs["outputs"]].scale
    for each in np.split(obs, 40):
        x = pixels(policy.game, each)
        expected = evaluate(plain, x)[0] if name == "c" else rounded.outputs(x)["outputs"]
        tolerance = 1e-4 if name == "c" else 1.1 * step
        np.testing.assert_allclose(runner.outputs(runner.run(runner.prepare(each))), expected, atol=tolerance)


@pytest.mark.parametrize(("observation", "action"), cases())
def test_anybody_evaluates_safetensors(
    observation: str, action: str, random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of examples/ knows nothing of this package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from play_safetensors import Evaluator

    policy = made(random_policy, observation, action)
    (path,) = formats.write(formats.render("safetensors", policy, "p"), tmp_path)
    evaluator, space = Evaluator(path), policy.game.observation
    for row in observe(space, np.random.default_rng(1), 4):
        obs = {name: row[name] for name in space.fields} if isinstance(space, Dict) else row
        expected = policy.act(np.array([row], space.element) if isinstance(space, Dict) else row[None])[0][0]
        np.testing.assert_allclose(evaluator.act(obs), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("observation", "action"), cases())
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_whole_numbers_have_operators_of_the_edge_tpu_alone(
    observation: str, action: str, activation: str, random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    space, head, _ = ACTIONS[action]
    game = Game("g", OBSERVATIONS[observation], space)
    policy, rng = random_policy(game, layers_for(game.observation, activation), head), np.random.default_rng(1)
    data = tflite.render_whole(whole_numbers.whole(Plain.of(policy), observe(game.observation, rng, 30)))
    s = tflite.schema()
    model = s.ModelT.InitFromObj(s.Model.GetRootAs(data, 0))
    names = {number: name for name, number in vars(s.BuiltinOperator).items() if not name.startswith("_")}
    assert {names[code.builtinCode] for code in model.operatorCodes} <= set(tflite.EDGE_TPU)
    (graph,) = model.subgraphs
    assert all(graph.tensors[i].type == s.TensorType.INT8 for i in (*graph.inputs, *graph.outputs))
    for operator in graph.operators:
        name = names[model.operatorCodes[operator.opcodeIndex].builtinCode]
        assert_taken(name, [graph.tensors[i] for i in operator.inputs], graph.tensors[operator.outputs[0]], model)


def assert_taken(name: str, given: list[Any], made: Any, model: Any) -> None:
    """What the compiler's page (coral.ai/docs/edgetpu/models-intro) asks of operators beyond their names. A MEAN over
    numbers wants a multiple of four of them: there is none (`tflite.EDGE_TPU`)."""
    assert max(len(tensor.shape) for tensor in given) <= 4
    assert all(tensor.shape[0] == 1 for tensor in (made, given[0]))
    if name == "FULLY_CONNECTED":  # one scale for all weights, and a vector of outputs
        assert len(given[1].quantization.scale) == 1
        assert len(made.shape) == 2
    if name == "PAD":  # of rows and columns only
        pads = model.buffers[given[1].buffer].data.view(np.int32).reshape(-1, 2)
        assert not pads[[0, -1]].any()


@pytest.mark.parametrize("name", VALUED)
@pytest.mark.parametrize("shares", [True, False])
def test_the_value_of_a_state(name: str, shares: bool, random_policy: MakePolicy, tmp_path: Path) -> None:
    game = Game("g", Box((9, 9, 2), "uint8"), Discrete(3))
    layers = (Conv(3, 3, 2), Dense(5, "tanh"))
    policy = random_policy(game, layers, QValues())
    other = random_policy(Game("g", game.observation, Discrete(1)), layers, QValues(), normalised=False, seed=5)
    params = policy.params | {k: other.params[k] for k in ("head.w", "head.b")} if shares else other.params
    value = Value(None if shares else layers, params)
    (path,) = formats.write(formats.render(name, policy, "p", formats.Given(value=value)), tmp_path)
    runner = formats.load(path, game)
    obs = observe(game.observation, np.random.default_rng(1), 1)
    critic = Policy(other.game, layers, QValues(), {**policy.params, **params})
    np.testing.assert_allclose(
        runner.value(runner.run(runner.prepare(obs))), critic.outputs(obs)[0, 0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("form", ["tflite-int8", "c-int8"])
@pytest.mark.parametrize("shares", [True, False])
def test_the_value_of_a_state_in_whole_numbers(
    form: str, shares: bool, random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges that suit the actions best would clip it."""
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    monkeypatch.setattr(whole_numbers, "HIDDEN_SHARES", (1.0,) if shares else (0.45,))
    game, rng = Game("g", Box((4,)), Discrete(4)), np.random.default_rng(1)
    layers = (Dense(16, "tanh"), Dense(16, "relu"))
    policy = random_policy(game, layers, QValues())
    other = random_policy(Game("g", game.observation, Discrete(1)), layers, QValues(), normalised=False, seed=5)
    params = policy.params | {k: other.params[k] for k in ("head.w", "head.b")} if shares else other.params
    value = Value(None if shares else layers, params)
    given = formats.Given(value=value, calibration=observe(game.observation, rng, 1000))
    (path,) = formats.write(formats.render(form, policy, "p", given), tmp_path)
    runner, obs = formats.load(path, game), observe(game.observation, rng, 100)
    found = np.array([runner.value(runner.run(runner.prepare(row))) for row in np.split(obs, len(obs))])
    expected = Policy(other.game, layers, QValues(), {**policy.params, **params}).outputs(obs)[:, 0]
    assert np.abs(found - expected).mean() < 0.02 * np.ptp(expected)
    assert np.abs(found - expected).max() < 0.08 * np.ptp(expected)


def test_the_value_stays_when_weights_are_tuned(random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that it shares with the policy, the actions alone would make something else."""
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    game, rng, layers = (
        Game("g", Box((4,)), MultiDiscrete((5, 4, 6))),
        np.random.default_rng(1),
        (Dense(16, "tanh"),) * 2,
    )
    policy = random_policy(game, layers, QValues())
    other = random_policy(Game("g", game.observation, Discrete(1)), layers, QValues(), seed=5)
    plain = Plain.of(policy, Value(None, {k: other.params[k] for k in ("head.w", "head.b")}))
    seen = observe(game.observation, rng, 2000)
    tuned = distil.tune(whole_numbers.whole(plain, seen), pixels(game, seen), lambda words: None)
    x = pixels(game, observe(game.observation, rng, 500))
    _, expected = evaluate(plain, x)
    assert expected is not None
    assert np.abs(tuned.outputs(x)["value"][:, 0] - expected).mean() < 0.008 * np.ptp(expected)


def test_what_cannot_be_loaded_is_said(random_policy: MakePolicy, tmp_path: Path) -> None:
    policy = random_policy(Game("g", Box((4,)), Discrete(2)), (Dense(3),), QValues())
    (path,) = formats.write(formats.render("onnx", policy, "p"), tmp_path)
    with pytest.raises(InputError, match=r"does not play other: they differ in observation"):
        formats.load(path, Game("other", Box((5,)), Discrete(2)))
    with pytest.raises(InputError, match="there is no file"):
        formats.load(tmp_path / "q.onnx", policy.game)
    with pytest.raises(InputError, match="of no format that we know"):
        formats.load(tmp_path / "q.pt", policy.game)
    with pytest.raises(InputError, match="no place for a value"):
        formats.render("safetensors", policy, "p", formats.Given(value=Value(None, policy.params)))


def foreign(*, shape: tuple[Any, ...] = (1, 4), outputs: int = 2, **attributes: Any) -> onnx.ModelProto:
    """As another library may write it: an operator that ours never have, no metadata."""
    w = numpy_helper.from_array(np.eye(4, outputs, dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Elu", ["y"], ["z"])]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, outputs])],
        [w],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_somebody_elses_onnx_file_is_played(tmp_path: Path) -> None:
    game = Game("g", Box((4,)), Discrete(2, start=3))
    (tmp_path / "net.onnx").write_bytes(foreign().SerializeToString())
    runner = formats.load(tmp_path / "net.onnx", game)
    for obs, expected in (([[0, 1, 9, 9]], 4), ([[1, 0, 9, 9]], 3)):
        assert runner.action(runner.run(runner.prepare(np.float32(obs)))).tolist() == [expected]


@pytest.mark.parametrize("shape", [(1, 2, 2), ("batch", 2, 2), (1, 4)])
def test_somebody_elses_file_takes_an_observation_in_its_shape_or_flat(shape: tuple[Any, ...], tmp_path: Path) -> None:
    model = foreign(shape=shape)
    if len(shape) == 3:
        model.graph.node.insert(0, helper.make_node("Flatten", ["x"], ["flat"]))
        model.graph.node[1].input[0] = "flat"
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    runner = formats.load(str(tmp_path / "net.onnx"), Game("g", Box((2, 2)), Discrete(2)))
    for obs, expected in (([[0, 1], [9, 9]], 1), ([[1, 0], [9, 9]], 0)):
        assert runner.action(runner.run(runner.prepare(np.float32([obs])))).tolist() == [expected]


def external(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")


def lying(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 4_000_000


def strange(model: onnx.ModelProto) -> None:
    model.graph.node[1].domain = "com.evil"


def unknown(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Elephant"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (external, "in another file: save it as one file"),
        (lying, "bytes for 'w' of shape"),
        (strange, "operators that are not standard: com.evil"),
        (unknown, "ONNX Runtime cannot load"),
    ],
)
def test_foreign_files_that_are_refused(change: Callable[[onnx.ModelProto], None], says: str, tmp_path: Path) -> None:
    change(model := foreign())
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=says):
        formats.load(tmp_path / "net.onnx", Game("g", Box((4,)), Discrete(2)))


@pytest.mark.parametrize(
    ("model", "says"),
    [(foreign(outputs=3), "none of them is 2 numbers"), (foreign(shape=(1, 1, 4)), "takes x of shape")],
)
def test_foreign_files_of_other_shapes(model: onnx.ModelProto, says: str, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=says):
        formats.load(tmp_path / "net.onnx", Game("g", Box((4,)), Discrete(2)))


def test_damaged_foreign_files_never_crash(tmp_path: Path) -> None:
    rng, good = np.random.default_rng(0), foreign().SerializeToString()
    path, game, refused = tmp_path / "net.onnx", Game("g", Box((4,)), Discrete(2)), 0
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, len(data), rng.integers(1, 5)):
            data[at] = rng.integers(256)
        path.write_bytes(bytes(data[: rng.integers(1, len(data) + 1)] if rng.random() < 0.3 else data))
        try:
            formats.load(path, game)
        except InputError:
            refused += 1
    assert refused > 100
