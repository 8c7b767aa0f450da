"""How play travels from a game: over HTTP to a gateway, onto a stream, or by a transport of one's own."""

import re

from sparring import plugins
from sparring.client.transports.base import Transport
from sparring.errors import InputError

__all__ = ["open_transport"]

HTTP = "sparring.client.transports.http:HttpTransport"
TRANSPORTS = {"http": HTTP, "https": HTTP, "kinesis": "sparring.client.transports.kinesis:KinesisTransport"}
OUTSIDE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def open_transport(address: str, timeout: float = 10.0) -> Transport:
    """The transport that an address means: http://…, https://…, kinesis://…, or `my_module:MyTransport://…`, whose
    class is called with the address and the timeout."""
    scheme = address.partition("://")[0]
    if scheme not in TRANSPORTS and not OUTSIDE.fullmatch(scheme):
        scheme = "kinesis" if address.startswith("kinesis:") else "http"  # they say what is wrong with it
    kind = plugins.find("transport", scheme, TRANSPORTS)
    if not (isinstance(kind, type) and issubclass(kind, Transport)):
        raise InputError(f"transport {scheme!r} cannot be opened: it is no subclass of sparring.client.Transport")
    try:
        return kind(address, timeout)  # type: ignore[call-arg]  # how those are made that an address names
    except TypeError as error:
        if scheme in TRANSPORTS:
            raise
        raise InputError(f"transport {scheme!r} cannot be made with (address, timeout): {error}") from error
