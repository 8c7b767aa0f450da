"""A gateway as the client sees it: one request, one checked answer. Silence, an HTML page or a redirect are
Unavailable; only a Sparring server's own no is Refused."""

import email.utils
import time
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec
import urllib3

from sparring import __version__
from sparring.api import Act, ActionsInfo, Problem, Uploaded
from sparring.client.transports.base import (
    ModelSource,
    Refused,
    SchemaMismatch,
    Transport,
    Unavailable,
    UnknownGame,
    Upload,
    UploadTooLarge,
)
from sparring.errors import InputError
from sparring.games import Game
from sparring.registry.ab import AbTests
from sparring.registry.manifest import DEFAULT_MODEL, STABLE, Manifest, Serving

__all__ = ["Answer", "HttpConnection", "HttpTransport"]

T = TypeVar("T")
MAX_ANSWER = 16 << 20
MAX_RETRY_AFTER = 600.0
CONNECT_TIMEOUT = 3.0
TOO_LARGE = 413
JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
GZIPPED = {"Content-Type": "application/msgpack", "Content-Encoding": "gzip"}
# Said by proxies and by a server that may let us in later: no judgement on what was sent.
PASSING = (401, 403, 407, 408, 425, 429)


class RequestOptions(TypedDict, total=False):
    """Of a request."""

    body: bytes | None
    headers: dict[str, str] | None
    limit: int  # bytes of the answer
    timeout: float | None  # seconds; none: the connection's
    query: str


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Any  # a case-insensitive mapping of strings
    body: bytes
    origin: str

    def decode(self, kind: type[T]) -> T:
        try:
            if self.headers.get("content-type", "").startswith("application/msgpack"):
                return msgspec.msgpack.decode(self.body, type=kind)
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            start = self.body[:60].decode("latin-1")
            raise Unavailable(f"{self.origin} did not answer like a Sparring server ({error}): {start!r}") from error


class HttpConnection:
    """To one server: keeps sockets open, and raises nothing but Refused and Unavailable."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise InputError(f"{url!r} is not a server's address: write it like http://127.0.0.1:8400")
        self._headers = {"User-Agent": f"sparring-client/{__version__}"}
        if parts.username is not None:  # for a proxy that asks; it is no part of what is shown, logged and kept
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers |= urllib3.make_headers(basic_auth=login)
            url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._pool = urllib3.PoolManager(maxsize=4, retries=False)

    def request(self, method: str, *path: str, **options: Unpack[RequestOptions]) -> Answer:
        """`path` parts come after /v1 and are quoted here. Raises Refused or Unavailable, nothing else."""
        answer = self.fetch(method, "v1", *path, **options)
        self._judge(answer)
        return answer

    def fetch(self, method: str, *path: str, **options: Unpack[RequestOptions]) -> Answer:
        """Any answer, whatever its status. Raises Unavailable when there is none."""
        url = "/".join((self.url, *map(_quoted, path))) + options.get("query", "")
        body, headers, limit = options.get("body"), options.get("headers"), options.get("limit", MAX_ANSWER)
        timeout = options.get("timeout")
        seconds = self.timeout if timeout is None else timeout
        try:
            try:
                return self._exchange(method, url, body, headers, limit, seconds)
            except urllib3.exceptions.ProtocolError:
                # Mostly a kept-alive connection that the server had closed; every request here may be repeated.
                return self._exchange(method, url, body, headers, limit, seconds)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unavailable(f"{self.url} is not reachable: {_reason(error)}") from error

    def close(self) -> None:
        self._pool.clear()

    def _exchange(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str] | None, limit: int, seconds: float
    ) -> Answer:
        deadline = time.monotonic() + seconds
        response = self._pool.request(
            method,
            url,
            body=body,
            headers={**self._headers, **(headers or {})},
            timeout=urllib3.Timeout(connect=min(CONNECT_TIMEOUT, seconds), read=seconds),
            redirect=False,
            preload_content=False,
        )
        # The read timeout is per read: a server that drips bytes would hold us for ever without the deadline.
        chunks, size = [], 0
        while chunk := response.read1(1 << 20, decode_content=False):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit or time.monotonic() > deadline:
                response.close()
                much = f"more than {limit} bytes" if size > limit else f"an answer that took more than {seconds:g} s"
                raise Unavailable(f"{self.url} sent {much}")
        response.release_conn()
        return Answer(response.status, response.headers, b"".join(chunks), self.url)

    def _judge(self, answer: Answer) -> None:
        status = answer.status
        if 200 <= status < 300 or status == 304:
            return
        wait = _retry_after(answer.headers.get("retry-after"))
        if 300 <= status < 400:
            raise Unavailable(f"{self.url} redirects to {answer.headers.get('location')}: use that address", wait)
        problem = _problem(answer)
        if problem is not None and 400 <= status < 500 and status not in PASSING:
            raise Refused(problem)
        detail = problem.detail if problem is not None else "an answer that is not a Sparring server's"
        if status in (401, 407):
            detail = "it asks for a login, or knows not this one: write it into the address, https://USER:PASSWORD@…"
        raise Unavailable(f"{self.url} answered {status}: {detail}", wait, status)


class HttpTransport(Transport):
    """To a gateway."""

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self.connection = HttpConnection(address, timeout)
        self.address, self.timeout = self.connection.url, timeout

    def register(self, game: Game, timeout: float | None = None) -> Game:
        try:
            answer = self.connection.request(
                "PUT", "games", game.name, body=game.to_json(), headers=JSON, timeout=timeout
            )
        except Refused as error:
            if error.status == 409:
                raise SchemaMismatch(str(error)) from error
            raise
        return answer.decode(Game)

    def upload(self, game: Game, upload: Upload, timeout: float | None = None) -> Uploaded:
        body = upload.body
        try:
            answer = self.connection.request(
                "POST", "games", game.name, "fragments", body=body, headers=GZIPPED, timeout=timeout
            )
        except (Refused, Unavailable) as error:
            if error.status == TOO_LARGE:  # whoever says so: often a proxy, with a page of its own
                size = f"{len(body)} bytes are too large for {self.address}, or for a proxy before it"
                raise UploadTooLarge(f"{size}: raise its limit (docs/proxy.md)", status=TOO_LARGE) from error
            if isinstance(error, Refused) and error.status == 404:
                raise UnknownGame(error.problem) from error
            raise
        return answer.decode(Uploaded)

    def ping(self, game: Game, timeout: float | None = None) -> None:
        self.connection.request("GET", "games", game.name, timeout=timeout)

    def game(self, name: str) -> Game:
        try:
            return self.connection.request("GET", "games", name).decode(Game)
        except Refused as error:
            if error.status == 404:
                raise UnknownGame(error.problem) from error
            raise

    def act(self, game: Game, ask: Act) -> ActionsInfo:
        try:
            return self._act(game, ask)
        except Refused as error:  # an older gateway does not know who plays, and gives all players the same
            later = error.status == 422 and "unknown field" in str(error) and ask.alias is None
            if not later or (ask.player is None and ask.episode is None):
                raise
        return self._act(game, msgspec.structs.replace(ask, player=None, episode=None))

    def _act(self, game: Game, ask: Act) -> ActionsInfo:
        body = msgspec.msgpack.encode(ask)
        return self.connection.request("POST", "games", game.name, "act", body=body, headers=MSGPACK).decode(
            ActionsInfo
        )

    def models(self) -> ModelSource:
        return GatewayModels(self.connection)

    def close(self) -> None:
        self.connection.close()


class GatewayModels:
    """The models that a gateway serves. The connection is its transport's to close."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.schema: str | None = None  # of the game whose models are asked for: it may have several generations

    @property
    def _query(self) -> str:
        return "" if self.schema is None else f"?schema={self.schema}"

    def latest(self, game: str, model: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        try:
            return self._newer(Manifest, self._query, etag, "games", game, "models", model, "latest")
        except Refused as error:
            if error.status == 404:
                return None  # none published yet
            raise

    def serving(self, game: str, model: str, etag: str | None) -> tuple[Serving, str | None] | None:
        """An older gateway knows `latest` only, which is what all of its players get."""
        try:
            found = self._newer(Serving, self._query, etag, "games", game, "models", model, "serving")
        except Refused as error:
            if error.status != 404:
                raise
            latest = self.latest(game, model, etag)
            return None if latest is None else (Serving(latest[0]), latest[1])
        if found is not None and found[0].stable is None and model != DEFAULT_MODEL:
            self._connection.request("GET", "games", game, "models", model, "latest")  # says which models there are
        return found

    def alias(self, game: str, model: str, alias: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        path = ("latest",) if alias == STABLE else ("aliases", alias)
        return self._newer(Manifest, self._query, etag, "games", game, "models", model, *path)

    def ab(self, game: str, etag: str | None) -> tuple[AbTests, str | None] | None:
        """An older gateway has none."""
        try:
            return self._newer(AbTests, "", etag, "games", game, "ab")
        except Refused as error:
            if error.status != 404:
                raise
            return AbTests(), None

    def _newer(self, into: type[T], query: str, etag: str | None, *path: str) -> tuple[T, str | None] | None:
        """What is there, and its tag; none: the same as with `etag`."""
        headers = {} if etag is None else {"If-None-Match": etag}
        answer = self._connection.request("GET", *path, headers=headers, query=query)
        return None if answer.status == 304 else (answer.decode(into), answer.headers.get("etag"))

    def manifest(self, game: str, model: str, version: int) -> Manifest:
        path = ("games", game, "models", model, str(version), "manifest")
        return self._connection.request("GET", *path, query=self._query).decode(Manifest)

    def file(self, manifest: Manifest, name: str, limit: int) -> bytes:
        path = ("games", manifest.game.name, "models", manifest.model, str(manifest.version), "files", name)
        return self._connection.request("GET", *path, limit=limit).body

    def close(self) -> None:
        pass


def _problem(answer: Answer) -> Problem | None:
    try:
        return msgspec.json.decode(answer.body, type=Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # a proxy's page: the caller reports the status


def _quoted(part: str) -> str:
    """For an address. `.` and `..` as they are would be taken for steps in the path, and left out."""
    return part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="")


def _retry_after(value: str | None) -> float | None:
    """Seconds, from either of the header's two forms."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER) if seconds == seconds else None


def _reason(error: Exception) -> str:
    """The cause, without urllib3's object addresses."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, urllib3.exceptions.TimeoutError) and not isinstance(
        error, urllib3.exceptions.NewConnectionError
    ):
        return "it did not answer in time"
    return str(cause) if isinstance(cause, OSError) else str(error)
