"""Pong beside Stable-Baselines3's PPO: as long on the same machine, with its own Atari hyperparameters (RL Zoo's) and
its own preprocessing; then 20 deterministic episodes. And both learning curves in one picture.

    make .venv-peers/.installed
    .venv-peers/bin/python benchmarks/pong.py train --seconds 3600 --seed 0 --out pong-sb3-0
    .venv/bin/python benchmarks/pong.py plot pong-sb3-0.csv runs/ALE-Pong-v5-ppo-1/metrics.jsonl --out pong-sb3.png

`train` writes `OUT.csv`, a line for each 1,024 steps: seconds of learning, steps, the mean return of the last 100
training episodes; and `OUT.json`, what the evaluation found. Returns are the game's own, never the clipped rewards. A
step is an action, four frames of the emulator, here as there. The machine should do nothing else.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

GAME = "PongNoFrameskip-v4"  # frames are skipped by the wrapper; no sticky actions
ENVS, FRAMES = 8, 4
LR, CLIP = 2.5e-4, 0.1
HYPERPARAMETERS = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "ent_coef": 0.01, "vf_coef": 0.5}
TIMESTEPS = 10_000_000  # RL Zoo's, over which learning rate and clipping fall to nothing
COLUMNS = ("seconds", "steps", "return_mean")


def train(options: argparse.Namespace) -> None:
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    gymnasium.register_envs(ale_py)
    torch.set_num_threads(options.threads)
    stem = Path(options.out)
    began = 0.0
    with stem.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)

        class Curve(BaseCallback):  # type: ignore[misc]
            def _on_rollout_end(self) -> None:
                returns = [episode["r"] for episode in self.model.ep_info_buffer]
                mean = sum(returns) / len(returns) if returns else ""
                writer.writerow((f"{time.monotonic() - began:.2f}", self.num_timesteps, mean))
                file.flush()

            def _on_step(self) -> bool:
                return time.monotonic() - began < options.seconds

        envs = stacked(ENVS, options.seed)
        model = PPO(
            "CnnPolicy", envs, learning_rate=lambda left: LR * left, clip_range=lambda left: CLIP * left,
            seed=options.seed, **HYPERPARAMETERS,
        )  # fmt: skip
        began = time.monotonic()
        model.learn(options.timesteps, callback=Curve())
        took = time.monotonic() - began
        envs.close()
    judges = stacked(1, options.seed + 1000, terminal_on_life_loss=False, clip_reward=False)
    returns, lengths = evaluate_policy(
        model, judges, options.episodes, deterministic=True, return_episode_rewards=True, warn=False
    )
    judges.close()
    found = {
        "seconds": round(took, 1), "steps": model.num_timesteps, "steps_per_s": round(model.num_timesteps / took, 1),
        "return_mean": sum(returns) / len(returns), "returns": returns, "lengths": lengths,
    }  # fmt: skip
    stem.with_suffix(".json").write_text(json.dumps(found, default=float) + "\n")
    print(json.dumps({name: found[name] for name in ("seconds", "steps", "steps_per_s", "return_mean")}))


def stacked(count: int, seed: int, **wrapper: bool) -> Any:
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    return VecFrameStack(make_atari_env(GAME, count, seed, wrapper_kwargs=wrapper), FRAMES)


Curve = tuple[str, list[float], list[int], list[float]]  # whose, seconds, steps, returns


def read(path: Path) -> Curve:
    """Theirs (CSV) or ours (metrics.jsonl)."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows: list[dict[str, Any]] = [row for row in csv.DictReader(file) if row["return_mean"]]
        names: tuple[str, ...] = COLUMNS
    else:
        names = ("time/total_s", "steps", "episode/return_mean")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if row.get(names[2]) is not None]
    who = f"Stable-Baselines3, {path.stem}" if path.suffix == ".csv" else f"Sparring, {path.absolute().parent.name}"
    seconds, steps, returns = ([float(row[name]) for row in rows] for name in names)
    return who, seconds, [int(step) for step in steps], returns


def plot(options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_time, by_steps) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for path in options.curves:
        who, seconds, steps, returns = read(path)
        colour = "#e45756" if path.suffix == ".csv" else "#4c78a8"
        by_time.plot([s / 60 for s in seconds], returns, color=colour, label=who, linewidth=1)
        by_steps.plot([s / 1e6 for s in steps], returns, color=colour, linewidth=1)
    by_time.set(xlabel="minutes", ylabel="return of training episodes, mean of the newest")
    by_steps.set(xlabel="million steps")
    for axes in (by_time, by_steps):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_time.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(options.out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.add_argument("--seconds", type=float, default=3600.0)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--threads", type=int, default=2, help="of PyTorch")
    one.add_argument("--timesteps", type=int, default=TIMESTEPS, help="over which the schedules end")
    one.add_argument("--episodes", type=int, default=20, help="of the evaluation")
    one.add_argument("--out", required=True, help="without an ending")
    one.set_defaults(run=train)
    other = commands.add_parser("plot")
    other.add_argument("curves", nargs="+", type=Path, metavar="CSV|JSONL")
    other.add_argument("--out", type=Path, default=Path("pong-sb3.png"))
    other.set_defaults(run=plot)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
