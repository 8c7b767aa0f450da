"""Callbacks: end a training that no longer improves, and write down what happens. In an experiment's file:
`callbacks: [callback:Diary]`, from this directory.

python examples/callback.py --iterations 100
"""

import argparse
import threading

import sparring


class Patience(sparring.Callback):
    """Ends a training whose evaluations have not improved for some time.

    :param evaluations: How many may pass without a better one.
    """

    def __init__(self, evaluations: int = 3) -> None:
        self.left = self.evaluations = evaluations
        self.best = float("-inf")

    def on_evaluation(self, progress: sparring.Progress) -> bool:
        found = progress.row["evaluation/return_mean"]
        self.left = self.evaluations if found > self.best else self.left - 1
        self.best = max(self.best, found)
        return self.left > 0  # False ends the training


class Diary(sparring.Callback):
    """Prints what happens."""

    def on_start(self, progress: sparring.Progress) -> None:
        print(f"{progress.experiment.name} on {progress.experiment.game} in {progress.run.path}")

    def on_checkpoint(self, progress: sparring.Progress) -> None:
        print(f"iteration {progress.iteration}: saved {progress.checkpoint}")

    def on_end(self, progress: sparring.Progress) -> None:
        print(f"ended after {progress.iteration} iterations, {progress.steps:,} steps, {progress.seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100, help="iterations at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds at most, by a clock of our own")
    parser.add_argument("--out", help="the run's directory; default: the next under runs/")
    words = parser.parse_args()
    diary = Diary()
    clock = threading.Timer(words.seconds, diary.stop)  # `stop` works from any thread
    clock.daemon = True
    clock.start()
    experiment = sparring.Experiment(
        game="CartPole-v1",
        algorithm={"name": "dqn"},
        iteration=500,
        stop=sparring.Stop(iterations=words.iterations),
        evaluation=sparring.Evaluation(every=1, episodes=5),
        out=words.out,
    )
    sparring.train(experiment, callbacks=[Patience(5), diary])


if __name__ == "__main__":
    main()
