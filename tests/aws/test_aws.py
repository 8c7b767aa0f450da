"""Signatures as AWS publishes them for its examples, and credentials from every place where they may be."""

import calendar
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from aws_server import aws_server
from botocore.session import Session

from sparring.aws import credentials as aws
from sparring.aws import sdk as aws_sdk
from sparring.aws import sign as signing
from sparring.aws.credentials import CredentialsError, credentials
from sparring.aws.kinesis import Kinesis
from sparring.aws.s3 import S3Bucket
from sparring.aws.sign import Credentials, sign
from sparring.errors import InputError, SparringError

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
    broken = False

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "let-me-in" or Container.broken:
            self.send_error(403)
            return
        Container.asked += 1
        # Four more minutes: soon enough to be renewed each time.
        soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 240))
        body = (
            f'{{"AccessKeyId": "KEY{Container.asked}", "SecretAccessKey": "s", "Token": "t", "Expiration": "{soon}"}}'
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file with the token that its agent wants."""
    Container.asked, Container.broken = 0, False
    with HTTPServer(("127.0.0.1", 0), Container) as agent:
        threading.Thread(target=agent.serve_forever).start()
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{agent.server_port}/creds")
        yield tmp_path / "token"
        agent.shutdown()


def test_the_role_of_a_container(monkeypatch: pytest.MonkeyPatch, container: Path) -> None:
    with pytest.raises(CredentialsError, match="answered 403"):
        credentials()
    container.write_text("let-me-in")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(container))
    first, second = credentials(), credentials()
    assert first is not None
    assert second is not None
    assert (first.access_key, second.access_key) == ("KEY1", "KEY2")  # renewed before they expire
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/creds")
    with pytest.raises(CredentialsError, match="does not answer"):
        credentials()


@pytest.mark.parametrize("find", [credentials, aws_sdk.credentials], ids=["game", "server"])
def test_credentials_that_are_still_good_serve_while_they_cannot_be_renewed(
    find: Callable[[], Credentials | None],
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    container.write_text("let-me-in")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(container))
    good = find()
    assert good is not None
    Container.broken = True
    assert [find(), find(), find()] == [good] * 3
    assert sum("could not be renewed" in r.getMessage() for r in caplog.records) == 1  # logged once …
    monkeypatch.setattr(aws, "RETRY", 0.0)
    Container.broken = False
    kept = aws.credentials if find is credentials else aws_sdk._kept
    kept._again = 0.0  # … and tried again after a while
    renewed = find()
    assert renewed is not None
    assert renewed != good
    Container.broken = True
    monkeypatch.setattr(time, "time", lambda right=time.time: right() + 300)  # now they are of no use to anybody
    with pytest.raises(SparringError):
        find()


# What the small chain does not know, and AWS's own does


PROFILES = """
[default]
region = eu-west-1
[profile games]
role_arn = arn:aws:iam::123456789012:role/games
source_profile = base
region = ap-southeast-2
[profile base]
aws_access_key_id = BASE
aws_secret_access_key = base-secret
[profile sso]
sso_session = us
sso_account_id = 123456789012
sso_role_name = games
[sso-session us]
sso_region = us-east-1
sso_start_url = https://example.awsapps.com/start
[profile program]
credential_process = {program}
[profile login]
login_session = arn:aws:iam::123456789012:user/anna
[profile half]
aws_access_key_id = HALF
[profile empty]
region = eu-north-1
[services local]
kinesis =
  endpoint_url = http://127.0.0.1:9
"""


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as AWS's tools write them, and a role of the machine's that nobody asked for."""
    (tmp_path / ".aws").mkdir()
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\nimport json, time\n"
        "soon = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(time.time() + 3600))\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'PROGRAM', 'SecretAccessKey': 's', 'SessionToken': 't',"
        " 'Expiration': soon}))\n"
    )
    program.chmod(0o755)
    (tmp_path / ".aws/config").write_text(PROFILES.format(program=program))
    return tmp_path / ".aws/config"


@pytest.fixture
def another_identity(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a role, which nobody asked for."""
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server)


REFUSED = {
    "nowhere": "no such profile",
    "services local": "no such profile",
    "games": r"'games' assumes a role .*sparring\[aws\]",
    "sso": "'sso' signs in by SSO",
    "program": "'program' asks a program",
    "login": "'login' signs in by `aws login`",
    "half": "access key of AWS without its secret",
}


@pytest.mark.real
@pytest.mark.usefixtures("profiles", "another_identity")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_a_profile_that_cannot_be_used_is_never_another_identity(
    name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credentials() is not None  # the machine's own
    monkeypatch.setenv(variable, name)
    with pytest.raises(InputError, match=REFUSED[name]):
        credentials()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match=REFUSED[name]):
        credentials()


@pytest.mark.real
@pytest.mark.usefixtures("another_identity")
def test_half_a_key_in_the_environment_is_never_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    with pytest.raises(InputError, match="the environment has an access key of AWS without its secret"):
        credentials()


def test_keys_in_the_environment_do_not_hide_a_profile_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    for find in (credentials, aws_sdk.credentials):
        with pytest.raises(InputError, match="nowhere"):
            find()


def test_a_file_that_may_not_be_read_is_reported(profiles: Path) -> None:
    profiles.unlink()
    profiles.mkdir()  # root reads everything else
    with pytest.raises(InputError, match="config cannot be read: Is a directory"):
        credentials()


def test_a_profile_without_keys_leaves_them_to_the_next_place(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "empty")
    assert credentials() is None
    assert aws.region() == "eu-north-1"


# Servers


@pytest.mark.real
def test_servers_assume_a_role_by_its_profile(server: str, profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "games")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server)
    found = aws_sdk.credentials()
    assert found is not None
    assert found.access_key.startswith("ASIA")
    assert found.expires is not None
    assert time.time() + 600 < found.expires < time.time() + 2 * 3600
    assert aws_sdk.credentials() is found  # not asked for each request


@pytest.mark.real
@pytest.mark.usefixtures("another_identity")
def test_a_role_that_is_not_given_is_never_another_identity(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "games")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")  # STS does not answer
    with pytest.raises(CredentialsError, match=r"127\.0\.0\.1:9"):
        aws_sdk.credentials()
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(InputError, match="aws sso login"):  # nobody signed in
        aws_sdk.credentials()
    monkeypatch.setenv("AWS_PROFILE", "half")
    with pytest.raises(InputError, match="Partial"):
        aws_sdk.credentials()


def test_servers_ask_a_program(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "program")
    found = aws_sdk.credentials()
    assert found is not None
    assert (found.access_key, found.token) == ("PROGRAM", "t")
    assert found.expires is not None
    program = profiles.parent.parent / "program"
    for text, message in (("echo nonsense", "Expecting value"), ("echo no such luck >&2; exit 3", "no such luck")):
        program.write_text(f"#!/bin/sh\n{text}\n")
        monkeypatch.setenv("AWS_REGION", text[-2:])  # found in another environment
        with pytest.raises(InputError, match=message):
            aws_sdk.credentials()


def test_a_program_that_hangs_is_not_waited_for_for_ever(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, go = profiles.parent.parent / "program", profiles.parent / "go"
    os.mkfifo(go)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    program.write_text(f"#!/bin/sh\ncat {go}\n")
    monkeypatch.setenv("AWS_PROFILE", "program")
    monkeypatch.setattr(aws_sdk, "LIMIT", 0.5)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(CredentialsError, match="still waited for"):
            aws_sdk.credentials()
    assert threading.active_count() == before + 1  # the same one is waited for
    monkeypatch.setattr(aws_sdk, "LIMIT", 60.0)
    go.write_text(said)
    found = aws_sdk.credentials()
    assert found is not None
    assert found.access_key == "PROGRAM"


@pytest.mark.real
@pytest.mark.usefixtures("another_identity")
def test_servers_have_the_role_of_their_instance() -> None:
    found = aws_sdk.credentials()
    assert found is not None
    assert found.token
    assert found.expires is not None
    assert found.expires > time.time()


@pytest.mark.real
def test_servers_have_the_role_of_a_service_account(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-token-of-the-cluster\n")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/sparring-gateway")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    found = aws_sdk.credentials()
    assert found is not None
    assert found.access_key.startswith("ASIA")


def test_servers_follow_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_profiles(tmp_path)
    assert aws_sdk.credentials() == Credentials("DEFAULT", "secret%1")
    file = tmp_path / ".aws/credentials"
    file.write_text(file.read_text().replace("DEFAULT", "NEXT"))
    aws_sdk._kept._again = 0.0  # some minutes later
    assert aws_sdk.credentials() == Credentials("NEXT", "secret%1")


def test_a_server_without_the_sdk_has_the_small_chain_and_is_told_what_to_install(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setenv("AWS_PROFILE", "base")
    assert aws_sdk.credentials() == Credentials("BASE", "base-secret")
    monkeypatch.setenv("AWS_PROFILE", "games")
    with pytest.raises(InputError, match=r"pip install 'sparring\[aws\]'"):
        aws_sdk.credentials()


def test_a_game_has_the_small_chain_whatever_is_installed(profiles: Path) -> None:
    """Its own process: what it imports shows. A server's, the same stream by its command, goes by the SDK."""
    code = (
        "import sys; from sparring.client.transports.kinesis import KinesisTransport\n"
        "from sparring.aws.kinesis import Kinesis\n"
        "stream = Kinesis('kinesis://play')\n"
        "try: stream._credentials()\n"
        "except Exception as error: print(stream.region, type(error).__name__, 'assumes a role' in str(error))\n"
        "print([m for m in ('botocore', 'sparring.aws.sdk') if m in sys.modules])"
    )
    env = {**os.environ, "AWS_PROFILE": "games", "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "ap-southeast-2 InputError True\n[]\n"


# Regions and partitions


def test_a_stream_is_in_the_profiles_region(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Kinesis("kinesis://play").region == "eu-west-1"
    monkeypatch.setenv("AWS_PROFILE", "games")
    assert Kinesis("kinesis://play").endpoint == "https://kinesis.ap-southeast-2.amazonaws.com"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-1")
    assert Kinesis("kinesis://play").region == "us-west-1"
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert Kinesis("kinesis://play").region == "us-west-2"
    assert Kinesis("kinesis://play?region=eu-north-1").region == "eu-north-1"


def test_every_partition_has_its_own_names() -> None:
    """As botocore lists them."""
    session = Session()
    for region in ("eu-west-1", "cn-north-1", "us-gov-east-1", "eusc-de-east-1", "us-iso-east-1", "us-isob-east-1"):
        partition = session.get_partition_for_region(region)
        domain = next(p for p in _partitions(session) if p["id"] == partition)["outputs"]["dnsSuffix"]
        assert signing.partition(region) == partition
        assert signing.endpoint("sts", region) == f"https://sts.{region}.{domain}"
        bucket = S3Bucket("name", "bots", region)
        assert bucket.public_url == f"https://name.s3.{region}.{domain}/bots"
        assert bucket.statement()["Resource"] == f"arn:{partition}:s3:::name/bots/games/*"
        assert Kinesis(f"kinesis://play?region={region}").endpoint == f"https://kinesis.{region}.{domain}"
    assert S3Bucket("a.b", "", "cn-north-1").base == "https://s3.cn-north-1.amazonaws.com.cn/a.b"


def _partitions(session: Session) -> list[Any]:
    found: list[Any] = session.get_component("data_loader").load_data("partitions")["partitions"]
    return found


def test_it_is_light() -> None:
    heavy = {"boto3", "botocore", "obstore", "numpy", "msgspec"}
    code = f"import sys, sparring.aws.credentials; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
