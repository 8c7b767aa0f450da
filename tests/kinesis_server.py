"""A real server of the Kinesis API for tests, streams on it, and a proxy that makes it as moody as the real service."""

import contextlib
import email.utils
import http.server
import json
import random
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from sparring.aws.kinesis import Kinesis, Record

CLOCK = time.time  # the server's: a test may set back the client's
ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Server:
    """kinesalite on a free port. `path`: where it keeps its records; none: in memory."""

    def __init__(self, path: Path | None = None) -> None:
        command = subprocess.run([ROOT / "scripts/kinesalite"], capture_output=True, text=True, check=True).stdout
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        options = [f"--port={self.port}", "--createStreamMs=50", "--updateStreamMs=50", "--shardLimit=100"]
        if path is not None:
            options.append(f"--path={path}")
        self.process = subprocess.Popen([command.strip(), *options], stdout=subprocess.DEVNULL)
        self._streams = 0
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise AssertionError("kinesalite did not start")

    def stream(self, shards: int = 2, endpoint: str | None = None, **options: Any) -> Kinesis:
        """A new stream, to be reached through `endpoint` (this server's own if none)."""
        self._streams += 1
        name = f"play-{self._streams}"
        Kinesis(f"kinesis://{name}?endpoint={self.endpoint}").create(shards, 24)
        query = urllib.parse.urlencode({"endpoint": endpoint or self.endpoint, **options})
        return Kinesis(f"kinesis://{name}?{query}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@contextlib.contextmanager
def running(path: Path | None = None) -> Iterator[Server]:
    server = Server(path)
    try:
        yield server
    finally:
        server.stop()


def everything(stream: Kinesis) -> dict[str, list[Record]]:
    """All records of each shard, in their order."""
    found: dict[str, list[Record]] = {}
    for shard in stream.shards():
        records = found.setdefault(shard.shard_id, [])
        iterator: str | None = stream.iterator(shard.shard_id, None)
        while iterator is not None:
            page = stream.page(iterator, 100)
            records += page.records
            iterator = page.next_shard_iterator if page.records else None
    return found


class Proxy:
    """Between a client and a server. `mood(action, request)` may answer instead of the server: with a status and a
    body, with a set of places in a PutRecords whose records are throttled, or "lost": the server takes the request, and
    nobody hears the answer."""

    def __init__(self, port: int, mood: Callable[[str, Any], Any]) -> None:
        self.mood = mood
        self.requests: list[tuple[str, int, int, Any]] = []  # action, bytes of the body, of all records, the headers
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer = proxy.answer(port, self.headers, body)
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response(answer[0])
                self.send_header("content-length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

            def date_time_string(self, timestamp: float | None = None) -> str:
                return email.utils.formatdate(CLOCK(), usegmt=True)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, port: int, headers: Any, body: bytes) -> tuple[int, bytes] | None:
        action, asked = headers["x-amz-target"].partition(".")[2], json.loads(body)
        sizes = [len(r["Data"]) * 3 // 4 + len(r["PartitionKey"]) for r in asked.get("Records", [])]
        self.requests.append((action, len(sizes), sum(sizes), dict(headers)))
        mood = self.mood(action, asked)
        if isinstance(mood, tuple):
            return mood
        throttled = mood if isinstance(mood, set) else set()
        if throttled:
            records = asked["Records"]
            asked["Records"] = [r for i, r in enumerate(records) if i not in throttled]
            body = json.dumps(asked).encode()
        status, answer = 200, b'{"Records":[]}'
        if not throttled or asked["Records"]:
            status, answer = forward(port, headers, body)
        if mood == "lost":
            return None
        if throttled and status == 200:
            answer = merge(json.loads(answer)["Records"], throttled)
        return status, answer


def forward(port: int, headers: Any, body: bytes) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        kept = {k: v for k, v in headers.items() if k.lower() not in ("content-length", "host", "connection")}
        connection.request("POST", "/", body, kept)
        response = connection.getresponse()
        return response.status, response.read()


def merge(taken: list[Any], throttled: set[int]) -> bytes:
    busy = {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "Rate exceeded for shard"}
    results, rest = [], iter(taken)
    for i in range(len(taken) + len(throttled)):
        results.append(busy if i in throttled else next(rest))
    return json.dumps({"FailedRecordCount": len(throttled), "Records": results}).encode()


def moody(seed: int) -> Callable[[str, Any], Any]:
    """The first requests meet everything that the real service does, of the others a half."""
    rng = random.Random(seed)
    first = iter(range(5))
    throttle = json.dumps({"__type": "ProvisionedThroughputExceededException", "message": "slow down"}).encode()

    def mood(action: str, asked: Any) -> Any:
        if action != "PutRecords":
            return None
        match next(first, rng.randrange(8)):
            case 0:
                return 400, throttle
            case 1:
                return 500, b"<html>Internal error</html>"
            case 2:
                return "lost"
            case 3 | 4:
                return {i for i in range(len(asked["Records"])) if rng.random() < 0.5}
        return None

    return mood


__all__ = ["Proxy", "Server", "everything", "free_port", "moody", "running"]
