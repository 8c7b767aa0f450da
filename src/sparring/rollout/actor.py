"""Playing: an actor steps its environments with the NumPy policy and writes what happened as rows into a block. As a
process (`serve`) it does so in shared memory, on its own; nothing of JAX is loaded here.
"""

import logging
import mmap
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sparring.algorithms.replay import END, STEP, TERMINAL
from sparring.errors import GameError, InputError, SparringError
from sparring.games import Box, Discrete, Game, MultiDiscrete
from sparring.games.catalog import Unregistered, registered_here_alone
from sparring.games.spec import Array
from sparring.games.vector import Environments, build, clips_rewards
from sparring.networks.layers import Layer, decode
from sparring.networks.policy import Policy
from sparring.networks.spec import Head
from sparring.runs.metrics import PlayedEpisode

__all__ = ["Actor", "Filled", "Plan", "Rows", "SharedBuffers", "WorkerFailed", "WorkerOrder", "WorkerState"]

log = logging.getLogger("sparring.rollout")


class Rows(NamedTuple):
    """A block of play, (environments, steps + 1, …): rows as in the replay window. The last row is always an END."""

    obs: Array
    action: Array
    reward: Array
    kind: Array
    log_prob: Array


def row_types(game: Game) -> tuple[Any, ...]:
    """The NumPy type of each of Rows' columns."""
    return game.observation.element, game.action.element, "<f4", "u1", "<f4"


class Plan(msgspec.Struct, frozen=True):
    """What a group of actors shares: the game, the policy's form and the sizes of the blocks."""

    game: Game
    layers: tuple[Layer, ...]
    head: Head
    params: dict[str, tuple[int, ...]]
    workers: int
    envs: int
    steps: int
    slots: int  # blocks of each worker
    seed: int
    low_priority: bool = False  # workers let the learner go first, which works at the same time and is the slower one


class WorkerOrder(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    plan: Plan
    worker: int  # its place in the shared memory
    seed: int
    size: int  # bytes of the shared memory
    life: int  # how many workers had this place before
    state: dict[str, bytes] | None = None  # an actor's `state` to go on from


class Filled(msgspec.Struct, frozen=True, tag=True):
    slot: int
    version: int  # of the weights with which the block was begun
    episodes: list[PlayedEpisode]  # that ended
    seconds: float  # that it took to play
    masked: bool = False  # the game says which actions are allowed


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker's last message: something is wrong with the game."""

    kind: str  # of KINDS
    why: str
    details: str = ""  # the game's traceback

    def error(self) -> SparringError:
        made = KINDS[self.kind](self.why)
        if isinstance(made, GameError):
            made.details = self.details
        return made


KINDS: dict[str, type[SparringError]] = {kind.__name__: kind for kind in (GameError, InputError, SparringError)}


class WorkerState(msgspec.Struct, frozen=True, tag=True):
    state: dict[str, bytes] | None


SNAPSHOT = b"s"  # asks for one; any other message to a worker is the number of a slot to fill


class Actor:
    """Plays `envs` environments; between two blocks nothing is reset."""

    def __init__(self, game: Game, environments: Environments, seed: int, life: int = 0) -> None:
        self.game, self.environments, self.clip = game, environments, clips_rewards(game)
        self.rng = np.random.default_rng((seed, life))
        self.obs = environments.reset(int(np.random.SeedSequence((seed, life, 1)).generate_state(1)[0]))
        self.ended = np.zeros(environments.count, bool)
        self.returns = np.zeros(environments.count)
        self.lengths = np.zeros(environments.count, np.int64)
        self.beat = np.zeros(1)  # when the game was last asked for a step

    def fill(self, rows: Rows, policy: Policy, at_random: bool = False) -> list[PlayedEpisode]:
        """Plays until the block is full; the episodes that ended."""
        episodes: list[PlayedEpisode] = []
        steps, count = rows.kind.shape[1] - 1, len(self.ended)
        rows.kind[:, :steps], rows.kind[:, steps] = STEP, END
        over = np.count_nonzero(self.ended)
        # What needs no answer of the game is done for the whole block, before or after: the same numbers as one by
        # one, and less to do between two steps.
        noise = None if at_random else policy.noise(self.rng, steps * count).reshape(steps, count, -1)
        outputs = []
        for t in range(steps):
            self.beat[0] = time.monotonic()
            rows.obs[:, t] = self.obs
            if noise is None:
                action = random_actions(self.game, self.rng, count)
            else:
                outputs.append(out := policy.outputs(self.obs))
                action = policy.choose(out, noise[t])
            step = self.environments.step(action)
            rows.action[:, t] = action
            rows.reward[:, t] = np.sign(step.reward) if self.clip else step.reward
            self.returns += step.reward
            self.lengths += 1
            self.obs = step.obs
            if over:  # what was just played only began the next episode
                rows.kind[self.ended, t] = END
                self.lengths -= self.ended
            self.ended = step.terminated | step.truncated
            if over := np.count_nonzero(self.ended):
                rows.kind[step.terminated, t] = TERMINAL
                for i in np.flatnonzero(self.ended).tolist():
                    episodes.append(PlayedEpisode(float(self.returns[i]), int(self.lengths[i]), step.infos.get(i, {})))
                    self.returns[i], self.lengths[i] = 0.0, 0
        rows.obs[:, steps] = self.obs
        self._require_numbers(rows)
        rows.log_prob[:, :steps] = 0.0 if noise is None else self._log_prob(policy, outputs, noise, rows.action)
        return episodes

    def _require_numbers(self, rows: Rows) -> None:
        """Learning would turn a game's NaN into a network of NaN, and the blame would fall on the step size."""
        fields = [rows.obs] if rows.obs.dtype.names is None else [rows.obs[name] for name in rows.obs.dtype.names]
        played = rows.reward[:, :-1]
        for what, array in (("reward", played), *(("observation", field) for field in fields)):
            if array.dtype.kind == "f" and not np.isfinite(array.sum(dtype=np.float64)):
                bad = array[~np.isfinite(array)]
                if len(bad):
                    raise SparringError(f"{self.game.name} gave {'an' if what[0] == 'o' else 'a'} {what} of {bad[0]}")

    def _log_prob(self, policy: Policy, outputs: list[Array], noise: Array, action: Array) -> Array | float:
        """(environments, steps) of a block."""
        steps, count = noise.shape[:2]
        played = action[:, :steps].swapaxes(0, 1).reshape(steps * count, *action.shape[2:])
        log_prob = policy.log_prob(np.concatenate(outputs), noise.reshape(steps * count, -1), played)
        return 0.0 if log_prob is None else log_prob.reshape(steps, count).T

    def state(self) -> dict[str, Array] | None:
        """Enough to go on identically; none where the game cannot give its own."""
        environments = self.environments.state()
        if environments is None:
            return None
        rng = np.frombuffer(msgspec.json.encode(self.rng.bit_generator.state), np.uint8)
        own = {"ended": self.ended, "returns": self.returns, "lengths": self.lengths, "rng": rng}
        return own | {f"game.{name}": array for name, array in environments.items()}

    def restore(self, state: dict[str, Array]) -> None:
        prefix = "game."
        obs = self.environments.restore({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
        if obs is None:
            log.warning("%s does not do the same for the same seed and actions: it starts anew", self.game.name)
            self.obs = self.environments.reset(int(self.rng.integers(1 << 31)))
            return
        self.obs = obs
        self.ended, self.returns, self.lengths = (state[k].copy() for k in ("ended", "returns", "lengths"))
        self.rng.bit_generator.state = msgspec.json.decode(state["rng"].tobytes())


def random_actions(game: Game, rng: np.random.Generator, count: int) -> Array:
    """Uniform: where a policy that knows nothing would explore too little."""
    action = game.action
    if isinstance(action, Discrete):
        return rng.integers(action.start, action.start + action.n, count, np.int32)
    if isinstance(action, MultiDiscrete):
        return rng.integers(0, action.nvec, (count, len(action.nvec)), np.int32)
    assert isinstance(action, Box)
    low, high = action.bounds
    if low is None or high is None:
        return rng.standard_normal((count, *action.shape)).astype(action.dtype)
    return np.clip(rng.uniform(low, high, (count, *action.shape)).astype(action.dtype), low, high).astype(action.dtype)


class SharedBuffers:
    """The memory that a learner and its workers share, as arrays. It has two copies of the weights (one to read
    while the other is written), the time of each worker's last sign of life, and the blocks."""

    def __init__(self, plan: Plan, buffer: Any) -> None:
        self.plan = plan
        size = sum(int(np.prod(shape)) for shape in plan.params.values())
        array = _Arrays(buffer)
        self.version = array(np.int64, (1,))
        self.settings = array(np.float64, (2, 2))  # of each copy: exploration; 1 to act at random
        self.weights = array(np.float32, (2, size))
        self.beats = array(np.float64, (plan.workers, 8))  # a cache line each
        shape = (plan.workers, plan.slots, plan.envs, plan.steps + 1)
        self.rows = Rows(*(array(dtype, shape) for dtype in row_types(plan.game)))
        self.size = array.at

    @classmethod
    def size_of(cls, plan: Plan) -> int:
        return cls(plan, None).size

    def block(self, worker: int, slot: int) -> Rows:
        return Rows(*(array[worker, slot] for array in self.rows))

    def write(self, weights: Sequence[Array], exploration: float, at_random: bool) -> int:
        """New weights for everybody: written beside the current ones, then the version moves on."""
        version = int(self.version[0]) + 1
        place = version % 2
        np.concatenate(weights, out=self.weights[place])
        self.settings[place] = exploration, at_random
        self.version[0] = version
        return version

    def read(self, into: Array) -> tuple[int, float, bool]:
        while True:
            version = int(self.version[0])
            np.copyto(into, self.weights[version % 2])
            exploration, at_random = self.settings[version % 2]
            if int(self.version[0]) == version:  # else the next but one may be on its way into this copy
                return version, float(exploration), bool(at_random)


class _Arrays:
    """Arrays from one buffer, aligned to cache lines; without a buffer it only counts."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.at = buffer, 0

    def __call__(self, dtype: Any, shape: tuple[int, ...]) -> Array:
        kind = np.dtype(dtype)
        start = self.at
        self.at += -(-int(np.prod(shape, dtype=np.int64)) * kind.itemsize // 64) * 64
        if self.buffer is None:
            return np.empty(0, kind)
        return np.ndarray(shape, kind, self.buffer, start)


def parts(plan: Plan, policy: Policy) -> list[Array]:
    """Its parameters as one line of numbers, when concatenated; `views` is the way back."""
    return [policy.params[name].ravel() for name in plan.params]


def views(plan: Plan, flat: Array) -> Iterator[tuple[str, Array]]:
    at = 0
    for name, shape in plan.params.items():
        size = int(np.prod(shape))
        yield name, flat[at : at + size].reshape(shape)
        at += size


def serve(control: Connection, memory: int) -> None:
    """A worker's life. What is wrong with the game is reported before it ends; anything else is in its log."""
    order = msgspec.msgpack.decode(control.recv_bytes(), type=WorkerOrder, dec_hook=decode)
    try:
        work(control, memory, order)
    except SparringError as error:
        traceback.print_exc()
        kind = next(name for name, kind in KINDS.items() if isinstance(error, kind))
        control.send_bytes(msgspec.msgpack.encode(WorkerFailed(kind, str(error), getattr(error, "details", ""))))
        sys.exit(1)


def work(control: Connection, memory: int, order: WorkerOrder) -> None:
    """Fills the slots that it is given with the newest weights there are."""
    plan = order.plan
    if plan.low_priority:
        os.nice(10)
    buffers = SharedBuffers(plan, mmap.mmap(memory, order.size))
    actor = Actor(plan.game, build_elsewhere(plan.game, plan.envs), order.seed, order.life)
    if order.state is not None:
        actor.restore(decode_state(order.state))
    actor.beat = buffers.beats[order.worker]
    flat = np.empty(buffers.weights.shape[1], np.float32)
    policy = Policy(plan.game, plan.layers, plan.head, dict(views(plan, flat)))
    version = -1
    while True:
        message = control.recv_bytes()
        if message == SNAPSHOT:
            state = actor.state()
            control.send_bytes(msgspec.msgpack.encode(WorkerState(None if state is None else encode_state(state))))
            continue
        slot, began = message[0], time.perf_counter()
        if version != int(buffers.version[0]):
            version, exploration, at_random = buffers.read(flat)
        if exploration != policy.exploration:
            policy = policy.explore(exploration)
        episodes = actor.fill(buffers.block(order.worker, slot), policy, at_random)
        filled = Filled(slot, version, episodes, time.perf_counter() - began, actor.environments.masked)
        control.send_bytes(msgspec.msgpack.encode(filled))


def build_elsewhere(game: Game, count: int) -> Environments:
    """In another process than the learner's, which has made the game before."""
    try:
        return build(game, count)
    except Unregistered as error:
        raise registered_here_alone(game) from error


def worker_seed(plan: Plan, worker: int) -> int:
    return int(np.random.SeedSequence((plan.seed, worker)).generate_state(1)[0])


def encode_state(state: dict[str, Array]) -> dict[str, bytes]:
    """Arrays as messages carry them: type and shape, then the bytes."""
    return {
        name: msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes())) for name, array in state.items()
    }


def decode_state(state: dict[str, bytes]) -> dict[str, Array]:
    arrays = {}
    for name, data in state.items():
        dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
        arrays[name] = np.frombuffer(raw, dtype).reshape(shape)
    return arrays
