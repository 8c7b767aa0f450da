"""The messages of the HTTP API under /v1, in and out. Clients, the gateway and the CLI share them; the OpenAPI document
is made from them."""

from typing import Annotated, Any

import msgspec

from sparring.games.spec import NAME, constrained
from sparring.registry.manifest import Manifest
from sparring.store.protocol import PlayerStats, Stats

__all__ = [
    "MAX_OBSERVATIONS",
    "Act",
    "Actions",
    "CurvePoint",
    "GameInfo",
    "ModelInfo",
    "Problem",
    "Rejected",
    "Snapshot",
    "StreamStatus",
    "TrainerStatus",
    "Uploaded",
]

MAX_OBSERVATIONS = 4096  # in one question


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """RFC 9457, application/problem+json."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    rejected: list["Rejected"] = []


class Rejected(msgspec.Struct, frozen=True):
    index: int  # position in the uploaded batch
    id: str
    status: int  # the HTTP status it would have had alone
    reason: str


class Uploaded(msgspec.Struct, frozen=True):
    """Answer to an upload of which at least one fragment is on disk (now, or since an earlier upload)."""

    accepted: int
    duplicates: int
    rejected: list[Rejected] = []
    # Names of fields that this server does not know, and did not store. Unset is not written: most have none.
    ignored: list[str] | msgspec.UnsetType = msgspec.UNSET


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for actions. `obs`: a list of observations as in JSON fragments; in msgpack also the raw column."""

    obs: (
        Annotated[list[Any], constrained(minItems=1, maxItems=MAX_OBSERVATIONS)]
        | Annotated[bytes, constrained(minLength=1)]
    )
    schema: str | None = None
    model: Annotated[str, constrained(pattern=f"^{NAME.pattern}$")] = "bot"
    version: Annotated[int, msgspec.Meta(ge=1, lt=10**15)] | None = None  # none: the latest
    explore: bool = False


class Actions(msgspec.Struct, frozen=True):
    action: list[Any]
    log_prob: list[float] | None  # only when explored
    model: str
    version: int


class ModelInfo(msgspec.Struct, frozen=True):
    """A model's row in a list."""

    model: str
    versions: list[int]
    latest: Manifest | None


class TrainerStatus(msgspec.Struct, frozen=True):
    """What the trainer last said of itself (it writes it to its directory, the gateway reads it there)."""

    game: str
    algorithm: str
    state: str  # "waiting for play", "training" (", but cannot publish: …"), "paused", "stopped", "failed: …"
    updates: int = 0  # gradient steps so far
    updates_per_s: float = 0.0
    steps: int = 0  # steps of experience taken in
    lag: int = 0  # fragments stored but not taken in yet
    window: int = 0  # transitions in the replay window …
    window_bytes: int = 0  # … and the memory that they take
    loss: float | None = None
    exploration: float | None = None
    evaluation: float | None = None  # mean return of the newest candidate, where the game can be simulated
    updated: float = 0.0


class StreamStatus(msgspec.Struct, frozen=True):
    """What the job that brings play from the stream to the store last said of itself. Counts are since it began."""

    stream: str
    state: str  # "running", "stopped", "failed: …"
    batches: int = 0
    records: int = 0  # of the stream
    bytes: int = 0
    fragments: int = 0  # new in the store
    steps: int = 0
    duplicates: int = 0  # were there already
    rejected: int = 0  # in quarantine, or not readable at all
    steps_per_s: float = 0.0  # of the newest batch
    lag: float = 0.0  # seconds behind the stream's writers; 0: caught up
    retention: float = 0.0  # seconds that the stream keeps a record; 0: not known
    missing: float = 0.0  # seconds of play that the stream forgot before it was read, since the first job
    updated: float = 0.0

    def behind(self, now: float) -> float:
        """The lag at a later moment: a job that says nothing any more falls behind with the clock."""
        silent = now - self.updated
        return self.lag + (silent if silent > SILENCE else 0.0)


SILENCE = 15.0  # seconds; a job says something every few


class CurvePoint(msgspec.Struct, frozen=True, array_like=True):
    """A bin of finished episodes, for the return curve."""

    time: float
    steps: int  # steps stored for this game until then
    mean: float
    low: float  # minimum and maximum within the bin
    high: float
    episodes: int
    version: int | None  # the newest version that played in it


class Snapshot(msgspec.Struct, frozen=True):
    """Everything the dashboard and the terminal view show of one game; also the payload of live `stats` events."""

    game: str
    time: float
    stats: Stats
    steps_per_s: float  # over the last few seconds
    fragments_per_s: float
    active_players: int  # seen within the last 30 s
    episodes: int
    return_mean: float | None  # over the newest 20 episodes
    return_best: float | None  # the best such mean so far
    length_mean: float | None
    latest: int | None  # newest published version
    published: float | None  # when
    versions: list["VersionRow"]  # newest last, at most 50
    players: list[PlayerStats]  # most recently seen first, at most 20
    curve: list[CurvePoint]  # at most 400
    trainer: TrainerStatus | None
    stream: StreamStatus | None = None  # none: uploads go to the store
    paused: bool = False  # not trained; play is stored


class VersionRow(msgspec.Struct, frozen=True):
    """A version and how it did in play."""

    version: int
    created: float
    steps: int  # steps of experience it was trained on
    evaluation: float | None  # in simulation before publishing, where possible
    played: int  # episodes played by it
    return_mean: float | None  # in play


class GameInfo(msgspec.Struct, frozen=True):
    """A game's row in the list of games."""

    name: str
    schema: str
    env: str | None
    players: int
    steps: int
    latest: int | None
    return_mean: float | None
    paused: bool = False


for _kind in (Problem, Uploaded, Act, Actions, ModelInfo, TrainerStatus, Snapshot, GameInfo):
    msgspec.json.Decoder(_kind)  # now, see games.spec: threads must not be the first
