"""Stores and registries from outside Sparring, by their names in addresses."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import outside_store
import pytest
from store_samples import POLE, fragment
from waiting import until

import sparring
from sparring.errors import InputError
from sparring.registry.registry import NotPublished, Registry, RegistryError
from sparring.store import Outcome, is_file, open_store


def test_a_store_from_outside() -> None:
    address = "outside_store:Shared?name=one"
    store = open_store(address)
    assert isinstance(store, outside_store.Shared)
    store.register(POLE)
    assert store.append([fragment()]) == [Outcome.STORED]
    assert open_store(address, readonly=True) is store
    assert open_store("outside_store:Shared?name=two") is not store
    assert not is_file(address)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("outside_store:Shard?name=x", "did you mean 'Shared'"),
        ("outside_store:Half", "has no .*append.*: see sparring.store.protocol.Store"),
        ("outside_store:Shared?nam=x", "cannot be made with nam, readonly"),
        ("no_such_module:Store", "cannot import 'no_such_module'"),
        ("redis://host", "there is no store of the kind 'redis': use cassandra://…, a path, or module:Class"),
    ],
)
def test_what_is_wrong_is_reported(address: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        open_store(address)


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("./store:db").close()
    open_store("store:db", readonly=True).close()


@pytest.mark.real
def test_a_platform_on_a_store_and_a_registry_from_outside(tmp_path: Path) -> None:
    """Gateway and trainer are two processes: the address goes to both."""
    here = Path(__file__).parent
    store = f"outside_store:Filed?path={quote(str(tmp_path / 'play'))}"
    registry = f"outside_store:Folder?root={quote(str(tmp_path / 'models'))}"
    words = ["up", "--data", str(tmp_path / "data"), "--port", "0", "--print-address", "--publish-every", "0.5"]
    argv = [sys.executable, "-m", "sparring.cli", *words, "--store", store, "--registry", registry]
    environment = os.environ | {"SPARRING_CLIENT_DIR": str(tmp_path / "client")}
    with subprocess.Popen(argv, cwd=here, stdout=subprocess.PIPE, text=True, env=environment) as platform:
        try:
            assert platform.stdout is not None
            url = platform.stdout.readline().strip()
            play = [sys.executable, "-m", "sparring.cli", "play", "CartPole-v1", "--server", url, "--episodes", "60"]
            done = subprocess.run(play, capture_output=True, text=True, timeout=120, env=environment)
            assert done.returncode == 0, done.stdout + done.stderr
            published = Registry(registry)
            until(lambda: published.latest("CartPole-v1") is not None)
        finally:
            platform.terminate()
            platform.wait(60)
    kept = open_store(store, readonly=True)
    assert kept.stats("CartPole-v1").steps > 1000
    kept.close()
    assert sparring.load_policy("CartPole-v1", registry).game.name == "CartPole-v1"


def test_a_registry_from_outside(tmp_path: Path, random_policy) -> None:
    from sparring.networks.spec import Dense, QValues

    address = f"outside_store:Folder?root={quote(str(tmp_path))}"
    registry, policy = Registry(address), random_policy(POLE, (Dense(8),), QValues())
    assert str(registry) == f"the folder {tmp_path}"
    assert registry.latest("pole") is None
    for version in (1, 2):
        assert registry.publish(policy, algorithm="dqn").version == version
    (tmp_path / "games/pole/models/bot/3").mkdir()
    (tmp_path / "games/pole/models/bot/3/policy.onnx").write_bytes(b"claimed by another publisher")
    assert registry.publish(policy, algorithm="dqn").version == 4
    assert registry.versions("pole") == [1, 2, 4]
    found = Registry(address).latest("pole")
    assert found is not None
    assert found.version == 4
    assert registry.policy("pole", "bot", 2).params.keys() == policy.params.keys()
    assert registry.delete_game("pole") == 3
    assert registry.games() == []
    assert registry.publish(policy, algorithm="dqn").version == 5, "numbers are not given out again"
    with pytest.raises(NotPublished):
        registry.manifest("pole", "bot", 1)


def test_a_backend_that_fails_is_reported_in_a_line(tmp_path: Path) -> None:
    registry = Registry(f"outside_store:Away?root={quote(str(tmp_path))}")
    with pytest.raises(RegistryError, match=r"cannot read .* the registry at the folder .*: no route to host"):
        registry.latest("pole")
    with pytest.raises(InputError, match="cannot be made with no options"):
        Registry("outside_store:Away")
    with pytest.raises(InputError, match=r"Half' is .*: it has to be a subclass of .*\.Backend"):
        Registry("outside_store:Half")
