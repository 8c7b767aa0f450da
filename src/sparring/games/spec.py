"""What a game is: its spaces, its players and the hash of its spaces (`schema`).

A space knows its NumPy element type, so one step of any observation or action is one element of an array: a flat Dict
is a packed structured type. A column of T steps is therefore always one buffer, whatever the game.
"""

import difflib
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import index
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from sparring.errors import InputError
from sparring.games import mistakes

__all__ = ["Action", "Box", "Dict", "Discrete", "Game", "MultiDiscrete", "Part", "Space", "written"]

Array = np.ndarray[Any, np.dtype[Any]]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
DTYPES = ("float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
MAX_STEP_BYTES = 4 << 20
NUMBERS = (int, float, np.integer, np.floating, np.bool_)
MAX_COLUMN_BYTES = 64 << 20  # of rows that are Python lists
MAX_PLAYERS = 10_000
HELP = "help"  # a key of a declaration that nobody reads: words and examples for who fills it in
ORIGIN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.\-]*://[A-Za-z0-9.\-_\[\]:]+")  # of web pages
MAX_ORIGIN, MAX_ORIGINS = 200, 20
ENV = re.compile(r"[^\x00-\x1f\x7f]{0,1000}")  # it is logged, and shown in terminals
MAX_DIMENSIONS = 16  # NumPy stops at 64, and batches add some


def constrained(**schema: Any) -> msgspec.Meta:
    """What JSON Schema shall say of a field whose check is ours, because it says more when it fails."""
    return msgspec.Meta(extra_json_schema=schema)


def check_env(env: str) -> None:
    if not ENV.fullmatch(env):
        raise ValueError("env must be at most 1000 characters, and no control characters")


class Box(msgspec.Struct, frozen=True, tag="box", tag_field="type", dict=True, forbid_unknown_fields=True):
    """Numbers of one shape.

    :param shape: Lengths of its dimensions.
    :param dtype: NumPy's name of their type.
    :param low: The lower bound: one for all, a list in row-major order, or none.
    :param high: The upper bound, likewise.
    """

    shape: Annotated[
        tuple[Annotated[int, constrained(minimum=1, maximum=MAX_STEP_BYTES)], ...], constrained(maxItems=MAX_DIMENSIONS)
    ]
    dtype: Annotated[str, constrained(enum=DTYPES)] = "float32"
    low: float | tuple[float, ...] | None = None
    high: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(f"shape has {len(self.shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
        # Written in Python, a bound may be 1 where JSON says 1.0: equal spaces must have equal schemas.
        force_setattr(self, "shape", tuple(index(n) for n in self.shape))
        force_setattr(self, "low", _plain(self.low))
        force_setattr(self, "high", _plain(self.high))
        if any(n < 1 for n in self.shape):
            raise ValueError(f"shape {self.shape} has a dimension below 1")
        size = math.prod(self.shape)  # NumPy's product would wrap around at 2^64
        if size * np.dtype(self.dtype).itemsize > MAX_STEP_BYTES:
            raise ValueError(f"one element of shape {self.shape} is larger than {MAX_STEP_BYTES >> 20} MiB")
        for name, bound in (("low", self.low), ("high", self.high)):
            if isinstance(bound, tuple) and len(bound) != size:
                raise ValueError(f"{name} has {len(bound)} values, the shape {self.shape} needs {size}")
            if bound is not None and not np.isfinite(bound).all():
                raise ValueError(f"{name} must be finite: leave it out where there is no bound")
        low, high = self.bounds
        if low is not None and high is not None and (low > high).any():
            raise ValueError("low is above high")

    @cached_property
    def element(self) -> np.dtype[Any]:
        return np.dtype((np.dtype(self.dtype).newbyteorder("<"), self.shape))

    @cached_property
    def bounds(self) -> tuple[Array | None, Array | None]:
        """Arrays of `shape` in float64 (exact for every dtype's bounds we meet), or none where there is no bound."""

        def full(bound: float | tuple[float, ...] | None) -> Array | None:
            if bound is None:
                return None
            return np.broadcast_to(
                np.reshape(np.asarray(bound, np.float64), self.shape if isinstance(bound, tuple) else ()), self.shape
            )

        return full(self.low), full(self.high)

    @property
    def is_image(self) -> bool:
        """uint8 with height and width: networks convolve it and divide it by 255."""
        return self.dtype == "uint8" and len(self.shape) == 3

    @cached_property
    def _limits(self) -> tuple[Array | None, Array | None]:
        """`bounds` in the elements' own precision: the float32 nearest to 0.1 is above 0.1, and still within it."""
        if not self.dtype.startswith("float"):
            return self.bounds

        def rounded(bound: Array | None) -> Array | None:
            with np.errstate(over="ignore"):  # beyond float32 there is no bound
                return None if bound is None else bound.astype(self.dtype)

        low, high = self.bounds
        return rounded(low), rounded(high)

    def problem(self, column: Array) -> str | None:
        """Why these elements are not in the space, or None.

        :param column: The elements.
        """
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            return "has NaN or infinite values"
        if column.dtype.kind == "b" and (column.view(np.uint8) > 1).any():
            return "has bytes other than 0 and 1"
        low, high = self._limits
        if low is not None and (wrong := column < low).any():
            return f"is below the space's lower bound ({_first(column, wrong)} < {_first(low, wrong)})"
        if high is not None and (wrong := column > high).any():
            return f"is above the space's upper bound ({_first(column, wrong)} > {_first(high, wrong)})"
        return None


class Discrete(msgspec.Struct, frozen=True, tag="discrete", tag_field="type", forbid_unknown_fields=True):
    """One of several whole numbers.

    :param n: How many there are.
    :param start: The first of them.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    start: Annotated[int, msgspec.Meta(ge=-(1 << 30), le=1 << 30)] = 0

    element: ClassVar[np.dtype[Any]] = np.dtype("<i4")

    def __post_init__(self) -> None:
        force_setattr(self, "n", index(self.n))  # Gymnasium's are NumPy's, which do not go into JSON
        force_setattr(self, "start", index(self.start))

    def problem(self, column: Array) -> str | None:
        """Why these elements are not in the space, or None.

        :param column: The elements.
        """
        if column.size and (column.min() < self.start or column.max() >= self.start + self.n):
            return f"is outside {self.start}..{self.start + self.n - 1}"
        return None


class MultiDiscrete(
    msgspec.Struct, frozen=True, tag="multi_discrete", tag_field="type", dict=True, forbid_unknown_fields=True
):
    """Several choices at once, each of whole numbers from 0 on.

    :param nvec: How many numbers each choice has.
    """

    nvec: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 20)], ...], msgspec.Meta(min_length=1, max_length=4096)
    ]

    def __post_init__(self) -> None:
        force_setattr(self, "nvec", tuple(index(n) for n in self.nvec))

    @cached_property
    def element(self) -> np.dtype[Any]:
        return np.dtype((np.dtype("<i4"), (len(self.nvec),)))

    def problem(self, column: Array) -> str | None:
        """Why these elements are not in the space, or None.

        :param column: The elements.
        """
        if column.size and ((column < 0).any() or (column >= np.asarray(self.nvec)).any()):
            return f"is outside 0..{tuple(n - 1 for n in self.nvec)}"
        return None


class Dict(msgspec.Struct, frozen=True, tag="dict", tag_field="type", dict=True, forbid_unknown_fields=True):
    """Named parts, one level deep. Order in memory is by name, so two clients cannot disagree.

    :param fields: Each part's space, by its name.
    """

    fields: Annotated[
        dict[str, Box | Discrete | MultiDiscrete],
        constrained(minProperties=1, propertyNames={"pattern": f"^{FIELD.pattern}$"}),
    ]

    def __post_init__(self) -> None:
        if not self.fields:
            raise ValueError("a dict space needs at least one field")
        for name in self.fields:
            if not FIELD.fullmatch(name):
                raise ValueError(f"field name {name[:100]!r}: use letters, digits and underscores, at most 64")
        if self.element.itemsize > MAX_STEP_BYTES:
            raise ValueError(f"one element of all fields is larger than {MAX_STEP_BYTES >> 20} MiB")

    @cached_property
    def element(self) -> np.dtype[Any]:
        return np.dtype([(name, self.fields[name].element) for name in sorted(self.fields)])

    def problem(self, column: Array) -> str | None:
        """Why these elements are not in the space, or None.

        :param column: The elements.
        """
        for name, space in self.fields.items():
            if (why := space.problem(column[name])) is not None:
                return f"{name} {why}"
        return None


Part = Box | Discrete | MultiDiscrete  # a field of a Dict, or a whole space
Action = Part
Space = Part | Dict


def written(space: Space, most: int = 1000) -> str:
    """As it stands in a declaration, for people; cut where it is longer."""
    text = msgspec.json.encode(space).decode()
    return text if len(text) <= most else f"{text[: most - 1]}…"


def column(space: Space, rows: Sequence[Any] | Array) -> Array:
    """Steps as a game or JSON gives them → one array of the space's element type. Raises ValueError on a misfit.

    Rows that are no arrays are strangers' input. NumPy gets them only as numbers in lists of exactly the space's shape.
    So it never takes more memory than what they hold. (Of strings it would make each as wide as the longest.)
    """
    if not isinstance(rows, np.ndarray) and len(rows) * space.element.itemsize > MAX_COLUMN_BYTES:
        raise ValueError(f"{len(rows)} rows take more than {MAX_COLUMN_BYTES >> 20} MiB: send fewer at once")
    if isinstance(space, Dict):
        _check_fields(space, rows)
        parts = {name: _part(name, part, [row[name] for row in rows]) for name, part in space.fields.items()}
        out = np.empty(len(rows), space.element)
        for name, values in parts.items():
            out[name] = values
        return out
    shape, base = space.element.shape, space.element.base
    array = rows if isinstance(rows, np.ndarray) else _numbers(rows, shape)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"expected numbers of shape {shape}, got {array.dtype} values or ragged rows")
    if array.shape != (len(rows), *shape):
        raise ValueError(f"expected {len(rows)} × {shape}, got {array.shape}")
    if array.dtype == base:
        return array
    with np.errstate(invalid="ignore", over="ignore"):  # whole numbers are compared below; a float becomes infinite
        out = array.astype(base)
    if base.kind in "iub" and not (out == array).all():
        whole = array.dtype.kind != "f" or (array == np.trunc(array)).all()
        raise ValueError(f"values do not fit {base}" if whole else "expected whole numbers")
    return out


def _part(name: str, space: Space, rows: Sequence[Any]) -> Array:
    try:
        return column(space, rows)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _numbers(rows: Sequence[Any], shape: tuple[int, ...]) -> Array:
    """An array of `len(rows)` × `shape`. Each level of lists is checked, and made one longer list, before the next."""
    level: Sequence[Any] = rows
    for i in range(len(shape) + 1):
        kinds = {*map(type, level)}
        if kinds == {np.ndarray}:  # a game's own, not a stranger's
            if any(part.shape != shape[i:] for part in level):
                raise ValueError(f"expected rows of shape {shape}, got arrays of another")
            return np.stack(level).reshape(len(rows), *shape)
        if i == len(shape):
            break
        if not kinds <= {list, tuple} or any(n != shape[i] for n in {*map(len, level)}):
            raise ValueError(f"expected rows of shape {shape}, got {_found(level)} where a list of {shape[i]} belongs")
        level = list(chain.from_iterable(level))
    if not all(issubclass(kind, NUMBERS) for kind in kinds):
        raise ValueError(f"expected numbers{f' in rows of shape {shape}' if shape else ''}, got {_found(level)}")
    return np.array(level).reshape(len(rows), *shape)


def _found(values: Sequence[Any]) -> str:
    """What these are, for a message."""
    return " and ".join(sorted({mistakes.kind(value) for value in values})[:5])


def _check_fields(space: Dict, rows: Sequence[Any] | Array) -> None:
    for i, row in enumerate(rows):
        if isinstance(row, Mapping) and row.keys() == space.fields.keys():
            continue
        if not isinstance(row, Mapping):
            names = ", ".join(sorted(space.fields))
            raise ValueError(f"row {i} is {mistakes.kind(row)}, an object with the fields {names} belongs there")
        missing, unknown = sorted(space.fields.keys() - row.keys()), sorted(map(str, row.keys() - space.fields.keys()))
        lacks = [f"lacks {', '.join(missing)}"] if missing else []
        has = [f"has {', '.join(unknown)[:200]}, which the space has not"] if unknown else []
        raise ValueError(f"row {i} {' and '.join(lacks + has)}")


def _same_origin(ours: str, theirs: str) -> bool:
    """Browsers leave out the port that everybody uses."""
    one, other = (each.lower() for each in (ours, theirs))
    for scheme, port in (("https://", ":443"), ("http://", ":80")):
        if one.startswith(scheme):
            one = one.removesuffix(port)
    return one == other


def _plain(bound: float | Sequence[float] | None) -> float | tuple[float, ...] | None:
    """As JSON gives it back. Adding 0.0 makes -0.0 the 0.0 that it equals."""
    if bound is None:
        return None
    return tuple(float(b) + 0.0 for b in bound) if isinstance(bound, Sequence | np.ndarray) else float(bound) + 0.0


def _first(values: Array, wrong: Array) -> str:
    """The value at the first wrong place; nine digits tell two float32 apart."""
    return f"{float(np.broadcast_to(values, wrong.shape).flat[wrong.argmax()]):.9g}"


Keyword = bool | int | float | str | None | tuple[bool | int | float | str | None, ...]
FLOAT_BOX = {
    "if": {"properties": {"type": {"const": "box"}}},
    "then": {"properties": {"dtype": {"enum": ["float32", "float64"]}}},
}


def is_finite(value: Keyword) -> bool:
    """JSON, in which games are kept and sent, would make null of NaN and of an infinity."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(math.isfinite(part) for part in parts if isinstance(part, float))


class Game(msgspec.Struct, frozen=True, dict=True):
    """An observation space, an action space, a number of players.

    :param name: Its name on servers, in stores and registries.
    :param observation: What players see.
    :param action: What they can do.
    :param players: How many play at once.
    :param env: The Gymnasium id behind it, or none for a declared game, which we cannot simulate.
    :param env_kwargs: What its simulator is set to: keywords of its constructor, as `{"gravity": -5}`.
    :param reward: The least and the most that one step may be worth, where the default (`experience.validate`) does
        not fit.
    :param origins: Web pages that may ask for its bots and send its play, as `https://my.game`, or `*` for any.
    """

    name: Annotated[str, constrained(pattern=f"^{NAME.pattern}$")]
    observation: Space
    action: Annotated[Action, constrained(**FLOAT_BOX)]
    players: Annotated[int, constrained(minimum=1, maximum=MAX_PLAYERS)] = 1
    env: Annotated[str, constrained(pattern=f"^{ENV.pattern}$")] | None = None
    # Unset is not written: older readers do not know it.
    reward: tuple[float, float] | msgspec.UnsetType | None = msgspec.UNSET
    origins: (
        Annotated[
            tuple[Annotated[str, constrained(pattern=f"^({ORIGIN.pattern})$", maxLength=MAX_ORIGIN)], ...],
            constrained(maxItems=MAX_ORIGINS),
        ]
        | msgspec.UnsetType
        | None
    ) = msgspec.UNSET
    env_kwargs: dict[str, Keyword] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"game name {self.name[:200]!r}: use letters, digits, '.', '_' and '-', at most 100, no slash"
            )
        if not 1 <= self.players <= MAX_PLAYERS:
            raise ValueError(f"players must be 1..{MAX_PLAYERS}")
        if self.env is not None:
            check_env(self.env)
        if self.reward and not -math.inf < self.reward[0] <= self.reward[1] < math.inf:
            raise ValueError(f"reward {list(self.reward)}: give two finite numbers, the least and the most of one step")
        if isinstance(self.action, Box) and not self.action.dtype.startswith("float"):
            raise ValueError("a Box action must be float32 or float64; for whole numbers use multi_discrete")
        if wrong := next((key for key, value in (self.env_kwargs or {}).items() if not is_finite(value)), None):
            raise ValueError(f"env_kwargs: {wrong[:100]} has to be finite, JSON has no NaN and no infinity")
        if self.origins:
            self._check_origins(self.origins)

    def _check_origins(self, origins: tuple[str, ...]) -> None:
        for origin in origins:
            if len(origin) > MAX_ORIGIN or not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"origins: {origin[:MAX_ORIGIN]!r} is no origin of web pages: write it like https://my.game or "
                    "http://localhost:8000, without a path, or * for any"
                )
        if len(origins) > MAX_ORIGINS:
            raise ValueError(f"origins has {len(origins)} entries, at most {MAX_ORIGINS} are allowed")

    def allows(self, origin: str) -> bool:
        """Whether web pages of this origin may play the game.

        :param origin: As browsers send it.
        """
        return any(each == "*" or _same_origin(each, origin) for each in self.origins or ())

    @cached_property
    def schema(self) -> str:
        """Hash of the spaces: two clients with the same schema produce interchangeable data."""
        canonical = msgspec.json.encode([self.observation, self.action, self.players], order="sorted")
        return hashlib.blake2b(canonical, digest_size=8).hexdigest()

    @classmethod
    def declared(cls, text: bytes | str) -> "Game":
        """As a person wrote it: a field that we do not know is a mistake, and reported."""
        game = cls.from_json(text)
        unknown = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).keys() - {*cls.__struct_fields__, HELP}
        if unknown:
            name = min(unknown)
            near = difflib.get_close_matches(name, cls.__struct_fields__, 1)
            hint = f", did you mean {near[0]!r}?" if near else f": there are {', '.join(cls.__struct_fields__)}"
            raise InputError(f"not a game declaration: unknown field `{name}`{hint}")
        return game

    @classmethod
    def from_json(cls, text: bytes | str) -> "Game":
        """A game from its declaration, as another process wrote it: fields that we do not know are a newer version's,
        and skipped. (Those of a space are not: its bytes cannot be read without them.)

        :param text: JSON, as `to_json` writes it.
        :raises InputError: it is no declaration.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"not a game declaration: {mistakes.explain(text) or error}") from error

    def to_json(self) -> bytes:
        """The declaration: what a .json file of a game holds."""
        return msgspec.json.format(msgspec.json.encode(self))


# Made while there is one thread: msgspec crashes the process when several threads are the first to decode a type.
msgspec.json.Decoder(Game)
