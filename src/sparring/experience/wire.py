"""Bytes ↔ fragments. Msgpack is the wire; JSON rows are accepted for a first `curl` and for engines without msgpack.

Nothing here trusts its input: sizes are bounded before memory is taken, and every failure is an InputError.
"""

import time
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import msgspec

from sparring.errors import InputError
from sparring.experience.fragment import Columns, Fragment, new_id, pack
from sparring.experience.validate import MAX_NAME, MAX_STEPS
from sparring.games.spec import Box, Game, column, constrained

gzip: ModuleType
try:  # the same bytes, made ten times as fast
    from isal import isal_zlib as gzip
except ImportError:  # a game that only plays goes without
    gzip = zlib

__all__ = ["JsonFragment", "TooLarge", "array", "compress", "decode", "decode_json", "decompress", "encode"]
__all__ += ["encode_one", "split", "unknown_fields"]

NUMBER = Box(())  # rewards and log-probabilities: one float32 a step
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Fragment])
_splitter = msgspec.msgpack.Decoder(list[msgspec.Raw])


class TooLarge(InputError):
    """More bytes than the receiver takes."""


# For JSON Schema; what they say is checked by `validate`. (Not all that is no control character is printable.)
_COLUMN = constrained(minItems=1, maxItems=MAX_STEPS, items={"type": ["number", "boolean", "array", "object"]})
_OBS = constrained(minItems=2, maxItems=MAX_STEPS + 1, items={"type": ["number", "boolean", "array", "object"]})
_NUMBERS = constrained(minItems=1, maxItems=MAX_STEPS)
_TEXT = constrained(minLength=1, maxLength=MAX_NAME, pattern=r"^[^\u0000-\u001f\u007f]+$")
_COUNT = constrained(minimum=0, maximum=(1 << 53) - 1)
_Name = Annotated[str, _TEXT]


class JsonFragment(msgspec.Struct, frozen=True):
    """A fragment as rows: what a person writes by hand. `id`, `episode` and `time` may be left out. There is one
    observation more than actions and rewards; `model` and `version` go together."""

    player: _Name
    obs: Annotated[list[Any], _OBS]
    action: Annotated[list[Any], _COLUMN]
    reward: Annotated[list[float], _NUMBERS]
    schema: str
    id: _Name | None = None
    episode: _Name | None = None
    start: Annotated[int, _COUNT] = 0
    time: float | None = None
    terminated: bool = False
    truncated: bool = False
    log_prob: Annotated[list[float], _NUMBERS] | None = None
    model: _Name | None = None
    version: Annotated[int, _COUNT] | None = None


_json_decoder = msgspec.json.Decoder(list[JsonFragment])
MAX_UNKNOWN = 20  # names that are told


def _strict(kind: type[msgspec.Struct]) -> Any:
    """A list of what has the same fields, whatever is in them, and no others."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
    return list[msgspec.defstruct(f"Strict{kind.__name__}", fields, forbid_unknown_fields=True)]  # type: ignore[misc]


_Keys = dict[str, msgspec.Raw]
# By whether it is JSON: who notices an unknown field, who finds out which, and the known ones.
_FIELDS: dict[bool, tuple[Any, Any, tuple[str, ...]]] = {
    False: (msgspec.msgpack.Decoder(_strict(Fragment)), msgspec.msgpack.Decoder(_Keys), Fragment.__struct_fields__),
    True: (msgspec.json.Decoder(_strict(JsonFragment)), msgspec.json.Decoder(_Keys), JsonFragment.__struct_fields__),
}
_rows: dict[bool, Any] = {
    False: msgspec.msgpack.Decoder(list[msgspec.Raw]),
    True: msgspec.json.Decoder(list[msgspec.Raw]),
}
LOOKED_AT = 50  # fragments of an upload whose fields are named …
MAX_FIELDS, MAX_ROW = 64, 64 << 10  # … if they have no more fields (in JSON: bytes) than this: the sender chooses them


def unknown_fields(body: bytes, *, json: bool = False) -> list[str]:
    """The fields that we skip in a body that `decode` (or `decode_json`) takes: a newer version's, or misspelt."""
    strict, keys, known = _FIELDS[json]
    try:
        strict.decode(body)
    except (msgspec.ValidationError, UnicodeDecodeError):
        names: set[str] = set()
        for row in _rows[json].decode(body)[:LOOKED_AT]:
            try:
                names |= keys.decode(row).keys() - set(known) if _is_short(memoryview(row), json) else set()
            except UnicodeDecodeError:
                names.add("?")  # its name is not text
        return sorted(names)[:MAX_UNKNOWN]
    return []


def _is_short(row: memoryview, json: bool) -> bool:
    """Whether a row has few fields; msgpack says it in the row's first bytes."""
    if json:
        return len(row) <= MAX_ROW
    fields = {0xDE: row[1:3], 0xDF: row[1:5]}.get(row[0])
    return fields is None or int.from_bytes(fields, "big") <= MAX_FIELDS


def encode(fragments: list[Fragment]) -> bytes:
    return _encoder.encode(fragments)


def encode_one(fragment: Fragment) -> bytes:
    """For `array`."""
    return _encoder.encode(fragment)


def split(body: bytes) -> list[bytes]:
    """What `array` joined: the bytes of each fragment, also of what we do not know in them. For a body that `decode`
    takes."""
    return [bytes(raw) for raw in _splitter.decode(body)]


def decode(body: bytes) -> list[Fragment]:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the body is not a msgpack list of fragments: {error}") from error


def decode_json(body: bytes, game: Game, most: int | None = None) -> list[Fragment | str]:
    """Each row-wise fragment as columns, or the reason why it cannot be one. TooLarge when there are more than `most`,
    before any column is made."""
    try:
        rows = _json_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the body is not a JSON list of fragments: {error}") from error
    if most is not None and len(rows) > most:
        raise TooLarge(f"{len(rows)} fragments in one request, at most {most} are allowed: send several")
    return [_from_rows(row, game) for row in rows]


def _misfit(row: JsonFragment) -> str | None:
    """In the words of rows: `validate`, which sees columns, would speak of bytes."""
    steps = len(row.reward)
    if len(row.obs) != steps + 1:
        need = f"{_count(steps, 'reward')} need {steps + 1}: the one after the last step, too"
        return f"obs has {_count(len(row.obs), 'observation')}, {need}"
    if len(row.action) != steps:
        return f"action has {_count(len(row.action), 'action')}, {_count(steps, 'reward')} need {steps}"
    if row.log_prob is not None and len(row.log_prob) != steps:
        return f"log_prob has {_count(len(row.log_prob), 'number')}, {_count(steps, 'reward')} need {steps}"
    return None


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _from_rows(row: JsonFragment, game: Game) -> Fragment | str:
    parts: dict[str, Any] = {}
    for name, space in (("obs", game.observation), ("action", game.action)):
        try:
            parts[name] = column(space, getattr(row, name))
        except (ValueError, TypeError, OverflowError) as error:
            return f"{name}: {error}"
    if row.reward and (why := _misfit(row)) is not None:  # `validate` says what is wrong with no steps
        return why
    now = time.time()
    name = new_id(now) if row.id is None else row.id
    fragment = pack(
        game,
        Columns(
            reward=column(NUMBER, row.reward),
            log_prob=None if row.log_prob is None else column(NUMBER, row.log_prob),
            **parts,
        ),
        id=name,
        player=row.player,
        episode=name if row.episode is None else row.episode,  # the same again when the fragment is sent again
        start=row.start,
        time=now if row.time is None else row.time,
        terminated=row.terminated,
        truncated=row.truncated,
        model=row.model,
        version=row.version,
    )
    return msgspec.structs.replace(fragment, schema=row.schema)


def array(encoded: Sequence[bytes | memoryview]) -> bytes:
    """A MessagePack array of values that are encoded already, each for itself."""
    return b"".join([b"\xdd", len(encoded).to_bytes(4, "big"), *encoded])  # 0xdd: its length in 4 bytes


def compress(body: bytes) -> bytes:
    """With gzip, quickly."""
    return gzip.compress(body, level=1, wbits=16 + zlib.MAX_WBITS)  # 16: with gzip's header and checksum


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a Content-Encoding, never making more than `limit` bytes, however small the body is."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise InputError(f"Content-Encoding {encoding!r} is not supported: use gzip, deflate or none")
    inflater = gzip.decompressobj(16 + zlib.MAX_WBITS) if encoding == "gzip" else zlib.decompressobj()
    try:
        data = inflater.decompress(body, limit + 1)
    except (zlib.error, gzip.error) as error:
        raise InputError(f"the body is not valid {encoding}: {error}") from error
    if len(data) > limit:
        raise TooLarge(f"the body is larger than {limit} bytes when decompressed")
    if not inflater.eof:
        raise InputError(f"the {encoding} body is cut short")
    if inflater.unused_data:
        raise InputError(f"the body goes on after the end of its {encoding} data: send one piece")
    return data
