"""What learns during a run: an algorithm's state, its normaliser, and the way from blocks of play to updates. One for
each way to learn: off-policy from a replay window, on-policy from the newest play. Saved and restored as a whole."""

import logging
from pathlib import Path
from typing import Any, cast

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparring import algorithms
from sparring.algorithms.protocol import Algorithm
from sparring.algorithms.replay import END, TERMINAL, Replay, encode_action, encode_obs
from sparring.algorithms.trajectories import Trajectories
from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.export.same_forms import require_same_forms
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.launch import load_ray
from sparring.networks.defaults import describe, kind_of
from sparring.rollout.pool import Block, PlaySource, open_source, plan_for
from sparring.runs.checkpoint import flatten
from sparring.runs.metrics import Episodes, Phases, Row
from sparring.training import devices
from sparring.training.learner import Learner
from sparring.training.protocol import States, Trainee
from sparring.training.xla import use_compilation_cache, use_precision, use_threads

__all__ = ["AlgorithmTrainee", "OffPolicy", "OnPolicy"]

log = logging.getLogger("sparring.training")
FUSED_BYTES = 64 << 20  # of batches at most for one call


class AlgorithmTrainee(Learner, Trainee):
    """An algorithm of `sparring.algorithms.protocol`, ours or anybody's: what all ways to learn have in common."""

    parts = P("device")  # type: ignore[no-untyped-call]  # how data is divided between devices: by its first axis

    def __init__(self, experiment: Experiment, game: Game, logs: Path) -> None:
        algorithm = algorithms.create(experiment.name, game, experiment.hyperparameters)
        # Before the first array is made: see there.
        use_compilation_cache()
        use_precision(experiment.precision)
        use_threads(algorithm, experiment.rollout.workers if experiment.runner == "local" else 0)
        self._check_source(experiment, algorithm)
        chosen = devices.choose(experiment.resources)
        super().__init__(algorithm, experiment.seed)
        self.experiment, self.logs = experiment, logs
        self.phases, self.episodes = Phases(), Episodes()
        self.devices, self.mesh = len(chosen), devices.mesh(chosen)
        self.lag = 0
        self.masked = False  # whether it was logged that masks are ignored
        self.source: PlaySource | None = None

    @classmethod
    def hyperparameters(cls, experiment: Experiment, game: Game | None = None) -> dict[str, Any]:
        found = algorithms.complete(experiment.name, experiment.hyperparameters, game)
        return cast(dict[str, Any], msgspec.to_builtins(found))

    @classmethod
    def check(cls, experiment: Experiment, game: Game) -> None:
        algorithms.create(experiment.name, game, experiment.hyperparameters)

    @classmethod
    def state_shapes(cls, experiment: Experiment, game: Game) -> dict[str, tuple[int, ...]]:
        algorithm = algorithms.create(experiment.name, game, experiment.hyperparameters)
        return {name: array.shape for name, array in flatten(algorithm.init(jax.random.key(0))).items()}

    @classmethod
    def _check_source(cls, experiment: Experiment, algorithm: Algorithm) -> None:
        if algorithm.game.env is None:
            name = algorithm.game.name
            raise InputError(f"{name} is a declared game and cannot be simulated: learn it with `source: store`")
        if algorithm.offline:
            raise InputError(f"{experiment.name} learns from recorded play: use `source: store` and say which `store`")

    def prepare(self) -> None:
        self._require_cluster()
        require_same_forms(self.policy())

    def network(self) -> str | None:
        layers = self.algorithm.layers
        return None if layers is None else f"{kind_of(self.game.observation)}: {describe(layers)}"

    def _require_cluster(self) -> None:
        """Here, not in `open`: Ray takes the signals when it starts, and the loop must have them."""
        if self.experiment.runner == "ray" and self.experiment.source == "simulate":
            load_ray("sparring.rollout.ray_pool").require(self.experiment.resources, self.experiment.rollout.workers)

    def _open(self, steps: int, slots: int, states: States | None) -> PlaySource:
        rollout = self.experiment.rollout
        policy = self.policy()
        seed = self.experiment.seed
        if states is not None:  # who has no state to go on from must not play the run's first games again
            seed = int(np.random.SeedSequence((seed, self.steps)).generate_state(1)[0])
        plan = plan_for(
            policy,
            workers=rollout.workers,
            envs=rollout.envs,
            steps=steps,
            slots=slots,
            seed=seed,
            low_priority=not self.algorithm.on_policy,
        )
        self.source = open_source(plan, self.experiment, self.logs, states)
        return self.source

    def apply(self, data: Any) -> dict[str, Any]:
        """With several devices each gets its part of the data; XLA adds what they find, so nothing else changes."""
        if self.mesh is not None:
            data = jax.device_put(data, NamedSharding(self.mesh, self.parts))
            self.state = jax.device_put(self.state, NamedSharding(self.mesh, P()))  # type: ignore[no-untyped-call]
        return super().apply(data)

    def _heard(self, block: Block) -> None:
        self.episodes.add(block.episodes)
        if block.masked and not self.masked:
            self.masked = True
            log.warning(
                "masks are not supported yet: info['action_mask'] of %s is ignored, and actions that it does not allow "
                "are played, too",
                self.game.name,
            )

    def _row(self) -> Row:
        row: Row = {"steps": self.steps, "updates": self.updates, **self.episodes.take(), **self.phases.take()}
        row |= {"policy/exploration": self.exploration, "policy/lag": self.lag}
        if self.source is not None:
            row |= self.source.metrics()
        return row | self.metrics

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, meta = super().save()
        states = self.source.state() if self.source is not None else []
        for worker, state in enumerate(states):
            arrays |= {f"worker.{worker}.{name}": array for name, array in (state or {}).items()}
        heard = {"episodes": self.episodes.count, "recent": self.episodes.recent, "infos": self.episodes.infos}
        return arrays, meta | heard | {"workers": len(states)}

    def resume(self, arrays: dict[str, Array], meta: dict[str, Any]) -> States:
        """`restore`, and the workers' states for `open`."""
        self._require_cluster()
        self.restore(arrays, meta)
        self.episodes.count = meta["episodes"]
        self.episodes.recent = [(ret, length) for ret, length in meta["recent"]]
        self.episodes.infos = list(meta.get("infos", ()))
        states: States = []
        for worker in range(meta["workers"]):
            prefix = f"worker.{worker}."
            found = {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}
            states.append(found or None)
        return states

    def memory(self) -> list[int]:
        return [] if self.source is None else self.source.memory()

    @property
    def takes_turns(self) -> bool:
        return False

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


class OffPolicy(AlgorithmTrainee):
    """Blocks go into the replay window as they come; each step of play allows so many updates. Workers play on while
    we learn, at most two blocks ahead: learning that is slower than play slows play down."""

    parts = P(None, "device")  # type: ignore[no-untyped-call]  # each batch, not the batches: they are learned one after the other

    def __init__(self, experiment: Experiment, game: Game, logs: Path) -> None:
        super().__init__(experiment, game, logs)
        rollout, c = experiment.rollout, self.config
        self.block_steps = rollout.steps or max(8, min(32, 256 // rollout.envs))
        self.replay = Replay(self.game, c.replay)
        rows = rollout.envs * (self.block_steps + 1)
        if rows > c.replay:
            raise InputError(
                f"algorithm.replay is {c.replay} rows, one block of play has {rows}: "
                "enlarge it, or lower rollout.envs or rollout.steps"
            )
        if c.batch % self.devices:
            raise InputError(f"algorithm.batch ({c.batch}) is not a multiple of {self.devices} devices: make it one")
        self.debt = 0.0  # updates that play so far allows and that were not made yet
        row_bytes = 2 * c.batch * self.replay.obs[0].nbytes
        per_block = round(rollout.envs * self.block_steps * c.updates_per_step)
        self.fused = max(1, min(per_block, FUSED_BYTES // row_bytes))
        self.random_steps = c.learning_starts if isinstance(self.game.action, Box) else 0

    def open(self, states: States | None = None) -> None:
        source = self._open(self.block_steps, 2, states)
        source.publish(self.policy(), self.steps < self.random_steps)
        for _ in range(2):
            source.start()

    def iterate(self) -> Row:
        assert self.source is not None
        target = self.steps + self.experiment.iteration
        while self.steps < target:
            with self.phases("sample"):
                block = self.source.take()
            with self.phases("load"):
                self._load(block)
                self.source.release(block)
            self._learn()
            with self.phases("update"):
                self.source.publish(self.policy(), self.steps < self.random_steps)
        return self._row() | {"replay/transitions": len(self.replay)}

    def _load(self, block: Block) -> None:
        rows = block.rows
        flat = (array.reshape(-1, *array.shape[2:]) for array in (rows.obs, rows.action, rows.reward, rows.kind))
        obs = self.replay.extend_rows(*flat)
        if self.normaliser is not None:
            self.normaliser.observe(obs)
        steps = int((rows.kind != END).sum())
        self.steps += steps
        self._heard(block)
        self.lag = block.lag
        if self.steps >= self.config.learning_starts:
            self.debt += steps * self.config.updates_per_step

    def _learn(self) -> None:
        c, metrics = self.config, None
        while self.debt >= self.fused:
            with self.phases("load"):
                batches = self.replay.sample(self.rng, self.fused, c.batch, gamma=c.gamma, n_step=c.n_step)
            with self.phases("learn"):
                metrics = self.apply(batches)
            self.debt -= self.fused
            self.updates += self.fused
        if metrics is not None:
            with self.phases("learn"):  # JAX computes in the background: only asking for a result waits for it
                self.note(metrics)
                jax.block_until_ready(self.state)  # type: ignore[no-untyped-call]  # JAX's

    def save(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, meta = super().save()
        r = self.replay
        arrays |= {f"replay.{name}": getattr(r, name)[: r.rows] for name in ("obs", "action", "reward", "kind")}
        return arrays, meta | {"debt": self.debt, "replay": [r.head, r.rows, r.transitions]}

    def restore(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        super().restore(arrays, meta)
        r = self.replay
        r.head, r.rows, r.transitions = meta["replay"]
        for name in ("obs", "action", "reward", "kind"):
            getattr(r, name)[: r.rows] = arrays[f"replay.{name}"]
        self.debt = meta["debt"]


class OnPolicy(AlgorithmTrainee):
    """An iteration: every worker plays its share with the newest policy, then all of it is learned from. With
    `rollout.overlap` the next share is played meanwhile, one policy behind."""

    def __init__(self, experiment: Experiment, game: Game, logs: Path) -> None:
        super().__init__(experiment, game, logs)
        rollout = experiment.rollout
        self.overlap = rollout.overlap and rollout.workers > 0
        self.streams = max(rollout.workers, 1) * rollout.envs
        wanted = self.config.steps
        if rollout.steps is not None and rollout.steps * self.streams != wanted:
            raise InputError(
                f"algorithm.steps is {wanted}, but {self.streams} environments of {rollout.steps} steps each make "
                f"{rollout.steps * self.streams}: leave rollout.steps out"
            )
        if wanted % self.streams:
            raise InputError(
                f"algorithm.steps ({wanted}) is not a multiple of the {self.streams} environments "
                f"(rollout.workers × rollout.envs): make it one"
            )
        if self.streams % self.devices:
            raise InputError(
                f"the {self.streams} environments (rollout.workers × rollout.envs) are not a multiple of the "
                f"{self.devices} devices (resources.devices or gpu): make them one"
            )
        self.block_steps = wanted // self.streams

    @property
    def takes_turns(self) -> bool:
        return not self.overlap

    def open(self, states: States | None = None) -> None:
        source = self._open(self.block_steps, 2, states)
        source.publish(self.policy())
        if self.overlap:
            source.start()

    def iterate(self) -> Row:
        source = self.source
        assert source is not None
        with self.phases("sample"):
            if not self.overlap:
                source.start()
            blocks = sorted((source.take() for _ in range(source.plan.workers)), key=lambda block: block.worker)
        with self.phases("load"):
            data = self._trajectories(blocks)
            if self.overlap:
                source.start()
        with self.phases("learn"):
            metrics = self.apply(data)
            self.note(metrics)
            jax.block_until_ready(self.state)  # type: ignore[no-untyped-call]  # JAX's
        with self.phases("update"):
            # Only now: the update must see observations as the policy saw them that acted.
            if self.normaliser is not None:
                self.normaliser.observe(data.obs[:, :-1][data.mask])
            source.publish(self.policy())
        self.updates += 1
        return self._row()

    def _trajectories(self, blocks: list[Block]) -> Trajectories:
        def column(name: str) -> Array:
            return np.concatenate([getattr(block.rows, name) for block in blocks])

        obs, action, kind = column("obs"), column("action")[:, :-1], column("kind")
        mask = kind[:, :-1] != END
        for block in blocks:
            self._heard(block)
        self.steps += int(mask.sum())
        self.lag = max(block.lag for block in blocks)
        encoded = encode_obs(self.game, obs.reshape(-1, *obs.shape[2:]))
        acted = encode_action(self.game, action.reshape(-1, *action.shape[2:]))
        return Trajectories(
            obs=encoded.reshape(*kind.shape, *encoded.shape[1:]),
            action=acted.reshape(*mask.shape, *acted.shape[1:]),
            reward=column("reward")[:, :-1],
            terminated=kind[:, :-1] == TERMINAL,
            ended=mask & (kind[:, 1:] == END),
            log_prob=column("log_prob")[:, :-1],
            mask=mask,
        )
