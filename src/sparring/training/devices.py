"""On which devices a learner computes, and on which CPUs a run may be. Chosen before JAX makes its first array: what it
sees then, it takes."""

import os
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from sparring.errors import InputError
from sparring.experiment import Resources

__all__ = ["accelerators", "choose", "gpus_here", "mesh", "use_affinity", "use_memory"]

MEMORY = 0.9  # of a GPU's, that its learners divide
DRIVER = Path("/proc/driver/nvidia/gpus")


def use_affinity(cpus: Iterable[int] | None) -> None:
    """This process and all that it starts from now on run on these CPUs alone."""
    if cpus is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("resources.affinity: this system does not tie processes to CPUs, Linux does")
    asked, found = set(cpus), os.sched_getaffinity(0)
    if missing := sorted(asked - found):
        raise InputError(
            f"resources.affinity names CPU {missing[0]}: this process may use {', '.join(map(str, sorted(found)))}"
        )
    for thread in Path("/proc/self/task").iterdir():  # those that exist already do not follow by themselves
        os.sched_setaffinity(int(thread.name), asked)


def use_memory(share: float | None) -> None:
    """A learner with a part of a GPU takes that part of its memory: JAX takes three quarters, whoever else is on
    it. Who sets JAX's own variable is not overruled."""
    if share is not None and 0 < share < 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{MEMORY * share:.3f}")


def choose(resources: Resources) -> list[jax.Device]:
    """The learner's devices.

    :raises InputError: there are fewer than asked for; the message says what there is.
    """
    asked = resources.gpus
    if asked == ():
        jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]  # or JAX takes the GPU's memory
        found = _first(jax.devices("cpu"), resources)
        jax.config.update("jax_default_device", found[0])  # type: ignore[no-untyped-call]
        return found
    use_memory(resources.learner_gpus)
    if asked is None and resources.gpu is None:
        return _first(jax.devices(), resources)
    if asked is not None:
        here = gpus_here()
        if here is not None and (missing := [number for number in asked if number >= here]):
            raise _none_such(resources, f"GPU {missing[0]}", here)
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, asked)))  # type: ignore[no-untyped-call]
    found = accelerators()
    if not found or (asked is not None and len(found) < len(asked)):
        raise _none_such(resources, f"GPU {', '.join(map(str, asked))}" if asked else "GPUs", len(found))
    found = found[: len(asked)] if asked is not None else found
    jax.config.update("jax_default_device", found[0])  # type: ignore[no-untyped-call]
    return found


def mesh(devices: list[jax.Device]) -> Mesh | None:
    """For several devices, which share every batch; none for one."""
    return Mesh(np.array(devices), ("device",)) if len(devices) > 1 else None


def accelerators() -> list[jax.Device]:
    """What JAX computes on besides CPUs."""
    return [device for device in jax.devices() if device.platform != "cpu"]


def gpus_here() -> int | None:
    """How many NVIDIA GPUs this machine has; none where its driver does not say."""
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else None


def _none_such(resources: Resources, asked: str, there: int) -> InputError:
    what = f"there {'is' if there == 1 else 'are'} {there}" if there else "JAX sees none"
    return InputError(
        f"resources.gpu is {resources.gpu}, which asks for {asked}: {what}. On NVIDIA's: pip install 'sparring[cuda]'; "
        "without a GPU: --gpu none"
    )


def _first(found: list[jax.Device], resources: Resources) -> list[jax.Device]:
    count = resources.devices
    if len(found) < count:
        raise InputError(
            f"resources.devices is {count}, JAX has {len(found)} ({found[0].platform}): lower it. "
            f"To try it out on CPUs: XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return found[:count]
