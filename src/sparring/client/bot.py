"""Bots: published policies loaded to act. The file holds the whole policy, so a bot needs ONNX Runtime and nothing of
the training stack; ONNX Runtime itself is imported when the first file is loaded."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparring.client.convert import to_action, to_feed, to_feeds
from sparring.client.recorder import Acted, Recorder
from sparring.errors import InputError
from sparring.export.onnx_check import check, require_noise
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.random_play import RandomPlay

__all__ = ["Actions", "Bot", "BotPolicy", "Draw", "Fixed", "Loaded", "Offer"]

NOISE_BLOCK = 1024  # numbers drawn at once: one costs about as much as a few hundred
MAX_NOISE = 1 << 20


class Actions(NamedTuple):
    """A batch of actions: a column, the log-probability of each where they were drawn, and who chose them.

    :param action: The actions, a row for each observation.
    :param log_prob: Of each action, where they were drawn; else None.
    :param model: The model that chose, or `random`.
    :param version: Its version.
    """

    action: Array
    log_prob: Array | None
    model: str
    version: int


class BotPolicy(Protocol):
    """One version, ready to act. Stateless: the noise is the caller's."""

    model: str
    version: int

    def noise(self, rng: np.random.Generator, rows: int) -> Array: ...

    def run(self, feed: dict[str, Array], noise: Array | None) -> tuple[Array, Array | None]:
        """Columns of actions and, with noise (exploring), of log-probabilities."""


class Loaded:
    """A policy.onnx. Raises InputError when the bytes are not a policy of this game."""

    def __init__(self, data: bytes, game: Game, model: str, version: int) -> None:
        self.model, self.version = model, version
        check(data)
        self._session, broken = _session(data)
        metadata = self._session.get_modelmeta().custom_metadata_map
        if metadata.get("sparring.schema") != game.schema:
            found = metadata.get("sparring.schema", "none")
            raise InputError(f"the policy was made for schema {found}, the game {game.name!r} has {game.schema}")
        shapes = [value.shape for value in self._session.get_overridable_initializers() if value.name == "noise"]
        outputs = {value.name for value in self._session.get_outputs()}
        if len(shapes) != 1 or len(shapes[0]) != 2 or not {*GREEDY, *EXPLORING} <= outputs:
            raise InputError("the file is not a Sparring policy: it lacks noise, action, sampled or log_prob")
        self._noise_size = shapes[0][1]
        if not isinstance(self._noise_size, int) or not 0 < self._noise_size <= MAX_NOISE:
            raise InputError(f"the policy asks for noise of size {self._noise_size}, at most {MAX_NOISE} is sensible")
        self._uniform = metadata.get("sparring.noise") != "normal"
        self._has_density = metadata.get("sparring.log_prob") != "none"
        try:
            self._try(game)
        except broken as error:
            raise InputError(f"the policy does not run: {error}") from error

    def noise(self, rng: np.random.Generator, rows: int) -> Array:
        draw = rng.random if self._uniform else rng.standard_normal
        return draw((rows, self._noise_size), np.float32)

    def run(self, feed: dict[str, Array], noise: Array | None) -> tuple[Array, Array | None]:
        if noise is None:
            return self._session.run(GREEDY, feed)[0], None
        feed["noise"] = noise
        action, log_prob = self._session.run(EXPLORING, feed)
        return action, log_prob if self._has_density else None

    def _try(self, game: Game) -> None:
        """Plays one observation, so that a policy that cannot play never replaces one that can; also warms up."""
        obs = np.zeros(2, game.observation.element)
        for noise in (None, self.noise(np.random.default_rng(0), 2)):
            action, _ = self.run(to_feeds(game.observation, obs), noise)
            expected = (game.action.element.base, (2, *game.action.element.shape))
            if (action.dtype, action.shape) != expected:
                raise InputError(f"the policy's actions are {action.dtype}{action.shape}, the game's {expected}")


class Offer(Protocol):
    """What players get: a version, and perhaps a candidate, which plays a share of the episodes."""

    @property
    def policy(self) -> BotPolicy: ...

    @property
    def candidate(self) -> BotPolicy | None: ...

    @property
    def share(self) -> float: ...

    def choose(self, rng: np.random.Generator) -> BotPolicy:
        """For one episode."""


class Fixed:
    """Offers one version for ever."""

    candidate, share = None, 0.0

    def __init__(self, policy: BotPolicy) -> None:
        self.policy = policy

    def choose(self, rng: np.random.Generator) -> BotPolicy:
        return self.policy


class Draw:
    """One player's version for each episode: mostly the one that all get, sometimes the candidate. Each player meets
    both, so that the two are compared by the same people."""

    def __init__(self, offer: Offer, player: Recorder, seed: int | None = None) -> None:
        self._offer, self._player = offer, player
        self._rng = np.random.default_rng(seed)
        self._after = player.episode  # the episode before the one that was drawn for
        self._drawn = offer.choose(self._rng)

    def __call__(self) -> BotPolicy:
        offer, player = self._offer, self._player
        if not player.in_episode and (
            player.episode != self._after or (self._drawn is not offer.policy and self._drawn is not offer.candidate)
        ):
            self._after, self._drawn = player.episode, offer.choose(self._rng)
        return self._drawn

    def stable(self) -> BotPolicy:
        """The version that all get."""
        return self._offer.policy


class Bot:
    """Acts for one player; `Client.bot` makes one. It moves to a newer version between episodes, never within one: an
    episode has ended when the player's `record` says so.

    :param game: The game that it plays.
    :param player: Who records its play.
    :param newest: Gives the version to use.
    :param seed: Of exploration.
    """

    def __init__(self, game: Game, player: Recorder, newest: Callable[[], BotPolicy], seed: int | None = None) -> None:
        self._space = game.observation
        self._feed, self._action = to_feed(game.observation), to_action(game.action)
        self._player, self._newest = player, newest
        self._for_batches = newest.stable if isinstance(newest, Draw) else newest
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._use(newest())

    @property
    def model(self) -> str:
        """Whose policy acts; "random" until one is published."""
        return self._policy.model

    @property
    def version(self) -> int:
        """Of the model; 0 until one is published."""
        return self._policy.version

    def act(self, obs: Any, explore: bool = False) -> Any:
        """One observation as the game gives it → an action as the game takes it.

        :param obs: The observation.
        :param explore: Act as while learning, not greedily.
        :raises InputError: the observation does not fit the game.
        """
        feed = self._feed(obs)
        with self._lock:
            newest = self._newest()
            if newest is not self._policy and not self._player.in_episode:
                self._use(newest)
            policy, noise = self._policy, self._draw() if explore or self._always_random else None
        column, log_prob = policy.run(feed, noise)
        drawn = None if log_prob is None else float(log_prob[0])
        self._player.last_act = column.tobytes(), Acted(policy.model, policy.version, drawn)
        return self._action(column)

    def act_batch(self, obs: Any, explore: bool = False) -> Actions:
        """A column of observations (for a Dict: a mapping of columns) → a column of actions, by what all players get.
        Tell `record` who acted: `acted=Acted(actions.model, actions.version, actions.log_prob[i])`.

        :param obs: The observations. For a Dict: a mapping of columns.
        :param explore: Try things, as training needs it; else the best that is known.
        """
        policy = self._for_batches()
        feed = to_feeds(self._space, obs)
        rows = len(next(iter(feed.values())))
        noise = policy.noise(self._rng, rows) if explore or isinstance(policy, RandomPlay) else None
        return Actions(*policy.run(feed, noise), policy.model, policy.version)

    def _use(self, policy: BotPolicy) -> None:
        self._policy = policy
        self._always_random = isinstance(policy, RandomPlay)
        self._noise, self._next = policy.noise(self._rng, 1), 0

    def _draw(self) -> Array:
        if self._next == len(self._noise):
            rows = max(1, NOISE_BLOCK // self._noise.shape[1])
            self._noise, self._next = self._policy.noise(self._rng, rows), 0
        self._next += 1
        return self._noise[self._next - 1 : self._next]


GREEDY, EXPLORING = ["action"], ["sampled", "log_prob"]


def _session(data: bytes) -> tuple[Any, tuple[type[Exception], ...]]:
    """The session, and what ONNX Runtime raises (its errors share no base class)."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds: list[type[Exception]] = [
        kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    broken: tuple[type[Exception], ...] = (*kinds, RuntimeError, ValueError)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    try:
        # It warns that `noise` has a default, which is meant, and can only hide all of its warnings. So it says them
        # about the file without that default. (To play with that one would cost a tenth of each greedy act.)
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
        onnxruntime.InferenceSession(require_noise(data), options, providers=["CPUExecutionProvider"])
        options.graph_optimization_level = levels.ORT_ENABLE_ALL
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]), broken
    except broken as error:
        raise InputError(f"ONNX Runtime cannot load the policy: {error}") from error
