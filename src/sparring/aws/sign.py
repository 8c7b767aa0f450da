"""Signatures of requests to AWS (version 4) and the addresses of its services. Ours because a game ships it: botocore
and its data are 25 MB, this is a page. Servers find their credentials with `sdk`."""

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlsplit

__all__ = ["Credentials", "endpoint", "partition", "sign"]

# Regions' names begin like this, in this partition, at this domain. All others are "aws" at amazonaws.com.
PARTITIONS = (
    ("cn-", "aws-cn", "amazonaws.com.cn"),
    ("us-gov-", "aws-us-gov", "amazonaws.com"),
    ("eusc-", "aws-eusc", "amazonaws.eu"),
    ("us-iso-", "aws-iso", "c2s.ic.gov"),
    ("us-isob-", "aws-iso-b", "sc2s.sgov.gov"),
    ("eu-isoe-", "aws-iso-e", "cloud.adc-e.uk"),
    ("us-isof-", "aws-iso-f", "csp.hci.ic.gov"),
)


@dataclass(frozen=True)
class Credentials:
    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires: float | None = None  # seconds since 1970; none: they do not


def sign(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    service: str,
    region: str,
    credentials: Credentials,
    *,
    now: float | None = None,
) -> dict[str, str]:
    """The headers to send: those given and those that make the request ours. The URL's path is expected as it goes over
    the wire (quoted)."""
    parts = urlsplit(url)
    stamp = datetime.fromtimestamp(time.time() if now is None else now, UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    sent = {"host": parts.netloc, **{name.lower(): " ".join(value.split()) for name, value in headers.items()}}
    sent["x-amz-date"] = stamp
    if credentials.token is not None:
        sent["x-amz-security-token"] = credentials.token
    if service == "s3":
        sent["x-amz-content-sha256"] = digest
        path = parts.path or "/"
    else:
        path = quote(parts.path or "/", safe="/-_.~")  # every service but S3 quotes it a second time
    names = ";".join(sorted(sent))
    pairs = sorted((_quote(k), _quote(v)) for k, v in parse_qsl(parts.query, keep_blank_values=True))
    request = [method, path, "&".join(f"{k}={v}" for k, v in pairs)]
    request += [*(f"{name}:{sent[name]}" for name in sorted(sent)), "", names, digest]
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    hashed = hashlib.sha256("\n".join(request).encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashed}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    sent["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return sent


def _quote(text: str) -> str:
    return quote(text, safe="-_.~")


def partition(region: str) -> str:
    """The part of AWS that a region is in: names (ARNs) of one mean nothing in another."""
    return next((name for prefix, name, _ in PARTITIONS if region.startswith(prefix)), "aws")


def endpoint(service: str, region: str) -> str:
    domain = next((domain for prefix, _, domain in PARTITIONS if region.startswith(prefix)), "amazonaws.com")
    return f"https://{service}.{region}.{domain}"
