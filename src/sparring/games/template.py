"""The file that `sparring init` writes: a declaration to fill in, and every space explained by an example."""

import json
from typing import Any

import msgspec

from sparring.games.catalog import declare
from sparring.games.spec import HELP, Box, Dict, Discrete, MultiDiscrete, Space

__all__ = ["EXPLAINED", "template"]

EXPLAINED: tuple[tuple[str, Space], ...] = (
    ("discrete: one of n whole numbers, from 0 on (or from `start`)", Discrete(5)),
    ("multi_discrete: several such choices at once, here three ways to move and fire or not", MultiDiscrete((3, 2))),
    ("box: numbers of one shape within bounds; without low and high any finite number", Box((2,), low=-1.0, high=1.0)),
    ("box, a list of bounds: each number has its own", Box((2,), low=(0.0, -3.0), high=(1.0, 3.0))),
    ("box, an image: uint8, height, width, channels", Box((84, 84, 3), "uint8")),
    ("box, flags: bool, 0 or 1 each", Box((4,), "bool")),
    (
        "dict: several parts by name, for observations only; pad what varies in number, and say which rows are used",
        Dict({"me": Box((3,)), "enemies": Box((8, 3)), "enemies_used": Box((8,), "bool"), "weapon": Discrete(4)}),
    ),
)
NOTE = "Examples of all spaces, for you: nothing reads this part, delete it when you like. More in docs/games.md"


def template(name: str) -> bytes:
    """A declaration of a game of that name, with examples of all spaces under `help`, which readers skip.

    :raises ValueError: it is no name.
    """
    game = declare(name)
    assert isinstance(game.observation, Dict)
    fields = _block({part: _short(space) for part, space in game.observation.fields.items()}, "      ")
    shown = _block({"": NOTE, **{words: _short(space) for words, space in EXPLAINED}}, "    ")
    return (
        f'{{\n  "name": {json.dumps(name)},\n'
        f'  "observation": {{\n    "type": "dict",\n    "fields": {fields}\n  }},\n'
        f'  "action": {json.dumps(_short(game.action))},\n'
        f'  "players": 1,\n  "{HELP}": {shown}\n}}'
    ).encode()


def _block(rows: dict[str, Any], indent: str) -> str:
    """A JSON object, a line each."""
    lines = [f"{indent}{json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent[2:]}}}"


def _short(space: Space) -> dict[str, Any]:
    """Without what may be left out."""
    written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(space))
    if isinstance(space, Dict):
        return {**written, "fields": {name: _short(part) for name, part in space.fields.items()}}
    defaults = {"dtype": "float32", "low": None, "high": None, "start": 0}
    return {key: value for key, value in written.items() if key not in defaults or value != defaults[key]}
