"""The client: a game's connection to a Sparring server. Records play, gets bots, and keeps working without either."""

import atexit
import hashlib
import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from sparring import api
from sparring.client.ab_following import Assignments
from sparring.client.bot import Bot, Draw, Fixed, Offer
from sparring.client.bots import Newest, PublishedBots, Refresher
from sparring.client.convert import to_action
from sparring.client.notices import Notices
from sparring.client.public_registry import BucketModels
from sparring.client.recorder import LAST_ACT, Acted, Recorder
from sparring.client.spool import Spool
from sparring.client.transports import open_transport
from sparring.client.transports.base import ModelSource, SchemaMismatch, Transport, Unavailable, UnknownGame
from sparring.client.transports.http import GatewayModels, HttpTransport
from sparring.client.uploader import Uploader, UploadStats
from sparring.errors import InputError, SparringError
from sparring.experience import new_id
from sparring.files import write_whole
from sparring.games import Game
from sparring.games.spec import NAME
from sparring.registry.manifest import DEFAULT_MODEL, STABLE, Manifest

__all__ = ["Client", "Player", "public_bot"]


class Player(Recorder):
    """One player of a client: records, and has bots of its own. `Client.player` makes it.

    :param client: The connection that it shares.
    :param name: The player's name.
    :param fragment_steps: Steps per uploaded fragment at most.
    """

    def __init__(self, client: "Client", name: str, fragment_steps: int) -> None:
        super().__init__(client.game, name, client._uploader.offer, fragment_steps)
        self._client = client
        self._to_action = to_action(client.game.action)
        self._before = new_id()  # the episode before the one that the server is asked for; any, for the first

    def _acting_in(self) -> str:
        """Names an episode for the server, which draws the same version for all of it. An episode has no id before its
        first step, so it is named by the one before it."""
        if not self.in_episode and self.episode:
            self._before = self.episode
        return self._before

    def bot(
        self,
        model: str | None = None,
        version: int | None = None,
        seed: int | None = None,
        *,
        alias: str | None = None,
    ) -> Bot:
        """What this player gets, an alias's version, or a certain one. See `Client.bot`.

        :param model: The model. None: what the player gets.
        :param version: This version; it never changes.
        :param seed: Of the bot's randomness.
        :param alias: The version that this alias names.
        """
        return Bot(self.game, self, Draw(self.offer(model, version, alias), self, seed), seed)

    def offer(self, model: str | None = None, version: int | None = None, alias: str | None = None) -> Offer:
        """The versions that a bot of this player draws from, episode by episode. See `Client.bot`.

        :param model: The model. None: what the player gets.
        :param version: This version alone.
        :param alias: The version that this alias names.
        """
        if version is not None:
            if alias is not None:
                raise InputError(f"both version={version} and alias={alias!r}: give one of them")
            return Fixed(self._client._models.version(DEFAULT_MODEL if model is None else model, version))
        if model is None and alias is None:
            return self._client.assignments().of(self.name)
        newest = self._client.newest(DEFAULT_MODEL if model is None else model, alias)
        newest.require()
        return newest

    def act(self, obs: Any, explore: bool = False, model: str | None = None, *, alias: str | None = None) -> Any:
        """Asks the server for an action. Raises Unavailable when it does not answer, InputError when it refuses.

        :param obs: One observation, as `record` takes it.
        :param explore: Try things, as training needs it; else the best that is known.
        :param model: The model. None: what the player gets.
        :param alias: The version that this alias names.
        """
        ask = api.Act(obs=self._obs_bytes(obs), schema=self.game.schema, model=model, explore=explore, alias=alias)
        if model is None and alias is None:
            ask = msgspec.structs.replace(ask, player=self.name, episode=self._acting_in())
        gateway = self._client._gateway
        chosen = gateway.act(self.game, ask)
        element = self.game.action.element
        try:
            column = np.asarray(chosen.action).astype(element.base).reshape(1, *element.shape)
        except (ValueError, TypeError) as error:
            raise Unavailable(f"{gateway.address} sent an action that does not fit the game: {error}") from error
        log_prob = chosen.log_prob[0] if chosen.log_prob else None
        self.last_act = column.tobytes(), Acted(chosen.model, chosen.version, log_prob)
        return self._to_action(column)


class Client:
    """A game's connection to a server: records play, gets bots. Keeps working while the server is away.

    :param url: Address of a gateway, or of a stream: kinesis://NAME?region=…; behind a proxy that asks:
        https://USER:PASSWORD@…; a transport of your own: my_module:MyTransport://…, or none with `transport`.
    :param game: Name of a game that the server knows, or a Game (or the path of its JSON) to register there.
    :param player: Name of the player.
    :param transport: A `Transport` of your own; the client closes it.
    :param models: With a stream or a transport that only takes play: a gateway's address, for bots.
    :param registry: Address of a public registry (https://…) to get bots from. None: they come from the server.
    :param directory: Where unsent play and downloaded bots are kept. None: $SPARRING_CLIENT_DIR or ~/.sparring/client.
    :param fragment_steps: Steps per uploaded fragment at most; an episode's end always ends one.
    :param max_age: Seconds after which steps are sent although the fragment is not full; more where the game's settings
        ask for it (`pace`).
    :param timeout: Seconds to wait for an answer.
    :param refresh: Seconds between looks for a newer bot.
    :param queue_bytes: Bound of unsent play in memory; beyond it, it goes to disk.
    :param spool_bytes: Bound of unsent play on disk; beyond it, the oldest is dropped and counted.
    """

    def __init__(
        self,
        url: str | None,
        game: Game | str | Path,
        player: str,
        *,
        transport: Transport | None = None,
        models: str | None = None,
        registry: str | None = None,
        directory: str | Path | None = None,
        fragment_steps: int = 100,
        max_age: float = 2.0,
        timeout: float = 10.0,
        refresh: float = 5.0,
        queue_bytes: int = 64 << 20,
        spool_bytes: int = 256 << 20,
    ) -> None:
        self._transport = _transport(url, transport, timeout)
        self._gateway = _gateway(self._transport, timeout, models)
        self._notices = Notices()
        self._fragment_steps, self._max_age, self._refresh = fragment_steps, max_age, refresh
        bucket = None if registry is None else BucketModels(registry, timeout)
        self._source: ModelSource = self._gateway.models() if bucket is None else bucket
        declared, known = self._introduce(game, _root(directory))
        # A game that has changed has a name for each generation.
        serving = self.game if known is None else msgspec.structs.replace(self.game, name=known.name)
        if isinstance(self._source, GatewayModels) and (known is None or self._transport is not self._gateway):
            self._source.schema = self.game.schema  # the server did not say which generation it is
        self._models = PublishedBots(self._source, serving, self.directory / "bots", self._notices)
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str | None], Newest] = {}  # by model and alias
        self._assigning = threading.Lock()
        self._assignments: Assignments | None = None
        self._refresher = Refresher(self._notices)
        self._players: dict[str, Player] = {}
        self._uploader = Uploader(
            self._transport,
            self.game,
            Spool(self.directory / "spool", spool_bytes, self._notices),
            declared=declared is not None,
            registered=known is not None,
            queue_bytes=queue_bytes,
            notices=self._notices,
            tick=self._tick,
        )
        self._closed = False
        self._me = self.player(player)
        self._uploader.start()
        atexit.register(self.close, 2.0)  # a game that just ends loses nothing either

    def _introduce(self, game: Game | str | Path, root: Path) -> tuple[Game | None, Game | None]:
        """The declaration that came along, and what the server knows of the game; none while it is away."""
        declared = _declared(game)
        name = declared.name if declared is not None else str(game).replace("/", "-")
        if not NAME.fullmatch(name):
            raise InputError(f"{name!r} is no game's name: use letters, digits, '.', '_' and '-'")
        self.directory = root / _folder(self._transport.address) / name
        if declared is None:
            self.game = self._look_up(name)
            return None, self.game
        self.game = declared
        return declared, self._register(declared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def record(
        self,
        obs: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        next_obs: Any,
        *,
        acted: Acted | None = LAST_ACT,
    ) -> None:
        """Keeps one step for upload; costs microseconds. See `Recorder.record`.

        :param obs: What the player saw.
        :param action: What they did.
        :param reward: What it was worth.
        :param terminated: Whether the episode ended with this step, by the game's rules.
        :param truncated: Whether it was cut short.
        :param next_obs: What the player saw then.
        :param acted: Who acted, if it was a policy that you ran yourself. None: a person.
        """
        self._me.record(obs, action, reward, terminated, truncated, next_obs, acted=acted)

    def end_episode(self, reward: float | None = None, *, terminated: bool | None = None) -> None:
        """Ends the episode without another step; a late `reward` is added to the last one. See
        `Recorder.end_episode`.

        :param reward: What is added to the last step. None: nothing.
        :param terminated: By the game's rules, or cut short. None: terminated if there is a reward.
        """
        self._me.end_episode(reward, terminated=terminated)

    def bot(
        self,
        model: str | None = None,
        version: int | None = None,
        seed: int | None = None,
        *,
        alias: str | None = None,
    ) -> Bot:
        """What the game's players get, which the bot follows from episode to episode, or the version asked for. While
        a candidate is tried, it plays a share of the episodes; while an A/B test runs, it decides on the model.

        Without a server the version last used on this machine, without that one that plays at random (its version is
        0) until there is a better one. Waits for the download: ask before the game begins.

        :param model: The model's name. None: `bot`, or what an A/B test gives to this player.
        :param version: A certain version. None: what players get.
        :param seed: Of exploration.
        :param alias: The version that it names: `stable` never meets a candidate, others are your own.
        :raises InputError: the server has no such model, version or alias.
        """
        return self._me.bot(model, version, seed, alias=alias)

    def act(self, obs: Any, explore: bool = False, model: str | None = None, *, alias: str | None = None) -> Any:
        """Asks the server for an action; waits for its answer. Without `model` and `alias` it is what this player
        gets, as with `bot`.

        :param obs: One observation, as `record` takes it.
        :param explore: Try things, as training needs it; else the best that is known.
        :param model: The model. None: what the player gets.
        :param alias: The version that this alias names.
        """
        return self._me.act(obs, explore, model, alias=alias)

    def player(self, name: str) -> Player:
        """Another player in this process, over the same connection. The same name gives the same player.

        :param name: The player's name.
        """
        if self._closed:
            raise SparringError("the client is closed")
        if name not in self._players:
            self._players[name] = Player(self, name, self._fragment_steps)
        return self._players[name]

    @property
    def stats(self) -> UploadStats:
        """What was recorded, sent, kept and dropped so far."""
        return self._uploader.stats

    @property
    def away(self) -> bool:
        """Whether the server could not take the last upload."""
        return self._uploader.away

    def flush(self, timeout: float = 10.0) -> bool:
        """Sends what was recorded so far, also what earlier processes left; whether all of it arrived in time.

        :param timeout: Seconds.
        """
        for player in list(self._players.values()):
            player.cut()
        return self._uploader.flush(timeout)

    def wait_for_room(self, limit: int = 1 << 20, timeout: float = 1.0) -> bool:
        """For players faster than the server: waits while it is away or more than `limit` bytes are unsent.

        :param limit: Bytes that may be unsent.
        :param timeout: Seconds.
        """
        return self._uploader.wait_for_room(limit, timeout)

    def newest(self, model: str = DEFAULT_MODEL, alias: str | None = None) -> Newest:
        """The versions that this client's bots of `model` move to between episodes.

        :param model: The model's name.
        :param alias: Follow this alias. None: what players get.
        """
        key = model, alias
        with self._lock:
            if key not in self._newest:
                self._newest[key] = Newest(self._models, model, self._refresh, alias)
                self._refresher.follow(self._newest[key])
            return self._newest[key]

    def assignments(self) -> Assignments:
        """Which model each player gets while an A/B test runs."""
        with self._assigning:
            if self._assignments is None:
                self._assignments = Assignments(self._models, self._refresh, self.newest)
                self._refresher.follow(self._assignments)
            return self._assignments

    def close(self, timeout: float = 5.0) -> None:
        """Open episodes end as truncated; what cannot be sent within `timeout` stays on disk for the next client.

        :param timeout: Seconds.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for player in self._players.values():
            player.closed = True
            player.end_episode()
        end = time.monotonic() + timeout
        self._uploader.close(timeout)
        self._refresher.close(min(1.0, max(0.0, end - time.monotonic())))
        self._source.close()
        self._gateway.close()
        if self._transport is not self._gateway:
            self._transport.close()

    def _tick(self) -> None:
        for player in list(self._players.values()):
            player.cut(max(self._max_age, self._uploader.pace), but_newest=True)

    def _register(self, game: Game) -> Game | None:
        """The game as the server knows it now; none while it is away. SchemaMismatch when it knows another one by that
        name."""
        try:
            known = self._transport.register(game)
        except Unavailable as error:
            self._notices.warn(f"{error}. Play is kept in {self.directory / 'spool'} and sent when it is back")
            return None
        if known.schema != game.schema:
            raise SchemaMismatch(_mismatch(game, known))
        return known

    def _look_up(self, name: str) -> Game:
        kept = self.directory / "game.json"
        try:
            game = self._gateway.game(name)
        except UnknownGame as error:
            raise InputError(
                f"{self._gateway.address} does not know the game {name!r}: pass a Game, or the path of its "
                f"declaration, to register it (for a Gymnasium game: sparring.games.catalog.load({name!r}))"
            ) from error
        except Unavailable as error:
            if not kept.is_file():
                raise Unavailable(
                    f"{error}. The game {name!r} was never used on this machine, so there is nothing to go on with: "
                    "start the server, or pass a Game"
                ) from error
            self._notices.warn(f"{error}. Going on with the game as it was known last")
            return Game.from_json(kept.read_bytes())
        try:
            write_whole(kept, game.to_json(), parents=True, shared=True)
        except OSError as error:
            self._notices.warn(f"cannot write {kept} ({error}): without a server the game {name!r} will be unknown")
        return game


def public_bot(
    registry: str,
    game: str,
    model: str = DEFAULT_MODEL,
    version: int | None = None,
    *,
    alias: str = STABLE,
    directory: str | Path | None = None,
    timeout: float = 10.0,
    seed: int | None = None,
) -> Bot:
    """A bot from a public registry, without a server and without recording: the version that an alias names now, or a
    certain one.

    :param registry: The registry's address, https://….
    :param game: The game's name.
    :param model: The model's name.
    :param version: This version; it never changes.
    :param alias: The version that this alias names.
    :param directory: Where downloaded bots are kept. None: $SPARRING_CLIENT_DIR or ~/.sparring/client.
    :param timeout: Seconds to wait for an answer.
    :param seed: Of the bot's randomness.
    :raises Unavailable: the registry does not answer.
    :raises InputError: it has no such bot.
    """
    if not NAME.fullmatch(game) or not NAME.fullmatch(model):
        raise InputError(f"{game!r} and {model!r}: names of games and models are letters, digits, '.', '_' and '-'")
    if version is not None and alias != STABLE:
        raise InputError(f"both version={version} and alias={alias!r}: give one of them")
    published = BucketModels(registry, timeout)
    try:
        if version is not None:
            found: tuple[Manifest, str | None] | None = (published.manifest(game, model, version), None)
        elif alias == STABLE:
            found = published.latest(game, model, None)
        else:
            found = published.alias(game, model, alias, None)
        if found is None:
            raise InputError(f"{published.url} has no version of {game}'s {model!r} yet")
        spec = found[0].game
        place = _root(directory) / _folder(published.url) / game / "bots"
        policy = PublishedBots(published, spec, place, Notices()).load(found[0])
    finally:
        published.close()
    return Bot(spec, Recorder(spec, "nobody", lambda _: None, 100), lambda: policy, seed)


def _root(directory: str | Path | None) -> Path:
    return Path(directory or os.environ.get("SPARRING_CLIENT_DIR") or Path.home() / ".sparring" / "client")


def _transport(url: str | None, transport: Transport | None, timeout: float) -> Transport:
    if transport is None:
        if url is None:
            raise InputError("where to? Give a server's address, like http://127.0.0.1:8400, or a transport")
        return open_transport(url, timeout)
    if url is not None:
        raise InputError(f"both an address, {url!r}, and a transport: give None for the one that is not meant")
    return transport


def _gateway(transport: Transport, timeout: float, models: str | None) -> Transport:
    """Who is asked for games, bots and actions."""
    if models is None:
        return transport
    if isinstance(transport, HttpTransport):
        raise InputError(f"models={models!r} is for clients of a stream: {transport.address} has bots itself")
    return HttpTransport(models, timeout)


def _declared(game: Game | str | Path) -> Game | None:
    """A game that comes with its spaces, or None for a mere name."""
    if isinstance(game, Game):
        return game
    path = Path(game)
    if path.suffix != ".json":
        return None
    try:
        return Game.declared(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read the game declaration {path}: {error.strerror}") from error


def _folder(url: str) -> str:
    """A readable folder name per server."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url.partition("//")[2] or url)[:60]
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _mismatch(ours: Game, theirs: Game) -> str:
    which = [name for name in ("observation", "action", "players") if getattr(ours, name) != getattr(theirs, name)]
    return (
        f"the server knows {ours.name!r} with schema {theirs.schema}, this client has {ours.schema}; "
        f"they differ in: {', '.join(which)}. Use the server's spaces, or another name for the game"
    )
