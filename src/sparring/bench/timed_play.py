"""Plays one policy by one runtime and times every inference apart from the game's step: the child of
`bench inference`."""

import contextlib
import csv
import itertools
import os
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparring.bench.child import say, serve
from sparring.errors import InputError, SparringError
from sparring.export import weights
from sparring.export.formats import Runner
from sparring.games import Game
from sparring.games.spec import Array
from sparring.games.vector import Separate
from sparring.metering.energy import Energy, energy_of, joules_of
from sparring.metering.sampler import Sampler
from sparring.networks.policy import to_batch

__all__ = ["STEP_COLUMNS", "Order", "Result"]

STEP_COLUMNS = ("episode", "step_time_ms", "steps", "reward", "run_time_ms")
KEPT = 64  # observations that the steady measurement plays again
LONGEST = 30_000  # steps of an episode
SAY_S = 1.0  # between words of progress
LOOKS_S = 0.25  # between looks at power
MOST_S = 30.0  # that a look is waited for: a meter's command may take ten


class Order(msgspec.Struct, kw_only=True):
    """What is to be done.

    :param runtime: A key of `runtimes.RUNTIMES`, or of somebody else's file its format.
    :param game: A declaration, as JSON.
    :param policy: A policy.safetensors, for runtimes without a file.
    :param run: `RUN@40`, for RLlib, which plays its own checkpoints.
    :param file: What the runtime loads.
    :param steady: Seconds of the measurement without the game: rate, CPU, energy.
    :param times: The CSV file to write, a line per inference.
    :param info: The .npz to write, with every observation and action.
    """

    runtime: str
    game: str
    times: str
    policy: str | None = None
    run: str | None = None
    file: str | None = None
    episodes: int | None = None
    steps: int | None = None
    seed: int = 0
    warmup: int = 20
    threads: int = 1
    steady: float = 2.0
    meter: str | None = None
    estimate: bool = True
    info: str | None = None
    video: str | None = None


class Result(msgspec.Struct, kw_only=True):
    """What one runtime took.

    :param load_s: From the file to something that acts.
    :param first_ms: The first inference, which may compile.
    :param per_s: Inferences a second, one after the other, without the game.
    :param cpu: CPU seconds by seconds of that: 1 is one busy core.
    :param memory_mb: Of the whole process, Python and the game included.
    :param joules: For 1,000 inferences.
    :param no_video: Why there is none, where one was asked for.
    """

    load_s: float
    first_ms: float
    per_s: float
    cpu: float
    memory_mb: float
    episodes: list[tuple[float, int, float]]  # return, steps, seconds of inference
    cut: bool
    joules: float | None = None
    energy_source: str | None = None
    device: str = "CPU"
    no_video: str | None = None


class Timed:
    """A runner whose every action is timed: from the observation to the game's action, and the runtime's call alone."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.whole = self.call = 0.0

    def act(self, obs: Array) -> Array:
        runner, clock = self.runner, time.perf_counter
        began = clock()
        ready = runner.prepare(obs)
        called = clock()
        found = runner.run(ready)
        done = clock()
        action = runner.action(found)
        self.whole, self.call = clock() - began, done - called
        return action


class Info:
    """Every observation and action, an entry of the .npz per episode: no more than an episode is in memory."""

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._obs: list[Array] = []
        self._actions: list[Array] = []

    def add(self, obs: Array, action: Array) -> None:
        if self._file is not None:
            self._obs.append(obs.copy())
            self._actions.append(action.copy())

    def end(self, episode: int) -> None:
        if self._file is None or not self._obs:
            return
        for name, rows in (("obs", self._obs), ("actions", self._actions)):
            with self._file.open(f"{name}_{episode}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.concatenate(rows), allow_pickle=False)
        self._obs, self._actions = [], []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def play(order: Order, timed: Timed, game: Game, seen: "deque[Array]") -> tuple[list[tuple[float, int, float]], bool]:
    """The episodes, and whether the last one was cut by the number of steps."""
    episodes: list[tuple[float, int, float]] = []
    envs, info = Separate(game, 1), Info(order.info)
    total, reported, cut = 0, time.monotonic(), False
    try:
        with Path(order.times).open("w", newline="") as file:
            writer = csv.writer(file)
            obs = envs.reset(order.seed)
            for episode in itertools.count(1):
                returned, spent, steps, over = 0.0, 0.0, 0, False
                while not over:
                    action = timed.act(obs)
                    seen.append(obs)
                    info.add(obs, action)
                    step = envs.step(action)
                    reward, steps, total = float(step.reward[0]), steps + 1, total + 1
                    writer.writerow((episode, f"{timed.whole * 1e3:.6f}", steps, reward, f"{timed.call * 1e3:.6f}"))
                    returned, spent = returned + reward, spent + timed.whole
                    obs, over = step.obs, bool(step.terminated[0] or step.truncated[0])
                    cut = not over and (steps >= LONGEST or (order.episodes is None and total == order.steps))
                    over = over or cut
                    if time.monotonic() - reported > SAY_S:
                        reported = time.monotonic()
                        say(steps=total, episodes=len(episodes))
                info.end(episode)
                episodes.append((returned, steps, spent))
                if episode == order.episodes or (order.episodes is None and total == order.steps):
                    return episodes, cut
                if cut:
                    envs.cut(0)
                obs = envs.step(action).obs  # begins the next one
    finally:
        info.close()
        envs.close()
    raise AssertionError("episodes end")


def steady(timed: Timed, seen: "deque[Array]", order: Order) -> tuple[float, float, Energy | None]:
    """Inferences a second, busy cores, and the energy of 1,000: the observations of the end of the game again and
    again, nothing else in between. Power is looked at meanwhile: what was read before the work began does not count."""
    turns: Iterator[Array] = itertools.cycle(list(seen))
    act, clock = timed.act, time.perf_counter

    def work(over: Callable[[], bool]) -> int:
        done = 0
        while not over():
            for _ in range(10):
                act(next(turns))
            done += 10
        return done

    with contextlib.ExitStack() as held:
        sampler = sampling(order, held)
        looks = 0
        if sampler is not None:
            limit, looks = clock() + MOST_S, sampler.looks + 2  # one may be under way
            work(lambda: sampler.looks >= looks or clock() > limit)
            sampler.take()
            looks = sampler.looks + 1
        cpu, began = time.process_time(), clock()
        end = began + order.steady
        done = work(lambda: clock() > end and (sampler is None or sampler.looks >= looks or clock() > end + MOST_S))
        seconds, busy = clock() - began, time.process_time() - cpu
        found = None if sampler is None else energy_of(joules_of(sampler.take()))
    if sampler is None or found is None or not sampler.seconds:
        return done / seconds, busy / seconds, None
    watts = found.joules / sampler.seconds
    return done / seconds, busy / seconds, Energy(watts * seconds * 1000 / done, found.source)


def sampling(order: Order, held: contextlib.ExitStack) -> Sampler | None:
    """What looks at power in the background, ready; None: nothing here tells."""
    sampler = held.enter_context(Sampler(LOOKS_S, order.meter, order.estimate, estimate_every=0.0))
    limit = time.monotonic() + MOST_S
    while not sampler.looks and time.monotonic() < limit:  # CodeCarbon gets ready with the first one
        time.sleep(0.01)
    if sampler.sources:
        return sampler
    sampler.close()
    return None


def measure(order: Order) -> Result:
    from sparring.bench.runtimes import open_runner  # what is loaded for it counts

    game = Game.from_json(order.game)
    if game.env is None:
        raise InputError(f"{game.name} is a declared game: it cannot be simulated, so not played here")
    began = time.perf_counter()
    policy = None if order.policy is None else weights.load(Path(order.policy).read_bytes(), trusted=True)
    file = None if order.file is None else Path(order.file)
    timed = Timed(open_runner(order.runtime, game, policy, file, order.threads, order.run))
    load_s = time.perf_counter() - began
    envs = Separate(game, 1)
    obs = envs.reset(order.seed)
    envs.close()
    timed.act(obs)
    first = timed.whole
    require_numbers(timed.runner, obs, order.file or order.runtime)
    for _ in range(order.warmup):
        timed.act(obs)
    seen: deque[Array] = deque(maxlen=KEPT)
    episodes, cut = play(order, timed, game, seen)
    memory = memory_mb()
    per_s, cpu, energy = steady(timed, seen, order)
    no_video = None if order.video is None else film(timed, game, Path(order.video), order.seed)
    return Result(
        load_s=load_s,
        first_ms=first * 1e3,
        per_s=per_s,
        cpu=cpu,
        memory_mb=memory,
        episodes=episodes,
        cut=cut,
        joules=None if energy is None else energy.joules,
        energy_source=None if energy is None else energy.source,
        device=device_of(order),
        no_video=no_video,
    )


def require_numbers(runner: Runner, obs: Array, where: str) -> None:
    """:raises InputError: it gives NaN, whose greatest is always the first action."""
    found = runner.run(runner.prepare(obs))
    for each in found if isinstance(found, list | tuple) else [found]:
        if isinstance(each, np.ndarray) and each.dtype.kind == "f" and np.isnan(each).any():
            raise InputError(f"{where} gives NaN: it does not play")


def device_of(order: Order) -> str:
    if order.runtime == "jax":
        import jax

        device = jax.devices()[0]
        return "CPU" if device.platform == "cpu" else str(device)
    return "Edge TPU" if order.runtime == "coral" else "CPU"


def memory_mb() -> float:
    import psutil

    return float(psutil.Process(os.getpid()).memory_info().rss) / 1e6


def film(timed: Timed, game: Game, path: Path, seed: int) -> str | None:
    """Why there is no video; None: there is one."""
    from sparring.runs import video

    class TimedPlayer:
        def __init__(self) -> None:
            self.game = game

        def act(self, obs: Any) -> tuple[Array, None]:
            return timed.act(to_batch(game.observation, obs)[0])[0], None

    try:
        video.record(TimedPlayer(), path, seed=seed)
    except Exception as error:  # noqa: BLE001  # whatever it is, what was measured is kept
        return str(error) if isinstance(error, SparringError) else f"{type(error).__name__}: {error}"
    return None


def do(order: dict[str, Any]) -> None:
    say(result=msgspec.to_builtins(measure(msgspec.convert(order, Order))))


if __name__ == "__main__":
    serve(do)
