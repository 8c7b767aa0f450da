"""The API's operations. Each module here declares its own: `operations(parts)` gives methods, paths, handlers, messages
and errors, from which the application and the OpenAPI document are made. A new route is a new file."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from sparring.gateway.openapi import Operation

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["collect"]


def collect(parts: "Parts") -> list[Operation]:
    """Of all modules here, by the modules' names."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [operation for module in modules for operation in module.operations(parts)]
