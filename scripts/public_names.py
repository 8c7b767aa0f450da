"""For the API reference: a package's `__all__`, where names are loaded when they are first asked for (`__getattr__`).

Griffe, which reads the source for mkdocstrings, runs nothing, so it sees no such names. This extension asks the package
itself where each of them is defined. Modules among the names are left to `::: module` on the page."""

import importlib
from types import ModuleType
from typing import Any

import griffe

__all__ = ["PublicNames"]


class PublicNames(griffe.Extension):
    def __init__(self, packages: list[str]) -> None:
        super().__init__()
        self._packages = packages

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        if mod.path not in self._packages:
            return
        package = importlib.import_module(mod.path)
        mod.exports = list(getattr(package, "__all__", []))
        for name in map(str, mod.exports):
            if name not in mod.members and not isinstance(found := getattr(package, name), ModuleType):
                mod.set_member(name, griffe.Alias(name, _home(found, f"{mod.path}.{name}")))


def _home(found: Any, name: str) -> str:
    try:
        return f"{found.__module__}.{found.__qualname__}"
    except AttributeError:
        raise TypeError(
            f"{name} is no class or function, and does not know where it is defined: import it under"
            " `if TYPE_CHECKING:` as well"
        ) from None
