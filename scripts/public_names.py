"""For the API reference: a package's `__all__`, where names are loaded when they are first asked for (`__getattr__`).

Griffe, which reads the source for mkdocstrings, runs nothing, so it sees no such names. This extension asks the package
itself where each of them is defined. Modules among the names are left to `::: module` on the page.

It also gives each msgspec.Struct the signature that msgspec gives it: its fields."""

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

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if "__init__" in cls.members or not any(str(base).endswith("Struct") for base in cls.bases):
            return
        fields = [m for m in cls.members.values() if isinstance(m, griffe.Attribute) and m.annotation is not None]
        own = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        own += [
            griffe.Parameter(
                field.name,
                annotation=field.annotation,
                kind=griffe.ParameterKind.positional_or_keyword,
                default=field.value,
            )
            for field in fields
            if "property" not in field.labels and "ClassVar" not in str(field.annotation)
        ]
        init = griffe.Function("__init__", lineno=0, endlineno=0, parent=cls, parameters=griffe.Parameters(*own))
        cls.set_member("__init__", init)


def _home(found: Any, name: str) -> str:
    try:
        return f"{found.__module__}.{found.__qualname__}"
    except AttributeError:
        raise TypeError(
            f"{name} is no class or function, and does not know where it is defined: import it under"
            " `if TYPE_CHECKING:` as well"
        ) from None
