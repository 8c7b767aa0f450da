"""A game's profile: what people decide about it besides its spaces. It lies in the stored declaration, under a key that
readers of before skip, so no table knows of it."""

import logging
from typing import Annotated, Any

import msgspec

from sparring.fields import Fraction, NonNegativeFloat, PositiveInt
from sparring.games import Game

__all__ = [
    "MAX_PACE",
    "GameSettings",
    "Origin",
    "Profile",
    "PromotionRule",
    "Revision",
    "read_profile",
    "write_declaration",
]

log = logging.getLogger(__name__)
KEY = "profile"
MAX_PACE = 300.0  # seconds between uploads that a client can be asked for


class PromotionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a new version becomes the one that players get. None: as the platform has it.

    :param publish_every: Seconds between promotions at least.
    :param candidate_every: Seconds between candidates of a declared game.
    :param canary: Share of play that a candidate gets.
    :param alpha: How often a difference may be found where there is none.
    :param least_episodes: Episodes of a candidate before anything is decided.
    :param most_episodes: Episodes after which a candidate that is not clearly better is given up.
    :param keep: How many of the newest versions, and of those promoted last, are kept.
    :param evaluate_every: Seconds between evaluations, of games that can be simulated.
    :param evaluation_episodes: Episodes of each evaluation.
    """

    publish_every: NonNegativeFloat | None = None
    candidate_every: NonNegativeFloat | None = None
    canary: Fraction | None = None
    alpha: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    least_episodes: PositiveInt | None = None
    most_episodes: PositiveInt | None = None
    keep: PositiveInt | None = None
    evaluate_every: NonNegativeFloat | None = None
    evaluation_episodes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None


class GameSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a game is learned. None: as the platform has it.

    :param algorithm: What learns: dqn, ppo, …
    :param hyperparameters: Of the algorithm, those that differ from its own.
    :param promotion: When a new version becomes the one that players get.
    :param pace: Seconds between a client's uploads at least. Clients of before do not know it.
    """

    algorithm: str | None = None
    hyperparameters: dict[str, Any] = {}
    promotion: PromotionRule = PromotionRule()
    pace: Annotated[float, msgspec.Meta(ge=0, le=MAX_PACE)] | None = None

    def over(self, defaults: "GameSettings") -> "GameSettings":
        """These, and the defaults where they say nothing. Hyperparameters are those of an algorithm: another one does
        not take over what was meant for the default one."""
        same = self.algorithm in (None, defaults.algorithm)
        promotion = {
            name: getattr(defaults.promotion, name) if value is None else value
            for name, value in msgspec.structs.asdict(self.promotion).items()
        }
        return GameSettings(
            defaults.algorithm if self.algorithm is None else self.algorithm,
            (defaults.hyperparameters if same else {}) | self.hyperparameters,
            PromotionRule(**promotion),
            defaults.pace if self.pace is None else self.pace,
        )


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which game a generation continues, and how its play is read."""

    game: str
    registration: str  # the store's mark of it: what is declared anew under that name is another game
    generation: int  # the number of the new one
    until: int  # its play up to this cursor is the new one's, too; what comes later is its own
    fragments: int = 0  # so many it was
    defaults: dict[str, Any] = {}  # of fields that it did not have
    changes: tuple[str, ...] = ()  # in words
    created: float = 0.0


class Profile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields that we do not know are a newer version's, and skipped."""

    settings: GameSettings = GameSettings()
    names: tuple[str, ...] = ()  # further ones, by which it is found as well; the last is what it is called now
    origin: Origin | None = None  # none: the first generation
    archived: bool = False  # in no list, and not trained; its play is kept, and its bots are served


class Revision(msgspec.Struct, frozen=True):
    """A game as it is registered, with its profile."""

    game: Game
    profile: Profile


class _Stored(msgspec.Struct, frozen=True):
    profile: Profile = Profile()


def read_profile(name: str, stored: str | bytes) -> Profile:
    """Of a stored declaration; the usual one where it has none, or none that this version can read."""
    try:
        return msgspec.json.decode(stored, type=_Stored).profile
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.error("the profile of the game %r cannot be read, its usual settings are used: %s", name, error)
        return Profile()


def write_declaration(revision: Revision) -> bytes:
    """What stores keep: `Game.from_json` and `read_profile` read it."""
    if revision.profile == Profile():
        return revision.game.to_json()
    text = msgspec.json.encode(msgspec.to_builtins(revision.game) | {KEY: revision.profile})
    return msgspec.json.format(text)


msgspec.json.Decoder(_Stored)  # now, see games.spec: threads must not be the first
