"""A Cassandra keyspace: its address, the connection with what callers are told when it fails, its games, and how its
tables are made and brought up to date."""

import itertools
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from sparring.errors import InputError, SparringError
from sparring.games import Game
from sparring.store.cassandra.rows import Place, checksum, decode_block, encode_block, encode_place, locate
from sparring.store.cassandra.schema import SCHEMA, STATEMENTS, TABLES, VERSION
from sparring.store.protocol import StoreAway

try:
    import cassandra
    from cassandra import ConsistencyLevel, WriteType
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
    from cassandra.concurrent import execute_concurrent_with_args
    from cassandra.connection import ConnectionBusy, ConnectionException
    from cassandra.policies import DCAwareRoundRobinPolicy, ExponentialReconnectionPolicy, RetryPolicy, TokenAwarePolicy
    from cassandra.query import BatchStatement, BatchType, SimpleStatement, tuple_factory
except ImportError as error:  # pragma: no cover
    raise InputError("a store on Cassandra needs its driver: pip install 'sparring[cassandra]'") from error

__all__ = ["TABLES", "TIMEOUT", "VERSION", "Address", "Games", "Keyspace", "init"]

TIMEOUT = 5.0  # seconds for one request
ATTEMPTS = 3  # of a statement that may be repeated, the first included
BATCH = 256 << 10  # bytes in one batch, where the server allows as many
CONSISTENCIES = ("ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "EACH_QUORUM", "LOCAL_ONE")
COMPRESSIONS = {"lz4": "LZ4Compressor", "zstd": "ZstdCompressor"}
PIECE = 16  # rows that are brought along at once: each may have 8 MiB
CLAIMS = 4096  # and claims that are written at once
KNOWN = 1.0  # seconds for which a game's registration is not looked up again
OPTIONS = ("compression", "consistency", "dc", "replication", "tls")


class Address(msgspec.Struct, frozen=True):
    """cassandra://[user@]host[:port][,host…]/keyspace[?option=value&…]. Addresses are shown, written down and seen in
    lists of processes: the password is in the environment, as CASSANDRA_PASSWORD."""

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    user: str | None = None
    password: str | None = None
    consistency: str = "QUORUM"
    replication: str | None = None  # copies: 3, or dc1:3,dc2:2; none: 3, or as many as there are nodes
    compression: str = "lz4"
    dc: str | None = None  # the data centre whose nodes are asked first
    tls: str = "false"  # "true": with the system's certificate authorities; else the PEM file of another one

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
        options = _options(query)
        if not keyspace.isidentifier() or not keyspace.isascii() or not hosts:
            raise InputError(
                f"{text.rpartition('@')[2]!r} is not a store's address: write cassandra://HOST[:PORT][,HOST…]/KEYSPACE,"
                " with letters, digits and _ in the keyspace's name"
            )
        fields: dict[str, Any] = {"hosts": tuple(_host(host) for host in hosts.split(",")), "keyspace": keyspace}
        if at:
            fields |= {"user": urllib.parse.unquote(user), "password": os.environ.get("CASSANDRA_PASSWORD", "")}
        return cls(**(fields | options))

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise InputError(f"consistency is {self.consistency!r}: there are {', '.join(CONSISTENCIES)}")
        if self.compression not in COMPRESSIONS:
            raise InputError(f"compression is {self.compression!r}: there are {', '.join(COMPRESSIONS)}")
        if self.replication is not None:
            _replication(self.replication)


def _options(query: str) -> dict[str, str]:
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise InputError(f"unknown option {name!r} of a Cassandra store: there are {', '.join(OPTIONS)}")
    if "consistency" in options:
        options["consistency"] = options["consistency"].upper()
    return options


def _host(text: str) -> tuple[str, int]:
    name, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        return text.strip("[]"), 9042
    if not (port.isdigit() and 0 < int(port) < 65536):
        raise InputError(f"{text!r} has no valid port: write host:9042")
    return name.strip("[]"), int(port)


def _replication(text: str) -> dict[str, str]:
    """'3' or 'east:3,west:2' as Cassandra takes it."""
    parts = dict(part.partition(":")[::2] if ":" in part else ("replication_factor", part) for part in text.split(","))
    if not all(name and count.isdigit() and int(count) > 0 for name, count in parts.items()):
        raise InputError(f"replication is {text!r}: write the number of copies, such as 3, or dc1:3,dc2:2")
    return {"class": "NetworkTopologyStrategy", **parts}


class _Retry(RetryPolicy):  # type: ignore[misc]  # the driver ships no types
    """Again only what may be repeated, on another node when the first is to blame."""

    def on_read_timeout(self, query: Any, *_: Any, retry_num: int = 0, **__: Any) -> Any:
        return self._decide(query, retry_num)

    def on_write_timeout(self, query: Any, consistency: Any, write_type: int, *_: Any, **kwargs: Any) -> Any:
        if write_type == WriteType.CAS:
            return self.RETHROW, None
        return self._decide(query, kwargs.get("retry_num", 0))

    def on_unavailable(self, query: Any, *_: Any, retry_num: int = 0, **__: Any) -> Any:
        return self._decide(query, retry_num)

    def on_request_error(self, query: Any, consistency: Any, error: Exception, retry_num: int) -> Any:
        return self._decide(query, retry_num)

    def _decide(self, query: Any, retry_num: int) -> Any:
        again = query.is_idempotent and retry_num + 1 < ATTEMPTS
        return (self.RETRY_NEXT_HOST if again else self.RETHROW), None


class Keyspace:
    """A connection, shared by all threads of a process (not by processes: open one after a fork)."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._cluster = _cluster(address)
        self._lock = threading.Lock()
        self._closed = False
        try:
            with self.asking():
                self._session = self._cluster.connect()
                self._require_tables()
                self._prepared = {name: self._prepare(cql) for name, cql in STATEMENTS.items()}
                self.batch_bytes = self._batch_bytes()
        except BaseException:
            self._cluster.shutdown()
            raise

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._cluster.shutdown()

    def require_open(self) -> None:
        if self._closed:
            raise SparringError(f"the store {self.address} is closed")

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows."""
        with self.asking():
            return self._send(self._prepared[statement].bind(values)).result().all()

    def applied(self, statement: str, *values: Any) -> tuple[bool, tuple[Any, ...]]:
        """Whether a conditional statement was applied, and otherwise the row that was there."""
        row = self.run(statement, *values)[0]
        return row[0], row[1:]

    def start(self, statement: str, *values: Any, fetch_size: int | None = None) -> Any:
        """Without waiting: the driver's future, to be asked for its result under `asking`."""
        bound = self._prepared[statement].bind(values)
        if fetch_size is not None:
            bound.fetch_size = fetch_size
        with self.asking():
            return self._send(bound)

    def pages(self, statement: str, *values: Any, fetch_size: int) -> Iterator[Any]:
        """All rows, of which only so many are in memory."""
        with self.asking():
            yield from self.start(statement, *values, fetch_size=fetch_size).result()

    def start_batch(self, statement: str, rows: Iterable[Sequence[Any]]) -> Any:
        """Rows of one partition, which its replicas then take as a whole."""
        batch = BatchStatement(BatchType.UNLOGGED, consistency_level=self._consistency)
        prepared = self._prepared[statement]
        for row in rows:
            batch.add(prepared, row)
        batch.is_idempotent = True
        with self.asking():
            return self._send(batch)

    def _send(self, statement: Any) -> Any:
        """Waits while the sockets take no more: the driver would give up at once, with nothing sent."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            failed: list[Exception] = []
            future = self._session.execute_async(statement)
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

    def _require_tables(self) -> None:
        found = _version(self._session, self.address)
        if found < VERSION:
            what = "has no store yet" if found == 0 else f"has a store of version {found}, we need {VERSION}"
            raise InputError(f"{self.address} {what}: run `sparring store init {self.address}`")

    @property
    def _consistency(self) -> int:
        level: int = ConsistencyLevel.name_to_value[self.address.consistency]
        return level

    def _prepare(self, cql: str) -> Any:
        prepared = self._session.prepare(re.sub(r"\b(FROM|INTO|UPDATE) ", rf"\1 {self.address.keyspace}.", cql))
        prepared.consistency_level = self._consistency
        prepared.is_idempotent = " IF " not in cql
        if not prepared.is_idempotent:
            local = self.address.consistency.startswith("LOCAL")
            prepared.serial_consistency_level = ConsistencyLevel.LOCAL_SERIAL if local else ConsistencyLevel.SERIAL
        return prepared

    def _batch_bytes(self) -> int:
        """Servers refuse batches above a setting of theirs, 50 KiB unless it was raised."""
        told = _setting(self._session, "batch_size_fail_threshold")
        units = {"KiB": 1 << 10, "MiB": 1 << 20, "B": 1}
        for unit, size in units.items():
            if told.endswith(unit) and told.removesuffix(unit).isdigit():
                return min(BATCH, int(told.removesuffix(unit)) * size * 3 // 4)
        return 32 << 10


def _busy(error: Exception) -> bool:
    causes = list(error.errors.values()) if isinstance(error, NoHostAvailable) else []
    return bool(causes) and all(isinstance(cause, ConnectionBusy) for cause in causes)


class Games:
    """Which games are registered. Looked up again after a second: others declare and delete them."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._known: dict[str, tuple[float, str, str]] = {}  # until when, key, schema; by name

    def find(self, name: str, schema: str | None = None) -> tuple[str, str] | None:
        """Its key and schema; looked up at once if the schema that was known is not the one asked for."""
        until, key, found = self._known.get(name, (0.0, "", ""))
        if until < time.monotonic() or (schema is not None and found != schema):
            rows = [row for row in self._keyspace.run("game", name) if row[0] is not None]
            if not rows:
                self._known.pop(name, None)
                return None
            key, found = rows[0][1], Game.from_json(rows[0][0]).schema
            self._known[name] = time.monotonic() + KNOWN, key, found
        return key, found

    def key(self, name: str) -> str:
        """What the tables call it; the name itself if there is no such game, under which there is nothing."""
        return (self.find(name) or (name,))[0]

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


def _setting(session: Any, name: str) -> str:
    """Of the node that answers; empty if we may not know."""
    try:
        row = session.execute("SELECT value FROM system_views.settings WHERE name = %s", (name,)).one()
    except cassandra.Unauthorized:
        return ""
    return row[0] or "" if row else ""


def _version(session: Any, address: Address) -> int:
    """Of the keyspace's tables; 0: there are none."""
    where = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s"
    tables = {name for (name,) in session.execute(where, (address.keyspace,))}
    if not tables:
        return 0
    if "version" not in tables:
        raise InputError(f"the keyspace {address.keyspace} belongs to another program: name another one")
    row = session.execute(f"SELECT version FROM {address.keyspace}.version WHERE key = 'store'").one()
    version: int = row[0] if row else 0
    if version > VERSION:
        raise InputError(f"{address} has a store of version {version}, this Sparring knows {VERSION}: update it")
    return version


def init(address: Address) -> str:
    """Creates the keyspace and its tables, or brings them up to date; what was done, for people. Again is fine."""
    cluster = _cluster(address)
    keyspace = Keyspace.__new__(Keyspace)  # for its errors only: it connects to tables that are not there yet
    keyspace.address, keyspace._closed = address, False
    try:
        with keyspace.asking():
            session = cluster.connect()
            return _migrate(session, address, len(cluster.metadata.all_hosts())) + _forgetful(session, address)
    finally:
        cluster.shutdown()


def _forgetful(session: Any, address: Address) -> str:
    """A warning, where a node that is killed forgets what it acknowledged, and there is no other copy."""
    where = "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = %s"
    replication = session.execute(where, (address.keyspace,)).one()[0]
    copies = sum(int(value) for name, value in replication.items() if name != "class")
    if copies > 1 or _setting(session, "commitlog_sync") != "periodic":
        return ""
    return (
        "\nwarning: there is one copy of everything, and this node syncs its commit log periodically: when its process"
        " is killed, it forgets what it acknowledged last. Set `commitlog_sync: batch` in its cassandra.yaml, or have"
        " more copies (docs/cassandra.md)"
    )


def _migrate(session: Any, address: Address, nodes: int) -> str:
    name, found = address.keyspace, _version(session, address)
    replication = _replication(address.replication or str(min(max(nodes, len(address.hosts)), 3)))
    if found == 0:
        session.execute(f"CREATE KEYSPACE IF NOT EXISTS {name} WITH replication = {replication}", timeout=60.0)
    elif address.replication is not None:
        session.execute(f"ALTER KEYSPACE {name} WITH replication = {replication}", timeout=60.0)
    session.set_keyspace(name)
    session.execute("CREATE TABLE IF NOT EXISTS version (key text PRIMARY KEY, version int)", timeout=60.0)
    for cql in SCHEMA if found < VERSION else ():
        session.execute(cql.format(compression=COMPRESSIONS[address.compression]), timeout=60.0)
    if 0 < found < VERSION:
        _Upgrade(session, address).run()
    session.execute("INSERT INTO version (key, version) VALUES ('store', %s)", (VERSION,))
    copies = ", ".join(f"{key} {value}" for key, value in replication.items() if key != "class")
    if found == 0:
        return f"made the store {address} ({copies.replace('replication_factor', 'copies:')})"
    changed = (
        f"; copies: {copies.replace('replication_factor ', '')}, run `nodetool repair`" if address.replication else ""
    )
    if found < VERSION:
        return f"brought the store {address} from version {found} to {VERSION}{changed}"
    return f"the store {address} is up to date (version {found}){changed}"


class _Upgrade:
    """Brings older tables along. Nobody may write meanwhile; again is fine, also after one that was cut short."""

    def __init__(self, session: Any, address: Address) -> None:
        self._session = session
        self._consistency = ConsistencyLevel.name_to_value[address.consistency]
        self._tables = session.cluster.metadata.keyspaces[session.keyspace].tables

    def run(self) -> None:
        if "fragment" in self._tables:
            self._make_blocks()
        if "key" not in self._tables["game"].columns:
            self._session.execute("ALTER TABLE game ADD (key text, paused boolean)", timeout=60.0)
        for (name,) in list(self._rows("SELECT name FROM game")):
            self._session.execute("UPDATE game SET key = %s WHERE name = %s IF key = null", (name, name))
        if "claim" in self._tables:
            self._make_heads_and_claims()
        for table in ("claim", "lock"):
            self._session.execute(f"DROP TABLE IF EXISTS {table}", timeout=60.0)

    def _make_blocks(self) -> None:
        """Version 1 had a row per fragment; a block of one is as good."""
        for some in _pieces(self._rows("SELECT game, day, bucket, place, body FROM fragment")):
            self._write("put", [(*key, place, encode_block([place], [body])) for *key, place, body in some])
        self._session.execute("DROP TABLE fragment", timeout=60.0)

    def _make_heads_and_claims(self) -> None:
        """Version 2 had a bucket's head in the directory, and claims that said no content. All of its buckets are
        closed; the claims are made anew from what is stored."""
        for game, bucket, day, *head in list(
            self._rows("SELECT game, bucket, day, steps, fragments, bytes FROM bucket")
        ):
            steps, fragments, size = (value or 0 for value in head)
            select = "SELECT body FROM block WHERE game = %s AND day = %s AND bucket = %s AND place <= %s"
            claims: list[tuple[Any, ...]] = []
            for (body,) in self._rows(select, (game, day, bucket, steps)):
                block = decode_block(body)
                for place, f in zip(block.places, block.fragments, strict=True):
                    where = encode_place(Place(game, bucket, place - f.steps, 0))
                    claims.append((*locate(f.id), where, checksum(f)))
                if len(claims) >= CLAIMS:
                    self._claim(claims)
                    claims.clear()
            self._claim(claims)
            columns = "game, bucket, steps, fragments, bytes, closed"
            insert = self._statement(f"INSERT INTO head ({columns}) VALUES (%s, %s, %s, %s, %s, true)")
            self._session.execute(insert, (game, bucket, steps, fragments, size))

    def _statement(self, cql: str) -> Any:
        return SimpleStatement(cql, consistency_level=self._consistency, fetch_size=PIECE)

    def _rows(self, cql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """One after the other: the driver's own iterator starts its page again whenever it is asked to."""
        yield from self._session.execute(self._statement(cql), values, timeout=60.0)

    def _claim(self, claims: list[tuple[Any, ...]]) -> None:
        prepared, futures = self._session.prepare(STATEMENTS["claim"]), []
        for _, same in itertools.groupby(sorted(claims), lambda claim: claim[0]):
            while some := list(itertools.islice(same, 100)):
                batch = BatchStatement(BatchType.UNLOGGED, consistency_level=self._consistency)
                for claim in some:
                    batch.add(prepared, claim)
                futures.append(self._session.execute_async(batch, timeout=60.0))
        for future in futures:
            future.result()

    def _write(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        prepared = self._session.prepare(STATEMENTS[statement])
        prepared.consistency_level = self._consistency
        execute_concurrent_with_args(self._session, prepared, rows, concurrency=128)


def _pieces(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while some := list(itertools.islice(rows, PIECE)):
        yield some
