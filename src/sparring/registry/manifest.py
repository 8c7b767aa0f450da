"""What a published version is: its manifest. Light: the client reads manifests too."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sparring.games import Game

__all__ = [
    "CANDIDATE",
    "DEFAULT_MODEL",
    "RANDOM",
    "STABLE",
    "Alias",
    "DataSpan",
    "FileInfo",
    "Manifest",
    "Move",
    "Pointer",
    "Serving",
    "flat",
]

RANDOM = "random"  # the model that bots' play is recorded with, as its version 0, while there is no version
DEFAULT_MODEL = "bot"  # the model that a game's trainer publishes and its players ask for unless they name another
STABLE = "stable"  # what players get
CANDIDATE = "candidate"  # what a share of them try


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Hyperparameters as a manifest has them: plain values and flat lists; what is inside others has the path to it
    as its name, like `layers.0.units`. Clients of 0.1 read nothing deeper."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{path}{name}.")
        elif isinstance(value, list | tuple) and not all(type(one) in (str, int, float) for one in value):
            found |= flat({str(i): one for i, one in enumerate(value)}, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = [*value] if isinstance(value, tuple) else value
    return found


class FileInfo(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class DataSpan(msgspec.Struct, frozen=True):
    """Which experience a version has seen: the store's cursors and what lay between them."""

    first: int = 0
    last: int = 0
    fragments: int = 0
    steps: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """Everything about a version but its weights. Immutable once published."""

    game: Game
    model: str
    version: int  # 1, 2, …; a number may be missing, none is ever used twice
    created: float
    algorithm: str
    files: dict[str, FileInfo]
    metrics: dict[str, float] = {}
    config: dict[str, str | int | float | bool | list[str | int | float] | None] = {}  # see `flat`
    parent: int | None = None  # the version it was trained on from
    data: DataSpan = DataSpan()
    format: int = 1
    alias: str | None = "latest"  # what it was published as; older versions have no such field, and were all latest


class Pointer(msgspec.Struct, frozen=True):
    """`latest.json`, which is the alias `stable`, and `aliases/<name>.json`. Older ones have the first two fields."""

    version: Annotated[int, msgspec.Meta(ge=1, lt=10**15)] | None  # None: an alias that was removed
    sha256: str  # of the version's manifest
    since: float = 0.0
    by: str = ""
    reason: str = ""
    evidence: dict[str, float] = {}
    pinned: bool = False
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    move: int | None = None  # its number in the journal


class Alias(msgspec.Struct, frozen=True):
    """A name that points to a version, and why."""

    name: str
    version: int
    since: float = 0.0  # seconds since 1970; 0 where an older registry did not say
    by: str = ""  # trainer, person, …
    reason: str = ""
    evidence: dict[str, float] = {}
    pinned: bool = False  # only people move it
    share: float = 0.0  # of a candidate: of how many episodes it is the bot


class Move(msgspec.Struct, frozen=True):
    """One entry of the journal: an alias was moved. Never changed."""

    number: int
    alias: str
    version: int | None  # None: the alias was removed
    previous: int | None
    time: float
    by: str
    reason: str = ""
    evidence: dict[str, float] = {}
    pinned: bool = False
    share: float = 0.0
    sha256: str = ""  # of the version's manifest
    after: int | None = None  # the move of this alias that it follows


class Serving(msgspec.Struct, frozen=True):
    """What a model's players get: `stable`, and in `share` of the episodes the candidate."""

    stable: Manifest | None = None
    candidate: Manifest | None = None
    share: float = 0.0

    def draw(self, player: str, episode: str) -> Manifest | None:
        """The version for one episode, which everybody who asks finds the same."""
        if self.candidate is None:
            return self.stable
        text = f"{self.candidate.version}\n{player}\n{episode}"
        point = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big") / 2**64
        return self.candidate if point < self.share else self.stable


for _kind in (Manifest, Pointer, Move, Serving):
    msgspec.json.Decoder(_kind)  # now, see games.spec: threads must not be the first
