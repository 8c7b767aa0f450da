"""Rollouts on a Ray cluster: the blocks of `rollout.Pool`, from actors on any number of machines, behind the same seam.

An actor plays with NumPy alone. Weights go into the object store once per version and only when somebody is asked to
play with them; blocks come back by reference. An actor that dies, raises or hangs is replaced and the cause is told.
"""

import faulthandler
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import sparring
from sparring.errors import InputError, SparringError
from sparring.games.spec import Array
from sparring.networks.policy import Policy
from sparring.training.actor import Plan, Rows, create_actor, pack, row_types, unpack, views
from sparring.training.experiment import Resources
from sparring.training.metrics import Row
from sparring.training.rollout import LIVES, STARTING, Block, tail


def use_token() -> Path:
    """Token authentication for all of Ray in this process and its children; before Ray is imported. Makes the token if
    there is none: machines of one cluster need the same one."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
    return path


use_token()  # Ray reads this when it is imported

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

__all__ = ["NodeAffinitySchedulingStrategy", "RayPool", "cause", "connect", "ray", "use_token"]

log = logging.getLogger("sparring.cluster")
LOOK = 1.0  # seconds between looks for actors that do not start
Fill = tuple[int, list[tuple[float, int]], Rows, float]  # version, episodes, rows, seconds


def connect(resources: Resources) -> None:
    """To the cluster at `address`, or to one of our own on this machine, which ends with this process."""
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        if resources.address is None:
            # Without this word Ray joins whatever cluster this machine was last part of, gone or not.
            ray.init("local", include_dashboard=False, num_cpus=resources.cpus, **options)
        else:
            ray.init(resources.address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster at resources.address {resources.address!r}: {error}\n"
            "`sparring cluster up --head` starts one and tells its address"
        ) from error


def require(resources: Resources, actors: int) -> None:
    """At once, with what is missing and what to change: Ray itself would wait for ever."""
    connect(resources)
    asked = {"CPU": resources.actor_cpus, "GPU": resources.actor_gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(
        min(int(node.get(kind, 0.0) / amount + 1e-9) for kind, amount in asked.items() if amount) for node in nodes
    )
    if room >= actors:
        return
    has = "; ".join(f"{node.get('CPU', 0.0):g} CPUs, {node.get('GPU', 0.0):g} GPUs" for node in nodes)
    raise InputError(
        f"{actors} rollout actors with {asked['CPU']:g} CPUs and {asked['GPU']:g} GPUs each do not fit: this cluster "
        f"of {len(nodes)} nodes ({has}) has room for {room}. Lower rollout.workers, resources.actor_cpus or "
        "resources.actor_gpus, or add nodes with `sparring cluster up --join`"
    )


# In an actor's process


class _Watch:
    """In the place of an actor's `beat`: ends the process, with a traceback, when the game does not answer. Not a
    thread of Python's: a game may be stuck with the interpreter's lock held."""

    def __init__(self, limit: float) -> None:
        self.limit, self.armed = limit, 0.0

    def __setitem__(self, _: int, now: float) -> None:
        if now > self.armed + self.limit / 8:
            self.armed = now
            faulthandler.dump_traceback_later(self.limit, exit=True)

    def rest(self) -> None:
        self.armed = 0.0
        faulthandler.cancel_dump_traceback_later()


class RolloutActor:
    """One place of the pool. Between two blocks nothing is reset."""

    def __init__(
        self,
        plan: bytes,
        index: int,
        life: int,
        limit: float,
        state: dict[str, bytes] | None,
        environment: dict[str, str],
    ) -> None:
        os.environ.update(environment)
        self.plan = msgspec.msgpack.decode(plan, type=Plan)
        self.watch = _Watch(limit)
        self.actor = create_actor(self.plan, index, life, state)
        self.actor.beat = self.watch  # type: ignore[assignment]  # all that `fill` does with it
        shape = (self.plan.envs, self.plan.steps + 1)
        self.rows = Rows(*(np.empty(shape, kind) for kind in row_types(self.plan.game)))
        self.version = -1

    def where(self) -> tuple[str, str, list[str], int]:
        """Sparring's version, node and log files; and, to measure with, the process."""
        node: str = ray.get_runtime_context().get_node_id()
        return sparring.__version__, node, [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)], os.getpid()

    def fill(self, version: int, weights: Array, exploration: float, at_random: bool) -> Fill:
        began = time.perf_counter()
        if version != self.version:
            plan = self.plan
            self.policy = Policy(plan.game, plan.layers, plan.head, dict(views(plan, weights)), exploration)
            self.version = version
        try:
            episodes = self.actor.fill(self.rows, self.policy, at_random)
        finally:
            self.watch.rest()
        return version, episodes, self.rows, time.perf_counter() - began

    def state(self) -> dict[str, bytes] | None:
        state = self.actor.state()
        return None if state is None else pack(state)


def read_logs(paths: list[str]) -> str:
    return "\n".join(filter(None, (tail(Path(path)) for path in paths)))


# In the learner's process


class _Place:
    """A place in the pool and the actor that holds it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.life = -1
        self.failures = 0  # in a row
        self.actor: Any = None
        self.node, self.pid = "", 0
        self.logs: list[str] = []
        self.asked: dict[Any, int] = {}  # results it owes us → slot, in order
        self.since = 0.0  # when it was asked to start
        self.heard = 0.0  # when it last gave us a block
        self.busy = 0.0  # seconds it played since the last report


class RayPool:
    """A `rollout.Source`."""

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
        self.environment = environment or {}  # variables of the actors' processes
        self.version = 0
        self.weights: Any = None  # in the object store; none: the newest are not there yet
        self.policy: Policy | None = None
        self.at_random = False
        self.told: set[str] = set()  # tracebacks that were shown
        self.since = time.perf_counter()
        self._rounds = 0
        self.places = [_Place(i) for i in range(plan.workers)]
        for place, state in zip(self.places, states or [None] * plan.workers, strict=True):
            self._spawn(place, state)
        self._await_all()

    def _spawn(self, place: _Place, state: dict[str, Array] | None = None) -> None:
        place.life += 1
        options = {"num_cpus": self.resources.actor_cpus, "num_gpus": self.resources.actor_gpus}
        place.actor = (
            ray.remote(RolloutActor)
            .options(**options, max_restarts=0, max_task_retries=0)
            .remote(
                msgspec.msgpack.encode(self.plan),
                place.index,
                place.life,
                self.limit,
                None if state is None else pack(state),
                self.environment,
            )
        )
        place.node, place.logs, place.since = "", [], time.monotonic()
        slots = list(place.asked.values())  # what its predecessor was asked for
        place.asked.clear()
        for slot in slots:
            self._ask(place, slot)

    def _await_all(self) -> None:
        """All actors are there and speak our version, or an error says what is wrong."""
        asked = {place.actor.where.remote(): place for place in self.places}
        ready, missing = ray.wait(list(asked), num_returns=len(asked), timeout=STARTING)
        if missing:
            raise SparringError(f"{len(missing)} of {len(asked)} rollout actors did not start {_within()}")
        for ref in ready:
            place = asked[ref]
            try:
                version, place.node, place.logs, place.pid = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise SparringError(f"rollout actor {place.index} could not start: {cause(error)}") from error
            if version != sparring.__version__:
                raise InputError(
                    f"node {place.node} has Sparring {version}, this one {sparring.__version__}: install the same"
                )

    def publish(self, policy: Policy, at_random: bool = False) -> None:
        self.policy, self.at_random = policy, at_random
        self.version += 1
        self.weights = None

    def start(self) -> None:
        slot = self._rounds % self.plan.slots
        self._rounds += 1
        for place in self.places:
            self._ask(place, slot)

    def release(self, block: Block) -> None:
        self._ask(self.places[block.worker], block.slot)

    def _ask(self, place: _Place, slot: int) -> None:
        assert self.policy is not None, "publish a policy first"
        if self.weights is None:
            flat = np.concatenate([self.policy.params[name].ravel() for name in self.plan.params])
            self.weights = ray.put(flat.astype(np.float32, copy=False))
        ref = place.actor.fill.remote(self.version, self.weights, self.policy.exploration, self.at_random)
        place.asked[ref] = slot

    def take(self) -> Block:
        while True:
            owed = {ref: place for place in self.places for ref in list(place.asked)[:1]}
            ray.wait(list(owed), num_returns=1, timeout=LOOK)
            self._require_started()
            ready, _ = ray.wait(list(owed), num_returns=len(owed), timeout=0)
            # Who was heard longest ago comes first, as in `rollout.Pool`.
            for ref in sorted(ready, key=lambda ref: owed[ref].heard):
                place = owed[ref]
                try:
                    version, episodes, rows, seconds = ray.get(ref)
                except ray.exceptions.RayError as error:
                    self._replace(place, error)
                    continue
                place.failures, place.heard = 0, time.monotonic()
                place.busy += seconds
                return Block(place.index, place.asked.pop(ref), self.version - version, rows, episodes)

    def _require_started(self) -> None:
        """After a node is lost there may be no room for those who played there."""
        for place in self.places:
            if not place.node and time.monotonic() - place.since > STARTING:
                raise SparringError(f"rollout actor {place.index} did not start again {_within()}")

    def _replace(self, place: _Place, error: Exception) -> None:
        place.failures += 1
        self.replaced += 1
        why = cause(error)
        if isinstance(error, ray.exceptions.RayActorError):
            why = f"{why}\nIts last words:\n{self._last_words(place)}"
        ray.kill(place.actor)
        if place.failures >= LIVES:
            raise SparringError(
                f"rollout actor {place.index} failed {LIVES} times in a row: the game cannot be played.\n{why}"
            ) from error
        if why in self.told:
            why = why.splitlines()[-1] + " (as before)"
        self.told.add(why)
        log.warning("rollout actor %d is replaced: %s", place.index, why)
        self._spawn(place)
        self._note_where(place)

    def _note_where(self, place: _Place) -> None:
        """When it has started, which nobody waits for here."""
        ref = place.actor.where.remote()

        def note(future: Any) -> None:
            if future.exception() is None:
                _, place.node, place.logs, place.pid = future.result()

        ref.future().add_done_callback(note)

    def _last_words(self, place: _Place) -> str:
        """From its log, on whatever node that is."""
        if not place.logs:
            return "(none: it was not there yet)"
        there = NodeAffinitySchedulingStrategy(place.node, soft=False)
        try:
            words: str = ray.get(
                ray.remote(read_logs).options(num_cpus=0, scheduling_strategy=there).remote(place.logs), timeout=10
            )
        except ray.exceptions.RayError as error:
            return f"(its node does not answer: {type(error).__name__})"
        return words

    def metrics(self) -> Row:
        """Utilisation: the part of the time that an actor played."""
        now = time.perf_counter()
        parts = [place.busy / (now - self.since) for place in self.places]
        self.since = now
        for place in self.places:
            place.busy = 0.0
        each = {f"rollout/utilisation_{place.index}": part for place, part in zip(self.places, parts, strict=True)}
        mean = sum(parts) / len(parts)
        return {"rollout/replaced": self.replaced, "rollout/utilisation_mean": mean, **each}

    def state(self) -> list[dict[str, Array] | None]:
        states: list[dict[str, Array] | None] = []
        for place in self.places:
            packed = None
            if not place.asked:
                try:
                    packed = ray.get(place.actor.state.remote(), timeout=30)
                except ray.exceptions.RayError as error:  # whoever resumes starts this actor's games anew
                    log.warning("rollout actor %d does not tell its state: %s", place.index, cause(error))
            states.append(None if packed is None else unpack(packed))
        return states

    def close(self) -> None:
        for place in self.places:
            if place.actor is not None:
                ray.kill(place.actor)


def _within() -> str:
    free = ray.available_resources()
    return (
        f"within {STARTING:.0f} s: the cluster has {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs "
        "free. Lower rollout.workers, add nodes, or wait until others are done"
    )


def cause(error: Exception) -> str:
    """What a person needs of Ray's errors: the game's own traceback, or how the process ended."""
    return re.sub(r"\x1b\[\d*m", "", str(error)).strip()[-1500:]
