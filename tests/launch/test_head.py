"""A cluster's address at which there is no cluster: said within seconds, by every command that takes one."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from sparring.errors import InputError
from sparring.experiment import Experiment, Resources, Rollout, Stop
from sparring.training import loop

pytestmark = pytest.mark.real
HOST = "127.0.0.2"  # loopback, too; 127.0.0.1 is for Ray another word for the machine's address in its network
COMMAND = [sys.executable, "-m", "sparring.cli"]
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # how an HTTP/2 server begins
EXPERIMENT = """
game: CartPole-v1
algorithm: {name: NAME, lr: LR}
runner: ray
rollout: {workers: 1}
stop: {iterations: 1}
resources: {address: "ADDRESS"}
"""


@contextlib.contextmanager
def listening(says=b""):
    """Somebody who accepts, says this much and no more."""
    with socket.create_server((HOST, 0)) as server:
        held = []

        def accept():
            with contextlib.suppress(OSError):  # closed: the test is over
                while True:
                    held.append(server.accept()[0])
                    held[-1].sendall(says)

        threading.Thread(target=accept, daemon=True).start()
        yield f"{HOST}:{server.getsockname()[1]}", held
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@contextlib.contextmanager
def web():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer((HOST, 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{HOST}:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def dead():
    with socket.create_server((HOST, 0)) as free:
        address = f"{HOST}:{free.getsockname()[1]}"
    return address


@pytest.fixture
def require_head():
    from sparring.launch.ray_cluster import require_head

    return require_head


def test_an_address_where_nobody_is(require_head, dead):
    with pytest.raises(InputError, match=rf"no Ray cluster at {dead}: Connection refused\. `sparring cluster up"):
        require_head(dead)


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:10001", "127.0.0.1:", "127.0.0.1:x", ":6379", ""])
def test_words_that_are_no_address(require_head, address):
    with pytest.raises(InputError, match=r"an address is HOST:PORT|is not a port|Malformed host"):
        require_head(address)


def test_a_name_that_means_no_host(require_head):
    with pytest.raises(
        InputError, match=r"no Ray cluster at nowhere\.invalid:6379: there is no host 'nowhere\.invalid'"
    ):
        require_head("nowhere.invalid:6379")


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (b"", "no answer within"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", r"something else listens there and says b'SSH-2\.0"),
        (SETTINGS, "nobody said who is there within"),  # as gRPC begins, but then it hangs
    ],
    ids=["silent", "ssh", "http/2"],
)
def test_somebody_else_at_the_address(require_head, monkeypatch, says, message):
    from sparring.launch import head

    monkeypatch.setattr(head, "ANSWER", 1.0)
    monkeypatch.setattr(head, "PATIENCE", 4.0)
    with listening(says) as (address, _), pytest.raises(InputError, match=f"no Ray cluster at {address}: {message}"):
        require_head(address)


def test_a_web_server_at_the_address(require_head):
    with web() as address, pytest.raises(InputError, match="something else listens there and says b'"):
        require_head(address)


def test_auto_without_a_cluster_is_reported(require_head, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # no note of a cluster there
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: set())  # others' clusters are not ours
    with pytest.raises(InputError, match=r"no Ray cluster at auto: (.|\n)*`sparring cluster up --head` starts one"):
        require_head("auto")


def words(command, tmp_path, address):
    if command == "status":
        return ["cluster", "status", "--address", address]
    if command == "join":
        return ["cluster", "up", "--join", address]
    name = "rllib/PPO" if command == "rllib" else "ppo"
    lr = "{grid: [1e-3, 1e-4]}" if command == "sweep" else "1e-3"
    file = tmp_path / "e.yaml"
    file.write_text(EXPERIMENT.replace("NAME", name).replace("LR", lr).replace("ADDRESS", address))
    out = ["--out", str(tmp_path / "out")]
    if command == "bench":
        return ["bench", "scaling", str(file), *out, "--workers", "1"]
    return ["sweep" if command == "sweep" else "train", str(file), *out]


@pytest.mark.parametrize("command", ["status", "join", "train", "rllib", "sweep", "bench"])
def test_every_command_tells_of_a_dead_address_instead_of_hanging(tmp_path, dead, command):
    """Ray itself would try for a quarter of an hour."""
    asked = [*COMMAND, *words(command, tmp_path, dead)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"no Ray cluster at {dead}: Connection refused" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_while_connecting_ends_the_command(tmp_path, number):
    """It is asked of somebody who never answers; the signal comes while it waits for that."""
    with listening(SETTINGS) as (address, held):
        process = subprocess.Popen([*COMMAND, *words("train", tmp_path, address)], stderr=subprocess.PIPE, cwd=tmp_path)
        until = time.monotonic() + 60
        while len(held) < 2:  # our greeting, and then Ray's own client, which hears no signals
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)  # Ray's client would wait 40 s, we 15, and say so
    assert process.returncode != 0
    assert b"nobody said who is there" not in said


def test_a_resumed_run_asks_the_address_before_it_begins(tmp_path, dead):
    layers = [{"layer": "dense", "units": 8}]
    experiment = Experiment(
        game="CartPole-v1",
        algorithm={"name": "ppo", "steps": 64, "minibatch": 32, "epochs": 1, "layers": layers},
        rollout=Rollout(workers=1),
        stop=Stop(iterations=1),
        out=str(tmp_path / "run"),
    )
    run = loop.train(experiment)
    changes = ["runner=ray", f"resources.address={dead}", "stop.iterations=2"]
    with pytest.raises(InputError, match="no Ray cluster at"):
        loop.reopen(run.path, changes)
    assert run.experiment.resources == Resources()  # as it was


@pytest.fixture
def apart():
    """Where Ray notes which cluster `auto` is, apart from others' of this machine; short, for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as path:
        yield {"RAY_TMPDIR": path}


def test_a_cluster_of_another_token_and_one_that_was_stopped_are_reported(tmp_path, apart):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ours, theirs = ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / name)} for name in ("ours", "theirs"))

    def run(environment, *asked):
        everything = os.environ | environment | apart
        return subprocess.run(
            [*COMMAND, "cluster", *asked], env=everything, capture_output=True, text=True, timeout=120
        )

    try:
        up = run(ours, "up", "--head", "--port", port, "--cpus", "1")
        assert up.returncode == 0, up.stderr
        status = run(theirs, "status", "--address", f"127.0.0.1:{port}")
        assert status.returncode == 2
        assert "has another token than" in " ".join(status.stderr.split())
        assert run(ours, "status", "--address", f"127.0.0.1:{port}").returncode == 0
        assert run(ours, "status", "--address", "auto").returncode == 0
    finally:
        down = run(ours, "down")
    assert "stopped" in down.stdout, down.stderr
    gone = run(ours, "status", "--address", f"127.0.0.1:{port}")
    assert gone.returncode == 2
    assert "no Ray cluster at" in gone.stderr
    assert f":{port}" not in run(ours, "status", "--address", "auto").stderr  # nobody remembers it
