"""Loads a trained policy and looks into it: its actions, their probabilities, and values, in NumPy.

python examples/load_policy.py runs/CartPole-v1-dqn-1@best
python examples/load_policy.py CartPole-v1/bot/3 --registry .sparring/registry
"""

import argparse

import numpy as np

import sparring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "target", help="a run (RUN@best, RUN@40), a checkpoint, a policy's file, or GAME[/MODEL[/VERSION]]"
    )
    parser.add_argument("--registry", default=".sparring/registry", help="where published models are")
    parser.add_argument("--rows", type=int, default=3, help="observations to look at")
    words = parser.parse_args()

    policy = sparring.load_policy(words.target, words.registry)
    print(
        f"{policy.game.name}: {len(policy.layers)} layers, {sum(p.size for p in policy.params.values()):,} parameters"
    )

    observations = np.zeros(words.rows, policy.game.observation.element)  # of your game, in practice
    greedy, _ = policy.act(observations)
    rng = np.random.default_rng(0)
    drawn, log_prob = policy.act(observations, policy.noise(rng, words.rows))
    print(f"greedy: {greedy.tolist()}")
    print(f"drawn: {drawn.tolist()}, log-probabilities {None if log_prob is None else log_prob.round(3).tolist()}")
    asked = {"probabilities": policy.probabilities, "values": policy.values, "value of the state": policy.state_value}
    for name, ask in asked.items():
        try:
            print(f"{name}: {np.round(ask(observations[0]), 3).tolist()}")
        except sparring.InputError as error:  # continuous actions, or none was learned
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
