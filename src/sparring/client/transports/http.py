"""The server as the client sees it: one request, one checked answer.

Whatever comes back, from silence to an HTML page, is one of three things: an answer, `Refused` (a Sparring server
understood and said no: final) or `Unavailable` (anything else: keep what you have and try later).
"""

import email.utils
import time
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec
import urllib3

from sparring import __version__
from sparring.api import Problem
from sparring.errors import InputError, SparringError
from sparring.games import Game

__all__ = ["Answer", "Refused", "SchemaMismatch", "Server", "Unavailable"]

T = TypeVar("T")
MAX_ANSWER = 16 << 20
MAX_RETRY_AFTER = 600.0
CONNECT_TIMEOUT = 3.0
# Said by proxies and by a server that may let us in later: no judgement on what was sent.
PASSING = (401, 403, 407, 408, 425, 429)


class Unavailable(SparringError):
    """No usable answer from the server. What was asked may be asked again."""

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class Refused(InputError):
    """The server said no, and would again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem
        self.status = problem.status


class SchemaMismatch(InputError):
    """The server knows this game with other spaces than the client."""


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


class Server:
    game: Game | None = None  # whose play is uploaded

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

    def request(
        self,
        method: str,
        *path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit: int = MAX_ANSWER,
        timeout: float | None = None,
        query: str = "",
    ) -> Answer:
        """`path` parts come after /v1 and are quoted here. Raises Refused or Unavailable, nothing else."""
        answer = self.fetch(method, "v1", *path, body=body, headers=headers, limit=limit, timeout=timeout, query=query)
        self._judge(answer)
        return answer

    def fetch(
        self,
        method: str,
        *path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit: int = MAX_ANSWER,
        timeout: float | None = None,
        query: str = "",
    ) -> Answer:
        """Any answer, whatever its status. Raises Unavailable when there is none."""
        url = "/".join((self.url, *(quote(part, safe="") for part in path))) + query
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


def _problem(answer: Answer) -> Problem | None:
    try:
        return msgspec.json.decode(answer.body, type=Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # a proxy's page: the caller tells the status


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
