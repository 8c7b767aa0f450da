"""The bridge to RLlib, on a real Ray: its algorithms in our experiments, runs and registry."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest
from recorded_play import balance, record

from sparring.bench import scaling
from sparring.bench.child import MeasuringChild
from sparring.cli.publishing import publish_run
from sparring.client.bot import Loaded
from sparring.errors import InputError
from sparring.experiment import Checkpoints, Evaluation, Experiment, Rollout, Stop
from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.registry.registry import Registry
from sparring.runs import checkpoint
from sparring.runs.run import Run
from sparring.training import loop
from sparring.training.evaluate import play

pytestmark = pytest.mark.real
ONE_READER = {"map_batches_kwargs": {"concurrency": 1}}  # each loads all of PyTorch
SMALL = {"model_config": {"fcnet_hiddens": [16, 16]}}


def experiment(out: Path, name: str, game: str = "CartPole-v1", **changes) -> Experiment:
    keys = changes.pop("keys", {})
    fields = {
        "game": game,
        "algorithm": {"name": f"rllib/{name}", **SMALL, **keys},
        "rollout": Rollout(envs=4),
        "iteration": 200,
        "stop": Stop(iterations=1),
        "checkpoint": Checkpoints(every=0),
        "out": str(out),
    }
    return Experiment(**(fields | changes))


PPO = {
    "lr": 3e-3,
    "train_batch_size_per_learner": 1024,
    "minibatch_size": 128,
    "num_epochs": 8,
    "vf_clip_param": 1000.0,
    "model_config": {"fcnet_hiddens": [64], "fcnet_activation": "relu"},
}


@pytest.fixture(scope="module")
def ppo(tmp_path_factory) -> Run:
    """Learned well enough that nobody takes it for chance, in two parts."""
    out = tmp_path_factory.mktemp("runs") / "ppo"
    stop, evaluation = Stop(iterations=6), Evaluation(every=6, episodes=10)
    e = experiment(out, "PPO", keys=PPO, rollout=Rollout(envs=8), stop=stop, evaluation=evaluation)
    loop.train(e)
    return loop.resume(out, ["stop.iterations=8", "evaluation.every=8"])


def test_ppo_learns_and_tells_it_in_our_words(ppo):
    rows = ppo.rows()
    assert [row["iteration"] for row in rows] == list(range(1, 9))
    assert rows[0]["episode/return_mean"] < 35
    assert rows[-1]["evaluation/return_mean"] > 150
    for row in rows:
        names = {"updates", "loss/total", "loss/policy", "loss/value", "policy/entropy", "rate/steps_per_s"}
        assert names | {f"time/{phase}_s" for phase in ("sample", "load", "learn", "update")} <= row.keys()
        assert 0 < row["time/sample_s"] + row["time/learn_s"] < row["time/iteration_s"]
        if row["episode/count"]:
            assert row["episode/length_mean"] == row["episode/return_mean"]  # as in CartPole
    assert 8 * 1024 <= rows[-1]["steps"] < 8 * 1100
    assert (ppo.path / "metrics.csv").read_text().startswith("iteration,")
    assert list((ppo.path / "tensorboard").iterdir())


def test_resuming_goes_on_with_what_was_learned(ppo):
    """Weights, optimiser and counters: what a checkpoint holds is what a resumed algorithm would save."""
    from sparring.rllib.bridge import Bridge

    rows = ppo.rows()
    assert [row["updates"] for row in rows] == list(range(1, 9))
    assert rows[6]["policy/entropy"] == pytest.approx(rows[5]["policy/entropy"], abs=0.08)
    arrays, meta = checkpoint.load(ppo.checkpoints()[-1])
    del arrays["policy"]  # to play with: the loop's, not the algorithm's
    bridge = Bridge(ppo.experiment, ppo.policy().game, ppo.path)
    bridge.resume(arrays, meta["trainee"])
    again, summary = bridge.save()
    bridge.close()
    assert again.keys() == arrays.keys()
    assert any("optimizer" in name for name in arrays)
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)
    assert {key: summary[key] for key in ("steps", "updates", "episodes")} == {
        key: meta["trainee"][key] for key in ("steps", "updates", "episodes")
    }


def test_nothing_in_a_run_is_pickled(ppo):
    kinds = {path.suffix for path in ppo.path.rglob("*") if path.is_file() and "tensorboard" not in path.parts}
    assert kinds == {".yaml", ".csv", ".jsonl", ".json", ".safetensors", ".onnx"}


def test_published_it_plays_as_any_model(ppo, tmp_path):
    where = str(tmp_path / "registry")
    manifest = publish_run(ppo.path, "bot", where)
    assert (manifest.algorithm, manifest.version) == ("rllib/PPO", 1)
    assert manifest.config["num_epochs"] == 8
    policy = Registry(where).policy("CartPole-v1", "bot", 1)
    assert play(policy, 5, seed=3) == play(ppo.policy(), 5, seed=3)
    assert np.mean([episode.ret for episode in play(policy, 10, seed=3)]) > 150
    bot = Loaded((ppo.path / "policy.onnx").read_bytes(), policy.game, "bot", 1)
    obs = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    assert (bot.run({"obs": obs}, None)[0] == policy.act(obs)[0]).all()


MODULES = {
    "ppo": ("PPO", Game("g", Box((3,)), Discrete(4, start=2)), {}),
    "ppo_shared": ("PPO", Game("g", Box((3,)), Discrete(4)), {"model_config": {"vf_share_layers": True}}),
    "ppo_dict": (
        "PPO",
        Game("g", Dict({"b": Discrete(3), "a": Box((2, 2), "float64")}), MultiDiscrete((2, 3))),
        {"model_config": {"head_fcnet_hiddens": [8], "fcnet_activation": "silu"}},
    ),
    "ppo_box": ("PPO", Game("g", Box((3,)), Box((2,), low=(-2.0, 0.0), high=(2.0, 0.1))), {}),
    "ppo_unbounded": ("PPO", Game("g", Discrete(5), Box((2, 2), "float64")), {}),
    "ppo_free": ("PPO", Game("g", Box((3,)), Box((2,), low=0.0)), {"model_config": {"free_log_std": True}}),
    "appo": ("APPO", Game("g", Box((3,)), Discrete(2)), {}),
    "impala": ("IMPALA", Game("g", Box((3,)), Discrete(2)), {}),
    "dqn": ("DQN", Game("g", MultiDiscrete((3, 2)), Discrete(3, start=-1)), {}),
    "dqn_heads": ("DQN", Game("g", Box((3,)), Discrete(3)), {"model_config": {"head_fcnet_hiddens": [8, 5]}}),
    "dqn_plain": ("DQN", Game("g", Box((3,)), Discrete(3)), {"dueling": False}),
    "sac": ("SAC", Game("g", Box((3,)), Box((2,), low=-1.0, high=(3.0, 1.0))), {}),
    "sac_discrete": ("SAC", Game("g", Box((3,)), Discrete(3)), {}),
    "bc": ("BC", Game("g", Box((3,)), Box((2,), low=-1.0, high=1.0)), {}),
    "marwil": ("MARWIL", Game("g", Box((3,)), MultiDiscrete((4, 2))), {}),
    "cql": ("CQL", Game("g", Box((3,)), Box((), low=-1.0, high=1.0)), {}),
    "iql": ("IQL", Game("g", Box((3,)), Box((1,), low=-1.0, high=1.0)), {}),
}


def new_module(name: str, game: Game, keys: dict) -> object:
    """As RLlib would make it for the experiment, with weights that are all different from 0."""
    import torch

    from sparring.rllib.config import algorithm_class, configure, is_offline

    offline = {"source": "store", "store": "x"} if is_offline(algorithm_class(f"rllib/{name}")) else {}
    e = Experiment(game="g", algorithm={"name": f"rllib/{name}", **keys}, **offline)
    config = configure(e, game)
    torch.manual_seed(0)
    module = config.get_rl_module_spec(inference_only=True).build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("case", MODULES)
def test_a_module_and_its_onnx_are_one(case):
    """`render` compares; here a policy that differs a little is put in its place."""
    from dataclasses import replace

    from sparring.errors import SparringError
    from sparring.rllib.module import check_equal, render

    name, game, keys = MODULES[case]
    module = new_module(name, game, keys)
    policy = render(module, game)
    for parameter in policy.params:
        changed = {
            **policy.params,
            parameter: policy.params[parameter] + 0.05 * (1 + np.arange(policy.params[parameter].shape[-1])),
        }
        with pytest.raises(SparringError, match="differs from RLlib's module"):
            check_equal(replace(policy, params=changed), module)


TINY = {
    "DQN": ("CartPole-v1", {"num_steps_sampled_before_learning_starts": 64, "train_batch_size_per_learner": 8}),
    "SAC": ("Pendulum-v1", {"num_steps_sampled_before_learning_starts": 64, "train_batch_size_per_learner": 8}),
    "PPO": ("Pendulum-v1", {"train_batch_size_per_learner": 200, "minibatch_size": 100, "num_epochs": 1}),
    "IMPALA": ("CartPole-v1", {"min_time_s_per_iteration": 1, "num_learners": 0}),
}


@pytest.mark.parametrize("name", TINY)
def test_other_algorithms_train_resume_and_play(name, tmp_path):
    game, keys = TINY[name]
    e = experiment(tmp_path / "run", name, game, keys=keys, rollout=Rollout(envs=2))
    run = loop.train(e)
    policy = run.policy()
    assert policy.game.name == game
    assert len(play(policy, 2)) == 2
    for number in range(2, 7):  # IMPALA's learner is a thread: an iteration may end before its first update
        assert loop.resume(run.path, [f"stop.iterations={number}"]).rows()[-1]["iteration"] == number
        changed = run.policy().params
        if any((changed[name] != policy.params[name]).any() for name in changed):
            break
    first, second, *_ = run.rows()
    assert first["steps"] >= 100
    assert second["steps"] > first["steps"]
    assert second["updates"] > first["updates"] > 0
    assert any((changed[name] != policy.params[name]).any() for name in changed)
    assert all(np.abs(changed[name] - policy.params[name]).max() < 0.5 for name in changed)  # it did not begin anew


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """CartPole in fragments of 15 steps: most do not end their episode."""
    path = tmp_path_factory.mktemp("data")
    return path, record(path, "CartPole-v1", balance(np.random.default_rng(0)), 20, 15)


@pytest.mark.parametrize(
    ("name", "iteration"), [("BC", 100), pytest.param("MARWIL", 40, marks=pytest.mark.slow)]
)  # MARWIL's updates take ten times as long
def test_cloned_behaviour_without_its_errors(name, iteration, store, tmp_path):
    where, mean = store
    keys = {"lr": 1e-2, "train_batch_size_per_learner": 256, **ONE_READER}
    stop, evaluation = Stop(iterations=3), Evaluation(every=3, episodes=10)
    changes = {"source": "store", "store": str(where), "stop": stop, "evaluation": evaluation, "iteration": iteration}
    run = loop.train(experiment(tmp_path / "run", name, keys=keys, **changes))
    rows = run.rows()
    assert [row["updates"] for row in rows] == [iteration, 2 * iteration, 3 * iteration]
    assert rows[-1]["steps"] == pytest.approx(20 * mean)
    assert rows[-1]["evaluation/return_mean"] > mean
    obs = np.float32([[0, 0, 0.1, 0], [0, 0, -0.1, 0], [0, 0, 0, 0.5], [0, 0, 0, -0.5]])
    assert run.policy().act(obs)[0].tolist() == [1, 0, 1, 0]


def test_cql_learns_from_a_store(tmp_path):
    """So few updates teach nobody to swing; they are made, and what comes out plays."""
    rng = np.random.default_rng(0)
    record(tmp_path, "Pendulum-v1", lambda obs: np.float32([np.clip(2 * rng.standard_normal(), -2, 2)]), 4, 50)
    keys = {"train_batch_size_per_learner": 32, **ONE_READER}
    changes = {"source": "store", "store": str(tmp_path), "iteration": 20, "stop": Stop(iterations=2)}
    run = loop.train(experiment(tmp_path / "run", "CQL", "Pendulum-v1", keys=keys, **changes))
    rows = run.rows()
    assert [row["updates"] for row in rows] == [20, 40]
    assert rows[-1]["loss/q"] > 0
    actions = run.policy().act(np.eye(3, dtype=np.float32))[0]
    assert (np.abs(actions) <= 2).all()


def test_recorded_play_is_read_as_it_was_played():
    """Ends are where the game ended, not where a fragment does; actions are what modules give."""
    from sparring.experience.fragment import Columns, pack
    from sparring.rllib.game import rows_of

    game = Game("g", Discrete(3), Box((1,), low=0.0, high=4.0))
    column = Columns(np.int32([0, 1, 2]), np.float32([[0], [3]]), np.float32([1, 2]))
    ends = [{"terminated": True}, {"truncated": True}, {}]
    fragments = [
        pack(game, column, id=str(i), player="p", episode="e", start=0, time=0.0, **end) for i, end in enumerate(ends)
    ]
    rows = rows_of(game, fragments, np.random.default_rng(0))
    order = np.lexsort((rows["terminateds"], rows["rewards"]))
    assert rows["obs"][order].argmax(1).tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["new_obs"][order].argmax(1).tolist() == [1, 1, 1, 2, 2, 2]
    assert rows["actions"][order][:, 0].tolist() == [-1, -1, -1, 0.5, 0.5, 0.5]
    assert rows["terminateds"][order].tolist() == [False] * 5 + [True]
    assert rows["truncateds"].sum() == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "PPOO"}, "no algorithm 'PPOO': did you mean rllib/PPO"),
        ({"name": "A3C"}, "There are APPO, BC, CQL"),
        ({"name": "os:path"}, "not a subclass of RLlib's Algorithm"),
        ({"keys": {"minibatch": 3}}, r"unknown key algorithm\.minibatch: did you mean algorithm\.minibatch_size"),
        ({"keys": {"lr": "fast"}}, r"algorithm\.lr: expected float .*, got 'fast'"),
        ({"keys": {"model_config": {"fcnet_hidden": [3]}}}, r"did you mean algorithm\.model_config\.fcnet_hiddens"),
        ({"keys": {"model_config": {"fcnet_hiddens": 64}}}, r"model_config\.fcnet_hiddens: expected List\[int\]"),
        ({"keys": {"model": {}}}, r"old stack: use algorithm\.model_config"),
        ({"keys": {"num_env_runners": 2}}, r"the experiment says it with rollout\.workers"),
        ({"keys": {"minibatch_size": 9999}}, "refuses its configuration: .*minibatch_size"),
        (
            {"keys": {"rl_module_spec": "nowhere:Module"}},
            r"algorithm\.rl_module_spec 'nowhere:Module': cannot import 'nowhere': ModuleNotFoundError",
        ),
        ({"name": "DQN", "game": "Pendulum-v1"}, "takes Discrete actions, Pendulum-v1 has Box"),
        ({"name": "BC"}, "learns from recorded play"),
        ({"source": "store", "store": "."}, "learns from fresh play"),
        ({"name": "BC", "source": "store", "store": "nowhere"}, "there is no store at nowhere"),
        ({"rollout": Rollout(workers=1, overlap=True)}, r"rollout\.overlap is not RLlib's"),
        (
            {
                "keys": {"env_to_module_connector": "ray.rllib.connectors.env_to_module:MeanStdFilter"},
                "evaluation": Evaluation(every=1),
            },
            r"changes what the module sees .* set evaluation\.every to 0",
        ),
        (
            {"keys": {"model_config": {"use_lstm": True}}, "evaluation": Evaluation(every=1)},
            r"cannot be rendered .*use_lstm.* set evaluation\.every to 0",
        ),
    ],
)
def test_refusals(changes, message, tmp_path):
    changes = {"name": "PPO"} | changes
    with pytest.raises(InputError, match=message):
        loop.train(experiment(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_rendered_trains_and_says_why(tmp_path):
    keys = {"train_batch_size_per_learner": 100, "minibatch_size": 100, "num_epochs": 1}
    run = loop.train(experiment(tmp_path / "run", "PPO", keys=keys | {"model_config": {"use_lstm": True}}))
    assert run.rows()[-1]["iteration"] == 1
    assert not (run.path / "policy.onnx").exists()
    with pytest.raises(InputError, match=r"no policy to play with: .* cannot be rendered .*use_lstm"):
        publish_run(run.path, "bot", str(tmp_path / "registry"))


def test_nothing_of_it_is_loaded_unless_asked_for():
    code = "import sys, sparring.training.loop; sys.exit(bool({'ray', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_missing_extra_is_reported(tmp_path):
    code = "import sys; sys.modules['ray'] = None; from sparring.cli import main; main()"
    words = [
        sys.executable,
        "-c",
        code,
        "train",
        "CartPole-v1",
        "--algorithm",
        "rllib/PPO",
        "--out",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'sparring[rllib]'" in done.stderr


def test_a_signal_ends_it_with_a_checkpoint(tmp_path):
    """Exit code 75, and --resume goes on; as a command, with actors that play."""
    out = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "sparring.cli",
        "train",
        "CartPole-v1",
        "--algorithm",
        "rllib/PPO",
        "--out",
        str(out),
    ]
    for change in ("rollout.workers=1", "algorithm.train_batch_size_per_learner=200", "algorithm.minibatch_size=100"):
        words += ["--set", change]
    run = subprocess.Popen([*words, "--set", "evaluation.every=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert run.stdout is not None
        said = b""
        while b"iteration 1 " not in said:
            line = run.stdout.readline()
            assert line, said.decode()
            said += line
        os.kill(run.pid, signal.SIGTERM)
        said += run.communicate(timeout=120)[0]
    finally:
        run.kill()
    assert run.returncode == loop.INTERRUPTED, said.decode()
    assert b"continue with --resume" in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert Run(out).checkpoints()[-1].name == f"{len(rows):08d}"
    assert onnxruntime.InferenceSession(out / "policy.onnx").get_inputs()[0].name == "obs"


def test_its_scaling_is_measured(tmp_path, monkeypatch):
    """In this process, whose Ray runs already, and without workers, which would load all of PyTorch once more.
    bench/test_scaling.py has the command."""

    @contextmanager
    def open_here(module, order, environment, cores=None):
        said = []
        monkeypatch.setattr(scaling, "say", lambda **words: said.append(words))
        scaling.do(msgspec.to_builtins(order))
        yield MeasuringChild(0, iter(said))

    monkeypatch.setattr(scaling, "open_child", open_here)
    one = experiment(tmp_path / "run", "PPO", keys={"train_batch_size_per_learner": 128, "num_epochs": 1})
    layouts, done = [scaling.Layout(0, None)], []
    scaling.check(one, layouts)
    ((found,),) = (each.rounds for each in scaling.measure_all(one, layouts, 1, 1, lambda *at: done.append(at)))
    assert found.sampled_per_s is not None
    assert found.sampled_per_s > found.steps_per_s > 0
    assert 0 < found.phases["learn"] < found.iteration_s
    assert found.utilisation is None  # RLlib does not tell
    assert found.memory is None  # there are no workers
    assert len(done) == 2  # the first iteration warms up


@pytest.mark.parametrize("case", ["dqn_heads", "ppo_shared", "sac_discrete"])
def test_its_inference_is_timed_with_its_own_module(case, tmp_path, monkeypatch):
    """The runner of `bench inference`, on a checkpoint that holds what a training would have saved."""
    from sparring.rllib import runner
    from sparring.rllib.bridge import encode_state
    from sparring.rllib.module import render

    name, game, keys = MODULES[case]
    module, e = new_module(name, game, keys), Experiment(game="g", algorithm={"name": f"rllib/{name}", **keys})
    arrays: dict = {}
    learner = {"learner_group": {"learner": {"rl_module": {"default_policy": module.get_state()}}}}
    meta = {"trainee": {"state": encode_state(learner, arrays, "state")}}
    found = type("Found", (), {"experiment": e, "state": lambda self, which: (arrays, meta)})()
    monkeypatch.setattr(runner, "find_run", lambda target: (found, None))
    played, policy = runner.RLlibRunner("run", game, 1), render(module, game)
    rng = np.random.default_rng(0)
    for _ in range(20):
        obs = rng.standard_normal((1, 3)).astype("<f4")
        action = played.action(played.run(played.prepare(obs)))
        np.testing.assert_allclose(action, policy.act(obs)[0], rtol=1e-3, atol=1e-3)


def test_bench_inference_plays_a_run_of_its_own(ppo, tmp_path):
    from sparring.bench import inference

    model = inference.find(str(ppo.path), None)
    settings = inference.InferenceSettings(episodes=2, steady=0.1, estimate=False)
    theirs, ours = inference.measure_all([model], ["rllib", "numpy"], settings, tmp_path)
    assert theirs.skipped is None
    assert [(ret, steps) for ret, steps, _ in theirs.result.episodes] == [
        (ret, steps) for ret, steps, _ in ours.result.episodes
    ]
    assert inference.find(f"{ppo.path}@best", None).refusal("rllib", None).startswith("rllib plays whole checkpoints")
