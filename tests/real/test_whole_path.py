"""The path at scale in one piece, as a user runs it: players → Kinesis → Spark → Cassandra → trainer → public S3 →
players. Every server is real and on this machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gymnasium
import msgspec
import numpy as np
import psutil
import pytest
import urllib3
from kinesis_server import everything, running
from s3_server import ENVIRONMENT, S3Server
from test_platform import get, run
from waiting import until

from sparring.api import StreamStatus
from sparring.aws.kinesis import default_directory
from sparring.aws.s3 import S3Bucket
from sparring.client import Client, public_bot
from sparring.games import catalog
from sparring.store import open_store
from sparring.stream.source import Positions

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
GAME = catalog.load("CartPole-v1")
STATS = f"/v1/games/{GAME.name}/stats"
PLAYERS, RATE = 4, 100  # of each of two clients; steps per second of each player
RANDOM = 22.0  # what random play earns
GOOD = 100.0


class Party:
    """Players of one game process, who play the newest public bot and record through the client."""

    def __init__(self, address: str, registry: str, directory: Path, seed: int) -> None:
        self.client = Client(address, GAME, "host", registry=registry, directory=directory, refresh=0.5)
        players = [self.client.player(f"player-{seed}-{number}") for number in range(PLAYERS)]
        self.seats = [(player, player.bot(seed=seed), gymnasium.make(GAME.name)) for player in players]
        self.observations = [env.reset(seed=seed + i)[0] for i, (_, _, env) in enumerate(self.seats)]
        self.steps, self.first_returns = 0, list[float]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play)
        self._thread.start()

    def _play(self) -> None:
        returns = [0.0] * PLAYERS
        while not self._stop.wait(1 / RATE):
            for i, (player, bot, env) in enumerate(self.seats):
                obs, version = self.observations[i], bot.version
                action = bot.act(obs, explore=True)
                following, reward, terminated, truncated, _ = env.step(action)
                player.record(obs, action, reward, terminated, truncated, following)
                self.steps += 1
                returns[i] += float(reward)
                self.observations[i] = following
                if terminated or truncated:
                    self.observations[i] = env.reset()[0]
                    if version == 0:
                        self.first_returns.append(returns[i])
                    returns[i] = 0.0

    def versions(self) -> set[int]:
        return {bot.version for _, bot, _ in self.seats}

    def leave(self) -> int:
        """Stops, sends what is recorded; how many steps that was in all."""
        self._stop.set()
        self._thread.join()
        assert self.client.flush(60)
        assert self.client.stats.dropped == self.client.stats.rejected == 0
        self.client.close()
        return self.steps


@contextmanager
def up(data: Path, *addresses: str) -> "Iterator[tuple[str, psutil.Process]]":
    command = [sys.executable, "-m", "sparring.cli", "up", "--data", str(data), "--port", "0", "--print-address"]
    command += ["--publish-every", "2", *addresses]
    env = os.environ | ENVIRONMENT | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}  # starts in half the time
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://"), url
            yield url, psutil.Process(process.pid)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def next_start(directory: Path) -> dict[str, str]:
    """The positions that the job's next batch begins at: of Spark's newest offset, and where the batch that it began
    ended, in the shards that had something."""
    newest = max((directory / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    start = msgspec.json.decode(newest.read_text().splitlines()[-1])
    return start["after"] | Positions(directory / "positions.json").read(start["batch"])


def metrics(url: str) -> dict[str, float]:
    lines = urllib3.request("GET", f"{url}/metrics").data.decode().splitlines()
    return {name: float(value) for name, value in (line.split(" ") for line in lines if line.startswith("sparring_s"))}


def evaluate(registry: str, directory: Path) -> float:
    """How well what anybody can download plays: the mean return of ten fixed episodes."""
    bot, env, returns = public_bot(registry, GAME.name, directory=directory), gymnasium.make(GAME.name), []
    for seed in range(10):
        obs, over, total = env.reset(seed=1000 + seed)[0], False, 0.0
        while not over:
            obs, reward, terminated, truncated, _ = env.step(bot.act(obs))
            over, total = terminated or truncated, total + float(reward)
        returns.append(total)
    return float(np.mean(returns))


def test_bots_become_good_over_stream_spark_cassandra_and_a_public_bucket(
    tmp_path: Path, cassandra_address: str
) -> None:
    assert not ENVIRONMENT.keys() & os.environ.keys()  # whoever plays has no credentials: the platform alone does
    with ExitStack() as stack:
        kinesis = stack.enter_context(running())
        s3 = S3Server(tmp_path / "s3")
        s3.start()
        stack.callback(s3.kill)
        stream = kinesis.stream(2)
        bucket = S3Bucket.parse(s3.address("games"))
        made = run("registry", "init", bucket.address, "--public", env=os.environ | ENVIRONMENT)
        assert bucket.public_url in made.stdout, made.stderr
        addresses = ("--stream", stream.address, "--store", cassandra_address, "--registry", bucket.address)
        data = tmp_path / "data"
        with up(data, *addresses) as (url, platform):
            # Half of the players talk to the gateway, half to the stream; bots come to all from the bucket.
            parties = [
                Party(address, bucket.public_url, tmp_path / f"client-{seed}", seed)
                for seed, address in ((100, url), (200, stream.address))
            ]
            try:
                until(lambda: get(url, STATS)["latest"], "a version", 400)
                until(lambda: evaluate(bucket.public_url, tmp_path / "bots") >= GOOD or None, "a good bot")
                for party in parties:
                    until(lambda: True if max(party.versions()) >= 1 else None, "players to follow")  # noqa: B023
            finally:
                sent = sum(party.leave() for party in parties)
            played = [ret for party in parties for ret in party.first_returns]
            assert np.mean(played) < GOOD / 3  # so began those who had no bot yet
            assert RANDOM / 2 < np.mean(played) < 2 * RANDOM

            until(lambda: get(url, STATS)["stats"]["steps"] == sent or None, f"{sent} steps in Cassandra", 60)
            shown = get(url, STATS)
            assert shown["stream"]["state"] == "running"
            until(lambda: metrics(url)["sparring_stream_lag_seconds"] == 0 or None, "the job to catch up", 30)
            until(lambda: metrics(url)["sparring_stream_steps"] == sent or None, "the job's note of its last batch", 30)
            until(lambda: get(url, STATS)["trainer"]["steps"] == sent or None, "the trainer to see all", 60)
            children = platform.children(recursive=True)
            assert {"java", "python"} <= {child.name().rstrip("0123456789.") for child in children}
        _, left = psutil.wait_procs(children, timeout=10)
        assert not left
        assert "Traceback" not in (data / "trainer.log").read_text()

        # All that is on the stream is behind the position that the next start begins at, and is stored once.
        directory = default_directory(data, stream.address, cassandra_address)
        status = msgspec.json.decode((directory / "status.json").read_bytes(), type=StreamStatus)
        assert (status.state, status.steps) == ("stopped", sent)
        newest = {shard: records[-1].sequence_number for shard, records in everything(stream).items() if records}
        assert len(newest) == 2
        assert next_start(directory) == newest
        store = open_store(cassandra_address, readonly=True)
        try:
            assert store.stats(GAME.name).steps == sent
            assert store.stats(GAME.name).rejected == 0
        finally:
            store.close()
