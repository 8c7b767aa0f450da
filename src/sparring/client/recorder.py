"""One player's steps → fragments. `record` only copies bytes into lists under a lock that nobody holds for long;
building, compressing and sending happen in the uploader's thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import numpy as np

from sparring.client.convert import to_bytes
from sparring.errors import InputError, SparringError
from sparring.experience import Fragment, new_id
from sparring.experience.fragment import REWARD
from sparring.experience.validate import MAX_NAME, MAX_STEPS
from sparring.games import Game

__all__ = ["LAST_ACT", "Acted", "PendingFragment", "Recorder"]

MAX_FRAGMENT_BYTES = 1 << 20  # of observations: images are cut more often, so that a request stays small


class Acted(NamedTuple):
    """Who chose an action: a model's version, and the log-probability with which it did, if it drew one.

    :param model: The model's name.
    :param version: Its version.
    :param log_prob: Of the action. None: it was not drawn, or nobody knows.
    """

    model: str
    version: int
    log_prob: float | None = None


By = tuple[tuple[str, int] | None, bool]  # the model and version that acted, and whether it drew its actions
LAST_ACT = Acted("", -1)  # stands for: the player's bot if the action is what it last said, else a human


@dataclass(frozen=True, slots=True)
class PendingFragment:
    """A fragment's parts, not yet joined: joining costs time that the game's loop need not spend."""

    id: str
    game: Game
    player: str
    episode: str
    start: int
    time: float
    obs: list[bytes]
    action: list[bytes]
    reward: list[float]
    log_prob: list[float] | None
    by: tuple[str, int] | None
    terminated: bool
    truncated: bool

    @property
    def size(self) -> int:
        """Bytes of memory, about: small observations are outweighed by Python's own share of each value."""
        return len(self.obs) * (len(self.obs[0]) + 41) + len(self.action) * (len(self.action[0]) + 105) + 800

    def fragment(self) -> Fragment:
        model, version = self.by or (None, None)
        return Fragment(
            id=self.id,
            game=self.game.name,
            schema=self.game.schema,
            player=self.player,
            episode=self.episode,
            start=self.start,
            time=self.time,
            steps=len(self.action),
            obs=b"".join(self.obs),
            action=b"".join(self.action),
            reward=np.array(self.reward, REWARD).tobytes(),
            terminated=self.terminated,
            truncated=self.truncated,
            log_prob=None if self.log_prob is None else np.array(self.log_prob, REWARD).tobytes(),
            model=model,
            version=version,
        )


class Recorder:
    """`offer` takes fragments. A recorder belongs to one thread of the game; the uploader's thread calls only `cut`."""

    def __init__(
        self, game: Game, player: str, offer: Callable[[PendingFragment], None], fragment_steps: int = 100
    ) -> None:
        if not (0 < len(player) <= MAX_NAME and player.isprintable()):
            raise InputError(f"the player's name must be 1..{MAX_NAME} printable characters, got {player!r}")
        if not 1 <= fragment_steps <= MAX_STEPS:
            raise InputError(f"fragment_steps must be 1..{MAX_STEPS}, got {fragment_steps}")
        self.name = player
        self.game = game
        self.closed = False
        self.last_act: tuple[bytes, Acted] | None = None  # the action as bytes; set by this player's bots
        self._offer = offer
        self._max_steps = min(fragment_steps, max(1, MAX_FRAGMENT_BYTES // game.observation.element.itemsize))
        self._obs_bytes = to_bytes(game.observation, "observation")
        self._action_bytes = to_bytes(game.action, "action")
        self._lock = threading.Lock()
        self._episode = ""
        self._step = 0  # of the episode: the number of the next one
        self._by: By = (None, False)
        self._time = self._since = 0.0
        self._obs: list[bytes] = []
        self._action: list[bytes] = []
        self._reward: list[float] = []
        self._log_prob: list[float] = []

    @property
    def episode(self) -> str:
        """The id of the episode, or of the last one."""
        return self._episode

    @property
    def in_episode(self) -> bool:
        """Whether an episode has begun and not ended."""
        return self._step > 0

    def record(
        self,
        obs: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        next_obs: Any,
        *,
        acted: Acted | None = LAST_ACT,
    ) -> None:
        """Keeps one step.

        :param obs: What the player saw.
        :param action: What they did.
        :param reward: What it was worth.
        :param terminated: Whether the episode ended with this step, by the game's rules.
        :param truncated: Whether it was cut short, such as by a time limit.
        :param next_obs: What the player saw then.
        :param acted: Who acted: an `Acted` for a policy that you ran yourself, None for a human (who, say, followed
            the bot's hint). Left out, the step is the bot's when `action` is what this player's bot last said, else a
            human's.
        :raises InputError: a value does not fit the game's spaces.
        """
        if self.closed:
            raise SparringError(f"the client of player {self.name!r} is closed: it records no more steps")
        before, chosen, after = self._obs_bytes(obs), self._action_bytes(action), self._obs_bytes(next_obs)
        gain = _number(reward)
        by, log_prob = self._actor(acted, chosen)
        with self._lock:
            if self._action and (
                len(self._action) >= self._max_steps  # not before: the newest step waits, its reward may grow
                or by != self._by  # a fragment has one actor, …
                or before != self._obs[-1]  # … and each observation is what the action before it led to
            ):
                self._cut()
            if not self._action:
                self._open(before, by)
            self._obs.append(after)
            self._action.append(chosen)
            self._reward.append(gain)
            if log_prob is not None:
                self._log_prob.append(log_prob)
            self._time = time.time()
            self._step += 1
            if terminated or truncated:
                self._cut(bool(terminated), bool(truncated))
                self._step = 0

    def _actor(self, acted: Acted | None, chosen: bytes) -> tuple[By, float | None]:
        """Who acted, and the action's log-probability if it has one."""
        if acted is LAST_ACT:
            last = self.last_act
            acted = last[1] if last is not None and last[0] == chosen else None
        self.last_act = None
        if acted is None:
            return (None, False), None
        try:
            log_prob = None if acted.log_prob is None else float(acted.log_prob)
            return ((acted.model, acted.version), log_prob is not None), log_prob
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"acted: expected Acted(model, version, log_prob), got {acted!r}") from error

    def end_episode(self, reward: float | None = None, *, terminated: bool | None = None) -> None:
        """Ends the episode without another step: the player left, the game was reset, or its result came late.

        :param reward: What the result is worth: added to the last step's reward. The newest step of an open episode
            waits for it, and is sent when the next one is recorded, or the episode ends.
        :param terminated: Whether the episode ended by the game's rules. None: with a reward it did; without one it
            was cut short (truncated).
        :raises InputError: there is no step that the reward could belong to.
        """
        gain = 0.0 if reward is None else _number(reward)
        ended = reward is not None if terminated is None else bool(terminated)
        with self._lock:
            if self._action:
                self._reward[-1] += gain
                self._cut(ended, not ended)
            elif reward is not None:
                raise InputError(
                    f"end_episode(reward={reward!r}): "
                    + (
                        "the last step is sent already: call flush() after the episode's end, not before"
                        if self._step
                        else "no episode is open. Record its last step with terminated=False; end_episode ends it then"
                    )
                )
            self._step = 0

    def cut(self, older_than: float | None = None, *, but_newest: bool = False) -> None:
        """Hands over the steps so far, if the first of them is older than this many seconds; the episode goes on.
        `but_newest`: the last of them stays, because `end_episode` may add to its reward.

        :param older_than: Seconds. None: in any case.
        :param but_newest: Keep the last step back.
        """
        with self._lock:
            count = len(self._action) - but_newest
            if count > 0 and (older_than is None or time.monotonic() - self._since >= older_than):
                self._cut(newest=but_newest)

    def _open(self, first: bytes, by: tuple[tuple[str, int] | None, bool]) -> None:
        self._by = _plain(by[0]), by[1]
        if self._step == 0:
            self._episode = new_id()
        self._obs.append(first)
        self._since = time.monotonic()

    def _cut(self, terminated: bool = False, truncated: bool = False, newest: bool = False) -> None:
        """`newest`: that step stays, as the first of the next fragment."""
        by, drawn = self._by
        obs, action, reward, log_prob = self._obs, self._action, self._reward, self._log_prob
        start = self._step - len(action)
        self._empty()
        if newest:
            self._obs, self._action, self._reward, self._log_prob = obs[-2:], action[-1:], reward[-1:], log_prob[-1:]
            self._since = time.monotonic()
            del obs[-1:], action[-1:], reward[-1:], log_prob[-1:]
        self._offer(
            PendingFragment(
                id=new_id(self._time),
                game=self.game,
                player=self.name,
                episode=self._episode,
                start=start,
                time=self._time,
                obs=obs,
                action=action,
                reward=reward,
                log_prob=log_prob if drawn else None,
                by=by,
                terminated=terminated,
                truncated=truncated,
            )
        )

    def _empty(self) -> None:
        self._obs, self._action, self._reward, self._log_prob = [], [], [], []


def _number(reward: float) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise InputError(f"reward: expected a number, got {reward!r}") from error


def _plain(by: tuple[str, int] | None) -> tuple[str, int] | None:
    """With a plain number: NumPy's does not go into a request, and by then nobody knows whose it was."""
    if by is None:
        return None
    try:
        by[0].encode()
        version = index(by[1])
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"acted: expected a model's name and a whole number, got {by}: {error}") from error
    if not 0 <= version < 1 << 53:
        raise InputError(f"acted: {version} is no version of a model")
    return by[0], version
