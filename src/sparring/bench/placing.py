"""Where a measurement runs: cores, threads, GPUs. Checked before anything starts."""

import os
import re
from collections.abc import Mapping

from sparring.errors import InputError

__all__ = ["cores_of", "environment", "gpus_here", "parse_affinity", "parse_gpus"]

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")  # NPROC: XLA's


def parse_affinity(text: str) -> tuple[int, ...]:
    """`0,1` or `0-3`: cores of this machine.

    :raises InputError: that is no list of cores, or the machine lacks one.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("--cpu-affinity: this system does not bind processes to cores (Linux does)")
    cores, here = set(cores_of(text)), os.sched_getaffinity(0)
    if not cores <= here:
        lacking, have = (", ".join(str(core) for core in sorted(each)) for each in (cores - here, here))
        raise InputError(f"--cpu-affinity {text}: this machine has no core {lacking}; it has {have}")
    return tuple(sorted(cores))


def cores_of(text: str) -> tuple[int, ...]:
    """As they are written, wherever they may be."""
    cores: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise InputError(f"--cpu-affinity {text}: write numbers of cores, such as --cpu-affinity 0,1 or 0-3")
        cores |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(cores))


def parse_gpus(text: str) -> tuple[int, ...]:
    """`none`, `all` or `both` (all that there are), `0` or `0,1`: as a training's `--gpu` has them.

    :raises InputError: that is neither, or the machine lacks one.
    """
    if text == "none":
        return ()
    count = gpus_here()
    wanted = tuple(range(max(count, 1)))
    if text not in ("all", "both"):
        if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
            raise InputError(f"--gpu {text}: write none, all, both, or numbers of GPUs such as 0 or 0,1")
        wanted = tuple(sorted({int(part) for part in text.split(",")}))
    if wanted[-1] >= count:
        raise InputError(f"--gpu {text}: this machine has {count or 'no'} GPU{'s' * (count != 1)} that JAX can use")
    return wanted


def gpus_here() -> int:
    """That NVIDIA's driver lists; asking JAX would begin to use them."""
    from sparring.training.devices import gpus_here as listed

    return listed() or 0


def environment(gpus: tuple[int, ...] | None, threads: int | None) -> dict[str, str]:
    """Of a child: its GPUs (None: as they are) and threads (None: as many as it likes)."""
    found: Mapping[str, str] = os.environ
    more: dict[str, str] = {}
    if gpus is not None:
        more["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        if not gpus:
            more["JAX_PLATFORMS"] = "cpu"
    if threads is not None:
        more |= dict.fromkeys(THREADS, str(threads))
    return {**found, **more}
