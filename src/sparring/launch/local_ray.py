"""A Ray of our own on this machine, which ends with this process. Another process starts it, without JAX: Ray forks its
parts with Python in between (`preexec_fn`), and such a fork of a process in which JAX has threads may deadlock."""

import atexit
import json
import signal
import subprocess
import sys
import tempfile
from typing import Any

from sparring.errors import SparringError
from sparring.launch.head import within

__all__ = ["start", "stop"]

PATIENCE = 120.0  # seconds for Ray to start: it has shorter limits of its own
ENDING = 20.0  # seconds for it to end
_keeper: subprocess.Popen[str] | None = None


def start(**options: Any) -> str:
    """Its address; `options` as of `ray.init`. There is one at a time."""
    global _keeper
    stop()
    atexit.register(stop)
    with tempfile.TemporaryFile("w+") as errors:
        _keeper = subprocess.Popen(
            [sys.executable, "-m", "sparring.launch.local_ray", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            return within(PATIENCE, lambda: _address(_keeper))
        except (TimeoutError, EOFError) as error:
            stop()
            errors.seek(0)
            said = errors.read().strip().splitlines() or [str(error)]
            raise SparringError(
                f"Ray does not start on this machine: {said[-1]}\nA machine that is very busy may be too slow for it; "
                "what its parts said is in /tmp/ray/session_latest/logs"
            ) from error


def _address(keeper: Any) -> str:
    for line in keeper.stdout:
        if line.startswith("address "):  # Ray says other things, too
            return str(line.split()[1])
    raise EOFError(f"it ended with exit code {keeper.wait()}")


def stop() -> None:
    """The Ray that `start` started, if there is one."""
    global _keeper
    keeper, _keeper = _keeper, None
    if keeper is None:
        return
    import ray

    ray.shutdown()  # while it is there: it would look for it
    assert keeper.stdin is not None
    keeper.stdin.close()
    try:
        keeper.wait(ENDING)
    except subprocess.TimeoutExpired:
        keeper.kill()  # Ray's parts end with it: the kernel sees to that
        keeper.wait()
    assert keeper.stdout is not None
    keeper.stdout.close()


# In the process that keeps it


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the learner's to handle, also where they go to the whole group
        signal.signal(number, signal.SIG_IGN)
    import ray

    # Without this word Ray joins whatever cluster this machine was last part of, gone or not.
    ray.init("local", include_dashboard=False, log_to_driver=False, **json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray took it
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()  # until the learner is gone, or done
    ray.shutdown()


if __name__ == "__main__":
    main()
