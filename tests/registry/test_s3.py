"""The registry in a bucket, on a real S3 server: one winner per version, readable by anybody where it should be and by
nobody elsewhere, and the old version stays while the server is away."""

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import obstore
import pytest
import urllib3
from aws_server import aws_server
from s3_server import ENVIRONMENT, S3Server
from waiting import until

from sparring.aws import credentials as aws
from sparring.aws.s3 import BLOCK, S3Bucket
from sparring.aws.sign import sign
from sparring.client import Client, Unavailable, public_bot
from sparring.errors import InputError
from sparring.export.weights import save
from sparring.games import Box, Discrete, Game
from sparring.gateway.app import background, create_app
from sparring.networks.policy import Policy
from sparring.registry.manifest import Manifest
from sparring.registry.registry import Registry, RegistryError
from sparring.store.memory import MemoryStore

pytestmark = pytest.mark.real
GAME = Game("CartPole-v1", Box((4,)), Discrete(2), env="CartPole-v1")
MODEL = "games/CartPole-v1/models/bot"
SPARRING = [sys.executable, "-m", "sparring.cli"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def address(server: S3Server, request: pytest.FixtureRequest) -> str:
    """A bucket of this test's own, not made yet."""
    return server.address(f"bucket-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}")


@pytest.fixture
def bucket(address: str) -> S3Bucket:
    bucket = S3Bucket.parse(address)
    list(bucket.init(public=True))
    return bucket


def sparring(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **environment, "COLUMNS": "200"}
    return subprocess.run([*SPARRING, *words], capture_output=True, text=True, timeout=60, check=False, env=env)


def stranger(method: str, url: str, **options: Any) -> urllib3.BaseHTTPResponse:
    """A request without credentials, as any web page or game makes it."""
    return urllib3.request(method, url, timeout=10, retries=False, **options)


def signed(bucket: S3Bucket, method: str, path: str, body: bytes = b"", service: str = "s3") -> None:
    """As the bucket's owner."""
    credentials = aws.credentials()
    assert credentials is not None
    md5 = {"content-md5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
    headers = sign(method, bucket.base + path, md5, body, service, bucket.region, credentials)
    assert urllib3.request(method, bucket.base + path, body=body, headers=headers).status in (200, 204)


# The bucket


def test_init_opens_what_is_published_and_nothing_else(address: str, policy: Policy) -> None:
    bucket = S3Bucket.parse(address)
    assert sparring("registry", "init", address).returncode == 0
    theirs = {
        "Sid": "Theirs",
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::{bucket.name}/site/*",
    }
    signed(bucket, "PUT", "/?policy", json.dumps({"Version": "2012-10-17", "Statement": [theirs]}).encode())
    for path in ("/site/index.html", "/secret.txt", "/bots/notes.txt", "/bots2/games/x", "/games/x"):
        signed(bucket, "PUT", path, b"hello")
    Registry(address).publish(policy, algorithm="dqn")
    pointer = f"{bucket.public_url}/{MODEL}/latest.json"
    assert stranger("GET", pointer).status == 403

    done = sparring("registry", "init", address, "--public")
    assert done.returncode == 0, done.stderr
    assert f"anybody may GET {bucket.name}/bots/games/*" in done.stdout
    assert bucket.public_url in done.stdout
    assert sparring("registry", "init", address, "--public").returncode == 0  # may be repeated

    assert stranger("GET", pointer).json()["version"] == 1
    assert stranger("GET", f"{bucket.base}/site/index.html").status == 200  # what was allowed before still is
    for path in ("/secret.txt", "/bots/notes.txt", "/bots2/games/x", "/games/x", "/?list-type=2", "/?policy"):
        assert stranger("GET", bucket.base + path).status == 403, path
    for method in ("PUT", "DELETE"):
        assert stranger(method, pointer, body=b"{}").status == 403, method
    assert stranger("GET", pointer).json()["version"] == 1


def test_what_readers_are_told(bucket: S3Bucket, address: str, policy: Policy) -> None:
    Registry(address).publish(policy, algorithm="dqn")
    expected = {
        "latest.json": ("application/json", "public, max-age=5"),
        "1/manifest.json": ("application/json", "public, max-age=31536000, immutable"),
        "1/policy.onnx": ("application/octet-stream", "public, max-age=31536000, immutable"),
        "1/card.md": ("text/markdown; charset=utf-8", "public, max-age=31536000, immutable"),
    }
    for name, headers in expected.items():
        answer = stranger("GET", f"{bucket.public_url}/{MODEL}/{name}", headers={"Origin": "https://game.example"})
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == headers
        assert answer.headers["access-control-allow-origin"] == "*"  # a game in a web page may load its bot
        etag = {"If-None-Match": answer.headers["etag"]}
        assert stranger("GET", f"{bucket.public_url}/{MODEL}/{name}", headers=etag).status == 304


def test_init_switches_off_the_block_of_public_policies_and_says_so() -> None:
    """As AWS sets it on every new bucket. The S3 server has no such thing; the AWS API server has."""
    with aws_server() as url:
        bucket = S3Bucket.parse(f"s3://new-bucket/bots?region=eu-west-1&endpoint={url}")
        assert next(iter(bucket.init(public=False))) == "created the bucket new-bucket in eu-west-1"
        client = boto3.client("s3", endpoint_url=url, region_name="eu-west-1")
        every = dict.fromkeys(BLOCK, True)
        client.put_public_access_block(Bucket="new-bucket", PublicAccessBlockConfiguration=every)
        said = " ".join(bucket.init(public=True))
        assert "switched off BlockPublicPolicy and RestrictPublicBuckets" in said
        found = client.get_public_access_block(Bucket="new-bucket")["PublicAccessBlockConfiguration"]
        assert found == BLOCK
        assert "switched off" not in " ".join(bucket.init(public=True))  # it is off


def test_init_does_not_publish_what_it_did_not_write(server: S3Server) -> None:
    address = server.address("with-other-things", "")
    bucket = S3Bucket.parse(address)
    list(bucket.init(public=False))
    signed(bucket, "PUT", "/games/save-of-anna.dat", b"private")
    done = sparring("registry", "init", address, "--public")
    assert done.returncode == 2
    assert "games/save-of-anna.dat" in done.stderr
    assert stranger("GET", f"{bucket.base}/games/save-of-anna.dat").status == 403


@pytest.mark.parametrize("prefix", ["", "team-a/bots_v1.0"])
def test_any_prefix(server: S3Server, policy: Policy, prefix: str, tmp_path: Path) -> None:
    address = server.address(f"prefix-{len(prefix)}", prefix)
    list(S3Bucket.parse(address).init(public=True))
    Registry(address).publish(policy, algorithm="dqn", model="hard.bot-2")
    assert Registry(address).models("CartPole-v1") == ["hard.bot-2"]
    bot = public_bot(S3Bucket.parse(address).public_url, "CartPole-v1", "hard.bot-2", directory=tmp_path)
    assert (bot.model, bot.version) == ("hard.bot-2", 1)


@pytest.mark.parametrize("prefix", ["*", "a/../b", "a//b", "${aws:username}", "a b", "é"])
def test_a_prefix_cannot_open_more_than_itself(prefix: str) -> None:
    with pytest.raises(InputError, match="in the prefix"):
        S3Bucket.parse(f"s3://games/{prefix}?region=eu-west-1")


@pytest.mark.parametrize(
    ("change", "environment", "reason"),
    [
        ({}, {}, "there is no bucket missing-bucket"),
        ({}, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "may not read"),
        ({}, {"AWS_ACCESS_KEY_ID": "nobody"}, "nobody may not read"),
        ({}, {"AWS_ACCESS_KEY_ID": ""}, "no AWS credentials were found"),
        ({"region=us-east-1&": ""}, {"AWS_REGION": ""}, "names no region"),
        ({"region=": "regoin="}, {}, "unknown: regoin"),
        ({"missing-bucket": "Bad_Name"}, {}, "no bucket's name"),
    ],
)
def test_wrong_input_is_reported_at_once(
    server: S3Server, tmp_path: Path, change: dict[str, str], environment: dict[str, str], reason: str
) -> None:
    address = server.address("missing-bucket")
    for old, new in change.items():
        address = address.replace(old, new)
    home = {"HOME": str(tmp_path), "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    words = ("up", "--port", "0", "--data", str(tmp_path / "data"))
    done = sparring(*words, "--registry", address, **home, **environment)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_about_models_look_first(server: S3Server) -> None:
    done = sparring("eval", "CartPole-v1", "--registry", server.address("missing-bucket"))
    assert done.returncode == 2
    assert "there is no bucket missing-bucket" in done.stderr


# Publishing


def test_a_race_for_a_version_has_one_winner(
    bucket: S3Bucket, address: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, attempts, lock = threading.Barrier(8), [], threading.Lock()
    put = Registry._put

    def at_once(self: Registry, path: str, content: bytes, **condition: Any) -> None:
        if path == f"{MODEL}/1/policy.onnx":
            together.wait(30)  # everybody has seen that no version is there
        won = False
        try:
            put(self, path, content, **condition)
            won = True
        finally:
            if path.endswith("policy.onnx"):
                with lock:
                    attempts.append((path, won))

    monkeypatch.setattr(Registry, "_put", at_once)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: _publish(address, policy, n), range(8)))
    assert [won for path, won in attempts if path == f"{MODEL}/1/policy.onnx"].count(True) == 1
    assert len([path for path, _ in attempts if path == f"{MODEL}/1/policy.onnx"]) == 8
    assert sorted(m.version for m in made) == list(range(1, 9))
    found = Registry(address)
    for manifest in made:  # what each publisher believes it published is what is there
        assert found.manifest("CartPole-v1", "bot", manifest.version) == manifest
        found.read("CartPole-v1", "bot", manifest.version, "policy.onnx")


def _publish(address: str, policy: Policy, n: int) -> Manifest:
    return Registry(address).publish(policy, algorithm="dqn", metrics={"publisher": float(n)})


PUBLISHER = """
import sys
from sparring.export import weights
from sparring.registry.registry import Registry
policy, registry = weights.load(open(sys.argv[2], "rb").read()), Registry(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    print(registry.publish(policy, algorithm="dqn").version, flush=True)
"""


def test_latest_never_goes_back(bucket: S3Bucket, address: str, policy: Policy, tmp_path: Path) -> None:
    """Four processes publish; a stranger watches."""
    weights = tmp_path / "policy.safetensors"
    weights.write_bytes(save(policy))
    words = [sys.executable, "-c", PUBLISHER, address, str(weights)]
    publishers = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for publisher in publishers:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "ready\n"
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            answer = stranger("GET", f"{bucket.public_url}/{MODEL}/latest.json")
            if answer.status == 200:
                seen.append(answer.json()["version"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for publisher in publishers:
            assert publisher.stdin is not None
            publisher.stdin.write("go\n")
            publisher.stdin.flush()
        versions = [int(n) for p in publishers for n in p.communicate(timeout=100)[0].split()]
    finally:
        done.set()
        watcher.join()
    assert sorted(versions) == list(range(1, 41))
    assert seen == sorted(seen)
    assert len(set(seen)) > 3  # it did watch
    latest = Registry(address).latest("CartPole-v1")
    assert latest is not None
    assert latest.version == 40


def test_a_deleted_game_leaves_the_bucket(bucket: S3Bucket, address: str, policy: Policy) -> None:
    registry = Registry(address)
    for _ in range(2):
        registry.publish(policy, algorithm="dqn")
    pointer = f"{bucket.public_url}/{MODEL}/latest.json"
    assert stranger("GET", pointer).status == 200
    assert registry.delete_game(GAME.name) == 2
    assert stranger("GET", pointer).status in (403, 404)
    assert Registry(address).latest(GAME.name) is None
    left = [entry["path"] for batch in obstore.list(bucket.store(), "games") for entry in batch]
    assert sorted(left) == [f"{MODEL}/2/deleted", "games/README.md"]
    assert Registry(address).publish(policy, algorithm="dqn").version == 3
    bucket._refuse_strangers()  # what is left is ours


def test_a_slow_publisher_does_not_move_latest_back(
    bucket: S3Bucket, address: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 comes to latest.json after version 2, and had read it before version 2 wrote it."""
    slow, quick = Registry(address), Registry(address)
    put = Registry._put

    def overtaken(self: Registry, path: str, content: bytes, **condition: Any) -> None:
        if self is slow and path.endswith("latest.json") and not quick.versions("CartPole-v1")[1:]:
            assert quick.publish(policy, algorithm="dqn").version == 2
        put(self, path, content, **condition)

    monkeypatch.setattr(Registry, "_put", overtaken)
    assert slow.publish(policy, algorithm="dqn").version == 1
    assert stranger("GET", f"{bucket.public_url}/{MODEL}/latest.json").json()["version"] == 2


def test_a_write_that_is_sent_twice(
    bucket: S3Bucket, address: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first answer was lost: the server has it, and refuses the repetition as a conflict."""
    put = obstore.put

    def twice(store: Any, path: str, content: bytes, **options: Any) -> Any:
        if not path.endswith("policy.onnx"):
            put(store, path, content, **options)
        return put(store, path, content, **options)

    monkeypatch.setattr(obstore, "put", twice)
    manifest = Registry(address).publish(policy, algorithm="dqn")
    assert Registry(address).latest("CartPole-v1") == manifest


# Reading without a server of ours


def test_a_bot_from_the_bucket_alone(
    bucket: S3Bucket, address: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARRING_CLIENT_DIR", str(tmp_path))
    with pytest.raises((InputError, Unavailable), match="no version"):
        public_bot(bucket.public_url, "CartPole-v1")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    registry = Registry(address)
    registry.publish(policy, algorithm="dqn")
    registry.publish(policy, algorithm="dqn")
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    bot = public_bot(bucket.public_url, "CartPole-v1")
    assert bot.version == 2
    assert bot.act([0.0, 0.1, 0.0, -0.1]) in (0, 1)
    assert public_bot(bucket.public_url, "CartPole-v1", version=1).version == 1
    with pytest.raises(InputError, match="no version 9"):
        public_bot(bucket.public_url, "CartPole-v1", version=9)


def test_a_client_follows_the_bucket_while_it_records_to_the_gateway(
    bucket: S3Bucket, address: str, policy: Policy, tmp_path: Path
) -> None:
    store, registry = MemoryStore(), Registry(address)
    registry.publish(policy, algorithm="dqn")
    # The gateway's own registry is empty: a version can only have come from the bucket.
    with (
        background(create_app(store, Registry(tmp_path / "empty"))) as url,
        Client(url, GAME, "anna", registry=bucket.public_url, directory=tmp_path, refresh=0.05) as client,
    ):
        bot = client.bot()
        assert bot.version == 1
        registry.publish(policy, algorithm="dqn")
        until = time.monotonic() + 60
        while bot.version == 1 and time.monotonic() < until:
            action = bot.act([0.0, 0.0, 0.0, 0.0])
            client.record([0.0] * 4, action, 1.0, True, False, [0.0] * 4)
        assert bot.version == 2
        registry.publish(policy, algorithm="dqn", model="careful")
        registry.start_ab("CartPole-v1", {"bot": 1e-9, "careful": 1 - 1e-9}, by="person")
        while bot.model == "bot" and time.monotonic() < until:
            bot.act([0.0, 0.0, 0.0, 0.0])
        assert (bot.model, bot.version) == ("careful", 1)
        assert registry.stop_ab("CartPole-v1", "careful", by="person").ended is not None
        while (bot.model, bot.version) != ("bot", 3) and time.monotonic() < until:
            bot.act([0.0, 0.0, 0.0, 0.0])
        assert (bot.model, bot.version) == ("bot", 3)  # what was kept
        with pytest.raises(InputError, match="nonesuch"):
            client.bot("nonesuch")
        assert client.flush()
    assert store.stats("CartPole-v1").steps > 0


# The server goes away


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[S3Server]:
    """A server of the test's own, to be killed."""
    server = S3Server(tmp_path / "s3")
    server.start()
    yield server
    server.kill()


def test_killed_while_publishing(mortal: S3Server, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    address = mortal.address("games")
    bucket = S3Bucket.parse(address)
    list(bucket.init(public=True))
    registry = Registry(address)
    first = registry.publish(policy, algorithm="dqn")
    put = obstore.put
    for last in ("policy.onnx", "policy.safetensors", "card.md"):  # what still gets through

        def dying(store: Any, path: str, content: bytes, last: str = last, **options: Any) -> Any:
            done = put(store, path, content, **options)
            if path.endswith(last):
                mortal.kill()
            return done

        monkeypatch.setattr(obstore, "put", dying)
        with pytest.raises(RegistryError, match="cannot write"):
            registry.publish(policy, algorithm="dqn")
        monkeypatch.setattr(obstore, "put", put)
        mortal.start()
        assert stranger("GET", f"{bucket.public_url}/{MODEL}/latest.json").json()["version"] == 1
        assert Registry(address).latest("CartPole-v1") == first
    assert registry.publish(policy, algorithm="dqn").version == 5  # three numbers were begun and never finished
    assert Registry(address).versions("CartPole-v1") == [1, 5]


def test_the_gateway_serves_what_it_knows(mortal: S3Server, policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    address = mortal.address("games")
    list(S3Bucket.parse(address).init(public=False))
    registry, store = Registry(address), MemoryStore()
    first = registry.publish(policy, algorithm="dqn")
    store.register(GAME)
    with background(create_app(store, Registry(address))) as url:
        game = f"{url}/v1/games/CartPole-v1"
        paths = ("/models/bot/latest", "/models/bot/1/manifest", "/models/bot/1/files/policy.onnx", "/stats")
        # Nobody has asked for the files: whoever knows a version has it.
        assert stranger("GET", game + paths[0]).json()["version"] == 1
        mortal.kill()
        time.sleep(1.5)  # longer than an answer counts as fresh
        for path in paths:
            answer = stranger("GET", game + path)
            assert answer.status == 200, (path, answer.data)
        policy_file = stranger("GET", game + paths[2]).data
        assert hashlib.sha256(policy_file).hexdigest() == first.files["policy.onnx"].sha256
        body = json.dumps({"obs": [[0.0, 0.0, 0.0, 0.0]]}).encode()
        json_type = {"Content-Type": "application/json"}
        assert stranger("POST", f"{game}/act", body=body, headers=json_type).json()["version"] == 1
        unknown = stranger("GET", f"{game}/models/other/latest")
        assert (unknown.status, unknown.headers["retry-after"]) == (503, "5")
        assert len([r for r in caplog.records if "what is known is served" in r.message]) == 1
        mortal.start()
        registry.publish(policy, algorithm="dqn")
        until = time.monotonic() + 60
        while stranger("GET", game + paths[0]).json()["version"] != 2:
            assert time.monotonic() < until, "the gateway does not see the new version"
            time.sleep(0.1)


def test_the_platform_outlives_its_registry(mortal: S3Server, tmp_path: Path, policy: Policy) -> None:
    """Gateway and trainer as two processes that meet in the data directory and the bucket. S3 dies and comes back."""
    address, data = mortal.address("games"), tmp_path / "data"
    bucket = S3Bucket.parse(address)
    list(bucket.init(public=True))
    words = [*SPARRING, "up", "--data", str(data), "--registry", address, "--publish-every", "1"]
    with (tmp_path / "log").open("wb") as log, contextlib.ExitStack() as stack:
        gateway = subprocess.Popen(
            [*words, "--no-train", "--port", "0", "--print-address"], stdout=subprocess.PIPE, stderr=log, text=True
        )
        stack.callback(stop, gateway)
        trainer = subprocess.Popen([*words, "--no-gateway"], stdout=log, stderr=log)
        stack.callback(stop, trainer)
        assert gateway.stdout is not None
        url = gateway.stdout.readline().strip()
        play = [*SPARRING, "play", "CartPole-v1", "--server", url, "--players", "2", "--rate", "200"]
        stack.callback(stop, subprocess.Popen(play, stdout=log, stderr=log))
        pointer = f"{bucket.public_url}/{MODEL}/latest.json"
        until(lambda: stranger("GET", pointer).status == 200, "a version in the bucket")
        until(lambda: latest(url) >= 1, "it at the gateway")

        mortal.kill()
        trouble = until(lambda: status(url) if "cannot publish" in status(url)["state"] else None, "trouble")
        known = latest(url)  # served although the bucket is away
        until(lambda: status(url)["updates"] > trouble["updates"] + 100, "learning to go on")
        assert latest(url) == known

        mortal.start()
        assert stranger("GET", pointer).json()["version"] >= known  # the old version is what the bucket has
        until(lambda: "cannot publish" not in status(url)["state"], "the trouble to be over")
        # Somebody publishes one that is easily surpassed: the trainer's own may be the best that there can be.
        poor = Registry(address).publish(policy, algorithm="dqn", by="person").version
        assert poor > known
        until(lambda: latest(url) > poor, "a newer version of the trainer's")
        assert status(url)["updates"] > trouble["updates"]  # the trainer never began anew
        stop(trainer)
        assert trainer.returncode == 0
        assert json.loads((data / "trainer/CartPole-v1/status.json").read_bytes())["state"].startswith("stopped")


def latest(url: str) -> int:
    answer = stranger("GET", f"{url}/v1/games/CartPole-v1/models/bot/latest")
    assert answer.status in (200, 404), answer.data
    return int(answer.json()["version"]) if answer.status == 200 else 0


def status(url: str) -> Any:
    return stranger("GET", f"{url}/v1/games/CartPole-v1/stats").json()["trainer"] or {"state": "", "updates": 0}


def stop(process: "subprocess.Popen[Any]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(60)
    if process.stdout is not None:
        process.stdout.close()
