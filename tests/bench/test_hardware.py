"""`sparring bench hardware`: which configurations, what is skipped and why, going on, what the report says. GPUs are
counted at our own seam: no machine with one was at hand."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from sparring.bench import hardware, hardware_report, placing, study
from sparring.bench.child import Died
from sparring.bench.document import Document
from sparring.bench.scaling import Round
from sparring.cli.entry import app
from sparring.errors import InputError

EXPERIMENT = """
game: {game}
algorithm: {{name: ppo, steps: 256, minibatch: 64, epochs: 2, layers: [{{layer: dense, units: 16}}]}}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "small.yaml").write_text(EXPERIMENT.format(game="CartPole-v1"))
    return tmp_path / "small.yaml"


def found_round(seconds=2.0):
    phases = {"sample": 0.5 * seconds, "load": 0.0, "learn": 0.4 * seconds, "update": 0.01}
    return Round(seconds, 256 / seconds, phases, None, None, None, 3.0)


@pytest.fixture
def measured(monkeypatch):
    """What is asked of the measuring process, which is not started."""
    asked = []

    def measure(experiment, iterations, environment, progress, *, cores=None, on_row=lambda counts: None):
        asked.append((experiment, environment, cores))
        on_row(False)
        for number in range(iterations):
            on_row(True)
            progress(number + 1)
        return found_round(2.0 / len(asked))

    monkeypatch.setattr(hardware, "measure", measure)
    monkeypatch.setattr(hardware, "LOOKS_S", 100.0)
    return asked


def bench(*words):
    done = CliRunner().invoke(app, ["bench", "hardware", *(str(word) for word in words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_the_matrix(file, monkeypatch):
    monkeypatch.setattr(placing, "gpus_here", lambda: 1)
    matrix = hardware.matrix_of([file], "none,0,0+1,both", "0,2", "all,0", "float32,bfloat16")
    each = list(matrix.each())
    assert len(each) == 3 * 2 * 2 * 2  # "both" are all that there are: here "0"
    possible = [configuration for configuration, why in each if why is None]
    assert {c.gpus for c in possible} == {(), (0,)}
    reasons = {why for _, why in each if why is not None}
    assert all("this machine has 1 GPU that JAX can use" in why for why in reasons)
    assert {c.device for c, why in each if why is not None} == {"GPU 0+1"}
    experiment = possible[-1].of(matrix.models["small"])
    assert (experiment.rollout.workers, experiment.precision) == (2, "bfloat16")


def test_default_devices_and_workers(file, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    matrix = hardware.matrix_of([file], None, None, "all", "float32")
    assert matrix.workers == (0, 1, 2, 4)
    assert matrix.devices == ("none", "0", "1", "0,1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"devices": "gpu0"}, "--devices gpu0"),
        ({"workers": "many"}, "--workers many"),
        ({"affinity": "0;1"}, "--affinity 0;1"),
        ({"precision": "float16"}, "--precision 'float16'"),
    ],
)
def test_a_matrix_that_cannot_be_read(file, words, says):
    given = {"devices": None, "workers": None, "affinity": "all", "precision": "float32"} | words
    with pytest.raises(InputError, match=says):
        hardware.matrix_of([file], **given)


def test_two_experiments_of_one_name(file, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "small.yaml").write_text(file.read_text())
    with pytest.raises(InputError, match="two experiments are named small"):
        hardware.matrix_of([file, tmp_path / "other" / "small.yaml"], None, None, "all", "float32")


def test_what_is_measured_and_what_the_report_says(file, tmp_path, measured):
    core = min(os.sched_getaffinity(0))
    done = bench(
        file, "--workers", "0,2", "--affinity", f"all,{core},0+4096", "--devices", "none,0", "--out", tmp_path / "o"
    )
    assert done.exit_code == 0, done.output
    assert [(e.rollout.workers, cores) for e, _, cores in measured] == [
        (0, None),
        (0, (core,)),
        (2, None),
        (2, (core,)),
    ]
    assert {environment["JAX_PLATFORMS"] for _, environment, _ in measured} == {"cpu"}
    page = (tmp_path / "o" / "report.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| small | CPU | 0 | all |")]
    assert rows[0].endswith("| float32 | 2 s | 1 s | 0 ms | 0.8 s | 10 ms | 128 | 320 | 640 | ×1.00 |")
    assert "×4.00" in page  # the fourth took a quarter of the time
    assert "no core 4096" in page
    assert "no GPUs that JAX can use" in page
    assert rows[1].count("–") == 7  # nothing was seen: no zeros
    assert "hardware study" not in page.lower().replace("# hardware study", "")  # no Pong here
    html = (tmp_path / "o" / "report.html").read_text()
    assert "data:image/png;base64," in html
    assert 'src="hardware' not in html
    assert (tmp_path / "o" / "hardware-time.png").exists()


def test_going_on(file, tmp_path, measured):
    words = [file, "--workers", "0,2", "--devices", "none", "--out", tmp_path / "o"]
    bench(*words, "--iterations", "2")
    bench(*words, "--iterations", "2")
    assert len(measured) == 2
    with (tmp_path / "o" / "results.jsonl").open("a") as results:
        results.write('{"cut short')
    bench(*words, "--iterations", "2", "--precision", "float32,bfloat16")
    assert len(measured) == 4  # what is new
    bench(*words, "--iterations", "3")
    assert len(measured) == 6  # something else
    assert len((tmp_path / "o" / "results.jsonl").read_text().splitlines()) == 7


def test_results_of_another_machine_are_not_mixed(file, tmp_path, measured):
    words = [file, "--workers", "0", "--devices", "none", "--out", tmp_path / "o"]
    bench(*words)
    path = tmp_path / "o" / "results.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | {"processor": "abacus"}) + "\n" + "".join(rest))
    with pytest.raises(InputError, match="measured on another machine"):
        bench(*words)
    path.write_text("[]\n")
    with pytest.raises(InputError, match="damaged"):
        bench(*words)
    assert len(measured) == 1


def test_one_that_fails_is_skipped_with_its_reason(file, tmp_path, measured, monkeypatch):
    inner = hardware.measure

    def measure(experiment, *args, **more):
        if experiment.rollout.workers == 0:
            raise Died("the process died of SIGKILL")
        return inner(experiment, *args, **more)

    monkeypatch.setattr(hardware, "measure", measure)
    done = bench(file, "--workers", "0,2", "--devices", "none", "--out", tmp_path / "o")
    assert done.exit_code == 0
    assert "died of SIGKILL" in (tmp_path / "o" / "report.md").read_text()
    assert len(measured) == 1


def test_interrupted_it_writes_what_there_is(file, tmp_path, measured, monkeypatch):
    inner = hardware.measure

    def measure(*args, **more):
        if measured:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        return inner(*args, **more)

    monkeypatch.setattr(hardware, "measure", measure)
    words = [file, "--workers", "0,2", "--devices", "none", "--out", tmp_path / "o"]
    done = bench(*words)
    assert done.exit_code == 75
    assert "| small | CPU | 0 | all |" in (tmp_path / "o" / "report.md").read_text()
    monkeypatch.setattr(hardware, "measure", inner)
    assert bench(*words).exit_code == 0
    assert len(measured) == 2


def test_the_studys_tables_stand_beside_pong(tmp_path, monkeypatch):
    pytest.importorskip("ale_py")
    (tmp_path / "pong.yaml").write_text(EXPERIMENT.format(game="ALE/Pong-v5"))
    matrix = hardware.matrix_of([tmp_path / "pong.yaml"], "none", "0", "all", "float32")
    page = hardware_report.document(matrix, [], [], "sparring bench hardware pong.yaml", 3).markdown()
    assert "The study's own figures, on its machines" in page
    assert "| no GPU (many-core server) | 287 s (282 / 4.7; 14; 420) |" in page
    assert study.TRAINING["both"][1].whole == 24.9
    assert "| TFLite int8 on Coral | 0.41 | 1.03 | 0.75 |" in page


def test_inferences_that_were_measured_are_in_the_report(file, tmp_path, measured):
    """By the other command, into the same directory."""
    folder = tmp_path / "o"
    words = [file, "--workers", "0", "--devices", "none", "--out", folder]
    bench(*words)
    assert "## Inference" not in (folder / "report.md").read_text()
    summary = folder / "times-summary.csv"
    summary.write_text("model,runtime,p50_ms,skipped\nrun-1,numpy,0.01234567,\nrun-1,coral,,no library\n")
    bench(*words)
    page = (folder / "report.md").read_text()
    assert "| run-1 | numpy | 0.0123 |" in page
    assert "| coral |" not in page
    summary.write_text("model,runtime,p50_ms\nrun-1,numpy,much\n")
    with pytest.raises(InputError, match="is damaged"):
        bench(*words)


def test_a_machine_that_was_not_quiet_is_said(file, tmp_path, measured, monkeypatch):
    bench(file, "--workers", "0", "--devices", "none", "--out", tmp_path / "o")
    path = tmp_path / "o" / "results.jsonl"
    first, line = path.read_text().splitlines()
    for others, said in ((0.1, False), (0.6, True)):
        each = json.loads(line) | {"usage": {"usage/cpu": 0.3, "usage/machine_cpu": 0.3 + others}}
        path.write_text(f"{first}\n{json.dumps(each)}\n")
        bench(file, "--workers", "0", "--devices", "none", "--out", tmp_path / "o")
        assert ("others took 60% to 60% of it" in (tmp_path / "o" / "report.md").read_text()) is said


def test_documents_are_safe_html():
    page = Document("a <b>")
    page.table(["x"], [["<script>"], ["1.5 s"], ["a|b"]])
    page.text("say `a<b` **now**")
    assert "<script>" not in page.html()
    assert '<td class="n">1.5 s</td>' in page.html()
    assert "<code>a&lt;b</code>" in page.html()
    assert "<b>now</b>" in page.html()
    assert "| a\\|b |" in page.markdown()


@pytest.mark.real
def test_it_measures(file, tmp_path):
    """The whole of it, with real iterations."""
    command = [
        sys.executable,
        "-m",
        "sparring.cli",
        "bench",
        "hardware",
        str(file),
        "--workers",
        "0",
        "--meter",
        "echo 40",
    ]
    command += [
        "--devices",
        "none",
        "--iterations",
        "2",
        "--out",
        str(tmp_path / "o"),
        "--set",
        "algorithm.steps=16384",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    _, line = (tmp_path / "o" / "results.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["steps_per_s"] * found["iteration_s"] == pytest.approx(16384, rel=0.1)
    assert 0 < found["usage"]["usage/cpu"] <= 1
    assert found["energy_source"] == "power meter"
    assert found["joules"] == pytest.approx(40 * found["iteration_s"], rel=0.5)
