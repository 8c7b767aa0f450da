"""Training speed beside Stable-Baselines3, SBX and RLlib: same game, hyperparameters and machine, runs interleaved.

    make peers                                            # sets up .venv-peers, then all tasks
    python benchmarks/peers.py sac-humanoid --rounds 3    # some of them: see TASKS

A rate is steps of the game per second of wall clock after the first iteration, so without imports and compilation;
those are the task `start`. Peers get the better of one and two threads, found before the rounds; tables show medians
over rounds, ratios are medians of each round's ratio. The machine should do nothing else.

"sparring" steps HumanoidBullet in its own way (sparring/games/bullet.py: the same numbers, fewer calls), "plain" as
the package does and as peers do; "overlap" plays the next batch while this one is learned (`rollout.overlap`);
"bfloat16" is `precision: bfloat16`; "ray" is `runner: ray`. "raw" are two processes that step with random actions.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUMANOID, CARTPOLE = "HumanoidBulletEnv-v0", "CartPole-v1"
PLAIN = "plain_humanoid:PlainHumanoid-v0"
WIDE, NARROW = [256, 256], [64, 64]
PPO_HUMANOID = {"steps": 4000, "minibatch": 250, "epochs": 10}
PPO_CARTPOLE = {"steps": 2048, "minibatch": 64, "epochs": 10}
TASKS = {
    "ppo-humanoid": (
        "raw",
        "raw plain",
        "sparring",
        "sparring plain",
        "sparring overlap",
        "sparring plain overlap",
        "sparring ray",
        "sb3",
        "sbx",
        "rllib",
    ),
    "sac-humanoid": ("sparring", "sparring plain", "sparring bfloat16", "sb3", "sbx"),
    "td3-humanoid": ("sparring", "sparring plain", "sparring bfloat16", "sb3", "sbx"),
    "ppo-cartpole": ("sparring", "sparring overlap", "sb3", "sbx"),
    "dqn-cartpole": ("sparring", "sb3", "sbx"),
    "start": ("sparring", "sparring again", "sparring ray", "sb3", "sbx", "rllib", "rllib ray"),
}
OFF_POLICY_STARTS, OFF_POLICY_WARM, OFF_POLICY_STEPS = 500, 800, 2_000


# Children: one contender, one task; print one line of JSON


def sparring(task: str, options: list[str]) -> dict[str, float]:
    from sparring.experiment import Experiment
    from sparring.training.loop import train

    algorithm, game = task.split("-")

    def layers(sizes: list[int], activation: str) -> list[dict[str, Any]]:
        return [{"layer": "dense", "units": units, "activation": activation} for units in sizes]

    wide = {"layers": layers(WIDE, "relu"), "critic_layers": layers(WIDE, "relu")}
    starts = {"learning_starts": OFF_POLICY_STARTS}
    off_policy = wide | starts | {"batch": 256, "updates_per_step": 1.0}
    asked: dict[str, Any] = {
        "ppo-humanoid": {
            "algorithm": PPO_HUMANOID | {"layers": layers(WIDE, "tanh")},
            "rollout": {"workers": 2, "overlap": "overlap" in options},
            "stop": {"iterations": 5},
        },
        "sac-humanoid": {"algorithm": off_policy, "rollout": {"workers": 1}, "stop": {"steps": OFF_POLICY_STEPS}},
        "td3-humanoid": {"algorithm": off_policy, "rollout": {"workers": 1}, "stop": {"steps": OFF_POLICY_STEPS}},
        "ppo-cartpole": {
            "algorithm": PPO_CARTPOLE | {"layers": layers(NARROW, "tanh")},
            "rollout": {"envs": 64, "workers": int("overlap" in options), "overlap": "overlap" in options},
            "stop": {"iterations": 60},
        },
        "dqn-cartpole": {
            "algorithm": starts
            | {"layers": layers(NARROW, "relu"), "batch": 32, "updates_per_step": 0.25, "replay": 50_000},
            "rollout": {"envs": 8},
            "stop": {"steps": 60_000},
        },
    }[task]
    asked["algorithm"]["name"] = algorithm
    humanoid = PLAIN if "plain" in options else HUMANOID
    asked |= {"game": humanoid if game == "humanoid" else CARTPOLE, "checkpoint": {"every": 0}}
    asked["runner"] = "ray" if "ray" in options else "local"
    asked["precision"] = "bfloat16" if "bfloat16" in options else "float32"
    if algorithm in ("sac", "td3"):
        asked["iteration"] = OFF_POLICY_WARM // 2
    with tempfile.TemporaryDirectory() as folder:
        rows = train(Experiment.parse(asked | {"out": folder + "/run"})).rows()
    skipped = 1 if algorithm in ("ppo", "dqn") else 2
    took = rows[-1]["time/total_s"] - rows[skipped - 1]["time/total_s"]
    share = sum(row["time/sample_s"] for row in rows[skipped:]) / took
    return {"rate": (rows[-1]["steps"] - rows[skipped - 1]["steps"]) / took, "sampling": share}


def sb3(task: str, options: list[str], jax: bool = False) -> dict[str, float]:
    if jax:
        import sbx as library
    else:
        import stable_baselines3 as library
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    algorithm, game = task.split("-")
    make: Any = CARTPOLE if game == "cartpole" else humanoid
    net = {"policy_kwargs": {"net_arch": NARROW if game == "cartpole" else WIDE}}
    if algorithm == "ppo":
        asked, envs = (PPO_HUMANOID, 2) if game == "humanoid" else (PPO_CARTPOLE, 64)
        kind = SubprocVecEnv if game == "humanoid" else DummyVecEnv
        config = {
            "n_steps": asked["steps"] // envs,
            "batch_size": asked["minibatch"],
            "n_epochs": asked["epochs"],
        }
        total, warm = 3 * asked["steps"], asked["steps"]
    else:
        kind, envs, total, warm = DummyVecEnv, 1, OFF_POLICY_STEPS, OFF_POLICY_WARM
        config = {"learning_starts": OFF_POLICY_STARTS, "batch_size": 256, "train_freq": 1, "gradient_steps": 1}
        if algorithm == "dqn":
            envs, total, warm = 8, 12_000, 2_000
            config |= {"batch_size": 32, "gradient_steps": 2, "buffer_size": 50_000}
    env = make_vec_env(make, n_envs=envs, seed=0, vec_env_cls=kind)
    model = getattr(library, algorithm.upper())("MlpPolicy", env, **config, **net)
    marks: list[tuple[int, float]] = []

    class Clock(BaseCallback):  # type: ignore[misc]
        """On-policy: where iterations begin; off-policy: every step."""

        def _on_rollout_start(self) -> None:
            if algorithm == "ppo":
                marks.append((self.num_timesteps, time.perf_counter()))

        def _on_step(self) -> bool:
            if algorithm != "ppo":
                marks.append((self.num_timesteps, time.perf_counter()))
            return True

    model.learn(total, callback=Clock())
    marks.append((model.num_timesteps, time.perf_counter()))
    env.close()
    steps, since = next(mark for mark in marks if mark[0] >= warm)
    return {"rate": (marks[-1][0] - steps) / (marks[-1][1] - since)}


def sbx(task: str, options: list[str]) -> dict[str, float]:
    return sb3(task, options, jax=True)


def humanoid(*_: Any, **__: Any) -> Any:
    import gymnasium
    import pybullet_envs_gymnasium  # noqa: F401  # registers it

    return gymnasium.make(HUMANOID)


def rllib(task: str, options: list[str]) -> dict[str, float]:
    import logging

    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.tune.registry import register_env

    register_env("humanoid", humanoid)
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    config = (
        PPOConfig()
        .environment("humanoid")
        .env_runners(num_env_runners=2, rollout_fragment_length=2000)
        .training(train_batch_size=4000, minibatch_size=250, num_epochs=10, lr=3e-4)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=WIDE, fcnet_activation="tanh"))
    )
    algo = config.build_algo()
    algo.train()
    began, steps = time.perf_counter(), 0
    for _ in range(2):
        result = algo.train()
        steps += int(result["env_runners"]["num_env_steps_sampled"])
    rate = steps / (time.perf_counter() - began)
    algo.stop()
    ray.shutdown()
    return {"rate": rate}


def raw(task: str, options: list[str]) -> dict[str, float]:
    from rollout import raw as measure

    return {"rate": measure(PLAIN if "plain" in options else HUMANOID, 2, 8.0)}


# The first iteration, from the command's beginning: as small as it can be, so that it is imports and compilation


def start(who: str) -> None:
    if who.startswith("sparring"):
        from sparring.cli import main

        small = ["algorithm.steps=256", "algorithm.minibatch=64", "algorithm.epochs=1", "stop.iterations=1"]
        with tempfile.TemporaryDirectory() as folder:
            if who.endswith("ray"):
                small += ["runner=ray", "rollout.workers=2"]
            sets = [word for key in small for word in ("--set", key)]
            sys.argv = ["sparring", "train", CARTPOLE, "--algorithm", "ppo", "--out", folder + "/run", *sets]
            main()
    elif who.startswith("rllib"):
        import logging

        import ray
        from ray.rllib.algorithms.ppo import PPOConfig

        ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        runners = 2 if who.endswith("ray") else 0
        training = {"train_batch_size": 256, "minibatch_size": 64, "num_epochs": 1}
        algo = PPOConfig().environment(CARTPOLE).env_runners(num_env_runners=runners).training(**training).build_algo()
        algo.train()
    else:
        if who == "sbx":
            from sbx import PPO
        else:
            from stable_baselines3 import PPO
        PPO("MlpPolicy", CARTPOLE, n_steps=256, batch_size=64, n_epochs=1).learn(256)


# The parent


def measure(who: str, task: str, threads: int, options: argparse.Namespace) -> dict[str, float]:
    ours = who.split()[0] in ("raw", "sparring")
    python = sys.executable if ours else options.peers
    one = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads), "MKL_NUM_THREADS": str(threads)}
    here = {"PYTHONPATH": str(Path(__file__).parent)}  # of plain_humanoid
    environment = os.environ | (here if ours else one)
    if task == "start":
        environment["XDG_CACHE_HOME"] = options.cache
    began = time.perf_counter()
    done = subprocess.run(
        [python, __file__, "--child", who, task], env=environment, capture_output=True, text=True, timeout=900
    )
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{who} failed at {task}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    if task == "start":
        return {"seconds": took}
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def best_threads(task: str, who: str, options: argparse.Namespace) -> int:
    if who.split()[0] in ("raw", "sparring"):
        return 0
    rates = {threads: measure(who, task, threads, options)["rate"] for threads in (1, 2)}
    say(f"{task}: {who} makes {rates[1]:,.0f} steps/s with one thread, {rates[2]:,.0f} with two")
    return max(rates, key=lambda threads: rates[threads])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(task: str, options: argparse.Namespace) -> None:
    contenders = [who for who in TASKS[task] if not options.only or who in options.only]
    threads = {who: best_threads(task, who, options) for who in contenders}
    found: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
    for number in range(options.rounds):
        for who in contenders:
            found[who].append(measure(who, task, threads[who], options))
            say(f"{task}, round {number + 1}: {who} {found[who][-1]}")
    ours = [who for who in contenders if who.startswith("sparring")]
    heads = [task, "threads", "steps/s", "each round", *(f"{who} is" for who in ours)]
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    rates = {who: [each["rate"] for each in results] for who, results in found.items()}
    for who, theirs in rates.items():
        ratios = [statistics.median(a / b for a, b in zip(rates[one], theirs, strict=True)) for one in ours]
        each = ", ".join(f"{rate:,.0f}" for rate in theirs)
        cells = [who, str(threads[who] or "own"), f"{statistics.median(theirs):,.0f}", each]
        print("| " + " | ".join([*cells, *(f"{ratio:.2f} ×" for ratio in ratios)]) + " |", flush=True)


def compare_start(options: argparse.Namespace) -> None:
    contenders = [who for who in TASKS["start"] if not options.only or who in options.only]
    found: dict[str, list[float]] = {who: [] for who in contenders}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as options.cache:
            for who in contenders:
                found[who].append(measure(who, "start", 2, options)["seconds"])
                say(f"start, round {number + 1}: {who} {found[who][-1]:.1f} s")
    print("\n| start | seconds to the end of a first, tiny PPO iteration on CartPole | each round |\n|---|---|---|")
    names = {"sparring": "sparring, nothing compiled yet", "sparring again": "sparring, second start"}
    names |= {"sparring ray": "sparring, second start, runner: ray with two workers", "rllib ray": "rllib, two runners"}
    for who, seconds in found.items():
        each = ", ".join(f"{s:.1f}" for s in seconds)
        print(f"| {names.get(who, who)} | {statistics.median(seconds):.1f} | {each} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="contenders; sparring must be one of them")
    parser.add_argument("--peers", default=str(Path(__file__).parent.parent / ".venv-peers/bin/python"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        who, task = options.child
        kinds: dict[str, Callable[[str, list[str]], dict[str, float]]] = {
            "sparring": sparring,
            "sb3": sb3,
            "sbx": sbx,
            "rllib": rllib,
            "raw": raw,
        }
        if task == "start":
            start(who)
        else:
            kind, *words = who.split()
            print(json.dumps(kinds[kind](task, words)), flush=True)
        return
    for task in options.tasks or TASKS:
        compare_start(options) if task == "start" else compare(task, options)


if __name__ == "__main__":
    main()
