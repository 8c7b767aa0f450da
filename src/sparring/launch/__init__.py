"""Where trainings run: the nodes of a Ray cluster, and connections to it."""

import importlib
from typing import Any

from sparring.errors import InputError

__all__ = ["load_ray"]


def load_ray(module: str = "sparring.launch.ray_cluster") -> Any:
    """A module that imports Ray, which is an extra and takes a second to load."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"a cluster needs Ray ({error}): pip install 'sparring[ray]'") from error
