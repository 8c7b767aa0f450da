"""The gateway as a process of its own, and raw requests to it."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway_api import GAME, JSON

DEADLINE = 30.0


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextlib.contextmanager
def gateway(data: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A gateway in a process of its own, with GAME registered; its port."""
    command = [sys.executable, "-m", "sparring.gateway", "--data", str(data), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = port_of(process.stdout.readline().strip())
            assert ask(port, "PUT", f"/v1/games/{GAME.name}", GAME.to_json(), JSON)[0] in (200, 201)
            yield port, process
        finally:
            process.kill()


def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def talk(port: int, request: bytes) -> bytes:
    """Sends raw bytes; everything that comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65_536):
            answer += data
        return answer


def problem_in(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head.lower()
    return int(head.split()[1]), json.loads(body)
