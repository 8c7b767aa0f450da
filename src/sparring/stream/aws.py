"""AWS without its SDK: where credentials come from, and Signature Version 4. Small enough for a client to ship."""

import configparser
import email.utils
import hashlib
import hmac
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import urllib3

from sparring.errors import InputError

__all__ = ["CredentialSource", "Credentials", "server_time", "sign"]

INSTANCE = "http://169.254.169.254"
CONTAINER = "http://169.254.170.2"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EARLY = 300.0  # seconds before the end of temporary credentials at which new ones are fetched
QUICK = urllib3.Timeout(connect=1.0, read=5.0)  # elsewhere than on AWS nobody answers there


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of these only the key's name is ever shown."""

    key: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires: float | None = None


class _Issued(msgspec.Struct, rename="pascal"):
    """What the metadata endpoints answer."""

    access_key_id: str
    secret_access_key: str
    token: str
    expiration: str


class CredentialSource:
    """The environment, else the profile in ~/.aws/credentials, else the container's or the instance's role."""

    def __init__(self, profile: str | None, endpoint: str) -> None:
        self._profile = profile
        self._local = urlsplit(endpoint).hostname in LOOPBACK
        self._have: Credentials | None = None

    def get(self) -> Credentials:
        have = self._have
        if have is None or (have.expires is not None and time.time() > have.expires - EARLY):
            have = self._have = self._find()
        return have

    def _find(self) -> Credentials:
        found = None if self._profile else _environment()
        found = found or _profile(self._profile) or _container() or (None if self._local else _instance())
        if found is not None:
            return found
        if self._local:
            return Credentials("local", "local")  # a server on this machine, for tests: it takes any
        raise InputError(
            "no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile in "
            "~/.aws/credentials, or give the machine a role"
        )


def _environment() -> Credentials | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    return Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN") or None) if key and secret else None


def _profile(asked: str | None) -> Credentials | None:
    asked = asked or os.environ.get("AWS_PROFILE")
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read(path)
    except configparser.Error as error:
        raise InputError(f"cannot read {path}: {type(error).__name__}") from None  # its message quotes the line
    if not file.has_section(asked or "default"):
        if asked is not None:
            raise InputError(f"there is no profile {asked!r} in {path}")
        return None
    section = file[asked or "default"]
    try:
        key, secret = section["aws_access_key_id"], section["aws_secret_access_key"]
    except KeyError as error:
        raise InputError(f"the profile {section.name!r} in {path} has no {error.args[0]}") from error
    return Credentials(key, secret, section.get("aws_session_token"))


def _container() -> Credentials | None:
    url = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if url is None and (path := os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")) is not None:
        url = CONTAINER + path
    if url is None:
        return None
    token = os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    if file := os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = Path(file).read_text().strip()
    return _issued(url, {"Authorization": token} if token else {})


def _instance() -> Credentials | None:
    """The role of an EC2 instance (IMDSv2); none when nobody answers."""
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    roles = f"{INSTANCE}/latest/meta-data/iam/security-credentials/"
    try:
        token = urllib3.request("PUT", f"{INSTANCE}/latest/api/token", headers=headers, timeout=QUICK, retries=False)
        if token.status != 200:
            return None
        headers = {"X-aws-ec2-metadata-token": token.data.decode()}
        role = urllib3.request("GET", roles, headers=headers, timeout=QUICK, retries=False)
    except urllib3.exceptions.HTTPError:
        return None
    return _issued(roles + role.data.decode().split("\n")[0], headers) if role.status == 200 else None


def _issued(url: str, headers: dict[str, str]) -> Credentials:
    try:
        answer = urllib3.request("GET", url, headers=headers, timeout=QUICK, retries=2)
        issued = msgspec.json.decode(answer.data, type=_Issued)
        expires = time.mktime(time.strptime(issued.expiration, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    except (urllib3.exceptions.HTTPError, msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"the machine's role gave no credentials ({type(error).__name__}): {url}") from None
    return Credentials(issued.access_key_id, issued.secret_access_key, issued.token, expires)


def sign(
    url: str, headers: dict[str, str], body: bytes, service: str, region: str, credentials: Credentials, now: float
) -> dict[str, str]:
    """The headers of a POST to the root of `url`, with its signature."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    signed = {name.lower(): value for name, value in headers.items()} | {"host": urlsplit(url).netloc}
    signed["x-amz-date"] = stamp
    if credentials.token is not None:
        signed["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(signed))
    canonical = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
    request = f"POST\n/\n\n{canonical}\n{names}\n{hashlib.sha256(body).hexdigest()}"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def server_time(date: str | None) -> float | None:
    """What the answer's Date header says."""
    try:
        return None if date is None else email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
