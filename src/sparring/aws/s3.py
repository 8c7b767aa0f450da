"""A registry in an S3 bucket: its address, the way our own processes reach it, and `sparring registry init`. That
command makes the bucket and, when asked, lets everybody read what is published in it. Settings of buckets are a few
signed requests of our own: obstore has none."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree

import obstore
import urllib3
from obstore.exceptions import BaseError
from obstore.store import S3Store

from sparring.aws import credentials as chain
from sparring.aws import sdk
from sparring.aws.sign import Credentials, endpoint, partition, sign
from sparring.errors import InputError, SparringError

__all__ = ["S3Bucket"]

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Nothing that a policy or a URL reads in another way.
PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?")
EXAMPLE = "s3://my-bucket/bots?region=eu-west-1"
CONNECT, ANSWER, RETRY = 3.0, 15.0, 10.0  # seconds: a publisher that waits does not learn
PROPAGATION = 20.0  # seconds until a new policy holds everywhere
OURS = re.compile(
    r"games/(README\.md|[^/]+/ab\.json|[^/]+/models/[^/]+/((latest|aliases/[^/]+|moves/[^/]+)\.json|[1-9][0-9]*/[^/]+))"
)
README = b"""# Bots, published by Sparring

    games/<game>/models/<model>/latest.json               the version that players get
    games/<game>/models/<model>/aliases/<name>.json       other names of versions; `candidate` is on trial
    games/<game>/models/<model>/moves/<number>.json       the journal: which name was moved, when and why
    games/<game>/models/<model>/<version>/manifest.json   what it is: game, metrics, data, sha256 of every file
    games/<game>/models/<model>/<version>/policy.onnx     raw observation in, action out

Plain GETs, from anywhere. A version never changes once its manifest is there.
"""
CORS = (
    b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod>"
    b"<AllowedMethod>HEAD</AllowedMethod><AllowedHeader>*</AllowedHeader><ExposeHeader>ETag</ExposeHeader>"
    b"<MaxAgeSeconds>86400</MaxAgeSeconds></CORSRule></CORSConfiguration>"
)
# A public policy is let through; public ACLs, which nobody needs here, stay blocked.
BLOCK = {"BlockPublicAcls": True, "IgnorePublicAcls": True, "BlockPublicPolicy": False, "RestrictPublicBuckets": False}


@dataclass(frozen=True)
class S3Bucket:
    """`s3://name/prefix?region=…`, or with `&endpoint=http://…` another server that speaks S3."""

    name: str
    prefix: str
    region: str
    endpoint: str | None = None

    @classmethod
    def parse(cls, address: str) -> "S3Bucket":
        parts = urlsplit(address)
        options = dict(parse_qsl(parts.query))
        region = options.pop("region", None) or chain.region()
        endpoint = options.pop("endpoint", None)
        prefix = unquote(parts.path).strip("/")
        name = parts.netloc
        if not NAME.fullmatch(name) or options or parts.fragment:
            wrong = f"{name!r} is no bucket's name" if not options else f"unknown: {', '.join(options)}"
            raise InputError(f"the registry's address {address}: {wrong}. Write it like {EXAMPLE}")
        if not PREFIX.fullmatch(prefix):
            raise InputError(
                f"the registry's address {address}: use letters, digits, '-', '_', '.' and '/' in the prefix"
            )
        if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
            raise InputError(f"the registry's address {address}: the endpoint is a URL, like http://127.0.0.1:7070")
        if region is None:
            raise InputError(f"the registry's address {address} names no region: add ?region=…, or set AWS_REGION")
        return cls(name, prefix, region, endpoint.rstrip("/") if endpoint else None)

    @property
    def base(self) -> str:
        """Where its keys begin. A name with dots has no certificate of its own."""
        if self.endpoint is not None:
            return f"{self.endpoint}/{self.name}"
        host = endpoint("s3", self.region).removeprefix("https://")
        return f"https://{host}/{self.name}" if "." in self.name else f"https://{self.name}.{host}"

    @property
    def public_url(self) -> str:
        """What a game needs that reads the bucket itself."""
        return f"{self.base}/{quote(self.prefix)}".rstrip("/")

    @property
    def address(self) -> str:
        """What `parse` was given, complete."""
        return f"{self}?region={self.region}" + (f"&endpoint={self.endpoint}" if self.endpoint else "")

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    def store(self) -> S3Store:
        return S3Store(
            self.name,
            prefix=self.prefix or None,
            region=self.region,
            endpoint=self.base,
            virtual_hosted_style_request=True,  # `base` names the bucket already
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=CONNECT),
                "timeout": timedelta(seconds=ANSWER),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=RETRY)},
            credential_provider=_for_obstore,
        )

    def check(self) -> None:
        """InputError: the address, the credentials or the rights are wrong. SparringError: nobody answers."""
        answer = self._ask("GET", query=f"?list-type=2&max-keys=1&prefix={quote(self._key('games/'), safe='')}")
        if answer.status != 200:
            raise self._problem("read", answer)
        if b"<ListBucketResult" not in answer.data:
            raise InputError(f"{self.base} does not answer like S3: is it the right address?")

    def init(self, public: bool) -> Iterator[str]:
        """Makes the bucket if there is none; with `public`, opens what is published in it, and nothing else, to
        everybody. May be repeated. Says what was done."""
        yield self._create()
        self.check()
        if not public:
            yield "it is readable with credentials only (--public opens it)"
            return
        self._refuse_strangers()
        yield from self._unblock()
        yield from self._allow()
        yield self._share_with_pages()
        self._prove()
        yield f"anybody can read it now, by plain GETs from {self.public_url}"

    # Steps of `init`

    def _create(self) -> str:
        found = self._ask("HEAD")
        if found.status == 200:
            return f"the bucket {self.name} is there"
        if found.status != 404:
            raise self._problem("use", found)
        body = b""
        if self.region != "us-east-1":
            body = (
                f"<CreateBucketConfiguration><LocationConstraint>{self.region}</LocationConstraint>"
                "</CreateBucketConfiguration>"
            ).encode()
        self._do("create", "PUT", body=body)
        return f"created the bucket {self.name} in {self.region}"

    def _refuse_strangers(self) -> None:
        """What is there already would become public with the bots."""
        try:
            keys = [entry["path"] for batch in obstore.list(self.store(), "games") for entry in batch]
        except BaseError as error:
            raise SparringError(f"cannot list {self}: {str(error).partition(chr(10))[0]}") from error
        strangers = [key for key in keys if not OURS.fullmatch(key)]
        if strangers:
            raise InputError(
                f"{self}/games holds what no registry wrote ({strangers[0]}): it would become public, too. "
                "Choose another prefix"
            )

    def _unblock(self) -> Iterator[str]:
        """AWS blocks public policies of new buckets since 2023."""
        found = self._ask("GET", query="?publicAccessBlock")
        if found.status in (404, 405, 501):  # none is set, or a server that knows no such thing
            return
        if found.status != 200:
            raise self._problem("read the public access block of", found)
        on = {part.tag.rpartition("}")[2] for part in ElementTree.fromstring(found.data) if part.text == "true"}
        if not on & {"BlockPublicPolicy", "RestrictPublicBuckets"}:
            return
        parts = "".join(f"<{name}>{str(value).lower()}</{name}>" for name, value in BLOCK.items())
        body = f"<PublicAccessBlockConfiguration>{parts}</PublicAccessBlockConfiguration>".encode()
        self._do("change the public access block of", "PUT", "?publicAccessBlock", body)
        yield "switched off BlockPublicPolicy and RestrictPublicBuckets of this bucket (public ACLs stay blocked)"

    def _allow(self) -> Iterator[str]:
        """Adds our statement to the bucket's policy; those of others stay."""
        found = self._ask("GET", query="?policy")
        if found.status not in (200, 404):
            raise self._problem("read the policy of", found)
        policy: Any = json.loads(found.data) if found.status == 200 else {"Version": "2012-10-17", "Statement": []}
        ours = self.statement()
        others: list[Any] = policy["Statement"] if isinstance(policy["Statement"], list) else [policy["Statement"]]
        others = [statement for statement in others if statement.get("Sid") != ours["Sid"]]
        policy["Statement"] = [*others, ours]
        self._do("write the policy of", "PUT", "?policy", json.dumps(policy).encode())
        yield f"wrote its policy: anybody may GET {ours['Resource'].rpartition(':::')[2]}"

    def statement(self) -> dict[str, Any]:
        """Of the bucket's policy. Listing stays closed: what is published is found through latest.json."""
        return {
            "Sid": f"SparringPublicRead{hashlib.sha256(self.prefix.encode()).hexdigest()[:8]}",
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": f"arn:{partition(self.region)}:s3:::{self.name}/{self._key('games/*')}",
        }

    def _share_with_pages(self) -> str:
        found = self._ask("GET", query="?cors")
        if found.status == 200:
            return "left its CORS rules as they are"
        if found.status != 404:
            raise self._problem("read the CORS rules of", found)
        self._do("write the CORS rules of", "PUT", "?cors", CORS)
        return "web pages of any origin may load bots from it (CORS)"

    def _prove(self) -> None:
        """Reads as a stranger would: an account can forbid what its bucket allows."""
        path = f"/{quote(self._key('games/README.md'))}"
        headers = {"content-type": "text/markdown; charset=utf-8", "cache-control": "max-age=300"}
        self._do("write to", "PUT", path, README, headers)
        until = time.monotonic() + PROPAGATION
        while (status := self._send("GET", self.base + path, b"", {}).status) != 200:
            if time.monotonic() > until:
                raise SparringError(
                    f"the policy of {self.name} is written, but a GET without credentials is answered with {status}: "
                    "the account itself forbids it (S3 console: Block Public Access settings for this account)"
                )
            time.sleep(0.5)

    # Requests

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def _do(
        self, what: str, method: str, rest: str = "", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        path, mark, query = rest.partition("?")
        answer = self._ask(method, path, mark + query, body, headers)
        if answer.status not in (200, 204):
            raise self._problem(what, answer)

    def _ask(
        self, method: str, path: str = "", query: str = "", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> urllib3.BaseHTTPResponse:
        url = f"{self.base}{path or '/'}{query}"
        sent = dict(headers or {})
        if body:
            sent["content-md5"] = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        return self._send(method, url, body, sign(method, url, sent, body, "s3", self.region, _credentials()))

    def _send(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=CONNECT, read=ANSWER)
        try:
            return urllib3.request(method, url, body=body, headers=headers, timeout=timeout, redirect=False, retries=2)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise SparringError(f"{self} is not reachable at {self.base}: {_cause(error)}") from error

    def _problem(self, what: str, answer: urllib3.BaseHTTPResponse) -> SparringError:
        code, message = _code(answer)
        elsewhere = answer.headers.get("x-amz-bucket-region")
        if elsewhere and elsewhere != self.region:
            return InputError(
                f"the bucket {self.name} is in {elsewhere}, not in {self.region}: write ?region={elsewhere}"
            )
        if code == "NoSuchBucket" or (answer.status == 404 and not code):
            return InputError(
                f"there is no bucket {self.name} at {self.base}: `sparring registry init '{self.address}'` makes one"
            )
        if 300 <= answer.status < 500 and answer.status not in (408, 429):
            key = _credentials().access_key
            return InputError(f"the key {key} may not {what} {self}: {code or answer.status}{message}")
        return SparringError(f"cannot {what} {self}: {self.base} answered {answer.status} {code}{message}")


def _credentials() -> Credentials:
    found = sdk.credentials()
    if found is None:
        raise InputError(chain.NO_CREDENTIALS)
    return found


def _for_obstore() -> Any:
    found = _credentials()
    expires = None if found.expires is None else datetime.fromtimestamp(found.expires, UTC)
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": expires,
    }


def _code(answer: urllib3.BaseHTTPResponse) -> tuple[str, str]:
    """S3's name for what is wrong, and its words."""
    try:
        parts = {part.tag.rpartition("}")[2]: part.text or "" for part in ElementTree.fromstring(answer.data).iter()}
    except ElementTree.ParseError:
        return "", ""  # HEAD has no body, and a proxy's page says nothing
    return parts.get("Code", ""), f" ({parts['Message']})" if parts.get("Message") else ""


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error.__cause__ or error
    return str(reason).rpartition(": ")[2]
