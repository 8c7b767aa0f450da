"""Is there the head of a Ray cluster at an address? Asked before Ray itself is: Ray tries a dead address for a quarter
of an hour (20 times 40 s), and does not hear signals meanwhile."""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sparring.errors import InputError

__all__ = ["require_head"]

T = TypeVar("T")
PATIENCE = 15.0  # seconds for all of it
ANSWER = 5.0  # seconds until somebody answers, and says who it is
NODE = 5.0  # seconds until Ray finds this machine among the cluster's nodes
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # HTTP/2's greeting, no settings
SETTINGS = 4  # the type of the frame with which every HTTP/2 server begins
STARTS = "`sparring cluster up --head` starts one and tells its address"


def require_head(address: str, here: bool = True) -> str:
    """HOST:PORT of the head that `address` means; `here`: this machine must be one of its nodes. An InputError within
    seconds when there is none."""
    try:
        return within(PATIENCE, lambda: _look(address, here))
    except TimeoutError as error:
        raise _none(address, f"nobody said who is there within {PATIENCE:g} s. {STARTS}") from error


def _none(place: str, why: str) -> InputError:
    return InputError(f"no Ray cluster at {place}: {why}")


def within(seconds: float, function: Callable[[], T]) -> T:
    """Its answer, or TimeoutError. In a thread, as neither a name's resolution nor Ray's own code can be interrupted:
    a signal is heard at once, and who does not return is left behind."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001  # raised again, by the one who waits
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def _look(address: str, here: bool) -> str:
    from ray._common.network_utils import parse_address
    from ray._private.services import canonicalize_bootstrap_address

    if "://" in address or not (address == "auto" or parse_address(address)):
        raise _none(repr(address), f"an address is HOST:PORT, such as 10.0.0.1:6379, or auto. {STARTS}")
    try:
        found = canonicalize_bootstrap_address(address)  # localhost and `auto` are what Ray takes them for
    except (OSError, ValueError) as error:
        raise _none(address, f"{error} {STARTS}") from error
    if found is None:
        raise _none(address, f"there is none on this machine. {STARTS}")
    place = address if found == address else f"{address} (for Ray: {found})"
    host, port = parse_address(found)
    _greet(place, host, port)
    client = _ask(place, found)
    if here:
        _require_node(place, client)
    return str(found)


def _greet(place: str, host: str, port: str) -> None:
    """Who answers speaks HTTP/2, as gRPC does."""
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise _none(place, f"{port!r} is not a port")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return  # it would have to be greeted with Ray's certificates
            connection.sendall(PREFACE)
            until, answer = time.monotonic() + ANSWER, b""
            while len(answer) < 9 and time.monotonic() < until and (more := connection.recv(256)):
                answer += more
    except TimeoutError as error:
        raise _none(place, f"no answer within {ANSWER:g} s. {STARTS}") from error
    except socket.gaierror as error:
        raise _none(place, f"there is no host {host!r} ({error.strerror}). {STARTS}") from error
    except OSError as error:
        raise _none(place, f"{error.strerror or error}. {STARTS}") from error
    if len(answer) < 9 or answer[3] != SETTINGS:
        said = f" and says {answer[:40]!r}" if answer else ""
        raise _none(place, f"something else listens there{said}. {STARTS}")


def _ask(place: str, found: str) -> Any:
    """With Ray's own client, which is quick with whoever speaks gRPC."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub leaves it out
    from ray.exceptions import AuthenticationError, RayError

    try:
        client = GcsClient(address=found)
        client.cluster_id  # noqa: B018  # this asks
    except AuthenticationError as error:
        token = os.environ["RAY_AUTH_TOKEN_PATH"]
        raise InputError(
            f"the Ray cluster at {place} has another token than {token}: copy the head's file to that place"
        ) from error
    except (RayError, RuntimeError) as error:
        raise _none(place, f"who listens there is not the head of a cluster. {STARTS}") from error
    return client


def _require_node(place: str, client: Any) -> None:
    from ray._private.services import get_node_to_connect_for_driver

    try:
        get_node_to_connect_for_driver(client, timeout_seconds=NODE)
    except RuntimeError as error:
        raise InputError(
            f"this machine is not a node of the Ray cluster at {place}: run this on one of its nodes, or join it with "
            "`sparring cluster up --join HEAD:PORT --host THIS_MACHINE`"
        ) from error
