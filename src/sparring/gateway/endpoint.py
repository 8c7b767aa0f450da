"""Bodies in, answers out: bounded reading of requests, msgspec messages as responses, and every refusal as RFC 9457
application/problem+json. The handlers of the other modules are written in these words."""

import asyncio
import http
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sparring.api import Problem, Rejected
from sparring.errors import Busy, InputError, SparringError
from sparring.experience.wire import TooLarge
from sparring.gateway.prometheus import PrometheusMetrics
from sparring.registry.registry import RegistryError
from sparring.store.protocol import StoreAway, StoreFull

__all__ = [
    "JSON",
    "MSGPACK",
    "Blob",
    "Budget",
    "Endpoint",
    "HTTPProblem",
    "Handler",
    "Hold",
    "answer",
    "decode",
    "media_type",
    "query_int",
    "read_body",
]

JSON, MSGPACK = "application/json", "application/msgpack"
BODY_TIMEOUT = 30.0  # seconds for a whole body: a client that sends slower than this is not worth a buffer
PACE, MIN_GROWTH = 10.0, 1024  # seconds in which a body grows by a tenth, and by so many bytes
LINGER = 2.0  # seconds during which a refused client may go on sending, so that it gets to read why
SEND_CHUNK = 256 << 10
SEVERAL = "send it in several requests"
FULL = "the server's disk is full, nothing of this request was stored: keep it and try again later"
AWAY = "the server's store does not answer: keep this request and try again later"
FAILED = "something went wrong on the server; its log says what"
log = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class HTTPProblem(Exception):
    """Ends a request with a problem. `detail` is for a person: what was found, what to do."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        rejected: Sequence[Rejected] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(http.HTTPStatus(status).phrase, status, detail, rejected=list(rejected))
        self.headers = dict(headers or {})

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.problem),
            self.problem.status,
            {**self.headers, "cache-control": "no-store"},
            "application/problem+json",
        )


def answer(message: Any, status: int = 200, *, kind: str = JSON, headers: Mapping[str, str] | None = None) -> Response:
    encode = msgspec.msgpack.encode if kind == MSGPACK else msgspec.json.encode
    return Response(encode(message), status, headers or {"cache-control": "no-store"}, kind)


class Blob(Response):
    """A large body, sent in pieces so that a slow reader holds back the sending, not memory."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        view = memoryview(self.body)
        for at in range(0, len(view), SEND_CHUNK):
            piece = bytes(view[at : at + SEND_CHUNK])
            await send({"type": "http.response.body", "body": piece, "more_body": at + SEND_CHUNK < len(view)})
        if not view:
            await send({"type": "http.response.body", "body": b""})


class Budget:
    """Bytes of request bodies that are in memory, read but not yet done with. Above the limit new ones are turned away.

    Of bodies that are not complete, one address gets no more than `share` once half of the budget is taken. So whoever
    sends slowly, over however many connections, leaves room for the others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.share = limit // 4
        self.used = 0
        self.incomplete: Counter[str] = Counter()  # by address

    def hold(self, request: Request) -> "Hold":
        return Hold(self, _address(request))


class Hold:
    """One request's part of a budget, given back when the `with` block ends."""

    def __init__(self, budget: Budget, address: str) -> None:
        self._budget = budget
        self._address = address
        self._size = 0
        self._incomplete = 0

    def add(self, size: int) -> None:
        budget, theirs = self._budget, self._budget.incomplete[self._address]
        # A request that is alone may exceed its limit: it would otherwise never get in.
        if budget.used + size > budget.limit and budget.used > self._size:
            raise HTTPProblem(
                503,
                f"the server has {budget.used >> 20} MiB of uploads waiting for its disk: try again in a second",
                headers={"retry-after": "1"},
            )
        if budget.used + size > budget.limit // 2 and theirs + size > budget.share and theirs > self._size:
            raise HTTPProblem(
                503,
                f"your address has {theirs >> 20} MiB of uploads here that are not complete: finish some of them first",
                headers={"retry-after": "1"},
            )
        budget.used += size
        budget.incomplete[self._address] += size
        self._size += size
        self._incomplete += size

    def complete(self) -> None:
        """The body is here: how long it takes from now on is up to us."""
        left = self._budget.incomplete[self._address] - self._incomplete
        self._incomplete = 0
        if left:
            self._budget.incomplete[self._address] = left
        else:
            del self._budget.incomplete[self._address]

    def grow(self, size: int) -> None:
        """For what decompressing made of it: the work is done, refusing it now would save nothing."""
        if size > 0:
            self._budget.used += size
            self._size += size

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.complete()
        self._budget.used -= self._size


def _address(request: Request) -> str:
    """Of IPv6 the network: every customer has 2^64 addresses."""
    host = request.client.host if request.client is not None else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def media_type(request: Request, *allowed: str) -> str:
    """The request's content type, or 415. Forms and plain text, which any web page may send, are never allowed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        found = f"is {kind!r}" if kind else "is missing"
        raise HTTPProblem(
            415, f"Content-Type {found}: send {' or '.join(allowed)}", headers={"accept": ", ".join(allowed)}
        )
    return kind


async def read_body(request: Request, limit: int, hold: Hold, advice: str = SEVERAL) -> bytes:
    """The body as sent, never more than `limit` bytes of it. A larger Content-Length is refused unread. A body that
    comes too slowly is not waited for: it must grow by a tenth within every `PACE`, and be complete in time."""
    if (announced := content_length(request.scope)) is not None and announced > limit:
        raise _too_large(f"the body has {announced} bytes", limit, advice)
    chunks: list[bytes] = []
    size, more, goal = 0, True, MIN_GROWTH
    clock = asyncio.get_running_loop().time
    begin = clock()
    end = begin + BODY_TIMEOUT
    try:
        async with asyncio.timeout_at(min(begin + PACE, end)) as patience:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large("the body goes on", limit, advice)
                hold.add(len(chunk))
                chunks.append(chunk)
                more = message.get("more_body", False)
                if size >= goal and more:
                    goal = size + max(size // 10, MIN_GROWTH)
                    patience.reschedule(min(clock() + PACE, end))
    except TimeoutError as error:
        found = f"{size} bytes came in {clock() - begin:.1f} s"
        raise HTTPProblem(
            408, f"the body comes too slowly ({found}): send less in one request", headers={"connection": "close"}
        ) from error
    hold.complete()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(found: str, limit: int, advice: str) -> HTTPProblem:
    return HTTPProblem(413, f"{found}, at most {limit} are allowed: {advice}")


def content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the HTTP parser lets only digits through
    return None


def decode(body: bytes, kind: str, into: type[T], what: str) -> T:
    decoder = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        return decoder(body, type=into)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPProblem(422, f"the body is not {what}: {error}") from error


def query_int(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise HTTPProblem(422, f"{name} is {text[:50]!r}: give a whole number from {low} to {high}")
    return int(text)


class Pages(Protocol):
    """Web pages of other origins, for one route: see `cors`."""

    async def headers(self, scope: Scope) -> dict[str, str]: ...

    def preflight(self, scope: Scope, headers: Mapping[str, str]) -> Response: ...


class Endpoint:
    """Runs one route's handler: turns what it raises into problems, counts, and never lets a stack trace out."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        metrics: PrometheusMetrics,
        check: Callable[[Scope, bool], None],
        pages: Pages | None = None,
    ) -> None:
        """`check` raises a HTTPProblem for requests that the handler shall not see; its argument says whether a web
        page of another origin may ask. `pages` knows which may."""
        self._route = route
        self._handler = handler
        self._check = check
        self._metrics = metrics
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(scope, receive)
        shared: Mapping[str, str] = {}
        try:
            if self._pages is not None:
                shared = await self._pages.headers(scope)
            self._check(scope, "access-control-allow-origin" in shared)
            if scope["method"] == "OPTIONS" and self._pages is not None:
                response = self._pages.preflight(scope, shared)
            else:
                response = await self._handler(Request(scope, body.receive))
        except ClientDisconnect:
            self._metrics.request(self._route, scope["method"], 499)  # nobody is left to answer
            return
        except asyncio.CancelledError:  # only a shutdown cancels requests, those that do not end in time
            response = HTTPProblem(503, "the server is stopping: try again", headers={"retry-after": "5"}).response()
        except HTTPProblem as refusal:
            response = refusal.response()
        except (SparringError, StoreFull) as error:
            response = _explain(error, scope["path"]).response()
        except Exception:
            log.exception("%s failed", scope["path"])
            response = HTTPProblem(500, FAILED).response()
        response.headers.update(shared)
        self._metrics.request(self._route, scope["method"], response.status_code)
        if body.left_large:
            await _send_and_linger(response, scope, body.receive, send)
        else:
            await response(scope, body.receive, send)


def _explain(error: Exception, path: str) -> HTTPProblem:
    match error:
        case TooLarge():
            return HTTPProblem(413, str(error))
        case InputError():
            return HTTPProblem(422, str(error))
        case Busy():
            return HTTPProblem(503, str(error), headers={"retry-after": "1"})
        case RegistryError():
            log.error("%s: %s", path, error)
            return HTTPProblem(
                503, "the models' registry does not answer: try again later", headers={"retry-after": "5"}
            )
        case StoreAway():
            log.error("%s: %s", path, error)
            return HTTPProblem(503, AWAY, headers={"retry-after": "5"})
        case StoreFull():
            log.error("%s: %s", path, error)
            return HTTPProblem(507, FULL, headers={"retry-after": "10"})
    log.error("%s: %s", path, error)
    return HTTPProblem(500, FAILED)


class _Body:
    """Watches how much of a request's body was read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._scope = scope
        self._done = False

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._done = True
        return message

    @property
    def left_large(self) -> bool:
        """An unread body of unknown or great size follows. (A small one is skipped by the HTTP server.)"""
        if self._done:
            return False
        if (length := content_length(self._scope)) is not None:
            return length > 1 << 20
        return any(name == b"transfer-encoding" for name, _ in self._scope["headers"])


async def _send_and_linger(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, then throws away for a moment what the client is still sending, then hangs up. Hanging up at once would
    reset the connection, and the client would see a broken pipe instead of the answer."""
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
    until = time.monotonic() + LINGER
    try:
        async with asyncio.timeout(LINGER):
            while time.monotonic() < until and (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass  # the client had its chance
    await send({"type": "http.response.body", "body": b""})
