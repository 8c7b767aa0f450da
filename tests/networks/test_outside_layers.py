"""Layers and activations from outside: found by `module:Class`, trained, resumed, exported and played, and the same in
JAX, NumPy and ONNX. Nothing of the package is edited for them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import onnxruntime
import pytest
from outside_layers import Gate, Mean

from sparring import algorithms
from sparring.client.bot import Bot, Loaded
from sparring.client.recorder import Recorder
from sparring.errors import InputError, Unrenderable
from sparring.experiment import Experiment, Stop
from sparring.export import formats, onnx, weights
from sparring.games import Box, Discrete, Game
from sparring.networks.actor_critic import critic_shapes, critics
from sparring.networks.functions import dense, init_params, torso
from sparring.networks.layers import decode, find_layer
from sparring.networks.policy import Policy, features
from sparring.networks.spec import Categorical, Conv, Dense, Layer, param_shapes
from sparring.policies import evaluate
from sparring.registry.registry import Registry
from sparring.training import loop

HERE = Path(__file__).parent
GAME = Game("g", Box((5,)), Discrete(3))
IMAGES = Game("images", Box((9, 8, 3), "uint8"), Discrete(3))
NETWORKS: dict[str, tuple[Game, tuple[Layer, ...]]] = {
    "gate": (GAME, (Dense(6, "outside_layers:elu"), Gate(7, "tanh"), Gate(4))),
    "gate of an image": (IMAGES, (Gate(6),)),
    "gate behind a convolution": (IMAGES, (Conv(4, 3, 2, "outside_layers:elu"), Gate(6))),
    "mean": (IMAGES, (Conv(4, 3), Mean(), Dense(6))),
    "mean before the head": (IMAGES, (Conv(4, 3), Mean())),
    "image behind the head's layers": (IMAGES, (Conv(4, 3, 1, "outside_layers:gelu"),)),
}


def observations(game: Game, rows: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if game is IMAGES:
        return rng.integers(0, 255, (rows, 9, 8, 3), np.uint8)
    return rng.standard_normal((rows, 5), np.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_jax_numpy_and_onnx_agree(name: str, random_policy: Callable[..., Policy]) -> None:
    game, layers = NETWORKS[name]
    policy = random_policy(game, layers, Categorical(), normalised=game is GAME)
    obs = observations(game, 6)
    acted = policy.outputs(obs)
    x = features(game.observation, obs)
    if "normaliser.mean" in policy.params:
        x = np.clip((x - policy.params["normaliser.mean"]) / policy.params["normaliser.std"], -10, 10)
    params = {key: jnp.asarray(array) for key, array in policy.params.items()}
    learned = dense(params, "head", torso(layers, params, jnp.asarray(x)))
    np.testing.assert_allclose(learned, acted, rtol=1e-4, atol=1e-5)

    session = onnxruntime.InferenceSession(onnx.render(policy), providers=["CPUExecutionProvider"])
    noise = policy.noise(np.random.default_rng(1), len(obs))
    greedy, sampled, log_prob = session.run(["action", "sampled", "log_prob"], {"obs": obs, "noise": noise})
    action, expected = policy.act(obs, noise)
    np.testing.assert_array_equal(greedy, policy.act(obs)[0])
    np.testing.assert_array_equal(sampled, action)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-4, atol=1e-5)
    assert policy.outputs(obs[:0]).shape == (0, 3)


@pytest.mark.parametrize("name", ["c", "tflite"])
def test_plain_steps_become_the_other_formats(name: str, random_policy: Callable[..., Policy], tmp_path: Path) -> None:
    policy = random_policy(*NETWORKS["mean"], Categorical())
    (path,) = formats.write(formats.render(name, policy, "policy"), tmp_path)
    runner = formats.load(path, policy.game)
    for obs in np.split(observations(IMAGES, 3), 3):
        found = runner.outputs(runner.run(runner.prepare(obs)))
        assert found is not None
        np.testing.assert_allclose(found, policy.outputs(obs), rtol=1e-3, atol=1e-4)
    with pytest.raises(Unrenderable, match="layer 'outside_layers:Gate' has no `plain`"):
        formats.render(name, random_policy(GAME, (Gate(4),), Categorical()), "policy")


def test_a_layer_says_how_its_parameters_begin() -> None:
    params = init_params(jax.random.key(0), param_shapes(GAME, (Gate(4), Dense(4)), Categorical()))
    np.testing.assert_array_equal(params["torso.0.shift"], np.ones(4))
    np.testing.assert_allclose(params["torso.0.gate"].T @ params["torso.0.gate"], 0.25 * np.eye(4), atol=1e-6)
    np.testing.assert_allclose(params["torso.0.w"].T @ params["torso.0.w"], 2 * np.eye(4), atol=1e-5)
    np.testing.assert_array_equal(params["torso.1.b"], np.zeros(4))


def test_a_critics_action_joins_the_first_layer_that_takes_a_vector() -> None:
    game = Game("g", IMAGES.observation, Box((2,), low=-1.0, high=1.0))
    for layers, place in (((Conv(4, 3), Mean(), Gate(6)), "torso.2.gate"), ((Conv(4, 3), Mean()), "head.w")):
        shapes = critic_shapes(game, layers, 1)
        assert shapes[f"critic.0.{place}"][0] == 4 + 2
        params = init_params(jax.random.key(0), shapes, head_scale=1.0)
        obs, action = jnp.asarray(observations(IMAGES, 3)), jnp.ones((3, 2))
        q = critics(layers, params, obs, action, 1)
        assert q.shape == (1, 3)
        assert not np.allclose(q, critics(layers, params, obs, -action, 1))


def sparring(cwd: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sparring.cli", *words],
        cwd=cwd, capture_output=True, text=True, timeout=240, env=os.environ | {"COLUMNS": "500"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Where somebody works: their module and their experiment."""
    shutil.copy(HERE / "outside_layers.py", tmp_path)
    (tmp_path / "gates.yaml").write_text(
        "game: CartPole-v1\n"
        "algorithm: {name: ppo, steps: 256, minibatch: 64, epochs: 2, layers: [\n"
        "  {layer: dense, units: 16, activation: 'outside_layers:elu'}, {layer: 'outside_layers:Gate', units: 8}]}\n"
        "rollout: {workers: 1, envs: 2}\n"
        "stop: {iterations: 4}\n"
        "checkpoint: {every: 2, keep: 3}\n"
    )
    return tmp_path


def test_trained_resumed_exported_published_and_played(desk: Path) -> None:
    said = sparring(desk, "train", "gates.yaml", "--out", "whole")
    assert "dense 16, outside_layers:Gate 8" in said
    sparring(desk, "train", "gates.yaml", "--out", "parts", "--set", "stop.iterations=2")
    sparring(desk, "train", "parts", "--resume", "--set", "stop.iterations=4")
    assert (desk / "parts" / "policy.safetensors").read_bytes() == (desk / "whole" / "policy.safetensors").read_bytes()
    assert "return" in sparring(desk, "eval", "whole@2", "--episodes", "2")

    sparring(desk, "export", "whole", "--out", "exported")
    assert (desk / "exported" / "whole.onnx").read_bytes() == (desk / "whole" / "policy.onnx").read_bytes()
    assert "CartPole-v1/bot/1" in sparring(desk, "publish", "whole", "--registry", "registry")
    assert "return" in sparring(desk, "eval", "CartPole-v1/bot", "--registry", "registry", "--episodes", "2")

    registry = Registry(desk / "registry")
    assert (
        "Dense 16 outside_layers:elu → Gate 8 outside_layers:elu"
        in registry.read("CartPole-v1", "bot", 1, "card.md").decode()
    )
    policy = registry.policy("CartPole-v1", "bot", 1)
    assert policy.layers == (Dense(16, "outside_layers:elu"), Gate(8))
    loaded = Loaded(registry.read("CartPole-v1", "bot", 1, "policy.onnx"), policy.game, "bot", 1)
    bot = Bot(policy.game, Recorder(policy.game, "anna", lambda cut: None), lambda: loaded)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    over, steps = False, 0
    while not over:
        action = bot.act(obs)
        assert action == policy.act(obs)[0]
        obs, _, terminated, truncated, _ = env.step(action)
        over, steps = terminated or truncated, steps + 1
    assert steps > 5


def test_it_learns(tmp_path: Path) -> None:
    """Gradients reach every one of a layer's parameters."""
    layers = [{"layer": "outside_layers:Gate", "units": 8}]
    config = {"name": "dqn", "layers": layers, "learning_starts": 64, "batch": 16, "replay": 3000}
    experiment = Experiment(
        game="CartPole-v1", algorithm=config, iteration=200, stop=Stop(iterations=2), out=str(tmp_path / "run")
    )
    run = loop.train(experiment)
    assert run.experiment.algorithm["layers"] == [layers[0] | {"activation": "outside_layers:elu"}]
    policy = run.policy()
    algorithm = algorithms.create("dqn", policy.game, run.experiment.hyperparameters)
    first = algorithm.policy(algorithm.init(jax.random.key(0)), {}, 0.0).params
    for name in ("w", "b", "gate", "shift"):
        assert not np.array_equal(policy.params[f"torso.0.{name}"], first[f"torso.0.{name}"])
    assert np.ptp(policy.params["torso.0.shift"]) > 0  # all of them began at 1


def test_an_operator_that_bots_do_not_know_is_refused_when_it_is_published(
    tmp_path: Path, random_policy: Callable[..., Policy]
) -> None:
    policy = random_policy(GAME, (Dense(4, "outside_layers:gelu"),), Categorical())
    registry = Registry(tmp_path / "registry")
    with pytest.raises(InputError, match=r"no bot would load it: operator 'Erf' \(its layers: dense\).*Add, ArgMax"):
        registry.publish(policy, algorithm="ppo")
    assert not any(path.is_file() for path in (tmp_path / "registry").rglob("*"))
    registry.publish(random_policy(GAME, (Gate(4),), Categorical()), algorithm="ppo")
    with pytest.raises(InputError, match="operator 'Erf'"):
        Loaded(onnx.render(policy), GAME, "bot", 1)


def test_weights_do_not_choose_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_policy: Callable[..., Policy]
) -> None:
    data = weights.save(random_policy(GAME, (Dense(4, "outside_layers:elu"), Gate(4)), Categorical()))
    assert weights.load(data).layers == (Dense(4, "outside_layers:elu"), Gate(4))  # it is imported here
    for ours in (b"outside_layers:Gate", b"outside_layers:elu"):
        # A module of the same length that nobody imported, and that would leave a trace.
        (tmp_path / "elsewhere_mods.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
        monkeypatch.chdir(tmp_path)
        changed = data.replace(ours, ours.replace(b"outside_layers", b"elsewhere_mods"))
        assert changed != data
        with pytest.raises(InputError, match="import 'elsewhere_mods' before, if you trust it"):
            weights.load(changed)
        assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match="'elsewhere_mods' has no 'elu'"):
        weights.load(changed, trusted=True)
    assert (tmp_path / "ran").exists()
    del sys.modules["elsewhere_mods"]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"layer": "outside_layers:Gat", "units": 3}, "has no 'Gat', did you mean 'Gate'"),
        ({"layer": "no_such_module:Gate"}, "cannot import 'no_such_module'"),
        (
            {"layer": "outside_layers:Gate", "unit": 3},
            r"unknown key algorithm\.layers\[0\]\.unit: did you mean .*units",
        ),
        ({"layer": "outside_layers:Gate", "units": "x"}, r"algorithm\.layers\[0\]: units: Expected `int`, got `str`"),
        ({"layer": "outside_layers:elu"}, "it has to be a class of both Layer and msgspec.Struct"),
        ({"layer": "outside_layers:Unfinished"}, "has no output, apply_jax, bind_numpy, onnx"),
        ({"layer": "outside_layers:Misnamed"}, 'tag_field="layer", tag="outside_layers:Misnamed"'),
        ({"layer": "outside_layers:Listed"}, "Use tuples in its fields"),
        ({"layer": "dense", "units": 3, "activation": "outside_layers:el"}, "has no 'el', did you mean 'elu'"),
        ({"layer": "dense", "units": 3, "activation": "outside_layers:Gate"}, "a value of the class Activation"),
    ],
)
def test_what_is_wrong_with_a_layer_is_said(tmp_path: Path, layer: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loop.train(
            Experiment(game="CartPole-v1", algorithm={"name": "dqn", "layers": [layer]}, out=str(tmp_path / "r"))
        )
    assert not (tmp_path / "r").exists()


def test_workers_and_files_get_by_without_jax() -> None:
    code = (
        "import sys, outside_layers, sparring.export.weights, sparring.export.formats, sparring.rollout.actor;"
        "from sparring.networks.layers import find_layer; find_layer('outside_layers:Gate'); find_layer('conv');"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_layers_are_written_as_ever() -> None:
    """Runs, checkpoints and published weights of earlier versions have these words, without `padding`."""
    layers = Dense(64, "tanh"), Conv(32, 8, 4), Gate(8)
    written = (
        b'[{"layer":"dense","units":64,"activation":"tanh","norm":false},'
        b'{"layer":"conv","filters":32,"kernel":8,"stride":4,"activation":"relu","padding":"valid"},'
        b'{"layer":"outside_layers:Gate","units":8,"activation":"outside_layers:elu"}]'
    )
    assert msgspec.json.encode(layers) == written
    earlier = written.replace(b',"padding":"valid"', b"")
    assert msgspec.json.decode(earlier, type=tuple[Layer, ...], dec_hook=decode) == layers
    assert find_layer("dense") is Dense


def test_weights_do_not_choose_the_game_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_policy: Callable[..., Policy]
) -> None:
    (tmp_path / "elsewhere_mods.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    game = msgspec.structs.replace(GAME, env="elsewhere_mods:CartPole-v1")
    data = weights.save(random_policy(game, (Dense(4),), Categorical()))
    with pytest.raises(InputError, match="import 'elsewhere_mods' before, if you trust it"):
        weights.load(data)
    (tmp_path / "policy.safetensors").write_bytes(data)
    with pytest.raises(InputError, match="import 'elsewhere_mods' before"):
        evaluate(tmp_path / "policy.safetensors", episodes=1)
    assert not (tmp_path / "ran").exists()
    assert weights.load(data, trusted=True).game == game


def test_a_name_that_a_package_would_load_is_not_imported_already(random_policy: Callable[..., Policy]) -> None:
    """`sparring` is imported, but `sparring:train` would load JAX."""
    data = weights.save(random_policy(GAME, (Gate(4),), Categorical()))
    changed = data.replace(b"outside_layers:Gate", b"sparring:load_polic")
    assert len(changed) == len(data)
    with pytest.raises(InputError, match="import 'sparring' before"):
        weights.load(changed)
