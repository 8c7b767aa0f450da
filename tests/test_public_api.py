"""What `import sparring` gives: all of it documented, typed, and free until it is used."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import sparring
import sparring.client
from sparring import algorithms
from sparring.errors import InputError
from sparring.games import catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Gaussian, QValues, param_shapes
from sparring.registry.registry import Registry
from sparring.runs import checkpoint

HEAVY = ("numpy", "jax", "ray", "msgspec", "gymnasium", "onnxruntime", "rich", "urllib3", "obstore", "yaml")


def imported(code: str) -> list[str]:
    code = f"import sys\n{code}\nprint(*sorted(m for m in {HEAVY!r} if m in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_it_is_free():
    assert imported("import sparring; dir(sparring); sparring.__all__") == []
    assert imported("import sparring; sparring.Callback, sparring.InputError") == []
    assert imported("import sparring; sparring.Experiment") == ["msgspec"]
    assert "jax" not in imported("import sparring; sparring.Client, sparring.Game, sparring.Run, sparring.load_policy")


def test_all_names_are_there_and_listed():
    assert set(sparring.__all__) <= set(dir(sparring))
    for name in sparring.__all__:
        assert getattr(sparring, name) is not None
    assert sparring.load_game is catalog.load
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sparring.trian  # noqa: B018


def test_a_look_shows_nothing_else():
    assert {name for name in dir(sparring) if not name.startswith("_")} == set(sparring.__all__) - {"__version__"}


def test_the_page_names_all_of_it():
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().partition("::: sparring")[0]
    assert set(re.findall(r"`(\w+)`", page)) == set(sparring.__all__) - {"__version__"}


def test_type_checkers_see_what_python_sees(tmp_path):
    """The names under TYPE_CHECKING are those of the table."""
    source = (Path(sparring.__file__)).read_text()
    block = source[source.index("if TYPE_CHECKING:") : source.index("__version__ =")]
    static = {}
    for module, names in re.findall(r"from (\S+) import (.+)", block):
        for name in names.split(", "):
            static[name.rpartition(" ")[2]] = (module, name.split()[0])
    assert static == sparring._MODULES
    assert {*static, "__version__"} == set(sparring.__all__)
    assert (Path(sparring.__file__).parent / "py.typed").exists()


def public(kind: type) -> list[str]:
    """Names of the class's own methods and properties that anybody may use."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("sparring.")]
    fields = {field.name for field in msgspec.structs.fields(kind)} if issubclass(kind, msgspec.Struct) else set()
    return [name for each in own for name in vars(each) if not name.startswith("_") and name not in fields]


def documented() -> list[str]:
    names = [name for name in sparring.__all__ if name != "__version__"]
    kinds = [name for name in names if inspect.isclass(getattr(sparring, name))]
    methods = [f"{name}.{each}" for name in kinds for each in public(getattr(sparring, name))]
    return names + [m for m in methods if callable(attribute(m)) or isinstance(attribute(m), property)]


CLASSES = [name for name in dir(sparring) if inspect.isclass(getattr(sparring, name))]


def attribute(name: str) -> object:
    kind, _, method = name.partition(".")
    return inspect.getattr_static(getattr(sparring, kind), method) if method else getattr(sparring, kind)


@pytest.mark.parametrize("name", documented())
def test_everything_public_is_documented(name):
    found = attribute(name)
    text = inspect.getdoc(found) or ""
    assert len(text) > 10, f"{name} has no docstring"
    assert not text.startswith(name.rpartition(".")[2] + "("), f"{name} has only a generated docstring"
    if inspect.isfunction(found) and "." not in name:
        for parameter in inspect.signature(found).parameters:
            assert f":param {parameter}:" in text, f"{name}: {parameter} is not documented"
    if inspect.isclass(found) and issubclass(found, msgspec.Struct):
        for field in msgspec.structs.fields(found):
            assert f":param {field.name}:" in text, f"{name}: {field.name} is not documented"
    for field in getattr(found, "_fields", ()):
        assert f":param {field}:" in text, f"{name}: {field} is not documented"


@pytest.mark.parametrize("name", [*CLASSES, "Transport", "Upload"])
def test_parameters_of_methods_are_documented(name):
    """Each by a line of its own, or in a sentence of the method's or the class's."""
    kind = getattr(sparring, name, None) or getattr(sparring.client, name)
    for method, function in inspect.getmembers(kind, inspect.isfunction):
        if method.startswith("_"):
            continue
        text = f"{inspect.getdoc(function)}\n{inspect.getdoc(kind)}"
        for parameter in list(inspect.signature(function).parameters)[1:]:
            said = f":param {parameter}:" in inspect.getdoc(function) or f"`{parameter}`" in text
            assert said, f"{name}.{method}: {parameter} is not documented"


CLIENTS = [name for name in sparring.client.__all__ if name not in sparring.__all__]


def made_by_its_parameters(found) -> bool:
    """Not exceptions that take a message, and not protocols."""
    own = "__init__" in vars(found) or hasattr(found, "__dataclass_fields__")
    return own and not getattr(found, "_is_protocol", False)


@pytest.mark.parametrize("name", [*CLASSES, *CLIENTS])
def test_whoever_makes_or_calls_it_finds_each_parameter(name):
    found = getattr(sparring, name, None) or getattr(sparring.client, name)
    if inspect.isclass(found) and not made_by_its_parameters(found):
        return
    for parameter in inspect.signature(found).parameters:
        assert f":param {parameter}:" in inspect.getdoc(found), f"{name}: {parameter} is not documented"


def test_all_parts_of_an_experiment_are_public():
    parts = {field.type for field in msgspec.structs.fields(sparring.Experiment)}
    structs = {part.__name__ for part in parts if inspect.isclass(part) and issubclass(part, msgspec.Struct)}
    assert structs - set(sparring.__all__) == set()


def policy(head, action: str = "CartPole-v1", exploration: float = 0.0) -> Policy:
    game, layers, rng = catalog.load(action), (Dense(8, "tanh"),), np.random.default_rng(0)
    shapes = param_shapes(game, layers, head)
    return Policy(game, layers, head, {k: rng.normal(size=s) for k, s in shapes.items()}, exploration)


def test_probabilities_and_values():
    q = policy(QValues(), exploration=0.2)
    obs = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    values, probabilities = q.values(obs), q.probabilities(obs)
    assert values.shape == probabilities.shape == (5, 2)
    assert np.array_equal(values.argmax(-1), q.act(obs)[0])
    assert np.allclose(probabilities.max(-1), 0.9)
    assert np.allclose(q.values(obs[0]), values[0])
    soft = policy(Categorical())
    _, log_prob = soft.act(obs, soft.noise(np.random.default_rng(2), 5))
    drawn = soft.act(obs, soft.noise(np.random.default_rng(2), 5))[0]
    assert np.allclose(soft.probabilities(obs)[np.arange(5), drawn], np.exp(log_prob), atol=1e-6)
    assert np.allclose(soft.probabilities(obs).sum(-1), 1)
    assert soft.probabilities(obs[0]).shape == (2,)
    with pytest.raises(InputError, match="no values"):
        soft.values(obs)
    with pytest.raises(InputError, match="continuous"):
        policy(Gaussian(), "Pendulum-v1").probabilities(obs[:, :3])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> sparring.Run:
    out = tmp_path_factory.mktemp("api") / "run"
    algorithm = {"name": "dqn", "layers": [{"layer": "dense", "units": 8}], "learning_starts": 64, "batch": 16}
    return sparring.train(
        {
            "game": "CartPole-v1", "algorithm": algorithm, "iteration": 64, "out": str(out),
            "stop": {"iterations": 2}, "evaluation": {"every": 1, "episodes": 1}, "checkpoint": {"every": 1},
        }
    )  # fmt: skip


def test_load_policy_from_everywhere(run, tmp_path):
    places = Registry(tmp_path / "registry")
    places.publish(run.policy(), algorithm="dqn")
    version = tmp_path / "registry/games/CartPole-v1/models/bot/1"
    obs = np.zeros(4, np.float32)
    wanted = run.policy().values(obs)
    for target in (
        run, run.path, str(run.path), f"{run.path}@last", f"{run.path}@2", run.path / "checkpoints/00000002",
        run.path / "policy.safetensors", version, "CartPole-v1", "CartPole-v1/bot", "CartPole-v1/bot/1",
    ):  # fmt: skip
        assert np.array_equal(sparring.load_policy(target, tmp_path / "registry").values(obs), wanted), target
    assert np.array_equal(sparring.load_policy("CartPole-v1", places).values(obs), wanted)
    best = sparring.load_policy(run.path / "checkpoint.best")
    assert np.array_equal(best.values(obs), run.policy("best").values(obs))
    first = sparring.load_policy(run.path / "checkpoints/00000001")
    assert not np.array_equal(first.values(obs), wanted)
    with pytest.raises(
        InputError, match=r"no value of a state: .* was trained with dqn, which does not learn the value"
    ):
        first.state_value(obs)


@pytest.mark.parametrize("shared", [False, True])
def test_the_value_of_a_state_in_numpy(shared, tmp_path):
    """Of PPO, from the run's checkpoints, as JAX computes it; the others say why they have none."""
    layers = [{"layer": "dense", "units": 8}]
    algorithm = {"name": "ppo", "layers": layers, "steps": 64, "minibatch": 32, "epochs": 1, "shared": shared}
    if not shared:
        algorithm["critic_layers"] = [{"layer": "dense", "units": 6, "activation": "tanh"}, *layers]
    run = sparring.train(
        {
            "game": "CartPole-v1", "algorithm": algorithm, "out": str(tmp_path / "run"), "stop": {"iterations": 2},
            "evaluation": {"every": 2, "episodes": 1}, "checkpoint": {"every": 1},
        }
    )  # fmt: skip
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    ppo = algorithms.create("ppo", run.policy().game, run.experiment.hyperparameters)
    trained = {}
    for which, target in (("1", f"{run.path}@1"), ("2", run), ("2", run.path / "checkpoints/00000002")):
        policy = sparring.load_policy(target)
        arrays, _ = checkpoint.load(run.path / "checkpoints" / f"{int(which):08d}")
        params = {name[len("state.params['") : -2]: x for name, x in arrays.items() if name.startswith("state.params")}
        seen = np.clip((obs - policy.params["normaliser.mean"]) / policy.params["normaliser.std"], -10, 10)
        trained[which] = np.asarray(ppo.forward(params, seen)[1])
        assert np.allclose(policy.state_value(obs), trained[which], atol=1e-5), target
        assert np.allclose(policy.explore(0.0).state_value(obs[1]), trained[which][1], atol=1e-5)
        with pytest.raises(InputError, match=r"no values of actions: .* See state_value"):
            policy.values(obs)
    assert not np.allclose(trained["1"], trained["2"])
    with pytest.raises(
        InputError, match=r"no value of a state: .*@best .* alone: values are in its checkpoints @1, @2$"
    ):
        sparring.load_policy(f"{run.path}@best").state_value(obs)
    Registry(tmp_path / "registry").publish(run.policy(), algorithm="ppo")
    for published in ("CartPole-v1", run.path / "policy.safetensors"):
        with pytest.raises(InputError, match=r"no value of a state: it is a policy alone\. PPO learns a value"):
            sparring.load_policy(published, tmp_path / "registry").state_value(obs)


def test_load_policy_says_what_is_wrong(run, tmp_path):
    with pytest.raises(InputError, match="no registry at"):
        sparring.load_policy("CartPole-v1", tmp_path / "none")
    for target in ("runs/nope", "runs/nope@best"):
        with pytest.raises(InputError, match=r"^there is no run directory runs/nope, and there is no registry at"):
            sparring.load_policy(target, tmp_path / "none")
    with pytest.raises(InputError, match="has no model 'bot' of CartPole-v1"):
        sparring.load_policy("CartPole-v1", Registry(tmp_path / "empty"))
    with pytest.raises(InputError, match="neither a run directory nor a model"):
        sparring.load_policy(tmp_path)
    (tmp_path / "policy.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"policy\.safetensors: not a policy"):
        sparring.load_policy(tmp_path)


def test_evaluate(run):
    for target in (run, str(run.path), run.policy()):
        row = sparring.evaluate(target, episodes=3, seed=1)
        assert row["evaluation/episodes"] == 3
    assert sparring.evaluate(run, 3, seed=1) == row


def test_train_takes_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "game: CartPole-v1\nalgorithm: {name: dqn, learning_starts: 16}\niteration: 32\nstop: {iterations: 1}\n"
    (tmp_path / "small.yaml").write_text(text)
    assert len(sparring.train("small.yaml").rows()) == 1
