"""Erasing from Cassandra.

A row is replaced only if it is what was read (a lightweight transaction). Of two who erase from the same row, one has
to read it again: neither brings back what the other took out, however long it was away.

Of each commit that holds something to erase: first the ids are noted as erased, then the fragments go, then the record
forgets those that are no longer there. Who dies half way leaves a record that tells the next one where to go on.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from sparring.experience import Fragment
from sparring.store.cassandra import rows
from sparring.store.cassandra.keyspace import Keyspace
from sparring.store.cassandra.order import GameBuckets
from sparring.store.cassandra.rows import FragmentBlock, decode_block, decode_parts
from sparring.store.cassandra.schema import GAME_TABLES
from sparring.store.protocol import StoreBusy

__all__ = ["Eraser"]

T = TypeVar("T")
ATTEMPTS = 20  # to replace a row that others replace, too
PAGE = 16  # blocks read at once when all are: each may have 8 MiB
END = 1 << 62  # a place after all
_Partition = tuple[str, int, int]
_Commit = tuple[_Partition, int, bytes]  # where its record is, and what that says


class Eraser:
    """Of one game, by its key."""

    def __init__(self, keyspace: Keyspace, game: str) -> None:
        self._keyspace, self._game, self._directory = keyspace, game, GameBuckets(keyspace, game)

    def player(self, player: str) -> int:
        def commits() -> Iterator[_Commit]:
            for bucket, head in self._directory.refresh().items():
                partition = (self._game, head.day, bucket)
                for end, _, record in self._keyspace.run("records", *partition, 0, head.steps):
                    if any(part.player == player for part in decode_parts(record)):
                        yield partition, end, record

        erased = sum(1 for _ in self._erase(commits(), lambda f: f.player == player))
        for writer, slot, who, *_ in self._keyspace.run("quarantined", self._game):
            if who == player:
                self._keyspace.run("release", self._game, writer, slot)
        return erased

    def ids(self, ids: Sequence[str]) -> list[Fragment]:
        """The fragments that had these ids."""
        wanted, buckets = set(ids), self._directory.refresh()

        def commits() -> Iterator[_Commit]:
            for shard, key in {rows.locate(name) for name in wanted}:
                for place in {rows.decode_place(place) for _, place, *_ in self._keyspace.run("claims", shard, [key])}:
                    head = buckets.get(place.bucket)
                    if place.game == self._game and head is not None and head.steps > place.after:
                        partition = (place.game, head.day, place.bucket)
                        for end, _, record in self._keyspace.run("record", *partition, place.after):
                            yield partition, end, record

        return list(self._erase(commits(), lambda f: f.id in wanted))

    def _erase(self, commits: Iterable[_Commit], doomed: Callable[[Fragment], bool]) -> Iterator[Fragment]:
        """What was taken out. The first record is the last to forget: until the mark is made, it tells who comes after
        us that there is one to make."""
        first: tuple[_Commit, set[int]] | None = None
        for commit in commits:
            taken, left = self._take_out(commit, doomed)
            yield from taken
            if all(part.place in left for part in decode_parts(commit[2])):
                continue
            if first is None:
                first = commit, left
            else:
                self._forget(commit, left)
        if first is not None:
            self._keyspace.run("mark erasure", self._game, uuid.uuid4())
            self._forget(*first)
            self._keyspace.run("mark erasure", self._game, uuid.uuid4())

    def _take_out(self, commit: _Commit, doomed: Callable[[Fragment], bool]) -> tuple[list[Fragment], set[int]]:
        """What it took out, and the places of what is left. A block of which nothing is left stays, empty."""
        partition, end, record = commit
        begin = min([part.place - part.steps for part in decode_parts(record)], default=end)

        def without(body: bytes) -> tuple[bytes, FragmentBlock]:
            block = decode_block(body)
            left = [(at, f) for at, f in zip(block.places, block.fragments, strict=True) if not doomed(f)]
            if len(left) == len(block.places):
                return body, block
            claims = rows.claims(partition[0], partition[2], block)
            self._keyspace.write("erase claim", [claim for claim, f in claims if doomed(f)])
            return rows.encode(FragmentBlock([at for at, _ in left], [f for _, f in left], block.claim)), block

        taken: list[Fragment] = []
        left: set[int] = set()
        for place, body in self._keyspace.run("blocks", *partition, begin, end):
            block = self._replace("replace", (*partition, place), body, without)
            taken += filter(doomed, block.fragments)
            left.update(at for at, f in zip(block.places, block.fragments, strict=True) if not doomed(f))
        return taken, left

    def _forget(self, commit: _Commit, left: set[int]) -> None:
        """Lets the record forget the fragments that are not there any more."""
        partition, end, record = commit

        def without(record: bytes) -> tuple[bytes, None]:
            parts = decode_parts(record)
            kept = [part for part in parts if part.place in left]
            return rows.encode(kept) if len(kept) < len(parts) else record, None

        self._replace("replace record", (*partition, end), record, without)

    def _replace(
        self, statement: str, key: tuple[object, ...], old: bytes, change: Callable[[bytes], tuple[bytes, T]]
    ) -> T:
        """A row by what `change` makes of it, which is asked again if others were faster; what it says besides."""
        for _ in range(ATTEMPTS):
            new, said = change(old)
            if new == old:
                return said
            applied, row = self._keyspace.applied(statement, new, *key, old)
            if applied or not row:  # the game was deleted meanwhile
                return said
            old = row[-1]
        raise StoreBusy("others erase from the same fragments: try again in a second")

    def everything(self) -> None:
        """Of a game that is not registered any more. Heads go first, and nothing can be committed after them."""
        for bucket, head in self._directory.refresh().items():
            partition = (self._game, head.day, bucket)
            self._keyspace.run("drop head", self._game, bucket)
            for _, body in self._keyspace.pages("blocks", *partition, 0, END, fetch_size=PAGE):
                claims = rows.claims(self._game, bucket, decode_block(body))
                self._keyspace.write("delete claim", [claim for claim, _ in claims])
            self._keyspace.run("drop blocks", *partition)
            self._keyspace.run("drop records", *partition)
        epoch = 0
        while self._keyspace.run("merged", self._game, epoch, 0, 1):
            self._keyspace.run("drop merged", self._game, epoch)
            epoch += 1
        for table in GAME_TABLES:
            self._keyspace.run(f"drop {table}", self._game)
