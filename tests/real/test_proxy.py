"""The configurations of docs/proxy.md, run as they stand there: real proxies before a real gateway. Only where they
listen, and where the gateway and the keys are, is filled in."""

import base64
import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.client import Client
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Categorical, Dense
from sparring.registry.registry import Registry

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "proxy.md").read_text()
NAME, USER, PASSWORD = "play.example.com", "games", "p@ss%w:rd"
GAME = Game("Eye", Box((20_000,), "uint8"), Discrete(3))  # 51 steps are a MiB that no compression makes smaller


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return found


def fill(text: str, values: dict[str, str]) -> str:
    for old, new in values.items():
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the page's configuration"
        text = text.replace(old, new)
    return text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(command: list[Any], folder: Path, port: int) -> Iterator[None]:
    """Until the block ends; it answers when the block begins."""
    homes = {name: str(folder) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with (
        (folder / "output").open("w+") as output,
        subprocess.Popen([str(word) for word in command], stdout=output, stderr=output, env=homes) as process,
    ):
        try:
            until = time.monotonic() + 30
            while True:
                assert process.poll() is None, (folder / "output").read_text()
                assert time.monotonic() < until, (folder / "output").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            process.wait(30)


class Site:
    """A gateway, known to the world by NAME."""

    def __init__(self, folder: Path, gateway: str) -> None:
        self.folder, self.gateway = folder, gateway.removeprefix("http://")
        self.port = free_port()
        self.url = f"https://games:p%40ss%25w%3Ard@{NAME}:{self.port}"
        self.keys = folder / "cert.pem", folder / "key.pem"
        self.registry = Registry(folder / "data" / "registry")
        self.trust = ssl.create_default_context(cafile=str(self.keys[0]))

    @contextlib.contextmanager
    def nginx(self, **changes: str) -> Iterator[None]:
        users = self.folder / "users"
        users.write_text(f"{USER}:{printed('openssl', 'passwd', '-apr1', PASSWORD)}\n")
        live = f"/etc/letsencrypt/live/{NAME}"
        text = fill(
            block("nginx"),
            {
                "listen 443": f"listen 127.0.0.1:{self.port}",
                "127.0.0.1:8400": self.gateway,
                f"{live}/fullchain.pem": str(self.keys[0]),
                f"{live}/privkey.pem": str(self.keys[1]),
                "/etc/nginx/sparring.users": str(users),
                **changes,
            },
        )
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # nginx makes all of them when it starts
        places = "".join(f"{kind}_temp_path {self.folder}/{kind};" for kind in kinds)
        head = f"daemon off; master_process off; pid {self.folder}/pid; events {{}}\n"
        (self.folder / "nginx.conf").write_text(f"{head}http {{ access_log off; {places}\n{text}}}\n")
        with running(
            [program_of("nginx"), "-p", self.folder, "-e", "stderr", "-c", "nginx.conf"], self.folder, self.port
        ):
            yield

    @contextlib.contextmanager
    def caddy(self) -> Iterator[None]:
        program = program_of("caddy")
        hashed = printed(program, "hash-password", "--plaintext", PASSWORD)
        site = f"https://{NAME}:{self.port} {{\n\tbind 127.0.0.1\n\ttls {self.keys[0]} {self.keys[1]}"
        values = {f"{NAME} {{": site, "127.0.0.1:8400": self.gateway, "HASH_OF_THE_PASSWORD": hashed}
        head = "{\n\tadmin off\n\tauto_https off\n}\n"
        (self.folder / "Caddyfile").write_text(head + fill(block("caddy"), values))
        command = [program, "run", "--adapter", "caddyfile", "--config", self.folder / "Caddyfile"]
        with running(command, self.folder, self.port):
            yield

    @contextlib.contextmanager
    def get(self, path: str, login: bool = True) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPSConnection(NAME, self.port, timeout=30, context=self.trust)
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        connection.request("GET", path, headers={"Authorization": f"Basic {secret}"} if login else {})
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def wait_for(self, steps: int) -> None:
        until = time.monotonic() + 60
        while (found := self.steps()) < steps:
            assert time.monotonic() < until, f"{found} of {steps} steps arrived"
            time.sleep(0.1)

    def steps(self) -> int:
        with self.get(f"/v1/games/{GAME.name}/stats") as answer:
            return int(json.load(answer)["stats"]["steps"])


def printed(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def program_of(name: str) -> str:
    return printed(str(ROOT / "scripts" / "proxy"), name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Its name leads here, as DNS would have it, and its certificate is trusted."""
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    keys = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", tmp_path / "key.pem"]
    make = ["openssl", "req", "-x509", *keys, "-out", tmp_path / "cert.pem", "-days", "2", *subject]
    subprocess.run(make, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: look_up("127.0.0.1" if host == NAME else host, *rest, **more)
    )
    options = ["--data", tmp_path / "data", "--port", "0", "--allowed-host", NAME]
    command = [sys.executable, "-m", "sparring.gateway", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Site(tmp_path, process.stdout.readline().strip())
        finally:
            process.terminate()
            process.wait(30)


def play(client: Client, fragments: int, steps: int) -> int:
    rng = np.random.default_rng(0)
    for _ in range(fragments):
        obs = rng.integers(0, 256, (steps + 1, 20_000), np.uint8)
        for i in range(steps):
            client.record(obs[i], 0, 1.0, i == steps - 1, False, obs[i + 1])
    return fragments * steps


def events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    while line := answer.readline():
        word, _, value = line.decode().strip().partition(": ")
        if word == "event":
            name = value
        elif word == "data":
            yield name, json.loads(value)


@pytest.mark.parametrize("proxy", ["nginx", "caddy"])
def test_uploads_bots_and_live_updates_pass_through(
    site: Site, tmp_path: Path, random_policy: Callable[..., Policy], proxy: str
) -> None:
    """Over TLS, with a login. A fragment that passes alone has more than a MiB, nginx's default limit."""
    with getattr(site, proxy)(), Client(site.url, GAME, "anna", directory=tmp_path / "c", refresh=0.1) as client:
        assert site.url.partition("@")[0] not in str(client.directory)
        with site.get("/", login=False) as answer:
            assert answer.status == 401
        with site.get("/") as answer:
            assert (answer.status, answer.read(15)) == (200, b"<!doctype html>")
        with site.get(f"/v1/events?game={GAME.name}") as answer:
            live = events(answer)
            assert next(live)[1]["stats"]["steps"] == 0
            played = play(client, fragments=6, steps=52)
            assert client.flush(60)
            assert next(data for name, data in live if name == "stats" and data["stats"]["steps"] == played)
            site.registry.publish(random_policy(GAME, (Dense(8),), Categorical()), algorithm="none")
            assert next(data["version"] for name, data in live if name == "version") == 1
        bot = client.bot()
        assert bot.version == 1
        assert bot.act(np.zeros(20_000, np.uint8)) == client.act(np.zeros(20_000, np.uint8))
        assert (client.stats.uploaded, client.stats.rejected, client.stats.dropped) == (6, 0, 0)
        site.wait_for(played)


def test_a_wrong_login_is_logged_and_play_is_kept(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with site.nginx():
        wrong = f"https://{NAME}:{site.port}"
        with Client(wrong, GAME, "anna", directory=tmp_path / "c") as client:
            play(client, fragments=1, steps=2)
            client.close(1.0)
        assert "it asks for a login" in caplog.text
        with Client(site.url, GAME, "anna", directory=tmp_path / "c") as client:
            assert client.flush(60)
        site.wait_for(2)


def test_with_nginxs_own_limit_everything_is_delivered_all_the_same(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a MiB: several fragments are too large together, and one of them by itself."""
    with site.nginx(**{"client_max_body_size 8m;": ""}):
        with Client(site.url, GAME, "anna", directory=tmp_path / "c", fragment_steps=30) as client:
            played = play(client, fragments=9, steps=30)  # 620 kB each
            assert client.flush(60)
            assert client.stats.uploaded == 9
        assert caplog.text == ""
        with Client(site.url, GAME, "anna", directory=tmp_path / "c") as client:
            large = play(client, fragments=1, steps=52)  # 1.06 MB
            played += play(client, fragments=3, steps=20)
            site.wait_for(played)
            played += play(client, fragments=3, steps=20)
            site.wait_for(played)
            client.close(5.0)
            assert (client.stats.spooled, client.stats.dropped, client.stats.rejected) == (1, 0, 0)
    assert sum("a proxy before it" in record.getMessage() for record in caplog.records) == 1
    with site.nginx(), Client(site.url, GAME, "anna", directory=tmp_path / "c") as client:  # somebody read the page
        assert client.flush(60)
        site.wait_for(played + large)
