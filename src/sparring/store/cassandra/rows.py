"""What rows of a store on Cassandra hold: blocks of fragments, records of commits, claims of ids."""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from sparring.experience import Fragment, wire

__all__ = [
    "FragmentBlock",
    "FragmentPart",
    "Place",
    "checksum",
    "claims",
    "decode_block",
    "decode_parts",
    "decode_place",
    "groups",
]
__all__ += ["digest", "encode", "encode_block", "locate"]

T = TypeVar("T")

SLOT_BITS = 19  # ids that carry their time: those of 2^19 ms, some nine minutes, share …
SHARDS = 4  # … so many partitions of claims
TIMELESS = 4096  # partitions of all other ids


class FragmentPart(msgspec.Struct, array_like=True, gc=False):
    """A fragment without its columns, as a commit's record keeps it."""

    place: int
    steps: int
    player: str
    episode: str
    start: int
    ended: bool
    ret: float
    size: int
    model: str | None = None
    version: int | None = None


class FragmentBlock(msgspec.Struct, array_like=True, gc=False):
    """A row: neighbours in a bucket, all of one commit. The row's key is the last one's place, or was."""

    places: list[int]
    fragments: list[Fragment]
    claim: bytes = b""  # the place that the commit's claims say; of version 2: each has its own


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a claim says that its fragment will be: in this bucket, after so many steps. The number is the writer's:
    none of its groups says the same twice."""

    game: str
    bucket: int
    after: int
    number: int


encode = msgspec.msgpack.Encoder().encode
decode_place = msgspec.msgpack.Decoder(Place).decode
decode_parts = msgspec.msgpack.Decoder(list[FragmentPart]).decode
decode_block = msgspec.msgpack.Decoder(FragmentBlock).decode


def encode_block(places: Sequence[int], bodies: Sequence[bytes | memoryview], claim: bytes) -> bytes:
    """From fragments that are encoded already, each for itself."""
    return b"\x93" + encode(places) + wire.array(bodies) + encode(claim)  # 0x93: an array of three


def claims(game: str, bucket: int, block: FragmentBlock) -> Iterator[tuple[tuple[int, bytes, bytes, bytes], Fragment]]:
    """A block's fragments, each with the key of its claim. Of those that version 2 stored each says another place."""
    for place, f in zip(block.places, block.fragments, strict=True):
        claim = block.claim or encode(Place(game, bucket, place - f.steps, 0))
        yield (*locate(f.id), claim, digest(f)), f


def checksum(f: Fragment) -> int:
    """Of all but the id and the time: who sends a fragment again may have another clock fill that in."""
    rest = (f.game, f.schema, f.player, f.episode, f.start, f.steps, f.terminated, f.truncated, f.model, f.version)
    found = zlib.crc32(encode((rest, f.log_prob is None)))
    for column in (f.obs, f.action, f.reward, f.log_prob or b""):
        found = zlib.crc32(column, found)
    return found


def digest(f: Fragment) -> bytes:
    """Which player's fragment of this id it is, without saying who. It outlives the fragment: another player who
    chooses the id of an erased one has other play."""
    return hashlib.blake2b(f"{len(f.player)} {f.player} {f.id}".encode(), digest_size=8).digest()


def locate(name: str) -> tuple[int, bytes]:
    """The partition and key of a fragment id's claims: functions of the id alone, so that whoever gets it again looks
    at the same place. An id with its time in it (UUID version 7, in hex) lies beside those of the same minutes."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        key = b""
    if len(key) == 16 and key[6] >> 4 == 7 and key.hex() == name:
        return TIMELESS + (int.from_bytes(key[:6], "big") >> SLOT_BITS) * SHARDS + key[15] % SHARDS, key
    key = hashlib.blake2b(name.encode(), digest_size=24).digest()
    return int.from_bytes(key[:2], "big") % TIMELESS, key


def groups(items: Iterable[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups of at most so much, or of one item that is larger."""
    piece: list[T] = []
    total = 0
    for item in items:
        more = size(item)
        if piece and total + more > limit:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += more
    if piece:
        yield piece
