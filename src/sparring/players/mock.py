"""Mock players: many players of a Gymnasium game in one process, for demonstrations, tests and load.

They step in lock-step, so that one call of the policy serves all of them, and record through the client like any game.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparring.client.bot import BotPolicy, Offer
from sparring.client.client import Client, Player
from sparring.client.convert import to_feeds
from sparring.client.recorder import Acted
from sparring.client.transports.base import Unavailable
from sparring.client.uploader import UploadStats
from sparring.errors import InputError
from sparring.games import Dict, Discrete, Game, Space, catalog
from sparring.games.spec import Array
from sparring.networks.random_play import RandomPlay

__all__ = ["MockEpisode", "PlaySummary", "play"]

RECENT = 20  # episodes in the mean that a summary shows
LOOK_EVERY = 32  # rounds between looks whether the server keeps up
UNSENT = 1 << 20  # bytes that may wait before players slow down


@dataclass(frozen=True, slots=True)
class MockEpisode:
    """One finished episode of one player."""

    player: str
    ret: float  # sum of rewards
    steps: int
    model: str
    version: int


@dataclass(frozen=True, slots=True)
class PlaySummary:
    episodes: int
    steps: int
    seconds: float
    return_mean: float | None  # over the newest RECENT episodes
    version: int  # the newest that played
    stats: UploadStats

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


class _Seat:
    """A player, its environment and where it is in its episode."""

    def __init__(self, player: Player, env: Any, seed: int | None, offer: Offer) -> None:
        self.player, self.env, self.offer, self.policy = player, env, offer, offer.policy
        self.played = 0  # episodes
        self._shape = None if isinstance(player.game.action, Discrete) else env.action_space.shape
        self.obs, _ = env.reset(seed=seed)
        self.ret, self.steps = 0.0, 0

    def step(self, action: Any, acted: Acted) -> bool:
        """Whether the episode is over."""
        chosen = int(action) if self._shape is None else action.reshape(self._shape)
        obs, reward, terminated, truncated, _ = self.env.step(chosen)
        self.player.record(self.obs, action, reward, terminated, truncated, obs, acted=acted)
        self.obs = obs
        self.ret += float(reward)
        self.steps += 1
        return bool(terminated or truncated)

    def next_episode(self, policy: BotPolicy) -> MockEpisode:
        done = MockEpisode(self.player.name, self.ret, self.steps, self.policy.model, self.policy.version)
        self.policy = policy
        self.obs, _ = self.env.reset()
        self.ret, self.steps = 0.0, 0
        self.played += 1
        return done


def play(
    game: Game | str,
    server: str,
    *,
    players: int = 4,
    episodes: int | None = None,
    explore: bool = True,
    model: str | None = None,
    version: int | None = None,
    alias: str | None = None,
    stop: threading.Event | None = None,
    seed: int | None = None,
    rate: float | None = None,
    prefix: str = "player",
    refresh: float = 1.0,
    directory: str | Path | None = None,
    on_episode: Callable[[MockEpisode], None] | None = None,
) -> PlaySummary:
    """Plays until every player has finished `episodes`, or `stop` is set. `game`: a Gymnasium id, or a Game with one.

    Registers the game. Players use what they get, or the model, version or alias that is asked for, each from its next
    episode on; an unknown one is an InputError. They are named `<prefix>-001`, ….
    When the server is slower than they are, or away, they wait for it; `rate` is the most steps per second of each.
    `seed` fixes games and exploration, not when a new version arrives.
    """
    if players < 1:
        raise InputError(f"players must be at least 1, got {players}")
    if rate is not None and not rate > 0:
        raise InputError(f"rate must be above 0 steps per second, got {rate:g}")
    spec = game if isinstance(game, Game) else catalog.load(game)
    if spec.env is None:
        raise InputError(f"the game {spec.name!r} is declared only, it has no Gymnasium id: nobody here can play it")
    stop = stop or threading.Event()
    with Client(server, spec, prefix, refresh=refresh, directory=directory) as client:
        if client.away:
            raise Unavailable(f"{server} does not answer: start it with `sparring up`, or name another with --server")
        seats = _seats(client, spec, players, prefix, seed, lambda player: player.offer(model, version, alias))
        try:
            table = _Table(client, spec, seats, explore, np.random.default_rng(seed), on_episode)
            table.play(episodes, rate, stop)
        finally:
            for seat in seats:
                seat.env.close()
                seat.player.cut()  # unfinished, not truncated: an end that the game did not have would look like a loss
        client.flush(timeout=5.0)
        return table.summary(client.stats)


def _seats(
    client: Client, game: Game, count: int, prefix: str, seed: int | None, offer: Callable[[Player], Offer]
) -> list[_Seat]:
    players = [client.player(f"{prefix}-{number:03d}") for number in range(1, count + 1)]
    offers = [offer(player) for player in players]  # before environments, which somebody has to close
    return [
        _Seat(
            player,
            catalog.make(game, disable_env_checker=True),
            None if seed is None else seed + number,
            offered,
        )
        for number, (player, offered) in enumerate(zip(players, offers, strict=True), start=1)
    ]


class _Table:
    """The players who play together, and what came of it."""

    def __init__(
        self,
        client: Client,
        game: Game,
        seats: list[_Seat],
        explore: bool,
        rng: np.random.Generator,
        on_episode: Callable[[MockEpisode], None] | None,
    ) -> None:
        self._client, self._game, self._seats = client, game, seats
        self._explore, self._rng, self._on_episode = explore, rng, on_episode
        self._episodes, self._steps = 0, 0
        self._version = max(seat.policy.version for seat in seats)
        self._returns: deque[float] = deque(maxlen=RECENT)
        self._began = time.monotonic()
        self._seconds = 0.0

    def play(self, episodes: int | None, rate: float | None, stop: threading.Event) -> None:
        active, rounds, due = list(self._seats), 0, time.monotonic()
        while active and not stop.is_set():
            ended = [seat for group in _by_policy(active) for seat in self._round(group)]
            for seat in ended:
                self._finish(seat)
            if ended and episodes is not None:
                active = [seat for seat in active if seat.played < episodes]
            rounds += 1
            if rate is not None:
                due = max(due + 1 / rate, time.monotonic())  # late: no hurry afterwards
                stop.wait(due - time.monotonic())
            if rounds % LOOK_EVERY == 0:
                while not (self._client.wait_for_room(UNSENT, 0.2) or stop.is_set()):
                    continue
        self._seconds = time.monotonic() - self._began

    def summary(self, stats: UploadStats) -> PlaySummary:
        mean = sum(self._returns) / len(self._returns) if self._returns else None
        return PlaySummary(self._episodes, self._steps, self._seconds, mean, self._version, stats)

    def _round(self, group: list[_Seat]) -> list[_Seat]:
        """One step of every player in the group, all of the same version; those whose episode ended."""
        policy = group[0].policy
        noise = None
        if self._explore or isinstance(policy, RandomPlay):
            noise = policy.noise(self._rng, len(group))
        actions, log_prob = policy.run(_feed(self._game.observation, [seat.obs for seat in group]), noise)
        drawn = [None] * len(group) if log_prob is None else log_prob.tolist()
        self._steps += len(group)
        return [
            seat
            for seat, action, one in zip(group, actions, drawn, strict=True)
            if seat.step(action, Acted(policy.model, policy.version, one))
        ]

    def _finish(self, seat: _Seat) -> None:
        done = seat.next_episode(seat.offer.choose(self._rng))
        self._episodes += 1
        self._returns.append(done.ret)
        self._version = max(self._version, done.version)
        if self._on_episode is not None:
            self._on_episode(done)


def _by_policy(seats: list[_Seat]) -> list[list[_Seat]]:
    """Mostly one group; two or three for a moment after a new version."""
    groups: dict[int, list[_Seat]] = {}
    for seat in seats:
        groups.setdefault(id(seat.policy), []).append(seat)
    return list(groups.values())


def _feed(space: Space, rows: list[Any]) -> dict[str, Array]:
    if isinstance(space, Dict):
        return to_feeds(space, {name: np.stack([row[name] for row in rows]) for name in space.fields})
    return to_feeds(space, np.stack(rows))
