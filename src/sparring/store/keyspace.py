"""A Cassandra keyspace: its address, its tables and their migrations, and the connection with what callers are told
when it fails. `cassandra` says what the tables mean."""

import itertools
import os
import re
import ssl
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from sparring.errors import InputError, SparringError
from sparring.store.protocol import StoreAway

try:
    import cassandra
    from cassandra import ConsistencyLevel, WriteType
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
    from cassandra.concurrent import execute_concurrent_with_args
    from cassandra.policies import DCAwareRoundRobinPolicy, ExponentialReconnectionPolicy, RetryPolicy, TokenAwarePolicy
    from cassandra.query import BatchStatement, BatchType, SimpleStatement, tuple_factory
except ImportError as error:  # pragma: no cover
    raise InputError("a store on Cassandra needs its driver: pip install 'sparring[cassandra]'") from error

__all__ = ["TIMEOUT", "Address", "Keyspace", "init"]

TIMEOUT = 5.0  # seconds for one request
ATTEMPTS = 3  # of a statement that may be repeated, the first included
BATCH = 256 << 10  # bytes in one batch, where the server allows as many
CONSISTENCIES = ("ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "EACH_QUORUM", "LOCAL_ONE")
COMPRESSIONS = {"lz4": "LZ4Compressor", "zstd": "ZstdCompressor"}
OPTIONS = ("compression", "consistency", "dc", "replication", "tls")

VERSION = 2  # of the tables; older ones: see `_migrate`
SCHEMA = (  # {compression} is the address's
    "CREATE TABLE IF NOT EXISTS game (name text PRIMARY KEY, spec text)",
    # The directory: a bucket's owner raises `steps` when fragments are there; nothing beyond it counts.
    """CREATE TABLE IF NOT EXISTS bucket (
        game text, bucket int, day int, owner uuid, steps bigint, fragments int, bytes bigint, sealed boolean,
        PRIMARY KEY (game, bucket))""",
    # Fragments, some in a row: Cassandra's work is by the row more than by the byte.
    """CREATE TABLE IF NOT EXISTS block (
        game text, day int, bucket int, place bigint, body blob, PRIMARY KEY ((game, day, bucket), place))
        WITH compression = {{'class': '{compression}'}}""",
    # What a commit held, without the columns: a row per commit.
    """CREATE TABLE IF NOT EXISTS record (
        game text, day int, bucket int, place bigint, time double, parts blob,
        PRIMARY KEY ((game, day, bucket), place)) WITH compression = {{'class': '{compression}'}}""",
    # latest: of each writer that claimed anything in the shard, the newest of its rows.
    """CREATE TABLE IF NOT EXISTS claim (
        shard bigint, writer bigint, seq int, latest map<bigint, int> STATIC, game text, bucket int, claims blob,
        PRIMARY KEY (shard, writer, seq))""",
    """CREATE TABLE IF NOT EXISTS merge (
        game text, epoch int, at bigint, entry blob, PRIMARY KEY ((game, epoch), at))""",
    "CREATE TABLE IF NOT EXISTS erasure (game text PRIMARY KEY, mark uuid)",
    "CREATE TABLE IF NOT EXISTS lock (name text PRIMARY KEY, owner uuid)",
    """CREATE TABLE IF NOT EXISTS quarantine (
        game text, writer uuid, slot int, time double, player text, id text, reason text,
        PRIMARY KEY (game, writer, slot)) WITH default_time_to_live = 2592000""",
    "CREATE TABLE IF NOT EXISTS rejected (game text, writer uuid, count bigint, PRIMARY KEY (game, writer))",
)
TABLES = ("game", "bucket", "block", "record", "claim", "merge", "erasure", "lock", "quarantine", "rejected")

PARTITION = "game = ? AND day = ? AND bucket = ?"
# Rows that one owner writes once carry the timestamp 1: no clock decides about them, and any deletion is later.
STATEMENTS = {
    "games": "SELECT spec FROM game",
    "game": "SELECT spec FROM game WHERE name = ?",
    "register": "INSERT INTO game (name, spec) VALUES (?, ?) IF NOT EXISTS",
    "newest bucket": "SELECT bucket FROM bucket WHERE game = ? ORDER BY bucket DESC LIMIT 1",
    "open bucket": "INSERT INTO bucket (game, bucket, day, owner) VALUES (?, ?, ?, ?) IF NOT EXISTS",
    "commit": "UPDATE bucket USING TIMESTAMP ? SET steps = ?, fragments = ?, bytes = ?, sealed = ?"
    " WHERE game = ? AND bucket = ?",
    "buckets": "SELECT bucket, day, steps, fragments, bytes, sealed FROM bucket WHERE game = ? AND bucket > ? LIMIT ?",
    "some buckets": "SELECT bucket, day, steps, fragments, bytes, sealed FROM bucket WHERE game = ? AND bucket IN ?",
    "put": "INSERT INTO block (game, day, bucket, place, body) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP 1",
    "slice": f"SELECT body FROM block WHERE {PARTITION} AND place > ? AND place <= ? LIMIT ?",
    "holding": f"SELECT body FROM block WHERE {PARTITION} AND place >= ? LIMIT 1",
    "blocks": f"SELECT place, body, WRITETIME(body) FROM block WHERE {PARTITION} AND place > ? AND place <= ?",
    "replace": f"UPDATE block USING TIMESTAMP ? SET body = ? WHERE {PARTITION} AND place = ?",
    "delete": f"DELETE FROM block USING TIMESTAMP ? WHERE {PARTITION} AND place = ?",
    "put record": "INSERT INTO record (game, day, bucket, place, time, parts) VALUES (?, ?, ?, ?, ?, ?)"
    " USING TIMESTAMP 1",
    "replace record": f"UPDATE record SET parts = ? WHERE {PARTITION} AND place = ?",
    "records": f"SELECT place, time, parts FROM record WHERE {PARTITION} AND place > ? AND place <= ?",
    "claim": "UPDATE claim USING TIMESTAMP ? SET latest[?] = ?, game = ?, bucket = ?, claims = ?"
    " WHERE shard = ? AND writer = ? AND seq = ?",
    "latest": "SELECT latest FROM claim WHERE shard = ? LIMIT 1",
    "claims": "SELECT writer, seq, game, bucket, claims FROM claim WHERE shard = ?",
    "claims of": "SELECT writer, seq, game, bucket, claims FROM claim WHERE shard = ? AND writer = ? AND seq > ?",
    "merged": "SELECT entry FROM merge WHERE game = ? AND epoch = ? AND at >= ? LIMIT ?",
    "merged before": "SELECT entry FROM merge WHERE game = ? AND epoch = ? AND at <= ? ORDER BY at DESC LIMIT 1",
    "merge": "INSERT INTO merge (game, epoch, at, entry) VALUES (?, ?, ?, ?) IF NOT EXISTS",
    "erasure": "SELECT mark FROM erasure WHERE game = ?",
    "mark erasure": "INSERT INTO erasure (game, mark) VALUES (?, ?)",
    "take lock": "INSERT INTO lock (name, owner) VALUES (?, ?) IF NOT EXISTS USING TTL ?",
    "drop lock": "DELETE FROM lock WHERE name = ? IF owner = ?",
    "quarantine": "INSERT INTO quarantine (game, writer, slot, time, player, id, reason) VALUES (?, ?, ?, ?, ?, ?, ?)",
    "quarantined": "SELECT writer, slot, player FROM quarantine WHERE game = ?",
    "release": "DELETE FROM quarantine WHERE game = ? AND writer = ? AND slot = ?",
    "count rejected": "INSERT INTO rejected (game, writer, count) VALUES (?, ?, ?)",
    "count rejected from": "INSERT INTO rejected (game, writer, count) VALUES (?, ?, ?) USING TIMESTAMP ?",
    "rejected": "SELECT count FROM rejected WHERE game = ?",
}
CONDITIONAL = ("register", "open bucket", "merge", "take lock", "drop lock")


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
                self._prepared = {name: self._prepare(name, cql) for name, cql in STATEMENTS.items()}
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
            return self._session.execute(self._prepared[statement].bind(values)).all()

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
            return self._session.execute_async(bound)

    def start_batch(self, statement: str, rows: Iterable[Sequence[Any]]) -> Any:
        """Rows of one partition, which its replicas then take as a whole."""
        batch = BatchStatement(BatchType.UNLOGGED, consistency_level=self._consistency)
        prepared = self._prepared[statement]
        for row in rows:
            batch.add(prepared, row)
        batch.is_idempotent = True
        with self.asking():
            return self._session.execute_async(batch)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The driver's errors as ours."""
        self.require_open()
        try:
            yield
        except (cassandra.DriverException, NoHostAvailable, OSError) as error:
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

    def _prepare(self, name: str, cql: str) -> Any:
        prepared = self._session.prepare(re.sub(r"\b(FROM|INTO|UPDATE) ", rf"\1 {self.address.keyspace}.", cql))
        prepared.consistency_level = self._consistency
        prepared.is_idempotent = name not in CONDITIONAL
        if name in CONDITIONAL:
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
    if found == 1:
        _make_blocks(session, ConsistencyLevel.name_to_value[address.consistency])
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


def _make_blocks(session: Any, consistency: int) -> None:
    """Version 1 had a row per fragment; a block of one is as good. Nobody may write meanwhile; again is fine."""
    from sparring.store.buckets import encode_block  # it imports us

    if not session.cluster.metadata.keyspaces[session.keyspace].tables.get("fragment"):
        return  # done before, but for the version's number
    select = SimpleStatement(
        "SELECT game, day, bucket, place, body FROM fragment", consistency_level=consistency, fetch_size=200
    )
    put = session.prepare(STATEMENTS["put"])
    put.consistency_level = consistency
    rows = iter(session.execute(select, timeout=60.0))
    while some := list(itertools.islice(rows, 1000)):
        blocks = [(*key, place, encode_block([place], [body])) for *key, place, body in some]
        execute_concurrent_with_args(session, put, blocks, concurrency=32)
    session.execute("DROP TABLE fragment", timeout=60.0)
