"""A fragment: consecutive steps of one episode by one player, as columns. The unit of transport, storage and
deduplication. Columns are raw little-endian buffers whose types the game's spaces give (see `games.spec`)."""

import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sparring.games.spec import Array, Game

__all__ = ["Columns", "Fragment", "new_id"]

REWARD = np.dtype("<f4")


class Fragment(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Readers skip fields that they do not know: those are a newer version's, and optional (docs/api.md)."""

    id: str  # made by the client once; uploading twice stores once
    game: str
    schema: str
    player: str
    episode: str
    start: int  # number of the first step within the episode
    time: float  # the client's clock at the last step, seconds since 1970
    steps: int  # T
    obs: bytes  # T + 1 elements: the last one is what the last action led to
    action: bytes  # T elements
    reward: bytes  # T float32
    terminated: bool = False  # the last step ended the episode by the game's rules
    truncated: bool = False  # the last step ended the episode otherwise (time limit, player left)
    log_prob: bytes | None = None  # T float32: log-probability of each action under the policy that acted
    model: str | None = None  # who acted: a published model …
    version: int | None = None  # … and its version, or none: a human

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    def columns(self, game: Game) -> "Columns":
        """Views on the buffers, no copy. The fragment must have passed `validate.check`."""
        return Columns(
            obs=np.frombuffer(self.obs, game.observation.element),
            action=np.frombuffer(self.action, game.action.element),
            reward=np.frombuffer(self.reward, REWARD),
            log_prob=None if self.log_prob is None else np.frombuffer(self.log_prob, REWARD),
        )


@dataclass(frozen=True, slots=True)
class Columns:
    obs: Array
    action: Array
    reward: Array
    log_prob: Array | None = None


def new_id(now: float | None = None) -> str:
    """UUID version 7 in hex: time-ordered, so an index of ids grows at its end instead of everywhere."""
    ms = int((time.time() if now is None else now) * 1000)
    rand = bytearray(os.urandom(10))
    rand[0] = 0x70 | rand[0] & 0x0F
    rand[2] = 0x80 | rand[2] & 0x3F
    return ms.to_bytes(6, "big").hex() + rand.hex()


def pack(game: Game, columns: Columns, **fields: Any) -> Fragment:
    """A fragment from arrays of the game's element types; `fields` are the rest of its attributes."""
    return Fragment(
        game=game.name,
        schema=game.schema,
        steps=len(columns.reward),
        obs=columns.obs.tobytes(),
        action=columns.action.tobytes(),
        reward=columns.reward.astype(REWARD, copy=False).tobytes(),
        log_prob=None if columns.log_prob is None else columns.log_prob.astype(REWARD, copy=False).tobytes(),
        **fields,
    )
