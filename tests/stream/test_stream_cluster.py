"""`sparring ingest` on a Spark cluster: a real standalone master and worker, as on several machines."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark
import pytest
from kinesis_server import free_port, running
from test_stream_ingest import Job, by_id, stats, stored, until
from test_stream_producer import play, put

from sparring.stream.producer import Producer

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DEPLOY = "org.apache.spark.deploy"


class Cluster:
    """A master and a worker with nothing of the driver's: another directory, and a Python of their own choice."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        self.port = free_port()
        self.address = f"spark://127.0.0.1:{self.port}"
        self._start("master", f"{DEPLOY}.master.Master", "--port", str(self.port))
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                break
            assert time.monotonic() < deadline, self.log("master")
            time.sleep(0.1)
        self._start("worker", f"{DEPLOY}.worker.Worker", "--cores", "2", "--memory", "1g", self.address)

    def _start(self, name: str, kind: str, *options: str) -> None:
        home = self.folder / name
        home.mkdir()
        words = [str(SPARK_CLASS), kind, "--host", "127.0.0.1", "--webui-port", "0", *options]
        small = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1"}
        env = os.environ | small | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(home)}
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(words, cwd=home, env=env, stdout=log, stderr=log)
        self._processes.append(process)

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()[-3000:]

    def executors(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self._processes[-1].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # some come and go, and zombies have no command line
                if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()):
                    found.append(child)
        return found

    def stop(self) -> None:
        for process in reversed(self._processes):
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(30)
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("spark"))
    yield cluster
    cluster.stop()


def test_tasks_run_on_the_clusters_executors_and_one_may_be_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # where executors find the driver
    with running() as server:
        job = Job(server.stream(2), tmp_path)  # executors are on this machine, too: a file will do
        producer = Producer(job.stream)
        sent = play(200, players=20, seed=1)
        put(producer, sent)
        small = ["--conf", "spark.executor.memory=512m"]
        small += ["--conf", "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1"]
        job.start("--master", cluster.address, *small)
        try:
            job.wait_for(sent)
            [executor] = cluster.executors()
            executor.send_signal(signal.SIGKILL)
            more = play(200, players=20, seed=2)
            put(producer, more)
            sent += more
            job.wait_for(sent)
            until(lambda: sum(b["fragments"] + b["duplicates"] for b in job.batches()) >= len(sent), "its note")
            assert job.stop() == 0, job.log()
        finally:
            job.kill()
        producer.close()
        assert by_id(stored(job.store)) == by_id(sent)
        assert stats(job.store).rejected == 0
        assert job.status()["state"] == "stopped"
        # The tasks' Python was the executors', not the driver's.
        assert executor.pid not in {process.pid for process in cluster.executors()}
        until(lambda: not cluster.executors(), "the cluster to be free again")


def test_a_master_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with running() as server:
        job = Job(server.stream(1), tmp_path)
        for address, code, why in (
            (f"spark://127.0.0.1:{free_port()}", 1, "no Spark master answers"),
            ("spark://127.0.0.1", 2, "write it like spark://"),
        ):
            job.start("--master", address)
            try:
                assert job.wait(100) == code
            finally:
                job.kill()
            assert why in job.log()
        assert "Traceback" not in job.log()
