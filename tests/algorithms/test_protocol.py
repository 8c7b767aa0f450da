"""What an algorithm is, by `algorithms/protocol.py`: trainers read nothing else of it, and ours, the example from
outside and the smallest possible ones all follow it."""

from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import msgspec
import numpy as np
import pytest

from sparring import algorithms
from sparring.algorithms.protocol import Algorithm, OffPolicyConfig, OnPolicyConfig
from sparring.errors import InputError
from sparring.experience.fragment import Columns, new_id, pack
from sparring.experiment import Checkpoint, Evaluation, Experiment, Rollout, Stop
from sparring.games import Box, Discrete, Game, catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Head, QValues, param_shapes
from sparring.training import loop, store_learner, trainee


class State(NamedTuple):
    params: dict[str, Any]


class Minimal(Algorithm):
    """One layer, moved towards what was rewarded. It has what `Algorithm` asks for, no layers and no minibatches."""

    head: Head

    def init(self, key: jax.Array) -> State:
        return State(
            {name: np.zeros(shape, np.float32) for name, shape in param_shapes(self.game, (), self.head).items()}
        )

    def policy(self, state: State, normaliser: dict[str, Any], exploration: float) -> Policy:
        params = {name: np.asarray(array) for name, array in state.params.items()}
        return Policy(self.game, (), self.head, params | normaliser, exploration)


class OffConfig(msgspec.Struct, frozen=True):
    batch: int = 8
    gamma: float = 0.9
    n_step: int = 1
    replay: int = 1000
    learning_starts: int = 32
    updates_per_step: float = 0.25
    normalise: bool = True


class Off(Minimal):
    config_class, head = OffConfig, QValues()

    def exploration(self, steps: int) -> float:
        return 0.5

    def update(self, state: State, normaliser: Any, data: Any) -> tuple[State, dict[str, Any]]:
        bias = np.array(state.params["head.b"])
        np.add.at(bias, np.asarray(data.action).ravel(), 1e-3 * np.asarray(data.reward).ravel())
        return State(state.params | {"head.b": bias}), {"loss/none": bias.mean()}


class OnConfig(msgspec.Struct, frozen=True):
    steps: int = 64
    normalise: bool = True


class On(Minimal):
    config_class, on_policy, head = OnConfig, True, Categorical()

    def update(self, state: State, normaliser: Any, data: Any) -> tuple[State, dict[str, Any]]:
        bias = np.array(state.params["head.b"])
        np.add.at(bias, np.asarray(data.action)[data.mask], 1e-3 * np.asarray(data.reward)[data.mask])
        return State(state.params | {"head.b": bias}), {"loss/none": bias.mean()}


class Unfinished(Algorithm):
    config_class, on_policy = OnConfig, True

    def init(self, key: jax.Array) -> State:
        return State({})


class Bare:
    """Everything but a subclass."""


class WithoutConfig(Minimal):
    on_policy, head = True, Categorical()


class WithAnotherConfig(On):
    config_class = dict  # type: ignore[assignment]


class WithoutSteps(On):
    config_class = OffConfig  # type: ignore[assignment]


class Loose(msgspec.Struct):
    steps: int = 64
    normalise: bool = True


class WithALooseConfig(On):
    config_class = Loose  # type: ignore[assignment]


class WithoutSelf(On):
    def __init__(self, game: Game, config: OnConfig) -> None:
        pass


def anything() -> None:
    pass


MINIMAL = (f"{__name__}:Off", f"{__name__}:On")
EXAMPLE = "a2c:A2C"
EVERY = (*algorithms.ALGORITHMS, *MINIMAL, EXAMPLE)


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))


# What a name means


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Unfinished", "is no algorithm: it has no policy, update$"),
        ("Bare", r"is no algorithm: it has no .*update\. Subclass sparring\.algorithms\.protocol\.Algorithm"),
        ("anything", "is no algorithm: it is a function, not a class"),
        ("WithoutConfig", "is no algorithm: it has no config_class, update$"),
        ("WithAnotherConfig", "its config_class is <class 'dict'>, not a msgspec.Struct"),
        ("WithoutSteps", r"its config_class has no steps, which trainers read \(.*OnPolicyConfig\)"),
        ("WithALooseConfig", "config.*make config_class frozen"),
        ("WithoutSelf", r"its __init__ does not set self\.game"),
        ("Offf", "has no 'Offf', did you mean 'Off'"),
    ],
)
def test_what_is_no_algorithm(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        algorithms.create(f"{__name__}:{name}", catalog.load("CartPole-v1"))
    assert f"{__name__}:{name}" in str(caught.value)


def test_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(InputError, match="algorithm 'nowhere:A': cannot import 'nowhere': ModuleNotFoundError"):
        algorithms.find("nowhere:A")


@pytest.mark.parametrize("name", [EXAMPLE, MINIMAL[0], "ppo"])
def test_a_wrong_hyperparameter(name: str) -> None:
    game = catalog.load("CartPole-v1")
    with pytest.raises(InputError, match=r"unknown key algorithm\.normalize: did you mean algorithm\.normalise\?"):
        algorithms.create(name, game, {"normalize": True})
    with pytest.raises(InputError, match=r"algorithm\.normalise: expected `bool`, got `str`"):
        algorithms.create(name, game, {"normalise": "yes"})


def test_equal_ones_are_one_and_compiled_once() -> None:
    game = catalog.load("CartPole-v1")
    assert algorithms.create(EXAMPLE, game) is algorithms.create(EXAMPLE, game, {"gamma": 0.99})
    assert algorithms.create(EXAMPLE, game) is not algorithms.create(EXAMPLE, game, {"gamma": 0.9})


# What each of them declares


def game_for(name: str) -> Game:
    """One that it can learn."""
    action = Box((2,), low=-1.0, high=1.0) if name in ("ddpg", "td3") else Discrete(2)
    return Game("g", Box((4,)), action)


@pytest.mark.parametrize("name", EVERY)
def test_each_follows_the_protocol(name: str) -> None:
    found = algorithms.find(name)
    assert Algorithm in found.__mro__
    assert issubclass(found.config_class, msgspec.Struct)
    assert found.config_class.__struct_config__.frozen
    assert isinstance(found.on_policy, bool)
    assert found.offline == (name in ("bc", "cql", "iql"))
    assert not (found.offline and found.on_policy)
    algorithm = algorithms.create(name, game_for(name))
    assert not getattr(type(algorithm), "__abstractmethods__", ())
    assert isinstance(algorithm.batch, int)
    assert algorithm.layers is None or isinstance(algorithm.layers, tuple)
    promised = OnPolicyConfig if found.on_policy else OffPolicyConfig
    assert all(hasattr(algorithm.config, key) for key in vars(promised) if not key.startswith("_"))
    assert 0.0 <= algorithm.exploration(10**9) <= 1.0


# What trainers read


PROMISED = {key for key in (*Algorithm.__annotations__, *vars(Algorithm)) if not key.startswith("_")}


class Only:
    """Something, of which only these names can be read."""

    def __init__(self, of: Any, names: set[str]) -> None:
        self.__dict__.update(_of=of, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AssertionError(f"{name} is read, but not promised by algorithms/protocol.py")
        return getattr(self._of, name)


def sealed(algorithm: Algorithm) -> Any:
    """The algorithm, of which nothing can be read but what the protocol promises."""
    promised = OnPolicyConfig if algorithm.on_policy else OffPolicyConfig
    config = Only(algorithm.config, {key for key in vars(promised) if not key.startswith("_")})
    algorithm = Only(algorithm, PROMISED)  # type: ignore[assignment]
    algorithm.__dict__["config"] = config
    return algorithm


def test_what_is_not_promised_is_noticed() -> None:
    one = sealed(algorithms.create(EXAMPLE, game_for(EXAMPLE)))
    assert one.config.steps == 256
    with pytest.raises(AssertionError, match="lr is read, but not promised"):
        _ = one.config.lr
    with pytest.raises(AssertionError, match="value_shapes is read"):
        _ = one.value_shapes


SMALL = {"steps": 64, "minibatch": 32, "epochs": 1, "batch": 8, "learning_starts": 32, "replay": 1000}
LAYERS = {key: [{"layer": "dense", "units": 8}] for key in ("layers", "critic_layers")}


def small(name: str) -> dict[str, Any]:
    """The hyperparameters that make it quick, of those it has."""
    fields = {field.name for field in msgspec.structs.fields(algorithms.find(name).config_class)}
    return {key: value for key, value in (SMALL | LAYERS).items() if key in fields}


class Wobble(gymnasium.Env):  # type: ignore[type-arg]
    """Ten steps of noise; half of the actions are rewarded."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, continuous: bool = False) -> None:
        box: Any = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = box if continuous else gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 10
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._see(), float(np.sum(action) > 0), self.left == 0, False, {}

    def _see(self) -> Any:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


gymnasium.register("Wobble-v0", entry_point=Wobble)
gymnasium.register("WobbleBox-v0", entry_point=Wobble, kwargs={"continuous": True})


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("bc", "cql", "iql")])
def test_a_run_reads_what_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    create = algorithms.create
    monkeypatch.setattr(trainee.algorithms, "create", lambda *args: sealed(create(*args)))
    experiment = Experiment(
        game="WobbleBox-v0" if name in ("ddpg", "td3") else "Wobble-v0",
        algorithm={"name": name, **small(name)},
        iteration=64,
        stop=Stop(iterations=2),
        evaluation=Evaluation(every=2, episodes=1),
        checkpoint=Checkpoint(every=1),
        out=str(tmp_path / "run"),
    )
    loop.train(experiment)
    run = loop.resume(tmp_path / "run", ["stop.iterations=3"])
    assert [row["iteration"] for row in run.rows()] == [1, 2, 3]
    assert run.rows()[-1]["updates"] > 0


@pytest.mark.parametrize("name", MINIMAL)
def test_the_smallest_ones_train_with_a_worker(tmp_path: Path, name: str) -> None:
    experiment = Experiment(
        game="CartPole-v1",
        algorithm={"name": name},
        rollout=Rollout(workers=1),
        iteration=64,
        stop=Stop(iterations=2),
        evaluation=Evaluation(every=2, episodes=1),
        out=str(tmp_path / "run"),
    )
    run = loop.train(experiment)
    assert run.rows()[-1]["steps"] >= 128 - 2 * 32  # END rows are no steps
    assert run.rows()[-1]["updates"] > 0
    assert run.policy().params["head.b"].any()


@pytest.mark.parametrize("name", EVERY)
def test_the_live_trainers_learner_reads_what_is_promised(name: str) -> None:
    game, steps = game_for(name), 80
    learning = store_learner.create(sealed(algorithms.create(name, game, small(name))))
    rng = np.random.default_rng(0)
    action = (
        rng.uniform(-1, 1, (steps, 2)).astype("<f4") if isinstance(game.action, Box) else rng.integers(2, size=steps)
    )
    columns = Columns(
        rng.standard_normal((steps + 1, 4)).astype("<f4"),
        action.astype(game.action.element.base),
        np.ones(steps, "<f4"),
        np.full(steps, -0.7, "<f4"),
    )
    fragment = pack(game, columns, id=new_id(), player="p", episode="e", start=0, time=0.0, truncated=True)
    for place in range(4):
        learning.take([fragment], place * steps)
    assert learning.learn(0.01) > 0
    assert learning.problem() is None
    arrays, meta = learning.save()
    again = store_learner.create(sealed(algorithms.create(name, game, small(name))))
    again.restore(arrays, meta)
    first, second = learning.policy(), again.policy()
    assert all(np.array_equal(first.params[key], second.params[key]) for key in first.params)
    if name in MINIMAL:
        assert first.params["head.b"].any()
