"""Who a request may be for, and from which web pages: against DNS rebinding and foreign pages.

A page of any site can let its own name resolve to 127.0.0.1, or to a machine in the visitor's network. Then it could
read and write here as if it were ours. Its requests still carry its name as their Host. So a gateway answers to names
of this machine, to IP addresses, which cannot be rebound, and to the names in its settings. (Browsers always send a
Host, and an Origin with whatever changes something; game clients and probes send no Origin.)
"""

import functools
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import Scope

from sparring.errors import InputError
from sparring.gateway.endpoint import HTTPProblem

__all__ = ["Hosts"]

LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
PATTERN = re.compile(rf"\*|(\*\.)?{LABEL}(\.{LABEL})*\.?")
NETLOC = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(:[0-9]{1,5})?")
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class Hosts:
    """`allowed`: further names, `*.example.org` for all below one, or `*` for any."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        given = [name.lower() for name in allowed]
        for name in given:
            if not PATTERN.fullmatch(name):
                raise InputError(
                    f"--allowed-host {name!r} is not a host's name: write it like play.example.org or *.example.org, "
                    "without scheme and port"
                )
        self._names = {name.rstrip(".") for name in given if not name.startswith("*")}
        self._below = tuple(name[1:].rstrip(".") for name in given if name.startswith("*."))
        self._any = "*" in given
        self._known = functools.lru_cache(maxsize=256)(self._is_known)

    def check(self, scope: Scope, page_allowed: bool = False) -> None:
        """Raises an HTTPProblem for a request that is not meant for us. 403 is what clients try again later: they keep
        their play until the gateway knows its name.

        :param page_allowed: The web page that asks may, whatever its origin.
        """
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:
            raise HTTPProblem(400, "the request has several Host headers: send one")
        host = hosts[0].decode("latin-1").strip().lower() if hosts else ""
        if host and not self._known(host):
            raise HTTPProblem(
                403,
                f"this gateway does not answer to the name {host[:200]!r}: use its IP address, "
                f"or start it with --allowed-host {(_name(host) or 'NAME')[:200]}",
            )
        if scope["method"] not in SAFE and not page_allowed:
            for name, value in scope["headers"]:
                if name == b"origin":
                    self._check_origin(value.decode("latin-1").strip().lower(), host, scope["path_params"].get("game"))

    def _is_known(self, host: str) -> bool:
        if self._any:
            return True
        if (name := _name(host)) is None:
            return False
        return (
            name == "localhost"
            or name.endswith((".localhost", *self._below))
            or name in self._names
            or _is_address(name)
        )

    def _check_origin(self, origin: str, host: str, game: str | None) -> None:
        """The same page's, or that of a name that was given in full: a proxy may have changed the Host."""
        _, _, netloc = origin.partition("://")
        if not netloc or (netloc != host and _name(netloc) not in self._names):
            play = f', or to play {game[:100]!r} declare it with "origins": ["{origin[:200]}"]' if game else ""
            raise HTTPProblem(
                403,
                f"web pages of {origin[:200]!r} may not change anything here: if they are your own, start the gateway "
                f"with --allowed-host {(_name(netloc) or 'NAME')[:200]}{play}",
            )


def _name(netloc: str) -> str | None:
    """Without port and final dot; an IPv6 address without its brackets."""
    found = NETLOC.fullmatch(netloc)
    return found[1].strip("[]").rstrip(".") if found else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
