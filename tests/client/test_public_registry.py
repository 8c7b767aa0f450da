"""A public bucket as a stranger reads it: what is not there is answered with 403, and asked for once."""

import hashlib
import json
from typing import Any

import pytest

from sparring.client.public_registry import BucketModels
from sparring.client.transports.base import Unavailable
from sparring.client.transports.http import Answer
from sparring.errors import InputError

MODEL = "games/g/models/bot"
TWO = {"type": "discrete", "n": 2}
GAME = {"name": "g", "observation": TWO, "action": TWO}
MANIFEST = json.dumps(
    {"game": GAME, "model": "bot", "version": 3, "created": 0, "algorithm": "dqn", "files": {}}
).encode()


class Bucket:
    """Files by path; a file's tag is its content."""

    url = "http://bucket"

    def __init__(self, absent: int) -> None:
        self.absent, self.files, self.asked = absent, dict[str, bytes](), list[str]()

    def fetch(self, _: str, *path: str, headers: dict[str, str] | None = None, **__: Any) -> Answer:
        name = "/".join(path)
        self.asked.append(name.removeprefix(f"{MODEL}/"))
        body = self.files.get(name)
        if body is None:
            return Answer(self.absent, {}, b"", self.url)
        tag = hashlib.sha256(body).hexdigest()
        known = (headers or {}).get("If-None-Match") == tag
        return Answer(304 if known else 200, {"etag": tag}, b"" if known else body, self.url)

    def point(self, path: str, **fields: Any) -> None:
        sha256 = hashlib.sha256(MANIFEST).hexdigest()
        pointer = {"version": 3, "sha256": sha256, "since": 0.0, "by": "me", "reason": ""} | fields
        self.files[f"{MODEL}/{path}.json"] = json.dumps(pointer).encode()
        self.files[f"{MODEL}/3/manifest.json"] = MANIFEST


def opened(bucket: Bucket) -> BucketModels:
    models = BucketModels(bucket.url)
    models._bucket = bucket  # type: ignore[assignment]
    return models


def test_where_nothing_is_published_each_file_is_asked_for_once() -> None:
    bucket = Bucket(403)
    models = opened(bucket)
    for ask in (models.latest, models.serving):
        with pytest.raises(Unavailable, match="nothing is published there yet, or it is not public"):
            ask("g", "bot", None)
    assert bucket.asked == ["latest.json", "latest.json", "aliases/candidate.json"]
    with pytest.raises(InputError, match="no alias 'easy'"):
        models.alias("g", "bot", "easy", None)
    found = models.ab("g", None)
    assert found is not None
    assert found[0].running is None
    assert (models.latest("g", "bot", "tag"), models.serving("g", "bot", "tag\n")) == (None, None)  # it was there


def test_a_bucket_that_says_404_is_the_same_without_a_guess() -> None:
    models = opened(Bucket(404))
    assert (models.latest("g", "bot", None), models.serving("g", "bot", None)) == (None, None)


@pytest.mark.parametrize("absent", [403, 404])
def test_stable_and_candidate_come_and_go(absent: int) -> None:
    bucket = Bucket(absent)
    models = opened(bucket)
    bucket.point("aliases/candidate", share=0.5)  # the first version is tried before there is a stable one
    found = models.serving("g", "bot", None)
    assert found is not None
    assert (found[0].stable, found[0].share) == (None, 0.5)
    assert bucket.asked == ["latest.json", "aliases/candidate.json", "3/manifest.json"]
    assert models.serving("g", "bot", found[1]) is None
    bucket.point("latest")
    found = models.serving("g", "bot", found[1])
    assert found is not None
    assert found[0].stable is not None
    assert (found[0].stable.version, found[0].share) == (3, 0.5)
    bucket.point("aliases/candidate", version=None)
    found = models.serving("g", "bot", found[1])
    assert found is not None
    assert found[0].stable is not None
    assert found[0].candidate is None
