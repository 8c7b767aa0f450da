"""What is needed to talk to AWS without its SDK: credentials, from where AWS's own tools find them, and signatures of
requests (version 4). Light: the standard library and urllib3."""

import configparser
import hashlib
import hmac
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from xml.etree import ElementTree

import urllib3

from sparring.errors import InputError, SparringError

__all__ = ["NO_CREDENTIALS", "Credentials", "CredentialsError", "credentials", "region", "sign"]

NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    'or run where a role is attached (for a single sign-on: eval "$(aws configure export-credentials --format env)")'
)
EARLY = 300.0  # seconds before they expire that credentials are renewed
INSTANCE = "http://169.254.169.254"  # of every EC2 machine, answers only to itself
CONTAINER = "http://169.254.170.2"


class CredentialsError(SparringError):
    """There is a place for credentials, but it did not give any."""


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


def region() -> str | None:
    """The one that the environment or the profile names."""
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return named or _profile("AWS_CONFIG_FILE", "config").get("region")


_lock = threading.Lock()
_kept: Credentials | None = None  # those that expire are asked for again only then


def credentials() -> Credentials | None:
    """From the environment, a web identity (Kubernetes), the profile, the container or the instance; none: nobody has
    any. Raises CredentialsError when a place that should have them does not answer."""
    global _kept
    with _lock:
        if _kept is None or _kept.expires is None or time.time() > _kept.expires - EARLY:
            places = (_environment, _web_identity, _shared_file, _container, _instance)
            _kept = next((found for found in (place() for place in places) if found is not None), None)
        return _kept


def _environment() -> Credentials | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    return Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN") or None) if key and secret else None


def _shared_file() -> Credentials | None:
    for values in (
        _profile("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        _profile("AWS_CONFIG_FILE", "config"),
    ):
        if "aws_access_key_id" in values and "aws_secret_access_key" in values:
            token = values.get("aws_session_token")
            return Credentials(values["aws_access_key_id"], values["aws_secret_access_key"], token)
    return None


def _profile(variable: str, file: str) -> Mapping[str, str]:
    """The chosen profile's part of one of the two files of AWS's tools."""
    path = Path(os.environ.get(variable) or f"~/.aws/{file}").expanduser()
    name = os.environ.get("AWS_PROFILE") or "default"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    for section in (name, f"profile {name}"):
        if parser.has_section(section):
            return dict(parser.items(section))
    return {}


def _web_identity() -> Credentials | None:
    """A Kubernetes service account that stands for a role (IRSA)."""
    file, role = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"), os.environ.get("AWS_ROLE_ARN")
    if not file or not role:
        return None
    where = os.environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{region() or 'us-east-1'}.amazonaws.com"
    query = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": "2011-06-15",
        "RoleArn": role,
        "RoleSessionName": os.environ.get("AWS_ROLE_SESSION_NAME") or "sparring",
        "WebIdentityToken": _read(file),
    }
    body = _get("POST", f"{where}/", fields=urlencode(query), timeout=10.0)
    try:
        found = {part.tag.rpartition("}")[2]: part.text or "" for part in ElementTree.fromstring(body).iter()}
        return _temporary(found, "SecretAccessKey", "SessionToken")
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise CredentialsError(f"{where} did not answer with credentials for {role}") from error


def _container() -> Credentials | None:
    """A task of ECS, or a pod of EKS with a pod identity."""
    relative = os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    url = f"{CONTAINER}{relative}" if relative else os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not url:
        return None
    token, file = (os.environ.get(f"AWS_CONTAINER_AUTHORIZATION_TOKEN{end}") for end in ("", "_FILE"))
    if file:
        token = _read(file)
    return _document(url, _get("GET", url, {"Authorization": token} if token else {}))


def _instance() -> Credentials | None:
    """The role of the EC2 machine. Elsewhere nobody answers, which is no error."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    base = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or INSTANCE).rstrip("/")
    try:
        token = _get("PUT", f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, timeout=1.0)
    except CredentialsError:
        return None
    url = f"{base}/latest/meta-data/iam/security-credentials/"
    asked = {"X-aws-ec2-metadata-token": token}
    role = _get("GET", url, asked, missing="").partition("\n")[0]
    return _document(url + role, _get("GET", url + role, asked)) if role else None


def _document(url: str, text: str) -> Credentials:
    try:
        return _temporary(json.loads(text), "SecretAccessKey", "Token")
    except (ValueError, KeyError, TypeError) as error:
        raise CredentialsError(f"{url} did not answer with credentials") from error


def _temporary(found: Mapping[str, Any], secret: str, token: str) -> Credentials:
    expires = datetime.fromisoformat(found["Expiration"]).timestamp()
    return Credentials(found["AccessKeyId"], found[secret], found[token], expires)


def _get(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    fields: str | None = None,
    timeout: float = 2.0,
    missing: str | None = None,
) -> str:
    kind = {} if fields is None else {"Content-Type": "application/x-www-form-urlencoded"}
    try:
        answer = urllib3.request(
            method, url, body=fields, headers={**kind, **(headers or {})}, timeout=timeout, retries=False
        )
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise CredentialsError(f"no credentials from {url}: it does not answer") from error
    if answer.status == 404 and missing is not None:
        return missing
    if answer.status != 200:
        raise CredentialsError(f"no credentials from {url}: it answered {answer.status}")
    return answer.data.decode()


def _read(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise CredentialsError(f"no credentials: {file} cannot be read: {error.strerror}") from error
