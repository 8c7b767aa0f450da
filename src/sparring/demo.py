"""`sparring demo`: the whole loop on one machine, watched until the bots are good."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from sparring.api import Snapshot
from sparring.client import Unavailable
from sparring.client.transports.base import Refused
from sparring.client.transports.http import HttpConnection
from sparring.errors import InputError, SparringError
from sparring.games import catalog
from sparring.players.mock import PlaySummary, play
from sparring.terminal import number, view

__all__ = ["demo"]

EPISODES = 20  # that the players' mean is taken over
RATE = 250.0  # steps per second and player: five times real time, and the learner still has a core
START_TIMEOUT = 60.0


def demo(
    game: str,
    *,
    algorithm: str | None,
    players: int,
    target: float | None,
    data: Path | None,
    port: int,
    limit: float,
    stay: bool,
) -> None:
    """Raises SparringError when the players are not good within `limit` seconds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is stopped in order
    goal = _goal(game) if target is None else target
    console = Console()
    with contextlib.ExitStack() as stack:
        directory = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparring-demo-")))
        url = stack.enter_context(_platform(directory, port, algorithm))
        console.print(f"The platform runs, its dashboard is at [bold]{url}[/]. {players} players learn {game}.")
        began = time.monotonic()
        with _players(game, url, players) as summary:
            snapshot = _watch(console, url, game, goal, began + limit, stay)
        _tell(console, snapshot, summary, goal, time.monotonic() - began, data)
        if snapshot is None or not _is_good(snapshot, goal):
            raise SparringError(f"the players did not reach a mean return of {goal:g} within {limit:g} s")


def _goal(game: str) -> float:
    env = catalog.make(game)
    env.close()
    if env.spec.reward_threshold is None:
        raise InputError(f"{game} does not say which return is good: give --target")
    return float(env.spec.reward_threshold)


@contextlib.contextmanager
def _platform(data: Path, port: int, algorithm: str | None) -> Iterator[str]:
    """`sparring up` as a process of its own, as it would run anywhere."""
    command = [sys.executable, "-m", "sparring.cli", "up", "--data", str(data), "--port", str(port)]
    command += ["--publish-every", "4", "--print-address"]
    command += ["--algorithm", algorithm] if algorithm else []
    # Its own session: Ctrl-C is for us, and we stop it in order.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise SparringError(f"the platform did not start (exit code {process.wait(START_TIMEOUT)})")
            yield url
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _players(game: str, url: str, count: int) -> Iterator[list[PlaySummary]]:
    """Mock players in a thread while the block runs; their summary is in the list afterwards."""
    stop, summary, failure = threading.Event(), list[PlaySummary](), list[BaseException]()

    def run() -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="sparring-players-") as spool:
                summary.append(play(game, url, players=count, stop=stop, rate=RATE, refresh=0.5, directory=spool))
        except Exception as error:  # noqa: BLE001  # raised below, when the block ends
            failure.append(error)

    thread = threading.Thread(target=run, name="players")
    thread.start()
    try:
        yield summary
    finally:
        stop.set()
        thread.join()
    if failure:
        raise failure[0]


def _watch(console: Console, url: str, game: str, goal: float, until: float, stay: bool) -> Snapshot | None:
    """Shows the live view (or, without a terminal, a line now and then) until the goal is reached, time is up or, with
    `stay`, Ctrl-C is pressed."""
    server, name = HttpConnection(url), game.replace("/", "-")
    snapshot: Snapshot | None = None
    next_line = 0.0
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while True:
            with contextlib.suppress(Unavailable, Refused):  # not registered yet, or busy: the next look will tell
                snapshot = server.request("GET", "games", name, "stats").decode(Snapshot)
            if live is not None:
                live.update(view(snapshot, url, goal, console.width), refresh=True)
            elif snapshot is not None and time.monotonic() >= next_line:
                console.print(_line(snapshot), highlight=False, soft_wrap=True)
                next_line = time.monotonic() + 5
            good = snapshot is not None and _is_good(snapshot, goal)
            if not stay and (good or time.monotonic() >= until):
                break
            time.sleep(0.5)
    server.close()
    return snapshot


def _is_good(snapshot: Snapshot, goal: float) -> bool:
    return snapshot.episodes >= EPISODES and snapshot.return_mean is not None and snapshot.return_mean >= goal


def _line(s: Snapshot) -> str:
    version = "no version yet" if s.latest is None else f"version {s.latest}"
    return (
        f"{number(s.stats.steps):>7} steps, {number(s.steps_per_s):>6}/s, {s.active_players} players, {version}, "
        f"mean return {number(s.return_mean)}{', trainer ' + s.trainer.state if s.trainer else ''}"
    )


def _tell(
    console: Console,
    snapshot: Snapshot | None,
    summary: list[PlaySummary],
    goal: float,
    seconds: float,
    data: Path | None,
) -> None:
    if snapshot is None or not summary:
        return
    best = [f"v{v.version}: {number(v.return_mean)}" for v in snapshot.versions if v.played]
    console.print(
        f"\nAfter [bold]{seconds:.0f} s[/] the players average [bold]{number(snapshot.return_mean)}[/] over "
        f"{EPISODES} episodes (goal {goal:g}). They sent {number(snapshot.stats.steps)} steps in "
        f"{snapshot.episodes} episodes; {len(snapshot.versions)} versions were published."
    )
    if best:
        console.print(f"Mean return in play: {', '.join(best)}", highlight=False)
    if data is not None:
        console.print(f"Everything is in {data}: `sparring up --data {data}` goes on from here.")
