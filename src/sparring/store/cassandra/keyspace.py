"""A Cassandra keyspace: its address, the connection with the errors callers get when it fails, and its games."""

import os
import re
import ssl
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import msgspec

from sparring.errors import InputError, SparringError
from sparring.fields import convert
from sparring.store.cassandra.rows import groups
from sparring.store.cassandra.schema import STATEMENTS, VERSION
from sparring.store.declarations import read_declaration
from sparring.store.protocol import GameUnreadable, StoreAway

try:
    import cassandra
    from cassandra import ConsistencyLevel
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
    from cassandra.connection import ConnectionBusy, ConnectionException
    from cassandra.policies import DCAwareRoundRobinPolicy, ExponentialReconnectionPolicy, RetryPolicy, TokenAwarePolicy
    from cassandra.query import BatchStatement, BatchType, tuple_factory
except ImportError as error:  # pragma: no cover
    raise InputError("a store on Cassandra needs its driver: pip install 'sparring[cassandra]'") from error

__all__ = ["COMPRESSIONS", "TIMEOUT", "Address", "Keyspace", "KnownGames", "parse_replication"]

TIMEOUT = 5.0  # seconds for one request
ATTEMPTS = 3  # of a statement that may be repeated, the first included
BATCH = 256 << 10  # bytes in one batch, where the server allows as many
VALUE = 12  # bytes of a value in a batch, about, besides those of a blob
COMPRESSIONS = {"lz4": "LZ4Compressor", "zstd": "ZstdCompressor"}
KNOWN = 1.0  # seconds for which a game's registration is not looked up again


class KeyspaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    consistency: Literal["ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "EACH_QUORUM", "LOCAL_ONE"] = "QUORUM"
    replication: str | None = None  # copies: 3, or dc1:3,dc2:2; none: 3, or as many as there are nodes
    compression: Literal["lz4", "zstd"] = "lz4"
    dc: str | None = None  # the data centre whose nodes are asked first
    tls: str = "false"  # "true": with the system's certificate authorities; else the PEM file of another one


class Address(KeyspaceOptions, frozen=True, kw_only=True):
    """cassandra://[user@]host[:port][,host…]/keyspace[?option=value&…]. Addresses are shown, written down and seen in
    lists of processes: the password is in the environment, as CASSANDRA_PASSWORD."""

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    user: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"cassandra://{f'{self.user}@' if self.user else ''}{hosts}/{self.keyspace}"

    __repr__ = __str__  # never with the password

    @classmethod
    def parse(cls, text: str) -> "Address":
        rest, _, query = text.removeprefix("cassandra://").partition("?")
        where, _, keyspace = rest.partition("/")
        login, at, hosts = where.rpartition("@")
        user, colon, _ = login.partition(":")
        if colon:
            raise InputError(
                "a password does not belong into an address, which others see: set CASSANDRA_PASSWORD in the"
                f" environment, and write cassandra://{user}@{hosts}/…"
            )
        if not re.fullmatch(r"[a-zA-Z_]\w*", keyspace, re.ASCII) or not hosts:
            raise InputError(
                f"{text.rpartition('@')[2]!r} is not a store's address: write cassandra://HOST[:PORT][,HOST…]/KEYSPACE,"
                " with letters, digits and _ in the keyspace's name"
            )
        given = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if "consistency" in given:
            given["consistency"] = given["consistency"].upper()
        options = convert(given, KeyspaceOptions, f"cassandra://{rest}?")
        parse_replication(options.replication or "3")
        return cls(
            hosts=tuple(_host(host) for host in hosts.split(",")),
            keyspace=keyspace,
            user=urllib.parse.unquote(user) if at else None,
            password=os.environ.get("CASSANDRA_PASSWORD", "") if at else None,
            **msgspec.structs.asdict(options),
        )


def _host(text: str) -> tuple[str, int]:
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        return parts.hostname or "", parts.port or 9042
    except ValueError as error:
        raise InputError(f"{text!r} has no valid port: write host:9042") from error


def parse_replication(text: str) -> dict[str, str]:
    """'3' or 'east:3,west:2' as Cassandra takes it."""
    parts = dict(part.partition(":")[::2] if ":" in part else ("replication_factor", part) for part in text.split(","))
    if not all(name and count.isdigit() and int(count) > 0 for name, count in parts.items()):
        raise InputError(f"replication is {text!r}: write the number of copies, such as 3, or dc1:3,dc2:2")
    return {"class": "NetworkTopologyStrategy", **parts}


class _Retry(RetryPolicy):  # type: ignore[misc]  # the driver ships no types
    """Again only what may be repeated, on another node when the first is to blame."""

    def on_request_error(self, query: Any, *_: Any, retry_num: int, **__: Any) -> Any:
        again = query.is_idempotent and retry_num + 1 < ATTEMPTS
        return (self.RETRY_NEXT_HOST if again else self.RETHROW), None

    on_read_timeout = on_write_timeout = on_unavailable = on_request_error


class Keyspace:
    """A connection, shared by all threads of a process (not by processes: open one after a fork)."""

    def __init__(self, address: Address, *, complete: bool = True) -> None:
        """`complete`: its tables have to be there, and of our version."""
        self.address = address
        self.consistency: int = ConsistencyLevel.name_to_value[address.consistency]
        self._cluster = _cluster(address)
        self._closed = False
        try:
            with self.asking():
                self.session = self._cluster.connect()
                self.version = self._find_version(complete)
                self.batch_bytes = self._batch_bytes()
                if complete:
                    self.prepare(STATEMENTS)
        except BaseException:
            self._cluster.shutdown()
            raise

    def prepare(self, statements: Mapping[str, str]) -> None:
        self._prepared = {name: self._prepare(cql) for name, cql in statements.items()}

    def close(self) -> None:
        self._closed = True
        self._cluster.shutdown()  # twice is fine

    def require_open(self) -> None:
        if self._closed:
            raise SparringError(f"the store {self.address} is closed")

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows."""
        return self.wait([self.start(statement, *values)])[0]

    def applied(self, statement: str, *values: Any) -> tuple[bool, tuple[Any, ...]]:
        """Whether a conditional statement was applied, and otherwise the row that was there."""
        row = self.run(statement, *values)[0]
        return row[0], row[1:]

    def start(self, statement: str, *values: Any, fetch_size: int | None = None) -> Any:
        """Without waiting: the driver's future, to be asked for its result under `asking`."""
        bound = self._prepared[statement].bind(values)
        if fetch_size is not None:
            bound.fetch_size = fetch_size
        return self._send(bound)

    def pages(self, statement: str, *values: Any, fetch_size: int) -> Iterator[Any]:
        """All rows, of which only so many are in memory."""
        with self.asking():
            yield from self.start(statement, *values, fetch_size=fetch_size).result()

    def wait(self, futures: Iterable[Any]) -> list[list[tuple[Any, ...]]]:
        """For what was started: all rows of each."""
        with self.asking():
            return [future.result().all() for future in futures]

    def write(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Many rows; waits for all."""
        self.wait(self.start_all(statement, rows))

    def start_all(self, statement: str, rows: Iterable[Sequence[Any]]) -> list[Any]:
        """Many rows, in batches of one partition each, which its replicas then take as a whole."""
        prepared = self._prepared[statement]
        partition = itemgetter(*prepared.routing_key_indexes)
        futures = []
        for _, same in groupby(sorted(rows, key=partition), partition):
            for some in groups(same, self.batch_bytes, _size):
                batch = prepared.bind(some[0])
                if len(some) > 1:  # one may be larger than a batch
                    batch = BatchStatement(BatchType.UNLOGGED, consistency_level=self.consistency)
                    batch.add_all([prepared] * len(some), some)
                    batch.is_idempotent = True
                futures.append(self._send(batch))
        return futures

    def _send(self, statement: Any) -> Any:
        """Waits while the sockets take no more: the driver would give up at once, with nothing sent."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            failed: list[Exception] = []
            with self.asking():
                future = self.session.execute_async(statement)
            future.add_errback(failed.append)  # called at once if it failed at once
            if not failed or not _busy(failed[0]) or time.monotonic() > deadline:
                return future
            time.sleep(0.005)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The driver's errors as ours."""
        self.require_open()
        try:
            yield
        except (cassandra.DriverException, ConnectionException, NoHostAvailable, OSError) as error:
            self.require_open()
            raise self._trouble(error) from error

    def _trouble(self, error: Exception) -> SparringError:
        if isinstance(error, NoHostAvailable) and isinstance(error.errors, dict) and error.errors:
            error = next(iter(error.errors.values()))
        if isinstance(error, cassandra.AuthenticationFailed):
            return InputError(
                f"{self.address} refuses the login: {error}. Write cassandra://USER@HOST/… and set CASSANDRA_PASSWORD"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(error):  # the driver makes a plain OSError of it
            why = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
            return InputError(
                f"the certificate of {self.address} is not to be trusted ({why}): name the PEM file of the authority"
                " that signed it with tls=FILE"
            )
        if isinstance(error, cassandra.InvalidRequest | cassandra.Unauthorized):
            return InputError(f"{self.address} refuses a request: {error}")
        what = " ".join(str(error).split())[:300] or type(error).__name__
        up = "is it up, and does it speak without TLS (tls=…)" if self.address.tls == "false" else "is it up"
        return StoreAway(f"Cassandra at {self.address} does not answer as it should ({what}): {up}? Try again later")

    def _find_version(self, complete: bool) -> int:
        """Of the tables; 0: there are none."""
        name = self.address.keyspace
        where = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s"
        tables = {table for (table,) in self.session.execute(where, (name,))}
        if tables and "version" not in tables:
            raise InputError(f"the keyspace {name} belongs to another program: name another one")
        row = self.session.execute(f"SELECT version FROM {name}.version WHERE key = 'store'").one() if tables else None
        version: int = row[0] if row else 0
        if version > VERSION:
            raise InputError(f"{self.address} has a store of version {version}, not {VERSION}: update Sparring")
        if complete and version < VERSION:
            what = f"has a store of version {version}, we need {VERSION}" if version else "has no store yet"
            raise InputError(f"{self.address} {what}: run `sparring store init {self.address}`")
        return version

    def setting(self, name: str) -> str:
        """Of the node that answers; empty if we may not know."""
        try:
            row = self.session.execute("SELECT value FROM system_views.settings WHERE name = %s", (name,)).one()
        except cassandra.Unauthorized:
            return ""
        return row[0] or "" if row else ""

    def _prepare(self, cql: str) -> Any:
        prepared = self.session.prepare(re.sub(r"\b(FROM|INTO|UPDATE) ", rf"\1 {self.address.keyspace}.", cql))
        prepared.consistency_level = self.consistency
        prepared.is_idempotent = " IF " not in cql
        if not prepared.is_idempotent:
            local = self.address.consistency.startswith("LOCAL")
            prepared.serial_consistency_level = ConsistencyLevel.LOCAL_SERIAL if local else ConsistencyLevel.SERIAL
        return prepared

    def _batch_bytes(self) -> int:
        """Servers refuse batches above a setting of theirs, 50 KiB unless it was raised."""
        found = re.fullmatch(r"(\d+)(B|KiB|MiB)", self.setting("batch_size_fail_threshold"))
        allowed = int(found[1]) << {"B": 0, "KiB": 10, "MiB": 20}[found[2]] if found else 50 << 10
        return min(BATCH, allowed * 3 // 4)


def _size(row: Sequence[Any]) -> int:
    return VALUE * len(row) + sum([len(value) for value in row if type(value) is bytes])


def _busy(error: Exception) -> bool:
    causes = list(error.errors.values()) if isinstance(error, NoHostAvailable) else []
    return bool(causes) and all(isinstance(cause, ConnectionBusy) for cause in causes)


class KnownGames:
    """Which games are registered. Looked up again after a second: others declare and delete them."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._known: dict[str, tuple[float, str, str | None]] = {}  # until when, key, schema; by name

    def find(self, name: str, schema: str | None = None) -> tuple[str, str | None]:
        """Its key, "" if there is no such game, and its schema, if its declaration can be read. Looked up at once if
        the schema that was known is not the one asked for."""
        until, key, known = self._known.get(name, (0.0, "", None))
        if until < time.monotonic() or schema not in (None, known):
            until, key, known = time.monotonic() + KNOWN, "", None
            for spec, found in self._keyspace.run("game", name):
                if spec is not None:  # else it was deleted
                    key = found
                    with suppress(GameUnreadable):
                        known = read_declaration(name, spec).schema
                    self._known[name] = until, key, known
        return key, known

    def key(self, name: str) -> str:
        """What the tables call it; the name itself if there is no such game, under which there is nothing."""
        return self.find(name)[0] or name

    def forget(self, name: str) -> None:
        self._known.pop(name, None)


def _cluster(address: Address) -> Any:
    balancing = TokenAwarePolicy(DCAwareRoundRobinPolicy(address.dc or ""))
    profile = ExecutionProfile(
        load_balancing_policy=balancing, retry_policy=_Retry(), request_timeout=TIMEOUT, row_factory=tuple_factory
    )
    login = PlainTextAuthProvider(address.user, address.password) if address.user is not None else None
    try:
        return Cluster(
            list(address.hosts),
            auth_provider=login,
            ssl_context=_tls(address.tls),
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            reconnection_policy=ExponentialReconnectionPolicy(0.5, 8.0),
            connect_timeout=TIMEOUT,
            control_connection_timeout=TIMEOUT,
            protocol_version=5,
        )
    except cassandra.UnresolvableContactPoints as error:
        raise InputError(f"{address}: there is no host of that name") from error


def _tls(authority: str) -> ssl.SSLContext | None:
    if authority == "false":
        return None
    try:
        return ssl.create_default_context(cafile=None if authority == "true" else authority)
    except OSError as error:
        raise InputError(
            f"tls={authority}: no certificates can be read there ({error}); write tls=true, or the path of a PEM file"
        ) from error
