"""Runs the application on uvicorn, with the guards that uvicorn leaves to a proxy. These are limits on headers and
connections, a time within which headers must come, and a shutdown that ends event streams and lets uploads finish."""

import contextlib
import http
import resource
import signal
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from types import FrameType

import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparring.api import Problem
from sparring.errors import InputError, SparringError

__all__ = ["background", "serve"]

HEADER_TIMEOUT = 10.0  # seconds from a request's first byte (or from connecting) to its last header
SEND_TIMEOUT = 60.0  # seconds in which a reader takes the piece that is ready for it (256 KiB of a file)
KEEP_ALIVE = 75  # seconds: players upload every few
MAX_HEADERS = 64 << 10  # bytes of request line and headers
DRAIN = 10  # seconds that running requests get when the server stops
SPARE_FILES = 200  # descriptors kept for the store, the registry and the trainer


def serve(
    app: Starlette, host: str = "127.0.0.1", port: int = 8400, ready: Callable[[str], None] | None = None
) -> None:
    """Serves until SIGINT or SIGTERM, then drains and returns. Port 0 is any free port; `ready` gets the address."""
    with _listen(host, port) as listener:
        _Server(app, listener, ready).run([listener])


@contextlib.contextmanager
def background(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serves in a thread while the block runs, which gets the address."""
    started = threading.Event()
    with _listen(host, port) as listener:
        server = _Server(app, listener, lambda _: started.set())

        def run() -> None:
            try:
                server.run([listener])
            finally:
                started.set()

        thread = threading.Thread(target=run, name="gateway")
        thread.start()
        started.wait()
        try:
            if not server.started:
                raise SparringError("the gateway did not start; its log says why")
            yield _url(listener)
        finally:
            server.should_exit = True
            thread.join()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another port") from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, listener: socket.socket, ready: Callable[[str], None] | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=_connection_class(_raise_file_limit() - SPARE_FILES),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=DRAIN,
            )
        )
        self._app = app
        self._address = _url(listener)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready(self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.stopping()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal ends `serve` and not the process: the caller has things to close."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self._on_signal) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _on_signal(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT  # Ctrl-C a second time: do not wait
        self.should_exit = True


def _raise_file_limit() -> int:
    """As many connections as the system lets us have; how many descriptors that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16_384 if hard == resource.RLIM_INFINITY else min(hard, 16_384)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def _connection_class(max_connections: int) -> type[HttpToolsProtocol]:
    return type("Connection", (_Connection,), {"max_connections": max_connections})


class _Connection(HttpToolsProtocol):
    """A connection whose headers must be small and come in time, and whose client must read what it asked for."""

    max_connections: int
    _timer: TimerHandle | None = None
    _reading: TimerHandle | None = None
    _head = 0  # bytes of an incomplete head

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections: try again later")
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head += len(data)
        super().data_received(data)
        if self._timer is None:  # the head is complete, this was (also) body
            self._head = 0
        elif self._head > MAX_HEADERS:
            self._refuse(431, f"the address and headers are larger than {MAX_HEADERS} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"sparring.abort": {"abort": self.transport.abort}}
        self._head = 0  # what came before in the same piece was another request's
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        self._give_up_on_reader()
        super().timeout_keep_alive_handler()

    def _await_reader(self) -> None:
        """Ends the connection of a client that does not read. Closing would wait for it for ever."""
        self._stop_reading()
        self._reading = self.loop.call_later(SEND_TIMEOUT, self._give_up_on_reader)

    def _give_up_on_reader(self) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP request that we understand")

    def _await_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_TIMEOUT, self._refuse, 408, "the headers did not come in time")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, detail: str) -> None:
        """Below the application: a request that never became one."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        title = http.HTTPStatus(status).phrase
        body = msgspec.json.encode(Problem(title, status, detail))
        head = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\n"
        if status == 503:
            head += "retry-after: 5\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
