"""The Ray runner on a real Ray with token authentication: it plays what local workers play, survives what kills its
actors, tells what is missing at once. Two hosts are two network namespaces."""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sparring import __version__ as sparring_version
from sparring.errors import InputError, SparringError
from sparring.experience.fragment import Columns, new_id, pack
from sparring.experiment import Experiment, Resources, Rollout, Stop
from sparring.games import catalog
from sparring.runs import checkpoint
from sparring.store import open_store
from sparring.training import loop

pytestmark = pytest.mark.real
COMMAND = [sys.executable, "-m", "sparring.cli"]
TESTS = Path(__file__).parents[1]
SMALL = [{"layer": "dense", "units": 16}]
PPO = {"name": "ppo", "layers": SMALL, "steps": 128, "minibatch": 32, "epochs": 2}
DQN = {"name": "dqn", "layers": SMALL, "learning_starts": 64, "batch": 16, "replay": 3000}
SHARE = Resources(actor_cpus=0.25)


@pytest.fixture(scope="module")
def paths():
    """Games of the tests are found by Ray's processes, which begin with these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.syspath_prepend(TESTS)
        yield


@pytest.fixture(scope="module")
def ray(paths):
    from sparring.launch import ray_cluster as cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster that is gone: not ours, and nobody asked for it
        cluster.connect(Resources(cpus=2))
    yield cluster.ray
    cluster.disconnect()


def experiment(out: Path, **changes) -> Experiment:
    fields = {
        "game": "CartPole-v1",
        "algorithm": PPO,
        "rollout": Rollout(workers=2, envs=2),
        "runner": "ray",
        "resources": SHARE,
        "iteration": 200,
        "stop": Stop(iterations=3),
        "seed": 1,
        "out": str(out),
    }
    return Experiment(**(fields | changes))


def test_actors_play_and_learn_what_local_workers_do(ray, tmp_path):
    there = loop.train(experiment(tmp_path / "ray"))
    here = loop.train(experiment(tmp_path / "local", runner="local"))
    ours, theirs = (checkpoint.load(run.checkpoints()[-1])[0] for run in (here, there))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name
    row = there.rows()[-1]
    assert 0 < row["rollout/utilisation_0"] <= 1
    assert {"time/sample_s", "time/load_s", "time/learn_s", "time/update_s"} < set(row)


@pytest.mark.parametrize("algorithm", [DQN, PPO], ids=["dqn", "ppo, overlapping"])
def test_off_policy_and_asynchronous(ray, tmp_path, algorithm):
    run = loop.train(
        experiment(tmp_path / "run", algorithm=algorithm, rollout=Rollout(workers=2, envs=2, overlap=True))
    )
    rows = run.rows()
    assert rows[-1]["updates"] > 0
    if algorithm is DQN:
        made, allowed = rows[-1]["updates"], rows[-1]["steps"] * 1.0
        assert made <= allowed
    else:
        assert rows[-1]["policy/lag"] == 1  # played one policy behind, which V-trace corrects


def test_resumed_run_goes_on_identically(ray, tmp_path):
    whole = loop.train(experiment(tmp_path / "whole", stop=Stop(iterations=4)))
    parts = loop.train(experiment(tmp_path / "parts", stop=Stop(iterations=2)))
    parts = loop.resume(parts.path, ["stop.iterations=4", "resources.actor_cpus=0.5"])
    ours, theirs = (checkpoint.load(run.checkpoints()[-1])[0] for run in (whole, parts))
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name


def test_a_learner_slower_than_play_hears_every_actor(ray):
    from test_rollout import plan, policy_for

    from sparring.rollout.ray_pool import RayPool

    policy = policy_for("CartPole-v1")
    pool = RayPool(plan(policy, 3), 60.0, SHARE)
    try:
        pool.publish(policy)
        pool.start()
        pool.start()
        heard = []
        for _ in range(30):
            time.sleep(0.02)  # by then, all have played what they were asked for
            block = pool.take()
            heard.append(block.worker)
            pool.release(block)
        assert min(heard.count(worker) for worker in range(3)) >= 7
    finally:
        pool.close()


@pytest.mark.parametrize("victim", ["worker", "host"])
def test_killed_processes_are_replaced(ray, tmp_path, caplog, victim):
    """Every few blocks a worker or the host of all, with kill -9; every block that comes is whole."""
    import psutil
    from test_rollout import plan, policy_for

    from sparring.algorithms.replay import END
    from sparring.rollout.ray_pool import RayPool

    policy = policy_for("CartPole-v1")
    pool = RayPool(plan(policy, 2), 60.0, SHARE)
    try:
        pool.publish(policy)
        pool.start()
        pool.start()
        heard = set()
        for number in range(40):
            block = pool.take()
            assert np.isfinite(block.rows.obs).all()
            assert (block.rows.kind[:, -1] == END).all()
            heard = (heard | {block.worker}) if number > 30 else heard
            pool.release(block)
            if number in (5, 15, 25):
                (host,) = (psutil.Process(host.pid) for host in pool.hosts)
                workers = [child for forkserver in host.children() for child in forkserver.children()]
                assert len(workers) == 2
                os.kill(workers[-1].pid if victim == "worker" else host.pid, signal.SIGKILL)
        assert heard == {0, 1}
        assert pool.replaced == (3 if victim == "worker" else 6)
    finally:
        pool.close()
    assert ("it is replaced. Its last words" if victim == "worker" else "their host was lost") in caplog.text
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


@pytest.mark.parametrize(
    ("trouble", "says"), [("die", "trouble"), ("hang", "odd_games.py"), ("raise", "ValueError: ouch")]
)
def test_trouble_in_one_actor_is_reported_once_and_isolated(ray, tmp_path, caplog, trouble, says):
    from test_rollout import plan, policy_for

    from sparring.rollout.ray_pool import RayPool

    policy = policy_for("odd_games:Odd-v0")
    (tmp_path / "trouble").write_text(trouble)
    pool = RayPool(plan(policy, 2), 2.0, SHARE, environment={"ODD_TROUBLE": str(tmp_path / "trouble")})
    with caplog.at_level(logging.WARNING):
        try:
            pool.publish(policy)
            for _ in range(4):
                pool.start()
                assert {pool.take().worker, pool.take().worker} == {0, 1}
            assert pool.replaced == 1
        finally:
            pool.close()
    assert caplog.text.count(says) >= 1
    assert caplog.text.count("is replaced") == 1


def test_no_room_for_a_replacement_ends_the_run(ray, monkeypatch):
    from test_rollout import plan, policy_for

    from sparring.rollout import ray_pool

    policy = policy_for("CartPole-v1")
    pool = ray_pool.RayPool(plan(policy, 1), 60.0, SHARE)
    try:
        pool.publish(policy)
        os.kill(pool.hosts[0].pid, signal.SIGKILL)
        pool.resources = Resources(actor_cpus=64)  # as if the only node with room were gone
        monkeypatch.setattr(ray_pool, "STARTING", 3.0)
        pool.start()
        with pytest.raises(SparringError, match=r"no room for 1 rollout workers within 3 s: .* Lower rollout"):
            pool.take()
    finally:
        pool.close()


def test_a_game_that_always_fails_ends_the_run_with_its_traceback(ray, tmp_path):
    from test_rollout import plan, policy_for

    from sparring.rollout.ray_pool import RayPool

    policy = policy_for("odd_games:Odd-v0")
    (tmp_path / "trouble").write_text("raise always")
    pool = RayPool(plan(policy, 1), 5.0, SHARE, environment={"ODD_TROUBLE": str(tmp_path / "trouble")})
    try:
        pool.publish(policy)
        pool.start()
        with pytest.raises(SparringError, match=r"3 times in a row(.|\n)*ValueError: ouch"):
            pool.take()
    finally:
        pool.close()


def test_not_enough_is_reported(ray, tmp_path):
    asked = experiment(tmp_path / "run", rollout=Rollout(workers=64), algorithm=PPO, resources=Resources(actor_cpus=1))
    with pytest.raises(InputError, match=r"64 rollout workers with 1 CPUs .* has room for 2\. Lower rollout\.workers"):
        loop.train(asked)
    with pytest.raises(InputError, match="GPUs each do not fit"):
        loop.train(experiment(tmp_path / "gpu", resources=Resources(actor_cpus=0.1, actor_gpus=0.5)))
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_several_devices_compute_one_update(tmp_path):
    """Virtual ones, in a process of its own: JAX counts them once."""
    code = """
import sys, numpy as np
from pathlib import Path
from sparring.training import loop
from sparring.runs import checkpoint
from sparring.experiment import Experiment, Resources, Rollout, Stop
out, algorithm = Path(sys.argv[1]), eval(sys.argv[2])
found = []
for devices in (1, 2):
    run = loop.train(Experiment(game="CartPole-v1", algorithm=algorithm, rollout=Rollout(envs=4), iteration=200, seed=1,
        stop=Stop(iterations=2), resources=Resources(devices=devices), out=str(out / str(devices))))
    found.append(checkpoint.load(run.checkpoints()[-1])[0])
for name, array in found[0].items():
    if name.startswith("state.") and array.dtype == np.float32:
        np.testing.assert_allclose(array, found[1][name], rtol=2e-3, atol=2e-4, err_msg=name)
print("same")
"""
    flags = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for algorithm in (DQN, PPO):
        out = tmp_path / algorithm["name"]
        done = subprocess.run(
            [sys.executable, "-c", code, str(out), repr(algorithm)],
            env=flags,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert "same" in done.stdout, done.stderr[-3000:]


def test_more_devices_than_there_are(tmp_path):
    with pytest.raises(InputError, match=r"resources\.devices is 64, JAX has \d+ \(cpu\)"):
        loop.train(experiment(tmp_path / "run", runner="local", resources=Resources(devices=64)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say either --head, to begin a cluster, or --join"),
        (["--head", "--join", "127.0.0.1:1"], "say either --head"),
        (["--join", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1"),
        (["--join", "nowhere"], "no Ray cluster at 'nowhere': an address is HOST:PORT"),
    ],
)
def test_no_cluster_to_make_or_join(words, says):
    done = subprocess.run(
        [sys.executable, "-m", "sparring.cli", "cluster", "up", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def await_(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


# Two hosts


class Host:
    """A network namespace, which lives as long as a process in it. Nothing is mounted: a chroot can do that, too."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sleep = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.pid = self._sleep.pid
        own = os.readlink("/proc/self/ns/net")
        await_(lambda: os.readlink(f"/proc/{self.pid}/ns/net") != own, 10)
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/net")
        self.enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        subprocess.run([*self.enter, "ip", *words], check=True, capture_output=True)

    def pids(self) -> list[int]:
        """What runs there."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(process / "ns/net") == self._namespace and int(process.name) != self.pid:
                    found.append(int(process.name))
        return found

    def lose(self) -> None:
        """With all that runs there."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self.lose()
        self._sleep.kill()
        self._sleep.wait()


@pytest.fixture
def hosts(paths):
    """Two network namespaces with a cable between them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the ip command")
    refused = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True).stderr.strip()
    if refused:
        pytest.skip(f"no network namespaces can be made here: {refused}")
    made = []
    try:
        made += [Host("10.77.0.1")]
        made += [Host("10.77.0.2")]
        one, other = made
        one.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(other.pid))
        for host in made:
            host.ip("addr", "add", f"{host.address}/24", "dev", "cable")
            host.ip("link", "set", "cable", "up")
        yield made
    finally:
        for host in made:
            host.end()


def sparring(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PPO_512 = ["--algorithm", "ppo", "--set", "algorithm.steps=512"]


def train(host: Host, log: Path, *words: str) -> subprocess.Popen:
    """`sparring train` on a host, in the background."""
    changes = ["runner=ray", "resources.actor_cpus=0.5", f"resources.address={host.address}:6379"]
    sets = [word for change in changes for word in ("--set", change)]
    with log.open("a") as file:
        return subprocess.Popen([*host.enter, *COMMAND, "train", *words, *sets], stdout=file, stderr=file)


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.is_file() else 0


def test_two_hosts_and_then_one(hosts, tmp_path):
    """A cluster of two, made as its users make it; during the run one of its nodes is lost."""
    head, other = hosts
    output = sparring(*head.enter, *COMMAND, "cluster", "up", "--head", "--host", head.address, "--cpus", "2")
    assert f"--join {head.address}:6379" in output
    join = ["cluster", "up", "--join", f"{head.address}:6379", "--host", other.address, "--cpus", "2"]
    sparring(*other.enter, *COMMAND, *join)
    listed = sparring(*head.enter, *COMMAND, "cluster", "status", "--address", f"{head.address}:6379")
    assert head.address in listed
    assert other.address in listed

    out = tmp_path / "run"
    words = ["CartPole-v1", *PPO_512, "--out", str(out), "--set", "rollout.workers=4"]
    run = train(head, tmp_path / "log", *words, "--set", "stop.iterations=40")
    try:
        await_(lambda: lines(out / "metrics.jsonl") > 2, 120)
        other.lose()
        assert run.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        run.kill()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 41))
    assert rows[-1]["rollout/replaced"] >= 1
    assert "are replaced: their host was lost" in (tmp_path / "log").read_text()


def test_the_learners_host_is_lost(hosts, tmp_path):
    """The learner, its cluster and the workers, all at once; the run goes on in a new cluster on another host."""
    first, second = hosts
    out, every = tmp_path / "run", 4
    sparring(*first.enter, *COMMAND, "cluster", "up", "--head", "--host", first.address, "--cpus", "2")
    words = ["CartPole-v1", *PPO_512, "--out", str(out), "--set", "rollout.workers=2"]
    run = train(first, tmp_path / "log", *words, "--set", f"checkpoint.every={every}")
    try:
        await_(lambda: lines(out / "metrics.jsonl") > 2 * every, 120)
        first.lose()
        assert run.wait(30) != 0
    finally:
        run.kill()
    lost = lines(out / "metrics.jsonl")
    saved = int(max(path.name for path in (out / "checkpoints").glob("*[0-9]")))
    assert lost - saved <= every

    sparring(*second.enter, *COMMAND, "cluster", "up", "--head", "--host", second.address, "--cpus", "2")
    run = train(second, tmp_path / "log2", str(out), "--resume", "--set", f"stop.iterations={lost + 5}")
    try:
        assert run.wait(150) == 0, (tmp_path / "log2").read_text()
    finally:
        run.kill()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, lost + 6))
    steps = np.diff([row["steps"] for row in rows])
    assert (steps > 0).all()


OTHER_SPARRING = """
import sys, sparring
sparring.__version__ = "0.0.9"
from sparring.cli import main
main()
"""


def test_other_versions_may_not_join(hosts, tmp_path):
    head, other = hosts
    sparring(*head.enter, *COMMAND, "cluster", "up", "--head", "--host", head.address, "--cpus", "1")
    words = ["cluster", "up", "--join", f"{head.address}:6379", "--host", other.address, "--cpus", "1"]

    older = [*other.enter, sys.executable, "-c", OTHER_SPARRING, *words]
    done = subprocess.run(older, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"node {head.address} has Sparring {sparring_version}, this machine 0.0.9: install the same" in done.stderr

    # As if another Ray were installed here: what it says of itself is all that Ray compares.
    (tmp_path / "sitecustomize.py").write_text("import ray; ray.__version__ = '2.0.0'")
    patched = os.environ | {"PYTHONPATH": str(tmp_path), "RAY_AUTH_MODE": "token"}
    done = subprocess.run([*other.enter, *COMMAND, *words], env=patched, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert "cannot join: Version mismatch" in said
    assert "Ray: 2.0.0" in said
    assert other.pids() == []  # nothing is left of either try


def _words_of(process):
    import psutil

    try:
        return " ".join(process.cmdline()) + " "
    except psutil.Error:  # it has ended meanwhile
        return ""


def test_down_stops_what_up_started_and_nothing_else(ray):
    import psutil

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    before = {process.pid for process in psutil.process_iter()}
    sparring(*COMMAND, "cluster", "up", "--head", "--port", port, "--cpus", "1")
    started = [process for process in psutil.process_iter() if process.pid not in before]
    # Other tests may start a Ray of their own at the same time: ours is the one with our port.
    began = [process for process in started if f":{port} " in _words_of(process) and process.name() == "raylet"]
    assert began
    assert "stopped" in sparring(*COMMAND, "cluster", "down")
    _, alive = psutil.wait_procs(began, timeout=30)
    assert not alive
    assert "nothing runs here" in sparring(*COMMAND, "cluster", "down")
    assert ray.get(ray.remote(num_cpus=0.1)(lambda: 7).remote(), timeout=60) == 7


def test_loaders_read_a_store_together(ray, tmp_path):
    """Offline: two actors read their shares, and the run learns from all of it, the same every time."""
    from sparring.training.loaders import load

    game, rng = catalog.load("CartPole-v1"), np.random.default_rng(0)
    db = open_store(str(tmp_path / "store.db"))
    db.register(game)
    sent = []
    for i in range(30):
        obs, action = rng.standard_normal((5001, 4)).astype("<f4"), rng.integers(0, 2, 5000).astype("<i4")
        columns = Columns(obs, action, np.ones(5000, "<f4"))
        sent.append(pack(game, columns, id=new_id(), player="p", episode=str(i), start=0, time=0.0, terminated=True))
    db.append(sent)
    db.close()
    resources = Resources(actor_cpus=0.5)
    read = [f for piece in load(str(tmp_path), game.name, 2, resources) for f in piece]
    assert sorted(f.id for f in read) == sorted(f.id for f in sent)
    assert [f.id for piece in load(str(tmp_path), game.name, 2, resources) for f in piece] == [f.id for f in read]
    run = loop.train(
        Experiment(
            game="CartPole-v1",
            algorithm={"name": "bc", "layers": [{"layer": "dense", "units": 8}], "batch": 64, "replay": 200_000},
            source="store",
            store=str(tmp_path),
            runner="ray",
            rollout=Rollout(workers=2),
            resources=resources,
            iteration=64,
            stop=Stop(iterations=1),
            out=str(tmp_path / "run"),
        )
    )
    assert run.rows()[-1]["replay/transitions"] == 150_000
