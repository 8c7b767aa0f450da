"""AWS credentials from the simpler ones of the places where AWS's own tools find them. Light, for games: the standard
library and urllib3. Servers find theirs with `sdk`."""

import configparser
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import urllib3

from sparring.aws.sign import Credentials, endpoint
from sparring.errors import InputError, SparringError

__all__ = ["NO_CREDENTIALS", "CredentialsError", "Kept", "credentials", "region"]

NO_CREDENTIALS = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    'or run where a role is attached (for a single sign-on: eval "$(aws configure export-credentials --format env)")'
)
EARLY = 300.0  # seconds before they expire that credentials are renewed
INSTANCE = "http://169.254.169.254"  # of every EC2 machine, answers only to itself
CONTAINER = "http://169.254.170.2"
RETRY = 30.0  # seconds until renewing is tried again while the old ones are good
HOMES = {"cn-north-1": "aws-cn", "us-gov-west-1": "aws-us-gov"}  # where to ask for a role if no region is named
UNKNOWN = {
    "role_arn": "assumes a role",
    "sso_account_id": "signs in by SSO",
    "sso_role_name": "signs in by SSO",
    "login_session": "signs in by `aws login`",
    "credential_process": "asks a program",
}
log = logging.getLogger(__name__)


class CredentialsError(SparringError):
    """There is a place for credentials, but it did not give any."""


def region() -> str | None:
    """The one that the environment or the profile names."""
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named:
        return named
    profile = _profile()
    return profile.shared.get("region") or profile.config.get("region")


class Kept:
    """What `find` finds. Credentials that expire are kept, and renewed early; when that fails, those that are still
    good serve on. Others are looked up again after `lasting` seconds, as files change. Both hold for the environment
    that they were found in."""

    def __init__(self, find: Callable[[], Credentials | None], lasting: float = 0.0) -> None:
        self._find, self._lasting = find, lasting
        self._lock = threading.Lock()
        self._kept: Credentials | None = None
        self._again = 0.0  # by the monotonic clock: not asked again before
        self._warned = False
        self._variables: dict[str, str] = {}

    def __call__(self) -> Credentials | None:
        """None: nobody has any. Raises InputError for what will not work as it is set up, and CredentialsError when a
        place that should have some does not answer."""
        with self._lock:
            variables = {k: v for k, v in os.environ.items() if k.startswith("AWS_") or k == "HOME"}
            kept, now = self._kept, time.monotonic()
            left = 0.0  # seconds
            if kept is not None and variables == self._variables:
                left = self._again - now if kept.expires is None else kept.expires - time.time()
                if left > 0 and (kept.expires is None or left > EARLY or now < self._again):
                    return kept
            try:
                found, why = self._find(), "there are none any more"
            except SparringError as error:
                if left <= 0:
                    raise
                found, why = None, str(error)
            if found is None and left > 0:
                self._again = now + RETRY
                if not self._warned:
                    self._warned = True
                    log.warning("AWS credentials could not be renewed, the old ones are good for %.0f s: %s", left, why)
                return kept
            self._kept, self._warned, self._variables = found, False, variables
            self._again = now + self._lasting if found is not None and found.expires is None else 0.0
            return found


def _find() -> Credentials | None:
    """The environment, a web identity (Kubernetes), the profile, the container, the instance: in the order of AWS's own
    tools. What they would use here and we cannot is an error: what comes after it is somebody else's."""
    found = _environment()
    if found is not None and not _named_profile():
        return found
    profile = _profile()
    if found is None:
        _refuse(profile, "role_arn")
        found = _web_identity()
    if found is None:
        _refuse(profile, "sso_account_id", "sso_role_name")
        found = _static(profile.shared, f"the profile {profile.name!r}")
    if found is None:
        _refuse(profile, "login_session", "credential_process")
        found = _static(profile.config, f"the profile {profile.name!r}")
    return found or _container() or _instance()


def _environment() -> Credentials | None:
    names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    names["aws_session_token"] = "AWS_SESSION_TOKEN"
    return _static({key: os.environ.get(name, "") for key, name in names.items()}, "the environment")


def _static(values: Mapping[str, str], where: str) -> Credentials | None:
    key, secret = values.get("aws_access_key_id"), values.get("aws_secret_access_key")
    if not key and not secret:
        return None
    if not key or not secret:
        has, lacks = ("an access key", "secret") if key else ("a secret", "access key")
        raise InputError(f"{where} has {has} of AWS without its {lacks}: set both, or none")
    return Credentials(key, secret, values.get("aws_session_token") or None)


@dataclass(frozen=True)
class _Profile:
    """The chosen profile's parts of the two files of AWS's tools."""

    name: str
    config: Mapping[str, str]
    shared: Mapping[str, str]  # of the file `credentials`


def _named_profile() -> str | None:
    return os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE") or None


def _profile() -> _Profile:
    name = _named_profile() or "default"
    config, shared = _file("AWS_CONFIG_FILE", "config"), _file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    # [default] and [profile NAME] in the one, [NAME] in the other, and there may be other kinds of sections in the one.
    profiles = {_plain(section.partition(" ")[2]): section for section in config if section.startswith("profile ")}
    section = profiles.get(name, name if name == "default" else "")
    if _named_profile() and section not in config and name not in shared:
        raise InputError(
            f"AWS_PROFILE is {name!r}, and there is no such profile in {_path('AWS_CONFIG_FILE', 'config')}"
            f" or {_path('AWS_SHARED_CREDENTIALS_FILE', 'credentials')}"
        )
    return _Profile(name, *(dict(file[s]) if s in file else {} for file, s in ((config, section), (shared, name))))


def _path(variable: str, file: str) -> Path:
    return Path(os.path.expanduser(os.environ.get(variable) or f"~/.aws/{file}"))  # pathlib's raises without a home


def _file(variable: str, file: str) -> configparser.ConfigParser:
    path, parser = _path(variable, file), configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    return parser


def _plain(name: str) -> str:
    return name.strip().strip("\"'")


def _refuse(profile: _Profile, *keys: str) -> None:
    for key in keys:
        if key in profile.config or key in profile.shared:
            raise InputError(
                f"the profile {profile.name!r} {UNKNOWN[key]} ({key}), which only AWS's SDK can do: on servers"
                " pip install 'sparring[aws]'; in a game set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as by"
                f' eval "$(aws configure export-credentials --profile {profile.name} --format env)"'
            )


def _web_identity() -> Credentials | None:
    """A Kubernetes service account that stands for a role (IRSA)."""
    file, role = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"), os.environ.get("AWS_ROLE_ARN")
    if not file or not role:
        return None
    here = region() or next((at for at, name in HOMES.items() if role.startswith(f"arn:{name}:")), "us-east-1")
    where = os.environ.get("AWS_ENDPOINT_URL_STS") or endpoint("sts", here)
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


credentials = Kept(_find)
