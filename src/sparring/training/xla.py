"""How XLA works for us: what it compiled is kept on disk, and small networks get one thread."""

import math
import os
from pathlib import Path

import jax

from sparring.algorithms.protocol import Algorithm
from sparring.networks.spec import torso_shapes

__all__ = ["use_compilation_cache", "use_precision", "use_threads"]

SMALL = 8e6  # multiplications of a layer for one batch below which a second thread only costs


def use_compilation_cache(directory: Path | None = None) -> None:
    """The second start need not compile again. Before anything is compiled: JAX looks only once. Who names a place
    himself (`JAX_COMPILATION_CACHE_DIR`) is not overruled."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # JAX makes these at run time
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sparring" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(directory or home))  # type: ignore[no-untyped-call]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]


def use_precision(precision: str) -> None:
    """See `networks.functions.product`. On GPUs and TPUs JAX has its own ways to be quick with float32."""
    jax.config.update("jax_default_matmul_precision", None if precision == "float32" else precision)  # type: ignore[no-untyped-call]


def use_threads(algorithm: Algorithm, workers: int = 0) -> None:
    """One for a small network: XLA divides every matrix product among its threads, and handing over costs more than a
    small product takes. PPO on CartPole takes 66 ms per update with two threads, 32 with one. One as well where as many
    workers play meanwhile as there are cores. XLA reads NPROC when its CPU client is made, so this comes before the
    first array. A value that you set yourself is not overruled."""
    small = _is_small(algorithm)
    crowded = not algorithm.on_policy and workers >= (os.cpu_count() or 1)
    if small or crowded:
        os.environ.setdefault("NPROC", "1")


def _is_small(algorithm: Algorithm) -> bool:
    """False for a network that is not described by layers: nobody knows what it computes."""
    if algorithm.layers is None:
        return False
    shapes, _ = torso_shapes(algorithm.game.observation, algorithm.layers)
    dense = all(len(shape) <= 2 for shape in shapes.values())
    return dense and algorithm.batch * max((math.prod(shape) for shape in shapes.values()), default=0) < SMALL
