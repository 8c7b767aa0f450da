"""Stores and a registry's backend as somebody else would write them: `outside_store:Filed?path=…` and the like."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from sparring.registry.backends import Backend, Conflict, Found
from sparring.store.memory import MemoryStore
from sparring.store.sqlite import SqliteStore


class Shared(MemoryStore):
    """In memory; the same name is the same store."""

    all: ClassVar[dict[str, "Shared"]] = {}

    def __new__(cls, *, name: str, readonly: bool) -> "Shared":
        return cls.all.setdefault(name, super().__new__(cls))

    def __init__(self, *, name: str, readonly: bool) -> None:
        if not hasattr(self, "name"):
            super().__init__()
            self.name = name


class Filed(SqliteStore):
    """On disk, below a path, so that another process sees the same."""

    def __init__(self, *, path: str, readonly: bool) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        super().__init__(Path(path) / "outside.db", readonly=readonly)


class Half:
    def register(self, game: object) -> None:
        pass


class Folder(Backend):
    """A registry's place as somebody else would write it: plain files."""

    def __init__(self, *, root: str) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return f"the folder {self.root}"

    def get(self, path: str) -> Found | None:
        try:
            data = (self.root / path).read_bytes()
        except FileNotFoundError:
            return None
        return Found(data, str(hash(data)))

    def put(self, path: str, data: bytes, headers: Mapping[str, str], *, absent: bool = False, tag: str = "") -> None:
        found = self.get(path)
        if (absent and found is not None) or (tag and (found is None or found.tag != tag)):
            raise Conflict(path)
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).with_suffix(".part").write_bytes(data)
        (self.root / path).with_suffix(".part").replace(self.root / path)

    def list(self, folder: str) -> Iterator[str]:
        found = (path for path in sorted((self.root / folder).rglob("*")) if path.is_file())
        yield from (str(path.relative_to(self.root)) for path in found)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self.root / path).unlink(missing_ok=True)


class Away(Folder):
    def get(self, path: str) -> Found | None:
        raise ConnectionError("no route to host")
