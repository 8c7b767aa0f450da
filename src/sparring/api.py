"""The messages of the HTTP API under /v1, in and out. Clients, the gateway and the CLI share them; the OpenAPI document
is made from them."""

from typing import Annotated, Any, Literal

import msgspec

from sparring.experience.validate import MAX_NAME
from sparring.games.spec import ENV, NAME, Game, Keyword, check_env, constrained
from sparring.registry.manifest import Alias, Manifest
from sparring.store.profile import GameSettings
from sparring.store.protocol import PlayerStats, Stats

__all__ = [
    "MAX_OBSERVATIONS",
    "Act",
    "ActionsInfo",
    "CurvePoint",
    "EpisodeInfo",
    "EpisodeList",
    "EpisodeRow",
    "EpisodeRows",
    "GameChange",
    "GameInfo",
    "Generation",
    "ModelInfo",
    "NewGeneration",
    "Pin",
    "Play",
    "PlayerRow",
    "Problem",
    "RecentReturns",
    "Rejected",
    "RejectedFragment",
    "Rollback",
    "SetAlias",
    "SettingsInfo",
    "Snapshot",
    "StartAb",
    "StreamStatus",
    "TrainerStatus",
    "Unpin",
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


class RejectedFragment(msgspec.Struct, frozen=True):
    """A fragment that was rejected: at the door, on its way from a stream, or by the trainer, as it broke learning."""

    time: float  # the server's clock
    player: str
    id: str
    reason: str


class Uploaded(msgspec.Struct, frozen=True):
    """Answer to an upload of which at least one fragment is on disk (now, or since an earlier upload)."""

    accepted: int
    duplicates: int
    rejected: list[Rejected] = []
    # Names of fields that this server does not know, and did not store. Unset is not written: most have none.
    ignored: list[str] | msgspec.UnsetType = msgspec.UNSET
    # Seconds between a client's uploads that the game's settings ask for. Unset: as the client likes.
    pace: float | msgspec.UnsetType = msgspec.UNSET
    notes: list[str] | msgspec.UnsetType = msgspec.UNSET  # about fields of JSON fragments that were not stored


class GameChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to change of a game; the rest stays as it is.

    :param name: What it is called from now on. Its old names go on working.
    :param env: The Gymnasium id of its simulator; null: it has none. What another one was set to goes.
    :param env_kwargs: What its simulator is set to instead of what it was set to: keywords of its constructor, as
        `{"gravity": -5}`. Empty or null: nothing.
    :param archived: In no list, and not trained. Its play is kept, and its bots are served.
    """

    name: Annotated[str, constrained(pattern=f"^{NAME.pattern}$")] | msgspec.UnsetType = msgspec.UNSET
    env: Annotated[str, constrained(pattern=f"^{ENV.pattern}$")] | msgspec.UnsetType | None = msgspec.UNSET
    env_kwargs: dict[str, Keyword] | msgspec.UnsetType | None = msgspec.UNSET
    archived: bool | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if isinstance(self.env, str):
            check_env(self.env)


class NewGeneration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A game's new form.

    :param game: The declaration; its name does not matter.
    :param defaults: What fields that were added are in old play, by their names. None: 0, or what is nearest to it.
    :param confirmed: Do it; otherwise the answer only says what would change.
    """

    game: Game
    defaults: dict[str, Any] = {}
    confirmed: bool = False


class Generation(msgspec.Struct, frozen=True):
    """A form that a game has or had."""

    name: str  # by which it is found in stores and registries; clients find it by their declaration
    schema: str
    generation: int
    continues: str | None  # the generation before
    changes: list[str]  # since then, in words
    exists: bool  # no: it is what would be


class SettingsInfo(msgspec.Struct, frozen=True):
    """How a game is learned: what was set for it, and what follows with the platform's own settings."""

    game: str
    settings: GameSettings
    effective: GameSettings
    defaults: GameSettings = GameSettings()  # what counts where neither says anything


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Asks for actions. `obs`: a list of observations as in JSON fragments; in msgpack also the raw column.

    Without `model`, `version` and `alias` it is what the game's players get. With `player` it is the model that an A/B
    test gives to that player. With `player` and `episode` it may be a candidate, in its share of the episodes.
    """

    obs: (
        Annotated[list[Any], constrained(minItems=1, maxItems=MAX_OBSERVATIONS)]
        | Annotated[bytes, constrained(minLength=1)]
    )
    schema: str | None = None
    model: Annotated[str, constrained(pattern=f"^{NAME.pattern}$")] | None = None
    version: Annotated[int, msgspec.Meta(ge=1, lt=10**15)] | None = None
    explore: bool = False
    alias: Annotated[str, constrained(pattern=f"^{NAME.pattern}$")] | None = None  # the version that it names
    player: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)] | None = None
    episode: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)] | None = None


class ActionsInfo(msgspec.Struct, frozen=True):
    """Sent back with the fragment that these actions are in, `model`, `version` and `log_prob` say that a bot acted;
    without them the steps count as a person's."""

    action: list[Any]
    log_prob: list[float] | None  # only when explored, and of random play
    model: str  # "random" until a first version is published
    version: int  # 0 of "random"
    note: str | msgspec.UnsetType = msgspec.UNSET  # of random play, for people


_Because = Annotated[str, msgspec.Meta(max_length=1000)]
_Who = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Version = Annotated[int, msgspec.Meta(ge=1, lt=10**15)]


class SetAlias(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an alias shall point. `stable` is what players get: to move it is to promote a version."""

    version: _Version
    reason: _Because = ""
    by: _Who = "person"
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # of `candidate`: in which share of the episodes it plays
    expected: _Version | msgspec.UnsetType | None = msgspec.UNSET  # 409 unless it is there now; null: nowhere


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Back to where `stable` was before."""

    reason: _Because = ""
    by: _Who = "person"
    expected: _Version | msgspec.UnsetType = msgspec.UNSET  # 409 unless it is there now: done twice, it is undone


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold `stable`, where it is or at a version: the trainer does not move it."""

    version: _Version | None = None
    reason: _Because = ""
    by: _Who = "person"


class Unpin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let the trainer move `stable` again."""

    reason: _Because = ""
    by: _Who = "person"


class StartAb(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several models of a game, each for a share of its players; the shares add up to 1."""

    shares: Annotated[dict[str, float], constrained(minProperties=2, propertyNames={"pattern": f"^{NAME.pattern}$"})]
    reason: _Because = ""
    by: _Who = "person"


class EpisodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode all of whose steps are stored."""

    id: int  # of this game
    player: str
    episode: str  # as the client named it
    model: str | None  # who acted; none: a person
    version: int | None
    steps: int
    ret: float = msgspec.field(name="return")  # the total reward
    ended: float  # the server's clock, when its last fragment arrived


class EpisodeList(msgspec.Struct, frozen=True):
    episodes: list[EpisodeInfo]  # the newest first
    before: int | None  # ask with this for older ones; none: there are none
    looked_at: int  # episodes, for these: a request looks at a bounded number


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what was seen, done and got."""

    step: int
    obs: Any
    action: Any
    reward: float
    terminated: bool = False
    truncated: bool = False
    next_obs: Any = None  # of the episode's last step: where it led
    log_prob: float | None = None
    model: str | None = None
    version: int | None = None


class EpisodeRows(EpisodeInfo, frozen=True, kw_only=True):
    """An episode, and some of its steps."""

    rows: list[EpisodeRow]
    next: int | None  # ask with this as `first` for the steps that follow; none: there are none


class ModelInfo(msgspec.Struct, frozen=True):
    """A model's row in a list."""

    model: str
    versions: list[int]
    latest: Manifest | None
    aliases: list[Alias] = []


class TrainerStatus(msgspec.Struct, frozen=True):
    """What the trainer last said of itself (it writes it to its directory, the gateway reads it there)."""

    game: str
    algorithm: str
    state: str  # "waiting for play", "training" (", but cannot publish: …"), "paused", "stopped", "failed: …"
    updates: int = 0  # gradient steps so far
    updates_per_s: float = 0.0
    steps: int = 0  # steps of experience taken in
    lag: int = 0  # fragments stored but not taken in yet
    window: int = 0  # steps in the replay window, or, on-policy, that wait for the next update …
    window_bytes: int = 0  # … and the memory that they take
    loss: float | None = None
    exploration: float | None = None  # none: the algorithm has no such setting
    evaluation: float | None = None  # mean return of the newest candidate, where the game can be simulated
    updated: float = 0.0
    candidate: int | None = None  # the version that is tried beside `stable`
    evidence: str = ""  # what is known of the candidate so far, for people
    decision: str = ""  # what became of the last one, for people
    people_steps: int = 0  # steps that are learned from, by who acted …
    bot_steps: int = 0
    left_out: dict[str, int] = {}  # … and steps that are not, by why
    on_policy: bool = False  # each step is learned from once, so there is no replay window
    gathered: int = 0  # steps that are there for the first update …
    needed: int = 0  # … of so many; 0: not known
    metrics: dict[str, float] = {}  # what the algorithm says of its newest updates: "loss/q", "policy/entropy", …
    # What the trainer's process takes, all games together: "usage/cpu", … and joules since it began, "energy/rapl_j", …
    costs: dict[str, float] = {}

    @property
    def use(self) -> str:
        """What becomes of the play, for people; empty before there is any."""
        if not (self.people_steps or self.bot_steps or self.left_out):
            return ""
        used = f"uses {_steps(self.people_steps)} of people, {self.bot_steps:,} of bots"
        left = ", ".join(f"{steps:,}: {why}" for why, steps in self.left_out.items())
        return f"{used}; leaves out {left}" if left else used


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


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


class RecentReturns(msgspec.Struct, frozen=True):
    """Finished episodes, and their returns. A return is the total reward of an episode."""

    episodes: int = 0
    return_mean: float | None = None  # over the newest 20
    return_best: float | None = None  # the best such mean so far
    length_mean: float | None = None  # in steps


class Play(RecentReturns, frozen=True):
    """What people, or bots, played."""

    steps: int = 0  # stored
    curve: list[CurvePoint] = []  # at most 200


class PlayerRow(PlayerStats, frozen=True):
    """A player, and how they do. Who lets a bot play is counted apart from it: the player's steps and episodes are the
    person's where no model is named, the bot's where one is."""

    kind: Literal["person", "bot", "both"] = "person"
    all: RecentReturns = RecentReturns()
    person: RecentReturns = RecentReturns()
    bot: RecentReturns = RecentReturns()


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
    latest: int | None  # the version that players get
    published: float | None  # when
    versions: list["VersionRow"]  # newest last, at most 200
    players: list[PlayerRow]  # most recently seen first, at most 20
    curve: list[CurvePoint]  # at most 400
    trainer: TrainerStatus | None
    stream: StreamStatus | None = None  # none: uploads go to the store
    paused: bool = False  # not trained; play is stored
    people: Play = Play()  # returns, episodes and curve above are of both together
    bots: Play = Play()
    behind: bool = False  # a long history is being read: newer episodes are not in these figures yet


class VersionRow(msgspec.Struct, frozen=True):
    """A version and how it did in play."""

    version: int
    created: float
    steps: int  # steps of experience it was trained on
    evaluation: float | None  # in simulation before publishing, where possible
    played: int  # episodes played by it
    return_mean: float | None  # in play
    margin: float | None = None  # the mean's 95 % interval is so much to both sides


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
    people_return_mean: float | None = None
    bot_return_mean: float | None = None
    archived: bool = False
    generation: int = 1
    names: list[str] = []  # all by which it is found, the first one first
    bot_steps: int = 0  # of `steps`; the others are people's


for _kind in (Problem, Uploaded, Act, ActionsInfo, ModelInfo, TrainerStatus, Snapshot, GameInfo, RejectedFragment):
    msgspec.json.Decoder(_kind)  # now, see games.spec: threads must not be the first
msgspec.json.Decoder(SettingsInfo)
msgspec.json.Decoder(GameChange)
msgspec.json.Decoder(EpisodeList), msgspec.json.Decoder(EpisodeRows)
msgspec.json.Decoder(NewGeneration)
