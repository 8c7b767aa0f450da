"""A loop one can leave on: simulated people and bots play, the live trainer learns and promotes. How good is what
players are served, over time, and does it ever get worse?

    python benchmarks/live.py                                  all games, 20 seeds, accelerated
    python benchmarks/live.py arena --seeds 3                  one game
    python benchmarks/live.py --inject lr --inject poison      regressions on purpose: held back, or rolled back?
    python benchmarks/live.py reach --bots 0                   people alone: is what they do learned?
    python benchmarks/live.py arena --real-time --seeds 1      a real platform, real clients, a real clock
    python benchmarks/live.py --real-time --seeds 1 --source ../older/src      the platform of another checkout

Accelerated: the trainer, its store and its registry are the real ones, in this process; the clock is ours. Between two
seconds of it the learner finishes what it is allowed to learn, which on an ordinary machine takes less than a second.

With `--inject`, what the learner made of it is judged, too: an injection that did no harm shows nothing.

A promotion is a clear regression when the served version is worse than the one before it with 99 % confidence, in
`JUDGED` paired episodes that neither has seen, played as players met it: with exploration. Those that are worse when
they play greedily are counted apart. Declared games are promoted by what players met; CartPole, which has a simulator,
by greedy play there.
"""

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
from live_games import SCENARIOS, Scenario

from sparring.client import Client
from sparring.errors import SparringError
from sparring.experience import Fragment, new_id
from sparring.experience.fragment import Columns, pack
from sparring.games.spec import column
from sparring.networks.policy import Policy
from sparring.registry.registry import Registry
from sparring.store.memory import MemoryStore
from sparring.trainer import game_trainer, promotion
from sparring.trainer.game_trainer import GameTrainer, Settings
from sparring.trainer.simulator import Chance
from sparring.training.evaluate import play

JUDGED = 200
UNSEEN = 1_000_000
CLEAR = 2.6  # standard errors: 99 %
BAD_LR = 1.0
AGAIN = 30.0  # seconds until a training that failed is tried again


class Clock:
    """Stands in for the module `time` in the trainer."""

    def __init__(self) -> None:
        self.now, self.began = 0.0, time.time()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.began + self.now


@dataclass
class Run:
    """What one seed showed."""

    served: list[tuple[float, int]] = field(default_factory=list)  # when which version became what players get
    moves: list[str] = field(default_factory=list)
    policies: dict[int, Policy | None] = field(default_factory=dict)


class Seat:
    """A player's episode under way."""

    def __init__(self, scenario: Scenario, name: str, skill: float | None, seed: int) -> None:
        self.name, self.skill, self.rng = name, skill, np.random.default_rng(seed)
        self.env = gymnasium.make(scenario.env, disable_env_checker=True)
        self.seed = seed
        self.begin()

    def begin(self) -> None:
        self.obs, _ = self.env.reset(seed=self.seed)
        self.seed += 10_000
        self.rows: list[Any] = [self.obs]
        self.actions: list[Any] = []
        self.rewards: list[float] = []
        self.log_probs: list[float] = []
        self.policy: Any = None
        self.version: int | None = None  # 0: at random; none: a person

    def step(self, action: Any, log_prob: float | None, sign: float) -> bool:
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        self.rows.append(self.obs)
        self.actions.append(action)
        self.rewards.append(sign * float(reward))
        if log_prob is not None:
            self.log_probs.append(log_prob)
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        return self.terminated or self.truncated

    def fragment(self, scenario: Scenario, now: float) -> Fragment:
        game = scenario.game
        columns = Columns(
            column(game.observation, self.rows),
            column(game.action, self.actions),
            np.array(self.rewards, np.float32),
            np.array(self.log_probs, np.float32) if self.log_probs else None,
        )
        whose = {} if self.version is None else {"model": "bot" if self.version else "random", "version": self.version}
        return pack(
            game, columns, id=new_id(), player=self.name, episode=new_id(), start=0, time=now,
            terminated=self.terminated, truncated=self.truncated and not self.terminated, **whose,
        )  # fmt: skip


class Accelerated:
    def __init__(self, scenario: Scenario, seed: int, directory: Path, settings: Settings) -> None:
        self.scenario, self.seed, self.directory, self.settings = scenario, seed, directory, settings
        self.clock, self.rng = Clock(), np.random.default_rng(seed)
        self.store, self.registry = MemoryStore(), Registry(directory / "registry")
        self.store.register(scenario.game)
        self.hyperparameters: dict[str, Any] = {}
        self.failed_until = 0.0
        self.trainer = self._trainer({})
        self.seats = [Seat(scenario, f"bot-{i}", None, 1000 * seed + i) for i in range(scenario.bots)]
        people = enumerate(scenario.skills)
        self.seats += [Seat(scenario, f"person-{i}", skill, 1000 * seed + 100 + i) for i, skill in people]
        self.chance = Chance(scenario.game, seed)
        self.run, self.sign = Run(policies={0: None}), 1.0
        self.cache: dict[int, Policy] = {}

    def _trainer(self, hyperparameters: dict[str, Any]) -> GameTrainer:
        settings = msgspec.structs.replace(self.settings, seed=self.seed, hyperparameters=hyperparameters)
        return GameTrainer(self.store, self.registry, self.directory / "trainer", self.scenario.game, settings)

    def set_hyperparameters(self, **given: Any) -> None:
        """As a person would, on a running platform: the trainer goes on with others."""
        self.trainer.checkpoint()
        self.hyperparameters = given
        self.trainer = self._trainer(given)

    def play(self, until: float) -> None:
        """Seconds of the game's clock; the trainer has its turns after each."""
        steps = max(1, round(self.scenario.rate))
        while self.clock.now < until:
            serving = self.registry.serving(self.scenario.game.name)
            stable = None if serving.stable is None else serving.stable.version
            candidate = None if serving.candidate is None else serving.candidate.version
            ended: list[Fragment] = []
            for _ in range(steps):
                ended += self._step(stable, candidate, serving.share)
                self.clock.now += 1 / self.scenario.rate
            if ended:
                self.store.append(ended)
            self._learn()
            self._note()

    def _step(self, stable: int | None, candidate: int | None, share: float) -> list[Fragment]:
        groups: dict[int, list[Seat]] = {}
        for seat in self.seats:
            if seat.skill is None and not seat.actions:
                tried = candidate is not None and self.rng.random() < share
                seat.version = (candidate if tried else stable) or 0
            if seat.skill is None:
                groups.setdefault(seat.version or 0, []).append(seat)
        ended = [seat for seat in self.seats if seat.skill is not None and self._person(seat)]
        for version, seats in groups.items():
            obs = column(self.scenario.game.observation, [seat.obs for seat in seats])
            if version == 0:
                action, log_prob = self.chance.act(obs)
            else:
                policy = self._policy(version)
                action, log_prob = policy.act(obs, policy.noise(self.rng, len(seats)))
            for i, seat in enumerate(seats):
                if seat.step(action[i], None if log_prob is None else float(log_prob[i]), self.sign):
                    ended.append(seat)
        fragments = [seat.fragment(self.scenario, self.clock.time()) for seat in ended]
        for seat in ended:
            seat.begin()
        return fragments

    def _person(self, seat: Seat) -> bool:
        assert seat.skill is not None
        return seat.step(self.scenario.person(seat.obs, seat.rng, seat.skill), None, self.sign)

    def _policy(self, version: int) -> Policy:
        if version not in self.cache:
            self.cache[version] = self.registry.policy(self.scenario.game.name, "bot", version)
        return self.cache[version]

    def _learn(self) -> None:
        if self.clock.now < self.failed_until:
            return
        try:
            for _ in range(1000):
                if not self.trainer.turn():
                    return
        except SparringError as error:  # `sparring up` says so and tries again; players keep their version
            self.run.moves.append(f"training failed: {error}")
            self.failed_until = self.clock.now + AGAIN
            self.trainer = self._trainer(self.hyperparameters)

    def _note(self) -> None:
        latest = self.registry.latest(self.scenario.game.name)
        version = 0 if latest is None else latest.version
        if not self.run.served or self.run.served[-1][1] != version:
            self.run.served.append((self.clock.now, version))
            self.run.moves.append(self.trainer.promotion.memory.decision)
            if version:
                self.run.policies[version] = self._policy(version)


def judge(scenario: Scenario, policy: Policy | None, explore: bool, episodes: int = JUDGED) -> np.ndarray:
    """Returns in the same episodes, whoever plays."""
    game = msgspec.structs.replace(scenario.game, env=scenario.env)
    if policy is None:
        player: Any = Chance(game, UNSEEN)
        return np.array([each.ret for each in play(player, episodes, UNSEEN)])
    known = Policy(game, policy.layers, policy.head, policy.params, policy.exploration)
    return np.array([each.ret for each in play(known, episodes, UNSEEN, explore=explore)])


def person_level(scenario: Scenario, episodes: int = 100) -> float:
    """Of the best person."""
    env, rng, total = gymnasium.make(scenario.env), np.random.default_rng(0), 0.0
    for episode in range(episodes):
        (obs, _), over = env.reset(seed=UNSEEN + episode), False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(scenario.person(obs, rng, max(scenario.skills)))
            total, over = total + float(reward), terminated or truncated
    return total / episodes


def worse(new: np.ndarray, old: np.ndarray) -> bool:
    difference = new - old
    return bool(difference.mean() + CLEAR * difference.std(ddof=1) / np.sqrt(len(difference)) < 0)


@contextlib.contextmanager
def our_clock(clock: Clock) -> Iterator[None]:
    modules: list[Any] = [game_trainer, promotion]
    before = [module.time for module in modules]
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module, one in zip(modules, before, strict=True):
            module.time = one


def accelerated(
    scenario: Scenario, seed: int, inject: str | None, minutes: float, settings: Settings
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        clock = Clock()
        with our_clock(clock):
            stage = Accelerated(scenario, seed, Path(directory), settings)
            stage.clock = clock
            end = 60 * minutes
            if inject is None:
                stage.play(end)
                return report(scenario, seed, stage.run, end)
            stage.play(end / 2)
            before = stage.run.served[-1][1]
            if inject == "lr":
                stage.set_hyperparameters(lr=BAD_LR)
            elif inject == "poison":
                stage.sign = -1.0
            stage.play(0.75 * end)
            learned = stage.trainer.learner.policy()
            if inject == "poison":  # the bug is mended; with the other one nobody notices
                stage.sign = 1.0
            stage.play(1.25 * end)
        return injected(scenario, seed, stage.run, before, learned, end)


def injected(scenario: Scenario, seed: int, run: Run, before: int, learned: Policy, end: float) -> dict[str, Any]:
    """What came of a regression that was made on purpose between `end / 2` and `0.75 * end`."""
    old, broken = judge(scenario, run.policies[before], True), judge(scenario, learned, True)
    ends = [*(at for at, _ in run.served[1:]), 1.25 * end]
    scores, seconds_worse = {before: old}, 0.0
    for (at, version), until in zip(run.served, ends, strict=True):
        if until <= end / 2:
            continue
        scores[version] = judge(scenario, run.policies[version], True)
        if worse(scores[version], old):
            seconds_worse += until - max(at, end / 2)
    after = run.served[-1][1]
    return {
        "seed": seed, "before": before, "after": after, "score_before": float(old.mean()),
        "score_after": float(scores[after].mean()), "held": not worse(scores[after], old),
        "score_learned": float(broken.mean()), "harmful": worse(broken, old), "seconds_worse": seconds_worse,
        "moves": run.moves,
    }  # fmt: skip


def report(scenario: Scenario, seed: int, run: Run, end: float) -> dict[str, Any]:
    rows, before = [], None
    for at, version in run.served:
        scores = {explore: judge(scenario, run.policies[version], explore) for explore in (True, False)}
        row: dict[str, Any] = {"at": at, "version": version}
        for explore, name in ((True, "played"), (False, "greedy")):
            row[name] = float(scores[explore].mean())
            row[f"{name}_worse"] = before is not None and worse(scores[explore], before[explore])
        rows.append(row)
        before = scores
    level = person_level(scenario)
    reached = next((row["at"] for row in rows if row["greedy"] >= level), None)
    return {
        "seed": seed, "rows": rows, "person": level, "reached": reached,
        "final": rows[-1]["greedy"], "seconds": end, "moves": run.moves,
    }  # fmt: skip


# A real platform


def real_time(scenario: Scenario, seed: int, minutes: float, source: Path | None = None) -> dict[str, Any]:
    """`sparring up` as it is, or as another checkout's `source` has it, and a client for each player."""
    with tempfile.TemporaryDirectory() as directory, _platform(Path(directory) / "data", source) as url:
        stop = threading.Event()
        players = [(f"bot-{i}", None) for i in range(scenario.bots)]
        players += [(f"person-{i}", skill) for i, skill in enumerate(scenario.skills)]
        threads = [
            threading.Thread(target=_player, args=(scenario, url, name, skill, seed + i, stop, Path(directory) / name))
            for i, (name, skill) in enumerate(players)
        ]
        for thread in threads:
            thread.start()
        registry, run, began = (
            Registry(Path(directory) / "data" / "registry"),
            Run(policies={0: None}),
            time.monotonic(),
        )
        try:
            while (now := time.monotonic() - began) < 60 * minutes:
                latest = registry.latest(scenario.game.name)
                version = 0 if latest is None else latest.version
                if not run.served or run.served[-1][1] != version:
                    run.served.append((now, version))
                    if version:
                        run.policies[version] = registry.policy(scenario.game.name, "bot", version)
                        run.moves.append(registry.aliases(scenario.game.name)["stable"].reason)
                    print(f"  {now:5.0f} s: version {version} {run.moves[-1] if version else ''}", flush=True)
                time.sleep(0.5)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return report(scenario, seed, run, 60 * minutes)


def _player(
    scenario: Scenario, url: str, name: str, skill: float | None, seed: int, stop: threading.Event, directory: Path
) -> None:
    env, rng = gymnasium.make(scenario.env, disable_env_checker=True), np.random.default_rng(seed)
    with Client(url, scenario.game, player=name, directory=directory) as client:
        bot = client.bot(seed=seed) if skill is None else None
        obs, _ = env.reset(seed=seed)
        due = time.monotonic()
        while not stop.is_set():
            action = scenario.person(obs, rng, skill) if bot is None else bot.act(obs, explore=True)
            after, reward, terminated, truncated, _ = env.step(action)
            client.record(obs, action, float(reward), terminated, truncated, after)
            obs = env.reset()[0] if terminated or truncated else after
            due += 1 / scenario.rate
            time.sleep(max(0.0, due - time.monotonic()))


@contextlib.contextmanager
def _platform(data: Path, source: Path | None) -> Iterator[str]:
    command = [sys.executable, "-m", "sparring.cli", "up", "--data", str(data), "--port", "0", "--print-address"]
    env = os.environ | ({"PYTHONPATH": str(source.resolve())} if source else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def show(name: str, results: list[dict[str, Any]]) -> None:
    promotions = sum(len(r["rows"]) - 1 for r in results)
    reached = [r["reached"] for r in results if r["reached"] is not None]
    finals = [r["final"] for r in results]
    served, greedily = (
        sum(row[f"{form}_worse"] for r in results for row in r["rows"]) for form in ("played", "greedy")
    )
    when = f"{np.median(reached):.0f} s (of {len(reached)} of {len(results)})" if reached else "never"
    print(
        f"{name:12} {len(results)} seeds, {promotions} promotions, {served} clear regressions as served, {greedily} "
        f"greedily; a person makes {results[0]['person']:.1f}, reached after {when}; served at the end: median "
        f"{np.median(finals):.1f}, least {min(finals):.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, help="of the game's clock; default: the game's own")
    parser.add_argument("--bots", type=int, help="that play beside the people; default: the game's own")
    parser.add_argument("--inject", action="append", choices=("lr", "poison"), default=[])
    parser.add_argument("--real-time", action="store_true")
    parser.add_argument("--source", type=Path, help="real time: run the platform of this source, as ../older/src")
    parser.add_argument("--out", type=Path, help="all figures as JSON lines")
    parser.add_argument("--verbose", action="store_true")
    words = parser.parse_args()
    logging.basicConfig(level=logging.INFO if words.verbose else logging.ERROR, format="%(message)s")
    if words.real_time and words.inject:
        parser.error("--inject is for the accelerated loop")
    for name in words.games or SCENARIOS:
        scenario = SCENARIOS[name]
        if words.bots is not None:
            scenario = scenario._replace(bots=words.bots)
        minutes = words.minutes or scenario.minutes
        for inject in words.inject or [None]:
            results = []
            for seed in range(words.first, words.first + words.seeds):
                began = time.monotonic()
                if words.real_time:
                    result = real_time(scenario, seed, minutes, words.source)
                else:
                    result = accelerated(scenario, seed, inject, minutes, Settings())
                results.append(result | {"game": name, "inject": inject, "took": time.monotonic() - began})
                if words.out:
                    with words.out.open("a") as file:
                        file.write(json.dumps(results[-1]) + "\n")
                if words.verbose:
                    print(json.dumps(results[-1], indent=1), flush=True)
            if inject is None:
                show(name, results)
            else:
                held = sum(r["held"] for r in results)
                harmful = sum(r["harmful"] for r in results)
                served, longest = sum(r["before"] > 0 for r in results), max(r["seconds_worse"] for r in results)
                print(
                    f"{name:12} {inject}: held back or rolled back in {held} of {len(results)}; a version was served "
                    f"before in {served}, what was learned meanwhile was clearly worse in {harmful}; a worse one was "
                    f"served for {longest:.0f} s at most",
                    flush=True,
                )


if __name__ == "__main__":
    main()
