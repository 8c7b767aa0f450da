"""The dashboard's files. Read from the package at each request: they are few and small."""

import asyncio
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

import sparring.dashboard
from sparring.gateway.endpoint import HTTPProblem
from sparring.gateway.openapi import ETAG, UNLESS_KNOWN, Operation

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["home", "operations", "static"]

FILES = Path(sparring.dashboard.__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
HEADERS = {
    "cache-control": "no-cache",  # asks each time, and gets 304
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


async def home(request: Request) -> Response:
    return await _file(request, "index.html")


async def static(request: Request) -> Response:
    return await _file(request, request.path_params["file"])


async def _file(request: Request, name: str) -> Response:
    path = FILES / name
    kind = TYPES.get(path.suffix)
    # A plain name: no separators, no leading dot, so it cannot lead out of the folder.
    if kind is None or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or not path.is_file():
        raise HTTPProblem(404, f"there is no page {name[:100]!r} here")
    data = await asyncio.to_thread(path.read_bytes)
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag}
    if request.headers.get("if-none-match", "").removeprefix("W/") == etag:
        return Response(None, 304, headers)
    return Response(data, 200, headers, kind)


def operations(parts: "Parts") -> list[Operation]:
    return [
        Operation("GET", "/", home, "The dashboard", {"text/html": bytes}, statuses=UNLESS_KNOWN, headers=ETAG),
        Operation(
            "GET",
            "/static/{file}",
            static,
            "The dashboard's files",
            {"*/*": bytes},
            statuses=UNLESS_KNOWN,
            errors=(404,),
            headers=ETAG,
        ),
    ]
