"""Where a registry's files are: a directory, a bucket, or a place of anybody's. `Registry` knows the layout, a backend
only paths and bytes. One from outside is a subclass of `Backend`, named as `my_module:MyBackend?option=value`."""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, from_url

from sparring import files, plugins
from sparring.aws.s3 import S3Bucket
from sparring.errors import InputError

__all__ = ["BACKENDS", "S3", "Backend", "Conflict", "Directory", "Found", "ObjectStore", "open_backend"]

BACKENDS = {"s3": "sparring.registry.backends:S3"}  # scheme → class; other URLs are obstore's


class Conflict(Exception):
    """The condition of a `put` does not hold: the file is there already, or is another one by now."""


class Found(NamedTuple):
    """A file: its content, and a mark that is another one whenever the file was changed."""

    data: bytes
    tag: str


class Backend(ABC):
    """Files by path, with `/` between folders. Safe to share between threads. What fails raises OSError or an error of
    the backend's own; the registry reports it in a line."""

    def __str__(self) -> str:
        """How messages name it; best its address."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def check(self) -> None:
        """Before work that would end here. InputError: the address or the rights are wrong."""
        return

    @abstractmethod
    def get(self, path: str) -> Found | None:
        """A file; None where there is none."""

    @abstractmethod
    def put(self, path: str, data: bytes, headers: Mapping[str, str], *, absent: bool = False, tag: str = "") -> None:
        """Writes a file, whole or not at all; durable when it returns, or after `sync`.

        :param path: The file.
        :param data: Its content.
        :param headers: Content-Type and Cache-Control, for readers over HTTP.
        :param absent: Only where there is no such file; of several at once, one succeeds.
        :param tag: Only where the file is still the one that `get` found with this mark.
        :raises Conflict: the condition does not hold.
        """

    @abstractmethod
    def list(self, folder: str) -> Iterator[str]:
        """Paths of all files below a folder."""

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None:
        """Removes files, in this order. One that is not there is no error."""

    def folders(self, folder: str) -> set[str]:
        """Names of the folders in a folder."""
        rest = (path.removeprefix(f"{folder}/") for path in self.list(folder))
        return {path.partition("/")[0] for path in rest if "/" in path}

    def alone(self, folder: str) -> AbstractContextManager[Any]:
        """Publishers take turns where `put` with a `tag` is no single step."""
        return nullcontext()

    def sync(self, folder: str, *names: str) -> None:
        """Files of a folder, and the names that lead to them, onto the disk; nothing where `put` does that."""
        return


class ObjectStore(Backend):
    """Any of obstore's: its conditional writes are single steps, and durable when they return."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store: Any = from_url(url)  # obstore's stores share functions, not a type

    def __str__(self) -> str:
        return self.url

    def get(self, path: str) -> Found | None:
        try:
            found = obstore.get(self.store, path)
            return Found(bytes(found.bytes()), found.meta["e_tag"] or "")
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes, headers: Mapping[str, str], *, absent: bool = False, tag: str = "") -> None:
        mode: Any = "create" if absent else {"e_tag": tag} if tag else "overwrite"
        try:
            obstore.put(self.store, path, data, mode=mode, attributes=dict(headers) or None)
        except (AlreadyExistsError, PreconditionError) as error:
            raise Conflict(path) from error

    def list(self, folder: str) -> Iterator[str]:
        for batch in obstore.list(self.store, folder):
            yield from (entry["path"] for entry in batch)

    def folders(self, folder: str) -> set[str]:
        found = obstore.list_with_delimiter(self.store, folder)["common_prefixes"]
        return {path.rpartition("/")[2] for path in found}

    def delete(self, paths: Sequence[str]) -> None:
        obstore.delete(self.store, [*paths])


class S3(ObjectStore):
    """s3://BUCKET/PREFIX?region=…"""

    def __init__(self, url: str) -> None:
        self.url, self.bucket = url, S3Bucket.parse(url)
        self.store = self.bucket.store()

    def __str__(self) -> str:
        return str(self.bucket)

    def check(self) -> None:
        self.bucket.check()


class Directory(ObjectStore):
    """A directory has no conditional write but the first: publishers take turns. obstore never calls fsync: we do."""

    def __init__(self, path: Path) -> None:
        self.root = path.absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = LocalStore(self.root)

    def __str__(self) -> str:
        return str(self.root)

    def put(self, path: str, data: bytes, headers: Mapping[str, str], *, absent: bool = False, tag: str = "") -> None:
        super().put(path, data, {}, absent=absent)  # it keeps no such things as `headers`

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self.root / path).unlink(missing_ok=True)
        for folder in {(self.root / path).parent for path in paths if not path.endswith("/latest.json")}:
            with suppress(OSError):  # not empty: somebody is just publishing into it, or its number is claimed
                folder.rmdir()

    def alone(self, folder: str) -> AbstractContextManager[Any]:
        return files.locked(self.root / folder, wait=True)

    def sync(self, folder: str, *names: str) -> None:
        place = self.root / folder
        ways = [place, *itertools.takewhile(lambda path: path != self.root, place.parents), self.root]
        files.sync(*(place / name for name in names), *ways)


def open_backend(location: str) -> Backend:
    """The backend at a location.

    :param location: A directory, s3://BUCKET/PREFIX?region=…, another URL that obstore knows, or
        `module:Class?option=value` from outside, made with its options as keyword arguments.
    :raises InputError: there can be none.
    """
    try:
        if (outside := plugins.parse_outside(location)) is not None:
            return plugins.make("registry backend", *outside, kind_of=Backend)
        if "://" not in location:
            return Directory(Path(location))
        scheme = location.partition("://")[0]
        found: type[ObjectStore] = plugins.find("registry", scheme, BACKENDS) if scheme in BACKENDS else ObjectStore
        return found(location)
    except (BaseError, ValueError, OSError) as error:
        raise InputError(f"no registry can be at {location}: {line(error)}") from error


def line(error: Exception) -> str:
    """Of obstore's pages: the end of the first line, and what S3 calls it."""
    words = str(error).partition("\n")[0]
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    if "Error performing" in words:
        words = words.rpartition(" - ")[2].removesuffix(': <?xml version="1.0" encoding="UTF-8"?>')
    return f"{words} ({code[1]})" if code else words
