"""Published versions straight from a public registry: a bucket that anybody may GET from. Nothing here judges what is
read: `bots.py` does."""

import hashlib

from sparring.client.transports.base import Unavailable
from sparring.client.transports.http import Answer, HttpConnection
from sparring.errors import InputError
from sparring.registry.ab import AbTests
from sparring.registry.manifest import CANDIDATE, STABLE, Manifest, Pointer, Serving

__all__ = ["BucketModels"]


class BucketModels:
    """Plain GETs, without credentials and without a server of ours."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self._bucket = HttpConnection(url, timeout)
        self.url = self._bucket.url  # without a login

    def latest(self, game: str, model: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        found = self._pointer(game, model, STABLE, etag)
        if isinstance(found, Unavailable):
            if etag is None:
                raise found
            return None
        return None if found is None else (self._whole(game, model, found[0]), found[1])

    def serving(self, game: str, model: str, etag: str | None) -> tuple[Serving, str | None] | None:
        """The tag is the two files' tags, one after the other."""
        known = (etag or "\n").split("\n")
        found = []
        for alias, tag in zip((STABLE, CANDIDATE), known, strict=True):
            found.append(self._pointer(game, model, alias, tag))
        changed = [not (pointer is None or isinstance(pointer, Unavailable)) for pointer in found]
        if not any(changed):
            if not etag and isinstance(found[0], Unavailable):  # there is neither
                raise found[0]
            return None
        for i, alias in enumerate((STABLE, CANDIDATE)):
            if not changed[i] and known[i]:  # one is as it was, the other is not
                found[i] = self._pointer(game, model, alias)
        stable, candidate = (None if isinstance(pointer, Unavailable) else pointer for pointer in found)
        tags = "\n".join((pointer[1] or "") if pointer else "" for pointer in (stable, candidate))
        serving = Serving(None if stable is None else self._whole(game, model, stable[0]))
        if candidate is not None and candidate[0].version is not None and candidate[0].share > 0:
            serving = Serving(serving.stable, self._whole(game, model, candidate[0]), candidate[0].share)
        return serving, tags

    def alias(self, game: str, model: str, alias: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        found = self._pointer(game, model, alias, etag)
        if found is None or isinstance(found, Unavailable):
            if etag is None:
                raise InputError(f"{self._bucket.url} has no alias {alias!r} of {game}'s {model!r}")
            return None
        return self._whole(game, model, found[0]), found[1]

    def ab(self, game: str, etag: str | None) -> tuple[AbTests, str | None] | None:
        answer = self._changing("games", game, "ab.json", etag=etag)
        if answer is None or isinstance(answer, Unavailable):
            return AbTests(), None
        return None if answer.status == 304 else (answer.decode(AbTests), answer.headers.get("etag"))

    def _pointer(
        self, game: str, model: str, alias: str, etag: str | None = None
    ) -> tuple[Pointer, str | None] | Unavailable | None:
        """None: it is as it was, or there is none, as with an error."""
        path = ("latest.json",) if alias == STABLE else ("aliases", f"{alias}.json")
        answer = self._changing("games", game, "models", model, *path, etag=etag)
        if answer is None or isinstance(answer, Unavailable):
            return answer
        return None if answer.status == 304 else (answer.decode(Pointer), answer.headers.get("etag"))

    def _changing(self, *path: str, etag: str | None) -> Answer | Unavailable | None:
        """A file that may change. None: there is none; to a stranger S3 says that with a 403, whose error is given
        back, for the callers whose file should be there."""
        try:
            return self._get(*path, headers={"If-None-Match": etag} if etag else {})
        except Unavailable as error:
            if error.status != 403:
                raise
            return error

    def _whole(self, game: str, model: str, pointer: Pointer) -> Manifest:
        if pointer.version is None:
            raise InputError(f"the alias of {game}'s {model!r} was removed")
        text = self._get(*_version(game, model, pointer.version), "manifest.json")
        if text is None or hashlib.sha256(text.body).hexdigest() != pointer.sha256:
            raise Unavailable(f"{self._bucket.url} has no whole version {pointer.version} of {game}'s {model!r}")
        return text.decode(Manifest)

    def manifest(self, game: str, model: str, version: int) -> Manifest:
        answer = self._get(*_version(game, model, version), "manifest.json")
        if answer is None:
            raise InputError(f"{self._bucket.url} has no version {version} of {game}'s {model!r}")
        return answer.decode(Manifest)

    def file(self, manifest: Manifest, name: str, limit: int) -> bytes:
        path = _version(manifest.game.name, manifest.model, manifest.version)
        answer = self._get(*path, name, limit=limit)
        if answer is None:
            raise InputError(f"{self._bucket.url}/{'/'.join(path)} has no {name}")
        return answer.body

    def close(self) -> None:
        self._bucket.close()

    def _get(self, *path: str, headers: dict[str, str] | None = None, limit: int = 1 << 20) -> Answer | None:
        answer = self._bucket.fetch("GET", *path, headers=headers, limit=limit)
        if answer.status in (200, 304):
            return answer
        if answer.status == 404:
            return None
        why = f"{self._bucket.url} answered {answer.status} for {'/'.join(path)}"
        if answer.status == 403:  # so S3 says to strangers, too, that there is no such key
            why += ": nothing is published there yet, or it is not public (`sparring registry init ADDRESS --public`)"
        raise Unavailable(why, status=answer.status)


def _version(game: str, model: str, version: int) -> tuple[str, ...]:
    return "games", game, "models", model, str(version)
