"""Where worker processes come from: one process imports all that they need, the game's package too, and forks them.

What it imported lies in memory once for all of them. A worker costs a few megabytes of its own and starts within
milliseconds. Many workers that mostly wait find their code in the processor's caches when they wake. So 64 players of a
game whose step waits 5 ms make 92 % of linear on two cores; processes started one by one make 54 %.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
from gymnasium.envs.registration import load_env_creator, spec

from sparring.games.catalog import load, register
from sparring.games.vector import build
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense, Gaussian, param_shapes
from sparring.rollout.actor import Actor, Rows, row_types, serve

__all__ = ["ForkServer", "ForkedWorker"]

PATIENCE = 120.0  # seconds that imports may take
PR_SET_PDEATHSIG = 1  # of Linux's prctl: what we get when our parent ends
CLOSING = 2.0  # seconds after which it is killed
ALIVE, UNKNOWN = 1000, 255  # beside exit codes: not ended yet; ended, and nobody knows how


class ForkServer:
    """`env`: the game whose package is loaded beforehand."""

    def __init__(self, env: str, memory: int, log: Path) -> None:
        self.control, theirs = socket.socketpair()  # a question, an answer, and so on: no framing needed
        self.control.settimeout(PATIENCE)
        # Each worker is one core's work: more threads would only fight over the cores, and a fork does not copy them.
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        with theirs, log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sparring.rollout.forkserver", str(theirs.fileno()), str(memory), env],
                pass_fds=(theirs.fileno(), memory),
                env=os.environ | threads,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def fork(self, control: socket.socket, log: BinaryIO) -> "ForkedWorker":
        """A worker with the other end of `control`. OSError when the forkserver is dead."""
        socket.send_fds(self.control, [b"fork"], [control.fileno(), log.fileno()])
        return ForkedWorker(self._answer(), self)

    def ended(self, pid: int) -> int | None:
        """The exit code, as subprocess has it; none while it lives."""
        self.control.send(str(pid).encode())
        code = self._answer()
        return None if code == ALIVE else code

    def _answer(self) -> int:
        if answer := self.control.recv(16):
            return int(answer)
        raise BrokenPipeError("the forkserver is dead")

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(CLOSING)
        except subprocess.TimeoutExpired:  # stuck in an import, for example
            self.process.kill()
            self.process.wait()


class ForkedWorker:
    """A forked worker, with what subprocess.Popen offers for its own."""

    def __init__(self, pid: int, forkserver: ForkServer) -> None:
        self.pid, self.forkserver = pid, forkserver
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            try:
                self.code = self.forkserver.ended(self.pid)
            except OSError:
                self.code = None if psutil.pid_exists(self.pid) else UNKNOWN
        return self.code

    def wait(self, timeout: float = 10.0) -> int | None:
        """None: it lives."""
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # so nobody else has its number: the forkserver has not buried it
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


# In the forkserver


def prepare(env: str) -> None:
    """Imports what workers will need, and plays a little: Python writes into its own code while it first runs it, which
    workers would do each for itself."""
    with contextlib.suppress(Exception):  # whatever is wrong with the game, the workers will meet it, and report it
        register(env)
        entry = spec(env.rpartition(":")[2]).entry_point
        if isinstance(entry, str):
            load_env_creator(entry)
    for game, head in ((load("CartPole-v1"), Categorical()), (load("Pendulum-v1"), Gaussian())):
        layers = (Dense(8, "tanh"),)
        params = {name: np.zeros(shape, np.float32) for name, shape in param_shapes(game, layers, head).items()}
        rows = Rows(*(np.empty((1, 65), kind) for kind in row_types(game)))
        Actor(game, build(game, 1), seed=0).fill(rows, Policy(game, layers, head, params))
    gc.collect()
    gc.freeze()  # or collecting would write to, and so copy, what is shared


def can_fork() -> bool:
    """Not with a game that runs threads of its own or computes with JAX, as a fork may deadlock then: its workers load
    it each for itself."""
    return "jax" not in sys.modules and psutil.Process().num_threads() == 1


def main() -> None:
    # The learner asks a hung worker where it is before it kills it; this works while Python itself is stuck.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # the learner's to handle, also where they go to the whole group
        signal.signal(number, signal.SIG_IGN)
    control, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    prepare(sys.argv[3])
    if sys.argv[3] and not can_fork():
        os.execv(sys.executable, [sys.executable, "-m", "sparring.rollout.forkserver", *sys.argv[1:3], ""])
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 16, 2)
        except ConnectionResetError:
            return
        if not message:  # the learner is gone or done
            return
        if message != b"fork":
            pid, status = os.waitpid(int(message), os.WNOHANG)
            control.send(str(os.waitstatus_to_exitcode(status) if pid else ALIVE).encode())
            continue
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            control.close()
            return live(descriptors[0], descriptors[1], memory)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


def live(control: int, log: int, memory: int) -> None:
    """A worker's life, from its birth on."""
    if sys.platform == "linux":  # or one whose game hangs would outlive a learner that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    random.seed()  # games that use the common generators should not all play the same
    np.random.seed()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the learner is gone or done
        serve(Connection(control), memory)


if __name__ == "__main__":
    main()
