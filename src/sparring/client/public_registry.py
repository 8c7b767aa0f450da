"""Published versions straight from a public registry: a bucket that anybody may GET from. Nothing here judges what is
read: `bots.py` does."""

import hashlib

from sparring.client.transports.base import Unavailable
from sparring.client.transports.http import Answer, HttpConnection
from sparring.errors import InputError
from sparring.registry.manifest import Manifest, Pointer

__all__ = ["BucketModels"]


class BucketModels:
    """Plain GETs, without credentials and without a server of ours."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self._bucket = HttpConnection(url, timeout)
        self.url = self._bucket.url  # without a login

    def latest(self, game: str, model: str, etag: str | None) -> tuple[Manifest, str | None] | None:
        known = {} if etag is None else {"If-None-Match": etag}
        answer = self._get("games", game, "models", model, "latest.json", headers=known)
        if answer is None or answer.status == 304:
            return None
        pointer = answer.decode(Pointer)
        text = self._get(*_version(game, model, pointer.version), "manifest.json")
        if text is None or hashlib.sha256(text.body).hexdigest() != pointer.sha256:
            raise Unavailable(f"{self._bucket.url} has no whole version {pointer.version} of {game}'s {model!r}")
        return text.decode(Manifest), answer.headers.get("etag")

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
