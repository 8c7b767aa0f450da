"""The Ray runner with many workers, RLlib beside it.

    python benchmarks/scaling.py waiting --workers 1 4 16 32 64 [--rllib 1 4 16] [--rounds 2]
    python benchmarks/scaling.py weights [--rounds 3]

`waiting`: PPO on a game whose step only waits 5 ms (waiting_game.py), 128 steps of each worker an iteration, 64-64.
The rate is of sampling alone; linear is that many times the rate of one. `weights`: what it costs to give new weights
to one and to 64 workers. `--peers` is a Python that has RLlib (`make peers` makes one). The machine should do nothing
else.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GAME, STEPS = "waiting_game:Waiting-v0", 128
ITERATIONS = 3


def environment() -> dict[str, str]:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def median(values: list[float]) -> float:
    return statistics.median(values)


# PPO on the waiting game


def ours(workers: int) -> dict[str, float]:
    from sparring.bench.scaling import measure
    from sparring.experiment import Experiment

    layers = [{"layer": "dense", "units": 64, "activation": "tanh"}] * 2
    steps = STEPS * workers
    experiment = Experiment.parse(
        {
            "game": GAME,
            "algorithm": {"name": "ppo", "steps": steps, "minibatch": steps // 4, "epochs": 4, "layers": layers},
            "rollout": {"workers": workers},
            "runner": "ray",
            "resources": {"actor_cpus": 1 / 64},
        }
    )
    found = measure(experiment, ITERATIONS, environment(), lambda _: None)
    assert found.sampled_per_s is not None
    assert found.memory is not None
    return {"rate": found.sampled_per_s, "all": found.steps_per_s, "memory": found.memory, "start": found.start_s}


def theirs(workers: int, peers: str) -> dict[str, float]:
    done = subprocess.run(
        [peers, __file__, "rllib", str(workers)], env=environment(), capture_output=True, text=True, timeout=1200
    )
    if done.returncode:
        raise SystemExit(f"RLlib failed with {workers} runners:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rllib(workers: int) -> dict[str, float]:
    """In the peers' environment."""
    import logging

    import gymnasium
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
    from ray.tune.registry import register_env

    began = time.perf_counter()

    def make(_: Any) -> Any:
        return gymnasium.make(GAME)

    register_env("waiting", make)
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    steps = STEPS * workers
    algo = (
        PPOConfig()
        .environment("waiting")
        .env_runners(num_env_runners=workers, rollout_fragment_length=STEPS, num_cpus_per_env_runner=1 / 64)
        .training(train_batch_size=steps, minibatch_size=steps // 4, num_epochs=4)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
        .build_algo()
    )
    algo.train()
    start = time.perf_counter() - began
    since = time.perf_counter()
    for _ in range(ITERATIONS):
        algo.train()
    whole = ITERATIONS * steps / (time.perf_counter() - since)
    since, sampled = time.perf_counter(), 0
    for _ in range(ITERATIONS):
        episodes = synchronous_parallel_sample(
            worker_set=algo.env_runner_group, max_env_steps=steps, sample_timeout_s=600, _uses_new_env_runners=True
        )
        sampled += sum(len(episode) for episode in episodes)
    rate = sampled / (time.perf_counter() - since)
    pids = algo.env_runner_group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
    found = {"rate": rate, "all": whole, "memory": sum(memory(pid) for pid in pids) / len(pids), "start": start}
    algo.stop()
    ray.shutdown()
    return found


def memory(pid: int) -> int:
    found = re.search(r"^Pss: *(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def waiting(options: argparse.Namespace) -> None:
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for who, counts in (("sparring", options.workers), ("rllib", options.rllib)):
            for workers in counts:
                one = ours(workers) if who == "sparring" else theirs(workers, options.peers)
                found.setdefault((who, workers), []).append(one)
                say(f"round {number + 1}: {who} with {workers}: " + ", ".join(f"{k} {v:,.4g}" for k, v in one.items()))
    heads = ["", "workers", "sampled steps/s", "of linear", "PPO steps/s", "MB each", "start s", "sampled, each round"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for (who, workers), rounds in found.items():
        fewest = min(count for name, count in found if name == who)
        base = [each["rate"] / fewest * workers for each in found[who, fewest]]
        part = median([each["rate"] / linear for each, linear in zip(rounds, base, strict=True)])
        all_, size, start = (median([each[key] for each in rounds]) for key in ("all", "memory", "start"))
        each = ", ".join(f"{one['rate']:,.0f}" for one in rounds)
        rate = median([one["rate"] for one in rounds])
        cells = [who, str(workers), f"{rate:,.0f}", f"{part:.0%}", f"{all_:,.0f}", f"{size / 1e6:.1f}", f"{start:.1f}"]
        print("| " + " | ".join([*cells, each]) + " |", flush=True)


# New weights


def weights(options: argparse.Namespace) -> None:
    """Blocks of one step of a game that does not wait, with new weights and with the old ones, in turns: the
    difference is what the weights cost, from `publish` until every worker has played with them."""
    os.environ |= environment() | {"WAIT_MS": "0"}
    sys.path.insert(0, str(HERE))
    import numpy as np

    from sparring.experiment import Resources
    from sparring.games import catalog
    from sparring.networks.policy import Policy
    from sparring.networks.spec import Categorical, Dense, param_shapes
    from sparring.rollout.pool import plan_for
    from sparring.rollout.ray_pool import RayPool

    game, head = catalog.load(GAME), Categorical()
    print("| network | workers | a round, ms | new weights, ms more | given to all, ms | of one worker's |")
    print("|---|---|---|---|---|---|")
    for units in (64, 512):
        layers = (Dense(units, "tanh"), Dense(units, "tanh"))
        params = {name: np.zeros(shape, np.float32) for name, shape in param_shapes(game, layers, head).items()}
        policy, first = Policy(game, layers, head, params), 0.0
        for workers in (1, 64):
            plan = plan_for(policy, workers=workers, envs=1, steps=1, slots=2, seed=0)
            pool = RayPool(plan, 60.0, Resources(actor_cpus=1 / 64))
            pool.publish(policy)

            for _ in range(5):
                play(pool)
            plain, fresh, given = [], [], []
            for _ in range(100 * options.rounds):
                plain.append(play(pool))
                pool.publish(policy)
                fresh.append(play(pool))
                pool.publish(policy)
                given.append(give(pool))
            pool.close()
            more = median([b - a for a, b in zip(plain, fresh, strict=True)])
            cost = median(given)
            first = first or cost
            row = [f"{units}-{units}", str(workers), f"{1e3 * median(plain):.2f}", f"{1e3 * more:.2f}"]
            print("| " + " | ".join([*row, f"{1e3 * cost:.2f}", f"{cost / first:.2f}"]) + " |", flush=True)


def play(pool: Any) -> float:
    since = time.perf_counter()
    pool.start()
    for _ in range(pool.plan.workers):
        pool.take()
    return time.perf_counter() - since


def give(pool: Any) -> float:
    """Until the newest weights are where all workers read them."""
    from sparring.rollout.ray_pool import ray

    since = time.perf_counter()
    for host in pool.hosts:
        pool._call(host, [])
    ray.get([host.calls.popleft() for host in pool.hosts])
    return time.perf_counter() - since


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["waiting", "weights", "rllib"], help="rllib is for its child alone")
    parser.add_argument("count", nargs="?", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4, 16, 32, 64])
    parser.add_argument("--rllib", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", default=str(HERE.parent / ".venv-peers/bin/python"))
    options = parser.parse_args()
    if options.task == "rllib":
        print(json.dumps(rllib(options.count)), flush=True)
    else:
        {"waiting": waiting, "weights": weights}[options.task](options)


if __name__ == "__main__":
    main()
