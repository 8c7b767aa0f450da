"""Fixtures that several folders of tests share."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from servers import CassandraNode, cassandra_node

from sparring.cli import entry
from sparring.games import Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Head, Layer, feature_shape, param_shapes
from sparring.store.cassandra import migration, schema
from sparring.store.cassandra.keyspace import Address

CommandLine = Callable[..., tuple[int, str, str]]

# Compiling takes the longest of all in tests of learning: workers, runs and clones share what one of them compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "sparring" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# A process's Ray reads its token once: one for all tests, and not in the user's home.
os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(__file__).parent.parent / ".pytest_cache" / "ray" / "token")

# Of a process in the background, shells ignore Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take minutes. Two processes share the files; begun with the longest, they end at about the same time.
LONGEST = (
    "test_tutorials.py",  # beside the next one, which starts no Ray: its cluster is this machine's, as its reader's is
    "stream/test_stream_ingest.py",
    "rllib/test_rllib.py",
    "sweep/test_sweep.py",
    "rollout/test_cluster.py",
    "store/test_cassandra_faults.py",
    "real/test_platform.py",
    "real/test_whole_path.py",
    "store/test_store_contract.py",
    "stream/test_stream_cluster.py",
    "bench/test_scaling.py",
    "gateway/test_gateway_schemathesis.py",
    "real/test_cassandra_login.py",
)


# They train networks or build the site: `make check` leaves them out.
HEAVY = (
    "algorithms",
    "edge",
    "extensions",
    "older/test_older_files.py",
    "networks/test_defaults.py",
    "networks/test_functions.py",
    "networks/test_outside_layers.py",
    "trainer",
    "training",
    "rollout",
    "runs",
    "cli/test_commands.py",
    "export/test_onnx_check.py",
    "test_docs.py",
    "test_examples.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / name) for name in HEAVY):
            item.add_marker("heavy")
    place = {here / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="module", autouse=True)
def no_ray_left_behind() -> Iterator[None]:
    """A module's cluster is its own: the next one's has other nodes and paths."""
    yield
    cluster = sys.modules.get("sparring.launch.ray_cluster")
    if cluster is not None:
        cluster.disconnect()


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """`command_line("games", "--json")` as the installed command would: exit code, what it printed, its error."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sparring", *words])
        code = 0
        try:
            entry.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def random_policy() -> Callable[..., Policy]:
    """`random_policy(game, layers, head)`: a policy whose parameters are all different from what they begin with."""

    def make(
        game: Game,
        layers: tuple[Layer, ...],
        head: Head,
        *,
        exploration: float = 0.0,
        normalised: bool = True,
        seed: int = 0,
    ) -> Policy:
        rng = np.random.default_rng(seed)
        params = {}
        for name, shape in param_shapes(game, layers, head).items():
            scale = 1.0 if len(shape) == 1 else 1.5 / np.sqrt(np.prod(shape[:-1]))
            params[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
        if normalised:
            shape = feature_shape(game.observation)
            params["normaliser.mean"] = rng.standard_normal(shape).astype(np.float32)
            params["normaliser.std"] = rng.uniform(0.5, 2.0, shape).astype(np.float32)
        return Policy(game, layers, head, params, exploration)

    return make


@pytest.fixture(scope="session")
def cassandra() -> Iterator[CassandraNode]:
    """A node for all tests of this process; those who kill theirs start one of their own."""
    with cassandra_node() as node:
        yield node


@pytest.fixture(scope="session")
def cassandra_keyspace(cassandra: CassandraNode) -> str:
    address = f"cassandra://{cassandra.address}/tests"
    migration.init(Address.parse(address))
    with cassandra.session() as session:  # tables are then emptied without being written to disk first
        session.execute("ALTER KEYSPACE tests WITH durable_writes = false")
    return address


@pytest.fixture
def cassandra_address(cassandra: CassandraNode, cassandra_keyspace: str) -> str:
    """The address of an empty store."""
    cassandra.empty("tests", schema.SCHEMA.keys() - {"version"})
    return cassandra_keyspace
