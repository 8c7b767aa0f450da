"""This machine's part of a Ray cluster: thin over `ray start`."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from sparring.errors import InputError, SparringError
from sparring.launch import load_ray

__all__ = ["require_same_version", "start", "stop"]

MARK = "SPARRING_CLUSTER"  # in the environment of all that `start` started: the cluster's token; `stop` looks for it


def start(*words: str, token: Path) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {MARK: str(token)})
    said = (done.stdout + done.stderr).strip()
    if "Version mismatch" in said:
        raise InputError(f"this machine cannot join: {said[said.index('Version mismatch') :]}\nInstall the same")
    if done.returncode:
        raise SparringError(f"ray start failed:\n{said[-2000:]}")


def require_same_version(address: str) -> None:
    from sparring.experiment import Resources

    cluster = load_ray()
    cluster.connect(Resources(address=address))
    cluster.disconnect()


def stop(token: Path) -> int:
    """By the mark and the network: other Rays of this machine, and of its containers, are not ours to stop."""
    import psutil

    ours, heads = [], set()
    for process in psutil.process_iter():
        try:
            here = os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net")
            if here and process.environ().get(MARK) == str(token):
                heads |= {word for word in process.cmdline() if word.startswith("--gcs_server_port=")}
                process.terminate()
                ours.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
            continue
    _, alive = psutil.wait_procs(ours, timeout=10)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=10)
    _forget(heads)
    return len(ours)


def _forget(heads: set[str]) -> None:
    """Ray notes the address of the head that was started last, for `auto`: it is gone, if it was one of these."""
    from ray._common.utils import get_ray_address_file

    note = Path(get_ray_address_file(None))
    with contextlib.suppress(FileNotFoundError):
        if f"--gcs_server_port={note.read_text().strip().rpartition(':')[2]}" in heads:
            note.unlink()
