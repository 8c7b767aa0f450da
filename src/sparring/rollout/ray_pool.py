"""Rollouts on a Ray cluster: the blocks of `rollout.Pool`, from any number of machines, behind the same seam.

Ray carries one actor for each node, the host of that node's workers. These are those of the local runner: processes
that play with NumPy and know nothing of Ray. A worker costs a third of the memory of an actor of its own, and starts
sooner. New weights travel once to a node, whatever the number of its workers. The host replaces workers that die or
hang. A host that is lost, with its node or alone, is replaced by us.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sparring import __version__
from sparring.errors import InputError, SparringError
from sparring.experiment import Resources
from sparring.games.spec import Array, Game
from sparring.launch.ray_cluster import (
    NodeAffinitySchedulingStrategy,
    available_resources_per_node,
    cause,
    connect,
    ray,
)
from sparring.networks.layers import decode
from sparring.networks.policy import Policy
from sparring.rollout.actor import Plan, Rows, build_elsewhere, decode_state, encode_state, parts, random_actions
from sparring.rollout.pool import LIVES, STARTING, Block, Pool, Usage
from sparring.runs.metrics import PlayedEpisode, Row

__all__ = ["RayPool", "require", "try_out"]


log = logging.getLogger("sparring.cluster")
LOOK = 1.0  # seconds of waiting at a time: a Ctrl-C is heard in between
FORGOTTEN = 100_000  # versions after which nobody plays with one any more


class PlayedBlock(NamedTuple):
    """A full block, as it travels."""

    number: int  # of the worker, in the whole pool
    slot: int
    version: int
    rows: Rows
    episodes: list[PlayedEpisode]
    seconds: float
    masked: bool = False  # the game says which actions are allowed


def require(resources: Resources, workers: int) -> None:
    """At once, with what is missing and what to change: Ray itself would wait for ever."""
    connect(resources)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(room_on(node, resources) for node in nodes)
    if room >= workers:
        return
    has = "; ".join(f"{node.get('CPU', 0.0):g} CPUs, {node.get('GPU', 0.0):g} GPUs" for node in nodes)
    raise InputError(
        f"{workers} rollout workers with {resources.actor_cpus:g} CPUs and {resources.actor_gpus:g} GPUs each do not "
        f"fit: this cluster of {len(nodes)} nodes ({has}) has room for {room:g}. Lower rollout.workers, "
        "resources.actor_cpus or resources.actor_gpus, or add nodes with `sparring cluster up --join`"
    )


def try_out(game: Game) -> None:
    """A first step of a game in a process of Ray's, for those who would not say what is wrong with it."""
    try:
        ray.get(ray.remote(_first_step).options(num_cpus=0).remote(game.to_json()), timeout=STARTING)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SparringError):
            raise error.cause from error
        raise
    except ray.exceptions.GetTimeoutError as error:
        raise SparringError(f"{game.env} did not make its first step on the cluster within {STARTING:g} s") from error


def _first_step(declaration: bytes) -> None:
    game = Game.from_json(declaration)
    environments = build_elsewhere(game, 1)
    try:
        environments.reset(0)
        environments.step(random_actions(game, np.random.default_rng(0), 1))
    finally:
        environments.close()


def room_on(node: dict[str, float], resources: Resources) -> float:
    """How many workers a node has room for."""
    asked = {"CPU": resources.actor_cpus, "GPU": resources.actor_gpus}
    rooms = (node.get(kind, 0.0) / amount + 1e-9 for kind, amount in asked.items() if amount)
    return math.floor(least) if (least := min(rooms, default=math.inf)) < math.inf else least


def divide(numbers: Iterable[int], resources: Resources) -> dict[str, list[int]] | None:
    """Workers by node, each to where most room is left; none when there is not enough."""
    room = {name: room_on(node, resources) for name, node in sorted(available_resources_per_node().items())}
    shares: dict[str, list[int]] = {}
    for number in numbers:
        most = max(room, key=lambda name: (room[name], -len(shares.get(name, ()))), default=None)
        if most is None or room[most] < 1:
            return None
        room[most] -= 1
        shares.setdefault(most, []).append(number)
    return shares


# On every node


class NodeHost:
    """Some of a pool's workers, on this node."""

    def __init__(
        self,
        plan: bytes,
        limit: float,
        numbers: list[int],
        life: int,
        states: list[dict[str, bytes] | None],
        environment: dict[str, str],
    ) -> None:
        os.environ.update(environment)
        # Ray's own place for logs; it is gone with the cluster's session.
        logs = Path(os.readlink("/proc/self/fd/1")).parent / f"sparring-{ray.get_runtime_context().get_actor_id()}"
        self.numbers = numbers
        self.warnings: list[str] = []
        logging.getLogger("sparring.rollout").addHandler(_Notes(self.warnings))
        given = [None if state is None else decode_state(state) for state in states]
        self.pool = Pool(msgspec.msgpack.decode(plan, type=Plan, dec_hook=decode), limit, logs, given, numbers, life)
        self.versions: dict[int, int] = {}  # the pool's own → the learner's

    def where(self) -> tuple[str, int]:
        return __version__, os.getpid()

    def play(
        self, asked: list[tuple[int, int]], version: int, weights: Array | None, exploration: float, at_random: bool
    ) -> tuple[list[PlayedBlock], list[str], int]:
        """Asks workers for blocks and waits until as many are full, be it these or others; warnings and replacements
        since the last call. `weights`, if there are new ones, are for blocks that are begun from now on."""
        if weights is not None:
            newest = self.pool.buffers.write([weights], exploration, at_random)
            self.versions[newest] = version
            self.versions.pop(newest - FORGOTTEN, None)
        for number, slot in asked:
            self.pool.grant(self.numbers.index(number), slot)
        full = [
            PlayedBlock(
                self.numbers[worker],
                message.slot,
                self.versions[message.version],
                self.pool.buffers.block(worker, message.slot),
                message.episodes,
                message.seconds,
                message.masked,
            )
            for worker, message in self.pool.take_many(len(asked))
        ]
        warnings, replaced = self.warnings[:], self.pool.replaced
        self.warnings.clear()
        self.pool.replaced = 0
        return full, warnings, replaced

    def memory(self) -> list[int]:
        return self.pool.memory()

    def states(self) -> list[dict[str, bytes] | None]:
        return [None if state is None else encode_state(state) for state in self.pool.state()]


class _Notes(logging.Handler):
    """Keeps what is logged, for the learner to log."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())


# In the learner's process


class _Hosted:
    """A host as the learner knows it."""

    def __init__(self, actor: Any, node: str, numbers: list[int]) -> None:
        self.actor, self.node, self.numbers = actor, node, numbers
        self.pid = 0
        self.calls: deque[Any] = deque()  # of `play`, on their way, in order
        self.version = -1  # of the weights that it was given last


class RayPool:
    """A `PlaySource`."""

    def __init__(
        self,
        plan: Plan,
        limit: float,
        resources: Resources,
        states: list[dict[str, Array] | None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        require(resources, plan.workers)
        self.plan, self.limit, self.resources, self.replaced = plan, limit, resources, 0
        self.environment = environment or {}  # variables of the workers' processes
        self.version = 0
        self.weights: Any = None  # in the object store; none: the newest are not there yet
        self.policy: Policy | None = None
        self.at_random = False
        self.usage = Usage(plan.workers)
        self.owed: list[deque[int]] = [deque() for _ in range(plan.workers)]  # slots that workers were asked to fill
        self.failures = [0] * plan.workers  # hosts lost in a row, by worker
        self.hosts: list[_Hosted] = []
        self._full: deque[PlayedBlock] = deque()
        self._rounds = 0
        self._spawn(dict(enumerate(states or [None] * plan.workers)))

    def _spawn(self, states: dict[int, dict[str, Array] | None]) -> None:
        """Hosts for these workers, where there is room; all are there and speak our version, or an error says why."""
        until = time.monotonic() + STARTING
        while states:
            if (shares := divide(states, self.resources)) is None:
                if time.monotonic() > until:  # others have it, or a node was lost
                    raise SparringError(f"there was no room for {len(states)} rollout workers {_within()}")
                time.sleep(0.2)
                continue
            new = [self._host(node, numbers, [states[n] for n in numbers]) for node, numbers in shares.items()]
            asked = {host.actor.where.remote(): host for host in new}
            _, missing = ray.wait(list(asked), num_returns=len(asked), timeout=STARTING)
            if missing:
                raise SparringError(f"{len(missing)} of {len(asked)} hosts of workers did not start {_within()}")
            for ref, host in asked.items():
                if self._is_there(host, ref):
                    self.hosts.append(host)
                    states = {number: state for number, state in states.items() if number not in host.numbers}

    def _is_there(self, host: _Hosted, ref: Any) -> bool:
        """False: its node is lost, which Ray did not know yet. It takes a while to notice."""
        try:
            version, host.pid = ray.get(ref)
        except ray.exceptions.RayError as error:
            alive = any(node["NodeID"] == host.node and node["Alive"] for node in ray.nodes())
            if not alive or isinstance(error, ray.exceptions.ActorUnavailableError):
                return False
            raise SparringError(f"rollout workers could not start on node {host.node}: {cause(error)}") from error
        if version != __version__:
            raise InputError(f"node {host.node} has Sparring {version}, this one {__version__}: install the same")
        return True

    def _host(self, node: str, numbers: list[int], states: list[dict[str, Array] | None]) -> _Hosted:
        gpus = self.resources.actor_gpus * len(numbers)
        options = {
            "num_cpus": self.resources.actor_cpus * len(numbers),
            "num_gpus": gpus if gpus <= 1 else math.ceil(gpus),  # Ray's rule
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        plan = msgspec.structs.replace(self.plan, workers=len(numbers))
        encoded = [None if state is None else encode_state(state) for state in states]
        actor = (
            ray.remote(NodeHost)
            .options(**options, max_restarts=0, max_task_retries=0)
            .remote(msgspec.msgpack.encode(plan), self.limit, numbers, self.replaced, encoded, self.environment)
        )
        return _Hosted(actor, node, numbers)

    def publish(self, policy: Policy, at_random: bool = False) -> None:
        self.policy, self.at_random = policy, at_random
        self.version += 1
        self.weights = None

    def start(self) -> None:
        slot = self._rounds % self.plan.slots
        self._rounds += 1
        for host in self.hosts:
            self._ask(host, [(number, slot) for number in host.numbers])

    def release(self, block: Block) -> None:
        host = next(host for host in self.hosts if block.worker in host.numbers)
        self._ask(host, [(block.worker, block.slot)])

    def _ask(self, host: _Hosted, asked: list[tuple[int, int]]) -> None:
        for number, slot in asked:
            self.owed[number].append(slot)
        self._call(host, asked)

    def _call(self, host: _Hosted, asked: list[tuple[int, int]]) -> None:
        assert self.policy is not None, "publish a policy first"
        if self.weights is None:
            self.weights = ray.put(np.concatenate(parts(self.plan, self.policy)))
        news = self.weights if host.version != self.version else None
        host.version = self.version
        host.calls.append(host.actor.play.remote(asked, self.version, news, self.policy.exploration, self.at_random))

    def take(self) -> Block:
        while not self._full:
            self._receive()
        played = self._full.popleft()
        lag = self.version - played.version
        return Block(played.number, played.slot, lag, played.rows, played.episodes, played.masked)

    def _receive(self) -> None:
        calls = {host.calls[0]: host for host in self.hosts if host.calls}
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=LOOK)
        for ref in ready:
            host = calls[ref]
            host.calls.popleft()
            try:
                full, warnings, replaced = ray.get(ref)
            except ray.exceptions.RayTaskError as error:  # the host itself works: it has given up a worker
                if isinstance(error.cause, SparringError):
                    raise error.cause from error
                raise SparringError(cause(error)) from error
            except ray.exceptions.RayError as error:
                self._replace(host, error)
                continue
            self.replaced += replaced
            for warning in warnings:
                log.warning("on node %s: %s", host.node, warning)
            for played in full:
                slot = self.owed[played.number].popleft()
                assert slot == played.slot
                self.failures[played.number] = 0
                self.usage.busy[played.number] += played.seconds
                self._full.append(played)

    def _replace(self, host: _Hosted, error: Exception) -> None:
        """Its workers begin anew, wherever there is room, with what they were asked for."""
        self.hosts.remove(host)
        ray.kill(host.actor)
        self.replaced += len(host.numbers)
        for number in host.numbers:
            self.failures[number] += 1
        if max(self.failures[number] for number in host.numbers) >= LIVES:
            raise SparringError(f"the host of rollout workers was lost {LIVES} times in a row: {cause(error)}")
        log.warning("rollout workers %s are replaced: their host was lost. %s", host.numbers, cause(error))
        before = len(self.hosts)
        self._spawn(dict.fromkeys(host.numbers))
        for new in self.hosts[before:]:
            self._call(new, [(number, slot) for number in new.numbers for slot in self.owed[number]])

    def metrics(self) -> Row:
        return {"rollout/replaced": self.replaced, **self.usage.take()}

    def memory(self) -> list[int]:
        return [size for host in self.hosts for size in ray.get(host.actor.memory.remote())]

    def state(self) -> list[dict[str, Array] | None]:
        states: list[dict[str, Array] | None] = [None] * self.plan.workers
        for host in self.hosts:
            if host.calls:  # it would answer only when somebody has played
                continue
            try:
                found = ray.get(host.actor.states.remote(), timeout=60)
            except ray.exceptions.RayError as error:  # whoever resumes starts these workers' games anew
                log.warning("rollout workers %s do not tell their state: %s", host.numbers, cause(error))
                continue
            for number, encoded in zip(host.numbers, found, strict=True):
                states[number] = None if encoded is None else decode_state(encoded)
        return states

    def close(self) -> None:
        for host in self.hosts:
            ray.kill(host.actor)  # its workers notice and end


def _within() -> str:
    free = ray.available_resources()
    return (
        f"within {STARTING:.0f} s: the cluster has {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs "
        "free. Lower rollout.workers, add nodes, or wait until others are done"
    )
