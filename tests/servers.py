"""Real servers for tests and benchmarks, as processes of their own on free loopback ports."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
from cassandra.policies import RoundRobinPolicy

ROOT = Path(__file__).parent.parent
START_TIMEOUT = 240.0
# What Cassandra's own start script opens for Java 17.
EXPORTS = (
    "java.base/jdk.internal.misc java.base/sun.nio.ch java.base/jdk.internal.ref"
    " java.management.rmi/com.sun.jmx.remote.internal.rmi java.rmi/sun.rmi.registry java.rmi/sun.rmi.server"
)
OPENS = (
    "java.base/sun.nio.ch java.base/java.nio java.base/java.io java.base/jdk.internal.ref java.base/java.lang"
    " java.base/java.util java.base/java.util.concurrent java.base/jdk.internal.module java.base/jdk.internal.loader"
)
# Without a word about it, it writes every step that it takes to its log, and starts much slower.
LOGBACK = """<configuration>
<appender name="log" class="ch.qos.logback.core.ConsoleAppender">
<encoder><pattern>%d{HH:mm:ss.SSS} %level %logger{30} %msg%n</pattern></encoder>
</appender>
<root level="WARN"><appender-ref ref="log"/></root>
</configuration>
"""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        port: int = s.getsockname()[1]
        return port


def processes_with(*words: str) -> list[int]:
    """The ids of the processes whose command lines have all of these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if all(word.encode() in command for word in words):
                found.append(int(entry.name))
    return found


class CassandraNode:
    """One node. `kill` is kill -9; `start` again finds the data of before."""

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        *,
        heap: str = "640m",
        port: int | None = None,
        storage_port: int | None = None,
        commitlog: str = "periodic\ncommitlog_sync_period: 100ms",
        settings: str = "",
        login: tuple[str, str] | None = None,
        authority: Path | None = None,
        flags: tuple[str, ...] = ("-XX:TieredStopAtLevel=1",),  # starts in half the time, runs at half the speed
    ) -> None:
        self.folder, self.host, self.heap, self.flags = folder, host, heap, flags
        self._login = PlainTextAuthProvider(*login) if login else None
        self._tls = ssl.create_default_context(cafile=authority) if authority else None
        self.port = port or free_port(host)
        self.storage_port = storage_port or free_port(host)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "logback.xml").write_text(LOGBACK)
        (folder / "cassandra.yaml").write_text(
            f"""cluster_name: sparring
num_tokens: 4
auto_bootstrap: false
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
commitlog_sync: {commitlog}
auto_snapshot: false
listen_address: {host}
rpc_address: {host}
native_transport_port: {self.port}
storage_port: {self.storage_port}
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{{seeds: "127.0.0.1:{self.storage_port}"}}]
{settings}
"""
        )

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def launch(self) -> None:
        """Starts it without waiting."""
        jars = subprocess.run([ROOT / "scripts" / "cassandra"], check=True, stdout=subprocess.PIPE, text=True).stdout
        command = ["java", f"-Xms{self.heap}", f"-Xmx{self.heap}", "-Xss512k", *self.flags]
        for option, names in (("--add-exports", EXPORTS), ("--add-opens", OPENS)):
            command += [f"{option}={name}=ALL-UNNAMED" for name in names.split()]
        properties = {
            "cassandra.config": f"file://{self.folder}/cassandra.yaml",
            "cassandra.storagedir": str(self.folder / "data"),
            "cassandra-foreground": "yes",
            "logback.configurationFile": f"{self.folder}/logback.xml",
            "cassandra.ring_delay_ms": "0",
            "cassandra.skip_wait_for_gossip_to_settle": "0",
            "cassandra.consistent.rangemovement": "false",
            "cassandra.superuser_setup_delay_ms": "0",
        }
        command += [f"-D{name}={value}" for name, value in properties.items()]
        command += ["-cp", f"{jars.strip()}/*", "org.apache.cassandra.service.CassandraDaemon"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it answers CQL."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            assert self._process is not None
            tail = "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-20:])
            assert self._process.poll() is None, f"Cassandra stopped while starting:\n{tail}"
            assert time.monotonic() < deadline, f"Cassandra did not start within {START_TIMEOUT:g} s:\n{tail}"
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 1):
                break
            time.sleep(0.1)
        while True:
            cluster = self._cluster()
            try:
                cluster.connect().execute("SELECT now() FROM system.local")
                return
            except NoHostAvailable:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            finally:
                cluster.shutdown()

    def _cluster(self) -> Cluster:
        profile = ExecutionProfile(RoundRobinPolicy(), request_timeout=60.0)
        return Cluster(
            [self.host],
            self.port,
            protocol_version=5,
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            auth_provider=self._login,
            ssl_context=self._tls,
        )

    @contextlib.contextmanager
    def session(self, keyspace: str | None = None) -> Iterator[Session]:
        cluster = self._cluster()
        try:
            yield cluster.connect(keyspace)
        finally:
            cluster.shutdown()

    def empty(self, keyspace: str, tables: Iterable[str]) -> None:
        """New tables would take seconds."""
        with self.session(keyspace) as session:
            futures = [session.execute_async(f"TRUNCATE {table}") for table in tables]
            for future in futures:
                future.result()

    def start(self) -> None:
        self.launch()
        self.wait()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Kills it and removes its data: nobody needs a clean shutdown of a test's node."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()  # before its directory may go
            self._process = None


class Counting:
    """Stands before a server and counts the bytes that it sends."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._listening = (host, port), socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.received = 0
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "Counting":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, server = self._listening.accept()[0], socket.create_connection(self._server)
                self._sockets += (client, server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source.getpeername() == self._server:
                    self.received += len(data)
                sink.sendall(data)


@contextlib.contextmanager
def cassandra_node(**options: object) -> Iterator[CassandraNode]:
    folder = Path(tempfile.mkdtemp(prefix="sparring-cassandra-", dir=os.environ.get("TMPDIR")))
    node = CassandraNode(folder, **options)  # type: ignore[arg-type]
    try:
        node.start()
        yield node
    finally:
        node.stop()
