"""Addresses of stores."""

from pathlib import Path

import pytest

from sparring.errors import InputError
from sparring.store import open_store
from sparring.store.cassandra.keyspace import Address
from sparring.store.sqlite import SqliteStore


def test_all_parts() -> None:
    text = "cassandra://m%40e@one,two:9999/play?consistency=local_quorum&replication=a:3,b:2&compression=zstd&dc=a&tls=true"
    address = Address.parse(text)
    assert address.hosts == (("one", 9042), ("two", 9999))
    assert (address.user, address.keyspace) == ("m@e", "play")
    assert (address.consistency, address.replication, address.compression) == ("LOCAL_QUORUM", "a:3,b:2", "zstd")
    assert (address.dc, address.tls) == ("a", "true")


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASSANDRA_PASSWORD", "secret")
    address = Address.parse("cassandra://me@[::1]:9043/play")
    assert address.hosts == (("::1", 9043),)
    assert (address.password, address.consistency, address.replication, address.tls) == (
        "secret",
        "QUORUM",
        None,
        "false",
    )
    assert "secret" not in f"{address} {address!r}"
    assert Address.parse("cassandra://host/play").user is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("cassandra://host", "KEYSPACE"),
        ("cassandra:///play", "KEYSPACE"),
        ("cassandra://host/drop table", "KEYSPACE"),
        ("cassandra://host:port/play", "valid port"),
        ("cassandra://host/play?consitency=ONE", r"consitency: did you mean .*\?consistency"),
        ("cassandra://host/play?consistency=MOST", "choose one of .*QUORUM"),
        ("cassandra://host/play?compression=rar", "lz4, zstd"),
        ("cassandra://host/play?replication=many", "number of copies"),
        ("cassandra://host/play?tls=no-such-file", "tls=true"),
        ("cassandra://me:secret@host/play", r"CASSANDRA_PASSWORD.* write cassandra://me@host/…$"),
        ("redis://host/play", "no store of the kind 'redis'"),
    ],
)
def test_what_is_wrong_is_reported(address: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_store(address)


def test_a_path_is_a_file_or_the_directory_that_has_it(tmp_path: Path) -> None:
    open_store(str(tmp_path / "store.db")).close()
    for path in (tmp_path, tmp_path / "store.db"):
        store = open_store(str(path), readonly=True)
        assert isinstance(store, SqliteStore)
        store.close()
