"""What a published version is: its manifest. Light: the client reads manifests too."""

from typing import Annotated

import msgspec

from sparring.games import Game

__all__ = ["DEFAULT_MODEL", "DataSpan", "FileInfo", "Manifest", "Pointer"]

DEFAULT_MODEL = "bot"  # the model that a game's trainer publishes and its players ask for unless they name another


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
    config: dict[str, str | int | float | bool | list[str | int | float] | None] = {}
    parent: int | None = None  # the version it was trained on from
    data: DataSpan = DataSpan()
    format: int = 1


class Pointer(msgspec.Struct, frozen=True):
    """`latest.json`: the newest version."""

    version: Annotated[int, msgspec.Meta(ge=1, lt=10**15)]
    sha256: str  # of its manifest


for _kind in (Manifest, Pointer):
    msgspec.json.Decoder(_kind)  # now, see games.spec: threads must not be the first
