"""A connection to a Ray cluster, ours or one at an address. Every connection needs the cluster's token.

Import Ray from here: the token must be set before Ray is imported."""

import logging
import os
import re
import secrets
from pathlib import Path

import sparring
from sparring.errors import InputError, SparringError
from sparring.experiment import Resources
from sparring.files import create
from sparring.launch import local_ray
from sparring.launch.head import require_head


def use_token() -> Path:
    """Token authentication for all of Ray in this process and its children; before Ray is imported. Makes the token if
    there is none: machines of one cluster need the same one."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 is for batch jobs; our learner waits for its workers
    path.parent.mkdir(parents=True, exist_ok=True)
    create(path, secrets.token_hex(32).encode(), 0o600)
    return path


use_token()  # Ray reads this when it is imported

import ray  # noqa: E402
from ray._private.state import available_resources_per_node  # noqa: E402  # Ray has no other way to ask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

__all__ = [
    "LABEL",
    "NodeAffinitySchedulingStrategy",
    "available_resources_per_node",
    "cause",
    "connect",
    "disconnect",
    "ray",
    "require_head",
    "use_token",
]

LABEL = "sparring-version"  # of a node


def connect(resources: Resources) -> None:
    """To the cluster at `address`, or to one of our own on this machine, which ends with this process."""
    if ray.is_initialized():
        return
    if resources.address is None:
        _join("this machine", local_ray.start(num_cpus=resources.cpus))
    else:
        _join(resources.address, require_head(resources.address))
    for node in ray.nodes():
        version = node["Labels"].get(LABEL, sparring.__version__)  # none: not made by `sparring cluster up`
        if node["Alive"] and version != sparring.__version__:
            disconnect()
            raise InputError(
                f"node {node['NodeManagerAddress']} has Sparring {version}, this machine {sparring.__version__}: "
                "install the same"
            )


def disconnect() -> None:
    """From the cluster; one of our own ends."""
    ray.shutdown()
    local_ray.stop()


def _join(address: str, found: str) -> None:
    try:
        ray.init(found, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "Version mismatch" in str(error):
            raise InputError(f"the cluster at {address} is another one: {error}\nInstall the same") from error
        raise SparringError(f"the Ray cluster at {address!r} does not take this process: {error}") from error


def cause(error: Exception) -> str:
    """What a person needs of Ray's errors: the game's own traceback, or how the process ended."""
    return re.sub(r"\x1b\[\d*m", "", str(error)).strip()[-1500:]
