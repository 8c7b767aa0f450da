"""What an Atari game may be set to. Light: `games/atari.py` needs ale-py, this does not."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sparring.fields import Fraction, convert

__all__ = ["ACTIONS", "AtariSettings"]

# ale-py's names, in its order.
ACTIONS = (
    *("NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "DOWNRIGHT", "DOWNLEFT"),
    *("UPFIRE", "RIGHTFIRE", "LEFTFIRE", "DOWNFIRE", "UPRIGHTFIRE", "UPLEFTFIRE", "DOWNRIGHTFIRE", "DOWNLEFTFIRE"),
)


class AtariSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of Atari games.

    :param pixels: Height and width of what the policy sees; 84, 168 and 252 are usual.
    :param frames: How many of the last pictures it sees at once.
    :param frame_skip: Frames for each action; the policy sees the last one.
    :param noop_starts: An episode begins with up to so many frames without an action.
    :param fire_reset: Press FIRE when an episode begins, in games that wait for it.
    :param sticky_actions: How likely the last action is repeated instead of the new one. None: what the id says.
    :param reward_clipping: Learn from the sign of rewards. Returns that are reported, and evaluations, are the game's.
    :param actions: Names of the actions that there are, such as NOOP, RIGHT and LEFT. None: those the game knows.
    """

    pixels: Annotated[int, msgspec.Meta(ge=21, le=252)] = 84
    frames: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
    frame_skip: Annotated[int, msgspec.Meta(ge=1, le=60)] = 4
    noop_starts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 30
    fire_reset: bool = True
    sticky_actions: Fraction | None = None
    reward_clipping: bool = False
    actions: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.actions is None:
            return
        if unknown := [name for name in self.actions if name not in ACTIONS]:
            raise ValueError(f"actions has {unknown[0]!r}: there are {', '.join(ACTIONS)}")
        if not self.actions or len(set(self.actions)) < len(self.actions):
            raise ValueError("actions names each action once, and at least one")

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> "AtariSettings":
        """:raises InputError: a setting is unknown, or its value does not fit."""
        return convert(settings, cls, "game.")
