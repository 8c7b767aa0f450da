"""A file of a policy beside the policy: the same actions on observations that it was not made with, the same return?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sparring.export.formats import Runner
from sparring.export.whole_numbers import same_actions
from sparring.games import Box, Game
from sparring.games.spec import Array
from sparring.networks.plain import pixels
from sparring.networks.policy import Policy
from sparring.networks.spec import scaling
from sparring.training.evaluate import play, summary

__all__ = ["Comparison", "Expected", "OneByOne", "ReturnsOfBoth", "compare", "expect", "returns"]


AT_ONCE = 250  # observations: images are large


class Comparison(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one file.

    :param observations: With how many it was compared.
    :param float_difference: The largest of a head's number, where the file tells those of the policy.
    :param agreement: In how many observations the action is the policy's; None for Box actions.
    :param action_error: Of Box actions: the mean distance, as a share of the action's range …
    :param action_error_max: … and the largest.
    """

    observations: int
    float_difference: float | None = None
    agreement: float | None = None
    action_error: float | None = None
    action_error_max: float | None = None


class ReturnsOfBoth(msgspec.Struct, frozen=True):
    """Of the same episodes, played by both."""

    episodes: int
    policy: float
    file: float
    policy_deviation: float
    file_deviation: float


@dataclass(frozen=True)
class OneByOne:
    """A file where a policy is asked for: `act` of a batch, one observation after the other."""

    game: Game
    runner: Runner

    def act(self, obs: Array, noise: Any = None) -> tuple[Array, None]:
        return np.concatenate([self.one(obs[i : i + 1]) for i in range(len(obs))]), None

    def one(self, obs: Array) -> Array:
        return np.array(self.runner.action(self.runner.run(self.runner.prepare(obs))))


@dataclass(frozen=True, eq=False)
class Expected:
    """What a policy does on observations, in JAX, as it learned: NumPy's form of it is no more than another file."""

    obs: Array
    outputs: Array
    action: Array


def expect(policy: Policy, obs: Array) -> Expected:
    from sparring.networks.jax_policy import compile_outputs

    run = compile_outputs(policy)
    pieces = [obs[i : i + AT_ONCE] for i in range(0, len(obs), AT_ONCE)]
    outputs = np.concatenate([np.asarray(run(pixels(policy.game, piece))) for piece in pieces])
    return Expected(obs, outputs, policy.choose(outputs, None))


def compare(policy: Policy, runner: Runner, held: Expected, *, whole: bool) -> Comparison:
    """:param whole: It is of whole numbers: its outputs are not the policy's."""
    actions, differences = [], []
    obs, outputs, expected = held.obs, held.outputs, held.action
    for i in range(len(obs)):
        found = runner.run(runner.prepare(obs[i : i + 1]))
        actions.append(np.array(runner.action(found)))
        out = None if whole else runner.outputs(found)
        if out is not None:
            differences.append(float(np.abs(out - outputs[i : i + 1, : out.shape[1]]).max()))
    difference, ours = max(differences, default=None), np.concatenate(actions)
    if not isinstance(policy.game.action, Box):
        return Comparison(len(obs), difference, agreement=same_actions(policy.game, ours, expected))
    s, count = scaling(policy.game.action), len(obs)
    flat = np.abs(ours.astype(np.float64) - expected).reshape(count, -1)
    spread = np.maximum(np.ptp(expected.reshape(count, -1), axis=0), 1e-6)
    shares = flat / np.where(s.bounded, s.high.astype(np.float64) - s.low, spread)
    return Comparison(count, difference, action_error=float(shares.mean()), action_error_max=float(shares.max()))


def returns(
    policy: Policy, runner: Runner, episodes: int, on_episode: Callable[[int], object] = lambda ended: None
) -> ReturnsOfBoth:
    """Greedy play of both, with the same seeds."""
    rows = []
    for i, each in enumerate((policy, OneByOne(policy.game, runner))):
        played = play(each, episodes, on_episode=lambda ended, i=i: on_episode(i * episodes + ended))  # type: ignore[arg-type, misc]
        rows.append(summary(played))
    mean, deviation = "evaluation/return_mean", "evaluation/return_std"
    return ReturnsOfBoth(episodes, rows[0][mean], rows[1][mean], rows[0][deviation], rows[1][deviation])
