"""A bucket's head: how far the bucket is committed, and whether it is closed.

Each head is a partition of its own and changes by lightweight transactions only. Its owner raises `steps` if the head
is as the owner left it; anybody may close it, and from then on it is as it is for ever. So who wants to know whether
something in a bucket will ever be committed closes the bucket and knows. This holds whatever clocks say and however
long a process was away: a commit that comes after the closing is not applied.
"""

from collections.abc import Mapping

import msgspec

from sparring.store.cassandra.keyspace import Keyspace
from sparring.store.cassandra.rows import groups
from sparring.store.protocol import StoreBusy

__all__ = ["BucketHead", "advance", "close", "read"]

AT_ONCE = 100  # heads in one question
ATTEMPTS = 20  # to close a head that its owner raises meanwhile


class BucketHead(msgspec.Struct, array_like=True, frozen=True):
    """How far a bucket was read, or is filled."""

    day: int
    steps: int = 0
    fragments: int = 0
    bytes: int = 0
    closed: bool = False


def read(keyspace: Keyspace, game: str, days: Mapping[int, int]) -> dict[int, BucketHead]:
    """Of these buckets, by number; `days` are theirs. One that has no head yet is empty and open."""
    heads = {number: BucketHead(day) for number, day in days.items()}
    asked = [keyspace.start("heads", game, numbers) for numbers in groups(days, AT_ONCE, lambda _: 1)]
    for rows in keyspace.wait(asked):
        heads |= {number: BucketHead(days[number], *head) for number, *head in rows}
    return heads


def advance(keyspace: Keyspace, game: str, number: int, old: BucketHead, new: BucketHead) -> bool:
    """Whether the head was the old one, and now is the new one. A head is not there before it first changes."""
    was = (old.steps, False) if old.steps else (None, None)
    values = (new.steps, new.fragments, new.bytes, new.closed, game, number, *was)
    return bool(keyspace.applied("advance", *values)[0])


def close(keyspace: Keyspace, game: str, number: int, head: BucketHead) -> BucketHead:
    """The last head. What it says is in the same write as the closing, so nobody sees one without the other."""
    for _ in range(ATTEMPTS):
        closed = msgspec.structs.replace(head, closed=True)
        if head.closed or advance(keyspace, game, number, head, closed):
            return closed
        head = read(keyspace, game, {number: head.day})[number]
    raise StoreBusy(f"bucket {number} of {game} grows faster than it can be closed: try again in a second")
