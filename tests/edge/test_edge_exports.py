"""`sparring export` and `sparring dataset` beyond single formats: comparisons, calibration, and what is refused."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from recorded_play import record
from small_disks import mounted

from sparring import algorithms
from sparring.edge import comparison, dataset, exporter
from sparring.edge.exporter import Wanted
from sparring.edge.made_up import observations
from sparring.errors import InputError
from sparring.experiment import Checkpoints, Evaluation, Experiment, Stop
from sparring.export import distil, formats, weights, whole_numbers
from sparring.files import locked
from sparring.games import Box, Discrete, Game, MultiDiscrete, Space, catalog
from sparring.networks import jax_policy
from sparring.networks.functions import normalise
from sparring.networks.plain import Plain, pixels
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Gaussian, Head, QValues, Squashed
from sparring.runs import checkpoint
from sparring.training import loop

MakePolicy = Callable[..., Policy]
Sparring = Callable[..., tuple[int, str, str]]
SEEN = np.random.default_rng(1).standard_normal((3000, 4), np.float32)


@pytest.fixture
def sparring(monkeypatch: pytest.MonkeyPatch, command_line: Sparring, tmp_path: Path) -> Sparring:
    """`sparring …` in an empty directory: exit code, what it printed, its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return command_line


@pytest.fixture
def cartpole(random_policy: MakePolicy) -> Policy:
    return random_policy(catalog.load("CartPole-v1"), (Dense(32, "tanh"),), Categorical(), seed=3)


def saved(policy: Policy, path: Path) -> str:
    path.write_bytes(weights.save(policy))
    return str(path)


def test_a_page_says_how_alike_files_and_policy_are(cartpole: Policy, sparring: Sparring, tmp_path: Path) -> None:
    source = saved(cartpole, tmp_path / "mine.safetensors")
    code, out, _ = sparring("export", source, "--to", "tflite,c-int8", "--out", "o", "--episodes", "4")
    assert code == 0
    assert out.splitlines()[:2] == ["o/mine.tflite", "o/mine.int8.c"]
    page = json.loads((tmp_path / "o" / "export.json").read_bytes())
    assert page["game"] == "CartPole-v1"
    floats, whole = (page["files"][name] for name in ("mine.tflite", "mine.int8.c"))
    assert floats["bytes"] == (tmp_path / "o" / "mine.tflite").stat().st_size
    assert floats["comparison"]["float_difference"] < 1e-5
    assert floats["comparison"]["agreement"] == 1
    assert floats["returns"]["policy"] == floats["returns"]["file"] > 0
    assert whole["calibration"] == "4000 observations of the policy's play"
    assert 0.97 < whole["comparison"]["agreement"] <= 1
    assert "float_difference" not in whole["comparison"]
    # A further export to the same place adds to the page.
    assert sparring("export", source, "--to", "onnx", "--out", "o", "--episodes", "0")[0] == 0
    page = json.loads((tmp_path / "o" / "export.json").read_bytes())
    assert set(page["files"]) == {"mine.tflite", "mine.int8.c", "mine.onnx"}
    assert "returns" not in page["files"]["mine.onnx"]


def test_two_exports_to_one_place_are_both_on_the_page(
    cartpole: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, locks = formats.write, []

    def look(made: dict[str, bytes], folder: Path) -> list[Path]:
        if exporter.EXPORT in made:
            with locked(folder, wait=False) as ours:
                locks.append(ours)
        return write(made, folder)

    monkeypatch.setattr(formats, "write", look)
    exporter.export(cartpole, Wanted(["safetensors"], "p", tmp_path / "o", episodes=0))
    assert locks == [False], "what others add to the page between reading and writing would be lost"
    assert sorted(os.listdir(tmp_path / "o")) == ["export.json", "p.safetensors"]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "tiny", "4k")


def test_a_full_place_for_temporary_files_is_named(
    cartpole: Policy, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tiny))
    with pytest.raises(InputError, match=rf"cannot write {tiny}/.*: No space left on device.*TMPDIR"):
        exporter.export(cartpole, Wanted(["c"], "p", tmp_path / "o", episodes=0))
    monkeypatch.undo()
    with pytest.raises(InputError, match=rf"cannot write {tiny}/o.*: No space left on device$"):
        exporter.export(cartpole, Wanted(["safetensors"], "p", tiny / "o", episodes=0))


def test_the_error_of_box_actions_is_a_share_of_their_range(random_policy: MakePolicy, tmp_path: Path) -> None:
    policy = random_policy(catalog.load("Pendulum-v1"), (Dense(32, "tanh"),), Gaussian())
    (row,) = exporter.export(policy, Wanted(["tflite-int8"], "p", tmp_path, episodes=0, calibrate=500)).values()
    assert row.comparison is not None
    assert row.comparison.agreement is None
    assert row.comparison.action_error is not None
    assert 0 < row.comparison.action_error < 0.02


def test_the_value_network_of_a_run(sparring: Sparring, tmp_path: Path) -> None:
    made = {"name": "ppo", "layers": [{"layer": "dense", "units": 8}], "steps": 64, "minibatch": 32, "epochs": 1}
    experiment = Experiment(
        "CartPole-v1",
        made,
        iteration=64,
        stop=Stop(iterations=1),
        checkpoint=Checkpoints(every=1),
        out=str(tmp_path / "r"),
    )
    run = loop.train(experiment)
    assert sparring("export", "r", "--to", "onnx,c", "--value", "--episodes", "0")[0] == 0
    value, policy, obs = run.value(), run.policy(), SEEN[:1]
    assert value.layers is not None
    critic = Policy(
        Game("v", policy.game.observation, Discrete(1)), value.layers, QValues(),
        {k: v for k, v in policy.params.items() if k.startswith("normaliser")} | dict(value.params),
    )  # fmt: skip
    for name in ("r.onnx", "r.c"):
        runner = formats.load(tmp_path / name, policy.game)
        found = runner.value(runner.run(runner.prepare(obs)))
        np.testing.assert_allclose(found, critic.outputs(obs)[0, 0], rtol=1e-4, atol=1e-5)
    code, _, err = sparring("export", "r", "--to", "safetensors", "--value")
    assert (code, "no place for a value" in err) == (2, True)


SMALL = [{"layer": "dense", "units": 8}]
EACH = {"steps": 64, "layers": SMALL}


VALUED = """
import numpy as np
from a2c import A2C
from sparring.networks.plain import Value

class Valued(A2C):
    def value(self, state):
        params = {name.removeprefix("value."): np.asarray(state.params[name]) for name in self.value_shapes}
        return Value(self.config.layers, params)
"""


@pytest.mark.parametrize(
    "made",
    [
        {"name": "ppo", "minibatch": 32, "epochs": 1, "critic_layers": [{"layer": "dense", "units": 5}], **EACH},
        {"name": "ppo", "minibatch": 32, "epochs": 1, "shared": True, **EACH},
        {"name": "iql", "layers": SMALL, "critic_layers": [{"layer": "dense", "units": 5}], "batch": 32},
        {"name": "valued:Valued", **EACH},
    ],
    ids=["ppo", "shared", "iql", "outside"],
)
def test_every_algorithm_that_learns_a_value_exports_it(
    made: dict[str, Any], sparring: Sparring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's value is what the algorithm itself computes of its state."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "valued", raising=False)
    (tmp_path / "valued.py").write_text(VALUED)
    record(tmp_path / "store.db", "CartPole-v1", lambda obs: int(obs[2] > 0), 5)
    recorded = {"source": "store", "store": str(tmp_path / "store.db")} if made["name"] == "iql" else {}
    run = loop.train(
        Experiment("CartPole-v1", made, iteration=64, stop=Stop(iterations=1), evaluation=Evaluation(every=0),
                   checkpoint=Checkpoints(every=1), out=str(tmp_path / "r"), **recorded)
    )  # fmt: skip
    assert sparring("export", "r", "--to", "tflite", "--value", "--episodes", "0")[0] == 0
    algorithm = algorithms.create(made["name"], run.policy().game, run.experiment.hyperparameters)
    arrays = checkpoint.load(run.checkpoints()[-1])[0]
    state: Any = checkpoint.unflatten(algorithm.init(jax.random.key(0)), arrays, "state")
    x = normalise({k: v for k, v in run.policy().params.items() if k.startswith("normaliser")}, SEEN[:20])
    own: Any = algorithm
    expected = own.v(state.critic, x) if made["name"] == "iql" else own.forward(state.params, x)[1]
    runner = formats.load(tmp_path / "r.tflite", run.policy().game)
    found = [runner.value(runner.run(runner.prepare(row))) for row in np.split(SEEN[:20], 20)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_run_without_a_value(sparring: Sparring, tmp_path: Path) -> None:
    made = {"name": "dqn", "layers": SMALL, "learning_starts": 64, "batch": 16, "replay": 3000}
    stop, kept = Stop(iterations=1), Checkpoints(every=1)
    loop.train(Experiment("CartPole-v1", made, iteration=200, stop=stop, checkpoint=kept, out=str(tmp_path / "r")))
    for target, says in (
        ("r", "was trained with dqn, which does not learn the value of a state"),
        ("r@7", "no checkpoint of iteration 7"),
    ):
        code, _, err = sparring("export", target, "--to", "onnx", "--value")
        assert (code, says in err) == (2, True), err
    assert not (tmp_path / "export.json").exists()


def test_data_sets_of_games_runs_and_stores(cartpole: Policy, sparring: Sparring, tmp_path: Path) -> None:
    assert sparring("dataset", "CartPole-v1", "random.npz", "--samples", "70") == (
        0, "random.npz: 70 observations of CartPole-v1\n", "",
    )  # fmt: skip
    source = saved(cartpole, tmp_path / "mine.safetensors")
    assert sparring("dataset", "CartPole-v1", "mine.npz", "--samples", "60", "--policy", source)[0] == 0
    record(tmp_path / "store.db", "CartPole-v1", lambda obs: int(obs[2] > 0), 20)
    assert sparring("dataset", "store.db", "people.npz", "--samples", "50")[0] == 0
    for name, count in (("random", 70), ("mine", 60), ("people", 50)):
        with np.load(tmp_path / f"{name}.npz") as arrays:
            assert (arrays["obs"].shape, arrays["obs"].dtype) == ((count, 4), np.float32)
            assert arrays["action"].shape == (count,)
            if name == "people":
                np.testing.assert_array_equal(arrays["action"], arrays["obs"][:, 2] > 0)
    code, _, _ = sparring("export", source, "--to", "tflite-int8", "--calibrate", "people.npz", "--episodes", "0")
    assert code == 0
    page = json.loads((tmp_path / "export.json").read_bytes())
    assert page["files"]["mine.int8.tflite"]["calibration"] == "50 observations of people.npz"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "tflite-int8", "--calibrate", "few.npz"], "3 observations are too few"),
        (["--to", "onnx-int8", "--calibrate", "few.npz"], "3 observations are too few"),
        (["--to", "c-int8", "--calibrate", "other.npz"], "has obs as float32(50, 5), CartPole-v1 has float32 of shape"),
        (["--to", "c-int8", "--calibrate", "text.npz"], "is not an npz of observations"),
        (["--to", "c-int8", "--calibrate", "no.npz"], "there is no such file"),
        (["--to", "c-int8", "--calibrate", "7"], "give 20 to 1,000,000 observations"),
        (["--to", "onnx", "--out", "text.npz/o"], "is a file"),
        (["--to", ","], "--to is empty"),
        (["--to", "onnx", "--value"], "is published, without its value network"),
    ],
)
def test_what_is_refused_leaves_nothing(
    words: list[str], says: str, cartpole: Policy, sparring: Sparring, tmp_path: Path
) -> None:
    source = saved(cartpole, tmp_path / "mine.safetensors")
    np.savez(tmp_path / "few.npz", obs=SEEN[:3])
    np.savez(tmp_path / "other.npz", obs=np.zeros((50, 5), np.float32))
    (tmp_path / "text.npz").write_text("hello")
    before = sorted(tmp_path.rglob("*"))
    code, _, err = sparring("export", source, "--episodes", "0", *words)
    assert (code, says in err) == (2, True), err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_compiler_c_is_written_all_the_same(
    cartpole: Policy, sparring: Sparring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(cartpole, tmp_path / "mine.safetensors")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, _ = sparring("export", source, "--to", "c,onnx", "--out", "o", "--episodes", "0")
    assert code == 0
    assert "mine.c was not compared: there is no C compiler here to try the file with: install gcc" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("c ")]
    assert row[-2:] == ["not", "compared"]
    files = json.loads((tmp_path / "o" / "export.json").read_bytes())["files"]
    assert "install gcc" in files["mine.c"]["not_compared"]
    assert "comparison" not in files["mine.c"]
    assert files["mine.onnx"]["comparison"]["agreement"] == 1
    assert (tmp_path / "o" / "mine.c").read_bytes() == formats.render("c", cartpole, "mine")["mine.c"]


def test_files_are_compared_with_the_policy_in_jax(
    cartpole: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's form of a policy is a rendering as others are: one that errs is told."""
    made, compile_outputs = [], jax_policy.compile_outputs
    monkeypatch.setattr(jax_policy, "compile_outputs", lambda policy: made.append(policy) or compile_outputs(policy))
    outputs = Policy.outputs
    monkeypatch.setattr(Policy, "outputs", lambda policy, obs: outputs(policy, obs) + 1)
    rows = exporter.export(cartpole, Wanted(["onnx", "safetensors"], "p", tmp_path, episodes=0))
    differences = {name: row.comparison.float_difference for name, row in rows.items() if row.comparison is not None}
    assert differences["p.onnx"] < 1e-5
    assert differences["p.safetensors"] == pytest.approx(1, abs=1e-5)
    assert made == [cartpole]  # once for all files


@pytest.mark.parametrize(
    ("observation", "action", "head"),
    [
        (Box((9, 8, 3), "uint8"), Discrete(3, start=2), QValues(duelling=True)),
        (Box((5,)), MultiDiscrete((3, 5)), QValues(duelling=True)),
        (Box((5,)), Box((2,), low=(-1.0, 0.0), high=(1.0, 9.0)), Gaussian(observed=True)),
        (Box((5,)), Box((2,), low=-2.0, high=3.0), Squashed()),
    ],
)
def test_what_is_expected_is_the_policys(
    observation: Box, action: Space, head: Head, random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "AT_ONCE", 7)
    policy = random_policy(Game("g", observation, action), (Dense(8, "tanh"),), head)
    obs = observations(policy, 17, np.random.default_rng(0))
    expected = comparison.expect(policy, obs)
    np.testing.assert_allclose(expected.outputs, policy.outputs(obs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(expected.action, policy.act(obs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("calibrate", ["100", "play.npz"])
def test_calibration_that_nothing_needs_is_said(
    calibrate: str, cartpole: Policy, sparring: Sparring, tmp_path: Path
) -> None:
    source = saved(cartpole, tmp_path / "mine.safetensors")
    np.savez(tmp_path / "play.npz", obs=SEEN[:200])
    code, _, err = sparring("export", source, "--to", "onnx,c", "--calibrate", calibrate, "--out", "o")
    assert (code, "is for whole numbers (onnx-int8, tflite-int8, c-int8)" in err) == (2, True), err
    assert not (tmp_path / "o").exists()


def test_a_declared_game_is_calibrated_with_recorded_play(
    random_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = random_policy(Game("mine", Box((4,)), Discrete(3)), (Dense(8),), QValues())
    with pytest.raises(InputError, match="which cannot be played here: take recorded play"):
        exporter.export(policy, Wanted(["c-int8"], "p", tmp_path / "o"))
    assert not (tmp_path / "o").exists()
    dataset.save(dataset.Sample(policy.game, SEEN[:200], np.zeros(200, np.int32)), tmp_path / "d.npz")
    seen: dict[str, np.ndarray] = {}
    compare, render = exporter.compare, formats.render
    monkeypatch.setattr(
        exporter, "compare", lambda *given, **more: seen.update(held=given[2].obs) or compare(*given, **more)
    )
    monkeypatch.setattr(formats, "render", lambda *given: seen.update(used=given[3].calibration) or render(*given))
    found = exporter.export(policy, Wanted(["onnx", "c-int8"], "p", tmp_path / "o", calibrate=tmp_path / "d.npz"))
    assert [row.observations for row in found.values()] == ["the last 40 observations of d.npz"] * 2
    assert found["p.int8.c"].calibration == "160 observations of d.npz"
    np.testing.assert_array_equal(seen["used"], SEEN[:160])
    np.testing.assert_array_equal(seen["held"], SEEN[160:200])
    np.savez(tmp_path / "few.npz", obs=SEEN[:23])
    with pytest.raises(
        InputError, match=r"23 observations: 4 are kept to compare on, and 19 are too few .* give 25 or more"
    ):
        exporter.export(policy, Wanted(["c-int8"], "p", tmp_path / "n", calibrate=tmp_path / "few.npz"))
    floats = exporter.export(policy, Wanted(["onnx"], "p", tmp_path / "o"))
    assert floats["p.onnx"].observations.startswith("made up")
    assert floats["p.onnx"].comparison is not None
    assert floats["p.onnx"].comparison.agreement == 1


def test_weights_are_tuned_where_rounding_costs_too_much(
    random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_numbers, "WANTED", 0.0)
    monkeypatch.setattr(distil, "STEPS", 600)
    monkeypatch.setattr(distil, "RATE", 1e-3)
    game = Game("g", Box((4,)), MultiDiscrete((5, 4, 6)))
    policy = random_policy(game, (Dense(24, "tanh"), Dense(24, "tanh")), QValues())
    plain, said = Plain.of(policy), []
    rounded, x = whole_numbers.whole(plain, SEEN), pixels(policy.game, SEEN)
    tuned = distil.tune(rounded, x, said.append)
    before, after = (whole_numbers.agreement(each, x) for each in (rounded, tuned))
    assert before < after
    assert f"{after:.2%} of its actions" in said[-1]


@pytest.mark.parametrize(("wanted", "tuned"), [(0.0, False), (1.1, True)])
def test_a_page_says_whether_weights_were_tuned(
    wanted: float, tuned: bool, random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole_numbers, "WANTED", wanted)
    monkeypatch.setattr(distil, "STEPS", 6)
    np.savez(tmp_path / "d.npz", obs=SEEN[:200])
    policy = random_policy(Game("g", Box((4,)), Discrete(3)), (Dense(8),), QValues())
    names = ["c", "tflite-int8", "onnx-int8", "c-int8"]
    exporter.export(policy, Wanted(names, "p", tmp_path / "o", calibrate=tmp_path / "d.npz"))
    files = json.loads((tmp_path / "o" / "export.json").read_bytes())["files"]
    found = {name: row.get("tuned", "nothing") for name, row in files.items()}
    assert found == {"p.c": "nothing", "p.int8.onnx": "nothing", "p.int8.tflite": tuned, "p.int8.c": tuned}


def test_the_compiler_of_the_edge_tpu_is_asked_where_there_is_one(
    random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in: it says what the real one does, and copies the file."""
    program = tmp_path / "bin" / "edgetpu_compiler"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncp "$4" "$3/$(basename "$4" .tflite)_edgetpu.tflite"\n'
        'echo "Number of operations that will run on Edge TPU: 5"\n'
        'echo "Number of operations that will run on CPU: 1"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    policy = random_policy(catalog.load("CartPole-v1"), (Dense(8),), QValues())
    wanted = Wanted(["tflite-int8"], "p", tmp_path / "o", episodes=0, calibrate=100)
    row = exporter.export(policy, wanted)["p.int8.tflite"]
    assert row.edge_tpu is not None
    assert (row.edge_tpu.tpu, row.edge_tpu.cpu) == (5, 1)
    assert (tmp_path / "o" / "p.int8_edgetpu.tflite").read_bytes() == (tmp_path / "o" / "p.int8.tflite").read_bytes()


FUZZ = """
import sys, numpy as np
from pathlib import Path
from sparring.errors import InputError
from sparring.export import formats
from sparring.games import Box, Discrete, Game
path, good = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes()
rng, refused = np.random.default_rng(0), 0
for i in range(400):
    data = bytearray(good)
    for at in rng.integers(0, len(data), rng.integers(1, 4)):
        data[at] = rng.integers(256)
    cut = rng.integers(0, len(data)) if i % 4 == 0 else len(data)
    path.with_name("bad.tflite").write_bytes(bytes(data[:cut]))
    try:
        formats.load(path.with_name("bad.tflite"), Game("g", Box((4,)), Discrete(3)))
    except InputError:
        refused += 1
print("refused", refused)
"""


@pytest.mark.parametrize("whole", [False, True])
def test_damaged_tflite_files_never_crash(whole: bool, random_policy: MakePolicy, tmp_path: Path) -> None:
    """In a process of its own: what LiteRT does with a file that lies would take the tests with it."""
    policy = random_policy(Game("g", Box((4,)), Discrete(3)), (Dense(8),), QValues())
    given = formats.Given(calibration=SEEN[:50] if whole else None)
    name = "tflite-int8" if whole else "tflite"
    (path,) = formats.write(formats.render(name, policy, "p", given), tmp_path)
    done = subprocess.run([sys.executable, "-c", FUZZ, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 100


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "does not begin like one"), (b"\x1c\0\0\0TFL3" + b"\xff" * 60, "damaged"), (b"x" * 99, "does not begin")],
)
def test_what_is_no_tflite_file(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "p.tflite").write_bytes(data)
    with pytest.raises(InputError, match=says):
        formats.load(tmp_path / "p.tflite", Game("g", Box((4,)), Discrete(2)))
