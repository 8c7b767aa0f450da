"""Where simulated experience comes from: one actor in this process, or a pool of worker processes, behind one seam.

Workers act on their own, each with the newest weights at the beginning of its block; nobody waits for anybody but for
a slot to write into. Control goes through a socket each, data through shared memory. A worker that dies or hangs is
replaced; its unfinished block is lost, nothing else.
"""

import contextlib
import logging
import mmap
import os
import re
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec
import numpy as np

from sparring.errors import InputError, SparringError
from sparring.experiment import Experiment
from sparring.games.spec import Array
from sparring.games.vector import build
from sparring.launch import load_ray
from sparring.networks.policy import Policy
from sparring.rollout.actor import (
    SNAPSHOT,
    Actor,
    Filled,
    Plan,
    Rows,
    SharedBuffers,
    WorkerFailed,
    WorkerOrder,
    WorkerState,
    decode_state,
    encode_state,
    parts,
    worker_seed,
)
from sparring.rollout.forkserver import ForkedWorker, ForkServer
from sparring.runs.metrics import PlayedEpisode, Row

__all__ = ["Block", "LocalPlay", "PlaySource", "Pool", "open_source", "plan_for"]

log = logging.getLogger("sparring.rollout")
STARTING = 120.0  # seconds that a worker may take to import and make its games
FORKSERVER_LOG = "forkserver.log"
LIVES = 3  # failures in a row, without a block in between, after which a worker is given up


class Block(NamedTuple):
    worker: int
    slot: int
    lag: int  # how many policies behind the newest
    rows: Rows  # a view: valid until the slot is given back
    episodes: list[PlayedEpisode]
    masked: bool = False  # the game says which actions are allowed


class PlaySource(Protocol):
    plan: Plan

    def publish(self, policy: Policy, at_random: bool = False) -> None:
        """Blocks that are begun from now on are played with this."""

    def start(self) -> None:
        """Asks every worker for one more block."""

    def take(self) -> Block:
        """The next block that is full."""

    def release(self, block: Block) -> None:
        """Done with it: its worker may fill it anew."""

    def metrics(self) -> Row:
        """About the workers, since the last call."""

    def memory(self) -> list[int]:
        """Bytes of each worker's process, what it shares with others by its part (PSS)."""

    def state(self) -> list[dict[str, Array] | None]:
        """Of every worker, to go on identically; none of those who are playing or cannot give it."""

    def close(self) -> None: ...


def plan_for(
    policy: Policy, *, workers: int, envs: int, steps: int, slots: int, seed: int, low_priority: bool = False
) -> Plan:
    shapes = {name: array.shape for name, array in policy.params.items()}
    return Plan(
        policy.game, policy.layers, policy.head, shapes, max(workers, 1), envs, steps, slots, seed, low_priority
    )


def open_source(
    plan: Plan, experiment: Experiment, logs: Path, states: list[dict[str, Array] | None] | None = None
) -> "PlaySource":
    limit = experiment.rollout.limit
    if experiment.runner == "ray":
        return load_ray("sparring.rollout.ray_pool").RayPool(plan, limit, experiment.resources, states)
    return Pool(plan, limit, logs, states) if experiment.rollout.workers else LocalPlay(plan, states, limit)


class LocalPlay:
    """One actor in this process: blocks are played when they are taken. For debuggers, small games and identity. A game
    that hangs cannot be killed here; it is logged."""

    def __init__(self, plan: Plan, states: list[dict[str, Array] | None] | None = None, limit: float = 60.0) -> None:
        self.plan = plan
        self.buffers = SharedBuffers(plan, bytearray(SharedBuffers.size_of(plan)))
        self.policy: Policy | None = None
        self.at_random = False
        self.player: int | None = None  # the thread that plays right now
        self.beat = np.zeros(1)  # when the game was last asked for something
        self.closed = threading.Event()
        self.watch = threading.Thread(target=self._watch, args=(limit,), daemon=True)
        self.watch.start()
        with self._playing():
            self.actor = Actor(plan.game, build(plan.game, plan.envs), worker_seed(plan, 0))
        self.actor.beat = self.beat
        if states and states[0] is not None:
            self.actor.restore(states[0])

    @contextlib.contextmanager
    def _playing(self) -> Iterator[None]:
        self.beat[0], self.player = time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self.player = None

    def _watch(self, limit: float) -> None:
        reported = 0.0
        while not self.closed.wait(min(1.0, limit / 4)):
            beat, player = float(self.beat[0]), self.player
            if player is not None and beat != reported and time.monotonic() - beat > limit:
                reported = beat
                where = "".join(traceback.format_stack(sys._current_frames().get(player)))
                log.warning(
                    "the game has not answered for %g s (a worker's would be replaced). It is in:\n%s", limit, where
                )

    def publish(self, policy: Policy, at_random: bool = False) -> None:
        self.policy, self.at_random = policy, at_random

    def start(self) -> None:
        pass

    def take(self) -> Block:
        assert self.policy is not None, "publish a policy first"
        rows = self.buffers.block(0, 0)
        with self._playing():
            episodes = self.actor.fill(rows, self.policy, self.at_random)
        return Block(0, 0, 0, rows, episodes, self.actor.environments.masked)

    def release(self, block: Block) -> None:
        pass

    def metrics(self) -> Row:
        return {"rollout/replaced": 0}

    def memory(self) -> list[int]:
        return []

    def state(self) -> list[dict[str, Array] | None]:
        return [self.actor.state()]

    def close(self) -> None:
        self.closed.set()
        self.watch.join()  # a thread that Python finds alive at its end may take the process down with it
        self.actor.environments.close()


class _Worker:
    """A place in the pool and the process that holds it."""

    def __init__(self, index: int, number: int, life: int) -> None:
        self.index, self.number = index, number
        self.life = life - 1  # of the process that has the place now
        self.failures = 0  # in a row
        self.granted: deque[int] = deque()  # slots it was asked to fill, in order
        self.process: ForkedWorker
        self.control: Connection
        self.log: Path
        self.since = 0.0  # when we last asked it for something, or heard of it


class Usage:
    """How much of the time each worker played."""

    def __init__(self, workers: int) -> None:
        self.busy, self.since = [0.0] * workers, time.perf_counter()

    def take(self) -> Row:
        """Since the last call."""
        now = time.perf_counter()
        parts = [busy / (now - self.since) for busy in self.busy]
        self.busy, self.since = [0.0] * len(parts), now
        each = {f"rollout/utilisation_{number}": part for number, part in enumerate(parts)}
        return {"rollout/utilisation_mean": sum(parts) / len(parts), **each}


class Pool:
    """`numbers` and `life`, when these workers are some of a larger pool's, of which others had their places before."""

    def __init__(
        self,
        plan: Plan,
        limit: float,
        logs: Path,
        states: list[dict[str, Array] | None] | None = None,
        numbers: Sequence[int] | None = None,
        life: int = 0,
    ) -> None:
        self.plan, self.limit, self.logs, self.replaced = plan, limit, logs, 0
        logs.mkdir(parents=True, exist_ok=True)
        size = SharedBuffers.size_of(plan)
        # Without a name: it is gone with the last process that has it open, however that one ends.
        self._shared = tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: SIM115
        self._shared.truncate(size)
        self.buffers = SharedBuffers(plan, mmap.mmap(self._shared.fileno(), size))
        self.workers = [_Worker(i, n, life) for i, n in enumerate(numbers or range(plan.workers))]
        self.usage = Usage(plan.workers)
        self._rounds = 0
        self._next_look = 0.0
        self._sockets = selectors.DefaultSelector()
        self.forkserver = self._fork_server()
        self._full: deque[tuple[_Worker, Filled]] = deque()
        for worker, state in zip(self.workers, states or [None] * plan.workers, strict=True):
            self._spawn(worker, state)

    def _spawn(self, worker: _Worker, state: dict[str, Array] | None = None) -> None:
        worker.life += 1
        worker.log = self.logs / f"worker-{worker.number}.log"
        ours, theirs = socket.socketpair()
        with theirs, worker.log.open("ab") as file:
            worker.process = self._fork(theirs, file)
        worker.control = Connection(ours.detach())
        self._sockets.register(worker.control, selectors.EVENT_READ, worker)
        worker.since = time.monotonic()
        self.buffers.beats[worker.index, 0] = 0.0
        encoded = None if state is None else encode_state(state)
        seed = worker_seed(self.plan, worker.number)
        order = WorkerOrder(self.plan, worker.index, seed, self.buffers.size, worker.life, encoded)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead already: `take` notices
            worker.control.send_bytes(msgspec.msgpack.encode(order))
            for slot in worker.granted:  # what its predecessor was asked for
                worker.control.send_bytes(bytes([slot]))

    def _fork(self, control: socket.socket, file: BinaryIO) -> ForkedWorker:
        try:
            return self.forkserver.fork(control, file)
        except OSError:  # somebody killed it
            self.forkserver.close()
            self.forkserver = self._fork_server()
        try:
            return self.forkserver.fork(control, file)
        except OSError as error:
            raise SparringError(
                f"the game cannot be loaded. Last words:\n{tail(self.logs / FORKSERVER_LOG)}"
            ) from error

    def _fork_server(self) -> ForkServer:
        assert self.plan.game.env is not None, "a declared game is not simulated"
        return ForkServer(self.plan.game.env, self._shared.fileno(), self.logs / FORKSERVER_LOG)

    def publish(self, policy: Policy, at_random: bool = False) -> None:
        self.buffers.write(parts(self.plan, policy), policy.exploration, at_random)

    def start(self) -> None:
        slot = self._rounds % self.plan.slots
        self._rounds += 1
        for worker in self.workers:
            self.grant(worker.index, slot)

    def release(self, block: Block) -> None:
        self.grant(block.worker, block.slot)

    def grant(self, index: int, slot: int) -> None:
        worker = self.workers[index]
        worker.granted.append(slot)
        worker.since = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `take` replaces it and asks again
            worker.control.send_bytes(bytes([slot]))

    def take(self) -> Block:
        while not self._full:
            self.receive()
        worker, message = self._full.popleft()
        lag = int(self.buffers.version[0]) - message.version
        rows = self.buffers.block(worker.index, message.slot)
        return Block(worker.index, message.slot, lag, rows, message.episodes, message.masked)

    def take_many(self, count: int) -> list[tuple[int, Filled]]:
        """Waits for so many full blocks: which worker filled which slot."""
        while len(self._full) < count:
            self.receive()
        taken = [self._full.popleft() for _ in range(count)]
        return [(worker.index, message) for worker, message in taken]

    def receive(self) -> None:
        """Waits a moment for full blocks; whoever died or hangs is replaced."""
        if time.monotonic() >= self._next_look:
            self._look_for_hung()
        ready = [key.data for key, _ in self._sockets.select(min(1.0, self.limit / 4))]
        # Who waited longest comes first: while learning is slower than play, others would never have their turn.
        for worker in sorted(ready, key=lambda worker: worker.since):
            try:
                message = msgspec.msgpack.decode(worker.control.recv_bytes(), type=Filled | WorkerFailed)
            except (EOFError, ConnectionResetError):
                self._replace(worker, f"died (exit code {worker.process.wait()})")
                continue
            if isinstance(message, WorkerFailed):
                self._replace(worker, "failed", message.error())
                continue
            slot = worker.granted.popleft()
            assert slot == message.slot
            worker.failures, worker.since = 0, time.monotonic()
            self.usage.busy[worker.index] += message.seconds
            self._full.append((worker, message))

    def _look_for_hung(self) -> None:
        """Only who owes us something can be late, and only from when we asked: we may have been busy for long."""
        now = time.monotonic()
        self._next_look = now + min(1.0, self.limit / 4)
        for worker in self.workers:
            beat = float(self.buffers.beats[worker.index, 0])
            limit = self.limit if beat else max(STARTING, self.limit)
            silent = now - max(beat, worker.since)
            if worker.granted and silent > limit and not worker.control.poll():
                self._ask_where(worker)
                self._replace(worker, f"gave no sign of life for {silent:.0f} s and was killed")

    def _ask_where(self, worker: _Worker) -> None:
        """Its traceback, into its log, which is written in many pieces; given up after a second: it may be beyond
        answering."""
        before = last = worker.log.stat().st_size
        since, until = time.monotonic(), time.monotonic() + 1.0
        worker.process.send_signal(signal.SIGUSR1)
        while time.monotonic() < until and worker.process.poll() is None:
            time.sleep(0.02)
            if (size := worker.log.stat().st_size) != last:
                last, since = size, time.monotonic()
            elif last != before and time.monotonic() > since + 0.1:
                break
        worker.process.kill()

    def _replace(self, worker: _Worker, why: str, error: SparringError | None = None) -> None:
        """`error`: what it said itself; else its log may say it."""
        if isinstance(error, InputError):  # it would happen again
            raise error
        self._sockets.unregister(worker.control)
        worker.control.close()
        worker.failures += 1
        self.replaced += 1
        last = f". Its last words ({worker.log}):\n{tail(worker.log)}" if error is None else f": {error}"
        if worker.failures >= LIVES:
            final = error or SparringError()
            final.args = (f"rollout worker {worker.number} {why}, {LIVES} times in a row{last}",)
            raise final
        log.warning("rollout worker %d %s; it is replaced%s", worker.number, why, last)
        self._spawn(worker)

    def metrics(self) -> Row:
        return {"rollout/replaced": self.replaced, **self.usage.take()}

    def memory(self) -> list[int]:
        return [memory_of(worker.process.pid) for worker in self.workers]

    def state(self) -> list[dict[str, Array] | None]:
        states: list[dict[str, Array] | None] = []
        for worker in self.workers:
            if worker.granted:
                states.append(None)
                continue
            try:
                worker.control.send_bytes(SNAPSHOT)
                if worker.control.poll(self.limit):
                    answer = msgspec.msgpack.decode(worker.control.recv_bytes(), type=WorkerState | WorkerFailed)
                    encoded = answer.state if isinstance(answer, WorkerState) else None  # it ends, and `take` notices
                else:  # it hangs while it makes its games
                    encoded = None
                    self._ask_where(worker)
                    self._replace(worker, f"did not tell its state within {self.limit:.0f} s and was killed")
            except (EOFError, BrokenPipeError, ConnectionResetError):
                encoded = None  # it died; whoever resumes starts this worker's games anew
            states.append(None if encoded is None else decode_state(encoded))
        return states

    def close(self) -> None:
        """Workers stop when their socket is closed; one that does not hear of it soon enough is killed."""
        for worker in self.workers:
            worker.control.close()
        until = time.monotonic() + 2.0
        for worker in self.workers:
            if worker.process.wait(max(until - time.monotonic(), 0.01)) is None:
                worker.process.kill()
        self.forkserver.close()
        self._sockets.close()
        self._shared.close()


def memory_of(pid: int) -> int:
    found = re.search(r"^Pss: *(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def tail(path: Path, lines: int = 40) -> str:
    """The end of a log: a traceback of all threads, and some of what was said before it."""
    try:
        text = path.read_bytes()[-8192:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
