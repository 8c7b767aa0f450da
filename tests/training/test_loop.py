"""Training runs: they learn, they can be interrupted anywhere and go on as if nothing had happened, and they never
overwrite anything."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from small_runs import DQN, PPO, SAC, WIDE_DQN, experiment

from sparring import files
from sparring.errors import InputError, SparringError
from sparring.experiment import Checkpoints, Evaluation, Experiment, Rollout, Stop, write
from sparring.export import onnx
from sparring.runs import checkpoint
from sparring.runs.metrics import PHASES
from sparring.runs.run import Best, Run, list_runs
from sparring.runs.sinks import Sinks
from sparring.training import evaluate, loop


def test_a_run_directory_has_everything(tmp_path):
    run = loop.train(experiment(tmp_path / "run", evaluation=Evaluation(every=2, episodes=2)))
    rows = run.rows()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert {f"time/{phase}_s" for phase in PHASES} < set(row)
        assert row["time/iteration_s"] >= 0.9 * sum(row[f"time/{phase}_s"] for phase in PHASES) - 0.01
    assert {"episode/return_min", "episode/return_mean", "episode/return_max", "episode/length_mean"} < set(rows[-1])
    assert "loss/q" in rows[-1]
    assert ["evaluation/return_mean" in row for row in rows] == [False, True, False, True]
    table = list(csv.DictReader((run.path / "metrics.csv").open()))
    assert [{k: float(v) for k, v in row.items() if v} for row in table] == rows
    assert [path.name for path in run.checkpoints()] == ["00000002", "00000004"]
    resolved = run.experiment
    assert resolved.algorithm["lr"] == 1e-3  # what was not said is said now
    assert resolved.algorithm["layers"] == [{"layer": "dense", "units": 16, "activation": "relu", "norm": False}]
    assert (run.path / "policy.onnx").stat().st_size > 500
    assert run.policy().game.name == "CartPole-v1"
    assert list_runs(tmp_path)[0].path == run.path


CASES = {
    "dqn, native vector game": {},
    "dqn, one environment": {"rollout": Rollout(envs=1, steps=8)},
    "sac": {"game": "Pendulum-v1", "algorithm": SAC, "rollout": Rollout(envs=2, steps=8)},
    "dqn, rarely an update": {"algorithm": DQN | {"updates_per_step": 0.01}, "iteration": 40},
    "dqn, bfloat16": {"algorithm": WIDE_DQN, "precision": "bfloat16"},
    "ppo": {"algorithm": PPO, "rollout": Rollout(envs=4)},
    "ppo, separate games": {"game": "Acrobot-v1", "algorithm": PPO, "rollout": Rollout(envs=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_is_bit_identical(tmp_path, case):
    """Parameters, optimiser, random numbers, replay, counters, games: after 4 iterations at once, and after 3 (which is
    no regular checkpoint) and 1 more in what is as good as another process."""
    changes = {"evaluation": Evaluation(every=1, episodes=2)} | CASES[case]
    loop.train(experiment(tmp_path / "whole", **changes))
    loop.train(experiment(tmp_path / "parts", stop=Stop(iterations=3), **changes))
    loop.resume(tmp_path / "parts", ["stop.iterations=4"])
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_precision_is_of_one_run(tmp_path):
    """It is the process's setting: a run leaves none behind for the next."""
    wide = {"algorithm": WIDE_DQN, "stop": Stop(iterations=1)}
    runs = [
        loop.train(experiment(tmp_path / str(i), precision=precision, **wide))
        for i, precision in enumerate(("float32", "bfloat16", "float32"))
    ]
    first, half, again = (run.policy().params for run in runs)
    assert not np.array_equal(first["torso.1.w"], half["torso.1.w"])
    np.testing.assert_allclose(first["torso.1.w"], half["torso.1.w"], atol=0.05)
    assert all(np.array_equal(first[name], again[name]) for name in first)


def assert_same(one: Path, other: Path) -> None:
    (arrays, meta), (again, meta_again) = (checkpoint.load(Run(path).checkpoints()[-1]) for path in (one, other))
    assert arrays.keys() == again.keys()
    for name, array in arrays.items():
        assert array.dtype == again[name].dtype
        assert np.array_equal(array, again[name]), name
    assert {k: v for k, v in meta.items() if k != "seconds"} == {k: v for k, v in meta_again.items() if k != "seconds"}
    assert meta["iteration"] == 4
    clocks = ("time/", "rate/", "rollout/utilisation", "usage/", "energy/")
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in Run(path).rows()]
        for path in (one, other)
    ]
    assert timeless[0] == timeless[1]
    for name in ("policy.onnx", "policy-best.onnx", "checkpoint.best/state.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.real
def test_resuming_workers_that_wait_for_each_update_is_bit_identical(tmp_path):
    evaluation = Evaluation(every=1, episodes=2)
    changes = {"algorithm": PPO, "rollout": Rollout(workers=2, envs=2), "evaluation": evaluation}
    loop.train(experiment(tmp_path / "whole", **changes))
    loop.train(experiment(tmp_path / "parts", stop=Stop(iterations=3), **changes))
    loop.resume(tmp_path / "parts", ["stop.iterations=4"])
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.real
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": Rollout(workers=2, envs=2, steps=8)},
        {"algorithm": PPO, "rollout": Rollout(workers=2, envs=2, overlap=True)},
    ],
    ids=["dqn", "ppo, overlapping"],
)
def test_workers_that_play_on_while_we_learn(tmp_path, changes):
    loop.train(experiment(tmp_path / "run", stop=Stop(iterations=3), **changes))
    run = loop.resume(tmp_path / "run", ["stop.iterations=5"])
    rows = run.rows()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    if "algorithm" in changes:  # played with the newest policy, or with the one before
        assert all(0 <= row["policy/lag"] <= 1 for row in rows)


def test_who_goes_on_without_a_state_plays_other_games(tmp_path):
    """Else a run that is resumed every hour would see the same first hour again and again."""
    run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=1)))
    firsts = []
    for states in (None, [None], [None]):
        again = loop.reopen(run.path)
        again.states = states
        again.trainee.steps += len(firsts)
        again.open()
        firsts.append(again.trainee.source.actor.obs.tobytes())
        again.close()
    assert len(set(firsts)) == 3


def test_a_game_without_an_end_is_evaluated(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    evaluation = Evaluation(every=1, episodes=10, limit=50)
    e = experiment(tmp_path / "run", game="odd_games:Endless-v0", evaluation=evaluation, stop=Stop(steps=300))
    row = loop.train(e).rows()[-1]
    assert (row["evaluation/episodes"], row["evaluation/length_mean"], row["episode/count"]) == (10, 50, 0)
    assert row["evaluation/cut"] == 10
    assert caplog.text.count("10 of 10 episodes of Endless-v0 were cut after 50 steps") == 1  # not at each evaluation


@pytest.mark.parametrize("kind", ["dqn", "ppo", "dqn with workers", "ppo with workers"])
def test_numbers_in_info_are_metrics_and_masks_are_warned_about_once(tmp_path, monkeypatch, caplog, kind):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    workers = 2 if "workers" in kind else 0
    e = experiment(
        tmp_path / "run", game="odd_games:Telling-v0", algorithm=DQN if "dqn" in kind else PPO, iteration=128,
        rollout=Rollout(workers=workers, envs=2), evaluation=Evaluation(every=3, episodes=2), stop=Stop(iterations=3),
    )  # fmt: skip
    rows = loop.train(e).rows()
    row = {name: value for name, value in rows[-1].items() if name.startswith("episode/")}
    assert (row["episode/is_success"], row["episode/lives"]) == (1.0, 3.0)
    assert (row["episode/score"], row["episode/whole"]) == (10.0, 7.0)
    own = {"count", "return_min", "return_mean", "return_max", "return_recent", "length_mean"}
    assert {name.partition("/")[2] for name in row} == own | {"is_success", "lives", "score", "whole"}
    assert row["episode/return_mean"] <= 10
    assert (rows[-1]["evaluation/is_success"], rows[-1]["evaluation/score"]) == (1.0, 10.0)
    assert rows[-1]["evaluation/return_mean"] <= 10
    assert caplog.text.count("masks are not supported yet: info['action_mask'] of Telling-v0 is ignored") == 1


def test_names_in_info_are_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    run = loop.train(experiment(tmp_path / "run", game="odd_games:Chatty-v0", rollout=Rollout(envs=1)))
    names = {name for row in run.rows() for name in row if name.startswith("episode/episode_")}
    assert len(names) == 20
    assert caplog.text.count("more than 20 numbers") == 1
    run = loop.resume(run.path, ["stop.iterations=5"])
    assert {name for row in run.rows() for name in row if name.startswith("episode/episode_")} == names


def test_evaluating_a_game_without_an_end_takes_no_more_steps_than_training_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    e = experiment(
        tmp_path / "run", game="odd_games:Endless-v0", iteration=1000, evaluation=Evaluation(every=2, episodes=5),
        rollout=Rollout(), stop=Stop(iterations=4),
    )  # fmt: skip
    rows = [row for row in loop.train(e).rows() if "evaluation/cut" in row]
    for row in rows:
        assert row["evaluation/length_mean"] * row["evaluation/episodes"] <= 1.02 * 2 * row["steps"] / row["iteration"]
        assert row["evaluation/cut"] == 5
    # A game that only has no time limit, but ends, is not cut: its episodes of ten steps are known from training.
    short = msgspec.structs.replace(e, game="odd_games:Odd-v0", iteration=40, out=str(tmp_path / "short"))
    assert loop.train(short).rows()[-1]["evaluation/cut"] == 0


def test_the_best_evaluated_policy_is_kept_and_survives_a_resume(tmp_path, monkeypatch, caplog):
    """Evaluations of 500, 500, 494, 241: the second is the best, whatever comes later."""
    returns = {2: 500.0, 4: 500.0, 6: 494.0, 8: 241.0, 10: 300.0}
    seen = {}

    def play(policy, episodes, seed, **options):
        seen[iteration := 2 * (len(seen) + 1)] = policy.params
        return [evaluate.PlayedEpisode(returns[iteration], 10)] * episodes

    monkeypatch.setattr(loop, "play", play)
    e = experiment(
        tmp_path / "run", evaluation=Evaluation(every=2, episodes=2), stop=Stop(iterations=8),
        checkpoint=Checkpoints(every=3, keep=2),
    )  # fmt: skip
    run = loop.train(e)
    assert run.best() == Best(4, 500.0)
    assert run.kept() == ["last", "best", "6", "8"]
    assert same_params(run.policy("best").params, seen[4])
    assert same_params(run.policy("last").params, seen[8])
    assert same_params(run.policy("6").params, seen[6])
    assert not same_params(seen[4], seen[8])
    assert (run.path / "policy-best.onnx").read_bytes() == onnx.render(run.policy("best"))
    assert (run.path / "policy.onnx").read_bytes() != (run.path / "policy-best.onnx").read_bytes()
    last = run.rows()[-1]
    assert (last["evaluation/return_best"], last["evaluation/iteration_best"]) == (500.0, 4)
    (run.path / "policy-best.onnx").unlink()  # killed between its two files
    run = loop.resume(run.path, ["stop.iterations=10"])
    assert run.best() == Best(4, 500.0)
    assert (run.path / "policy-best.onnx").read_bytes() == onnx.render(run.policy("best"))


def same_params(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_policy_that_is_not_kept_is_refused_with_what_is(tmp_path):
    run = loop.train(experiment(tmp_path / "run", evaluation=Evaluation(every=2, episodes=1)))
    for which in ("3", "99", "bests", "-1", "²", ""):
        with pytest.raises(InputError, match=r"run@.*kept: last, best, 2, 4$"):
            run.policy(which)
    for path, which, rest in (
        ("checkpoint.best", "best", "last, 2, 4"),
        ("checkpoints/00000002", "2", "last, best, 4"),
    ):
        file = run.path / path / "state.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(InputError, match=f"damaged.*; kept: {rest}$"):
            run.policy(which)
    with pytest.raises(InputError, match=r"run@best: the checkpoint .* is damaged"):
        run.best()
    (run.path / "policy.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"run@last: .*damaged.*; kept: best, 2, 4$"):
        run.policy()
    unevaluated = loop.train(experiment(tmp_path / "other", stop=Stop(iterations=1)))
    with pytest.raises(InputError, match=r"none was evaluated.*; kept: last, 1$"):
        unevaluated.policy("best")


def test_a_lost_best_policy_does_not_stop_a_run(tmp_path, caplog):
    run = loop.train(experiment(tmp_path / "run", evaluation=Evaluation(every=2, episodes=1)))
    (run.path / "checkpoint.best" / "state.safetensors").write_bytes(b"")
    loop.resume(run.path, ["stop.iterations=6"])
    assert "the best policy is lost" in caplog.text
    assert run.best().iteration == 6


def test_the_best_is_not_kept_where_nobody_wants_it(tmp_path):
    e = experiment(
        tmp_path / "run", evaluation=Evaluation(every=2, episodes=1), checkpoint=Checkpoints(every=2, best=False)
    )
    run = loop.train(e)
    assert run.kept() == ["last", "2", "4"]
    assert not (run.path / "policy-best.onnx").exists()
    assert "evaluation/return_best" not in run.rows()[-1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's own, of the same
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("nan seen", "Hopeless-v0 gave an observation of nan"),
        ("nan won", "Hopeless-v0 gave a reward of nan"),
        ("shape", r"an observation of shape \(3,\), its space says \(1,\)"),
        ("old", "reset must return an observation and a dict"),
    ],
)
def test_a_game_that_answers_nonsense_is_blamed_for_it(tmp_path, monkeypatch, answer, message):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setenv("ODD_ANSWER", answer)
    with pytest.raises(SparringError, match=message):
        loop.train(experiment(tmp_path / "run", game="odd_games:Hopeless-v0"))


def test_a_replay_window_may_be_as_small_as_learning_starts(tmp_path):
    e = experiment(tmp_path / "run", algorithm=DQN | {"replay": 400, "learning_starts": 400})
    assert loop.train(e).rows()[-1]["updates"] > 0


def test_what_diverged_does_not_take_the_place_of_a_sound_checkpoint(tmp_path, monkeypatch):
    run = loop.train(experiment(tmp_path / "run", checkpoint=Checkpoints(every=1, keep=1), stop=Stop(iterations=2)))
    files = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and "checkpoints" in str(path)}
    again = loop.reopen(run.path, ["stop.iterations=9"])
    again.trainee.state = jax.tree.map(
        lambda x: x * np.float32(np.nan) if x.dtype == np.float32 else x, again.trainee.state
    )
    with pytest.raises(SparringError, match="learning diverged"):
        again.run()
    assert files == {path: path.read_bytes() for path in files}
    assert [path.name for path in run.checkpoints()] == ["00000002"]


def test_killed_between_the_checkpoint_and_the_policys_files(tmp_path):
    run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=2)))
    before = {name: (run.path / name).read_bytes() for name in ("policy.onnx", "policy.safetensors")}
    (run.path / "policy.onnx").unlink()
    (run.path / "policy.safetensors").write_bytes(b"an older one")
    loop.resume(run.path)
    assert {name: (run.path / name).read_bytes() for name in before} == before


def test_killed_while_rows_are_taken_over(tmp_path, monkeypatch):
    run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=2)))
    rows, killed = run.rows(), []

    class Torn(io.FileIO):
        def write(self, data):
            killed.append(super().write(data[: len(data) // 2]))
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "open", Torn, raising=False)
    with pytest.raises(KeyboardInterrupt):
        Sinks(run.path, run.experiment, 2)
    assert killed[0] > 0
    assert run.rows() == rows


def test_rows_after_the_checkpoint_are_done_again(tmp_path):
    """As after kill -9: rows were written, the checkpoint was not."""
    run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=3)))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 4, "steps": 999, "time/total_s": 1.0}) + '\n{"iteration": 5, "st')
    loop.resume(run.path, ["stop.iterations=5"])
    assert [row["iteration"] for row in run.rows()] == [1, 2, 3, 4, 5]
    assert run.rows()[3]["steps"] != 999


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (Stop(steps=500), lambda rows: 500 <= rows[-1]["steps"] < 800),
        (Stop(seconds=0.001), lambda rows: len(rows) <= 1),
        (Stop(return_=5.0, iterations=50), lambda rows: len(rows) < 10 and rows[-1]["episode/return_recent"] >= 5),
        (Stop(steps=10**9, iterations=2), lambda rows: len(rows) == 2),
    ],
    ids=["steps", "seconds", "return", "whichever is first"],
)
def test_stop_conditions(tmp_path, stop, why):
    assert why(loop.train(experiment(tmp_path / "run", stop=stop)).rows())


@pytest.mark.real
def test_sigterm_writes_a_checkpoint_and_says_so_with_its_exit_code(tmp_path):
    write(tmp_path / "e.yaml", experiment(tmp_path / "run", stop=Stop(iterations=10**6), checkpoint=Checkpoints(0, 1)))
    code = "import typer; from sparring.cli.training import train; a = typer.Typer(); a.command()(train); a()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "e.yaml")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert time.monotonic() < until
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        said = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
    assert process.returncode == loop.INTERRUPTED == 75
    assert "continue with --resume" in said
    done = int(Run(tmp_path / "run").rows()[-1]["iteration"])
    assert [path.name for path in Run(tmp_path / "run").checkpoints()] == [f"{done:08d}"]
    run = loop.resume(tmp_path / "run", [f"stop.iterations={done + 1}"])
    assert [row["iteration"] for row in run.rows()] == list(range(1, done + 2))


@pytest.mark.parametrize("algorithm", [PPO | {"lr": 3e-3}, DQN | {"n_step": 1, "gamma": 0.0, "exploration_steps": 800}])
def test_it_learns(tmp_path, monkeypatch, algorithm):
    """The action to take is what is seen: 10 right ones per episode."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    e = experiment(
        tmp_path / "run",
        game="odd_games:Odd-v0",
        algorithm=algorithm,
        rollout=Rollout(envs=4),
        stop=Stop(steps=8000, return_=9.9),
        evaluation=Evaluation(every=2, episodes=5),
    )
    assert loop.train(e).rows()[-1]["evaluation/return_mean"] >= 9.9


def test_experiments_of_the_project_are_valid():
    from sparring.experiment import read

    files = sorted((Path(__file__).parents[2] / "experiments").rglob("[!s]*.yaml"))  # sweeps: test_sweep_plan
    assert files
    for path in files:
        e = read(path)
        assert e.stop != Stop(), f"{path.name} never stops"
        assert msgspec.json.decode(msgspec.json.encode(e), type=Experiment) == e


@pytest.mark.real
def test_kill_9_loses_at_most_what_came_after_the_checkpoint_and_leaves_no_worker(tmp_path):
    import psutil

    changes = {"rollout": Rollout(workers=2, envs=2, steps=8), "stop": Stop(iterations=10**6)}
    write(tmp_path / "e.yaml", experiment(tmp_path / "run", **changes))
    code = "import sys; from pathlib import Path; from sparring import experiment as e\n"
    code += "from sparring.training import loop; loop.train(e.read(Path(sys.argv[1])))"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "e.yaml")])
    try:
        until = time.monotonic() + 120
        while len(saved := list((tmp_path / "run" / "checkpoints").glob("*[0-9]"))) < 2:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 3  # two, and the forkserver where they came from
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    run = Run(tmp_path / "run")
    newest = max(int(path.name) for path in saved)
    last = int(run.checkpoints()[-1].name)
    assert last >= newest
    run = loop.resume(tmp_path / "run", [f"stop.iterations={last + 1}"])
    assert [row["iteration"] for row in run.rows()] == list(range(1, last + 2))


def test_evaluations_cut_at_other_lengths_are_not_compared() -> None:
    """With a cost for each step a shorter cut looks better, and a policy that runs in circles would stay the best."""
    circles, longer, solved, worse = Best(2, -205.0, True), Best(4, -819.0, True), Best(6, -300.0), Best(8, -400.0)
    assert longer.beats(circles)
    assert solved.beats(longer)
    assert not circles.beats(solved)
    assert not worse.beats(solved)
    assert Best(9, -300.0).beats(solved)


def test_a_run_without_an_end_keeps_the_newest_of_its_cut_evaluations(tmp_path: Path) -> None:
    run = loop.train(
        Experiment(
            game="CliffWalking-v1",
            algorithm={"name": "dqn"},
            iteration=200,
            stop=Stop(iterations=2),
            evaluation=Evaluation(every=1, episodes=2),
            out=str(tmp_path / "run"),
        )
    )
    cut = [row["evaluation/cut"] for row in run.rows()]
    assert all(cut)  # two hundred steps teach nobody the way
    best = run.best()
    assert best is not None
    assert (best.iteration, best.cut) == (2, True)


def test_a_discrete_observation_is_learned_within_seconds_by_default(tmp_path):
    """Nobody chose a network: each state has values of its own."""
    lake = {"id": "FrozenLake-v1", "is_slippery": False}
    wanted = {"rollout": Rollout(envs=8), "iteration": 1000, "evaluation": Evaluation(every=2, episodes=2)}
    stop = Stop(steps=40_000, return_=1.0)  # far more steps than it takes
    run = loop.train(experiment(tmp_path / "run", game=lake, algorithm={"name": "dqn"}, stop=stop, **wanted))
    assert run.policy().layers == ()
    best = run.best()
    assert best is not None
    assert best.ret == 1.0
