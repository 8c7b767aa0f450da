"""An RLlib algorithm behind the training loop's seam. It plays and learns an iteration at a time, and reports it in our
metrics' names. Its state is saved as plain arrays and JSON: no pickle is written, and none is loaded."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.core import DEFAULT_MODULE_ID

from sparring.errors import InputError, SparringError, Unrenderable
from sparring.experience import Fragment
from sparring.experiment import Experiment, Resources
from sparring.games import Game
from sparring.games.spec import Array
from sparring.games.vector import clips_rewards
from sparring.launch.ray_cluster import connect
from sparring.networks.policy import Policy
from sparring.rllib.config import algorithm_class, configure, customised, is_offline
from sparring.rllib.game import LENGTHS, RETURNS, rows_of
from sparring.rllib.module import render
from sparring.rollout.pool import memory_of
from sparring.rollout.ray_pool import require, try_out
from sparring.runs.metrics import Episodes, Phases, Row
from sparring.store import open_store
from sparring.training.offline import recorded_play
from sparring.training.protocol import States, Trainee

__all__ = ["Bridge"]

PHASES = {  # RLlib's timers → where our time goes
    "env_runner_sampling_timer": "sample",
    "sample": "sample",
    "replay_buffer_add_data_timer": "load",
    "replay_buffer_sampling_timer": "load",
    "replay_buffer_update_prios_timer": "load",
    "offline_sampling_timer": "load",
    "learner_update_timer": "learn",
    "synch_weights": "update",
}
LOSSES = {"total_loss": "loss/total", "vf_loss": "loss/value", "qf_loss": "loss/q", "entropy": "policy/entropy"}
SMALL = 1_000_000  # parameters of a module below which a second thread of PyTorch costs more than it gains
READERS = 3  # CPUs with which Ray reads recorded play: two that convert, and one that feeds them
CHUNK = 200  # fragments of recorded play that are converted, shuffled and written together


class Bridge(Trainee):
    """Any of RLlib's algorithms, as the loop sees it."""

    def __init__(self, experiment: Experiment, game: Game, logs: Path) -> None:
        self.experiment, self.game = experiment, game
        self.offline = is_offline(algorithm_class(experiment.name))
        if game.env is None and not self.offline:
            raise InputError(f"{game.name} is a declared game and cannot be simulated: learn it with `source: store`")
        if clips_rewards(game):
            raise InputError("game.reward_clipping is for our algorithms: set RLlib's, algorithm.clip_rewards")
        configure(experiment, game)  # refuses early
        self.phases, self.episodes = Phases(), Episodes()
        self.steps = self.updates = 0
        self.algorithm: Any = None
        self.data: Path | None = None  # recorded play, converted for RLlib

    @classmethod
    def hyperparameters(cls, experiment: Experiment, game: Game | None = None) -> dict[str, Any]:
        """Those that are given: RLlib has the others, and `configure` looks at all of them together."""
        algorithm_class(experiment.name)
        return experiment.hyperparameters

    @classmethod
    def check(cls, experiment: Experiment, game: Game) -> None:
        configure(experiment, game)

    @classmethod
    def state_shapes(cls, experiment: Experiment, game: Game) -> dict[str, tuple[int, ...]]:
        raise InputError(
            f"{experiment.name}: what one of RLlib's algorithms learned cannot be put into another, as pbt does: "
            "use tune.scheduler: asha"
        )

    def network(self) -> str | None:
        return None  # RLlib's module, which need not be layers

    def prepare(self) -> None:
        """Everything that may refuse."""
        self._start()
        if self.experiment.evaluation.every:
            try:
                self.policy()
            except Unrenderable as error:
                self.close()
                raise InputError(f"{error}. Without it there is no evaluation: set evaluation.every to 0") from error

    def open(self, states: States | None = None) -> None:
        pass  # it is: `prepare` or `resume` came before

    def _start(self) -> None:
        try:
            self._connect()
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        e = self.experiment
        if self.offline:
            self.data = Path(tempfile.mkdtemp(prefix="sparring-rllib-"))
            self.steps = convert(e, self.game, self.data)
        elif e.rollout.workers:
            try_out(self.game)  # RLlib replaces runners whose game fails, without end, and goes on without play
        config = configure(e, self.game, str(self.data))
        try:
            self.algorithm = config.build_algo()
        except (ValueError, TypeError, AttributeError, AssertionError, NotImplementedError, KeyError) as error:
            raise InputError(f"{e.name} cannot be built for {self.game.name}: {error}") from error
        shutil.rmtree(self.algorithm.logdir, ignore_errors=True)  # RLlib's own, empty: the run directory is ours
        if sum(p.numel() for p in self._module().parameters()) < SMALL and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)

    def _connect(self) -> None:
        """To a Ray with room for everybody: RLlib would wait for it, for ever."""
        e, config = self.experiment, configure(self.experiment, self.game)
        learners = config.num_learners * (1 + config.num_aggregator_actors_per_learner)
        needed = learners + e.rollout.workers * config.num_cpus_per_env_runner
        if self.offline:
            needed = learners + READERS
        if e.runner == "ray" and not self.offline:
            require(e.resources, e.rollout.workers)
        else:  # of our own: its CPUs are places, which may share cores
            connect(Resources(cpus=max(os.cpu_count() or 1, READERS + 1, needed)))
        if (found := ray.cluster_resources().get("CPU", 0.0)) < needed:
            raise InputError(
                f"{e.rollout.workers} environment runners and {learners} learners of {e.name} need {needed:g} CPUs, "
                f"this Ray has {found:g}: lower rollout.workers or algorithm.num_learners, or add nodes"
            )

    def _module(self) -> Any:
        """What acts, with the learner's weights: those of the environment runners may be older."""
        module = self.algorithm.config.get_rl_module_spec(inference_only=True).build()
        module.set_state(self.algorithm.learner_group.get_weights()[DEFAULT_MODULE_ID])
        return module

    def policy(self) -> Policy:
        if (why := customised(self.algorithm.config)) is not None:
            raise Unrenderable(why)
        return render(self._module(), self.game, self.exploration)

    @property
    def exploration(self) -> float:
        """DQN's ε by now: a number, or [[step, value], …]. Others explore by themselves."""
        epsilon = getattr(self.algorithm.config, "epsilon", 0.0)
        if isinstance(epsilon, list | tuple):
            steps, values = zip(*epsilon, strict=True)
            return float(np.interp(self.steps, steps, values))
        return float(epsilon)

    def iterate(self) -> Row:
        with self._timed():
            try:
                result = self.algorithm.train()
            except (ray.exceptions.RayError, RuntimeError, ValueError) as error:  # too many runners failed in a row, …
                raise SparringError(f"{self.experiment.name} failed: {error}") from error
        played = result.get("env_runners", {})
        self.steps += int(played.get("num_env_steps_sampled", 0))
        if isinstance(returns := played.get(RETURNS), list):  # else a NaN: no episode ended
            self.episodes.add(list(zip(returns, played[LENGTHS], strict=True)))
        row: Row = {"steps": self.steps, "updates": self.updates, **self.episodes.take(), **self.phases.take()}
        row["policy/exploration"] = self.exploration
        return row | metrics(result.get("learners", {}).get(DEFAULT_MODULE_ID, {}))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """RLlib's timers are moving averages; ours are seconds of this iteration, so we look at the same clock."""
        logger = self.algorithm.metrics
        theirs = logger.log_time

        @contextlib.contextmanager
        def log_time(key: Any, **options: Any) -> Iterator[None]:
            phase = PHASES.get(key[-1] if isinstance(key, tuple) else key)
            with theirs(key, **options), self.phases(phase) if phase else contextlib.nullcontext():
                yield
            if phase == "learn":  # offline the learner is called once for all updates of an iteration
                self.updates += self.experiment.iteration if self.offline else 1

        logger.log_time = log_time
        try:
            yield
        finally:
            logger.log_time = theirs

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays: dict[str, Array] = {}
        state = encode_state(self.algorithm.get_state(), arrays, "state")
        meta = {"steps": self.steps, "updates": self.updates, "state": state}
        return arrays, meta | {"episodes": self.episodes.count, "recent": self.episodes.recent}

    def resume(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        """Here, not in `open`: Ray takes the signals when it starts, and the loop must have them."""
        self._start()
        self.algorithm.set_state(decode_state(meta["state"], arrays))
        self.steps, self.updates = meta["steps"], meta["updates"]
        self.episodes.count = meta["episodes"]
        self.episodes.recent = [(ret, length) for ret, length in meta["recent"]]

    def memory(self) -> list[int]:
        """Of the environment runners, each of which has loaded PyTorch."""
        sizes: list[int] = self.algorithm.env_runner_group.foreach_env_runner(
            lambda _: memory_of(os.getpid()), local_env_runner=False
        )
        return sizes

    @property
    def takes_turns(self) -> bool:
        return not self.offline and not issubclass(algorithm_class(self.experiment.name), IMPALA)  # APPO is one

    def close(self) -> None:
        if self.algorithm is not None:
            self.algorithm.stop()
        if self.data is not None:
            shutil.rmtree(self.data, ignore_errors=True)


def metrics(learned: dict[str, Any]) -> Row:
    """RLlib's numbers of the learner: losses under our names, the rest under its own."""
    row: Row = {}
    for name, value in learned.items():
        if not isinstance(value, int | float | np.number):
            continue
        if name.endswith("_loss"):
            row[LOSSES.get(name, f"loss/{name.removesuffix('_loss')}")] = float(value)
        else:
            row[LOSSES.get(name, f"rllib/{name}")] = float(value)
    return row


def convert(experiment: Experiment, game: Game, out: Path) -> int:
    """Recorded play → Parquet files that RLlib streams, a few hundred fragments at a time; how many steps it has."""
    import pyarrow.parquet

    rng, steps = np.random.default_rng(experiment.seed), 0
    assert experiment.store is not None
    store = open_store(experiment.store, readonly=True)
    waiting: list[Fragment] = []

    def flush() -> None:
        nonlocal steps
        rows = rows_of(game, waiting, rng)
        table = pyarrow.table({name: _column(column) for name, column in rows.items()})
        pyarrow.parquet.write_table(table, out / f"{steps:012d}.parquet")
        steps += len(rows["rewards"])
        waiting.clear()

    try:
        for fragment in recorded_play(store, game, experiment):
            waiting.append(fragment)
            if len(waiting) >= CHUNK:
                flush()
        if waiting:
            flush()
    finally:
        store.close()
    return steps


def _column(column: Array) -> Any:
    import pyarrow

    if column.ndim == 1:
        return pyarrow.array(column)
    from ray.data.extensions import ArrowTensorArray

    return ArrowTensorArray.from_numpy(column)


def encode_state(value: Any, arrays: dict[str, Array], name: str) -> Any:
    """A tree of RLlib's as JSON; arrays go by name into `arrays`. What is neither is reported, not pickled."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        arrays[name] = value
        return {"array": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {
            "dict": [[encode_state(k, arrays, ""), encode_state(v, arrays, f"{name}.{k}")] for k, v in value.items()]
        }
    if isinstance(value, list | tuple | set):
        return {type(value).__name__: [encode_state(v, arrays, f"{name}.{i}") for i, v in enumerate(value)]}
    raise SparringError(f"the checkpoint cannot hold {name}: a {type(value).__name__} is neither numbers nor text")


def decode_state(value: Any, arrays: dict[str, Array]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content].copy()
    if kind == "dict":
        return {decode_state(k, arrays): decode_state(v, arrays) for k, v in content}
    return {"list": list, "tuple": tuple, "set": set}[kind](decode_state(v, arrays) for v in content)
