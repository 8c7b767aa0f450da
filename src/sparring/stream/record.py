"""What a stream's record holds: a line of JSON and an upload's body. The line is the list of the declarations of the
games in it. The body is as `POST /v1/games/GAME/fragments` takes it: a msgpack list of fragments, gzipped or not.

A record needs nothing but itself to be understood: whoever reads it can register its games.
"""

import functools
from collections.abc import Iterable, Sequence

import msgspec

from sparring.errors import InputError
from sparring.experience import Fragment, wire
from sparring.games import Game

__all__ = ["MAX_RECORD", "decode", "encode", "halves"]

MAX_RECORD = (1 << 20) - 256  # bytes of a stream's record unless it was made for more, less its key
MAX_DECODED = 64 << 20
MAX_HEAD = 1 << 18  # bytes of the declarations in a record: one takes twenty times that in memory, and they are kept
GZIP = b"\x1f\x8b"  # no msgpack list begins so
_games = msgspec.json.Decoder(list[Game])


def declaration(game: Game) -> bytes:
    return msgspec.json.encode(game)


def encode(declarations: Iterable[bytes], fragments: Sequence[bytes], compress: bool = False) -> bytes:
    """From declarations and fragments that are encoded already, each for itself."""
    body = wire.array(fragments)
    if compress:
        body = wire.compress(body)
    return b"[" + b",".join(declarations) + b"]\n" + body


def decode(record: bytes) -> tuple[dict[str, Game], list[Fragment]]:
    """The games by name, and the fragments: decoded, not checked. Raises InputError."""
    head, line, body = record.partition(b"\n")
    if not line or head[:1] != b"[":
        raise InputError("the record does not begin with a line of game declarations")
    body = wire.decompress(body, "gzip" if body.startswith(GZIP) else "", MAX_DECODED)
    if len(head) > MAX_HEAD:
        raise InputError(f"the record's game declarations have {len(head)} bytes, at most {MAX_HEAD} are allowed")
    return _parsed(head), wire.decode(body)


@functools.lru_cache(maxsize=256)
def _parsed(head: bytes) -> dict[str, Game]:
    try:
        return {game.name: game for game in _games.decode(head)}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the record's game declarations cannot be read: {error}") from error


def halves(game: Game, f: Fragment) -> tuple[Fragment, Fragment]:
    """A fragment of several steps as two. Their ids follow from its own, so that sending it again stores it once."""
    at = f.steps // 2
    obs, action = game.observation.element.itemsize * at, game.action.element.itemsize * at
    drawn = (None, None) if f.log_prob is None else (f.log_prob[: 4 * at], f.log_prob[4 * at :])
    first = msgspec.structs.replace(
        f,
        id=f"{f.id}.0",
        steps=at,
        obs=f.obs[: obs + game.observation.element.itemsize],
        action=f.action[:action],
        reward=f.reward[: 4 * at],
        log_prob=drawn[0],
        terminated=False,
        truncated=False,
    )
    second = msgspec.structs.replace(
        f,
        id=f"{f.id}.1",
        start=f.start + at,
        steps=f.steps - at,
        obs=f.obs[obs:],
        action=f.action[action:],
        reward=f.reward[4 * at :],
        log_prob=drawn[1],
    )
    return first, second
