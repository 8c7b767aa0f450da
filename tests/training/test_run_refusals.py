"""What a training refuses: directories, experiments, changes of a run, damaged checkpoints."""

from pathlib import Path

import msgspec
import pytest
from small_runs import DQN, PPO, experiment

from sparring.errors import InputError
from sparring.experiment import Experiment, Rollout, Stop, write
from sparring.runs.run import Run, new_directory
from sparring.training import loop
from sparring.training.trainee import OffPolicy


class TestRefusals:
    def test_a_directory_with_a_run_is_not_overwritten(self, tmp_path):
        run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=1)))
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        with pytest.raises(InputError, match="continue it with --resume"):
            loop.train(experiment(tmp_path / "run"))
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before

    def test_nor_one_with_anything_else(self, tmp_path):
        (tmp_path / "precious").write_text("mine")
        with pytest.raises(InputError, match="not empty"):
            loop.train(experiment(tmp_path))

    def test_nor_one_that_another_training_took_meanwhile(self, tmp_path, monkeypatch):
        def prepare(trainee):
            ppo = {"algorithm": PPO, "rollout": Rollout(envs=4), "stop": Stop(iterations=1)}
            loop.train(experiment(tmp_path / "run", seed=7, **ppo))

        monkeypatch.setattr(OffPolicy, "prepare", prepare)
        with pytest.raises(InputError, match="another training began"):
            loop.train(experiment(tmp_path / "run"))
        assert Run(tmp_path / "run").experiment.seed == 7

    def test_directories_without_a_name_are_taken_at_once(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        e = msgspec.structs.replace(experiment(tmp_path), out=None)
        first, second = (new_directory(e, "CartPole-v1") for _ in range(2))
        assert first != second
        with pytest.raises(InputError):
            loop.train(msgspec.structs.replace(e, algorithm=DQN | {"replay": 20}))
        assert sorted(Path("runs").iterdir()) == [first, second]

    def test_what_is_no_run_cannot_be_resumed(self, tmp_path):
        with pytest.raises(InputError, match="no run to resume"):
            loop.resume(tmp_path)

    def test_a_run_keeps_its_hyperparameters(self, tmp_path):
        loop.train(experiment(tmp_path / "run", stop=Stop(iterations=1)))
        with pytest.raises(InputError, match="can only change stop, evaluation, checkpoint"):
            loop.resume(tmp_path / "run", ["algorithm.lr=1"])

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [("seed", 5, "seed was 1, is 5"), ("rollout", {"envs": 2, "steps": 8}, r"rollout\.envs was 4, is 2")],
    )
    def test_also_where_its_file_was_edited(self, tmp_path, key, value, message):
        run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=1)))
        edited = Experiment.parse(run.experiment.to_builtins() | {key: value})
        write(run.path / "experiment.yaml", edited)
        with pytest.raises(InputError, match=message):
            loop.resume(run.path, ["stop.iterations=2"])

    def test_a_damaged_checkpoint_names_the_one_before(self, tmp_path):
        run = loop.train(experiment(tmp_path / "run"))
        (run.checkpoints()[-1] / "state.safetensors").write_bytes(b"")
        with pytest.raises(InputError, match=r"To resume from .*00000002, remove it"):
            loop.resume(run.path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"stop": {"steps": -1}}, r"stop\.steps: expected `int` >= 1"),
            ({"seed": 2**64}, "seed: expected `int`"),
            ({"source": "stor"}, "source is 'stor': choose one of simulate, store"),
            (
                {"algorithm": DQN | {"layers": [{"layer": "dense", "unit": 3}]}},
                r"layers\[0\]\.unit: did you mean .*units",
            ),
            ({"algorithm": DQN | {"layers": [{"layer": "dens"}]}}, r"layers\[0\] is .*dense or conv"),
            (
                {"algorithm": DQN | {"layers": [{"layer": "dense", "units": 3, "activation": "gelu"}]}},
                "is 'gelu': choose one of relu, tanh, silu, linear",
            ),
        ],
    )
    def test_python_is_checked_like_yaml(self, tmp_path, changes, message):
        with pytest.raises(InputError, match=message):
            loop.train(experiment(tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()

    def test_one_process_per_run(self, tmp_path):
        run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=1)))
        with run.alone(), pytest.raises(InputError, match="another process"):
            loop.resume(run.path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"game": "CartPool-v1"}, "cannot make the game 'CartPool-v1'"),
            ({"algorithm": {"name": "dqm"}}, "no algorithm 'dqm', did you mean 'dqn'"),
            ({"algorithm": {"name": "dqn", "gama": 1}}, r"unknown key algorithm\.gama: did you mean algorithm\.gamma"),
            ({"algorithm": {"name": "dqn", "lr": "fast"}}, r"algorithm\.lr: expected `float`, got `str`"),
            ({"game": "Pendulum-v1"}, "DQN takes Discrete and MultiDiscrete actions"),
            ({"algorithm": {"name": "dqn", "layers": [{"layer": "conv", "filters": 8, "kernel": 3}]}}, "layer 0"),
            ({"algorithm": DQN | {"replay": 20}}, r"algorithm\.replay is 20 rows, one block of play has 36"),
            (
                {"algorithm": PPO | {"steps": 127}, "rollout": Rollout(envs=4)},
                r"algorithm\.steps \(127\) is not a multiple",
            ),
        ],
    )
    def test_bad_experiments_leave_nothing_behind(self, tmp_path, changes, message):
        with pytest.raises(InputError, match=message):
            loop.train(experiment(tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()

    def test_a_damaged_checkpoint_is_noticed(self, tmp_path):
        run = loop.train(experiment(tmp_path / "run", stop=Stop(iterations=2)))
        path = run.checkpoints()[-1] / "state.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        rows = (run.path / "metrics.jsonl").read_bytes()
        with pytest.raises(InputError, match="damaged"):
            loop.resume(run.path, ["stop.iterations=3"])
        assert (run.path / "metrics.jsonl").read_bytes() == rows

    def test_a_checkpoint_of_another_game_is_refused(self, tmp_path):
        one = loop.train(experiment(tmp_path / "one", stop=Stop(iterations=1)))
        other = loop.train(experiment(tmp_path / "other", game="Acrobot-v1", stop=Stop(iterations=1)))
        one.checkpoints()[-1].rename(other.path / "checkpoints" / "00000009")
        with pytest.raises(InputError, match="game was 'CartPole-v1', is 'Acrobot-v1'"):
            loop.resume(other.path, ["stop.iterations=3"])
        with pytest.raises(InputError, match="schema"):
            loop.reopen(other.path)
