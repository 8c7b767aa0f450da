"""Signatures as AWS publishes them for its examples, and credentials from every place where they may be."""

import calendar
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from aws_server import aws_server

from sparring import aws
from sparring.aws import Credentials, CredentialsError, credentials, sign
from sparring.errors import InputError

EXAMPLE = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwthA"
    "x7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY"
    "9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)
UNRESERVED = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
SPACES = {"My-Header1": " value1", "My-Header2": ' "a   b   c"'}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "token", "signature"),
    [
        ("GET", "/", {}, b"", None, "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        (
            "GET",
            "/?Param2=value2&Param1=value1",
            {},
            b"",
            None,
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        ),
        ("GET", "/?Param1=value1", {}, b"", None, "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb"),
        (
            "GET",
            f"/?{UNRESERVED}={UNRESERVED}",
            {},
            b"",
            None,
            "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197",
        ),
        ("GET", f"/{UNRESERVED}", {}, b"", None, "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"),
        ("GET", "/ሴ", {}, b"", None, "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
        ("GET", "/?ሴ=bar", {}, b"", None, "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"),
        ("GET", "/example space/", {}, b"", None, "652487583200325589f1fba4c7e578f72c47cb61beeca81406b39ddec1366741"),
        ("GET", "/", SPACES, b"", None, "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"),
        ("POST", "/", {}, b"", None, "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
        ("POST", "/", FORM, b"Param1=value1", None, "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
        ("POST", "/", {}, b"", TOKEN, "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead"),
    ],
)
def test_the_signatures_of_aws_test_suite(
    method: str, path: str, headers: dict[str, str], body: bytes, token: str | None, signature: str
) -> None:
    who = Credentials(EXAMPLE.access_key, EXAMPLE.secret_key, token)
    now = calendar.timegm((2015, 8, 30, 12, 36, 0))
    got = sign(method, f"https://example.amazonaws.com{path}", headers, body, "service", "us-east-1", who, now=now)
    names = ";".join(
        sorted({"host", "x-amz-date", *map(str.lower, headers)} | ({"x-amz-security-token"} if token else set()))
    )
    assert got["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        f"SignedHeaders={names}, Signature={signature}"
    )


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "signature"),
    [
        (
            "GET",
            "/test.txt",
            {"Range": "bytes=0-9"},
            b"",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test%24file.text",
            {"Date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
            b"Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        ("GET", "/?lifecycle", {}, b"", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("GET", "/?max-keys=2&prefix=J", {}, b"", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_the_signatures_of_the_s3_reference(
    method: str, path: str, headers: dict[str, str], body: bytes, signature: str
) -> None:
    who = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    url, now = f"https://examplebucket.s3.amazonaws.com{path}", calendar.timegm((2013, 5, 24, 0, 0, 0))
    got = sign(method, url, headers, body, "s3", "us-east-1", who, now=now)
    assert got["authorization"].endswith(f"Signature={signature}")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(aws, "_kept", None)


def test_nobody_has_any() -> None:
    assert credentials() is None
    assert aws.region() is None


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_profiles(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    assert credentials() == Credentials("KEY", "SECRET")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN")
    assert credentials() == Credentials("KEY", "SECRET", "TOKEN")
    assert "SECRET" not in repr(credentials())
    assert "TOKEN" not in repr(credentials())


def test_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_profiles(tmp_path)
    assert credentials() == Credentials("DEFAULT", "secret%1")
    assert aws.region() == "eu-west-1"
    monkeypatch.setenv("AWS_PROFILE", "games")
    assert credentials() == Credentials("GAMES", "secret2", "token2")
    assert aws.region() == "us-west-2"
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert aws.region() == "eu-north-1"
    (tmp_path / ".aws/credentials").write_text("nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        credentials()


def _write_profiles(home: Path) -> None:
    (home / ".aws").mkdir()
    (home / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = DEFAULT\naws_secret_access_key = secret%1\n"
        "[games]\naws_access_key_id = GAMES\naws_secret_access_key = secret2\naws_session_token = token2\n"
    )
    (home / ".aws/config").write_text("[default]\nregion = eu-west-1\n[profile games]\nregion = us-west-2\n")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with aws_server() as url:
        yield url


@pytest.mark.real
def test_the_role_of_an_instance(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server)
    found = credentials()
    assert found is not None
    assert found.access_key
    assert found.token
    assert found.expires is not None
    assert found.expires > time.time()


@pytest.mark.real
def test_a_service_account_of_kubernetes(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/sparring-gateway")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server)
    with pytest.raises(CredentialsError, match="token cannot be read"):
        credentials()
    (tmp_path / "token").write_text("a-token-of-the-cluster\n")
    found = credentials()
    assert found is not None
    assert found.access_key.startswith("ASIA")
    assert found.expires is not None
    assert credentials() is found  # kept until it expires
    assert credentials() == found


class Container(BaseHTTPRequestHandler):
    """As the agent of ECS or EKS answers. It renews: the key's name counts."""

    asked = 0

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "let-me-in":
            self.send_error(403)
            return
        Container.asked += 1
        soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))  # too soon to be kept
        body = (
            f'{{"AccessKeyId": "KEY{Container.asked}", "SecretAccessKey": "s", "Token": "t", "Expiration": "{soon}"}}'
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_the_role_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Container) as agent:
        threading.Thread(target=agent.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{agent.server_port}/creds"
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
            with pytest.raises(CredentialsError, match="answered 403"):
                credentials()
            (tmp_path / "token").write_text("let-me-in")
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
            first, second = credentials(), credentials()
        finally:
            agent.shutdown()
    assert first is not None
    assert second is not None
    assert (first.access_key, second.access_key) == ("KEY1", "KEY2")  # renewed before they expire
    with pytest.raises(CredentialsError, match="does not answer"):
        credentials()


def test_it_is_light() -> None:
    code = "import sys, sparring.aws; print(sorted({'boto3', 'obstore', 'numpy', 'msgspec'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
