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
from sparring.experience import misfits
from sparring.experience.fragment import Columns, Fragment, new_id, pack
from sparring.experience.validate import MAX_NAME, MAX_STEPS, miscounted
from sparring.games.spec import Box, Game, column, constrained

gzip: ModuleType
try:  # the same bytes, made ten times as fast
    from isal import isal_zlib as gzip
except ImportError:  # a game that only plays goes without
    gzip = zlib

__all__ = ["JsonFragment", "TooLarge", "Unfit", "array", "compress", "decode", "decode_json", "decompress", "encode"]
__all__ += ["encode_one", "from_rows", "parse_json", "split", "unknown_fields", "unknown_note"]

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


class Unfit(str):
    """Why a row is no fragment, with the names that it gave itself."""

    id: str
    player: str

    def __new__(cls, why: str, id: str = "", player: str = "") -> "Unfit":
        made = super().__new__(cls, why)
        made.id, made.player = id, player
        return made


_json_decoder = msgspec.json.Decoder(list[JsonFragment])
MAX_UNKNOWN = 20  # names that are reported


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


def unknown_fields(body: bytes, *, json: bool = False) -> dict[str, int]:
    """The fields that we skip in a body that `decode` (or `decode_json`) takes, each with the number of the first
    fragment that has it: a newer version's, or misspelt."""
    strict, keys, known = _FIELDS[json]
    try:
        strict.decode(body)
    except (msgspec.ValidationError, UnicodeDecodeError):
        names: dict[str, int] = {}
        for i, row in enumerate(_rows[json].decode(body)[:LOOKED_AT]):
            try:
                found = keys.decode(row).keys() - set(known) if _is_short(memoryview(row), json) else ()
            except UnicodeDecodeError:
                found = {"?"}  # its name is not text
            except msgspec.ValidationError:
                continue  # no fragment, which is reported elsewhere
            for name in found:
                names.setdefault(name, i)
        return {name: names[name] for name in sorted(names)[:MAX_UNKNOWN]}
    return {}


def unknown_note(name: str, fragment: int) -> str:
    """About a field of a JSON fragment that we skip, for who wrote it."""
    return (
        f"fragment {fragment} has `{name[:64]}`, which is unknown and not stored{misfits.misspelt(name, JsonFragment)}"
    )


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
        why = next((found for found in _fragments(body, Fragment, False) if isinstance(found, str)), str(error))
        raise InputError(f"the body is not a msgpack list of fragments: {why}") from error


def decode_json(body: bytes, game: Game, most: int | None = None) -> list[Fragment | Unfit]:
    """Each row-wise fragment as columns, or the reason why it cannot be one. TooLarge when there are more than `most`,
    before any column is made."""
    return from_rows(parse_json(body, most), game)


def parse_json(body: bytes, most: int | None = None) -> Sequence[JsonFragment | Unfit]:
    """The fragments as rows, of which `from_rows` makes columns, or why each is none. Raises as `decode_json`."""
    rows: Sequence[JsonFragment | Unfit]
    try:
        rows = _json_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        rows = _fragments(body, JsonFragment, True, most)
        if not any(isinstance(row, str) for row in rows):
            raise InputError(f"the body is not a JSON list of fragments: {_no_list(body) or error}") from error
    _limit(len(rows), most)
    return rows


def from_rows(rows: Sequence[JsonFragment | Unfit], game: Game) -> list[Fragment | Unfit]:
    return [row if isinstance(row, str) else _from_rows(row, game) for row in rows]


def _limit(rows: int, most: int | None) -> None:
    if most is not None and rows > most:
        raise TooLarge(f"{rows} fragments in one request, at most {most} are allowed: send several")


def _fragments(body: bytes, into: type[msgspec.Struct], json: bool, most: int | None = None) -> list[Any]:
    """One by one, in the place of those that are none the reason. Empty when it is no list of anything."""
    try:
        raws = _rows[json].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    _limit(len(raws), most)
    decode = msgspec.json.decode if json else msgspec.msgpack.decode
    explained = 0
    out: list[Any] = []
    for i, raw in enumerate(raws):
        try:
            out.append(decode(raw, type=into))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            explained += 1
            why = _misfit_of(raw, into, json) if explained <= LOOKED_AT else None
            names = [_name_in(raw, field, json) if explained <= LOOKED_AT else "" for field in ("id", "player")]
            out.append(Unfit(f"fragment {i} {why}" if why else f"fragment {i}: {error}", *names))
    return out


def _misfit_of(raw: msgspec.Raw, into: type[msgspec.Struct], json: bool) -> str | None:
    decode = msgspec.json.decode if json else msgspec.msgpack.decode
    if not _is_short(memoryview(raw), json):
        return None
    try:
        return misfits.explain(_FIELDS[json][1].decode(raw), into, decode)
    except msgspec.ValidationError as error:
        return misfits.no_object(error, into)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _name_in(raw: msgspec.Raw, field: str, json: bool) -> str:
    """What a row that is no fragment has there; nothing if it is no name."""
    try:
        if _is_short(memoryview(raw), json):
            decode = msgspec.json.decode if json else msgspec.msgpack.decode
            return decode(_FIELDS[json][1].decode(raw)[field], type=_Name)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # then nobody knows it
    return ""


def _no_list(body: bytes) -> str | None:
    """What a person may have sent in the place of a list."""
    return "it is one object: put it into a list, [{…}]" if body.lstrip()[:1] == b"{" else None


def _misfit(row: JsonFragment) -> str | None:
    """In the words of rows: `validate`, which sees columns, would speak of bytes."""
    counts = {"obs": len(row.obs), "action": len(row.action), "reward": len(row.reward)}
    # What two of them agree on are the steps.
    steps = counts["action"] if counts["obs"] == counts["action"] + 1 else counts["reward"]
    if row.log_prob is not None:
        counts["log_prob"] = len(row.log_prob)
    for name, count in counts.items():
        if count != steps + (name == "obs"):
            return miscounted(name, steps, count)
    return None


def _from_rows(row: JsonFragment, game: Game) -> Fragment | Unfit:
    parts: dict[str, Any] = {}
    for name, space in (("obs", game.observation), ("action", game.action)):
        try:
            parts[name] = column(space, getattr(row, name))
        except (ValueError, TypeError, OverflowError) as error:
            return Unfit(f"{name}: {error}", row.id or "", row.player)
    if (row.reward or row.action) and (why := _misfit(row)) is not None:  # `validate` says what is wrong with no steps
        return Unfit(why, row.id or "", row.player)
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
