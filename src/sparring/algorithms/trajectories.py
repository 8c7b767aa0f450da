"""Trajectories: consecutive steps in segments of one fixed shape, so that an update is compiled once, whatever the
episodes' lengths. Made of fragments from the store, or of rows that actors filled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparring.algorithms.replay import END, STEP, TERMINAL, encode_action, encode_obs
from sparring.errors import InputError
from sparring.experience.fragment import Columns
from sparring.games import Game
from sparring.games.spec import Array

__all__ = ["Trajectories", "from_fragments", "from_rows"]

LENGTH = 256  # steps per segment: longer ones cut fewer fragments, shorter ones are quicker to go through
SPARE = 1.25  # room for the last observations of fragments, when they have 4 steps or more on average


class Trajectories(NamedTuple):
    """Segments of play: (segments, T, …), observations (segments, T + 1, …): the one after a step is what the step led
    to. Where `mask` is false there is no step: behind the end of an episode, or of the data. `obs[:, :-1][mask]` is
    what a normaliser should see."""

    obs: Any
    action: Any
    reward: Any
    terminated: Any  # the next state is terminal: its value is 0
    ended: Any  # terminated, or cut (time limit, end of segment): nothing flows back across it
    log_prob: Any  # of the action, under the policy that acted
    mask: Any


def from_fragments(
    game: Game, fragments: Sequence[Columns], terminated: Sequence[bool], *, steps: int, length: int = LENGTH
) -> Trajectories:
    """All steps of these fragments, one fragment behind the other. The shape depends on `steps`, how many are expected,
    and doubles only where they do not fit.

    A fragment without log-probabilities (a person's, or a head's without a density) does not say how likely it was and
    is left out.
    """
    known = [(f, bool(end)) for f, end in zip(fragments, terminated, strict=True) if f.log_prob is not None]
    if not known:
        raise InputError("none of these fragments has log-probabilities: only what exploring bots played can be used")
    ends = np.cumsum([len(f.reward) + 1 for f, _ in known]) - 1
    kind = np.full(int(ends[-1]) + 1, STEP, np.uint8)
    kind[ends[np.array([end for _, end in known])] - 1] = TERMINAL
    kind[ends] = END
    is_step = kind != END

    def column(name: str) -> Array:
        """With an empty row where a fragment ends."""
        values = np.concatenate([getattr(f, name) for f, _ in known])
        out = np.zeros((len(kind), *values.shape[1:]), values.dtype)
        out[is_step] = values
        return out

    obs = np.concatenate([f.obs for f, _ in known])
    rows = (obs, column("action"), column("reward"), kind, column("log_prob"))
    at = _segments(kind, length, int(np.ceil(SPARE * steps / length)))
    return from_rows(game, *(array[at] for array in rows))


def from_rows(game: Game, obs: Array, action: Array, reward: Array, kind: Array, log_prob: Array) -> Trajectories:
    """From segments of T + 1 raw rows, (segments, T + 1, …). Rows are as the replay window has them (see `replay`), so
    several episodes may follow each other in a segment. The last row only shows where its segment's play led to. Arrays
    may be views of these: an update must be over before their memory is used again."""
    segments, rows = kind.shape

    def flat(column: Array) -> Array:
        return column.reshape(segments * rows, *column.shape[2:])

    def segmented(column: Array) -> Array:
        return column.reshape(segments, rows, *column.shape[1:])

    mask = kind[:, :-1] != END
    ended = mask & (kind[:, 1:] == END)
    ended[:, -1] = mask[:, -1]
    return Trajectories(
        obs=segmented(encode_obs(game, flat(obs))),
        action=segmented(encode_action(game, flat(action)))[:, :-1],
        reward=reward[:, :-1].astype(np.float32, copy=False),
        terminated=kind[:, :-1] == TERMINAL,
        ended=ended,
        log_prob=log_prob[:, :-1].astype(np.float32, copy=False),
        mask=mask,
    )


def _segments(kind: Array, length: int, least: int) -> Array:
    """Which rows make a segment, (segments, length + 1); behind the data always its last, an END. A fragment that a
    segment cuts continues in the next with the observation it was cut at."""
    total, starts, start = len(kind), [], 0
    while start < total - 1:
        starts.append(start)
        last = start + length
        start = last + (last < total and kind[last] == END)
    segments = least
    while segments < len(starts):
        segments *= 2
    starts += [total] * (segments - len(starts))
    return np.minimum(np.array(starts)[:, None] + np.arange(length + 1), total - 1)
