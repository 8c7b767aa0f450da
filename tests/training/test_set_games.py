"""What a game is set to stays with a run: its workers, its policy's files, what is published, and what resumes."""

import json
from pathlib import Path

import onnxruntime
import pytest

from sparring.cli.publishing import publish_run
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.policies import load_policy
from sparring.training import loop
from sparring.training.evaluate import play


@pytest.mark.parametrize("envs", [1, 2])  # environments of their own, and the vector form
def test_settings_stay_with_a_run(envs: int, tmp_path: Path) -> None:
    kwargs = {"max_episode_steps": 7}
    data = {
        "game": {"id": "CartPole-v1", **kwargs},
        "algorithm": {"name": "ppo", "steps": 64},
        "stop": {"iterations": 2},
    }
    data |= {"rollout": {"workers": 1, "envs": envs}, "out": str(tmp_path / "run")}
    run = loop.train(Experiment.parse(data))
    assert all(row["episode/length_mean"] <= 7 for row in run.rows())
    assert any(row["episode/count"] for row in run.rows())
    policy = load_policy(str(run.path))
    assert policy.game.env_kwargs == kwargs
    assert [episode.length for episode in play(policy, 3, 0)] == [7, 7, 7]
    props = onnxruntime.InferenceSession(run.path / "policy.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(props["sparring.game"])["env_kwargs"] == kwargs
    assert publish_run(run.path, "bot", str(tmp_path / "registry")).game.env_kwargs == kwargs
    other = Experiment.parse(data | {"game": {"id": "Acrobot-v1", "name": "CartPole-v1"}, "out": str(tmp_path / "b")})
    with pytest.raises(InputError, match=r"CartPole-v1 has versions already.*--set game.name"):
        publish_run(loop.train(other).path, "bot", str(tmp_path / "registry"))
    resumed = loop.resume(run, ["stop.iterations=3"])
    assert resumed.rows()[-1]["episode/length_mean"] <= 7
    with pytest.raises(InputError, match="can only change"):
        loop.resume(run, ["game.max_episode_steps=9"])
