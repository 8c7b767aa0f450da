"""examples/a2c.py, an algorithm that the package does not know. A reader copies it into a directory, then trains,
resumes, publishes and plays it, and has it learn from play. Nothing of Sparring is edited. (sweep/test_sweep.py has
a sweep of it.)"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from sparring.api import TrainerStatus
from sparring.cli.entry import app
from sparring.client.bot import Loaded
from sparring.errors import InputError
from sparring.players.mock import play
from sparring.registry.registry import Registry
from sparring.runs import checkpoint
from sparring.runs.run import Run
from sparring.sweep.plan import Sweep
from sparring.training import loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "a2c.py"
SPARRING = [sys.executable, "-m", "sparring.cli"]
RANDOM = 22.0  # mean return of random play
FILE = """
game: CartPole-v1
algorithm: {name: a2c:A2C, lr: 2e-3}
stop: {iterations: 40}
evaluation: {every: 20}
checkpoint: {every: 0}
out: first
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the reader works: the module is found because it lies there."""
    path = tmp_path_factory.mktemp("home")
    shutil.copy(EXAMPLE, path)
    (path / "cartpole.yaml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path
    sys.modules.pop("a2c", None)


@pytest.fixture(scope="module")
def trained(home: Path) -> Run:
    call("train", "cartpole.yaml")
    return Run(home / "first")


def call(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_short_enough_to_be_read() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100


def test_it_learns(trained: Run) -> None:
    rows = trained.rows()
    assert rows[0]["episode/return_mean"] < 2 * RANDOM
    best = trained.best()
    assert best is not None
    assert best.ret > 5 * RANDOM
    assert {"loss/policy", "loss/value", "policy/entropy"} <= rows[-1].keys()
    found = trained.experiment.algorithm
    assert (found["name"], found["gamma"], found["layers"][0]["units"]) == ("a2c:A2C", 0.99, 64)  # those left out, too


def test_resuming_is_bit_identical(home: Path) -> None:
    words = ("train", "CartPole-v1", "--algorithm", "a2c:A2C", "--set", "evaluation.every=0", "--set")
    call(*words, "stop={iterations: 4}", "--out", "whole")
    call(*words, "stop={iterations: 3}", "--out", "parts")
    call("train", "parts", "--resume", "--set", "stop.iterations=4")
    whole, parts = (checkpoint.load(Run(home / name).checkpoints()[-1]) for name in ("whole", "parts"))
    assert whole[1]["iteration"] == parts[1]["iteration"] == 4
    assert whole[1]["trainee"] == parts[1]["trainee"]
    assert whole[0].keys() == parts[0].keys()
    assert all(np.array_equal(array, parts[0][name]) for name, array in whole[0].items())
    assert (home / "whole/policy.onnx").read_bytes() == (home / "parts/policy.onnx").read_bytes()


def test_a_published_version_plays_without_it(trained: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published is a policy like any other: neither the module nor JAX is asked for."""
    assert "CartPole-v1/bot/1" in call("publish", str(trained.path), "--registry", "models")
    manifest = Registry(home / "models").manifest("CartPole-v1", "bot", 1)
    assert (manifest.algorithm, manifest.config["lr"]) == ("a2c:A2C", 0.002)
    monkeypatch.setitem(sys.modules, "a2c", None)  # now it cannot be imported
    said = call("eval", "CartPole-v1", "--registry", "models", "--episodes", "5")
    assert float(said.split("return_mean")[1].split()[0].replace(",", "")) > 5 * RANDOM
    assert "return_mean" in call("eval", str(trained.path), "--episodes", "1")
    assert "a2c:A2C" in call("runs", ".")
    bot = Loaded((trained.path / "policy.onnx").read_bytes(), manifest.game, "bot", 1)  # as a game has it
    assert bot.run({"obs": np.zeros((1, 4), np.float32)}, None)[0] in (0, 1)


def test_a_video_of_it(trained: Run, home: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    call("record", f"{trained.path}@best", "a2c.mp4", "--episodes", "1")
    assert (home / "a2c.mp4").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "CartPole-v1", "--algorithm", "a2c:A3C"], "'a2c' has no 'A3C', did you mean 'A2C'?"),
        (
            ["train", "CartPole-v1", "--algorithm", "a2c:A2C", "--set", "algorithm.lrr=1"],
            "unknown key algorithm.lrr: did you mean algorithm.lr?",
        ),
        (["up", "--algorithm", "a2c:Config", "--data", "data"], "'a2c:Config' is no algorithm: it has no config_class"),
    ],
    ids=["class", "key", "up"],
)
def test_mistakes_end_with_2_and_say_what_is_wrong(words: list[str], says: str) -> None:
    done = subprocess.run([*SPARRING, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not Path("data").exists()
    assert not Path("runs").exists()


def test_it_learns_from_the_past_of_nobody() -> None:
    with pytest.raises(InputError, match=r"a2c:A2C learns from fresh play: use `source: simulate`"):
        loop.train({"game": "CartPole-v1", "algorithm": {"name": "a2c:A2C"}, "source": "store", "store": "x"})


def test_a_sweep_is_checked_before_it_begins() -> None:
    searched = {"game": "CartPole-v1", "stop": {"iterations": 2}, "tune": {"samples": 2}}
    good = {"name": "a2c:A2C", "lr": {"loguniform": [1e-4, 1e-2]}}
    Sweep.parse(searched | {"algorithm": good}).check()
    with pytest.raises(InputError, match=r"algorithm\.lr: expected `float` > 0"):
        Sweep.parse(searched | {"algorithm": good | {"lr": {"uniform": [-1.0, 1.0]}}}).check()
    units = [{"layer": "dense", "units": {"choice": [8, 16]}}]
    copying = {"tune": {"samples": 2, "scheduler": "pbt"}}
    with pytest.raises(InputError, match="which changes the network"):
        Sweep.parse(searched | copying | {"algorithm": {"name": "a2c:A2C", "layers": units}}).check()


# From play


@contextmanager
def platform(data: Path) -> Iterator[str]:
    command = [*SPARRING, "up", "--data", str(data), "--port", "0", "--print-address", "--publish-every", "1"]
    command += ["--algorithm", "a2c:A2C"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), url
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.mark.real
def test_it_learns_from_play(home: Path) -> None:
    """`sparring up`: mock players play the newest version, the trainer learns from what they send."""
    data, stop = home / "live", threading.Event()
    registry = Registry(data / "registry")

    def best() -> float:
        versions = registry.versions("CartPole-v1") if (data / "registry").exists() else []
        manifests = [registry.manifest("CartPole-v1", "bot", version) for version in versions]
        return max((m.metrics.get("evaluation/return_mean", 0.0) for m in manifests), default=0.0)

    with platform(data) as url, tempfile.TemporaryDirectory() as spool:
        options: dict[str, object] = {"players": 8, "rate": 400.0, "refresh": 0.5, "directory": spool, "stop": stop}
        players = threading.Thread(target=play, args=("CartPole-v1", url), kwargs=options)
        players.start()
        try:
            until = time.monotonic() + 120
            while best() < 5 * RANDOM and time.monotonic() < until:
                time.sleep(0.5)
        finally:
            stop.set()
            players.join()
    assert best() >= 5 * RANDOM, (data / "trainer.log").read_text()
    status = msgspec.json.decode((data / "trainer/CartPole-v1/status.json").read_bytes(), type=TrainerStatus)
    assert (status.algorithm, status.updates > 0) == ("a2c:A2C", True)
    noted = json.loads((data / "trainer/CartPole-v1/algorithm.json").read_text())
    assert noted["name"] == "a2c:A2C"
    manifest = registry.latest("CartPole-v1")
    assert manifest is not None
    assert (manifest.algorithm, manifest.config["gamma"]) == ("a2c:A2C", 0.99)
