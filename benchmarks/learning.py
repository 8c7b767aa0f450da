"""Does it learn? Trains experiments of `experiments/` over seeds, and plays their policies on episodes they never saw.

    python benchmarks/learning.py pendulum sac td3 ddpg --seeds 3
    python benchmarks/learning.py cartpole bc iql cql      # offline, from mixed players (see PLAYERS)

Offline algorithms get the same recorded play, as many steps by each player; "behaviour" is the mean return of
its episodes. Cloning is also shown as it varies (sampled), which is how the players played.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from sparring import algorithms
from sparring.experience import Fragment, new_id
from sparring.experience.fragment import Columns, pack
from sparring.experiment import Experiment, override, read
from sparring.games import Game, catalog
from sparring.games.spec import Array, column
from sparring.networks.policy import Policy
from sparring.store.sqlite import SqliteStore
from sparring.training.evaluate import play
from sparring.training.loop import train

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
UPDATES = {"bc": 5_000, "iql": 20_000, "cql": 10_000}
UNSEEN = 1_000_000  # the seed of the episodes that judge: far from those of training
Player = Callable[[Array, np.random.Generator], Array | int]


def cartpole_good(o: Array, rng: np.random.Generator) -> int:
    if rng.random() < 0.1:
        return int(rng.integers(2))
    return int(3 * o[2] + o[3] + 0.1 * o[0] + 0.2 * o[1] > 0)


def cartpole_weak(o: Array, rng: np.random.Generator) -> int:
    return int(o[2] > 0)  # sees where the pole leans, not where it is going


def pendulum_good(o: Array, rng: np.random.Generator, strength: float = 2.0) -> Array:
    """Pumps energy until the pendulum is nearly up, then holds it there."""
    cos, sin, speed = (float(x) for x in o)
    if cos > 0.85:
        torque = -(10 * np.arctan2(sin, cos) + 2 * speed)
    else:
        torque = 2.0 * (1 if speed >= 0 else -1) * (1 if speed**2 / 6 + 5 * (cos - 1) < 0 else -1)
    return np.clip([np.clip(torque, -strength, strength) + 0.3 * rng.standard_normal()], -2, 2).astype("<f4")


def pendulum_weak(o: Array, rng: np.random.Generator) -> Array:
    return pendulum_good(o, rng, strength=0.7)


PLAYERS: dict[str, dict[str, Player]] = {
    "cartpole": {"good": cartpole_good, "weak": cartpole_weak, "random": lambda o, rng: int(rng.integers(2))},
    "pendulum": {
        "good": pendulum_good,
        "weak": pendulum_weak,
        "random": lambda o, rng: rng.uniform(-2, 2, 1).astype("<f4"),
    },
}
GAMES = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}


def record(game: Game, player: str, act: Player, steps: int, rng: np.random.Generator) -> list[Fragment]:
    """Whole episodes of one player, at least so many steps."""
    assert game.env is not None
    env, fragments, done = catalog.make(game.env), [], 0
    while done < steps:
        obs, actions, rewards, over = [env.reset(seed=int(rng.integers(1 << 31)))[0]], [], [], False
        while not over:
            actions.append(act(obs[-1], rng))
            after, reward, terminated, truncated, _ = env.step(actions[-1])
            obs.append(after)
            rewards.append(reward)
            over = terminated or truncated
        columns = Columns(column(game.observation, obs), column(game.action, actions), np.array(rewards, "<f4"))
        ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
        fragments.append(
            pack(game, columns, id=new_id(), player=player, episode=new_id(), start=0, time=time.time(), **ends)
        )
        done += len(rewards)
    env.close()
    return fragments


def record_all(name: str, players: list[str], path: Path, steps: int) -> dict[str, float]:
    """A store with the play of all players; the mean return of each, and of all."""
    game, rng, store = catalog.load(GAMES[name]), np.random.default_rng(0), SqliteStore(path)
    returns: dict[str, list[float]] = {}
    store.register(game)
    for player in players:
        fragments = record(game, player, PLAYERS[name][player], steps, rng)
        returns[player] = [float(f.columns(game).reward.sum()) for f in fragments]
        for i in range(0, len(fragments), 100):
            store.append(fragments[i : i + 100])
    store.close()
    returns["behaviour"] = [ret for each in returns.values() for ret in each]
    return {player: float(np.mean(each)) for player, each in returns.items()}


def experiment(name: str, algorithm: str, store: Path, changes: list[str]) -> Experiment:
    if not algorithms.find(algorithm).offline:
        return read(EXPERIMENTS / f"{name}-{algorithm}.yaml", changes)
    layers = [{"layer": "dense", "units": 64}] * 2
    data = {
        "game": GAMES[name],
        "algorithm": {"name": algorithm, "layers": layers} | ({} if algorithm == "bc" else {"critic_layers": layers}),
        "source": "store",
        "store": str(store),
        "stop": {"iterations": UPDATES[algorithm] // 1000},
    }
    return Experiment.parse(override(data, changes))


def judge(policy: Policy, episodes: int, explore: bool = False) -> float:
    return float(np.mean([episode.ret for episode in play(policy, episodes, UNSEEN, explore=explore)]))


def run(name: str, algorithm: str, args: argparse.Namespace, folder: Path) -> None:
    results, sampled, steps, seconds = [], [], [], []
    for seed in range(args.seeds):
        asked = experiment(name, algorithm, folder / "store.db", args.set)
        out = str(folder / f"{name}-{algorithm}-{seed}")
        began = time.monotonic()
        finished = train(msgspec.structs.replace(asked, seed=seed, out=out))
        seconds.append(time.monotonic() - began)
        row = finished.rows()[-1]
        steps.append(int(row[asked.axis]))
        policy = finished.policy()
        results.append(judge(policy, args.episodes))
        if algorithm == "bc":
            sampled.append(judge(policy, args.episodes, explore=True))
    show(algorithm, steps, seconds, results)
    if sampled:
        show(f"{algorithm}, sampled", steps, seconds, sampled)


def show(what: str, steps: list[int], seconds: list[float], results: list[float]) -> None:
    each = ", ".join(f"{r:.0f}" for r in results)
    print(
        f"| {what} | {max(steps):,} | {np.mean(seconds):.0f} | **{np.mean(results):.0f}** | {each} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", help="the beginning of an experiment's file name: cartpole, pendulum, lunarlander …")
    parser.add_argument("algorithms", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=100, help="that judge each seed's policy")
    parser.add_argument("--recorded", type=int, default=10_000, help="steps by each player, offline")
    parser.add_argument("--players", nargs="+", default=["good", "weak", "random"], help="who is recorded, offline")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `sparring train`")
    args = parser.parse_args()
    print(f"{args.game}: {args.seeds} seeds, {args.episodes} unseen episodes each\n")
    with tempfile.TemporaryDirectory() as folder:
        recorded = {}
        if any(algorithms.find(name).offline for name in args.algorithms):
            recorded = record_all(args.game, args.players, Path(folder) / "store.db", args.recorded)
        print("| | steps (offline: updates) | seconds | return | by seed |\n|---|---|---|---|---|")
        for player, mean in recorded.items():
            print(f"| {player if player == 'behaviour' else f'player: {player}'} | | | {mean:.0f} | |")
        for algorithm in args.algorithms:
            run(args.game, algorithm, args, Path(folder))


if __name__ == "__main__":
    main()
