"""`sparring bench inference`: what it times, what it writes, and what it refuses before anything is written."""

import csv
import os
import subprocess
import sys
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from sparring.bench import inference, inference_report, placing, runtimes, timed_play
from sparring.bench.child import Died, open_child
from sparring.bench.timed_play import Timed
from sparring.cli.entry import app
from sparring.errors import InputError
from sparring.export import formats, weights
from sparring.export.foreign import ForeignRunner
from sparring.export.safetensors_file import PolicyRunner
from sparring.games import Box, Discrete, Game, catalog
from sparring.networks.spec import Conv, Dense, Deterministic, QValues


@pytest.fixture
def policy(random_policy):
    return random_policy(catalog.load("CartPole-v1"), (Dense(8, "tanh"),), QValues(duelling=True))


@pytest.fixture
def file(policy, tmp_path):
    (tmp_path / "policy.safetensors").write_bytes(weights.save(policy))
    return str(tmp_path / "policy.safetensors")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(
        inference, "InferenceSettings", partial(inference.InferenceSettings, steady=0.1, estimate=False)
    )


def bench(*words):
    done = CliRunner().invoke(app, ["bench", "inference", *words])
    if done.exception is not None:
        raise done.exception
    return done.output


def read(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.usefixtures("quick")
def test_what_is_written(file, tmp_path):
    words = ["--runtime", "numpy,onnx", "--episodes", "3", "--output", str(tmp_path / "t.csv"), "--meter", "echo 50"]
    words += ["--cpu-affinity", str(min(os.sched_getaffinity(0))), "--save-info", str(tmp_path / "i.npz")]
    output = bench(file, *words)
    steps, episodes, summary = (read(tmp_path / f"t{end}.csv") for end in ("", "-episodes", "-summary"))
    assert list(steps[0]) == ["model", "runtime", "episode", "step_time_ms", "steps", "reward", "run_time_ms"]
    assert [(e["runtime"], e["episode"]) for e in episodes] == [
        (r, str(n)) for r in ("numpy", "onnx") for n in (1, 2, 3)
    ]
    # The same seeds and the same policy: the same play, whatever computes it.
    assert [e["reward"] for e in episodes[:3]] == [e["reward"] for e in episodes[3:]]
    for e in episodes:
        own = [s for s in steps if (s["runtime"], s["episode"]) == (e["runtime"], e["episode"])]
        assert len(own) == int(e["num_steps"]) == int(float(e["reward"]))
        assert [int(s["steps"]) for s in own] == list(range(1, len(own) + 1))
        total = sum(float(s["step_time_ms"]) for s in own) / 1e3
        assert float(e["total_model_time"]) == pytest.approx(total, abs=1e-5)
        assert float(e["average_model_time_per_step"]) == pytest.approx(total / len(own), rel=1e-2)
        assert all(0 < float(s["run_time_ms"]) < float(s["step_time_ms"]) for s in own)
    for row in summary:
        assert float(row["p50_ms"]) <= float(row["p95_ms"]) <= float(row["p99_ms"])
        assert float(row["joules_per_1000"]) > 0
        assert (row["energy_source"], row["measured"], row["device"]) == ("power meter", "here", "CPU")
        assert float(row["steps_per_s"]) > 0 < float(row["memory_mb"])
    info = np.load(tmp_path / "i.npz")
    for runtime in ("numpy", "onnx"):
        rows = [info[f"{file}/{runtime}/{name}_2"] for name in ("obs", "actions")]
        assert [len(each) for each in rows] == [int(episodes[1]["num_steps"])] * 2
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "power meter" in output


def test_steps_cut_the_last_episode(policy, tmp_path):
    order = timed_play.Order(runtime="numpy", game="", times=str(tmp_path / "t.csv"), steps=50)
    episodes, cut = timed_play.play(order, Timed(PolicyRunner(policy)), policy.game, deque(maxlen=4))
    assert cut
    assert sum(steps for _, steps, _ in episodes) == 50 == len((tmp_path / "t.csv").read_text().splitlines())


def test_power_is_looked_at_while_inferences_go_on(policy, tmp_path):
    """A meter that says nothing of what comes before: two readings to begin with, and the look that waits."""
    meter = tmp_path / "meter"
    meter.write_text('echo >> "$0.count"; [ $(wc -l < "$0.count") -le 4 ] && echo 0 || echo 50\n')
    order = timed_play.Order(runtime="numpy", game="", times="", steady=0.1, meter=f"sh {meter}")
    obs = deque([np.zeros((1, 4), "<f4")])
    per_s, cpu, energy = timed_play.steady(Timed(PolicyRunner(policy)), obs, order)
    assert energy.source == "power meter"
    assert energy.joules == pytest.approx(50 * 1000 / per_s, rel=0.2)
    assert cpu > 0
    order = timed_play.Order(runtime="numpy", game="", times="", steady=0.1, estimate=False)
    assert timed_play.steady(Timed(PolicyRunner(policy)), obs, order)[2] is None  # nobody knows: that is not zero


@pytest.mark.parametrize("kind", ["duelling", "box", "image"])
def test_every_runtime_acts_as_the_policy(kind, random_policy, tmp_path):
    pytest.importorskip("ai_edge_litert")
    game, layers, head = {
        "duelling": (Game("g", Box((4,)), Discrete(3, start=2)), (Dense(8),), QValues(duelling=True)),
        "box": (Game("g", Box((4,)), Box((2,), low=-2.0, high=3.0)), (Dense(8),), Deterministic()),
        "image": (Game("g", Box((12, 12, 2), "uint8"), Discrete(3)), (Conv(4, 4, 2), Dense(8)), QValues()),
    }[kind]
    policy = random_policy(game, layers, head)
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (20, 12, 12, 2)).astype("u1") if kind == "image" else rng.normal(size=(20, 4))
    obs = obs.astype(game.observation.element.base)
    for name in ("jax", "numpy", "onnx", "tflite", "c"):
        form = runtimes.RUNTIMES[name]
        file = None if form is None else formats.write(formats.render(form, policy, "p"), tmp_path)[0]
        timed = Timed(runtimes.open_runner(name, game, policy, file, 1))
        for row in np.split(obs, 20):
            np.testing.assert_allclose(timed.act(row), policy.act(row)[0], rtol=1e-3, atol=1e-4)
            assert 0 < timed.call < timed.whole


QUICK = inference.InferenceSettings(steps=30, steady=0.1, estimate=False)


def test_a_file_of_others_is_played(policy, tmp_path):
    (path,) = formats.write(formats.render("onnx", policy, "theirs"), tmp_path)
    model = inference.find(str(path), "CartPole-v1")
    (each,) = inference.measure_all([model], None, QUICK, tmp_path)
    assert (each.runtime, len(each.ms)) == ("onnx", 30)
    assert each.file_bytes == path.stat().st_size
    assert each.result.joules is each.result.energy_source is None  # nothing measured it: that is not zero
    with pytest.raises(InputError, match="nothing to measure: numpy does not play files"):
        inference.measure_all([model], ["numpy"], QUICK, tmp_path)


@pytest.mark.usefixtures("quick")
def test_a_tflite_file_of_others_is_played(policy, tmp_path):
    """One of ours that does not say so any more."""
    pytest.importorskip("ai_edge_litert")
    (data,) = formats.render("tflite", policy, "theirs").values()
    path = tmp_path / "theirs.tflite"
    path.write_bytes(data.replace(b"sparring", b"somebody"))
    assert isinstance(formats.load(path, policy.game), ForeignRunner)
    out = tmp_path / "t.csv"
    bench(str(path), "--game", "CartPole-v1", "--episodes", "2", "--output", str(out))
    assert {row["runtime"] for row in read(tmp_path / "t-summary.csv")} == {"tflite"}
    own = timed_play.Order(runtime="numpy", game="", times=str(tmp_path / "own.csv"), episodes=2)
    expected, _ = timed_play.play(own, Timed(PolicyRunner(policy)), policy.game, deque(maxlen=4))
    assert [float(row["reward"]) for row in read(tmp_path / "t-episodes.csv")] == [ret for ret, _, _ in expected]


@pytest.mark.parametrize(
    ("name", "asked", "played", "said"),
    [
        ("x.onnx", None, ["onnx"], []),
        ("x.int8.onnx", None, ["onnx-int8"], []),
        ("x.tflite", None, ["tflite"], []),
        ("x.onnx", ["jax", "onnx"], ["onnx"], ["jax does not play files that end in .onnx"]),
        ("x.int8.onnx", ["onnx"], ["onnx"], []),
        ("x.onnx", ["onnx", "onnx-int8"], ["onnx"], ["by onnx it is the same"]),
        ("x.tflite", ["tflite", "coral", "c"], ["tflite", "coral"], ["c does not play files that end in .tflite"]),
        ("x.tflite", ["rllib", "tflite"], ["tflite"], ["rllib plays whole checkpoints"]),
    ],
)
def test_what_plays_a_file_of_others(name, asked, played, said, policy, tmp_path):
    model = inference.Model(name, policy.game, file=tmp_path / name)
    why = {each: model.refusal(each, asked) for each in model.runtimes(asked)}
    assert [each for each, words in why.items() if words is None] == played
    found = [words for words in why.values() if words is not None]
    assert len(found) == len(said)
    assert all(words.startswith(start) for words, start in zip(found, said, strict=True))


@pytest.mark.usefixtures("quick")
def test_a_runtime_that_is_left_out_is_said(policy, tmp_path):
    (path,) = formats.write(formats.render("onnx", policy, "theirs"), tmp_path)
    words = ["--game", "CartPole-v1", "--runtime", "jax,onnx", "--steps", "20", "--output", str(tmp_path / "t.csv")]
    output = bench(str(path), *words)
    assert "skipped: theirs.onnx by jax: jax does not play files that end in .onnx" in output


@pytest.mark.usefixtures("quick")
def test_all_is_looked_at_before_the_first_measurement(file, tmp_path, monkeypatch):
    pytest.importorskip("ai_edge_litert")
    ran = []
    monkeypatch.setattr(inference, "_measure", lambda each, *rest: ran.append(each.runtime))
    (tmp_path / "theirs.onnx").write_bytes(b"not a model")
    monkeypatch.chdir(tmp_path)
    for words in (["theirs.onnx"], ["--runtime", "numpy,tflite-int8", "--calibrate", "5"], ["--meter", "echo many"]):
        with pytest.raises((InputError, SystemExit)):
            bench(file, *words, "--game", "CartPole-v1", "--output", "t.csv")
    assert ran == []
    assert not list(tmp_path.glob("t*.csv"))


@pytest.mark.usefixtures("quick")
def test_what_fails_later_leaves_the_rest(file, tmp_path, monkeypatch):
    """Such as a runtime that crashes in the middle: what was measured is written, and the command says so."""
    run = inference._run

    def crashes(order, *rest):
        if order.runtime == "jax":
            raise Died("the process died of SIGSEGV")
        return run(order, *rest)

    monkeypatch.setattr(inference, "_run", crashes)
    words = ["--runtime", "numpy,jax,onnx", "--steps", "20", "--output", str(tmp_path / "t.csv")]
    done = CliRunner().invoke(app, ["bench", "inference", file, *words])
    assert done.exit_code == 2
    assert "by jax: failed: the process died of SIGSEGV" in done.output
    rows = read(tmp_path / "t-summary.csv")
    assert [(row["runtime"], row["steps"]) for row in rows] == [("numpy", "20"), ("jax", ""), ("onnx", "20")]


@pytest.mark.usefixtures("quick")
def test_videos_come_with_the_other_files(file, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    seen = []
    write = inference_report.write

    def note(*words):
        seen.append((tmp_path / "videos").exists())
        return write(*words)

    monkeypatch.setattr(inference_report, "write", note)
    words = ["--runtime", "numpy", "--steps", "20", "--output", str(tmp_path / "t.csv")]
    bench(file, *words, "--video-dir", str(tmp_path / "videos"))
    assert seen == [False]
    (video,) = (tmp_path / "videos").iterdir()
    assert video.name.endswith("policy.safetensors-numpy.mp4")
    assert video.stat().st_size > 1000


DRAWN = """
import gymnasium
import numpy as np
from gymnasium import spaces

class Drawn(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Dict({"at": spaces.Box(-1, 1, (2,)), "door": spaces.Discrete(3, start=1)})
    action_space = spaces.MultiDiscrete([2, 3])

    def __init__(self, render_mode=None, breaks=False):
        self.render_mode, self.breaks, self.steps = render_mode, breaks, 0

    def seen(self):
        return {"at": np.full(2, self.steps / 10, np.float32), "door": np.int64(1 + self.steps % 3)}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.seen(), {}

    def step(self, action):
        assert action.shape == (2,)
        self.steps += 1
        return self.seen(), 1.0, self.steps == 5, False, {}

    def render(self):
        if self.breaks and self.steps == 3:
            raise ZeroDivisionError("the picture is gone")
        return np.zeros((32, 32, 3), np.uint8)

gymnasium.register("Drawn-v0", Drawn)
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("breaks", [False, True])
def test_a_game_of_fields_and_parts_is_filmed_and_rows_stay(breaks, random_policy, tmp_path, monkeypatch):
    """Whatever happens to the film: what was measured is written, and the command says why there is none."""
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "drawn_game.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(":")]))
    game = catalog.load({"id": "drawn_game:Drawn-v0", "breaks": breaks})
    (tmp_path / "p.safetensors").write_bytes(weights.save(random_policy(game, (Dense(4),), QValues())))
    words = ["--runtime", "numpy", "--steps", "20", "--output", str(tmp_path / "t.csv")]
    words += ["--video-dir", str(tmp_path / "videos")]
    done = CliRunner().invoke(app, ["bench", "inference", str(tmp_path / "p.safetensors"), *words])
    assert len(read(tmp_path / "t.csv")) == 20
    assert done.exit_code == (2 if breaks else 0)
    if breaks:
        assert "p.safetensors by numpy: ZeroDivisionError: the picture is gone" in done.output
        assert not (tmp_path / "videos").exists()
    else:
        assert len([*(tmp_path / "videos").iterdir()]) == 1


@pytest.mark.usefixtures("quick")
def test_settings_of_the_game_change_what_is_played(file, tmp_path):
    words = ["--runtime", "numpy", "--episodes", "2", "--output", str(tmp_path / "t.csv")]
    bench(file, *words, "--set", "game.sutton_barto_reward=true")  # nothing for a step, -1 for a fall
    assert [float(row["reward"]) for row in read(tmp_path / "t-episodes.csv")] == [-1, -1]


def test_threads_reach_the_runtime(file, policy, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(inference, "_run", lambda order, settings, *rest: seen.append((order, settings)) or 1 / 0)
    words = ["--runtime", "onnx", "--threads", "3", "--output", str(tmp_path / "t.csv")]
    with pytest.raises(ZeroDivisionError):
        bench(file, *words)
    ((order, settings),) = seen
    assert (order.threads, settings.threads) == (3, 3)
    (path,) = formats.write(formats.render("onnx", policy, "p"), tmp_path)
    asked = []
    monkeypatch.setattr(runtimes.formats, "load", lambda path, game, name, *, threads: asked.append((name, threads)))
    runtimes.open_runner("onnx", policy.game, None, path, order.threads)
    assert asked == [("onnx", 3)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--runtime", "onnxx"], "no runtime 'onnxx': did you mean 'onnx'?"),
        (["--runtime", "numpy,numpy"], "names one twice"),
        (["--runtime", ","], "names none"),
        (["--runtime", "rllib"], "rllib plays whole checkpoints of runs of rllib/…"),
        (["--runtime", "coral"], "libedgetpu.so.1 cannot be loaded"),
        (["--cpu-affinity", "0,4096"], "this machine has no core 4096"),
        (["--cpu-affinity", "one"], "write numbers of cores"),
        (["--gpu", "7"], "--gpu 7: this machine has"),
        (["--gpu", "some"], "write none, all, both, or numbers"),
        (["--output", "no/where/t.csv"], "there is no directory"),
        (["--output", "times.txt"], "ends in .csv"),
        (["--save-info", "info.csv"], "ends in .npz"),
        (["--game", "Acrobot-v1"], "does not play Acrobot-v1"),
        (["--set", "algorithm.lr=1"], "only the game can be set here"),
        (["--meter", "echo many"], "a number is expected"),
    ],
)
def test_refused_before_anything_is_written(file, tmp_path, monkeypatch, words, says):
    if words[1] == "rllib":
        pytest.importorskip("ray.rllib")
    if words[1] == "coral":
        pytest.importorskip("ai_edge_litert")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with pytest.raises(InputError) as refused:
        bench(file, *(["--runtime", "numpy"] if words[0] != "--runtime" else []), *words)
    assert says in str(refused.value)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("theirs.onnx", None, "there is no file"),
        ("theirs.onnx", b"not a model", "theirs.onnx"),
        ("theirs.tflite", b"\x1c\0\0\0TFL3" + b"\xff" * 64, "theirs.tflite"),
    ],
)
def test_files_that_are_none(tmp_path, monkeypatch, name, content, says):
    if name.endswith("tflite"):
        pytest.importorskip("ai_edge_litert")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    runtime = "onnx" if name.endswith("onnx") else "tflite"
    out = tmp_path / "t.csv"
    with pytest.raises(InputError, match=says):
        bench(str(tmp_path / name), "--game", "CartPole-v1", "--runtime", runtime, "--output", str(out))
    assert not out.exists()


@pytest.mark.parametrize("name", ["x.c", "x.int8.c", "play.npz"])
def test_files_that_do_not_play(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"of files only \.onnx, \.tflite and \.safetensors are"):
        bench(str(tmp_path / name), "--game", "CartPole-v1")


def onnx_file(path, nodes, weights, output, declared=None):
    from onnx import TensorProto, helper, numpy_helper

    kind = TensorProto.FLOAT if output[0] == "f" else TensorProto.INT64
    given = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(
        [helper.make_node(*node) for node in nodes],
        "g",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["b", 4])],
        [helper.make_tensor_value_info("y", kind, output[1])],
        given,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if declared is not None:
        helper.set_model_props(model, {"sparring.game": declared.to_json().decode()})
    path.write_bytes(model.SerializeToString())
    return path


PRODUCT = [("MatMul", ["obs", "W"], ["y"])]


@pytest.mark.parametrize(
    ("nodes", "weights", "output", "says"),
    [
        (PRODUCT, {"W": np.full((4, 2), np.nan, "f4")}, ("f", ["b", 2]), r"theirs\.onnx gives NaN"),
        (
            [("Identity", ["k"], ["y"])],
            {"k": np.array([99])},
            ("i", [1]),
            r"theirs\.onnx gives the choice 99: there are 0 to 1",
        ),
    ],
)
def test_files_that_give_no_actions(tmp_path, nodes, weights, output, says):
    path = onnx_file(tmp_path / "theirs.onnx", nodes, weights, output)
    with pytest.raises(InputError, match=says):
        inference.measure_all([inference.find(str(path), "CartPole-v1")], None, QUICK, tmp_path)


def test_a_file_with_our_words_but_no_action(tmp_path, policy):
    weights = {"W": np.zeros((4, 2), "f4")}
    path = onnx_file(tmp_path / "theirs.onnx", PRODUCT, weights, ("f", ["b", 2]), policy.game)
    with pytest.raises(InputError, match=r"theirs\.onnx has no output `action`, but y"):
        formats.load(path, policy.game)


def test_a_file_of_others_needs_a_game(tmp_path):
    (tmp_path / "theirs.onnx").touch()
    with pytest.raises(InputError, match="name a game with --game"):
        bench(str(tmp_path / "theirs.onnx"))


def test_a_runtime_that_crashes_is_an_error_of_its_file(tmp_path, monkeypatch):
    """Whatever a library does with a file, nothing but its own process ends."""
    (tmp_path / "crash.py").write_text("import os, sys\nsys.stdin.read()\nos.kill(os.getpid(), 11)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(Died, match="SIGSEGV"), open_child("crash", {"large": "x" * 200_000}, environment) as child:
        list(child.lines)


def test_a_file_that_never_ends(tmp_path):
    (tmp_path / "endless.py").write_text("import sys, time\nsys.stdin.read()\ntime.sleep(3600)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (
        pytest.raises(Died, match=r"it was not done after 0\.5 seconds"),
        open_child("endless", {}, environment, limit=0.5) as child,
    ):
        list(child.lines)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child is not told")
def test_a_child_ends_with_whoever_started_it(tmp_path):
    (tmp_path / "endless.py").write_text(
        "import time\nfrom sparring.bench.child import say, serve\n"
        "if __name__ == '__main__':\n    serve(lambda order: (say(ready=True), time.sleep(3600)))\n"
    )
    code = (
        "import os\nfrom sparring.bench.child import open_child\n"
        "with open_child('endless', {}, dict(os.environ)) as child:\n"
        "    next(child.lines)\n    print(child.pid, flush=True)\n    list(child.lines)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.terminate()
    child.wait(30)


def test_a_child_runs_on_its_cores_from_the_start(tmp_path):
    (tmp_path / "where.py").write_text(
        "import json, os, sys\nif __name__ == '__main__':\n"
        "    print(json.dumps({'cores': sorted(os.sched_getaffinity(0)), 'order': json.load(sys.stdin)}))\n"
    )
    core = max(os.sched_getaffinity(0))
    with open_child("where", [1], {**os.environ, "PYTHONPATH": str(tmp_path)}, [core]) as child:
        assert list(child.lines) == [{"cores": [core], "order": [1]}]


def test_coral_is_litert_with_a_delegate(monkeypatch, tmp_path, policy):
    """At our own seam: a stand-in of the delegate; no Edge TPU was at hand."""
    asked = []
    assert runtimes.coral_delegate(lambda name: asked.append(name) or "tpu") == "tpu"
    assert asked == ["libedgetpu.so.1"]

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(InputError, match="libedgetpu1-std"):
        runtimes.coral_delegate(absent)
    seen = {}

    class Form:
        def load(self, path, game, *, threads, delegates):
            seen.update(path=path, threads=threads, delegates=delegates)
            return PolicyRunner(policy)

    monkeypatch.setattr(runtimes, "coral_delegate", lambda: "tpu")
    monkeypatch.setattr(runtimes.formats, "find_format", lambda name: Form())
    runtimes.open_runner("coral", policy.game, None, tmp_path / "m.int8.tflite", 2)
    assert seen == {"path": tmp_path / "m.int8.tflite", "threads": 2, "delegates": ["tpu"]}


def test_gpus_and_threads_are_the_childs(monkeypatch):
    assert placing.parse_gpus("none") == ()
    monkeypatch.setattr(placing, "gpus_here", lambda: 2)
    assert placing.parse_gpus("both") == placing.parse_gpus("all") == placing.parse_gpus("1,0") == (0, 1)
    for count in (1, 3):  # as a training has it: all that there are
        monkeypatch.setattr(placing, "gpus_here", lambda count=count: count)
        assert placing.parse_gpus("both") == tuple(range(count))
    monkeypatch.setattr(placing, "gpus_here", lambda: 2)
    assert placing.environment((1,), 3)["CUDA_VISIBLE_DEVICES"] == "1"
    assert "JAX_PLATFORMS" not in set(placing.environment((1,), 3)) - set(os.environ)
    without = placing.environment((), 3)
    assert (without["JAX_PLATFORMS"], without["OMP_NUM_THREADS"], without["NPROC"]) == ("cpu", "3", "3")
    assert placing.parse_affinity("0") == (0,)


def test_the_studys_figures_stand_beside_pong_alone(policy):
    def found(name):
        return [inference.Measured(inference.Model("m", SimpleNamespace(name=name)), "numpy", skipped="no")]

    from sparring.bench.inference_report import study_rows

    assert study_rows(found("CartPole-v1")) == []
    rows = study_rows(found("ALE-Pong-v5"))
    assert {row["measured"] for row in rows} == {"study (mean)"}
    coral = [row["p50_ms"] for row in rows if row["runtime"] == "TFLite int8 on Coral"]
    assert coral == [0.41, 1.03, 0.75]
