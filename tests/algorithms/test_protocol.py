"""What trainers read of an algorithm is what the protocol declares: algorithms with nothing else train."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
import pytest

from sparring.algorithms.protocol import Algorithm
from sparring.experience.fragment import Columns, new_id, pack
from sparring.experiment import Checkpoints, Evaluation, Experiment, Rollout, Stop, write
from sparring.games import Game, catalog
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Head, QValues, param_shapes
from sparring.runs.live_view import Silent
from sparring.runs.run import Run
from sparring.training import learner, loop


class State(NamedTuple):
    params: dict[str, Any]


class Minimal:
    """One layer, moved towards what was rewarded. It has what `Algorithm` declares, no layers and no minibatches."""

    head: Head

    def __init__(self, game: Game, config: msgspec.Struct) -> None:
        self.game, self.config = game, config

    def init(self, key: jax.Array) -> State:
        return State(
            {name: np.zeros(shape, np.float32) for name, shape in param_shapes(self.game, (), self.head).items()}
        )

    def exploration(self, steps: int) -> float:
        return 0.5

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
    name, on_policy, head = "minimal-off", False, QValues()

    def update(self, state: State, normaliser: Any, data: Any) -> tuple[State, dict[str, Any]]:
        bias = np.array(state.params["head.b"])
        np.add.at(bias, np.asarray(data.action).ravel(), 1e-3 * np.asarray(data.reward).ravel())
        return State(state.params | {"head.b": bias}), {"loss/none": bias.mean()}


class OnConfig(msgspec.Struct, frozen=True):
    steps: int = 64
    normalise: bool = True


class On(Minimal):
    name, on_policy, head = "minimal-on", True, Categorical()

    def update(self, state: State, normaliser: Any, data: Any) -> tuple[State, dict[str, Any]]:
        bias = np.array(state.params["head.b"])
        np.add.at(bias, np.asarray(data.action)[data.mask], 1e-3 * np.asarray(data.reward)[data.mask])
        return State(state.params | {"head.b": bias}), {"loss/none": bias.mean()}


KINDS: dict[str, tuple[Any, msgspec.Struct]] = {"off-policy": (Off, OffConfig()), "on-policy": (On, OnConfig())}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_algorithm_with_the_protocol_alone_trains(tmp_path: Path, kind: str, workers: int) -> None:
    create, config = KINDS[kind]
    algorithm: Algorithm = create(catalog.load("CartPole-v1"), config)
    experiment = Experiment(
        game="CartPole-v1",
        algorithm={"name": algorithm.name},
        rollout=Rollout(workers=workers),
        iteration=64,
        stop=Stop(iterations=2),
        evaluation=Evaluation(every=2, episodes=1),
        checkpoint=Checkpoints(every=1),
    )
    write(tmp_path / "experiment.yaml", experiment)
    trainee = loop.trainee_of(experiment, algorithm, tmp_path / "workers")
    run = loop.Loop(Run(tmp_path), experiment, trainee, Silent()).run()
    assert run.rows()[-1]["steps"] >= 128 - 2 * 32  # END rows are no steps
    assert run.rows()[-1]["updates"] > 0
    assert run.policy().params["head.b"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_algorithm_with_the_protocol_alone_learns_from_play(kind: str) -> None:
    create, config = KINDS[kind]
    game = catalog.load("CartPole-v1")
    learning = learner.create(create(game, config))
    steps = 80
    columns = Columns(
        np.zeros((steps + 1, 4), "<f4"), np.zeros(steps, "<i4"), np.ones(steps, "<f4"), np.zeros(steps, "<f4")
    )
    fragment = pack(game, columns, id=new_id(), player="p", episode="e", start=0, time=0.0, truncated=True)
    for place in range(4):
        learning.take([fragment], place * steps)
    assert learning.learn(60.0) > 0
    assert learning.policy().params["head.b"].any()
