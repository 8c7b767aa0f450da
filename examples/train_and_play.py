"""Trains a policy with the Python API, evaluates it, publishes it and plays an episode with it.

python examples/train_and_play.py --steps 50000
"""

import argparse
from pathlib import Path

import gymnasium

import sparring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50_000, help="steps of play to learn from")
    parser.add_argument("--episodes", type=int, default=20, help="episodes of the evaluation")
    parser.add_argument("--out", type=Path, help="the run's directory; default: the next under runs/")
    parser.add_argument("--registry", type=Path, default=Path(".sparring/registry"), help="where to publish")
    words = parser.parse_args()

    experiment = sparring.Experiment(
        game="CartPole-v1",
        algorithm={"name": "ppo", "steps": min(1024, words.steps)},
        rollout=sparring.Rollout(envs=8),
        stop=sparring.Stop(steps=words.steps, return_=475),
        evaluation=sparring.Evaluation(every=5),
        out=None if words.out is None else str(words.out),
    )
    run = sparring.train(experiment)
    print(f"{run.path}: {run.rows()[-1]['steps']:,.0f} steps")

    found = sparring.evaluate(run, episodes=words.episodes, seed=12345)
    print(f"mean return {found['evaluation/return_mean']:.1f} of {words.episodes} episodes")

    registry = sparring.Registry(words.registry)
    manifest = registry.publish(run.policy(), algorithm=experiment.name, metrics=found)
    print(f"published as {manifest.game.name}/{manifest.model}/{manifest.version} in {registry}")

    policy = sparring.load_policy("CartPole-v1", registry)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=1)
    total, over = 0.0, False
    while not over:
        action, _ = policy.act(obs)
        obs, reward, terminated, truncated, _ = env.step(int(action))
        total, over = total + float(reward), terminated or truncated
    print(f"an episode of the published policy: return {total:.0f}")


if __name__ == "__main__":
    main()
