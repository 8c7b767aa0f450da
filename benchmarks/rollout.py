"""How much of the raw rate of a game is left when a policy plays it, and when it is learned from as well.

    python benchmarks/rollout.py [GAME] [--workers 2] [--seconds 20] [--iterations 8] [--rounds 3]

GAME is HumanoidBulletEnv-v0; `plain_humanoid:PlainHumanoid-v0` is the same as its package steps it.

Raw: so many independent processes that step the game with random actions and nothing else. Sampling: our rollout
workers with a 256-256 policy. Training: PPO with 4000 steps per update, minibatches of 250, 10 epochs, 256-256.
Interleaved; medians. The machine should do nothing else.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RAW = """
import sys, time
from sparring.games.catalog import make
env, seconds = make(sys.argv[1]), float(sys.argv[2])
env.reset(seed=int(sys.argv[3])); env.action_space.seed(int(sys.argv[3]))
print("ready", file=sys.stderr, flush=True); sys.stdin.readline()
steps, until = 0, time.monotonic() + seconds
while time.monotonic() < until:
    _, _, terminated, truncated, _ = env.step(env.action_space.sample())
    steps += 1
    if terminated or truncated:
        env.reset()
print("\\nsteps", steps)
"""


def raw(game: str, workers: int, seconds: float) -> float:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", RAW, game, str(seconds)]
    players = [
        subprocess.Popen([*command, str(i)], stdin=pipe, stdout=pipe, stderr=pipe, text=True) for i in range(workers)
    ]
    for player in players:
        assert player.stderr is not None
        while "ready" not in (line := player.stderr.readline()):
            assert line, "a player died"
    for player in players:
        assert player.stdin is not None
        player.stdin.write("\n")
        player.stdin.flush()
    return sum(int(player.communicate()[0].split()[-1]) for player in players) / seconds


def algorithm(game: str):  # type: ignore[no-untyped-def]
    from sparring import algorithms
    from sparring.games import catalog

    return algorithms.create("ppo", catalog.load(game), hyperparameters())


def hyperparameters() -> dict[str, object]:
    layers = [{"layer": "dense", "units": 256, "activation": "tanh"}] * 2
    return {"steps": 4000, "minibatch": 250, "epochs": 10, "layers": layers}


def sampling(game: str, workers: int, seconds: float) -> float:
    import jax

    from sparring.rollout.pool import Pool, plan_for

    ppo = algorithm(game)
    policy = ppo.policy(ppo.init(jax.random.key(0)), {}, 0.0)
    with tempfile.TemporaryDirectory() as logs:
        pool = Pool(plan_for(policy, workers=workers, envs=1, steps=250, slots=2, seed=0), 60.0, Path(logs))
        pool.publish(policy)
        pool.start()
        pool.start()
        for _ in range(2 * workers):  # until everybody is there
            pool.release(pool.take())
        steps, since = 0, time.monotonic()
        while (now := time.monotonic()) < since + seconds:
            block = pool.take()
            steps += int((block.rows.kind != 2).sum())
            pool.release(block)
        pool.close()
    return steps / (now - since)


def training(game: str, workers: int, iterations: int, overlap: bool) -> float:
    from sparring.experiment import Checkpoints, Experiment, Rollout, Stop
    from sparring.training.loop import train

    with tempfile.TemporaryDirectory() as out:
        experiment = Experiment(
            game=game,
            algorithm={"name": "ppo", **hyperparameters()},
            rollout=Rollout(workers=workers, overlap=overlap),
            stop=Stop(iterations=iterations + 1),
            checkpoint=Checkpoints(every=0),
            out=f"{out}/run",
        )
        rows = train(experiment).rows()
    first = rows[0]  # starts the workers and compiles
    return (rows[-1]["steps"] - first["steps"]) / (rows[-1]["time/total_s"] - first["time/total_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", nargs="?", default="HumanoidBulletEnv-v0")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--iterations", type=int, default=8, help="of PPO, 4000 steps each; 0: no PPO")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # of plain_humanoid, for children
    contestants = {
        "raw, random actions": lambda: raw(args.game, args.workers, args.seconds),
        "sampling, 256-256 policy": lambda: sampling(args.game, args.workers, args.seconds),
    }
    if args.iterations:
        contestants |= {
            "PPO": lambda: training(args.game, args.workers, args.iterations, False),
            "PPO, rollout.overlap": lambda: training(args.game, args.workers, args.iterations, True),
        }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(args.rounds):
        for name, measure in contestants.items():
            rates[name].append(measure())
    reference = statistics.median(rates["raw, random actions"])
    print(f"\n{args.game}, {args.workers} workers, median of {args.rounds}\n")
    print("| | steps/s | of raw | all rounds |\n|---|---|---|---|")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:,.0f} | {middle / reference:.0%} | {', '.join(f'{r:,.0f}' for r in found)} |")


if __name__ == "__main__":
    main()
