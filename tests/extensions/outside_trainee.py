"""A trainee that the package does not know: the cross-entropy method (Rubinstein 1999) on a linear policy. It has no
gradient, no network and no workers. Experiments name it `outside_trainee:CrossEntropy`."""

import msgspec
import numpy as np

from sparring.errors import InputError
from sparring.fields import convert
from sparring.games import Discrete
from sparring.networks.defaults import kind_of
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, param_shapes
from sparring.runs.metrics import Episodes, Phases
from sparring.training.evaluate import play
from sparring.training.protocol import Trainee


class Config(msgspec.Struct, frozen=True):
    population: int = 16  # candidates of an iteration
    elite: int = 4  # the best of them: the next ones are drawn around their mean
    noise: float = 0.1  # added to the deviation, so that it never stops trying


class CrossEntropy(Trainee):
    def __init__(self, experiment, game, logs):
        self.check(experiment, game)
        self.experiment, self.game, self.config = experiment, game, convert(experiment.hyperparameters, Config)
        self.episodes, self.phases, self.steps, self.updates = Episodes(), Phases(), 0, 0
        self.rng = np.random.default_rng(experiment.seed)
        self.shapes = self.state_shapes(experiment, game)
        self.mean = np.zeros(sum(int(np.prod(shape)) for shape in self.shapes.values()))
        self.deviation = np.ones_like(self.mean)

    @classmethod
    def hyperparameters(cls, experiment, game=None):
        return msgspec.to_builtins(convert(experiment.hyperparameters, Config, "algorithm."))

    @classmethod
    def check(cls, experiment, game):
        if not isinstance(game.action, Discrete):
            raise InputError(f"{experiment.name} chooses one of several actions, {game.name} has others")

    @classmethod
    def state_shapes(cls, experiment, game):
        return param_shapes(game, (), Categorical())

    def network(self):
        return f"{kind_of(self.game.observation)}: linear"

    def iterate(self):
        with self.phases("sample"):
            drawn = self.mean + self.deviation * self.rng.standard_normal((self.config.population, self.mean.size))
            played = [play(self.made_of(each), 1, int(self.rng.integers(1 << 31)))[0] for each in drawn]
        with self.phases("learn"):
            best = drawn[np.argsort([-episode.ret for episode in played])[: self.config.elite]]
            self.mean, self.deviation = best.mean(0), best.std(0) + self.config.noise
        self.episodes.add(played)
        self.steps, self.updates = self.steps + sum(episode.length for episode in played), self.updates + 1
        return {"steps": self.steps, "updates": self.updates} | self.episodes.take() | self.phases.take()

    def made_of(self, numbers):
        parts = np.split(numbers, np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])[:-1])
        params = {name: part.reshape(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}
        return Policy(self.game, (), Categorical(), params)

    def policy(self):
        return self.made_of(self.mean)

    def save(self):
        meta = {"steps": self.steps, "updates": self.updates, "rng": self.rng.bit_generator.state}
        return {"mean": self.mean, "deviation": self.deviation}, meta

    def resume(self, arrays, meta):
        self.mean, self.deviation = arrays["mean"], arrays["deviation"]
        self.steps, self.updates, self.rng.bit_generator.state = meta["steps"], meta["updates"], meta["rng"]

    takes_turns = True
    prepare = close = lambda self: None
    open = lambda self, states=None: None  # noqa: E731
    memory = lambda self: []  # noqa: E731
