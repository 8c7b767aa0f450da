"""A/B tests: several models of a game, each for a share of its players. Light: clients read them, too.

    games/<game>/ab.json   the test that runs, and those that have ended

Who gets which model follows from the test's id and the player's name alone. So everybody who asks finds the same, and a
player keeps it for as long as the test runs.
"""

import hashlib

import msgspec

from sparring.games.spec import NAME

__all__ = ["AbArm", "AbResults", "AbTest", "AbTests", "Returns"]


class Returns(msgspec.Struct, frozen=True):
    """Of finished episodes: their mean return, and between what it lies. None: too few are known."""

    episodes: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    players: int | None = None  # of people: the mean is of their means, each counts once
    difference: float | None = None  # to the first model's mean …
    difference_low: float | None = None  # … and between what it lies
    difference_high: float | None = None


class AbArm(msgspec.Struct, frozen=True):
    """A model of a test, and how it did. Bots' episodes are those that the model played, people's those that people
    played who get this model."""

    model: str
    share: float
    bots: Returns = Returns()
    people: Returns = Returns()


class AbResults(msgspec.Struct, frozen=True):
    """How a test stands. The intervals hold at all times at once, however often one looks."""

    arms: list[AbArm]  # the first one is what the others are compared with
    confidence: float
    verdict: str  # a sentence for people
    left_out: int = 0  # episodes of a model by players who get another one: begun before the test, or asked for by name


class AbTest(msgspec.Struct, frozen=True):
    """Several models of a game, each for a share of the players."""

    id: str
    shares: dict[str, float]  # by model; their sum is 1
    started: float  # seconds since 1970
    by: str = ""
    reason: str = ""
    cursor: int = 0  # of the store: episodes after it count
    ended: float | None = None
    kept: str | None = None  # the model that all players got then
    results: AbResults | None = None  # when it ended

    def __post_init__(self) -> None:
        """Whoever reads a file relies on it: models are looked up by these names, and somebody gets one of them."""
        for model, share in self.shares.items():
            if not NAME.fullmatch(model) or not 0 <= share <= 1:
                raise ValueError(f"{model[:100]!r} with a share of {share:g} is no part of an A/B test")
        if not self.shares or not 0 <= self.cursor < 1 << 63:
            raise ValueError("an A/B test has shares, and a cursor of the store")

    def model(self, player: str) -> str:
        """The model that a player gets. Take the sha256 of `id`, a line feed and the player's name. Its first 8 bytes
        are a fraction of 2^64, which falls into one of the shares. These lie side by side in the order of the models'
        names."""
        digest = hashlib.sha256(f"{self.id}\n{player}".encode(errors="replace")).digest()
        point, end, models = int.from_bytes(digest[:8], "big") / 2**64, 0.0, sorted(self.shares)
        for model in models:
            end += self.shares[model]
            if point < end:
                return model
        return models[-1]  # rounding


class AbTests(msgspec.Struct, frozen=True):
    """`ab.json`."""

    running: AbTest | None = None
    ended: list[AbTest] = []  # the newest first


msgspec.json.Decoder(AbTests)  # now, see games.spec: threads must not be the first
