"""Which devices a learner computes on, and which CPUs a run may use. There is no GPU here: devices are XLA's virtual
ones, put in the place of GPUs at our own seam (`devices.accelerators`, `devices.gpus_here`)."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from sparring.cli.entry import app
from sparring.errors import InputError
from sparring.experiment import Experiment, Resources
from sparring.runs.study_sink import COLUMNS
from sparring.training import devices, loop

CODE = """
import sys
from pathlib import Path
import jax
from sparring.experiment import Experiment, Resources, Rollout, Stop
from sparring.runs import checkpoint
from sparring.training import devices, loop
gpus = jax.devices()[1:]  # of four: a machine with three
devices.accelerators = lambda: [gpus[i] for i in asked]
devices.gpus_here = lambda: 3
out = Path(sys.argv[1])
ran = []
for gpu, asked in ((1, (1,)), ("0,2", (0, 2)), ("none", ())):
    run = Experiment(game="CartPole-v1", algorithm={"name": "ppo", "steps": 96, "minibatch": 48},
        rollout=Rollout(envs=6), stop=Stop(iterations=1), resources=Resources(gpu=gpu), out=str(out / str(gpu)))
    began = loop.begin(run)
    began.open()
    began.step()
    found = began.trainee.state.params["head.w"].devices()
    began.close()
    want = {gpus[i] for i in asked} or {jax.devices("cpu")[0]}
    ran.append(found == want)
    if not asked: ran.append(jax.config.jax_platforms == "cpu")
asked = (0, 1, 2)
ran.append(devices.choose(Resources(gpu="all")) == devices.choose(Resources(gpu="both")) == gpus)
print(ran)
"""


def test_it_is_learned_on_the_devices_that_were_asked_for(tmp_path: Path) -> None:
    flags = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], env=flags, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "[True, True, True, True, True]", done.stderr[-3000:]


def test_gpus_are_numbers_or_words() -> None:
    for written, gpus in (("none", ()), (0, (0,)), ("0, 2", (0, 2)), ("all", None), ("both", None), (None, None)):
        assert Resources(gpu=written).gpus == gpus
    for wrong in ("first", "0,", "0,0", "-1", -1):
        with pytest.raises(ValueError, match="write none, all, both, or numbers"):
            Resources(gpu=wrong)
    with pytest.raises(ValueError, match="devices is 3: leave devices out"):
        Resources(gpu="0,1", devices=3)


def test_unknown_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus_here", lambda: 2)
    with pytest.raises(InputError, match=r"asks for GPU 5: there are 2.*sparring\[cuda\]"):
        devices.choose(Resources(gpu="0,5"))
    monkeypatch.setattr(devices, "gpus_here", lambda: None)
    with pytest.raises(InputError, match="asks for GPU 0: JAX sees none"):
        devices.choose(Resources(gpu=0))
    jax.config.update("jax_cuda_visible_devices", "all")


def test_a_part_of_a_gpu_is_a_part_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(variable, raising=False)
    for share, expected in ((None, None), (1.0, None), (2.0, None), (0.5, "0.450")):
        devices.use_memory(share)
        assert os.environ.get(variable) == expected
    devices.use_memory(0.2)
    assert os.environ[variable] == "0.450"  # who sets it is not overruled
    monkeypatch.delenv(variable)


def test_affinity() -> None:
    cpus = os.sched_getaffinity(0)
    ready, done = threading.Event(), threading.Event()
    found: list[set[int]] = []

    def older() -> None:
        ready.wait(10)
        found.append(os.sched_getaffinity(0))
        done.set()

    thread = threading.Thread(target=older)
    thread.start()
    one = min(cpus)
    try:
        devices.use_affinity([one])
        ready.set()
        done.wait(10)
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], capture_output=True, text=True
        )
    finally:
        devices.use_affinity(None)
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), cpus)
        thread.join()
    assert found == [{one}]  # threads that were there before, too
    assert child.stdout.strip() == f"[{one}]"
    with pytest.raises(InputError, match=r"resources\.affinity names CPU 4096: this process may use"):
        devices.use_affinity([one, 4096])
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--gpu", "x"], "gpu is 'x': write none"),
        (["--cpu-affinity", "0,4096"], "names CPU 4096"),
        (["--cpu-affinity", "first"], "resources.affinity"),
        (["--worker-gpus", "0.5"], "resources.actor_gpus is for `runner: ray`"),
        (["--cpus", "2"], "--cpus is for `runner: ray`"),
        (["--name", "a", "--out", "b"], "leave one out"),
        (["--restore", "runs/none"], "everything else is in the run"),
    ],
)
def test_options_that_do_not_fit(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "CartPole-v1", "--algorithm", "ppo", *words])
    assert isinstance(done.exception, InputError)
    assert reason in str(done.exception)
    assert not list(tmp_path.rglob("experiment.yaml"))


def test_a_new_run_goes_on_from_anothers_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same run resumed comes out the same; rows have the study's columns, too."""
    monkeypatch.chdir(tmp_path)
    first = {"game": "CartPole-v1", "algorithm": {"name": "ppo", "steps": 64}, "out": "first"}
    first |= {"stop": {"iterations": 4}, "checkpoint": {"every": 1, "keep": 3}, "metrics": ["jsonl", "study"]}
    whole = loop.train(Experiment.parse(first))
    done = CliRunner().invoke(app, ["train", "--restore", "first@2", "--name", "second", "--iterations", "4"])
    assert done.exit_code == 0, done.output
    second = loop.Run(tmp_path / "runs" / "second")
    times = ("time/", "rate/")
    ours, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(times)} for row in run.rows()] for run in (second, whole)
    )
    assert ours == theirs
    assert second.experiment.out == "runs/second"
    study = (tmp_path / "runs/second/study.csv").read_text().splitlines()
    assert study[0].split(",") == list(COLUMNS)
    assert [line.split(",")[0] for line in study[1:]] == ["1", "2", "3", "4"]
    (tmp_path / "runs" / "kept").mkdir()
    for words, reason in (
        (["first@9"], r"keeps these iterations: 2, 3, 4"),
        (["nowhere"], "is not a run directory"),
        (["first@3", "--set", "seed=3"], "can only change stop"),
    ):
        refused = CliRunner().invoke(app, ["train", "--restore", *words, "--name", "third"])
        assert isinstance(refused.exception, InputError)
        assert re.search(reason, str(refused.exception))
    assert not (tmp_path / "runs" / "third").exists()
