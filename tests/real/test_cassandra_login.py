"""A store on a Cassandra that asks for a login and speaks TLS only: who has neither gets an error; nobody else sees the
password."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import CassandraNode, cassandra_node
from test_platform import get, platform, players, run
from waiting import until

from sparring.errors import InputError
from sparring.store import StoreAway, open_store

pytestmark = pytest.mark.real
PASSWORD = "Sesam-7341-open"


class Guarded:
    """The node, and the PEM file of the authority that it is trusted by."""

    def __init__(self, node: CassandraNode, authority: Path) -> None:
        self.node, self.authority = node, authority

    def address(self, user: str | None = "sparring", tls: str | None = None) -> str:
        return f"cassandra://{f'{user}@' if user else ''}{self.node.address}/play?tls={tls or self.authority}"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """With a role of few rights: it may create keyspaces."""
    folder = tmp_path_factory.mktemp("keys")
    store, authority = folder / "node.p12", folder / "authority.pem"
    keys = ["-alias", "node", "-keystore", str(store), "-storepass", "keystore"]
    name = ["-storetype", "PKCS12", "-keyalg", "EC", "-dname", "CN=node", "-ext", "san=ip:127.0.0.1", "-validity", "2"]
    subprocess.run(["keytool", "-genkeypair", *keys, *name], check=True, capture_output=True)
    subprocess.run(["keytool", "-exportcert", "-rfc", *keys, "-file", str(authority)], check=True, capture_output=True)
    settings = f"""authenticator: PasswordAuthenticator
authorizer: CassandraAuthorizer
client_encryption_options: {{enabled: true, optional: false, keystore: {store}, keystore_password: keystore}}"""
    with cassandra_node(settings=settings, login=("cassandra", "cassandra"), authority=authority) as node:
        with node.session() as session:
            session.execute(f"CREATE ROLE sparring WITH PASSWORD = '{PASSWORD}' AND LOGIN = true")
            session.execute("GRANT CREATE ON ALL KEYSPACES TO sparring")
        yield Guarded(node, authority)


def test_with_login_and_tls_all_is_as_ever_and_nobody_sees_the_password(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASSANDRA_PASSWORD", PASSWORD)
    address = guarded.address()
    calls = [run("store", "init", address), run("store", "stats", address)]
    with platform(tmp_path / "data", "--store", address) as (url, process):
        calls.append(run("play", "CartPole-v1", "--server", url, "--players", "2", "--episodes", "20", "--seed", "1"))
        with players(url, "CartPole-v1", "--players", "2"):
            until(lambda: get(url, "/v1/games/CartPole-v1/stats")["latest"], "a version")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) >= 2  # the trainer, too, has logged in
        words = [word for one in family for word in one.cmdline()]
    calls.append(run("store", "stats", address))
    assert all(done.returncode == 0 for done in calls), [done.stderr for done in calls]
    assert "CartPole-v1" in calls[-1].stdout
    texts = [done.stdout + done.stderr for done in calls]
    texts += [path.read_bytes().decode(errors="replace") for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert address in words
    assert not [text for text in (*words, *texts) if PASSWORD in text]


def test_who_has_not_what_it_takes_is_told(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASSANDRA_PASSWORD", "wrong-word")
    with pytest.raises(InputError, match="refuses the login") as refused:
        open_store(guarded.address())
    assert "CASSANDRA_PASSWORD" in str(refused.value)
    assert "wrong-word" not in str(refused.value)
    for user in (None, "cassandra"):
        monkeypatch.delenv("CASSANDRA_PASSWORD", raising=False)
        with pytest.raises(InputError, match="refuses the login"):
            open_store(guarded.address(user))
    with pytest.raises(InputError, match=r"not to be trusted .*tls=FILE"):
        open_store(guarded.address(tls="true"))
    with pytest.raises(StoreAway, match="tls="):
        open_store(guarded.address(tls="false"))
