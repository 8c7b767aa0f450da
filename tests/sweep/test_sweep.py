"""Sweeps on a real Ray with token authentication: a cluster of two nodes, the second of which does not see the first
one's files; and the command line with a Ray of its own, interrupted and killed."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from sparring import experiment
from sparring.errors import InputError, SparringError
from sparring.runs import checkpoint
from sparring.runs.run import Run, is_run
from sparring.sweep import sweeping
from sparring.sweep.journal import Journal, TrialStatus
from sparring.sweep.plan import Sweep
from sparring.training import loop

pytestmark = pytest.mark.real
TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
# How often it plays at random. Nothing is compiled anew for it, and it matters at once.
GOOD, HOPELESS = 0.02, 1.0
SEARCHED = f"{{choice: [{HOPELESS}, {GOOD}]}}"
FILE = """
game: odd_games:Odd-v0
algorithm:
  {name: dqn, lr: 0.01, gamma: 0, n_step: 1, batch: 16, replay: 5000, learning_starts: 64, updates_per_step: 0.5,
   exploration_steps: 1, exploration_final: 0.02, layers: [{layer: dense, units: 8}]}
rollout: {envs: 4, steps: 8}
iteration: 160
checkpoint: {every: 2}
stop: {iterations: 9}
seed: 1
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Of the nodes, whose processes find the games of the tests and the example of an algorithm."""
    ours = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODD_TROUBLE", str(ours / "trouble"))
        before = filter(None, [os.environ.get("PYTHONPATH")])
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(EXAMPLES), *before]))
        patch.syspath_prepend(TESTS)
        patch.syspath_prepend(EXAMPLES)
        yield ours


@pytest.fixture(scope="module")
def address(logs, root):
    """Two nodes. The other one has an empty directory where ours has the sweeps: nothing is shared."""
    from sparring.launch import ray_cluster as cluster

    cluster.use_token()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
    head = [*start, "--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=1", "--include-dashboard=false"]
    other = [*start, f"--address={address}", "--num-cpus=2"]
    if can_hide():
        other = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {root} && exec "$@"', "sh", *other]
    nodes = []
    try:
        for words in (head, other):
            with (logs / f"node-{len(nodes)}.log").open("w") as log:
                nodes.append(subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True))
            await_(lambda: "Ray runtime started" in (logs / f"node-{len(nodes) - 1}.log").read_text(), 60)
        cluster.connect(experiment.Resources(address=address))
        await_(lambda: sum(node["Alive"] for node in cluster.ray.nodes()) == 2)
        yield address
    finally:
        if cluster.ray.is_initialized():
            cluster.ray.shutdown()
        for node in nodes:
            for process in [*psutil.Process(node.pid).children(recursive=True), node]:
                process.kill()
            node.wait()


def can_hide() -> bool:
    """In a plain chroot nobody can have mounts of their own."""
    return not os.geteuid() and not subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode


def await_(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def write(path: Path, **changes: object) -> Path:
    import yaml

    data = experiment.parse_yaml(FILE, "file")
    data = experiment.override(data, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])
    path.with_suffix(".yaml").write_text(yaml.safe_dump(data))
    return path.with_suffix(".yaml")


def sweep(out: Path, **changes: object) -> list[TrialStatus]:
    """Here, on the cluster."""
    return carry_out(*sweeping.begin(write(out, **changes), out=out))


def carry_out(plan: Sweep, out: Path) -> list[TrialStatus]:
    trials, complete = sweeping.carry_out(plan, out, lambda: nullcontext(lambda trials: None))
    assert complete
    return trials


def randomness(trial: TrialStatus) -> float:
    return trial.values["algorithm.exploration_final"]


def test_the_other_node_does_not_see_our_files(address, root):
    """Or the tests below would not tell anything about bringing runs home."""
    from sparring.launch.ray_cluster import NodeAffinitySchedulingStrategy, ray

    if not can_hide():
        pytest.skip("hiding a directory from the other node needs root, and a root file system that is a mount")
    (root / "mark").touch()
    look = ray.remote(os.path.exists)
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]
    seen = [look.options(num_cpus=0, scheduling_strategy=where).remote(str(root / "mark")) for where in there]
    assert sorted(ray.get(seen)) == [False, True]


def test_an_algorithm_from_outside_the_package(address, root):
    """Both nodes have its module, as they have the games'."""
    algorithm = "{name: a2c:A2C, steps: 64, lr: {grid: [1e-3, 2e-3, 4e-3]}}"
    trials = sweep(root / "own", game="CartPole-v1", algorithm=algorithm, rollout={}, stop="{iterations: 2}",
                   tune="{scheduler: none}")  # fmt: skip
    assert {trial.state for trial in trials} == {"done"}
    assert sorted(trial.values["algorithm.lr"] for trial in trials) == [1e-3, 2e-3, 4e-3]
    found = Run(root / "own/trials/000").experiment.algorithm
    assert (found["name"], found["gamma"]) == ("a2c:A2C", 0.99)


def test_asha_stops_the_hopeless_of_eight(address, root):
    out = root / "asha"
    trials = sweep(out, algorithm__exploration_final=SEARCHED, tune="{samples: 8, grace: 1}")
    assert len(trials) == 8
    stopped = [trial for trial in trials if trial.state == "stopped"]
    assert stopped
    assert {randomness(trial) for trial in stopped} == {HOPELESS}
    assert all(trial.iterations < 9 for trial in stopped)
    done = [trial for trial in trials if trial.state == "done"]
    assert len(done) + len(stopped) == 8
    assert all(trial.iterations == 9 for trial in done)
    assert [trial for trial in trials if randomness(trial) == GOOD]

    for trial in trials:  # each is a run like any other, wherever it ran
        run = Run(out / "trials" / f"{trial.number:03d}")
        rows = run.rows()
        assert [row["iteration"] for row in rows] == list(range(1, trial.iterations + 1))
        assert rows[-1]["episode/return_recent"] == trial.metric
        assert run.experiment.algorithm["exploration_final"] == randomness(trial)
        assert Path(run.experiment.out) == run.path
        assert run.policy().problem() is None
        assert checkpoint.load(run.checkpoints()[-1])[1]["iteration"] == trial.iterations

    best = experiment.read(out / "best.yaml")
    assert best.algorithm["exploration_final"] == GOOD
    assert best.out is None
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 8
    metrics = [float(row["episode/return_recent"]) for row in table]
    assert metrics == sorted(metrics, reverse=True)
    assert (out / "results.md").read_text().count("stopped") == len(stopped)
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")

    # The best file trains, and learns what the trial learned, which may have run on the other node.
    run = loop.train(experiment.read(out / "best.yaml", [f"out={root / 'again'}"]))
    trial = Run(out / "trials" / table[0]["trial"])
    assert run.rows()[-1]["episode/return_recent"] == pytest.approx(trial.rows()[-1]["episode/return_recent"], abs=0.5)
    loop.resume(trial.path, ["stop.iterations=10"])  # and a trial goes on like any run
    assert len(trial.rows()) == 10


def test_a_grid_is_gone_through_and_a_failure_stays_alone(address, root, capsys):
    """A replay window smaller than a block of play is refused by the trial. They have rollout workers of their own."""
    from rich.console import Console

    from sparring.sweep.progress import SweepProgress

    out = root / "grid"
    changes = {"algorithm__replay": "{grid: [20, 5000]}", "seed": "{grid: [1, 2]}", "rollout__workers": 1}
    plan, _ = sweeping.begin(write(out, **changes, stop="{iterations: 1}"), out=out)
    trials, complete = sweeping.carry_out(plan, out, lambda: SweepProgress(Console(), plan).show("a sweep"))
    assert complete
    states = {(t.values["algorithm.replay"], t.values["seed"]): t.state for t in trials}
    assert states == {(20, 1): "failed", (20, 2): "failed", (5000, 1): "done", (5000, 2): "done"}
    said = capsys.readouterr().out
    assert said.count("trial 000 failed") == 1
    assert "algorithm.replay is 20 rows, one block of play has 36" in said
    assert "2 done, 2 failed" in said
    with (out / "results.csv").open() as file:
        causes = [row["cause"] for row in csv.DictReader(file) if row["state"] == "failed"]
    assert all("one block of play" in cause for cause in causes)


def test_rays_actors_play_for_a_trial(address, root):
    trials = sweep(
        root / "actors",
        seed="{grid: [1]}",
        runner="ray",
        rollout="{workers: 2, envs: 2}",
        resources="{actor_cpus: 0.5}",
        stop="{iterations: 2}",
    )
    assert [trial.state for trial in trials] == ["done"]
    assert "rollout/utilisation_1" in Run(root / "actors" / "trials" / "000").rows()[-1]


def test_all_failed(address, root):
    with pytest.raises(SparringError, match=r"all 2 trials failed(.|\n)*no row had 'loss/qq', did you mean loss/q"):
        sweep(root / "failed", seed="{grid: [1, 2]}", tune="{metric: loss/qq}", stop="{iterations: 2}")
    assert "failed" in (root / "failed" / "results.md").read_text()
    assert not (root / "failed" / "best.yaml").exists()


def test_a_trial_whose_process_dies_goes_on(address, root, logs, caplog):
    (logs / "trouble").write_text("die")
    trials = sweep(root / "dies", seed="{grid: [1, 2]}", stop="{iterations: 3}", tune="{scheduler: none}")
    assert not (logs / "trouble").exists()  # somebody found it
    assert "is lost: it goes on from its last checkpoint" in caplog.text
    assert [trial.state for trial in trials] == ["done", "done"]
    for trial in trials:
        assert len(Run(root / "dies" / "trials" / f"{trial.number:03d}").rows()) == 3


def test_optuna_suggests_and_remembers(address, root):
    out = root / "optuna"
    tune = "{samples: 4, search: optuna, scheduler: none}"
    trials = sweep(out, algorithm__exploration_final="{uniform: [0, 1]}", tune=tune, stop="{iterations: 2}")
    assert [trial.state for trial in trials] == ["done"] * 4
    assert len({randomness(trial) for trial in trials}) == 4
    assert all(0 <= randomness(trial) <= 1 for trial in trials)
    rows = [len(Run(out / "trials" / f"{number:03d}").rows()) for number in range(4)]
    more = carry_out(*sweeping.reopen(out, ["tune.samples=6"]))
    assert len(more) == 6
    assert more[:4] == trials
    assert [len(Run(out / "trials" / f"{number:03d}").rows()) for number in range(4)] == rows


def test_pbt_copies_the_better_ones(address, root):
    """Five trials share three CPUs, so they take turns as well."""
    out = root / "pbt"
    searched = {"algorithm__exploration_final": "{uniform: [0, 1]}"}
    trials = sweep(out, **searched, tune="{samples: 5, scheduler: pbt, grace: 2}", stop="{iterations: 10}")
    assert [trial.state for trial in trials] == ["done"] * 5
    events = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    values, copies = {}, 0
    for event in events:
        if event["event"] == "copied":
            copies += 1
            assert event["number"] != event["source"]
            assert event["values"] != values[event["source"]]  # not only exploited: explored
        if "values" in event:
            values[event["number"]] = event["values"]
            assert 0 <= event["values"]["algorithm.exploration_final"] <= 1
    assert copies == sum(trial.copies for trial in trials) > 0
    for trial in trials:
        run = Run(out / "trials" / f"{trial.number:03d}")
        assert run.experiment.algorithm["exploration_final"] == randomness(trial)
        assert int(run.checkpoints()[-1].name) == 10  # its own, or that of one who had come to the end
    assert "copied from" in (out / "results.md").read_text()


def test_a_copy_has_everything_but_the_values(address, root):
    """Two trials without Tune between them: the second takes over what the first has learned."""
    from sparring.launch.ray_cluster import ray
    from sparring.sweep.trial import Trial, TrialTask, msgspec

    out = root / "copy"
    plan, _ = sweeping.begin(write(out, algorithm__lr="{choice: [0.01, 1e-12]}", tune__scheduler="pbt"), out=out)
    task = TrialTask(plan.to_builtins(), str(out), ray.get_runtime_context().get_node_id())

    def trial(number: int, lr: float) -> Trial:
        values = {"algorithm.lr": lr}
        made = Trial({"task": msgspec.json.encode(task).decode(), "trial": {"number": number, "values": values}})
        made._trial_info = SimpleNamespace(trial_name=f"{number:03d}", trial_id=str(number))
        return made

    good, bad = trial(0, 0.01), trial(1, 0.01)
    for _ in range(3):
        good.train()
    bad.train()
    saved = good.save()
    bad.reset({"task": bad.config["task"], "trial": {"number": 0, "values": {"algorithm.lr": 1e-12}}})
    bad.restore(saved)
    result = bad.train()
    assert result["copied"] == "000"
    assert result["iteration"] == 4
    bad.stop()
    good.stop()
    ours, theirs = (checkpoint.load(Run(out / "trials" / n).checkpoints()[-1])[0] for n in ("001", "000"))
    for name in (name for name in ours if name.startswith("state.params")):
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6, err_msg=name)  # it learns no more
    assert len(ours["replay.obs"]) > len(theirs["replay.obs"])  # it had theirs, and played on
    np.testing.assert_array_equal(ours["replay.obs"][: len(theirs["replay.obs"])], theirs["replay.obs"])
    assert Run(out / "trials" / "001").experiment.algorithm["lr"] == 1e-12
    assert [row["iteration"] for row in Run(out / "trials" / "001").rows()] == [1, 4]


def test_no_room_is_reported_at_once(address, root):
    with pytest.raises(InputError, match=r"it needs 1 × 65 CPU, and this cluster of 2 nodes has [12] CPUs"):
        sweep(root / "room", rollout__workers="{choice: [0, 64]}")
    assert not (root / "room").exists()


def test_a_begun_sweep_is_not_begun_again(address, tmp_path):
    out = tmp_path / "begun"
    file = write(out, algorithm__exploration_final=SEARCHED)
    sweeping.begin(file, out=out)
    for target, words in ((file, {"out": out}), (out, {})):
        with pytest.raises(InputError, match="continue it with --resume"):
            sweeping.begin(target, **words)
    with pytest.raises(InputError, match=r"can only change tune\.samples"):
        sweeping.reopen(out, ["algorithm.lr=1"])
    with pytest.raises(InputError, match=r"a sweep of 10 trials can grow"):
        sweeping.reopen(out, ["tune.samples=9"])
    assert sweeping.reopen(out, ["tune.samples=12"])[0].total == 12
    assert sweeping.reopen(out)[0].total == 12
    with pytest.raises(InputError, match=r"no sweep to resume"):
        sweeping.reopen(tmp_path)


# The command line, with a Ray of its own


def start(*words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "sparring.cli", "sweep", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_interrupted_killed_and_resumed(logs, tmp_path):
    out = tmp_path / "sweep"
    changes = {"algorithm__exploration_final": SEARCHED, "checkpoint": "{every: 1}"}
    changes |= {"stop": "{iterations: 40}", "tune": "{samples: 6, parallel: 2}", "resources__cpus": 2}

    def ended() -> int:
        return (out / "journal.jsonl").read_text().count('"ended"') if (out / "journal.jsonl").exists() else 0

    def rows() -> dict[str, str]:
        return {path.parent.name: path.read_text() for path in out.glob("trials/*/metrics.jsonl")}

    first = start(write(out, **changes), "--out", out)
    await_(lambda: ended() >= 1 or first.poll() is not None, 120)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=100)[0]
    assert first.returncode == loop.INTERRUPTED, said
    assert f"sparring sweep {out} --resume" in said
    assert "unfinished" in said or "waiting" in said
    interrupted = Journal(out, "episode/return_recent")
    for trial in interrupted.left():  # a checkpoint of the very last iteration
        if trial.iterations:
            run = Run(out / "trials" / f"{trial.number:03d}")
            assert int(run.checkpoints()[-1].name) == trial.iterations

    before = ended()
    second = start(out, "--resume")
    await_(lambda: ended() > before or second.poll() is not None, 120)
    assert second.poll() is None, second.communicate()[0]
    second.kill()
    second.communicate()
    left = {f"{trial.number:03d}" for trial in Journal(out, "m").left()}
    kept = {name: text for name, text in rows().items() if name not in left}

    third = start(out, "--resume")
    said = third.communicate(timeout=200)[0]
    assert third.returncode == 0, said
    assert "best: sparring train" in said
    trials = Journal(out, "episode/return_recent").trials.values()
    assert len(trials) == 6
    assert {trial.state for trial in trials} <= {"done", "stopped"}
    assert kept
    assert {name: rows()[name] for name in kept} == kept  # what had ended was not made again
    assert all(trial.iterations == 40 for trial in trials if trial.state == "done")
    for trial in trials:
        found = [json.loads(line)["iteration"] for line in rows()[f"{trial.number:03d}"].splitlines()]
        assert found == list(range(1, trial.iterations + 1))
    assert experiment.read(out / "best.yaml").algorithm["exploration_final"] == GOOD


@pytest.mark.slow
def test_a_population_is_killed_and_resumed(logs, tmp_path):
    """The values that a trial took over are those with which it goes on, from its own last checkpoint."""
    out = tmp_path / "population"
    changes = {"algorithm__exploration_final": "{uniform: [0, 1]}", "checkpoint": "{every: 1}"}
    changes |= {"stop": "{iterations: 80}", "tune": "{samples: 3, scheduler: pbt, grace: 2}", "resources__cpus": 3}
    journal = out / "journal.jsonl"

    first = start(write(out, **changes), "--out", out)
    saved = out / "trials"

    def copies() -> dict[int, list[float]]:
        """What each trial took over, by the journal."""
        found: dict[int, list[float]] = {}
        for line in journal.read_text().split("\n")[:-1] if journal.exists() else ():  # the last may be cut short
            if '"copied"' in line:
                entry = json.loads(line)
                found.setdefault(entry["number"], []).append(entry["values"]["algorithm.exploration_final"])
        return found

    def value(number: int) -> float:
        return Run(saved / f"{number:03d}").experiment.algorithm["exploration_final"]

    def under_way() -> bool:
        """All three have a checkpoint, and one goes on with what it took over: that is noted a moment before."""
        begun = len({path.parts[-3] for path in saved.glob("*/checkpoints/*")}) == 3
        begun = begun and all(is_run(saved / f"{number:03d}") for number in range(3))
        return begun and any(value(number) in taken for number, taken in copies().items())

    await_(lambda: under_way() or first.poll() is not None, 120)
    assert first.poll() is None, first.communicate()[0]
    first.kill()
    first.communicate()
    assert Journal(out, "m").left()
    runs = {number: Run(saved / f"{number:03d}") for number in range(3)}
    began = {number: run.rows()[:1] for number, run in runs.items()}
    values = {number: value(number) for number in runs}
    assert any(values[number] in taken for number, taken in copies().items())

    second = start(out, "--resume")
    said = second.communicate(timeout=200)[0]
    assert second.returncode == 0, said
    trials = list(Journal(out, "episode/return_recent").trials.values())
    assert [trial.state for trial in trials] == ["done"] * 3
    for trial in trials:
        run = Run(out / "trials" / f"{trial.number:03d}")
        assert run.experiment.algorithm["exploration_final"] == randomness(trial)
        # It went on, and did not begin anew: its first row is, with its times, the one from before.
        assert run.rows()[: len(began[trial.number])] == began[trial.number]
        assert int(run.checkpoints()[-1].name) == 80  # its own, or that of one who had come to the end


def test_the_command_line_tells_mistakes(tmp_path):
    process = start(write(tmp_path / "file", algorithm__lr="{loguniform: [1e-3]}"))
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert "two numbers, its low and its high end" in " ".join(said.split())
    assert "Traceback" not in said
